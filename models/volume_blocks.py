"""The layers of volumetric networks, as Flax Linen modules.

Volumes are (batch, depth, height, width, channels). What looks at neighbours has a
method ``reach``, from which ``models.receptive_field`` adds up the halo of a tile.
Parameters are plain real arrays; they start from PyTorch's distributions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxops import resize
from jaxops.conv3d import conv2plus1d, conv3d, separable_conv3d
from jaxops.pooling import max_pool3d
from models.blocks import Dense, at_least_float32, uniform_of_fan_in

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
