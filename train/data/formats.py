"""Input and target fields from files that people bring: .pt, .npz, .mat, HDF5."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from train.data.axes import (
    ChannelAxis,
    find_channel_axes,
    find_channel_axis,
    to_channels_last,
)
from train.data.containers import open_arrays
from train.data.pairs import Pairs, as_fields, check_numbers, make_pairs

__all__ = ["Pairs", "read_inputs", "read_pairs"]

# Keys of published files, tried in this order. neuraloperator .pt: x, y. Darcy .mat:
# coeff, sol. Burgers and Navier-Stokes .mat: a, u. PDEBench Darcy: nu, tensor.
KNOWN_KEYS = (
    ("x", "y"),
    ("input", "output"),
    ("inputs", "targets"),
    ("coeff", "sol"),
    ("a", "u"),
    ("nu", "tensor"),
)
TIME_KEYS = ("t", "tspan", "time", "t-coordinate", "t_coordinate")


def read_pairs(
    path: str | Path,
    input_key: str | None = None,
    target_key: str | None = None,
    subsample: int = 1,
    limit: int | None = None,
    channel_axis: ChannelAxis = "auto",
    grid_ndim: int | None = None,
) -> Pairs:
    """Read a file of input and target fields, axis 0 counting the samples.

    | suffix | container |
    |---|---|
    | .pt, .pth | torch's zip file with a dictionary of tensors; no code is run |
    | .npz | numpy |
    | .mat | MATLAB v5, and v7.3 (HDF5, whose reversed axes are turned) |
    | .h5, .hdf5 | HDF5, axes as they are |

    - input_key, target_key: names in the file; without them, the first that it has of
      x and y, input and output, inputs and targets, coeff and sol, a and u, nu and
      tensor.
    - subsample: keep every r-th point of each spatial axis, beginning with the first.
    - limit: at most so many samples, from the front. HDF5 files are read no further.
    - channel_axis: "auto", None (there is none) or an axis, see
      `train.data.axes.find_channel_axes` for the rules; grid_ndim: the number of
      spatial axes, if known, which makes "auto" sure.

    Returns Pairs: float32, (samples, *grid, channels). Bools become 0 and 1.

    Raises FileNotFoundError, or ValueError that says what to do for: a suffix or
    content of another kind, a truncated file, unknown keys, complex, missing (NaN),
    infinite or no values, inputs and targets that differ in samples or grid, a channel
    axis that cannot be told, fields that depend on time (unless channel_axis is given,
    which makes the times channels). Raises ValueError too if HDF5 needs h5py installed.
    """
    with open_arrays(path) as arrays:
        input_key, target_key = _find_keys(path, arrays, input_key, target_key)
        inputs = _read(path, arrays, input_key, limit)
        targets = _read(path, arrays, target_key, limit)
        names = f"{input_key!r} {inputs.shape} and {target_key!r} {targets.shape}"
        if channel_axis == "auto":
            _refuse_time(path, arrays, inputs, targets, names)
    if len(inputs) != len(targets):
        raise ValueError(
            f"{path}: inputs and targets must have the same number of samples (axis "
            f"0), got {names}"
        )
    try:
        axes = find_channel_axes(inputs.shape, targets.shape, channel_axis, grid_ndim)
    except ValueError as error:
        raise ValueError(
            f"{path} (keys {input_key!r}, {target_key!r}): {error}"
        ) from error
    return make_pairs(
        _subsample(to_channels_last(inputs, axes[0]), subsample),
        _subsample(to_channels_last(targets, axes[1]), subsample),
        f"{path}, {names}",
    )


def read_inputs(
    path: str | Path,
    input_key: str | None = None,
    subsample: int = 1,
    limit: int | None = None,
    channel_axis: ChannelAxis = "auto",
    grid_ndim: int | None = None,
    num_channels: int | None = None,
) -> np.ndarray:
    """Read the input fields alone, from a file that may have no targets.

    As `read_pairs`; a model's `grid_ndim` and `num_channels` make "auto" sure. Without
    `input_key`, a file with a single array needs no name for it.

    Returns (samples, *grid, channels), float32.
    """
    with open_arrays(path) as arrays:
        if input_key is None:
            known = [key for key, _ in KNOWN_KEYS if key in arrays]
            only = list(arrays) if len(arrays) == 1 else []
            input_key = next(iter(known + only), None)
        _check_key(path, arrays, "input_key", input_key)
        inputs = _read(path, arrays, input_key, limit)
    try:
        axis = find_channel_axis(inputs.shape, channel_axis, grid_ndim, num_channels)
    except ValueError as error:
        raise ValueError(f"{path} (key {input_key!r}): {error}") from error
    name = f"{path}, {input_key!r} {inputs.shape}"
    return as_fields(_subsample(to_channels_last(inputs, axis), subsample), name)


def _find_keys(path, arrays, input_key, target_key):
    """The keys given, the others from the table of known pairs."""
    for known in KNOWN_KEYS:
        fits = all(
            given in (None, name)
            for given, name in zip((input_key, target_key), known, strict=True)
        )
        if fits and known[0] in arrays and known[1] in arrays:
            return known
    _check_key(path, arrays, "input_key", input_key)
    _check_key(path, arrays, "target_key", target_key)
    return input_key, target_key


def _check_key(path, arrays, argument, key):
    if key in arrays:
        return
    found = ", ".join(f"{name} {stored.describe()}" for name, stored in arrays.items())
    problem = "no known pair of keys" if key is None else f"no array {key!r}"
    raise ValueError(
        f"{path} has {problem}: give {argument} (--{argument.replace('_', '-')}), one "
        f"of the arrays found: {found or 'none'}"
    )


def _read(path, arrays, key, limit):
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise ValueError(f"limit must be None or at least 1, got {limit!r}")
    array = arrays[key].read(limit)
    check_numbers(array.dtype, f"{path}: {key!r}")
    if array.ndim < 2 or array.size == 0:
        raise ValueError(
            f"{path}: {key!r} must have samples and at least one axis of space, got "
            f"shape {array.shape}"
        )
    return array


def _refuse_time(path, arrays, inputs, targets, names):
    """Refuse (samples, *grid) with (samples, *grid, times): times are not channels."""
    times = [key for key in TIME_KEYS if key in arrays]
    one_more = targets.ndim == inputs.ndim + 1 and 1 not in targets.shape[1:]
    if times and one_more:
        raise ValueError(
            f"{path} holds fields that depend on time (key {times[0]!r}; {names}), and "
            "pairs of fields are needed: give channel_axis (1 or -1, where the times "
            "are) to predict all times at once as channels, or save the times of "
            "interest as x and y in an .npz file"
        )


def _subsample(fields, subsample):
    """Every r-th point of the spatial axes of (samples, *grid, channels)."""
    if isinstance(subsample, bool) or not isinstance(subsample, int) or subsample < 1:
        raise ValueError(f"subsample must be an integer from 1, got {subsample!r}")
    grid = (slice(None, None, subsample),) * (fields.ndim - 2)
    kept = fields[(slice(None), *grid)]
    if min(kept.shape[1:-1]) < 2:
        raise ValueError(
            f"subsample={subsample} leaves {kept.shape[1:-1]} of {fields.shape[1:-1]} "
            "points: every axis needs at least two"
        )
    return kept
