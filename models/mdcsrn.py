"""Multi-level densely connected super-resolution network on volumes.

Paper: Chen et al., "Efficient and Accurate MRI Super-Resolution using a Generative
Adversarial Network and 3D Multi-Level Densely Connected Network", MICCAI 2018,
arXiv:1803.01417: the generator, b4u4 with k = 16. Deviation: where ``scale`` is not 1
the paper interpolates the input first; here the network runs on the coarse grid, and a
compressor and an upsampler come before the reconstruction.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.arguments import known_arguments_only
from models.blocks import Dense, Norm
from models.volume_blocks import Conv, Kind, Upsampler
from models.volume_model import VolumeModel

NORMS = ("batch_norm", None)  # those of whole volumes would not go tile by tile


class DenseUnit(nn.Module):
    """x joined with conv(elu(norm(x))), which has ``growth`` channels."""

    growth: int
    norm: str | None
    kind: Kind

    @nn.compact
    def __call__(self, x, train: bool = False):
        y = x if self.norm is None else Norm(self.norm, name="norm")(x, train)
        y = Conv(self.growth, kind=self.kind, name="conv")(jax.nn.elu(y))
        return jnp.concatenate([x, y], axis=-1)


class DenseBlock(nn.Module):
    """Units one behind the other, each joining its channels on."""

    n_units: int
    growth: int
    norm: str | None
    kind: Kind

    @nn.compact
    def __call__(self, x, train: bool = False):
        for i in range(self.n_units):
            unit = DenseUnit(self.growth, self.norm, self.kind, name=f"units_{i}")
            x = unit(x, train)
        return x


@known_arguments_only
class MDCSRN(VolumeModel):
    """mDCSRN on volumes. Shapes, and the arguments that all volume models share:
    :class:`models.volume_model.VolumeModel`.

    A convolution to 2k channels; densely connected blocks, each on a 1x1x1 compression
    to 2k channels of all outputs before it (the first on the convolution itself); a
    1x1x1 reconstruction from all outputs. In training (``train=True``) batch norm uses
    the batch's own moments and keeps running ones in ``batch_stats``, which has to be
    mutable.

    Attributes:
        n_blocks, n_units: blocks, and units in each.
        growth: k, the channels that each unit adds.
        norm: ``"batch_norm"`` in each unit, or None.

    Raises:
        TypeError: for an unknown argument. ValueError: for an argument out of its
            domain, or an input of another rank, dtype or number of channels.
    """

    n_blocks: int = 4
    n_units: int = 4
    growth: int = 16
    norm: str | None = "batch_norm"

    def _network(self, x, train: bool, region):
        width = 2 * self.growth
        x = Conv(width, kind=self.kind, name="head")(x)
        outputs = [x]
        for i in range(self.n_blocks):
            if i > 0:
                x = jnp.concatenate(outputs, axis=-1)
                x = Dense(width, name=f"compressors_{i}")(x)
            block = DenseBlock(
                self.n_units, self.growth, self.norm, self.kind, name=f"blocks_{i}"
            )
            outputs.append(block(x, train))
        x = jnp.concatenate(outputs, axis=-1)
        if self.scale != (1, 1, 1):
            x = Dense(width, name=f"compressors_{self.n_blocks}")(x)
            x = Upsampler(self.scale, self.upsampler, self.kind, name="upsampler")(x)
        return Dense(self.out_channels, name="tail")(x)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        self._check_whole("n_blocks", "n_units", "growth")
        self._check_choice("norm", NORMS)
