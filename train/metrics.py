"""Errors of a predictor over a whole test set, in batches of one shape.

Each error is relative, per sample, as in `train.losses`; here the targets of the whole
set give the floor for zero targets, so the numbers do not depend on the batch size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxops.backend import to_device
from train import losses


class SampleErrors(NamedTuple):
    """Relative errors of each sample: two float64 arrays (n,), smaller is better."""

    l2: np.ndarray
    h1: np.ndarray


def batchwise(
    function: Callable[..., Any], arrays: Sequence[np.ndarray], batch_size: int
) -> Iterator[Any]:
    """Apply ``function(*batch)`` to host arrays, a batch at a time, in order.

    Every batch has ``batch_size`` rows, so a jitted function is traced once: the last
    one is filled up with copies of the last row, and the results of the copies are
    dropped. A set smaller than ``batch_size`` is one batch of its own size.

    Args:
        function: takes device arrays, returns a tree of arrays (batch, ...).
        arrays: each (n, ...), the same n.
        batch_size: rows a call.

    Yields:
        The results as numpy arrays, batch by batch, n rows in all.

    Raises:
        ValueError: if the arrays are empty or differ in length, or the batch size is
            not positive.
    """
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1 or 0 in lengths or batch_size < 1:
        raise ValueError(
            "Arrays must have one length above zero and the batch size must be positive"
            f"; got lengths {[len(array) for array in arrays]}, {batch_size=}."
        )
    num_samples = lengths.pop()
    batch_size = min(batch_size, num_samples)
    for start in range(0, num_samples, batch_size):
        rows = np.arange(start, start + batch_size).clip(max=num_samples - 1)
        stop = min(batch_size, num_samples - start)
        result = function(*(to_device(array[rows]) for array in arrays))
        yield jax.tree.map(lambda leaf, stop=stop: np.asarray(leaf)[:stop], result)


def error_norms(
    prediction: jax.Array, target: jax.Array, periodic: bool | Sequence[bool] = True
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Norms of error and target that `sample_errors` divides; pure, to be jitted."""
    return {
        "l2": losses.l2_norms(prediction, target),
        "h1": losses.h1_norms(prediction, target, periodic),
    }


def sample_errors(norms: Sequence[dict[str, tuple[Any, Any]]]) -> SampleErrors:
    """Relative errors of each sample from the `error_norms` of all batches of a set."""
    ratios = {}
    for name in SampleErrors._fields:
        error, target = (
            np.concatenate([batch[name][part] for batch in norms]).astype(np.float64)
            for part in (0, 1)
        )
        floor = losses.FLOOR * np.sqrt(np.mean(target**2))
        ratios[name] = error / (np.maximum(target, floor) if floor > 0 else 1.0)
    return SampleErrors(**ratios)


def summary(errors: SampleErrors) -> dict[str, float]:
    """Mean and largest error of a set, under the names that metrics.jsonl carries."""
    return {
        "relative_l2": float(errors.l2.mean()),
        "relative_l2_max": float(errors.l2.max()),
        "relative_h1": float(errors.h1.mean()),
        "relative_h1_max": float(errors.h1.max()),
    }


def evaluate(
    norms_of_batch: Callable[..., Any],
    inputs: np.ndarray,
    targets: np.ndarray,
    batch_size: int,
) -> dict[str, float]:
    """Mean and largest relative L2 and H1 errors over a set.

    Args:
        norms_of_batch: ``(inputs, targets) -> error_norms(predict(inputs), targets)``,
            jitted once by the caller.
        inputs: (n, *grid, in_channels), on the host.
        targets: (n, *grid, out_channels), on the host.
        batch_size: samples a call.
    """
    batches = batchwise(norms_of_batch, (inputs, targets), batch_size)
    return summary(sample_errors(list(batches)))
