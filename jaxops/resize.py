"""Resizing grids: an axis at a time, as one small matrix, or by whole factors as sums
of shifted copies; or out of channels."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxops.matmul import along_axis
from jaxops.windows import interleave


def fourier(
    x: Float[Array, "batch *grid channels"], sizes: Sequence[int]
) -> Float[Array, "batch *resized channels"]:
    """The trigonometric interpolant of a periodic field on a grid of other sizes.

    Point 0 stays point 0 (a periodic grid has no end point). Downsampling drops the
    wavenumbers that the new grid cannot hold. A Nyquist wavenumber of an even grid is a
    cosine, as in ``scipy.signal.resample``.
    """
    _check_sizes(x, sizes)
    for axis, (old, new) in enumerate(zip(x.shape[1:-1], sizes, strict=True), start=1):
        if new != old:
            x = along_axis(_fourier_matrix(old, new), x, axis)
    return x


def linear(
    x: Float[Array, "batch *grid channels"],
    sizes: Sequence[int],
    align_corners: bool = False,
) -> Float[Array, "batch *resized channels"]:
    """Linear interpolation; the edge value beyond the outermost points.

    ``align_corners=False`` takes points for the centres of cells that fill the axis,
    ``True`` for nodes with the first and the last on the ends, as PyTorch does.
    """
    return _interpolate(x, sizes, align_corners, _hat, 1)


def cubic(
    x: Float[Array, "batch *grid channels"],
    sizes: Sequence[int],
    align_corners: bool = False,
) -> Float[Array, "batch *resized channels"]:
    """Cubic convolution (Keys 1981) with a = -0.75, PyTorch's; see :func:`linear`."""
    return _interpolate(x, sizes, align_corners, _keys, 2)


def pixel_shuffle(
    x: Float[Array, "batch *grid channels"], factors: Sequence[int]
) -> Float[Array, "batch *finer fewer_channels"]:
    """Channels become a finer grid: each point as many points as ``factors`` says.

    In einops' terms, for three axes, ``b d h w (c rd rh rw) -> b (d rd) (h rh) (w rw)
    c``, as PyTorch's pixel shuffle does for two.

    Args:
        x: channels last, any number of spatial axes.
        factors: one an axis. Their product must divide the channels.
    """
    _check_factors(x, factors)
    if x.shape[-1] % math.prod(factors):
        raise ValueError(
            "A pixel shuffle needs a number of channels that the product of its "
            f"factors divides; got {x.shape[-1]} channels, factors {tuple(factors)}."
        )
    grid, n = x.shape[1:-1], len(factors)
    x = x.reshape(x.shape[0], *grid, -1, *factors)
    pairs = [axis for i in range(n) for axis in (1 + i, 2 + n + i)]
    x = x.transpose(0, *pairs, 1 + n)
    finer = (size * factor for size, factor in zip(grid, factors, strict=True))
    return x.reshape(x.shape[0], *finer, -1)


def pixel_unshuffle(
    x: Float[Array, "batch *grid channels"], factors: Sequence[int]
) -> Float[Array, "batch *coarser more_channels"]:
    """The inverse of :func:`pixel_shuffle`; the factors must divide the grid."""
    _check_factors(x, factors)
    grid, n = x.shape[1:-1], len(factors)
    if any(size % factor for size, factor in zip(grid, factors, strict=True)):
        raise ValueError(
            "A pixel unshuffle needs sizes that its factors divide; got "
            f"{x.shape=}, factors {tuple(factors)}."
        )
    coarser = [size // factor for size, factor in zip(grid, factors, strict=True)]
    pairs = (part for pair in zip(coarser, factors, strict=True) for part in pair)
    x = x.reshape(x.shape[0], *pairs, x.shape[-1])
    points, inner = range(1, 2 * n, 2), range(2, 2 * n + 1, 2)
    x = x.transpose(0, *points, 2 * n + 1, *inner)
    return x.reshape(x.shape[0], *coarser, -1)


def _check_factors(x, factors: Sequence[int]) -> None:
    if len(factors) != x.ndim - 2 or min(factors, default=0) < 1:
        raise ValueError(
            "One factor of at least 1 is needed for each spatial axis of (batch, "
            f"*grid, channels); got factors {tuple(factors)} for {x.shape=}."
        )


def _check_sizes(x, sizes: Sequence[int]) -> None:
    grid = x.shape[1:-1]
    if len(sizes) != len(grid) or min(sizes) < 1 or min(grid) < 1:
        raise ValueError(
            "Resizing needs one size of at least 1 for each spatial axis of "
            f"(batch, *grid, channels); got sizes={tuple(sizes)} for {x.shape=}."
        )


def _interpolate(
    x, sizes: Sequence[int], align_corners: bool, kernel: Callable, radius: int
):
    _check_sizes(x, sizes)
    for axis, (old, new) in enumerate(zip(x.shape[1:-1], sizes, strict=True), start=1):
        if new != old and new % old == 0 and not align_corners:
            x = _finer(x, axis, new // old, kernel, radius)
        elif new != old:
            x = along_axis(
                _kernel_matrix(old, new, align_corners, kernel, radius), x, axis
            )
    return x


def _finer(x, axis: int, factor: int, kernel: Callable, radius: int):
    """By a whole factor: as many sums of shifted copies, interleaved.

    The work grows with the axis and not with its square, and each point is computed
    alike wherever it lies: a part of a volume gives that part of the result, exactly.
    """
    size, dtype = x.shape[axis], x.dtype
    if jnp.finfo(dtype).bits < 32:
        x = x.astype(jnp.float32)
    first, last = (lax.slice_in_dim(x, i, i + 1, axis=axis) for i in (0, size - 1))
    x = jnp.concatenate([first] * radius + [x] + [last] * radius, axis=axis)
    phases = []
    for phase in range(factor):
        position = (phase + 0.5) / factor - 0.5
        below = math.floor(position) - radius + 1
        sources = np.arange(below, below + 2 * radius)
        weights = kernel(np.abs(position - sources)).tolist()
        total = None
        for start, weight in enumerate(weights, start=below + radius):
            if weight != 0:
                part = lax.slice_in_dim(x, start, start + size, axis=axis)
                part = part if weight == 1 else part * jnp.asarray(weight, x.dtype)
                total = part if total is None else total + part
        phases.append(total)
    return interleave(phases, axis=axis).astype(dtype)


def _fourier_matrix(old: int, new: int) -> np.ndarray:
    small = min(old, new)
    wavenumbers = np.arange(small // 2 + 1)
    weight = np.full(len(wavenumbers), 2.0)
    weight[0] = 1
    if small % 2 == 0 and small == old:
        # An old grid of that size holds its last wavenumber once; a finer one holds it
        # at both signs, which fall together on the new grid.
        weight[-1] = 1

    def angles(size):  # k n reduced as an integer: exact for any size
        return 2 * np.pi * (np.outer(np.arange(size), wavenumbers) % size) / size

    there, here = angles(new), angles(old)
    # cos(a - b) as two products: the sum over wavenumbers without a third axis.
    matrix = (np.cos(there) * weight) @ np.cos(here).T
    matrix += (np.sin(there) * weight) @ np.sin(here).T
    return matrix / old


def _kernel_matrix(
    old: int, new: int, align_corners: bool, kernel: Callable, radius: int
) -> np.ndarray:
    """(new, old): weights of a kernel of that radius around each new point."""
    if align_corners:
        position = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        position = (np.arange(new) + 0.5) * (old / new) - 0.5
        if kernel is _hat:  # PyTorch clamps the position before it interpolates
            position = np.clip(position, 0, None)
    matrix = np.zeros((new, old))
    first = np.floor(position).astype(int) - radius + 1
    for tap in range(2 * radius):
        source = first + tap
        weight = kernel(np.abs(position - source))
        np.add.at(matrix, (np.arange(new), np.clip(source, 0, old - 1)), weight)
    return matrix


def _hat(distance: np.ndarray) -> np.ndarray:
    return np.clip(1 - distance, 0, None)


def _keys(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
