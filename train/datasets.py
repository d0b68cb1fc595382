"""The sets that a run trains and tests on."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from train.data import Pairs, darcy_dataset, read_pairs
from train.data.containers import open_arrays
from train.data.formats import KNOWN_KEYS
from train.fno_settings import FNOSettings


def load_sets(settings: FNOSettings, console: Console) -> tuple[Pairs, list[Pairs]]:
    """Read, or make, the training set and the test sets.

    The first test set is the one to follow training by: one at the training resolution
    if there is any.

    Raises:
        ValueError: for files that cannot be read as pairs, or do not fit each other.
        FileNotFoundError: for files that are not there.
    """
    if settings.data is None:
        sets = _solve(settings, console)
        train, tests = sets["train"], list(sets["test"].values())
    else:
        train, tests = _read(settings)
    check_sets(train, tests, settings.batch_size, settings.h1_periodic)
    return train, sorted(tests, key=lambda pairs: pairs.grid != train.grid)


def check_sets(
    train: Pairs, tests: Sequence[Pairs], batch_size: int, periodic: bool = True
) -> None:
    """Refuse sets that a run cannot go through with, before it starts.

    Raises:
        ValueError: naming the set and what is wrong.
    """
    if len(train) < batch_size:
        raise ValueError(
            f"The training set must fill a batch; got {len(train)} samples for a batch "
            f"of {batch_size} ({train.source}). Choose a smaller --batch-size."
        )
    if not periodic:
        for pairs in (train, *tests):
            if min(pairs.grid) < 4:
                raise ValueError(
                    "--no-h1-periodic needs 4 points along each axis; got a grid of "
                    f"{grid_text(pairs.grid)} ({pairs.source})."
                )
    num_axes = len(train.grid)
    if num_axes > 3:
        raise ValueError(
            f"Fields must lie on a grid of one to three axes; got {train.grid} "
            f"({train.source}). If an axis holds channels, say which: --channel-axis."
        )
    for pairs in tests:
        for name in ("inputs", "targets"):
            here, there = getattr(train, name), getattr(pairs, name)
            if here.ndim != there.ndim or here.shape[-1] != there.shape[-1]:
                raise ValueError(
                    f"Test {name} must have {num_axes} grid axes and {here.shape[-1]} "
                    f"channels, as in training; got {there.ndim - 2} and "
                    f"{there.shape[-1]} ({pairs.source}). If the channels were read "
                    "wrongly, say where they are: --channel-axis."
                )


def has_targets(
    path: Path, input_key: str | None = None, target_key: str | None = None
) -> bool:
    """Whether a file has targets for its inputs, or should have: one was named.

    Raises:
        ValueError, FileNotFoundError: if it cannot be read.
    """
    if target_key is not None:
        return True
    with open_arrays(path) as arrays:
        return any(
            inputs in arrays and targets in arrays
            for inputs, targets in KNOWN_KEYS
            if input_key in (None, inputs)
        )


def describe(pairs: Pairs) -> str:
    """One line on a set: samples, grid, channels."""
    channels = f"{pairs.inputs.shape[-1]} -> {pairs.targets.shape[-1]} channels"
    return f"{len(pairs)} samples of {grid_text(pairs.grid)}, {channels}"


def grid_text(grid: Sequence[int]) -> str:
    """A grid as people write it: 64 x 64."""
    return " x ".join(str(size) for size in grid)


def _solve(settings, console):
    with Progress(
        console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("solving Darcy flow", total=None)

        def progress(done, total):
            if done == 1 and not console.is_terminal:
                console.print(f"solving Darcy flow for {total} samples")
            bar.update(task, completed=done, total=total)

        return darcy_dataset(settings.darcy, progress)


def _read(settings):
    read = settings.read
    names = {"input_key": read.input_key, "target_key": read.target_key}
    layout = {"channel_axis": read.channel_axis}
    train = read_pairs(
        settings.data, **names, **layout, subsample=read.subsample, limit=read.limit
    )
    if settings.test:
        # How many axes the grid has is settled by the training set.
        layout["grid_ndim"] = len(train.grid)
        return train, [read_pairs(path, **names, **layout) for path in settings.test]
    kept = len(train) - max(1, round(settings.holdout * len(train)))
    if kept < 1:
        raise ValueError(
            f"--holdout {settings.holdout} of {len(train)} samples leaves none to "
            "train on. Give a test file with --test, or hold out fewer."
        )
    parts = [
        Pairs(train.inputs[rows], train.targets[rows], f"{train.source}, {name}")
        for rows, name in (
            (slice(None, kept), f"first {kept} samples"),
            (slice(kept, None), f"last {len(train) - kept} samples, held out"),
        )
    ]
    return parts[0], parts[1:]
