"""Where the channel axis of an array is, or that it has none."""

from __future__ import annotations

from typing import Literal

import numpy as np

ChannelAxis = Literal["auto"] | int | None

# Equal shapes with an edge axis shorter than this may hold channels: ask, do not guess.
FEW_CHANNELS = 16


def find_channel_axes(
    input_shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    channel_axis: ChannelAxis = "auto",
    grid_ndim: int | None = None,
) -> tuple[int | None, int | None]:
    """Return the channel axis (1, -1, another axis, or None) of inputs and of targets.

    Axis 0 counts samples; the grids of inputs and targets must be equal.

    - channel_axis=None: neither array has a channel axis; each is one channel.
    - channel_axis=int: that axis, counted with the sample axis, of both arrays. Where
      one array has one axis fewer than the other, it has no channel axis.
    - channel_axis="auto": all readings are tried in which each array has no channel
      axis, channels first (axis 1) or channels last (axis -1). A reading holds if the
      grids are equal, each grid axis has at least two points, and each channel axis is
      shorter than every grid axis. If several hold, those with the same layout in both
      arrays go before mixed ones; then "no channel axis" is taken if every other
      reading would have 16 channels or more. Else the shapes are ambiguous.

    `grid_ndim`, if given, is the number of spatial axes, and rules out other readings.

    Raises ValueError, with the shapes and the argument to give, if no reading or more
    than one is left.
    """
    shapes = f"inputs {input_shape} and targets {target_shape}"
    if channel_axis != "auto":
        axes = _explicit(input_shape, target_shape, channel_axis, shapes)
        grids = [
            _grid(shape, axis)
            for shape, axis in zip((input_shape, target_shape), axes, strict=True)
        ]
        if grids[0] != grids[1]:
            raise ValueError(
                "inputs and targets must lie on one grid, got "
                f"{grids[0]} and {grids[1]} points ({shapes}, {channel_axis=})"
            )
        _check_grid_ndim(len(grids[0]), grid_ndim, shapes)
        return axes
    readings = [
        (input_axis, target_axis)
        for input_axis in _candidates(input_shape, grid_ndim)
        for target_axis in _candidates(target_shape, grid_ndim)
        if _grid(input_shape, input_axis) == _grid(target_shape, target_axis)
    ]
    same_layout = [axes for axes in readings if axes[0] == axes[1]]
    counts = {
        axes: max(_count(input_shape, axes[0]), _count(target_shape, axes[1]))
        for axes in readings
    }
    return _choose(same_layout or readings, counts, (None, None), shapes, grid_ndim)


def find_channel_axis(
    shape: tuple[int, ...],
    channel_axis: ChannelAxis = "auto",
    grid_ndim: int | None = None,
    num_channels: int | None = None,
) -> int | None:
    """Return the channel axis of inputs that come without targets.

    The rules are those of `find_channel_axes`; `num_channels`, if given (a model knows
    its own), rules out readings with another number of channels.
    """
    shapes = f"an array {shape}"
    if channel_axis != "auto":
        axis = _explicit(shape, shape, channel_axis, shapes)[0]
        _check_grid_ndim(len(_grid(shape, axis)), grid_ndim, shapes)
        return axis
    readings = [
        axis
        for axis in _candidates(shape, grid_ndim, num_channels)
        if num_channels in (None, _count(shape, axis))
    ]
    counts = {axis: _count(shape, axis) for axis in readings}
    return _choose(readings, counts, None, shapes, grid_ndim)


def to_channels_last(array: np.ndarray, channel_axis: int | None) -> np.ndarray:
    """Return a view (samples, *grid, channels) of an array whose layout is known."""
    if channel_axis is None:
        return array[..., None]
    return np.moveaxis(array, channel_axis, -1)


def _choose(readings, counts, no_channels, shapes, grid_ndim):
    if no_channels in readings and all(
        counts[other] >= FEW_CHANNELS for other in readings if other != no_channels
    ):
        return no_channels
    if len(readings) == 1:
        return readings[0]
    space = "" if grid_ndim is None else f" on a grid of {grid_ndim} axes"
    state = "is ambiguous" if readings else "cannot be found"
    raise ValueError(
        f"the channel axis of {shapes}{space} {state}: give channel_axis (on the "
        "command line --channel-axis) as 1 (channels first), -1 (channels last) or "
        "None (no channel axis: every axis after the samples is space)"
    )


def _candidates(shape, grid_ndim, num_channels=None):
    """Channel axes with which `shape` may be (samples, channels and grid)."""
    for axis in (None, 1, -1):
        if axis is not None and len(shape) < 3:
            continue
        grid = _grid(shape, axis)
        if not grid or min(grid) < 2 or grid_ndim not in (None, len(grid)):
            continue
        # The number of channels, when known, is better evidence than the sizes.
        if axis is None or num_channels is not None or shape[axis] < min(grid):
            yield axis


def _explicit(input_shape, target_shape, channel_axis, shapes):
    """The channel axes that the caller states, as far as the shapes allow them."""
    if channel_axis is None:
        return None, None
    ndim = max(len(input_shape), len(target_shape))
    is_axis = isinstance(channel_axis, int) and not isinstance(channel_axis, bool)
    if not is_axis or not -ndim < channel_axis < ndim or channel_axis == 0:
        raise ValueError(
            "channel_axis must be 'auto', None, or an axis of the array other than 0 "
            f"(the samples), got {channel_axis!r} for {shapes}"
        )
    axis = channel_axis % ndim  # the same axis, from the front, as the longer shape has
    axis = -1 if axis == ndim - 1 else axis
    if ndim < 3 or abs(len(input_shape) - len(target_shape)) > 1:
        raise ValueError(
            "an array with a channel axis has at least three axes (samples, grid, "
            "channels), and inputs and targets differ by that axis at most, got "
            f"{shapes} with {channel_axis=}"
        )
    return (
        axis if len(input_shape) == ndim else None,
        axis if len(target_shape) == ndim else None,
    )


def _check_grid_ndim(got, grid_ndim, shapes):
    if grid_ndim not in (None, got):
        raise ValueError(
            f"the grid must have {grid_ndim} axes, got {got} ({shapes}); other axes "
            "than samples, channels and space must be cut or moved before"
        )


def _grid(shape, axis):
    if axis is None:
        return shape[1:]
    return tuple(np.delete(shape, axis)[1:].tolist())


def _count(shape, axis):
    return 1 if axis is None else shape[axis]
