"""A training run: from a prepared state to the last file, whatever the model."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from models import save
from models.atomic import replace_file
from train import folder as files
from train import metrics, settings
from train.checkpoint import BEST, LAST, save_checkpoint
from train.data import Pairs
from train.datasets import grid_text
from train.loop import NonFiniteLossError, TrainState, train_epochs
from train.normalise import UnitGaussian
from train.picture import Row, draw
from train.report import MetricsWriter, ProgressReport, error_table
from train.settings import Settings

CHECKPOINT_SECONDS = 600.0  # longer epochs get checkpoints in between
PICTURE_ROWS = 2  # of the first test set; one of each other
MAX_ROWS = 5


@dataclass(frozen=True)
class Run:
    """What a run is made of, all set before the first step.

    Attributes:
        settings, folder: of the run.
        train, tests: the sets; the first test set is followed during training.
        model: the linen module.
        normalisers: fitted on the training set, by the names they are saved under.
        train_step: see `train.loop.compile_train_step`.
        test_batch: jitted ``(variables, inputs, targets)`` to the error norms of a
            batch and its first predictions.
    """

    settings: Settings
    folder: Path
    train: Pairs
    tests: list[Pairs]
    model: Any
    normalisers: dict[str, UnitGaussian]
    train_step: Callable
    test_batch: Callable

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return len(self.train) // self.settings.batch_size

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of all that is trained and tested on."""
        digest = hashlib.sha256()
        for pairs in (self.train, *self.tests):
            for array in (pairs.inputs, pairs.targets):
                digest.update(f"{array.shape} {array.dtype}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def extra(self) -> dict[str, Any]:
        """What is saved beside the weights."""
        values = {name: value.to_dict() for name, value in self.normalisers.items()}
        values["data_digest"] = self.data_digest
        return {**values, "settings": json.loads(settings.to_json(self.settings))}


def fit(
    run: Run,
    state: TrainState,
    best: dict[str, float] | None,
    log: MetricsWriter,
    should_stop: Callable[[], bool],
    console: Console,
) -> TrainState:
    """Train to the last epoch, or to where ``should_stop`` says so; returns the state.

    After each epoch a line goes to metrics.jsonl, then a checkpoint is written, so that
    the lines of a checkpoint are always there.

    Raises:
        NonFiniteLossError: if the loss or a test error is not finite.
    """
    options = run.settings
    report = ProgressReport(
        options.epochs, run.batches, options.batch_size, int(state.step), console
    )
    passes = train_epochs(
        state,
        run.train_step,
        run.train.inputs,
        run.train.targets,
        batch_size=options.batch_size,
        epochs=options.epochs,
        seed=options.seed,
        on_step=report.step,
        should_stop=should_stop,
        pause_seconds=CHECKPOINT_SECONDS,
    )
    with report:
        for state, epoch, _, complete, loss in passes:
            if complete:
                errors = {}
                if epoch % options.test_every == 0 or epoch == options.epochs:
                    errors, _, _ = test(run, state, run.tests[0])
                report.epoch(epoch, errors)
                step = int(state.step)
                log.write(event="epoch", epoch=epoch, step=step, loss=loss, **errors)
                if errors and _is_better(errors, best):
                    best = {"epoch": epoch, "relative_l2": errors["relative_l2"]}
                    _checkpoint(run, BEST, state, best, log)
            _checkpoint(run, LAST, state, best, log)
            if should_stop():
                break
    return state


def test(
    run: Run, state: TrainState, pairs: Pairs
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Errors over a test set, in physical units.

    Returns:
        The mean and largest errors; the first predictions; their relative L2 errors.

    Raises:
        NonFiniteLossError: if an error is not finite.
    """
    # Finer grids in smaller batches, so that they take no more memory than training.
    ratio = math.prod(run.train.grid) / math.prod(pairs.grid)
    batch_size = max(1, int(run.settings.batch_size * min(1.0, ratio)))

    def function(inputs, targets):
        return run.test_batch(state.variables, inputs, targets)

    fields = (pairs.inputs, pairs.targets)
    results = list(metrics.batchwise(function, fields, batch_size))
    errors = metrics.sample_errors([result["norms"] for result in results])
    summary = metrics.summary(errors)
    if not all(math.isfinite(value) for value in summary.values()):
        raise NonFiniteLossError(
            f"The test error on {grid_text(pairs.grid)} ({pairs.source}) is not finite "
            f"after step {int(state.step)}. Lower --learning-rate."
        )
    first = np.concatenate([result["first"] for result in results[:PICTURE_ROWS]])
    first = first[:PICTURE_ROWS]
    return summary, first, errors.l2[: len(first)]


def finish(run: Run, state: TrainState, log: MetricsWriter, console: Console) -> None:
    """Test on every set; write the model, the samples and, last of all, the picture."""
    tests, rows = {}, []
    for pairs in run.tests:
        errors, predictions, of_first = test(run, state, pairs)
        is_zero_shot = pairs.grid != run.train.grid
        grid = grid_text(pairs.grid)
        name = f"{grid} (zero-shot)" if is_zero_shot else grid
        name = name if name not in tests else f"{name}, set {len(tests) + 1}"
        tests[name] = {"samples": len(pairs), **errors}
        log.write(
            event="test",
            epoch=run.settings.epochs,
            grid=pairs.grid,
            zero_shot=is_zero_shot,
            **tests[name],
        )
        label = "zero-shot" if is_zero_shot else "test"
        rows += [
            Row(f"{label} {i}", pairs.inputs[i], predictions[i], pairs.targets[i], e)
            for i, e in enumerate(of_first[: 1 if rows else PICTURE_ROWS])
        ]
    console.print(error_table(tests))
    save(
        run.folder / files.MODEL,
        run.model,
        jax.device_get(state.variables),
        **run.extra(),
        tests=tests,
    )
    if run.settings.data is None:
        last = run.tests[-1]
        path = run.folder / files.SAMPLES
        with replace_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, x=last.inputs[:8], y=last.targets[:8])
    title = f"{type(run.model).__name__}, {run.folder.name}"
    draw(run.folder / files.PICTURE, rows[:MAX_ROWS], title)


def _is_better(errors, best):
    return best is None or errors["relative_l2"] < best["relative_l2"]


def _checkpoint(run, name, state, best, log):
    save_checkpoint(
        run.folder / name,
        run.model,
        state,
        **run.extra(),
        best=best,
        metrics_length=log.length,
    )
