"""Average and maximum pooling of volumes, an axis at a time, as slices.

Both are exactly separable. Slices rather than ``lax.reduce_window``, which Apple's
plugins have for few shapes, and whose gradient they lack.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxops.conv3d_forms import output_sizes
from jaxops.matmul import sum_dtype
from jaxops.windows import Sizes, Window, fitted, pad, tap, triple


def average_pool3d(
    x: Float[Array, "batch depth height width channels"],
    window: Sizes,
    strides: Sizes | None = None,
    padding: Sizes = 0,
    count_include_pad: bool = True,
) -> Float[Array, "batch out_depth out_height out_width channels"]:
    """Means over windows, as ``torch.nn.AvgPool3d`` (without ``ceil_mode``).

    Args:
        x: float32 or half precision, which stays half; sums are taken in float32.
        window: points of an axis, one number or (depth, height, width).
        strides: of the windows; by default they lie side by side. What is left over at
            the end of an axis is dropped.
        padding: zeros at both ends of an axis, at most half a window.
        count_include_pad: whether these zeros count in the mean.

    Raises:
        ValueError: for sizes that do not fit.
    """
    taps, fit = _window(x, window, strides, padding, 1)
    y = pad(x, fit.padding).astype(sum_dtype(x))
    y = _reduced(y, taps, fit, jnp.add)
    counts = jnp.ones((), y.dtype)
    for axis, (n, k, s, (low, _)) in enumerate(
        zip(x.shape[1:4], taps, fit.strides, fit.padding, strict=True), start=1
    ):
        start = np.arange(y.shape[axis]) * s - low
        inside = np.minimum(start + k, n) - np.maximum(start, 0)
        count = inside if not count_include_pad else np.full_like(inside, k)
        shape = [-1 if a == axis else 1 for a in range(5)]
        counts = counts * jnp.asarray(count, y.dtype).reshape(shape)
    return (y / jnp.broadcast_to(counts, y.shape)).astype(x.dtype)


def max_pool3d(
    x: Float[Array, "batch depth height width channels"],
    window: Sizes,
    strides: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
) -> Float[Array, "batch out_depth out_height out_width channels"]:
    """The largest value of each window, as ``torch.nn.MaxPool3d``.

    Of equal values the first takes the whole gradient, and NaN is the largest, as in
    PyTorch. Arguments as for :func:`average_pool3d`; padding never wins.
    """
    dilation = triple("dilation", dilation)
    taps, fit = _window(x, window, strides, padding, dilation)
    return _reduced(pad(x, fit.padding, value=-jnp.inf), taps, fit, _first_largest)


def _first_largest(largest, x):
    # Not jnp.maximum, whose gradient is shared between equal values.
    return jnp.where((x > largest) | jnp.isnan(x), x, largest)


def _window(x, window: Sizes, strides, padding, dilation) -> tuple:
    taps, dilation = triple("window", window), triple("dilation", dilation)
    strides = taps if strides is None else triple("strides", strides)
    padding = triple("padding", padding, least=0)
    for p, k in zip(padding, taps, strict=True):
        if 2 * p > k:
            raise ValueError(
                "Pooling takes at most half a window of padding, so that each window "
                f"holds a point; got {padding=} for window {taps}."
            )
    pairs = tuple((p, p) for p in padding)
    return taps, fitted(x.shape[1:4], taps, strides, dilation, pairs)


def _reduced(x, taps, fit: Window, reduce: Callable):
    """Depth last, so that of equal values the first in (depth, height, width) stays."""
    sizes = output_sizes(x.shape[1:4], taps, fit._replace(padding=((0, 0),) * 3))
    for axis in (3, 2, 1):
        at = axis - 1
        parts = [
            tap(x, axis, t * fit.dilation[at], fit.strides[at], sizes[at])
            for t in range(taps[at])
        ]
        x = parts[0]
        for part in parts[1:]:
            x = reduce(x, part)
    return x
