"""3D convolution with gradients that are fast, and are made of 2D parts too.

Three operations on volumes x, y (batch, depth, height, width, channels) and a kernel
k (kd, kh, kw, in, out), with strides s, dilation d and p zeros before:

    convolve:         y[o] = sum_t x[o s + t d - p] k[t]
    adjoint:          x[i] = sum_t y[(i + p - t d) / s] k[t]^T, where s divides
    kernel_gradient:  k[t] = sum_o x[o s + t d - p]^T y[o]

The first two are each other's gradient, to any order in reverse mode. An adjoint with
strides is one ordinary convolution for each phase of the grid, the results interleaved.
The kernel gradient is wide matrix products: as a convolution its window would be as
large as the image, which is the slowest case on CPUs and on Apple's plugins.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxops.conv3d_forms import (
    PRODUCTS,
    Forms,
    applicable,
    combined,
    convolution,
    depth_tap,
    pad_plane,
    plane_convolution,
    winograd_coefficients,
    winograd_slices,
)
from jaxops.matmul import matmul_precision, sum_dtype
from jaxops.resize import pixel_shuffle
from jaxops.windows import Triple, Window, interleave, pad, tap, unstacked

# Most elements of the copies that a kernel gradient makes at a time; of partial sums.
COPIED = 2**27
PARTIAL = 2**24
# Points that a partial sum is taken over: many enough for a good product, few enough
# for all threads, and for sums that lose no digits.
POINTS = 2**13


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(x, kernel, window: Window, forms: Forms):
    """See the top of this file. One dtype; the window is :func:`windows.fitted`."""
    return convolution(x, kernel, window, forms.forward, forms.side_by_side)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def adjoint(y, kernel, window: Window, forms: Forms):
    """See the top of this file. The window is the convolution's."""
    return _adjoint(y, kernel, window, forms)


def _convolve_forward(x, kernel, window, forms):
    return convolve(x, kernel, window, forms), (x, kernel)


def _convolve_backward(window, forms, saved, y):
    x, kernel = saved
    return (
        adjoint(y, kernel, window, forms),
        kernel_gradient(x, y, kernel.shape[:3], window, forms),
    )


def _adjoint_forward(y, kernel, window, forms):
    return adjoint(y, kernel, window, forms), (y, kernel)


def _adjoint_backward(window, forms, saved, x):
    y, kernel = saved
    return (
        convolve(x, kernel, window, forms),
        kernel_gradient(x, y, kernel.shape[:3], window, forms),
    )


convolve.defvjp(_convolve_forward, _convolve_backward)
adjoint.defvjp(_adjoint_forward, _adjoint_backward)


class _Phase(NamedTuple):
    """The points of one axis that are r modulo the stride: a convolution of its own.

    Attributes:
        first, step, count: of the kernel's taps that reach these points; maybe none.
        dilation: of y, between these taps.
        padding: of y, so that each phase makes ceil(points / stride) points.
    """

    first: int
    step: int
    count: int
    dilation: int
    padding: tuple[int, int]


def _phases(
    points: int, outputs: int, taps: int, stride: int, dilation: int, low: int
) -> list[_Phase]:
    phases = []
    for r in range(stride):
        own = [t for t in range(taps) if (t * dilation - r - low) % stride == 0]
        # Tap t reads y behind[t] points before the point of the phase.
        behind = [(t * dilation - r - low) // stride for t in own] or [0]
        between = behind[1] - behind[0] if len(own) > 1 else 1
        before = behind[-1]
        after = -(-points // stride) - outputs - behind[0]
        step = own[1] - own[0] if len(own) > 1 else 1
        first = own[0] if own else 0
        phases.append(_Phase(first, step, len(own), between, (before, after)))
    return phases


def _adjoint(y, kernel, window: Window, forms: Forms):
    taps, outputs = kernel.shape[:3], y.shape[1:4]
    sizes = input_sizes(outputs, taps, window)
    kernel = jnp.swapaxes(kernel, 3, 4)
    axes = [
        _phases(n, o, k, s, d, low)
        for n, o, k, s, d, (low, _) in zip(sizes, outputs, taps, *window, strict=True)
    ]
    first = tuple(phases[0] for phases in axes)
    if math.prod(window.strides) > 1 and all(
        phase.count > 0 and phase[2:] == one[2:]
        for phases, one in zip(axes, first, strict=True)
        for phase in phases
    ):  # as where the stride is the size of the kernel: all phases at once
        parts = [_part(kernel, chosen) for chosen in itertools.product(*axes)]
        joined = jnp.stack(parts, axis=-1).reshape(*parts[0].shape[:4], -1)
        x = pixel_shuffle(_phase(y, joined, first, forms), window.strides)
    else:
        made = [-(-n // s) for n, s in zip(sizes, window.strides, strict=True)]
        nothing = jnp.zeros((y.shape[0], *made, kernel.shape[4]), y.dtype)

        def filled(chosen: tuple[_Phase, ...]):
            if len(chosen) < 3:
                axis = len(chosen)
                parts = [filled((*chosen, phase)) for phase in axes[axis]]
                return interleave(parts, axis=axis + 1)
            if not all(phase.count for phase in chosen):
                return nothing
            return _phase(y, _part(kernel, chosen), chosen, forms)

        x = filled(())
    return x[:, : sizes[0], : sizes[1], : sizes[2]]


def _part(kernel, chosen: Sequence[_Phase]):
    """The taps of a phase of each axis, last first: y is read backwards."""
    for axis, phase in enumerate(chosen):
        kernel = tap(kernel, axis, phase.first, phase.step, phase.count)
    return jnp.flip(kernel, (0, 1, 2))


def _phase(y, kernel, chosen: Sequence[_Phase], forms: Forms):
    dilation = tuple(phase.dilation for phase in chosen)
    window = Window((1, 1, 1), dilation, tuple(phase.padding for phase in chosen))
    return convolution(y, kernel, window, forms.input_gradient, forms.side_by_side)


def input_sizes(outputs: Sequence[int], taps: Sequence[int], window: Window) -> Triple:
    """Sizes of the volume that a convolution makes one of sizes ``outputs`` of."""
    axes = zip(outputs, taps, *window, strict=True)
    return tuple((n - 1) * s + d * (k - 1) + 1 - sum(p) for n, k, s, d, p in axes)


def kernel_gradient(x, y, taps: Triple, window: Window, forms: Forms):
    """See the top of this file; ``taps`` is (kd, kh, kw)."""
    plane = Window(*(axes[1:] for axes in window))
    if forms.kernel_gradient == "joined" and window.strides[0] == 1:
        return _joined_gradient(x, y, taps, window, plane)
    if forms.kernel_gradient in ("convolution", "joined"):
        kernel = jnp.zeros((*taps, x.shape[-1], y.shape[-1]), x.dtype)
        forward = partial(
            convolution, x, window=window, form="concat", side_by_side=False
        )
        return jax.vjp(forward, kernel)[1](y)[0]
    outputs = y.shape[1]
    x = pad(x, (window.padding[0], (0, 0), (0, 0)))
    if applicable(forms.kernel_gradient, taps[0], outputs, window) == "winograd":
        coefficients = winograd_coefficients(taps[0])
        m = PRODUCTS + 1 - taps[0]
        y = pad(y, ((0, -outputs % m), (0, 0), (0, 0)))
        y = y.reshape(y.shape[0], -1, m, *y.shape[2:])
        parts = unstacked(y, 2)
        products = [
            _plane_gradient(slices, combined(column, parts), taps[1:], plane)
            for slices, column in zip(
                winograd_slices(x, taps[0], outputs),
                zip(*coefficients.out, strict=True),
                strict=True,
            )
        ]
        columns = zip(*coefficients.kernel, strict=True)
        gradients = [combined(column, products) for column in columns]
    else:
        gradients = [
            _plane_gradient(depth_tap(x, t, outputs, window), y, taps[1:], plane)
            for t in range(taps[0])
        ]
    return jnp.stack(gradients).astype(x.dtype)


def _joined_gradient(x, y, taps: Triple, window: Window, plane: Window):
    """JAX's gradient of one 2D convolution of x to all taps of the depth."""
    depth, dilation = taps[0], window.dilation[0]
    low = window.padding[0][0]
    (phase,) = _phases(x.shape[1], y.shape[1], depth, 1, dilation, low)
    # The operations of `concat` in `adjoint`, one by one: XLA takes them for the same.
    y = pad(y, (phase.padding, (0, 0), (0, 0)))
    parts = [tap(y, 1, t * dilation, 1, x.shape[1]) for t in range(depth)]
    joined = jnp.concatenate(parts, axis=-1)
    kernel = jnp.zeros((*taps[1:], x.shape[-1], joined.shape[-1]), x.dtype)
    forward = partial(plane_convolution, x, window=plane, side_by_side=False)
    gradient = jax.vjp(forward, kernel)[1](joined)[0]
    gradient = gradient.reshape(*gradient.shape[:3], depth, -1)
    return jnp.flip(jnp.moveaxis(gradient, 3, 0), 0)


def _plane_gradient(x, y, taps: tuple[int, int], window: Window):
    """(kh, kw, in, out), in at least float32, of slices and a window of two axes.

    Row and column taps are joined on the channels of x, of y, or one on each, so that
    few wide products make all of them: whichever copies the fewest values.
    """
    (kh, kw), (dh, dw) = taps, window.dilation
    x, y = x.reshape(-1, *x.shape[2:]), y.reshape(-1, *y.shape[2:])
    x = pad_plane(x, window.padding)
    inputs, outputs, (sh, sw) = x.shape[-1], y.shape[-1], window.strides
    # How many row and column taps x takes; y takes the others.
    shares = {(kh, kw): kh * kw * inputs}
    if sw == 1:
        shares[kh, 1] = kh * inputs + kw * outputs
        if sh == 1:
            shares[1, 1] = kh * kw * outputs
    (rows, columns), copies = min(shares.items(), key=lambda share: share[1])
    behind, beside = dh * (kh // rows - 1), dw * (kw // columns - 1)
    height, width = y.shape[1] + behind, y.shape[2] + beside

    def gradient(x, y):
        x_parts = [
            tap(tap(x, 1, i * dh, sh, height), 2, j * dw, sw, width)
            for i in range(rows)
            for j in range(columns)
        ]
        y = pad_plane(y, ((behind, behind), (beside, beside)))
        y_parts = [
            y[:, behind - i * dh :][:, :height, beside - j * dw :][:, :, :width]
            for i in range(kh // rows)
            for j in range(kw // columns)
        ]
        return _summed_product(_joined(x_parts), _joined(y_parts))

    whole = max(1, COPIED // (copies * height * width))
    total = sum(
        gradient(x[start : start + whole], y[start : start + whole])
        for start in range(0, len(x), whole)
    )
    shape = (rows, columns, inputs, kh // rows, kw // columns, outputs)
    return total.reshape(shape).transpose(0, 3, 1, 4, 2, 5).reshape(kh, kw, inputs, -1)


def _joined(parts: list):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _summed_product(x, y):
    """sum over all points of x^T y, as a few products in parallel, then summed."""
    points, size = math.prod(x.shape[:-1]), x.shape[-1] * y.shape[-1]
    rows, most = x.shape[0] * x.shape[1], max(1, min(points // POINTS, PARTIAL // size))
    groups = max(g for g in range(1, min(rows, most) + 1) if rows % g == 0)
    products = jnp.matmul(
        jnp.swapaxes(x.reshape(groups, -1, x.shape[-1]), 1, 2),
        y.reshape(groups, -1, y.shape[-1]),
        precision=matmul_precision(),
        preferred_element_type=sum_dtype(x),
    )
    return products.sum(axis=0)
