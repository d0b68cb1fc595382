"""Train a Fourier neural operator: ``python -m train.fno --backend auto``.

The run's folder gets

    config.json        the settings
    metrics.jsonl      a line an epoch, then a line a test set; no times in it
    checkpoints/       the last training state, and the one of the lowest test error
    model.safetensors  the weights after the last epoch, with the normalisers: what
                       models.load and ``python -m train.predict`` take
    samples.npz        test samples to try it on, where the data was made here
    prediction.png     input, truth, prediction and error of some test samples

A run that was stopped, by Ctrl-C or by anything else, goes on with ``--resume`` and
ends with the same weights and the same metrics.jsonl as one that was not. The exit
status is 0 for a finished run, 1 for a loss that is not finite, 2 for a mistake in the
options or the data, 130 for Ctrl-C.
"""

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from jaxops.backend import BackendError, select_backend
from models import FNO
from train import folder as files
from train import losses, metrics, settings
from train.checkpoint import LAST, restore_checkpoint
from train.data import Pairs
from train.datasets import describe, grid_text, load_sets
from train.interrupt import StopRequest
from train.loop import (
    NonFiniteLossError,
    TrainState,
    compile_train_step,
    create_state,
    make_forward,
    make_optimizer,
    make_train_step,
)
from train.normalise import UnitGaussian
from train.report import MetricsWriter, clock
from train.run import PICTURE_ROWS, Run, finish, fit
from train.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    start = time.monotonic()
    folder = None
    with contextlib.ExitStack() as until_the_end:
        try:
            options = settings.parse(arguments)
            folder = choose_folder(options)
            until_the_end.enter_context(files.reserved(folder))
            options = _settle(options, arguments, folder)
            if options.resume and files.is_finished(folder):
                console.print(f"The run in {folder} is finished already.")
                return 0
            run, state, best, log = prepare(options, folder, console)
        except (ValueError, OSError, BackendError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except KeyboardInterrupt:
            print("\nStopped before training began.", file=sys.stderr)
            status = 130
        else:
            return _train(run, state, best, log, console, start)
    if folder is not None:
        files.remove_empty(folder)
    return status


def choose_folder(options: Settings) -> Path:
    """The run's folder, made and writable.

    Without --out it is a fresh one, or, to resume, the newest. With --out it must not
    hold a run, unless --resume or --overwrite says what to do with it.

    Raises:
        ValueError: if it holds a run, or cannot be written.
    """
    name = "darcy" if options.data is None else options.data.stem
    folder = options.out
    if folder is None and options.overwrite:
        raise ValueError("--overwrite needs to be told which run: add --out FOLDER.")
    if folder is None and options.resume:
        folder = files.newest()
        if folder is None:
            raise ValueError(
                f"--resume goes on with the newest run in {files.RUNS}; there is none. "
                "Leave it out to start one, or say which with --out."
            )
    if folder is None:
        files.check_writable(files.RUNS)
        return files.make_fresh(name)
    if options.resume and files.is_run(folder) and not files.has_settings(folder):
        raise ValueError(
            f"To go on, {folder / settings.CONFIG} is needed; it is missing. Put it "
            "back, or start anew with --overwrite."
        )
    if files.is_run(folder) and not (options.resume or options.overwrite):
        state = "a finished run" if files.is_finished(folder) else "a run"
        raise ValueError(
            f"--out must be a folder without a run; {folder} holds {state}. Go on with "
            "it by --resume, replace it by --overwrite, or choose another folder."
        )
    files.check_writable(folder)
    return folder


def prepare(
    options: Settings, folder: Path, console: Console
) -> tuple[Run, TrainState, dict[str, float] | None, MetricsWriter]:
    """Everything up to the first step.

    Returns:
        The run; the state to start from, which is the last checkpoint's when resuming;
        the lowest test error so far, if any; metrics.jsonl, cut back to that state.

    Raises:
        BackendError: if the backend cannot be had.
        ValueError, OSError: if data, settings or checkpoint are not fit for training.
    """
    console.print(f"backend  {select_backend(options.backend)}")
    train, tests = load_sets(options, console)
    console.print(f"data     {train.source}: {describe(train)}")
    run, state = make_run(options, folder, train, tests)
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    modes = grid_text(run.model.n_modes)
    console.print(f"model    FNO, {modes} modes, {num_weights:,} weights")
    best, length = None, 0
    if options.overwrite:
        files.remove_run(folder)
    files.remove_leftovers(folder)
    if options.resume and (folder / LAST).exists():
        state, extra = restore_checkpoint(folder / LAST, state)
        _check_data(run, extra, folder / LAST)
        best, length = extra["best"], int(extra["metrics_length"])
        console.print(f"folder   {folder}, resumed after step {int(state.step)}")
    else:
        new = ", where there is nothing to resume yet" if options.resume else ""
        console.print(f"folder   {folder}{new}")
    log = MetricsWriter(folder / files.METRICS, length)
    settings.write_settings(folder / settings.CONFIG, options)
    return run, state, best, log


def make_run(
    options: Settings, folder: Path, train: Pairs, tests: list[Pairs]
) -> tuple[Run, TrainState]:
    """A run and its fresh state.

    Raises:
        ValueError: if the model's settings do not fit the data.
    """
    normalisers = {
        "input_normaliser": UnitGaussian.fit(train.inputs),
        "target_normaliser": UnitGaussian.fit(train.targets),
    }
    model = FNO(
        **options.model.arguments(len(train.grid)),
        in_channels=train.inputs.shape[-1],
        out_channels=train.targets.shape[-1],
    )
    forward = make_forward(model, *normalisers.values())
    optimizer = make_optimizer(
        options.learning_rate,
        len(train) // options.batch_size * options.epochs,
        options.weight_decay,
        options.warmup,
        options.gradient_clip,
    )
    periodic = options.h1_periodic

    def loss(prediction, target):
        if options.loss == "l2":
            return losses.relative_l2(prediction, target)
        return losses.relative_h1(prediction, target, periodic)

    def test_batch(variables, inputs, targets):
        prediction, _ = forward(variables, inputs)
        norms = metrics.error_norms(prediction, targets, periodic)
        return {"norms": norms, "first": prediction[:PICTURE_ROWS]}

    run = Run(
        options,
        folder,
        train,
        tests,
        model,
        normalisers,
        compile_train_step(make_train_step(forward, optimizer, loss)),
        jax.jit(test_batch),
    )
    return run, create_state(model, optimizer, train.inputs.shape, options.seed)


def _settle(options, arguments, folder):
    """Settings of the run in the folder where it is to go on; paths made absolute."""
    if options.resume and (folder / settings.CONFIG).exists():
        saved = settings.read_settings(folder / settings.CONFIG)
        default = dataclasses.replace(saved, out=folder, resume=False, overwrite=False)
        options = settings.parse(arguments, default)
        settings.check_same(options, saved)
    options.check()
    return options


def _train(run, state, best, log, console, start):
    """From the first step to the last file; returns the exit status."""
    resume = f"python -m train.fno --resume --out {quoted(run.folder)}"
    last = run.folder / LAST
    try:
        with StopRequest() as should_stop:
            state = fit(run, state, best, log, should_stop, console)
            if should_stop():
                console.print(f"Stopped after step {int(state.step)}. To go on:")
                console.print(f"  {resume}")
                return 130
        finish(run, state, log, console)
    except NonFiniteLossError as error:
        print(f"error: {error}", file=sys.stderr)
        if last.exists():
            print(f"The last good state is kept in {last}.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}\nMake room, then go on:\n  {resume}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print(f"Stopped after the last epoch. To go on:\n  {resume}")
        return 130
    data = run.folder / files.SAMPLES
    if run.settings.data is not None:
        data = (run.settings.test or (run.settings.data,))[-1]
    console.print(f"made in {clock(time.monotonic() - start)}:")
    for name, content in (
        (files.MODEL, "the model and its normalisers"),
        (files.PICTURE, "some test samples"),
        (files.METRICS, "loss and errors, epoch by epoch"),
    ):
        console.print(f"  {run.folder / name}  {content}")
    console.print("next:")
    model = quoted(run.folder / files.MODEL)
    console.print(f"  python -m train.predict {model} {quoted(data)}")
    return 0


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _check_data(run, extra, path):
    """Refuse to go on with other data."""
    if extra["data_digest"] != run.data_digest:
        raise ValueError(
            f"The training and test data must be what they were when {path} was "
            "written; they differ. Put them back, or start anew with --overwrite."
        )


if __name__ == "__main__":
    sys.exit(main())
