"""One 3D convolution, in several exact forms that are made of 2D convolutions.

The taps along the depth are taken in one of the ``FORMS``:

* ``sum``: a 2D convolution a tap, added up. Least memory.
* ``concat``: taps joined on the channels, one 2D convolution. Reads kd copies of x.
* ``outshift``: one 2D convolution to kd times the output channels, shifted and added.
  For few output channels.
* ``winograd``: m neighbouring slices together, of m + kd - 1 = 6 convolutions in place
  of m kd (Winograd's F(m, kd) along the depth): half the arithmetic for three taps, and
  rounding errors about twice as large. Float32 only; for 2 to 5 taps without stride or
  dilation along the depth. ``concat`` takes the others, and volumes too shallow to
  gain. Equal slices at places that differ modulo m may differ in rounding, and a NaN
  spoils the m slices that are computed together.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxops.device import device_kind
from jaxops.matmul import matmul_precision, sum_dtype
from jaxops.windows import Window, interleave, pad, tap, unstacked

FORMS = ("sum", "concat", "outshift", "winograd")
KERNEL_FORMS = ("products", "winograd", "convolution", "joined")

# Of the usual choices these points gave the smallest errors, beside infinity.
POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2))
PRODUCTS = len(POINTS) + 1


class Forms(NamedTuple):
    """How one convolution and its gradients are computed.

    Attributes:
        forward: of ``FORMS``.
        input_gradient: of ``FORMS``.
        kernel_gradient: ``"products"``; ``"winograd"``, half of them for three taps, as
            above; ``"convolution"``, JAX's own gradient of ``concat``; or ``"joined"``,
            its gradient of ``outshift``, on the joined slices of the output's gradient
            that ``concat`` as ``input_gradient`` reads too: they are made once. Where
            the depth has a stride it is ``"convolution"``.
        side_by_side: lay the slices out in one wide image for the 2D convolutions.
    """

    forward: str = "concat"
    input_gradient: str = "concat"
    kernel_gradient: str = "products"
    side_by_side: bool = False


class Winograd(NamedTuple):
    """Coefficients of F(m, taps): out^T [(kernel k) * (slices x)], rows of products.

    Attributes:
        slices: (products, products), of neighbouring input slices.
        kernel: (products, taps).
        out: (m, products).
    """

    slices: tuple[tuple[float, ...], ...]
    kernel: tuple[tuple[float, ...], ...]
    out: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=16)
def winograd_coefficients(taps: int) -> Winograd:
    """The transposed Toom-Cook algorithm on ``POINTS`` and infinity, exact fractions.

    Outputs are coefficients of a product of polynomials, transposed: multiply values at
    each point, where the kernel's value is divided by the Lagrange denominator.
    """
    outputs = PRODUCTS + 1 - taps
    at_infinity = [Fraction(0)] * (taps - 1) + [Fraction(1)]
    kernel, slices = [], []
    for point in POINTS:
        others = [p for p in POINTS if p != point]
        denominator = Fraction(1)
        for other in others:
            denominator *= point - other
        kernel.append([point**t / denominator for t in range(taps)])
        slices.append([*_polynomial(others), Fraction(0)])
    kernel.append(at_infinity)
    slices.append(_polynomial(POINTS))
    out = [
        [*(point**row for point in POINTS), Fraction(row == outputs - 1)]
        for row in range(outputs)
    ]
    as_floats = [
        tuple(tuple(float(value) for value in row) for row in rows)
        for rows in (slices, kernel, out)
    ]
    return Winograd(*as_floats)


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, constant first, of the monic polynomial with these roots."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [*(-root * c for c in coefficients), Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


def combined(coefficients: Sequence[float], arrays: Sequence):
    """The sum of coefficient times array, without the products by 0, 1 and -1."""
    total = None
    for c, array in zip(coefficients, arrays, strict=True):
        if c == 0:
            continue
        if total is None:
            total = array if c == 1 else array * jnp.asarray(c, array.dtype)
        elif abs(c) == 1:
            total = total + array if c > 0 else total - array
        else:
            total = total + array * jnp.asarray(c, array.dtype)
    return total


def winograd_slices(x, taps: int, outputs: int) -> list:
    """The slices of each product: (batch, groups of m outputs, height, width, ch)."""
    m = PRODUCTS + 1 - taps
    groups, reach = -(-outputs // m), (PRODUCTS - 1) // m
    x = pad(x, ((0, (groups + reach) * m - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], groups + reach, m, *x.shape[2:])
    x = unstacked(x, 2)
    neighbours = [x[i % m][:, i // m : i // m + groups] for i in range(PRODUCTS)]
    return [combined(row, neighbours) for row in winograd_coefficients(taps).slices]


def applicable(form: str, taps: int, outputs: int, window: Window) -> str:
    """``form``, or ``"concat"`` where winograd cannot be had or gains nothing."""
    if form != "winograd":
        return form
    covered = window.strides[0] == window.dilation[0] == 1 and 2 <= taps < PRODUCTS
    groups = -(-outputs // (PRODUCTS + 1 - taps))
    return form if covered and PRODUCTS * groups < taps * outputs else "concat"


def output_sizes(inputs: Sequence[int], taps: Sequence[int], window: Window) -> list:
    """Sizes of what a convolution makes of a volume of sizes ``inputs``."""
    axes = zip(inputs, taps, *window, strict=True)
    return [(n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in axes]


def convolution(x, kernel, window: Window, form: str, side_by_side: bool):
    """x (batch, depth, height, width, in) with k (kd, kh, kw, in, out), of one dtype.

    Its own gradient would be slow; ``jaxops.conv3d_gradients`` has another.
    """
    taps = kernel.shape[0]
    outputs = output_sizes(x.shape[1:4], kernel.shape[:3], window)[0]
    plane_window = Window(*(axes[1:] for axes in window))
    plane = partial(plane_convolution, window=plane_window, side_by_side=side_by_side)
    form = applicable(form, taps, outputs, window)
    if form == "outshift" and taps > 1:
        joined = jnp.moveaxis(kernel, 0, 3).reshape(*kernel.shape[1:4], -1)
        y = pad(plane(x, joined), (window.padding[0], (0, 0), (0, 0)))
        y = y.reshape(*y.shape[:4], taps, -1)
        parts = enumerate(unstacked(y, 4))
        return _added([depth_tap(part, t, outputs, window) for t, part in parts])
    x = pad(x, (window.padding[0], (0, 0), (0, 0)))
    if form == "winograd":
        slices = winograd_slices(x, taps, outputs)
        coefficients = winograd_coefficients(taps)
        kernels = [combined(row, unstacked(kernel, 0)) for row in coefficients.kernel]
        products = [plane(a, k) for a, k in zip(slices, kernels, strict=True)]
        y = interleave([combined(row, products) for row in coefficients.out], axis=1)
        return y[:, :outputs]
    parts = [depth_tap(x, t, outputs, window) for t in range(taps)]
    if form == "sum" or taps == 1:
        pairs = zip(parts, unstacked(kernel, 0), strict=True)
        return _added([plane(part, tap_kernel) for part, tap_kernel in pairs])
    joined = jnp.moveaxis(kernel, 0, 2).reshape(*kernel.shape[1:3], -1, kernel.shape[4])
    return plane(jnp.concatenate(parts, axis=-1), joined)


def depth_tap(x, t: int, outputs: int, window: Window):
    """What tap t of the depth reads: one slice of the padded x for each output."""
    return tap(x, 1, t * window.dilation[0], window.strides[0], outputs)


def _added(parts: list):
    if len(parts) == 1:
        return parts[0]
    total = parts[0].astype(sum_dtype(parts[0]))
    for part in parts[1:]:
        total = total + part.astype(total.dtype)
    return total.astype(parts[0].dtype)


def plane_convolution(x, kernel, window: Window, side_by_side: bool):
    """2D convolution of each slice with k (kh, kw, in, out); a window of two axes."""
    images = x.reshape(-1, *x.shape[2:])
    (sh, sw), (_, dw), padding = window
    if kernel.shape[:2] == (1, 1):
        images = pad_plane(images, padding)
        for axis, stride in ((1, sh), (2, sw)):
            images = tap(images, axis, 0, stride, -(-images.shape[axis] // stride))
        y = jnp.matmul(
            images.reshape(-1, images.shape[-1]),
            kernel.reshape(kernel.shape[2:]),
            precision=matmul_precision(),
            preferred_element_type=sum_dtype(x),
        )
        y = y.astype(x.dtype).reshape(*images.shape[:-1], -1)
    elif side_by_side and len(images) > 1 and dw * (kernel.shape[1] - 1) + 1 >= sw:
        y = _side_by_side(images, kernel, window)
    else:
        y = _conv2d(images, kernel, window)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _side_by_side(images, kernel, window: Window):
    """All images as one: XLA's CPU code shares an image out by columns, if many."""
    (_, sw), (_, dw), (rows, (left, right)) = window
    count, reach = len(images), dw * (kernel.shape[1] - 1) + 1
    width = images.shape[2] + left + right
    period = -(-width // sw) * sw
    images = pad_plane(images, ((0, 0), (left, right + period - width)))
    wide = jnp.moveaxis(images, 0, 1)
    wide = wide.reshape(1, wide.shape[0], count * period, wide.shape[3])
    y = _conv2d(wide, kernel, window._replace(padding=(rows, (0, reach - sw))))
    y = y.reshape(y.shape[1], count, period // sw, y.shape[3])
    return jnp.moveaxis(y, 1, 0)[:, :, : (width - reach) // sw + 1]


def _conv2d(images, kernel, window: Window):
    cropped = tuple((min(low, 0), min(high, 0)) for low, high in window.padding)
    dtype = images.dtype
    # No wider result for half precision: a convolution accumulates in float32 by
    # itself, and cuDNN and Apple's plugins have none whose result is wider. But XLA of
    # jax 0.4.34 sums in float16 where the CPU has an arithmetic for it.
    if dtype == jnp.float16 and device_kind() == "cpu":
        images, kernel = (v.astype(jnp.float32) for v in (images, kernel))
    y = lax.conv_general_dilated(
        pad_plane(images, cropped),
        kernel,
        window.strides,
        [(max(low, 0), max(high, 0)) for low, high in window.padding],
        rhs_dilation=window.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=matmul_precision(),
    )
    return y.astype(dtype)


def pad_plane(images, padding):
    """Pad or cut rows and columns of images (count, height, width, channels)."""
    return pad(images[None], ((0, 0), *padding))[0]
