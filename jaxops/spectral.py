"""Convolution in Fourier space on real arrays: the heart of an FNO layer.

Li et al., "Fourier Neural Operator for Parametric Partial Differential Equations"
(arXiv:2010.08895): transform, multiply each kept wavenumber by its own matrix of
channels, transform back.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxops import dft, resize
from jaxops.device import barrier
from jaxops.matmul import batched_matmul
from jaxops.pointwise import dense

Compat = str | None  # "neuralop-2.0"


@dataclass(frozen=True)
class AxisModes:
    """What one axis of a spectral convolution keeps, three entries a mode.

    Attributes:
        rows: of the weight.
        wavenumbers: of the input.
        output_wavenumbers: where they go in the output; differs for ``compat`` alone.
    """

    rows: tuple[int, ...]
    wavenumbers: tuple[int, ...]
    output_wavenumbers: tuple[int, ...]


def spectral_conv(
    x: Shaped[Array, "batch *grid channels"],
    weight: Shaped[Array, "parts *modes in_channels out_channels"],
    n_modes: Sequence[int],
    output_shape: Sequence[int] | None = None,
    compat: Compat = None,
    precision: str = "full",
    kernel: Float[Array, "out_channels last_channels"] | None = None,
    x_bias: Float[Array, " channels"] | None = None,
) -> Float[Array, "batch *output_grid last_channels"]:
    """Multiply the Fourier coefficients of ``x`` by ``weight``.

    y = F^-1 (W(k) F x (k)), with one matrix of channels W(k) for each kept wavenumber.

    Args:
        x: real field, channels last, any number of spatial axes; whole numbers are
            taken for numbers of the weight's dtype.
        weight: real part first. Row i of an axis but the last holds wavenumber
            i - rows//2; the last axis holds 0, 1, ...
        n_modes: modes to keep an axis, negative ones counted in; the last axis keeps
            n_modes[-1]//2 + 1. At most what the weight has. Fewer take the centre
            of the weight. More than the grid has are clamped, with a warning.
        output_shape: grid of the result, by default that of ``x``. The result is the
            Fourier interpolant of the operator's output on that grid.
        compat: ``"neuralop-2.0"`` repeats what neuraloperator 2.0.0 does on odd
            grids, with an odd number of modes cut off, and between grids of different
            sizes, for weights that were trained that way. There every axis of odd
            size but the last comes back multiplied by one wave, exp(-2 pi i n/N).
        precision: ``"half"`` computes in float16, ``"mixed"`` only the product with
            the weight; the result has the dtype of ``x``.
        kernel: of a 1x1 convolution of the result. It is applied to the coefficients,
            which are few, and the way back to the grid takes its channels alone.
        x_bias: to be added to ``x`` at every point: here to one coefficient.

    Returns:
        The real field; for a spectrum that is not Hermitian, the one that irfftn gives.

    Raises:
        ValueError: for shapes that do not fit each other, or an unknown option.
        TypeError: for complex arrays.

    Example:
        ``n_modes=(8, 8)`` on (batch, x, y, in) takes a weight (2, 8, 5, in, out).
    """
    _check_kinds(x, weight, compat, precision)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(weight.dtype)
    grid = x.shape[1:-1]
    output_shape = grid if output_shape is None else tuple(output_shape)
    _check(x, weight, n_modes, output_shape)
    plan = axis_modes(weight.shape[1:-2], n_modes, grid, output_shape, compat)
    spectrum_dtype = jnp.float16 if precision == "half" else x.dtype
    product_dtype = x.dtype if precision == "full" else jnp.float16

    z = dft.forward(x.astype(spectrum_dtype), [axis.wavenumbers for axis in plan])
    if x_bias is not None and all(0 in axis.wavenumbers for axis in plan):
        z = z + _constant_field(x_bias.astype(z.dtype), plan)
    for axis, modes in enumerate(plan, start=1):
        weight = _take_rows(weight, modes.rows, axis)
    z = multiply(z.astype(product_dtype), weight).astype(spectrum_dtype)
    z = z if kernel is None else dense(z, kernel)
    kept = [axis.output_wavenumbers for axis in plan]
    return barrier(dft.inverse(z, kept, output_shape).astype(x.dtype), "gpu")


def _constant_field(values, plan: list[AxisModes]):
    """Coefficients (1, 2, *kept, channels) of a field that has one value a channel."""
    pads = [(0, 0), (0, 1)]
    for modes in plan:
        at = modes.wavenumbers.index(0)
        pads.append((at, len(modes.wavenumbers) - 1 - at))
    z = values.reshape((1,) * (len(pads)) + (-1,))
    return jnp.pad(z, [*pads, (0, 0)])


def _take_rows(weight, rows: tuple[int, ...], axis: int):
    if rows == tuple(range(weight.shape[axis])):
        return weight
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return lax.slice_in_dim(weight, rows[0], rows[0] + len(rows), axis=axis)
    return jnp.take(weight, np.asarray(rows), axis=axis)


def multiply(
    z: Float[Array, "batch 2 *kept in_channels"],
    weight: Float[Array, "2 *kept in_channels out_channels"],
) -> Float[Array, "batch 2 *kept out_channels"]:
    """Complex product of each wavenumber's channels with its own matrix.

    The real and imaginary parts of ``z`` are stacked on the batch, and all of that
    stands twice before the two halves of the weight, so that the weight, the largest
    array here, is read once as it lies, and its gradient is written once as it lies.
    """
    batch, kept, channels = z.shape[0], z.shape[2:-1], z.shape[-1]
    count, features = math.prod(kept), weight.shape[-1]
    rows = z.reshape(batch * 2, count, channels).transpose(1, 0, 2)
    rows = jnp.concatenate([rows, rows])
    product = batched_matmul(
        rows, weight.reshape(2 * count, channels, features).astype(z.dtype)
    )
    by_real, by_imaginary = product.reshape(2, count, batch, 2, features)
    product = jnp.stack(
        [
            by_real[:, :, 0] - by_imaginary[:, :, 1],
            by_real[:, :, 1] + by_imaginary[:, :, 0],
        ],
        axis=2,
    )
    return product.transpose(1, 2, 0, 3).reshape(batch, 2, *kept, features)


def axis_modes(
    weight_rows: Sequence[int],
    n_modes: Sequence[int],
    grid: Sequence[int],
    output_grid: Sequence[int],
    compat: Compat = None,
) -> list[AxisModes]:
    """What each axis keeps, for :func:`spectral_conv`; its arguments are there."""
    plan = []
    last = len(grid) - 1
    clamped = False
    for axis, (rows, modes, size, output_size) in enumerate(
        zip(weight_rows, n_modes, grid, output_grid, strict=True)
    ):
        wanted, available = modes, size
        if axis == last:
            wanted, available = modes // 2 + 1, size // 2 + 1
        clamped = clamped or wanted > available
        count = min(wanted, available)
        if compat is not None:
            plan.append(_compat_axis(rows, count, size, output_size, axis, last))
        elif axis == last:
            count = min(count, output_size // 2 + 1)
            k = tuple(range(count))
            plan.append(AxisModes(k, k, k))
        else:
            k = dft.centred_wavenumbers(min(count, output_size))
            plan.append(AxisModes(tuple(rows // 2 + i for i in k), k, k))
    if clamped:
        warnings.warn(
            f"n_modes={tuple(n_modes)} is more than a grid of {tuple(grid)} points "
            "has; the modes that it has are kept. Use fewer modes or a finer grid.",
            stacklevel=3,
        )
    return plan


def _compat_axis(
    rows: int, count: int, size: int, output_size: int, axis: int, last: int
) -> AxisModes:
    """neuraloperator 2.0.0, SpectralConv.forward, as wavenumbers.

    It moves the spectrum back with fftshift where ifftshift is due, which turns an axis
    of odd size by one, and lets irfftn cut or extend the spectrum at its end, which
    takes negative wavenumbers for large positive ones on a grid of another size.
    """
    if axis == last:
        k = tuple(range(min(count, output_size // 2 + 1)))
        return AxisModes(k, k, k)
    first = (rows - count) // 2
    kept = []
    for row, k in enumerate(dft.centred_wavenumbers(count), start=first):
        position = (k + 2 * (size // 2)) % size
        if position < output_size:  # those beyond are lost
            kept.append((row, k, position))
    if not kept:
        raise ValueError(
            f"compat='neuralop-2.0' keeps none of {count} modes of an axis of {size} "
            f"points on {output_size} points. Keep more modes or leave compat out."
        )
    return AxisModes(*(tuple(column) for column in zip(*kept, strict=True)))


def resample(
    x: Float[Array, "batch *grid channels"],
    output_shape: Sequence[int],
    compat: Compat = None,
) -> Float[Array, "batch *output_grid last_channels"]:
    """Bring the skip of a layer to the grid of the layer's output.

    Fourier interpolation, as the layer itself does. With ``compat="neuralop-2.0"``,
    what neuraloperator 2.0.0 does: linear in 1D, bicubic in 2D, both between end
    points that stay, and a Fourier interpolation of its own in 3D.
    """
    grid = x.shape[1:-1]
    if tuple(output_shape) == grid:
        return x
    if compat is None:
        return resize.fourier(x, output_shape)
    if len(grid) == 1:
        return resize.linear(x, output_shape, align_corners=True)
    if len(grid) == 2:
        return resize.cubic(x, output_shape, align_corners=True)
    taken, placed = [], []
    for old, new in zip(grid[:-1], output_shape[:-1], strict=True):
        modes = min(old, new)
        # Indices from the end, -(m//2) of an odd m being rounded down there.
        k = [*range(modes // 2), *range(-((modes + 1) // 2), 0)]
        taken.append(k)
        placed.append([i % new for i in k])
    last = range(min(grid[-1], output_shape[-1]) // 2 + 1)
    spectrum = dft.forward(x, [*taken, last])
    return dft.inverse(spectrum, [*placed, last], output_shape)


def _check_kinds(x, weight, compat, precision) -> None:
    for name, array in (("x", x), ("weight", weight)):
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} is {array.dtype}: pass real numbers, a spectral weight as "
                "(2, *modes, in_channels, out_channels) with the real part first."
            )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"The weight is {weight.dtype}; it must be floats.")
    if compat not in (None, "neuralop-2.0"):
        raise ValueError(f"compat is None or 'neuralop-2.0'; got {compat!r}.")
    if precision not in ("full", "half", "mixed"):
        raise ValueError(f"precision is 'full', 'half' or 'mixed'; got {precision!r}.")


def _check(x, weight, n_modes: Sequence[int], output_shape: Sequence[int]) -> None:
    axes = x.ndim - 2
    if axes < 1 or len(n_modes) != axes or len(output_shape) != axes:
        raise ValueError(
            "x is (batch, *grid, channels) with one entry of n_modes and of "
            f"output_shape for each spatial axis; got {x.shape=}, n_modes="
            f"{tuple(n_modes)}, output_shape={tuple(output_shape)}."
        )
    if weight.ndim != axes + 3 or weight.shape[0] != 2:
        raise ValueError(
            "The weight is (2, *modes, in_channels, out_channels), real part first; "
            f"got {weight.shape=} for {axes} spatial axes."
        )
    if weight.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"The weight takes {weight.shape[-2]} channels; x has {x.shape[-1]}: "
            f"{x.shape=}, {weight.shape=}."
        )
    if min(x.shape[1:-1]) < 1 or min(output_shape) < 1 or min(n_modes) < 1:
        raise ValueError(
            "Every axis needs at least one point and one mode; got "
            f"{x.shape=}, output_shape={tuple(output_shape)}, n_modes={tuple(n_modes)}."
        )
    needed = (*n_modes[:-1], n_modes[-1] // 2 + 1)
    if any(n > rows for n, rows in zip(needed, weight.shape[1:-2], strict=True)):
        raise ValueError(
            f"n_modes={tuple(n_modes)} needs {needed} rows of the weight; it has "
            f"{weight.shape[1:-2]}. Use fewer modes or a weight for more of them."
        )
