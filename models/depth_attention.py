"""Super-resolution by 2D convolutions, and attention across the slices of a volume.

For stacks whose slices are far apart: what happens in a plane is left to 2D
convolutions, what slices tell each other to attention (Vaswani et al., "Attention Is
All You Need", arXiv:1706.03762) along depth, at each position alone. The frame is
EDSR's (arXiv:1707.02921). Attention reaches ``depth_window`` slices to either side, so
that its cost grows with the number of slices, not with its square, and tiles are exact;
a window as long as the stack is full self-attention. ``mixing="gate"`` is the cheaper
choice, as in gated convolutions (Dauphin et al., arXiv:1612.08083).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxops.pointwise import at_least_float32
from models.arguments import known_arguments_only
from models.blocks import Dense
from models.volume_blocks import Conv, Kind, Sizes, Upsampler
from models.volume_model import VolumeModel

MIXINGS = ("attention", "gate")
PLANE = (1, 3, 3)


class ChannelNorm(nn.Module):
    """Layer norm of each point's channels; ``scale``, ``bias`` (channels,)."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        y = at_least_float32(x)
        y = y - jnp.broadcast_to(y.mean(-1, keepdims=True), y.shape)
        variance = (y * y).mean(-1, keepdims=True)
        y = y * jnp.broadcast_to(jax.lax.rsqrt(variance + self.epsilon), y.shape)
        y = y.astype(x.dtype)
        scale, bias = (
            jnp.broadcast_to(v.astype(x.dtype), x.shape) for v in (scale, bias)
        )
        return y * scale + bias


class DepthAttention(nn.Module):
    """Multi-head attention of each point to the same position in nearby slices.

    score(i, j) = query(i) . key(j) / sqrt(n) + relative_bias[j - i + w], n the channels
    of a head, for |j - i| <= w, the window; slices beyond the volume are left out.
    ``query``, ``key``, ``value``, ``out``: kernel (in, out), bias (out,);
    ``relative_bias`` (2 w + 1, heads).
    """

    n_heads: int
    window: int

    @nn.compact
    def __call__(self, x):
        *points, channels = x.shape
        depth, width = points[1], channels // self.n_heads
        query, key, value = (
            Dense(channels, name=name)(x).reshape(*points, self.n_heads, width)
            for name in ("query", "key", "value")
        )
        query = query * width**-0.5
        offsets = range(-self.window, self.window + 1)
        bias = self.param(
            "relative_bias", nn.initializers.zeros, (len(offsets), self.n_heads)
        )
        around = [(0, 0), (self.window, self.window), (0, 0), (0, 0), (0, 0), (0, 0)]

        def shifted(padded, offset):
            start = self.window + offset
            return jax.lax.slice_in_dim(padded, start, start + depth, axis=1)

        # Shift, multiply and add: no matrix of depth x depth, and no gather.
        key, value = jnp.pad(key, around), jnp.pad(value, around)
        scores = jnp.stack([(query * shifted(key, o)).sum(-1) for o in offsets])
        scores = at_least_float32(scores)
        bias = at_least_float32(bias).reshape(len(offsets), 1, 1, 1, 1, self.n_heads)
        scores = scores + jnp.broadcast_to(bias, scores.shape)
        slices = np.arange(depth) + np.asarray(offsets)[:, None]
        inside = ((slices >= 0) & (slices < depth)).reshape(-1, 1, depth, 1, 1, 1)
        scores = jnp.where(
            jnp.broadcast_to(jnp.asarray(inside), scores.shape),
            scores,
            jnp.finfo(scores.dtype).min,
        )
        weights = jax.nn.softmax(scores, axis=0).astype(x.dtype)[..., None]
        mixed = jnp.zeros_like(query)
        for weight, offset in zip(weights, offsets, strict=True):
            weight = jnp.broadcast_to(weight, mixed.shape)
            mixed = mixed + weight * shifted(value, offset)
        return Dense(channels, name="out")(mixed.reshape(x.shape))

    def reach(self, need: Sizes) -> Sizes:
        return (need[0] + self.window, *need[1:])


class DepthGate(nn.Module):
    """What each slice passes on to nearby ones: value times the sigmoid of a gate, then
    depth taps of each channel alone and a 1x1x1 convolution (``mix``)."""

    window: int

    @nn.compact
    def __call__(self, x):
        gate = jax.nn.sigmoid(Dense(x.shape[-1], name="gate")(x))
        y = gate * Dense(x.shape[-1], name="value")(x)
        taps = (2 * self.window + 1, 1, 1)
        return Conv(x.shape[-1], taps, Kind("separable"), name="mix")(y)


class Block(nn.Module):
    """x + conv(relu(conv(x))) in each plane, then x + mixing(norm(x)) across them."""

    mixing: str
    n_heads: int
    window: int

    @nn.compact
    def __call__(self, x):
        y = Conv(x.shape[-1], PLANE, name="conv_0")(x)
        x = x + Conv(x.shape[-1], PLANE, name="conv_1")(jax.nn.relu(y))
        y = ChannelNorm(name="norm")(x)
        if self.mixing == "gate":
            return x + DepthGate(self.window, name="gate")(y)
        return x + DepthAttention(self.n_heads, self.window, name="attention")(y)


@known_arguments_only
class DepthAttentionSR(VolumeModel):
    """2D convolutions a slice and attention across slices. Shapes, and the arguments
    that all volume models share: :class:`models.volume_model.VolumeModel`.

    ``tail(upsampler(h + conv(blocks(h))))``, ``h = head(x)``. ``conv`` is how ``head``,
    ``conv``, ``upsampler`` and ``tail`` are made; the blocks' own convolutions are 2D.

    Attributes:
        hidden_channels: of all layers between.
        n_blocks: pairs of 2D convolutions, each with a mixing of slices behind it.
        mixing: ``"attention"`` or ``"gate"``.
        n_heads: of the attention; divides ``hidden_channels``.
        depth_window: slices to either side that a mixing sees.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, or an input of another rank, dtype or number of channels.
    """

    hidden_channels: int = 32
    n_blocks: int = 4
    mixing: str = "attention"
    n_heads: int = 4
    depth_window: int = 4

    def _network(self, x, train: bool, region):
        h = Conv(self.hidden_channels, kind=self.kind, name="head")(x)
        y = h
        for i in range(self.n_blocks):
            mix = (self.mixing, self.n_heads, self.depth_window)
            y = Block(*mix, name=f"blocks_{i}")(y)
        y = h + Conv(self.hidden_channels, kind=self.kind, name="conv")(y)
        y = Upsampler(self.scale, self.upsampler, self.kind, name="upsampler")(y)
        return Conv(self.out_channels, kind=self.kind, name="tail")(y)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._check_whole("hidden_channels", "n_blocks", "n_heads", "depth_window")
        self._check_choice("mixing", MIXINGS)
        if self.hidden_channels % self.n_heads:
            self._refuse(
                f"n_heads divides hidden_channels, {self.hidden_channels}", "n_heads"
            )
