"""3D convolution out of 2D parts, and its relatives.

Apple's plugins have no 3D convolution, a slow one, or one that ends the process; XLA's
on the CPU uses one core. Nothing here lowers to one, gradients of any order (in reverse
mode) included, and all of it equals PyTorch's own ops.

Volumes are (batch, depth, height, width, channels). In the package ``jaxops`` the name
``conv3d`` is the function; ``from jaxops.conv3d import ...`` reaches this module.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxops import pointwise
from jaxops.conv3d_forms import FORMS, Forms, output_sizes
from jaxops.conv3d_gradients import adjoint, convolve, input_sizes
from jaxops.conv3d_table import chosen_forms
from jaxops.factorise import factorise
from jaxops.matmul import sum_dtype
from jaxops.pooling import average_pool3d, max_pool3d
from jaxops.resize import pixel_shuffle, pixel_unshuffle
from jaxops.windows import (
    Pairs,
    Sizes,
    Triple,
    Window,
    fitted,
    pad,
    padding_pairs,
    tap,
    triple,
    unstacked,
)

__all__ = [
    "average_pool3d",
    "conv2plus1d",
    "conv3d",
    "conv_transpose3d",
    "factorise",
    "max_pool3d",
    "pixel_shuffle",
    "pixel_unshuffle",
    "separable_conv3d",
]

Padding = str | int | Sequence[Any]
FORM_NAMES = ("auto", "local", *FORMS)
UNPADDED: Pairs = ((0, 0), (0, 0), (0, 0))


def conv3d(
    x: Float[Array, "batch depth height width in_channels"],
    kernel: Float[Array, "kd kh kw in_channels_of_a_group out_channels"],
    strides: Sizes = 1,
    padding: Padding = "SAME",
    dilation: Sizes = 1,
    groups: int = 1,
    form: str | Forms = "auto",
    padding_mode: str = "zeros",
) -> Float[Array, "batch out_depth out_height out_width out_channels"]:
    """Cross-correlation with a kernel, as ``torch.nn.Conv3d``.

    y[o] = sum_t x[o strides + t dilation - padding] kernel[t].

    Args:
        x: float32, or half precision, which stays half; sums are taken in float32.
        kernel: (kd, kh, kw, in / groups, out), PyTorch's ``weight.permute(2, 3, 4, 1,
            0)``; taken in the dtype of ``x``.
        strides: of the outputs, one number or (depth, height, width).
        padding: ``"SAME"`` (ceil(size / stride) outputs, an odd point behind),
            ``"VALID"`` (none), a number, or three, of numbers or pairs (before, after).
        dilation: distance of the taps, one number or three.
        groups: channels are split into this many, each convolved on its own.
        form: how the depth is taken. ``"auto"`` is the fastest by the table of
            ``jaxops.conv3d_table``; ``"local"`` the fastest whose tiles equal the whole
            bit by bit; ``"sum"``, ``"concat"``, ``"outshift"``, ``"winograd"`` are the
            forms of ``jaxops.conv3d_forms``; a ``Forms`` speaks for the gradients too.
            All give the same up to rounding.
        padding_mode: what lies beyond the edges; PyTorch's names. ``"reflect"`` goes at
            most size - 1 points beyond an axis, ``"circular"`` at most its size.

    Raises:
        ValueError: for channels, sizes or options that do not fit.

    Forward-mode differentiation (``jax.jvp``) is not defined; reverse mode is, to any
    order.
    """
    taps, strides = kernel.shape[:3], triple("strides", strides)
    dilation = triple("dilation", dilation)
    _check(x, kernel, groups, form)
    if kernel.shape[3] * groups != x.shape[-1]:
        raise ValueError(
            "kernel is (kd, kh, kw, in / groups, out), with the channels of x in; got "
            f"{x.shape=}, {kernel.shape=}, {groups=}."
        )
    pairs = padding_pairs(padding, x.shape[1:4], taps, strides, dilation)
    if padding_mode != "zeros":
        x, pairs = pad(x, pairs, padding_mode), UNPADDED
    window = fitted(x.shape[1:4], taps, strides, dilation, pairs)
    kernel = kernel.astype(x.dtype)
    if taps == strides == (1, 1, 1) and window.padding == UNPADDED and groups == 1:
        return pointwise.dense(x, kernel.reshape(kernel.shape[3:]))
    if groups == x.shape[-1] > 1:
        return _depthwise(x, kernel, window)
    inputs, outputs = kernel.shape[3], kernel.shape[4] // groups
    forms = _forms(form, inputs, outputs, x.dtype)
    parts = [
        convolve(
            x[..., g * inputs : (g + 1) * inputs],
            kernel[..., g * outputs : (g + 1) * outputs],
            window,
            forms,
        )
        for g in range(groups)
    ]
    return parts[0] if groups == 1 else jnp.concatenate(parts, axis=-1)


def conv_transpose3d(
    x: Float[Array, "batch depth height width in_channels"],
    kernel: Float[Array, "kd kh kw channels_in out_channels_of_a_group"],
    strides: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    form: str | Forms = "auto",
) -> Float[Array, "batch out_depth out_height out_width out_channels"]:
    """The adjoint of a convolution, as ``torch.nn.ConvTranspose3d``.

    Makes (size - 1) strides - 2 padding + dilation (taps - 1) + output_padding + 1
    points of an axis, of ordinary convolutions, one a phase of the strides; a single
    one where the strides are the size of the kernel.

    Args:
        x: as for :func:`conv3d`.
        kernel: (kd, kh, kw, in, out / groups), PyTorch's ``weight.permute(2, 3, 4, 0,
            1)``; taken in the dtype of ``x``.
        strides: of ``x`` on the finer grid, one number or three.
        padding: points cut off at both ends of an axis, one number or three.
        output_padding: points more at the end; less than the stride or the dilation.
        dilation, groups, form: as for :func:`conv3d`.

    Raises:
        ValueError: for channels, sizes or options that do not fit.
    """
    strides, dilation = triple("strides", strides), triple("dilation", dilation)
    padding = triple("padding", padding, least=0)
    output_padding = triple("output_padding", output_padding, least=0)
    _check(x, kernel, groups, form, out_axis=3)
    if kernel.shape[3] != x.shape[-1]:
        raise ValueError(
            "kernel is (kd, kh, kw, in, out / groups), with the channels of x in; got "
            f"{x.shape=}, {kernel.shape=}."
        )
    for more, s, d in zip(output_padding, strides, dilation, strict=True):
        if more >= max(s, d):
            raise ValueError(
                "output_padding is less than the stride or the dilation of its axis; "
                f"got {output_padding=}, {strides=}, {dilation=}."
            )
    pairs = tuple((p, p - o) for p, o in zip(padding, output_padding, strict=True))
    window = Window(strides, dilation, pairs)
    sizes = input_sizes(x.shape[1:4], kernel.shape[:3], window)
    if min(sizes) < 1:
        raise ValueError(
            f"padding leaves nothing: the output would be {sizes}, for {x.shape=}, "
            f"{kernel.shape=}, {strides=}, {padding=}."
        )
    kernel = jnp.swapaxes(kernel.astype(x.dtype), 3, 4)
    inputs = kernel.shape[4] // groups
    forms = _forms(form, kernel.shape[3], inputs, x.dtype)
    parts = []
    for g in range(groups):
        own = slice(g * inputs, (g + 1) * inputs)
        parts.append(adjoint(x[..., own], kernel[..., own], window, forms))
    return parts[0] if groups == 1 else jnp.concatenate(parts, axis=-1)


def separable_conv3d(
    x: Float[Array, "batch depth height width in_channels"],
    depth_kernel: Float[Array, "*rank kd channels_in"],
    plane_kernel: Float[Array, "*ranks kh kw channels_in_ out_channels"],
    strides: Sizes = 1,
    padding: Padding = "SAME",
    dilation: Sizes = 1,
    form: str | Forms = "auto",
    padding_mode: str = "zeros",
) -> Float[Array, "batch out_depth out_height out_width out_channels"]:
    """:func:`conv3d` with the kernel sum_r depth_kernel[r, t] plane_kernel[r, i, j].

    The taps of each channel along the depth, then a 2D convolution of every slice: for
    3x3x3 taps a third of the arithmetic and of the weights, times the rank, which may
    be left out where it is 1. :func:`factorise` makes such kernels of dense ones.
    """
    depth_kernel, plane_kernel = jnp.asarray(depth_kernel), jnp.asarray(plane_kernel)
    if depth_kernel.ndim == 2 and plane_kernel.ndim == 4:
        depth_kernel, plane_kernel = depth_kernel[None], plane_kernel[None]
    ranks_agree = (
        depth_kernel.ndim == 3
        and plane_kernel.ndim == 5
        and depth_kernel.shape[0] == plane_kernel.shape[0]
    )
    if not ranks_agree or not (
        depth_kernel.shape[2] == plane_kernel.shape[3] == x.shape[-1]
    ):
        raise ValueError(
            "depth_kernel is (kd, in) and plane_kernel (kh, kw, in, out), or both have "
            "the rank in front, and the channels of x are in; got "
            f"{x.shape=}, {depth_kernel.shape=}, {plane_kernel.shape=}."
        )
    taps = (depth_kernel.shape[1], *plane_kernel.shape[1:3])
    depth, plane = _depth_and_plane(x, taps, strides, padding, dilation)
    padded = pad(x, depth.pop("padding"), padding_mode)
    window = fitted(padded.shape[1:4], (taps[0], 1, 1), **depth, padding=UNPADDED)
    columns = depth_kernel.astype(x.dtype)[:, :, None, None, None]
    parts = [_depthwise(padded, column, window) for column in unstacked(columns, 0)]
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    joined = jnp.moveaxis(plane_kernel, 0, 2)
    joined = joined.reshape(1, *taps[1:], -1, plane_kernel.shape[4])
    return conv3d(x, joined, **plane, form=form, padding_mode=padding_mode)


def conv2plus1d(
    x: Float[Array, "batch depth height width in_channels"],
    plane_kernel: Float[Array, "kh kw in_channels middle_channels"],
    depth_kernel: Float[Array, "kd channels_in_the_middle out_channels"],
    plane_bias: Float[Array, " middle_channels"] | None = None,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    dilation: Sizes = 1,
    form: str | Forms = "auto",
    padding_mode: str = "zeros",
) -> Float[Array, "batch out_depth out_height out_width out_channels"]:
    """A 2D convolution of every slice, then a 1D one along the depth.

    Tran et al. 2018 (arXiv:1711.11248), without the activation between. The options are
    those of :func:`conv3d`, each axis of them with its own part.
    """
    if plane_kernel.shape[-1] != depth_kernel.shape[-2]:
        raise ValueError(
            "plane_kernel is (kh, kw, in, middle) and depth_kernel (kd, middle, out); "
            f"got {plane_kernel.shape=}, {depth_kernel.shape=}."
        )
    taps = (depth_kernel.shape[0], *plane_kernel.shape[:2])
    depth, plane = _depth_and_plane(x, taps, strides, padding, dilation)
    options = {"form": form, "padding_mode": padding_mode}
    x = conv3d(x, plane_kernel[None], **plane, **options)
    if plane_bias is not None:
        x = x + jnp.broadcast_to(plane_bias.astype(x.dtype), x.shape)
    return conv3d(x, depth_kernel[:, None, None], **depth, **options)


def _depth_and_plane(
    x, taps: Triple, strides: Sizes, padding: Padding, dilation: Sizes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a convolution along the depth, and of one in the plane."""
    strides, dilation = triple("strides", strides), triple("dilation", dilation)
    pairs = padding_pairs(padding, x.shape[1:4], taps, strides, dilation)
    depth = {
        "strides": (strides[0], 1, 1),
        "padding": (pairs[0], (0, 0), (0, 0)),
        "dilation": (dilation[0], 1, 1),
    }
    plane = {
        "strides": (1, *strides[1:]),
        "padding": ((0, 0), *pairs[1:]),
        "dilation": (1, *dilation[1:]),
    }
    return depth, plane


def _depthwise(x, kernel, window: Window):
    """k (kd, kh, kw, 1, in * m): taps of each channel alone, shifted and multiplied.

    Written so because grouped 2D convolutions came out wrong on Apple's side.
    """
    copies = kernel.shape[4] // x.shape[-1]
    if copies > 1:
        x = jnp.broadcast_to(x[..., None], (*x.shape, copies))
        x = x.reshape(*x.shape[:-2], -1)
    x = pad(x, window.padding)
    unpadded = window._replace(padding=UNPADDED)
    sizes = output_sizes(x.shape[1:4], kernel.shape[:3], unpadded)
    total = jnp.zeros((x.shape[0], *sizes, x.shape[-1]), sum_dtype(x))
    factors = unstacked(kernel.reshape(-1, kernel.shape[4]), 0)
    all_taps = itertools.product(*map(range, kernel.shape[:3]))
    for taps, factor in zip(all_taps, factors, strict=True):
        part = x
        for axis, (t, s, d, n) in enumerate(
            zip(taps, window.strides, window.dilation, sizes, strict=True), start=1
        ):
            part = tap(part, axis, t * d, s, n)
        factor = jnp.broadcast_to(factor, part.shape).astype(total.dtype)
        total = total + part.astype(total.dtype) * factor
    return total.astype(x.dtype)


def _forms(form: str | Forms, inputs: int, outputs: int, dtype: Any) -> Forms:
    forms = form
    if not isinstance(form, Forms):
        forms = chosen_forms(form, inputs, outputs, dtype)
    if jnp.finfo(dtype).bits < 32 and "winograd" in forms:
        raise ValueError(
            f'form "winograd" would lose the digits that {dtype} has; use "auto" or '
            '"concat" for half precision.'
        )
    return forms


def _check(x, kernel, groups: int, form: str | Forms, out_axis: int = 4) -> None:
    if x.ndim != 5 or kernel.ndim != 5 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "x is (batch, depth, height, width, channels) of real floating-point "
            "numbers and kernel has five axes, of which three are taps; got "
            f"{x.shape=}, {x.dtype=}, {kernel.shape=}."
        )
    if groups < 1 or kernel.shape[out_axis] % groups or x.shape[-1] % groups:
        raise ValueError(
            "groups is a number that divides the input and the output channels; got "
            f"{groups=}, {x.shape=}, {kernel.shape=}."
        )
    if isinstance(form, str) and form not in FORM_NAMES:
        raise ValueError(f"form is {', '.join(FORM_NAMES)}, or a Forms; got {form!r}.")
