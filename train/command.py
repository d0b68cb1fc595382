"""A training command: from its arguments to its exit status, whatever is trained.

The run's folder gets

    config.json        the settings
    metrics.jsonl      a line an epoch, then a line a test set; no times in it
    checkpoints/       the last training state, and the one of the lowest test error
    model.safetensors  the weights after the last epoch, and what goes with them
    prediction.png     a picture of what the model does with test data

A run that was stopped, by Ctrl-C or by anything else, goes on with ``--resume`` and
ends with the same weights and the same metrics.jsonl as one that was not. The exit
status is 0 for a finished run, 1 for a loss that is not finite or a full disk, 2 for a
mistake in the options or the data, 130 for Ctrl-C.
"""

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from jaxops.backend import BackendError, select_backend
from train import folder as files
from train import settings
from train.checkpoint import LAST, restore_checkpoint
from train.interrupt import StopRequest
from train.loop import NonFiniteLossError, TrainState
from train.report import MetricsWriter, clock
from train.run import Run, fit
from train.settings import TrainSettings


@dataclass(frozen=True)
class Command:
    """What is different from command to command.

    Attributes:
        module: the command is ``python -m MODULE``.
        settings: the type of its settings.
        name: of a run, from its settings: that of its folder in runs/.
        prepare: reads the data, makes the model and its fresh state, and tells of them;
            ValueError and OSError are told as mistakes.
    """

    module: str
    settings: type[TrainSettings]
    name: Callable[[TrainSettings], str]
    prepare: Callable[[TrainSettings, Path, Console], tuple[Run, TrainState]]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Train as the command line says; returns the exit status."""
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        start = time.monotonic()
        folder = None
        with contextlib.ExitStack() as until_the_end:
            try:
                options = settings.parse(self.settings, self.module, arguments)
                folder = self._choose_folder(options)
                until_the_end.enter_context(files.reserved(folder))
                options = self._settle(options, arguments, folder)
                if options.resume and files.is_finished(folder):
                    console.print(f"The run in {folder} is finished already.")
                    return 0
                console.print(f"backend  {select_backend(options.backend)}")
                run, state = self.prepare(options, folder, console)
                state, best, log = _restore(run, state, console)
            except (ValueError, OSError, BackendError) as error:
                print(f"error: {error}", file=sys.stderr)
                status = 2
            except KeyboardInterrupt:
                print("\nStopped before training began.", file=sys.stderr)
                status = 130
            else:
                return self._train(run, state, best, log, console, start)
        if folder is not None:
            files.remove_empty(folder)
        return status

    def _choose_folder(self, options: TrainSettings) -> Path:
        """The run's folder, made and writable.

        Without --out it is a fresh one, or, to resume, the newest. With --out it must
        not hold a run, unless --resume or --overwrite says what to do with it.

        Raises:
            ValueError: if it holds a run, or cannot be written.
        """
        folder = options.out
        if folder is None and options.overwrite:
            raise ValueError(
                "--overwrite needs to be told which run: add --out FOLDER."
            )
        if folder is None and options.resume:
            folder = files.newest()
            if folder is None:
                raise ValueError(
                    f"--resume goes on with the newest run in {files.RUNS}; there is "
                    "none. Leave it out to start one, or say which with --out."
                )
        if folder is None:
            files.check_writable(files.RUNS)
            return files.make_fresh(self.name(options))
        if options.resume and files.is_run(folder) and not files.has_settings(folder):
            raise ValueError(
                f"To go on, {folder / settings.CONFIG} is needed; it is missing. Put "
                "it back, or start anew with --overwrite."
            )
        if files.is_run(folder) and not (options.resume or options.overwrite):
            state = "a finished run" if files.is_finished(folder) else "a run"
            raise ValueError(
                f"--out must be a folder without a run; {folder} holds {state}. Go on "
                "with it by --resume, replace it by --overwrite, or choose another "
                "folder."
            )
        files.check_writable(folder)
        return folder

    def _settle(self, options, arguments, folder):
        """Settings of the run in the folder where it is to go on."""
        config = folder / settings.CONFIG
        if options.resume and config.exists():
            saved = settings.read_settings(config, self.settings)
            default = dataclasses.replace(
                saved, out=folder, resume=False, overwrite=False
            )
            options = settings.parse(self.settings, self.module, arguments, default)
            settings.check_same(options, saved)
        options.check()
        return options

    def _train(self, run, state, best, log, console, start):
        """From the first step to the last file; returns the exit status."""
        resume = f"python -m {self.module} --resume --out {quoted(run.folder)}"
        last = run.folder / LAST
        try:
            with StopRequest() as should_stop:
                state = fit(run, state, best, log, should_stop, console)
                if should_stop():
                    console.print(f"Stopped after step {int(state.step)}. To go on:")
                    console.print(f"  {resume}")
                    return 130
            outcome = run.finish(run, state, log, console)
        except NonFiniteLossError as error:
            print(f"error: {error}", file=sys.stderr)
            if last.exists():
                print(f"The last good state is kept in {last}.", file=sys.stderr)
            return 1
        except OSError as error:
            print(
                f"error: {error}\nMake room, then go on:\n  {resume}", file=sys.stderr
            )
            return 1
        except KeyboardInterrupt:
            console.print(f"Stopped after the last epoch. To go on:\n  {resume}")
            return 130
        console.print(f"made in {clock(time.monotonic() - start)}:")
        for path, content in outcome.files.items():
            console.print(f"  {path}  {content}")
        if outcome.next:
            console.print("next:")
        for command in outcome.next:
            console.print(f"  {command}")
        return 0


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _restore(
    run: Run, state: TrainState, console: Console
) -> tuple[TrainState, dict[str, float] | None, MetricsWriter]:
    """The state to start from, which is the last checkpoint's when resuming; the lowest
    test error so far, if any; metrics.jsonl, cut back to that state."""
    options, folder, best, length = run.settings, run.folder, None, 0
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(f"weights  {num_weights:,}")
    if options.overwrite:
        files.remove_run(folder)
    files.remove_leftovers(folder)
    last = folder / LAST
    if options.resume and last.exists():
        state, extra = restore_checkpoint(last, state)
        if extra["data_digest"] != run.data_digest:
            raise ValueError(
                f"The training and test data must be what they were when {last} was "
                "written; they differ. Put them back, or start anew with --overwrite."
            )
        best, length = extra["best"], int(extra["metrics_length"])
        console.print(f"folder   {folder}, resumed after step {int(state.step)}")
    else:
        new = ", where there is nothing to resume yet" if options.resume else ""
        console.print(f"folder   {folder}{new}")
    log = MetricsWriter(folder / files.METRICS, length)
    settings.write_settings(folder / settings.CONFIG, options)
    return state, best, log
