"""A run that trains a neural operator on pairs of fields."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from models import FNO, save
from models.atomic import replace_file
from train import folder as files
from train import losses, metrics
from train.command import quoted
from train.data import Pairs
from train.datasets import describe, grid_text, load_sets
from train.fno_settings import FNOSettings
from train.loop import (
    NonFiniteLossError,
    TrainState,
    compile_train_step,
    create_state,
    default_micro_batch,
    make_forward,
    make_optimizer,
    make_train_step,
    shuffled_batches,
)
from train.normalise import UnitGaussian
from train.picture import Row, draw
from train.report import MetricsWriter, error_table
from train.run import Outcome, Run

PICTURE_ROWS = 2  # of the first test set; one of each other
MAX_ROWS = 5


def prepare(
    options: FNOSettings, folder: Path, console: Console
) -> tuple[Run, TrainState]:
    """A run and its fresh state.

    Raises:
        ValueError, OSError: if data or settings are not fit for training.
    """
    train, tests = load_sets(options, console)
    console.print(f"data     {train.source}: {describe(train)}")
    normalisers = {
        "input_normaliser": UnitGaussian.fit(train.inputs),
        "target_normaliser": UnitGaussian.fit(train.targets),
    }
    model = FNO(
        **options.model.arguments(len(train.grid)),
        in_channels=train.inputs.shape[-1],
        out_channels=train.targets.shape[-1],
    )
    console.print(f"model    FNO, {grid_text(model.n_modes)} modes")
    forward = make_forward(model, *normalisers.values())
    draw_batch, batches = shuffled_batches(
        train.inputs, train.targets, options.batch_size, options.seed
    )
    optimizer = make_optimizer(
        options.learning_rate,
        batches * options.epochs,
        options.weight_decay,
        options.warmup,
        options.gradient_clip,
    )
    tester = Tester(forward, train, options.batch_size, options.h1_periodic)

    def loss(prediction, target):
        if options.loss == "l2":
            return losses.relative_l2(prediction, target)
        return losses.relative_h1(prediction, target, options.h1_periodic)

    def finish(run, state, log, console):
        return _finish(run, state, tester, tests, log, console)

    shape = (options.batch_size, *train.inputs.shape[1:])
    micro_batch = options.micro_batch or default_micro_batch(model, shape)
    step = make_train_step(forward, optimizer, loss, micro_batch)

    run = Run(
        options,
        folder,
        model,
        compile_train_step(step),
        draw_batch,
        batches,
        test=lambda state: tester(state, tests[0])[0],
        criterion="relative_l2",
        tell=lambda errors: f"test {errors['relative_l2']:.5f}",
        kept={name: value.to_dict() for name, value in normalisers.items()},
        data_digest=_digest(train, *tests),
        finish=finish,
    )
    return run, create_state(model, optimizer, train.inputs.shape, options.seed)


@dataclass(frozen=True)
class Tester:
    """Errors of a state over a set, in physical units.

    Attributes:
        forward: see `train.loop.make_forward`.
        train: the training set, whose grid the batch size is for.
        batch_size: samples a call on that grid.
        periodic: see `train.losses.relative_h1`.
    """

    forward: Callable
    train: Pairs
    batch_size: int
    periodic: bool

    def __post_init__(self):
        def test_batch(variables, inputs, targets):
            prediction, _ = self.forward(variables, inputs)
            norms = metrics.error_norms(prediction, targets, self.periodic)
            return {"norms": norms, "first": prediction[:PICTURE_ROWS]}

        object.__setattr__(self, "test_batch", jax.jit(test_batch))

    def __call__(
        self, state: TrainState, pairs: Pairs
    ) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """The mean and largest errors; the first predictions; their relative L2 errors.

        Raises:
            NonFiniteLossError: if an error is not finite.
        """
        # Finer grids in smaller batches, so that they take no more memory than
        # training.
        ratio = math.prod(self.train.grid) / math.prod(pairs.grid)
        batch_size = max(1, int(self.batch_size * min(1.0, ratio)))

        def function(inputs, targets):
            return self.test_batch(state.variables, inputs, targets)

        fields = (pairs.inputs, pairs.targets)
        results = list(metrics.batchwise(function, fields, batch_size))
        errors = metrics.sample_errors([result["norms"] for result in results])
        summary = metrics.summary(errors)
        if not all(math.isfinite(value) for value in summary.values()):
            raise NonFiniteLossError(
                f"The test error on {grid_text(pairs.grid)} ({pairs.source}) is not "
                f"finite after step {int(state.step)}. Lower --learning-rate."
            )
        first = np.concatenate([result["first"] for result in results[:PICTURE_ROWS]])
        first = first[:PICTURE_ROWS]
        return summary, first, errors.l2[: len(first)]


def _finish(
    run: Run,
    state: TrainState,
    tester: Tester,
    sets: list[Pairs],
    log: MetricsWriter,
    console: Console,
) -> Outcome:
    """Test on every set; write the model, the samples and, last of all, the picture."""
    tests, rows = {}, []
    for pairs in sets:
        errors, predictions, of_first = tester(state, pairs)
        is_zero_shot = pairs.grid != tester.train.grid
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
    model = run.folder / files.MODEL
    save(model, run.model, jax.device_get(state.variables), **run.extra(), tests=tests)
    samples = run.folder / files.SAMPLES
    if run.settings.data is None:
        last = sets[-1]
        with replace_file(samples) as temporary, open(temporary, "wb") as file:
            np.savez(file, x=last.inputs[:8], y=last.targets[:8])
    else:
        samples = (run.settings.test or (run.settings.data,))[-1]
    picture = run.folder / files.PICTURE
    draw(picture, rows[:MAX_ROWS], f"{type(run.model).__name__}, {run.folder.name}")
    return Outcome(
        {
            model: "the model and its normalisers",
            picture: "some test samples",
            run.folder / files.METRICS: "loss and errors, epoch by epoch",
        },
        [f"python -m train.predict {quoted(model)} {quoted(samples)}"],
    )


def _digest(*sets: Pairs) -> str:
    """SHA-256 of all that is trained and tested on."""
    digest = hashlib.sha256()
    for pairs in sets:
        for array in (pairs.inputs, pairs.targets):
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
