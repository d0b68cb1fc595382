"""Exact tiles of a volume: where they lie, what is read for each, and what is kept.

All windows of a volume have one shape, so that a network is compiled once. A window
near an end of an axis is moved until it ends there, so that the network's own padding
acts at the true ends; inside, a halo of the network's receptive radius is read and
thrown away. The parts that are kept, the cores, fill the volume side by side: nothing
is blended.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Sizes = tuple[int, ...]
Box = tuple[slice, ...]

SHALLOW = 4  # times the receptive radius: volumes so deep keep it, if memory allows


class Span(NamedTuple):
    """A window of one axis: its first point, and the core (start, stop) inside it."""

    first: int
    start: int
    stop: int


class Tile(NamedTuple):
    """A window of a volume, an axis a `Span`."""

    spans: tuple[Span, ...]
    window: Sizes

    @property
    def read(self) -> Box:
        """The window, in the volume."""
        pairs = zip(self.spans, self.window, strict=True)
        return tuple(slice(span.first, span.first + length) for span, length in pairs)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """The core, in the window: (start, stop) an axis."""
        return tuple((s.start - s.first, s.stop - s.first) for s in self.spans)

    def kept(self, scale: Sizes) -> Box:
        """The core in the window's output, which is ``scale`` times finer."""
        pairs = zip(self.region, scale, strict=True)
        return tuple(slice(a * s, b * s) for (a, b), s in pairs)

    def place(self, scale: Sizes) -> Box:
        """The core in the volume's output."""
        pairs = zip(self.spans, scale, strict=True)
        return tuple(slice(a * s, b * s) for (_, a, b), s in pairs)


def spans(size: int, window: int, radius: int, stride: int) -> list[Span]:
    """The windows of one axis, in order.

    Each begins on a multiple of ``stride``, or covers the axis; the last one ends where
    the axis does. Cores begin on multiples of ``stride`` and have ``radius`` points of
    their window, or an end of the axis, to both sides.

    Raises:
        ValueError: for a window that does not end there, or whose core is empty.
    """
    if window >= size:
        return [Span(0, 0, size)]
    advance = _advance(window, radius, stride)
    if (size - window) % stride or advance < stride:
        raise ValueError(
            f"a window is shorter than its axis by a multiple of the stride, and at "
            f"least {_least(radius, stride)} long, or as long as the axis; got "
            f"{window=}, {size=}, {radius=}, {stride=}."
        )
    found, done = [], 0
    while done < size:
        first = max(0, done - radius) // stride * stride
        if first >= size - window:
            found.append(Span(size - window, done, size))
            break
        stop = (first + window - radius) // stride * stride
        found.append(Span(first, done, stop))
        done = stop
    return found


def window_sizes(size: int, radius: int, stride: int) -> list[int]:
    """Lengths worth choosing from, descending: the axis, and for each number of windows
    that is possible the shortest that makes so few."""
    found = {1: size}
    least = _least(radius, stride)
    least += (size - least) % stride
    for window in range(size - stride, least - 1, -stride):
        advance = _advance(window, radius, stride)
        found[1 - (window - size) // advance] = window  # the shortest comes last
    return sorted(set(found.values()), reverse=True)


def keeps_depth(depth: int, radius: int) -> bool:
    """Whether the windows of a volume are as deep as it is, where any so deep fits.

    So they are where cutting would mean to compute half as much again, or more. The
    form of the convolutions hangs on it, see `train.tile_network`.
    """
    return depth <= SHALLOW * radius


def _advance(window, radius, stride):
    """From one core of an inner window to the next."""
    return (window - radius) // stride * stride - -(-radius // stride) * stride


def _least(radius, stride):
    return radius + -(-radius // stride) * stride + stride


@dataclass(frozen=True)
class Tiling:
    """A volume's tiles.

    Attributes:
        size: of the volume, its points an axis.
        window: of all tiles, likewise; at most the volume's.
        radius, stride: ``receptive_radius`` and ``stride`` of the network.
    """

    size: Sizes
    window: Sizes
    radius: Sizes
    stride: Sizes

    def __post_init__(self):
        window = tuple(map(min, self.window, self.size))
        object.__setattr__(self, "window", window)

    @cached_property
    def axes(self) -> list[list[Span]]:
        """Spans of each axis."""
        parts = zip(self.size, self.window, self.radius, self.stride, strict=True)
        return [spans(*part) for part in parts]

    @cached_property
    def slabs(self) -> list[list[Tile]]:
        """All tiles, those of one range of the first axis together, in order."""
        first, *others = self.axes
        return [
            [Tile((span, *rest), self.window) for rest in itertools.product(*others)]
            for span in first
        ]

    @property
    def tiles(self) -> list[Tile]:
        """All tiles, in order."""
        return list(itertools.chain.from_iterable(self.slabs))

    @property
    def count(self) -> int:
        return math.prod(map(len, self.axes))

    @property
    def recomputed(self) -> float:
        """Points that are computed, halos included, for each one of the volume."""
        return self.count * math.prod(self.window) / math.prod(self.size)
