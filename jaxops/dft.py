"""Truncated discrete Fourier transforms of real fields, as matrix products.

Only the wavenumbers that are asked for are computed, so a transform costs
O(size x kept) an axis, needs no FFT and no complex number, and takes any size, odd or
even. Matrices are built in float64 and rounded once.

The waves exp(i k n) and exp(-i k n) are made of one cosine and one sine. So each axis
is multiplied by real cosines and sines, of the wavenumbers without their signs, and
the small array that results is put together to complex coefficients, with signs, at
the end. The first axis comes first: its product is the largest, and has the longest
rows to multiply there.

Conventions, those of ``numpy.fft.rfftn(..., norm="forward")``: with N points on a
periodic axis

    X[k] = 1/N sum_n x[n] exp(-2 pi i k n / N)
    x[n] = sum_k X[k] exp(2 pi i k n / N)

The last spatial axis keeps non-negative wavenumbers only. A spectrum is a real array
``(batch, 2, *kept, channels)``, real part first.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxops.device import device_kind
from jaxops.matmul import along_axes, along_axis

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
    kept = [tuple(int(k) for k in ks) for ks in wavenumbers]
    batch, channels, last = x.shape[0], x.shape[-1], len(sizes)
    multiple = _multiple(x.dtype)
    counts = _counts(kept, multiple)
    for axis in range(1, last):
        waves = _folded_waves(sizes[axis - 1], kept[axis - 1], multiple)
        x = along_axis(waves, x, axis)
    z = along_axis(_waves(sizes[-1], kept[-1], multiple), x, last)
    for axis in range(last - 1, 0, -1):
        z = z.reshape(*z.shape[: axis + 1], 2, *counts[axis:], channels)
        z = _to_signed(z, axis, sizes[axis - 1], kept[axis - 1], multiple)
    z = z.reshape(batch, 2, *counts, channels)
    return z[..., : len(kept[-1]), :]


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
    channels, last = z.shape[-1], len(sizes)
    multiple = _multiple(z.dtype)
    counts = _counts(kept, multiple)
    if counts[-1] > z.shape[-2]:
        zeros = [(0, 0)] * (z.ndim - 2) + [(0, counts[-1] - z.shape[-2]), (0, 0)]
        z = jnp.pad(z, zeros)
    for axis in range(1, last):
        z = _to_folded(z, axis, sizes[axis - 1], kept[axis - 1], multiple)
        waves = z.shape[axis] // 2
        z = z.reshape(*z.shape[:axis], waves, 2, *counts[axis:], channels)
    x = along_axes(_inverse_real(sizes[-1], kept[-1], multiple), z, last, 2)
    for axis in range(last - 1, 0, -1):
        size = sizes[axis - 1]  # the adjoint, without the scaling
        waves = _folded_waves(size, kept[axis - 1], multiple)
        x = along_axis(waves.T * size, x, axis)
    return x


def _to_signed(z, axis: int, size: int, wavenumbers: tuple[int, ...], multiple: int):
    """(.., wave folded, part, ..) to (.., part kept, ..): C + i s S.

    C and S are complex, of the axes behind; s is the sign of the wavenumber. It is a
    product with a matrix of ones; on NVIDIA's and AMD's GPUs sums, which they join with
    what is around them. (On a CPU XLA then chose layouts for the next product that its
    own compiler ends the process for.)
    """
    if device_kind() != "gpu":
        return along_axes(_unfold(size, wavenumbers, multiple), z, axis, 2)
    before, after = z.shape[:axis], z.shape[axis + 2 :]
    filled = z.shape[axis] // 2
    waves = z.reshape(math.prod(before), 2, filled, 2, math.prod(after))
    cosine, sine = waves[:, 0], waves[:, 1]

    def part(own: int, sign: int):
        rows = []
        for run in _runs(size, wavenumbers):
            c, s = cosine[:, run.folded, own], sine[:, run.folded, 1 - own]
            y = c + s if sign * run.sign > 0 else c - s
            rows.append(jnp.flip(y, axis=1) if run.is_flipped else y)
        return rows

    z = jnp.concatenate([*part(0, -1), *part(1, 1)], axis=1)
    return z.reshape(*before, 2 * len(wavenumbers), *after)


def _to_folded(z, axis: int, size: int, wavenumbers: tuple[int, ...], multiple: int):
    """(.., part, kept, ..) to (.., wave folded part, ..): what :func:`_to_signed` does,
    transposed."""
    if device_kind() != "gpu":
        return along_axes(_unfold(size, wavenumbers, multiple).T, z, axis, 2)
    before, after = z.shape[:axis], z.shape[axis + 2 :]
    parts = z.reshape(math.prod(before), 2, len(wavenumbers), math.prod(after))
    distinct = len(set(_folded(size, wavenumbers)[0]))
    count = _filled(distinct, multiple)

    def wave(part: int, sign: int | None = None):  # of a sine's; None: a cosine
        total = 0
        for run in _runs(size, wavenumbers):
            y = parts[:, part, run.rows]
            y = jnp.flip(y, axis=1) if run.is_flipped else y
            ends = run.folded.start, count - run.folded.stop
            y = jnp.pad(y, [(0, 0), ends, (0, 0)])
            is_added = sign is None or sign * run.sign > 0
            total = total + y if is_added else total - y
        return total

    cosines, sines = [wave(0), wave(1)], [wave(1, 1), wave(0, -1)]
    z = jnp.stack([jnp.stack(waves, axis=2) for waves in (cosines, sines)], axis=1)
    return z.reshape(*before, 4 * count, *after)


class _Run(NamedTuple):
    """Neighbouring wavenumbers with one sign: where they are among those kept and among
    those folded, there in reverse order if ``is_flipped``."""

    rows: slice
    folded: slice
    is_flipped: bool
    sign: int


@lru_cache(maxsize=256)
def _runs(size: int, wavenumbers: tuple[int, ...]) -> tuple[_Run, ...]:
    folded, signs = _folded(size, wavenumbers)
    distinct = sorted(set(folded))
    at = [distinct.index(k) for k in folded]
    runs, start = [], 0
    for row in range(1, len(at) + 1):
        step = at[start + 1] - at[start] if row > start + 1 else None
        goes_on = row < len(at) and signs[row] == signs[start]
        if goes_on and at[row] - at[row - 1] in ((1, -1) if step is None else (step,)):
            continue
        first, last = min(at[start], at[row - 1]), max(at[start], at[row - 1])
        places = slice(first, last + 1)
        runs.append(_Run(slice(start, row), places, step == -1, signs[start]))
        start = row
    return tuple(runs)


def _multiple(dtype) -> int:
    """Waves of an axis are filled up to a multiple of it with waves of zeros.

    The rows of both parts are then multiples of 16 bytes, as the kernels for a GPU's
    matrix units ask for: 66 wavenumbers of 256 points took 1.5 times as long as 68 in
    TF32, and 1.5 times as long as 72 in bfloat16. Elsewhere nothing is gained.
    """
    return max(8 // dtype.itemsize, 1) if device_kind() == "gpu" else 1


def _counts(kept: list[tuple[int, ...]], multiple: int) -> tuple[int, ...]:
    """Wavenumbers of each axis; those of the last one filled up."""
    *others, last = (len(ks) for ks in kept)
    return (*others, _filled(last, multiple))


def _filled(count: int, multiple: int) -> int:
    return count + -count % multiple


def _fill(rows: np.ndarray, multiple: int) -> np.ndarray:
    count = len(rows)
    return np.pad(rows, ((0, _filled(count, multiple) - count), (0, 0)))


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


@lru_cache(maxsize=256)
def _waves(size: int, wavenumbers: tuple[int, ...], multiple: int) -> np.ndarray:
    """(part kept, size): cosines and negative sines, to a real axis."""
    cosine, sine = (_fill(rows, multiple) for rows in _cos_sin(size, wavenumbers))
    return np.concatenate([cosine, -sine]) / size


def _folded(size: int, wavenumbers: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Of each wavenumber, the one from 0 to size/2 that has its waves, and its sign."""
    residues = [k % size for k in wavenumbers]
    signs = [1 if 2 * k <= size else -1 for k in residues]
    return [min(k, size - k) for k in residues], signs


def _folded_waves(size: int, wavenumbers: tuple[int, ...], multiple: int) -> np.ndarray:
    """(wave folded, size): of each folded wavenumber once, in their order."""
    return _waves(size, tuple(sorted(set(_folded(size, wavenumbers)[0]))), multiple)


@lru_cache(maxsize=256)
def _unfold(size: int, wavenumbers: tuple[int, ...], multiple: int) -> np.ndarray:
    """(part kept, wave folded part): C + i s S from the coefficients of both waves.

    C and S are complex, of the axes behind; s is the sign of the wavenumber.
    """
    folded, signs = _folded(size, wavenumbers)
    distinct = sorted(set(folded))
    filled = _filled(len(distinct), multiple)
    matrix = np.zeros((2, len(wavenumbers), 2, filled, 2))
    for row, (k, sign) in enumerate(zip(folded, signs, strict=True)):
        at = distinct.index(k)
        matrix[0, row, 0, at, 0] = matrix[1, row, 0, at, 1] = 1
        matrix[0, row, 1, at, 1] = -sign
        matrix[1, row, 1, at, 0] = sign
    return matrix.reshape(2 * len(wavenumbers), 4 * filled)


@lru_cache(maxsize=256)
def _inverse_real(size: int, wavenumbers: tuple[int, ...], multiple: int) -> np.ndarray:
    """(size, part kept): to a real axis, by irfft's rule."""
    if min(wavenumbers) < 0 or max(wavenumbers) > size // 2:
        raise ValueError(
            "The last axis takes wavenumbers from 0 to size // 2 only; got "
            f"{min(wavenumbers)} to {max(wavenumbers)} for {size=}."
        )
    cosine, sine = _cos_sin(size, wavenumbers)
    own_conjugate = [k == 0 or 2 * k == size for k in wavenumbers]
    weight = np.where(own_conjugate, 1.0, 2.0)[:, None]
    waves = (_fill(rows, multiple) for rows in (weight * cosine, -weight * sine))
    return np.concatenate(list(waves)).T
