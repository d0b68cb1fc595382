"""Enhanced deep residual super-resolution network on volumes.

Paper: Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution",
CVPR workshops 2017, arXiv:1707.02921, with 3D convolutions. Deviations: one pixel
shuffle for any scale an axis, not one a factor of two; no mean of a data set is taken
off, which is the normaliser's part.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.arguments import known_arguments_only
from models.volume_blocks import Conv, Kind, Upsampler, upsampled_conv
from models.volume_model import VolumeModel


class ResidualBlock(nn.Module):
    """x + residual_scaling conv(relu(conv(x)))."""

    residual_scaling: float
    kind: Kind

    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        y = Conv(channels, kind=self.kind, name="conv_0")(x)
        y = Conv(channels, kind=self.kind, name="conv_1")(jax.nn.relu(y))
        if self.residual_scaling != 1:
            y = y * jnp.asarray(self.residual_scaling, y.dtype)
        return x + y


@known_arguments_only
class EDSR3D(VolumeModel):
    """EDSR on volumes. Shapes, and the arguments that all volume models share:
    :class:`models.volume_model.VolumeModel`.

    ``tail(upsampler(h + conv(blocks(h))))``, ``h = head(x)``.

    Attributes:
        scale: (2, 2, 2) unless told otherwise.
        hidden_channels: of all layers between.
        n_blocks: residual blocks.
        residual_scaling: what each block is multiplied by; None: 0.1 from 256 hidden
            channels on, else 1.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, or an input of another rank, dtype or number of channels.
    """

    scale: int | Sequence[int] = (2, 2, 2)
    hidden_channels: int = 32
    n_blocks: int = 8
    residual_scaling: float | None = None

    def _network(self, x, train: bool, region):
        scaling = self.residual_scaling
        if scaling is None:
            scaling = 0.1 if self.hidden_channels >= 256 else 1.0
        h = Conv(self.hidden_channels, kind=self.kind, name="head")(x)
        y = h
        for i in range(self.n_blocks):
            y = ResidualBlock(scaling, self.kind, name=f"blocks_{i}")(y)
        y = h + Conv(self.hidden_channels, kind=self.kind, name="conv")(y)
        upsampler = Upsampler(self.scale, self.upsampler, self.kind, name="upsampler")
        tail = Conv(self.out_channels, kind=self.kind, name="tail")
        return upsampled_conv(self, y, upsampler, tail)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._check_whole("hidden_channels", "n_blocks")
        scaling = self.residual_scaling
        if scaling is not None and not (
            isinstance(scaling, (int, float)) and scaling > 0
        ):
            self._refuse(
                "residual_scaling is a positive number or None", "residual_scaling"
            )
