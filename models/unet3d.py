"""U-Net on volumes, as content-aware image restoration uses it.

Papers: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image
Segmentation", arXiv:1505.04597; Weigert et al., "Content-aware image restoration:
pushing the limits of fluorescence microscopy", Nature Methods 15 (2018), whose layers
and sizes these are. Reference code: CSBDeep (BSD-3), not copied. Deviations: sizes that
the windows do not divide are padded here, so that any size is right; an upsampler
before the last convolution, and the interpolated input added, where ``scale`` is not 1.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.arguments import known_arguments_only
from models.blocks import Dense
from models.volume_blocks import (
    Conv,
    Kind,
    MaxPool,
    Nearest,
    Sizes,
    Upsampler,
    nearest_conv,
)
from models.volume_model import VolumeModel


class Level(nn.Module):
    """Convolutions to these channels, each with a ReLU behind it; first, where there is
    a shortcut, nearest points, which it is joined on."""

    features: Sizes
    kind: Kind
    pool: Sizes = (1, 1, 1)

    @nn.compact
    def __call__(self, x, shortcut=None):
        for i, features in enumerate(self.features):
            conv = Conv(features, kind=self.kind, name=f"conv_{i}")
            if i == 0 and shortcut is not None:
                nearest = Nearest(self.pool, name="nearest")
                x = nearest_conv(self, x, nearest, shortcut, conv)
            else:
                x = conv(x)
            x = jax.nn.relu(x)
        return x


@known_arguments_only
class UNet3D(VolumeModel):
    """U-Net on volumes. Shapes, and the arguments that all volume models share:
    :class:`models.volume_model.VolumeModel`.

    ``n_levels`` times two convolutions and a pooling, channels doubling; two
    convolutions; ``n_levels`` times nearest points, the level's own output joined on,
    and two convolutions, the second of which halves the channels; a 1x1x1 convolution,
    plus the input.

    Sizes that are no multiple of ``stride`` are padded at their ends with the last
    point, and the output is cropped.

    Attributes:
        input_skip: ``"linear"`` unless told otherwise.
        hidden_channels: of the first level.
        n_levels: poolings.
        pool: what each pooling divides the axes by: (depth, height, width), or one for
            all; (1, 2, 2) for stacks of few slices.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, or an input of another rank, dtype or number of channels.
    """

    input_skip: str | None = "linear"
    hidden_channels: int = 32
    n_levels: int = 2
    pool: int | Sequence[int] = (2, 2, 2)

    def __post_init__(self):
        self.pool = self._sizes("pool", 1)
        super().__post_init__()

    def _network(self, x, train: bool, region):
        grid = x.shape[1:-1]
        ends = [(0, -n % s) for n, s in zip(grid, self.stride, strict=True)]
        if any(end for _, end in ends):
            x = jnp.pad(x, [(0, 0), *ends, (0, 0)], mode="edge")
        widths = [self.hidden_channels * 2**level for level in range(self.n_levels + 1)]
        narrower = [widths[0], *widths[:-1]]  # what a level hands to the finer one
        shortcuts = []
        for i in range(self.n_levels):
            x = Level((widths[i],) * 2, self.kind, name=f"down_{i}")(x)
            shortcuts.append(x)
            x = MaxPool(self.pool, name=f"pool_{i}")(x)
        x = Level((widths[-1], narrower[-1]), self.kind, name="middle")(x)
        for i in reversed(range(self.n_levels)):
            level = Level(
                (widths[i], narrower[i]), self.kind, self.pool, name=f"up_{i}"
            )
            x = level(x, shortcuts[i])
        x = x[:, : grid[0], : grid[1], : grid[2]]
        x = Upsampler(self.scale, self.upsampler, self.kind, name="upsampler")(x)
        return Dense(self.out_channels, name="tail")(x)

    @property
    def stride(self) -> Sizes:
        return tuple(window**self.n_levels for window in self.pool)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._check_whole("hidden_channels", "n_levels")
