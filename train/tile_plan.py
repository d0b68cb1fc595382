"""The windows that a volume is cut into: the largest that fit the memory.

A volume that `train.tiles.keeps_depth` is cut along the depth only where not even the
smallest window with all of it fits.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from train.tiles import Sizes, Tiling, keeps_depth, window_sizes

MOST_LENGTHS = 48  # of windows, an axis, that are compared
MOST_TRIALS = 6  # windows that are measured, which may mean compiled
DOUBT = 3.0  # a guess up to so many times the budget may be wrong


def choose_tiling(
    size: Sizes,
    radius: Sizes,
    stride: Sizes,
    measure: Callable[[Sizes], float],
    guess: Callable[[Sizes], float],
    fixed: float = 0.0,
) -> Tiling | None:
    """The tiles that compute the fewest points more than once and fit.

    - size: of the volume; radius, stride: of the network.
    - measure: the part of the budget that a window takes; up to 1 it fits. It is called
      a few times, and for the window that is chosen.
    - guess: the same, quick and rough.
    - fixed: the part of the budget that no window takes nothing of.

    Returns None where nothing fits.
    """
    for lengths in _choices(size, radius, stride):
        windows, cost = _all_windows(lengths, size, radius, stride)
        window = _best_window(windows, cost, measure, guess, fixed)
        if window is not None:
            return Tiling(tuple(size), window, tuple(radius), tuple(stride))
    return None


def _best_window(windows, cost, measure, guess, fixed) -> Sizes | None:
    """Of these, the one of least cost that fits."""
    points = windows.prod(axis=1)
    order = np.lexsort((-windows[:, 2], -points, cost))  # wide ones run faster
    windows, points = windows[order], points[order]
    largest, smallest = int(points.argmax()), int(points.argmin())

    def rate_of(share, index):
        return max(share - fixed, 0.0) / points[index]

    rate = rate_of(guess(_sizes(windows[largest])), largest)
    best, tried = None, set()
    for _ in range(MOST_TRIALS):
        fitting = np.flatnonzero(fixed + rate * points <= 1)
        index = int(fitting[0]) if len(fitting) else smallest
        if index in tried or (best is not None and index > best):
            break  # nothing better is to be expected
        tried.add(index)
        share = measure(_sizes(windows[index]))
        rate = rate_of(share, index)
        if share <= 1:
            best = index
        else:
            rate *= 1.02  # what is a little smaller may take a little more a point
    if best and 0 not in tried and guess(_sizes(windows[0])) <= DOUBT:
        # Small windows may take so much more a point that the best was given up.
        best = 0 if measure(_sizes(windows[0])) <= 1 else best
    if best is None and smallest not in tried:
        best = smallest if measure(_sizes(windows[smallest])) <= 1 else None
    return None if best is None else _sizes(windows[best])


def halved(tiling: Tiling) -> Tiling | None:
    """With windows of at most half as many points, or the smallest that can be; those
    that compute the fewest points more than once. None where there are none."""
    axes = tiling.size, tiling.radius, tiling.stride
    limit = np.prod(tiling.window, dtype=np.int64)
    for lengths in _choices(*axes):
        if tiling.window[0] not in lengths[0]:
            continue  # the depth is cut, and stays so
        windows, cost = _all_windows(lengths, *axes)
        points = windows.prod(axis=1)
        if points.min() >= limit:
            continue
        allowed = points <= max(limit / 2, points.min())
        best = np.lexsort((-points, np.where(allowed, cost, np.inf)))[0]
        return Tiling(tiling.size, _sizes(windows[best]), tiling.radius, tiling.stride)
    return None


def smallest_window(size: Sizes, radius: Sizes, stride: Sizes) -> Sizes:
    """The least that a network can be run on."""
    return tuple(lengths[-1] for lengths in _lengths(size, radius, stride))


def _sizes(row) -> Sizes:
    return tuple(int(n) for n in row)


def _lengths(size, radius, stride) -> list[list[int]]:
    """Of windows, an axis, descending."""
    axes = zip(size, radius, stride, strict=True)
    return [window_sizes(*axis) for axis in axes]


def _choices(size, radius, stride) -> Iterator[list[list[int]]]:
    """The same, to be tried one after the other: first with the whole depth alone."""
    depth, *plane = _lengths(size, radius, stride)
    if keeps_depth(size[0], radius[0]):
        yield [depth[:1], *plane]
    yield [depth, *plane]


def _all_windows(choices, size, radius, stride) -> tuple[np.ndarray, np.ndarray]:
    """Windows (choices, 3) of these lengths, and the points that the tiles of each
    compute together."""
    lengths, totals = [], []
    axes = zip(size, radius, stride, strict=True)
    for sizes, axis in zip(map(_thinned, choices), axes, strict=True):
        lengths.append(sizes)
        totals.append([n * _count(n, *axis) for n in sizes])
    grids = (np.meshgrid(*values, indexing="ij") for values in (lengths, totals))
    windows, costs = (np.stack([g.ravel() for g in grid], axis=-1) for grid in grids)
    return windows.astype(np.int64), costs.astype(np.float64).prod(axis=1)


def _count(window, size, radius, stride):
    return len(Tiling((size,), (window,), (radius,), (stride,)).axes[0])


def _thinned(sizes: Sequence[int]) -> list[int]:
    """At most `MOST_LENGTHS` of them, the first and the last included."""
    if len(sizes) <= MOST_LENGTHS:
        return list(sizes)
    picks = np.geomspace(1, len(sizes), MOST_LENGTHS).round().astype(int) - 1
    return [sizes[i] for i in sorted(set(picks.tolist()))]
