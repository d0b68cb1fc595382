"""Resizing grids, an axis at a time, each as one small matrix."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxops.matmul import along_axis


def fourier(
    x: Float[Array, "batch *grid channels"], sizes: Sequence[int]
) -> Float[Array, "batch *resized channels"]:
    """The trigonometric interpolant of a periodic field on a grid of other sizes.

    Point 0 stays point 0 (a periodic grid has no end point). Downsampling drops the
    wavenumbers that the new grid cannot hold. A Nyquist wavenumber of an even grid is a
    cosine, as in ``scipy.signal.resample``.
    """
    return _resize(x, sizes, _fourier_matrix)


def linear(
    x: Float[Array, "batch *grid channels"],
    sizes: Sequence[int],
    align_corners: bool = False,
) -> Float[Array, "batch *resized channels"]:
    """Linear interpolation; the edge value beyond the outermost points.

    ``align_corners=False`` takes points for the centres of cells that fill the axis,
    ``True`` for nodes with the first and the last on the ends, as PyTorch does.
    """
    return _resize(x, sizes, lambda n, m: _kernel_matrix(n, m, align_corners, _hat, 1))


def cubic(
    x: Float[Array, "batch *grid channels"],
    sizes: Sequence[int],
    align_corners: bool = False,
) -> Float[Array, "batch *resized channels"]:
    """Cubic convolution (Keys 1981) with a = -0.75, PyTorch's; see :func:`linear`."""
    return _resize(x, sizes, lambda n, m: _kernel_matrix(n, m, align_corners, _keys, 2))


def _resize(x, sizes: Sequence[int], matrix: Callable[[int, int], np.ndarray]):
    grid = x.shape[1:-1]
    if len(sizes) != len(grid) or min(sizes) < 1 or min(grid) < 1:
        raise ValueError(
            "Resizing needs one size of at least 1 for each spatial axis of "
            f"(batch, *grid, channels); got sizes={tuple(sizes)} for {x.shape=}."
        )
    for axis, (old, new) in enumerate(zip(grid, sizes, strict=True), start=1):
        if new != old:
            rounded = matrix(old, new).astype(jnp.result_type(float))
            x = along_axis(jnp.asarray(rounded), x, axis)
    return x


def _fourier_matrix(old: int, new: int) -> np.ndarray:
    small = min(old, new)
    k = np.arange(1, (small + 1) // 2)
    # turns[m, n] = position of the new point minus that of the old one, in periods,
    # as an integer over old x new: exact for any size.
    turns = np.arange(new)[:, None] * old - np.arange(old)[None, :] * new
    phase = turns[..., None] * k % (old * new) / (old * new)
    matrix = 1 + 2 * np.cos(2 * np.pi * phase).sum(axis=-1)
    if small % 2 == 0:
        phase = turns * (small // 2) % (old * new) / (old * new)
        # An old grid of that size holds this wavenumber once; a finer one holds it
        # at both signs, which fall together on the new grid.
        matrix += (1 if small == old else 2) * np.cos(2 * np.pi * phase)
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
