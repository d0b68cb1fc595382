"""A training run, whatever is trained: from a prepared state to the last epoch."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train import settings
from train.checkpoint import BEST, LAST, save_checkpoint
from train.loop import TrainState, train_epochs
from train.report import MetricsWriter, ProgressReport
from train.settings import TrainSettings

CHECKPOINT_SECONDS = 600.0  # longer epochs get checkpoints in between


@dataclass(frozen=True)
class Run:
    """What a run is made of, all set before the first step.

    Attributes:
        settings, folder: of the run.
        model: the linen module.
        train_step: see `train.loop.compile_train_step`.
        draw, batches: see `train.loop.train_epochs`.
        test: errors of a state, smaller is better, on what is followed during training;
            raises NonFiniteLossError where they are not finite.
        criterion: the one of these errors that says which state is the best.
        tell: the errors in a few words.
        kept: what is saved beside the weights, such as normalisers.
        data_digest: tells the data from other data.
        finish: makes the files of a finished run, the picture last; returns what there
            is to tell.
    """

    settings: TrainSettings
    folder: Path
    model: Any
    train_step: Callable
    draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    batches: int
    test: Callable[[TrainState], dict[str, float]]
    criterion: str
    tell: Callable[[dict[str, float]], str]
    kept: dict[str, Any]
    data_digest: str
    finish: Callable[["Run", TrainState, MetricsWriter, Console], "Outcome"]

    def extra(self) -> dict[str, Any]:
        """What is saved beside the weights."""
        return {
            **self.kept,
            "data_digest": self.data_digest,
            "settings": json.loads(settings.to_json(self.settings)),
        }


@dataclass(frozen=True)
class Outcome:
    """What a finished run tells: the files it made, each with what it is, and the
    commands that one may want next."""

    files: dict[Path, str]
    next: list[str] = field(default_factory=list)


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
        run.draw,
        run.batches,
        epochs=options.epochs,
        on_step=report.step,
        should_stop=should_stop,
        pause_seconds=CHECKPOINT_SECONDS,
    )
    with report:
        for state, epoch, _, complete, loss in passes:
            if complete:
                errors = {}
                if epoch % options.test_every == 0 or epoch == options.epochs:
                    errors = run.test(state)
                report.epoch(epoch, run.tell(errors) if errors else "")
                step = int(state.step)
                log.write(event="epoch", epoch=epoch, step=step, loss=loss, **errors)
                value = errors.get(run.criterion)
                if errors and (best is None or value < best[run.criterion]):
                    best = {"epoch": epoch, run.criterion: value}
                    _checkpoint(run, BEST, state, best, log)
            _checkpoint(run, LAST, state, best, log)
            if should_stop():
                break
    return state


def _checkpoint(run, name, state, best, log):
    save_checkpoint(
        run.folder / name,
        run.model,
        state,
        **run.extra(),
        best=best,
        metrics_length=log.length,
    )
