"""Truncated discrete Fourier transforms of real fields, as matrix products.

Only the wavenumbers that are asked for are computed, so a transform costs
O(size x kept) an axis, needs no FFT and no complex number, and takes any size, odd or
even. Matrices are built in float64 and rounded once.

Conventions, those of ``numpy.fft.rfftn(..., norm="forward")``: with N points on a
periodic axis

    X[k] = 1/N sum_n x[n] exp(-2 pi i k n / N)
    x[n] = sum_k X[k] exp(2 pi i k n / N)

The last spatial axis keeps non-negative wavenumbers only. A spectrum is a real array
``(batch, 2, *kept, channels)``, real part first.
"""

from collections.abc import Sequence
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxops.matmul import along_axes

Wavenumbers = Sequence[Sequence[int]]


def centred_wavenumbers(count: int) -> tuple[int, ...]:
    """``count`` wavenumbers around zero: -(count//2), ..., (count-1)//2."""
    return tuple(range(-(count // 2), (count + 1) // 2))


def kept_wavenumbers(
    n_modes: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The wavenumbers that an FNO keeps, one tuple an axis.

    Args:
        n_modes: number of modes of each axis, negative ones counted in; the last axis
            keeps the ``n_modes[-1] // 2 + 1`` that are not negative.
        sizes: grid points of each axis; a grid that has fewer modes keeps all it has.
    """
    full = [
        centred_wavenumbers(min(n, size))
        for n, size in zip(n_modes[:-1], sizes[:-1], strict=True)
    ]
    last = range(min(n_modes[-1] // 2, sizes[-1] // 2) + 1)
    return (*full, tuple(last))


def forward(
    x: Float[Array, "batch *grid channels"], wavenumbers: Wavenumbers
) -> Float[Array, "batch 2 *kept channels"]:
    """Fourier coefficients of a real field at the given wavenumbers.

    Args:
        x: real field, channels last, with one to any number of spatial axes.
        wavenumbers: one sequence of integers an axis (see :func:`kept_wavenumbers`).

    Returns:
        The coefficients, scaled by 1/N, in the dtype of ``x``.
    """
    sizes = x.shape[1:-1]
    _check_axes(wavenumbers, sizes, x.shape)
    last = x.ndim - 2
    kept = [tuple(int(k) for k in ks) for ks in wavenumbers]
    matrix = jnp.asarray(_forward_real(sizes[-1], kept[-1]))
    z = along_axes(matrix, x, last, 1)
    for axis in range(last - 1, 0, -1):
        counts = (len(ks) for ks in kept[axis:])
        z = z.reshape(*x.shape[: axis + 1], 2, *counts, x.shape[-1])
        matrix = jnp.asarray(_forward_complex(x.shape[axis], kept[axis - 1]))
        z = along_axes(matrix, z, axis, 2)
    return z.reshape(x.shape[0], 2, *(len(ks) for ks in kept), x.shape[-1])


def inverse(
    z: Float[Array, "batch parts *kept channels"],
    wavenumbers: Wavenumbers,
    sizes: Sequence[int],
) -> Float[Array, "batch *grid channels"]:
    """The real field of the given sizes that has these Fourier coefficients.

    Takes irfftn's rule for every spectrum, Hermitian or not: the inverse transforms of
    all axes but the last come first; then the last axis counts the columns of
    wavenumber zero and, on an even grid, size/2 once, without their imaginary parts,
    and every other column twice. ``sizes`` need not be those that ``z`` came from: the
    field is then the Fourier interpolant on the new grid.
    """
    kept = [tuple(int(k) for k in ks) for ks in wavenumbers]
    _check_axes(wavenumbers, sizes, z.shape)
    counts = tuple(len(ks) for ks in kept)
    if z.shape[1:-1] != (2, *counts):
        raise ValueError(
            "A spectrum is (batch, 2, *kept, channels), real part first; got "
            f"{z.shape=} for {counts} wavenumbers."
        )
    batch, channels = z.shape[0], z.shape[-1]
    for axis, (ks, size) in enumerate(zip(kept[:-1], sizes[:-1], strict=True)):
        z = z.reshape(batch, *sizes[:axis], 2, *counts[axis:], channels)
        z = along_axes(jnp.asarray(_inverse_complex(size, ks)), z, 1 + axis, 2)
    z = z.reshape(batch, *sizes[:-1], 2, counts[-1], channels)
    matrix = jnp.asarray(_inverse_real(sizes[-1], kept[-1]))
    return along_axes(matrix, z, len(sizes), 2)


def _check_axes(wavenumbers: Wavenumbers, sizes: Sequence[int], shape) -> None:
    if len(wavenumbers) != len(sizes) or not len(sizes) or min(sizes) < 1:
        raise ValueError(
            "One sequence of wavenumbers and one size of at least 1 is needed for each "
            f"spatial axis; got {len(wavenumbers)} for sizes {tuple(sizes)} and an "
            f"array of shape {shape}."
        )


def _cos_sin(size: int, wavenumbers: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of 2 pi k n / size, (kept, size), in float64.

    The product k n is reduced modulo the size as an integer, so that large arguments
    lose no digits and the multiples of a quarter turn are exact.
    """
    turns = np.outer(np.asarray(wavenumbers, np.int64), np.arange(size)) % size
    angle = 2 * np.pi * np.arange(size) / size
    cosine, sine = np.cos(angle), np.sin(angle)
    if size % 2 == 0:
        sine[size // 2] = 0.0
    if size % 4 == 0:
        cosine[[size // 4, 3 * size // 4]] = 0.0
    return cosine[turns], sine[turns]


# The matrices are kept in float32 unless 64-bit types are on: they are constants of the
# compiled program, and nothing float64 may reach an Apple GPU.
def _rounded(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix, dtype=jnp.result_type(float))


def _forward_real(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    """(part kept, size): from a real axis."""
    return _rounded(_forward_real_float64(size, wavenumbers))


def _forward_complex(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    """(part kept, size part): from a complex axis whose parts follow it."""
    return _rounded(_forward_complex_float64(size, wavenumbers))


def _inverse_complex(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    """(size part, part kept): to a complex axis whose parts follow it."""
    # The adjoint, without the scaling.
    return _rounded(_forward_complex_float64(size, wavenumbers).T * size)


def _inverse_real(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    """(size, part kept): to a real axis, by irfft's rule."""
    return _rounded(_inverse_real_float64(size, wavenumbers))


@lru_cache(maxsize=256)
def _forward_real_float64(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    cosine, sine = _cos_sin(size, wavenumbers)
    return np.concatenate([cosine, -sine]) / size


@lru_cache(maxsize=256)
def _forward_complex_float64(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    cosine, sine = _cos_sin(size, wavenumbers)
    real_row = np.stack([cosine, sine], axis=-1)
    imaginary_row = np.stack([-sine, cosine], axis=-1)
    matrix = np.concatenate([real_row, imaginary_row]) / size
    return matrix.reshape(2 * len(wavenumbers), 2 * size)


@lru_cache(maxsize=256)
def _inverse_real_float64(size: int, wavenumbers: tuple[int, ...]) -> np.ndarray:
    if min(wavenumbers) < 0 or max(wavenumbers) > size // 2:
        raise ValueError(
            "The last axis takes wavenumbers from 0 to size // 2 only; got "
            f"{min(wavenumbers)} to {max(wavenumbers)} for {size=}."
        )
    cosine, sine = _cos_sin(size, wavenumbers)
    own_conjugate = [k == 0 or 2 * k == size for k in wavenumbers]
    weight = np.where(own_conjugate, 1.0, 2.0)[:, None]
    return np.concatenate([weight * cosine, -weight * sine]).T
