"""Residual channel attention network on volumes.

Papers: Zhang et al., "Image Super-Resolution Using Very Deep Residual Channel Attention
Networks", ECCV 2018, arXiv:1807.02758; on microscopy volumes, Chen et al.,
"Three-dimensional residual channel attention networks denoise and sharpen fluorescence
microscopy image volumes", Nature Methods 18 (2021), whose sizes and value range these
are. Written from the papers; their code (CC BY-NC) was not used. Deviation: an
upsampler before the last convolution where ``scale`` is not 1.
"""

import flax.linen as nn
import jax

from models.arguments import known_arguments_only
from models.volume_blocks import (
    ChannelAttention,
    Conv,
    Kind,
    Upsampler,
    upsampled_conv,
)
from models.volume_model import VolumeModel


class ResidualBlock(nn.Module):
    """x + attention(conv(relu(conv(x))))."""

    reduction: int
    kind: Kind

    @nn.compact
    def __call__(self, x, region=None):
        channels = x.shape[-1]
        y = Conv(channels, kind=self.kind, name="conv_0")(x)
        y = Conv(channels, kind=self.kind, name="conv_1")(jax.nn.relu(y))
        return x + ChannelAttention(self.reduction, name="attention")(y, region)


class ResidualGroup(nn.Module):
    """x + conv(blocks(x))."""

    n_blocks: int
    reduction: int
    kind: Kind

    @nn.compact
    def __call__(self, x, region=None):
        y = x
        for i in range(self.n_blocks):
            y = ResidualBlock(self.reduction, self.kind, name=f"blocks_{i}")(y, region)
        return x + Conv(x.shape[-1], kind=self.kind, name="conv")(y)


@known_arguments_only
class RCAN3D(VolumeModel):
    """RCAN on volumes of values from 0 to 1. Shapes, and the arguments that all volume
    models share: :class:`models.volume_model.VolumeModel`.

    ``tail(upsampler(h + conv(groups(h))))``, ``h = head(2x - 1)``, then (y + 1) / 2.

    Each channel attention uses the means of its channels over the whole volume, so
    tiles alone are not exact: ``statistic_layers`` is the number of these layers. A
    volume's means are collected over its tiles in passes::

        means = {}  # the first pass: each tile takes its own
        for _ in range(model.statistic_layers):
            for tile, region in tiles:  # region: its own part of the array
                _, sums = model.apply(
                    {**variables, **means}, tile, region=region, mutable=["sums"]
                )  # sums["sums"]: (batch, channels) a layer; add up over the tiles
            means = {"means": jax.tree.map(lambda s: s / voxels, total)}
        y = model.apply({**variables, **means}, tile)  # of a tile with its halo

    The means of a layer are right once those before it are: after k passes the first k
    are, and after ``statistic_layers`` all. They settle much sooner; a pass that
    changes nothing ends the loop. Add the sums up in float64. ``region``, which may be
    an array (3, 2), so that one program serves all tiles, is ((start,
    stop), ..) for depth, height and width of the tile as it is passed in; None: all.

    Attributes:
        hidden_channels: of all layers between.
        n_groups, n_blocks: residual groups, and blocks in each.
        reduction: the attention has ``hidden_channels // reduction`` hidden channels.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, an input of another rank, dtype or number of channels, or means of
            another shape.
    """

    hidden_channels: int = 32
    n_groups: int = 5
    n_blocks: int = 3
    reduction: int = 8

    def _network(self, x, train: bool, region):
        h = Conv(self.hidden_channels, kind=self.kind, name="head")(2 * x - 1)
        y = h
        for i in range(self.n_groups):
            y = ResidualGroup(
                self.n_blocks, self.reduction, self.kind, name=f"groups_{i}"
            )(y, region)
        y = h + Conv(self.hidden_channels, kind=self.kind, name="conv")(y)
        upsampler = Upsampler(self.scale, self.upsampler, self.kind, name="upsampler")
        tail = Conv(self.out_channels, kind=self.kind, name="tail")
        return (upsampled_conv(self, y, upsampler, tail) + 1) / 2

    @property
    def statistic_layers(self) -> int:
        return self.n_groups * self.n_blocks

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._check_whole("hidden_channels", "n_groups", "n_blocks", "reduction")
        if self.reduction > self.hidden_channels:
            self._refuse(
                f"reduction is at most hidden_channels, {self.hidden_channels}",
                "reduction",
            )
