"""Windows that slide over volumes: their arguments, padding, and the taps of an axis.

Volumes are (batch, depth, height, width, channels).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

Triple = tuple[int, int, int]
Sizes = int | Sequence[int]
Pairs = tuple[tuple[int, int], ...]

# PyTorch's names, and those of jnp.pad.
PADDING_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


class Window(NamedTuple):
    """Where tap t of output o lies on each axis: at o * stride + t * dilation.

    Attributes:
        strides: an axis each.
        dilation: an axis each.
        padding: zeros before and after each axis; a negative number cuts points off.
            The last tap of the last output lies on the last point, see :func:`fitted`.
    """

    strides: Triple
    dilation: Triple
    padding: Pairs


def triple(name: str, value: Sizes, least: int = 1) -> Triple:
    """One whole number for all three axes, or one an axis, each at least ``least``."""
    given = (value,) * 3 if _is_whole(value) else value
    if (
        not isinstance(given, Sequence)
        or len(given) != 3
        or not all(_is_whole(v) and v >= least for v in given)
    ):
        raise ValueError(
            f"{name} is a whole number of at least {least}, or three of them (depth, "
            f"height, width); got {value!r}."
        )
    return tuple(int(v) for v in given)


def padding_pairs(
    padding: str | int | Sequence[Any],
    sizes: Sequence[int],
    taps: Triple,
    strides: Triple,
    dilation: Triple,
) -> Pairs:
    """(before, after) of each axis, of ``"SAME"``, ``"VALID"``, numbers or pairs.

    ``"SAME"`` makes ceil(size / stride) outputs; an odd point goes behind.
    """
    if isinstance(padding, str) and padding == "VALID":
        return ((0, 0),) * 3
    if isinstance(padding, str) and padding == "SAME":
        pairs = []
        for n, k, s, d in zip(sizes, taps, strides, dilation, strict=True):
            total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
            pairs.append((total // 2, total - total // 2))
        return tuple(pairs)
    given = (padding,) * 3 if _is_whole(padding) else padding
    pairs = ()
    if isinstance(given, Sequence) and not isinstance(given, str):
        pairs = tuple((p, p) if _is_whole(p) else p for p in given)
    if (
        len(pairs) != 3
        or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs)
        or not all(_is_whole(n) and n >= 0 for pair in pairs for n in pair)
    ):
        raise ValueError(
            'padding is "SAME", "VALID", a whole number, or three (depth, height, '
            "width) of whole numbers or pairs (before, after), none negative; got "
            f"{padding!r}."
        )
    return tuple((int(low), int(high)) for low, high in pairs)


def fitted(
    sizes: Sequence[int],
    taps: Triple,
    strides: Triple,
    dilation: Triple,
    padding: Pairs,
) -> Window:
    """The window that cuts off what lies behind the last tap of the last output."""
    pairs = []
    for n, k, s, d, (low, high) in zip(
        sizes, taps, strides, dilation, padding, strict=True
    ):
        over = n + low + high - d * (k - 1) - 1
        if over < 0 or n < 1:
            raise ValueError(
                f"A window of {taps} points, {dilation} apart, must fit into the "
                f"padded volume; got sizes {tuple(sizes)} with padding {padding}."
            )
        pairs.append((low, high - over % s))
    return Window(strides, dilation, tuple(pairs))


def pad(x, padding: Pairs, mode: str = "zeros", value: float = 0.0):
    """Pad the three axes of a volume. A negative number cuts points off (of zeros)."""
    if mode not in PADDING_MODES:
        raise ValueError(
            f"padding_mode is one of {', '.join(PADDING_MODES)}; got {mode!r}."
        )
    if all(pair == (0, 0) for pair in padding):
        return x
    if mode == "zeros":
        for axis, (low, high) in enumerate(padding, start=1):
            if min(low, high) < 0:
                stop = x.shape[axis] + min(high, 0)
                x = lax.slice_in_dim(x, max(-low, 0), stop, axis=axis)
        widths = [(max(low, 0), max(high, 0), 0) for low, high in padding]
        return lax.pad(x, jnp.asarray(value, x.dtype), ((0,) * 3, *widths, (0,) * 3))
    reach = {"reflect": -1, "circular": 0}.get(mode)
    for size, pair in zip(x.shape[1:-1], padding, strict=True):
        if reach is not None and max(pair) > size + reach:
            raise ValueError(
                f"{mode} padding goes at most {size + reach} points beyond an axis of "
                f'{size}; got padding {padding} for {x.shape=}. Use "replicate" or '
                '"zeros" there.'
            )
    return jnp.pad(x, ((0, 0), *padding, (0, 0)), mode=PADDING_MODES[mode])


def tap(x, axis: int, start: int, stride: int, count: int):
    """``count`` points of an axis, each ``stride`` after the one before.

    As a reshape and a plain slice. A strided slice becomes a gather in jax 0.4, and its
    gradient puts zeros between points; not every Apple plugin can either.
    """
    if stride == 1:
        return lax.slice_in_dim(x, start, start + count, axis=axis)
    stop = min(start + stride * count, x.shape[axis])
    x = lax.slice_in_dim(x, start, stop, axis=axis)
    if missing := start + stride * count - stop:
        widths = [(0, missing * (a == axis), 0) for a in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), widths)
    x = x.reshape(*x.shape[:axis], count, stride, *x.shape[axis + 1 :])
    return lax.index_in_dim(x, 0, axis=axis + 1, keepdims=False)


def unstacked(x, axis: int) -> list:
    """What lies at each index of an axis: x[0], x[1], ..., but as plain slices."""
    size = x.shape[axis]
    return [lax.index_in_dim(x, i, axis=axis, keepdims=False) for i in range(size)]


def interleave(parts: Sequence[Any], axis: int):
    """Of n parts, part r gives the points r, r + n, r + 2n, ... of the axis."""
    if len(parts) == 1:
        return parts[0]
    x = jnp.stack(parts, axis=axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
