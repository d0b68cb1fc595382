"""What all volumetric networks share: arguments, checks, and what tiling asks for."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxops.conv3d_forms import FORMS
from models.receptive_field import receptive_radius
from models.volume_blocks import (
    CONVOLUTIONS,
    RESIZES,
    UPSAMPLERS,
    Kind,
    Resize,
    Sizes,
)


class VolumeModel(nn.Module):
    """A network on volumes: (batch, depth, height, width, in_channels) to the same with
    each axis times its ``scale`` and ``out_channels``.

    Call: ``model.apply(variables, x, train=False)``. Any size of at least 1 an axis.
    The output has the dtype of ``x``; parameters are made float32.

    Tiles: the output of a block of the input, whose corners lie on multiples of
    ``stride`` or on the volume's ends, depends on the block and on ``receptive_radius``
    points around it, no more. So the network may be run on the block with that halo
    (cut off at the volume's ends, its start moved back to a multiple of ``stride``),
    and its output cropped. ``statistic_layers`` counts the exceptions to that.

    Attributes:
        in_channels, out_channels: of the data.
        scale: whole number by which each axis grows: (depth, height, width), or one for
            all. Points are the centres of cells.
        conv: how 3x3x3 convolutions are made: ``"exact"``; ``"separable"``, depth taps
            and then a plane, a third of the weights; ``"2plus1d"``, a plane and then
            depth. See :class:`models.volume_blocks.Conv`.
        upsampler: ``"shuffle"`` or ``"linear"``,
            see :class:`models.volume_blocks.Upsampler`.
        rank: terms of ``"separable"`` (one, unless told otherwise), or channels between
            of ``"2plus1d"`` (those of the output); :func:`jaxops.factorise` makes such
            kernels of dense ones. A layer that is exact with fewer has these.
        form: of :func:`jaxops.conv3d`: speed and rounding, not weights. ``"auto"`` may
            take Winograd's form, which rounds equal slices differently at different
            depths; with ``"local"``, the fastest of ``"concat"``, ``"sum"`` and
            ``"outshift"``, a tile is computed as the whole is.
        input_skip: ``"linear"`` or ``"cubic"`` adds the interpolated input to the
            output (the input itself for scale 1); None adds nothing.
    """

    in_channels: int = 1
    out_channels: int = 1
    scale: int | Sequence[int] = (1, 1, 1)
    conv: str = "exact"
    upsampler: str = "shuffle"
    input_skip: str | None = None
    rank: int | None = None
    form: str = "auto"

    def __post_init__(self):
        self.scale = self._sizes("scale", 1)
        self._check_arguments()
        super().__post_init__()

    @nn.compact
    def __call__(self, x, train: bool = False, region=None):
        """``region``: see :class:`models.RCAN3D`; other networks have no use for it."""
        self._check_input(x)
        y = self._network(x, train, region)
        if self.input_skip is None:
            return y
        skip = Resize(self.scale, self.input_skip, True, name="input_skip")
        return y + skip(x)

    @property
    def kind(self) -> Kind:
        return Kind(self.conv, self.rank, self.form)

    @property
    def stride(self) -> Sizes:
        """Tiles begin on multiples of these, an axis."""
        return (1, 1, 1)

    @property
    def receptive_radius(self) -> Sizes:
        """Points of the input to each side of a block, an axis; from the layers."""
        return receptive_radius(self.clone(parent=None, name=None))

    @property
    def statistic_layers(self) -> int:
        """Layers that use means over the whole volume; see :class:`models.RCAN3D`."""
        return 0

    def example_shape(self) -> tuple[int, ...]:
        """The shape of a small input, such as initialising needs."""
        return (1, *self.stride, self.in_channels)

    def _network(self, x, train: bool, region):
        raise NotImplementedError("each network has its own")

    def _sizes(self, argument: str, least: int) -> Sizes:
        """The argument as one whole number an axis."""
        value = getattr(self, argument)
        sizes = (value,) * 3 if _is_whole(value) else value
        if (
            not isinstance(sizes, (Sequence, np.ndarray))
            or len(sizes) != 3
            or not all(_is_whole(size) and size >= least for size in sizes)
        ):
            self._refuse(
                f"{argument} is (depth, height, width) or one whole number for all, of "
                f"at least {least}",
                argument,
            )
        return tuple(int(size) for size in sizes)

    def _check_arguments(self) -> None:
        self._check_whole("in_channels", "out_channels")
        self._check_choice("conv", CONVOLUTIONS)
        self._check_choice("upsampler", UPSAMPLERS)
        self._check_choice("form", ("auto", "local", *FORMS))
        self._check_choice("input_skip", (*RESIZES, None))
        if self.rank is not None:
            self._check_whole("rank")
        if self.rank is not None and self.conv == "exact":
            self._refuse('rank is for conv="separable" or "2plus1d"', "rank")
        if self.input_skip is not None and self.in_channels != self.out_channels:
            self._refuse(
                "input_skip adds the input to the output, so that in_channels and "
                f"out_channels ({self.in_channels} and {self.out_channels}) are equal, "
                "or it is None",
                "input_skip",
            )

    def _check_whole(self, *arguments: str, least: int = 1) -> None:
        for argument in arguments:
            value = getattr(self, argument)
            if not _is_whole(value) or value < least:
                self._refuse(
                    f"{argument} is a whole number of at least {least}", argument
                )

    def _check_choice(self, argument: str, choices: Sequence) -> None:
        if getattr(self, argument) not in choices:
            self._refuse(
                f"{argument} is one of {', '.join(map(repr, choices))}", argument
            )

    def _refuse(self, rule: str, argument: str) -> None:
        value = getattr(self, argument)
        raise ValueError(f"{type(self).__name__}: {rule}; got {argument}={value!r}.")

    def _check_input(self, x) -> None:
        if (
            x.ndim != 5
            or x.shape[-1] != self.in_channels
            or math.prod(x.shape) == 0
            or not jnp.issubdtype(x.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{type(self).__name__} takes floats (batch, depth, height, width, "
                f"channels) with {self.in_channels} channels, no axis empty; got "
                f"{x.shape=}, {x.dtype=}. A volume alone is x[None, ..., None]."
            )


def _is_whole(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
