"""The layers of volumetric networks, as Flax Linen modules.

Volumes are (batch, depth, height, width, channels). What looks at neighbours has a
method ``reach``, from which ``models.receptive_field`` adds up the halo of a tile.
Parameters are plain real arrays; they start from PyTorch's distributions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxops import resize
from jaxops.conv3d import conv2plus1d, conv3d, conv_transpose3d, separable_conv3d
from jaxops.device import device_kind
from jaxops.pointwise import at_least_float32
from jaxops.pooling import max_pool3d
from jaxops.windows import pad
from models.blocks import Dense, uniform_of_fan_in

CONVOLUTIONS = ("exact", "separable", "2plus1d")
UPSAMPLERS = ("shuffle", "linear")
RESIZES = {"linear": (resize.linear, 1), "cubic": (resize.cubic, 2)}  # points each side

Sizes = tuple[int, ...]


class Kind(NamedTuple):
    """How the 3D convolutions of a network are made.

    Attributes:
        conv: one of ``CONVOLUTIONS``.
        rank: terms of ``"separable"``, channels between of ``"2plus1d"``; layers that
            are exact with fewer take these.
        form: of :func:`jaxops.conv3d`; all give the same up to rounding.
    """

    conv: str = "exact"
    rank: int | None = None
    form: str = "auto"


class Conv(nn.Module):
    """3D convolution with zeros around the volume, which keeps its grid.

    ``kind.conv`` chooses the kernel, of (kd, kh, kw) taps:

    * ``"exact"``: ``kernel`` (kd, kh, kw, in, out), ``bias`` (out,);
    * ``"separable"``: ``depth_kernel`` (kd, in), the taps of each channel alone, then
      ``plane_kernel`` (kh, kw, in, out), ``bias`` (out,); with a rank, both kernels
      have it in front, and the terms are added up;
    * ``"2plus1d"``: ``plane_kernel`` (kh, kw, in, middle), ``plane_bias`` (middle,),
      then ``depth_kernel`` (kd, middle, out), ``bias`` (out,); middle is the rank, or
      ``features``.

    A kernel of one depth tap is always ``"exact"``: it is a 2D convolution.

    Attributes:
        features: output channels.
        kernel_size: odd numbers.
        kind: see :class:`Kind`.
        copies: this many neighbouring output channels start alike (ICNR, Aitken et al.
            2017, arXiv:1707.02937), so that a pixel shuffle starts as nearest points.
    """

    features: int
    kernel_size: Sizes = (3, 3, 3)
    kind: Kind = Kind()
    copies: int = 1

    @nn.compact
    def __call__(self, x):
        depth, *plane = self.kernel_size
        entering, leaving, taps = x.shape[-1], self.features, math.prod(plane)
        conv, rank, form = self.kind

        def param(name, init, *shape):
            return self.param(name, init, shape).astype(x.dtype)

        # Two factors start so that their product has the variance of a dense kernel.
        if conv == "exact" or depth == 1:
            init = _repeated(uniform_of_fan_in(entering * depth * taps), self.copies)
            kernel = param("kernel", init, depth, *plane, entering, leaving)
            y = conv3d(x, kernel, form=form)
        elif conv == "separable":
            terms = () if rank is None else (min(rank, depth, taps * leaving),)
            init = _uniform_of_variance(1 / math.prod((depth, *terms)))
            first = param("depth_kernel", init, *terms, depth, entering)
            init = _repeated(uniform_of_fan_in(entering * taps), self.copies)
            second = param("plane_kernel", init, *terms, *plane, entering, leaving)
            y = separable_conv3d(x, first, second, form=form)
        else:
            exact = min(taps * entering, depth * leaving)
            middle = leaving if rank is None else min(rank, exact)
            init = _uniform_of_variance(1 / (entering * taps))
            first = param("plane_kernel", init, *plane, entering, middle)
            bias = param("plane_bias", uniform_of_fan_in(entering * taps), middle)
            init = _repeated(uniform_of_fan_in(middle * depth), self.copies)
            second = param("depth_kernel", init, depth, middle, leaving)
            y = conv2plus1d(x, first, second, bias, form=form)
        return y + jnp.broadcast_to(param("bias", init, leaving), y.shape)

    def reach(self, need: Sizes) -> Sizes:
        return tuple(n + k // 2 for n, k in zip(need, self.kernel_size, strict=True))


def _uniform_of_variance(variance: float) -> Callable:
    return uniform_of_fan_in(1 / (3 * variance))


def _repeated(init: Callable, copies: int) -> Callable:
    """``init``, with each output channel ``copies`` times."""

    def repeated(key, shape, dtype=jnp.float32):
        few = init(key, (*shape[:-1], shape[-1] // copies), dtype)
        return jnp.broadcast_to(few[..., None], (*few.shape, copies)).reshape(shape)

    return repeated


class MaxPool(nn.Module):
    """The largest value of each window; windows lie side by side and fill the grid."""

    window: Sizes

    def __call__(self, x):
        return max_pool3d(x, self.window)

    def reach(self, need: Sizes) -> Sizes:
        return tuple(n * w for n, w in zip(need, self.window, strict=True))


class PixelShuffle(nn.Module):
    """Channels (c sd sh sw) become a grid that is ``scale`` times finer, an axis."""

    scale: Sizes

    def __call__(self, x):
        return resize.pixel_shuffle(x, self.scale)

    def reach(self, need: Sizes) -> Sizes:
        return _coarser(need, self.scale)


class Nearest(nn.Module):
    """Each point ``scale`` times an axis."""

    scale: Sizes

    def __call__(self, x):
        for axis, factor in enumerate(self.scale, start=1):
            if factor > 1:  # broadcast, not jnp.repeat, which may become a gather
                before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
                x = jnp.expand_dims(x, axis + 1)
                x = jnp.broadcast_to(x, (*before, factor, *after))
                x = x.reshape(*before[:-1], before[-1] * factor, *after)
        return x

    def reach(self, need: Sizes) -> Sizes:
        return _coarser(need, self.scale)


def nearest_conv(parent: nn.Module, x, nearest: Nearest, beside, conv: Conv):
    """``conv`` of ``nearest(x)`` with the channels of ``beside`` joined on: two layers
    that ``parent`` calls from here.

    On a CPU, where the kernel is dense and no gradient is taken, x is convolved on its
    own grid: nearest points and a convolution are a transposed convolution, whose
    points have two taps an axis in place of three. GPUs lose by the smaller parts.
    """
    is_dense = conv.kind.conv == "exact"
    if parent.is_initializing() or not is_dense or device_kind() != "cpu":
        return conv(jnp.concatenate([nearest(x), beside], axis=-1))
    params = parent.variables["params"][conv.name]
    kernel, bias = (params[name].astype(x.dtype) for name in ("kernel", "bias"))
    y = _nearest_conv(x, beside, kernel, nearest.scale, conv.kind.form)
    return y + jnp.broadcast_to(bias, y.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _nearest_conv(x, beside, kernel, scale: Sizes, form: str):
    coarse_form = "local" if form == "auto" and scale[0] > 1 else form  # of few taps
    y = conv_transpose3d(
        x,
        _stretched(kernel[..., : x.shape[-1], :], scale),
        strides=scale,
        padding=tuple(k // 2 for k in kernel.shape[:3]),
        form=coarse_form,
    )
    return y + conv3d(beside, kernel[..., x.shape[-1] :, :], form=form)


def _nearest_conv_forward(x, beside, kernel, scale, form):
    """The layers as they are: their gradient takes less."""

    def layers(x, beside, kernel):
        joined = jnp.concatenate([Nearest(scale).apply({}, x), beside], axis=-1)
        return conv3d(joined, kernel, form=form)

    return jax.vjp(layers, x, beside, kernel)


def _nearest_conv_backward(scale, form, derivative, y):
    return derivative(y)


_nearest_conv.defvjp(_nearest_conv_forward, _nearest_conv_backward)


def _stretched(kernel, scale: Sizes):
    """Of the transposed convolution: the taps that a coarse point has on fine ones."""
    kernel = jnp.flip(kernel, (0, 1, 2))
    for axis, factor in enumerate(scale):
        moved = [_shifted(kernel, axis, i, factor - 1) for i in range(factor)]
        kernel = functools.reduce(jnp.add, moved)
    return kernel


def _shifted(kernel, axis: int, by: int, more: int):
    """With ``more`` zeros along an axis, ``by`` of them in front."""
    widths = [(0, 0, 0)] * kernel.ndim
    widths[axis] = (by, more - by, 0)
    return jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), widths)


class Resize(nn.Module):
    """``"linear"`` or ``"cubic"`` interpolation, points being the centres of cells."""

    scale: Sizes
    kind: str
    beside_the_network: bool = False

    def __call__(self, x):
        sizes = [n * s for n, s in zip(x.shape[1:-1], self.scale, strict=True)]
        return RESIZES[self.kind][0](x, sizes)

    def reach(self, need: Sizes) -> Sizes:
        return tuple(
            self._reach(n, factor) for n, factor in zip(need, self.scale, strict=True)
        )

    def _reach(self, need: int, factor: int) -> int:
        """Down to the first tap for fine point -need: (0.5 - need) / factor - 0.5."""
        below, rest = divmod(1 - 2 * need - factor, 2 * factor)
        taps = RESIZES[self.kind][1]
        return -below + (taps - 1 if rest else 0)  # on a coarse point, that alone


def _coarser(need: Sizes, scale: Sizes) -> Sizes:
    return tuple(-(-n // s) for n, s in zip(need, scale, strict=True))


class Upsampler(nn.Module):
    """A grid that is ``scale`` times finer, an axis; nothing where no axis is.

    ``"shuffle"``: ``conv`` to as many channels as each point becomes points, and a
    pixel shuffle, which starts as nearest points (ICNR). Where depth alone is scaled
    the kernel is flat, (1, 3, 3). ``"linear"``: linear interpolation, then ``conv``.
    The channels stay.
    """

    scale: Sizes
    upsampler: str = "shuffle"
    kind: Kind = Kind()

    @nn.compact
    def __call__(self, x):
        channels, points = x.shape[-1], math.prod(self.scale)
        if points == 1:
            return x
        if self.upsampler == "linear":
            x = Resize(self.scale, "linear", name="resize")(x)
            return Conv(channels, kind=self.kind, name="conv")(x)
        kernel_size = (1, 3, 3) if self.scale[1:] == (1, 1) else (3, 3, 3)
        kind = self.kind
        if kind.conv == "2plus1d" and kind.rank is None:
            kind = kind._replace(rank=channels)  # not those of the output, so many more
        x = Conv(channels * points, kernel_size, kind, points, name="conv")(x)
        return PixelShuffle(self.scale, name="shuffle")(x)


def upsampled_conv(parent: nn.Module, x, upsampler: Upsampler, conv: Conv):
    """``conv(upsampler(x))``, of two layers of ``parent`` that it calls from here.

    Where that takes less, in one convolution of the coarse grid, see
    :func:`joined_conv`. It hangs on the channels, and not on the size of the volume.
    """
    channels, outputs = x.shape[-1], conv.features
    joins = upsampler.upsampler == "shuffle" and math.prod(upsampler.scale) > 1
    joins &= upsampler.kind.conv == conv.kind.conv == "exact"
    joins &= 2 * 5**3 * outputs < 3**3 * (channels + outputs)  # multiplications
    joins &= min(x.shape[1:4]) >= 3
    if parent.is_initializing() or not joins:
        return conv(upsampler(x))
    params = parent.variables["params"]
    layers = (params[upsampler.name]["conv"], params[conv.name])
    pairs = ((layer["kernel"], layer["bias"]) for layer in layers)
    return joined_conv(x, *pairs, upsampler.scale, conv.kind.form)


def joined_conv(x, first, last, scale: Sizes, form: str):
    """A convolution, a pixel shuffle and another convolution, zeros around both.

    They are linear: together a convolution of the coarse grid with two taps more an
    axis, and with as few outputs as the last one has. Only at the outermost points it
    is not the same, since the last one has zeros where the first would go on. So these
    planes are computed one convolution after the other.

    Args:
        x: (batch, depth, height, width, channels), each axis of at least 3 points.
        first: kernel (kd, kh, kw, channels, between * points), with an odd number of
            taps, and bias; ``points`` being the product of the scale. Joined as they
            are, float32, and then taken in the dtype of ``x``.
        last: kernel (3, 3, 3, between, out), and bias.
        scale: of the shuffle.
        form: of :func:`jaxops.conv3d`.
    """
    kernel, bias = _joined_kernel(first, last, scale)
    y = conv3d(x, kernel, form=form)
    y = resize.pixel_shuffle(y + _spread(bias, y), scale)
    for axis in (1, 2, 3):
        low, high = _outermost(x, axis, first, last, scale, form)
        inner = jax.lax.slice_in_dim(y, 1, y.shape[axis] - 1, axis=axis)
        y = jnp.concatenate([low, inner, high], axis=axis)
    return y


def _joined_kernel(first, last, scale):
    """Of the coarse grid: what a single point becomes, and what the bias does."""
    (kernel, bias), (last_kernel, last_bias) = first, last

    def after(coarse):
        fine = pad(resize.pixel_shuffle(coarse, scale), tuple((s, s) for s in scale))
        return resize.pixel_unshuffle(conv3d(fine, last_kernel, form="local"), scale)

    response = after(jnp.flip(jnp.moveaxis(kernel, 3, 0), (1, 2, 3)))
    joined = jnp.moveaxis(jnp.flip(response, (1, 2, 3)), 0, 3)
    everywhere = jnp.broadcast_to(bias, (1, 3, 3, 3, len(bias)))
    inside = after(everywhere)[0, 2, 2, 2].reshape(len(last_bias), -1)
    inside = inside + jnp.broadcast_to(last_bias[:, None], inside.shape)
    return joined, inside.reshape(-1)


def _spread(bias, y):
    return jnp.broadcast_to(bias.astype(y.dtype), y.shape)


def _outermost(x, axis: int, first, last, scale, form):
    """The first and the last plane of an axis of what :func:`joined_conv` gives."""
    form = "local" if form == "auto" else form  # few planes: less to compile
    batch, near = x.shape[0], 1 if scale[axis - 1] > 1 else 2  # coarse planes they see

    def both_ends(low, high, count, zeros):
        """That many planes of each end, with zeros behind them, as one batch."""
        ends = [((0, 0),) * (axis - 1) + (pair,) + ((0, 0),) * (3 - axis)
                for pair in ((zeros, 0), (0, zeros))]  # fmt: skip
        size = high.shape[axis]
        low = jax.lax.slice_in_dim(low, 0, count, axis=axis)
        high = jax.lax.slice_in_dim(high, size - count, size, axis=axis)
        return jnp.concatenate([pad(low, ends[0]), pad(high, ends[1])], axis=0)

    def conv(x, kernel, bias):
        padding = [k // 2 for k in kernel.shape[:3]]
        padding[axis - 1] = 0
        y = conv3d(x, kernel, padding=padding, form=form)
        return y + _spread(bias, y)

    reach = first[0].shape[axis - 1] // 2
    y = resize.pixel_shuffle(conv(both_ends(x, x, near + reach, reach), *first), scale)
    y = conv(both_ends(y[:batch], y[batch:], 2, 1), *last)
    return y[:batch], y[batch:]


class ChannelAttention(nn.Module):
    """Channels weighted by a function of their means (Zhang et al. 2018).

    ``fcs_0``, ``fcs_1``: kernel (in, out), bias (out,), with a ReLU between and a
    sigmoid behind. The means are over the whole volume. For a tile of one, the variable
    ``means/../channels`` (batch, channels) takes their place; and where the collection
    ``sums`` is mutable, the sums over ``region`` go to ``sums/../channels`` (batch,
    channels), float32. See :class:``models.RCAN3D``.
    """

    reduction: int

    @nn.compact
    def __call__(self, x, region=None):
        if self.is_mutable_collection("sums") and not self.is_initializing():
            own = x if region is None else jnp.where(_inside(region, x.shape), x, 0)
            self.put_variable("sums", "channels", at_least_float32(own).sum((1, 2, 3)))
        if self.has_variable("means", "channels"):
            means = jnp.asarray(self.get_variable("means", "channels"))
            if means.shape != (x.shape[0], x.shape[-1]):
                raise ValueError(
                    f"means/{'/'.join(self.path)}/channels is (batch, channels), here "
                    f"{(x.shape[0], x.shape[-1])}; got {means.shape}."
                )
        else:
            means = at_least_float32(x).mean((1, 2, 3))
        channels = x.shape[-1]
        y = Dense(channels // self.reduction, name="fcs_0")(means.astype(x.dtype))
        y = Dense(channels, name="fcs_1")(jax.nn.relu(y))
        weights = jax.nn.sigmoid(y).reshape(-1, 1, 1, 1, channels)
        return x * jnp.broadcast_to(weights, x.shape)


def _inside(region, shape: Sequence[int]):
    """Whether points lie in a region, ((start, stop), ..); an array of ``shape``.

    A mask, and no slice: one program then takes the regions of all tiles.
    """
    bounds = jnp.asarray(region, jnp.int32)
    inside = jnp.ones(shape, bool)
    for axis in (1, 2, 3):
        index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        start, stop = (jnp.broadcast_to(bounds[axis - 1, i], shape) for i in (0, 1))
        inside = inside & (index >= start) & (index < stop)
    return inside
