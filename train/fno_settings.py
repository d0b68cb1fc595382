"""What a run of `train.fno` is told beside what every run is told."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from train.data.darcy import DarcySettings
from train.settings import TrainSettings

Skip = Literal["linear", "soft-gating", "identity", "none"]


@dataclass(frozen=True)
class ModelSettings:
    """The operator; names and meaning as in `models.FNO`."""

    n_modes: tuple[int, ...] = (12,)
    """Fourier modes kept, negative ones counted in: one number, or one an axis."""

    hidden_channels: int = 32
    """Channels of the Fourier layers."""

    n_layers: int = 4
    """Fourier layers."""

    lifting_channel_ratio: float = 2.0
    """Hidden channels of the lifting, relative to --hidden-channels; 0: one layer."""

    projection_channel_ratio: float = 2.0
    """Hidden channels of the projection, relative to --hidden-channels."""

    positional_embedding: Literal["grid", "none"] = "grid"
    """Whether the coordinates are given to the model as channels."""

    non_linearity: Literal["gelu", "relu", "silu", "tanh"] = "gelu"
    """Activation; gelu is the exact one."""

    norm: Literal["none", "instance_norm", "group_norm", "batch_norm"] = "none"
    """Normalisation in each layer."""

    use_channel_mlp: bool = True
    """Each layer has an MLP over the channels; the flag leaves it out."""

    channel_mlp_dropout: float = 0.0
    """Dropout in that MLP, a probability."""

    channel_mlp_expansion: float = 0.5
    """Its hidden channels, relative to --hidden-channels."""

    channel_mlp_skip: Skip = "soft-gating"
    """Skip connection around that MLP."""

    fno_skip: Skip = "linear"
    """Skip connection around each spectral convolution."""

    domain_padding: tuple[float, ...] = ()
    """Zeros around the field, as a fraction of it: one number, or one an axis."""

    stabilizer: Literal["tanh", "none"] = "none"
    """Squashes the field before each spectral convolution."""

    preactivation: bool = False
    """Activation and norm before the convolution instead of after."""

    def arguments(self, num_axes: int) -> dict[str, Any]:
        """Arguments of `models.FNO` for data on a grid of ``num_axes`` axes.

        Raises:
            ValueError: if the number of modes or paddings fits neither one nor that.
        """
        values = {
            name: None if value == "none" else value
            for name, value in dataclasses.asdict(self).items()
        }
        for name in ("n_modes", "domain_padding"):
            given = values[name]
            if len(given) == 1:
                values[name] = given * num_axes
            elif len(given) != num_axes and (given or name == "n_modes"):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} takes one number, or one for each of the {num_axes} axes "
                    f"of the grid; got {' '.join(map(str, given)) or 'none'}."
                )
        values["domain_padding"] = values["domain_padding"] or None
        return values


@dataclass(frozen=True)
class ReadSettings:
    """How --data and --test files are read; see `train.data.formats.read_pairs`."""

    input_key: str | None = None
    """Name of the inputs in the files; found by itself where the names are usual."""

    target_key: str | None = None
    """Name of the targets in the files."""

    subsample: int = 1
    """Keep every r-th point of each axis of --data (--test files are read whole)."""

    limit: int | None = None
    """Samples to take from the front of --data."""

    channel_axis: Literal["auto"] | int | None = "auto"
    """Axis of the channels in the files: auto, an axis, or None where there is none."""


@dataclass(frozen=True)
class FNOSettings(TrainSettings):
    """Train a Fourier neural operator on pairs of input and target fields.

    Without --data, on Darcy flow: pairs that are solved for here, once, and kept in the
    user's cache folder.
    """

    data: Path | None = None
    """File of training pairs: .pt, .npz, .mat or HDF5."""

    test: tuple[Path, ...] = ()
    """Files of test pairs, at the training resolution or others (zero-shot)."""

    holdout: float = 0.1
    """Fraction of --data, from its end, to test on where no --test is given."""

    loss: Literal["l2", "h1"] = "l2"
    """Relative L2 error, or relative H1 error (field and slopes)."""

    h1_periodic: bool = True
    """Slopes, in loss and tests, are taken around the ends of each axis; with the flag
    they are one-sided there."""

    model: Annotated[
        tyro.conf.OmitArgPrefixes[ModelSettings], tyro.conf.arg(name="")
    ] = field(default_factory=ModelSettings)

    read: Annotated[tyro.conf.OmitArgPrefixes[ReadSettings], tyro.conf.arg(name="")] = (
        field(default_factory=ReadSettings)
    )

    darcy: DarcySettings = field(default_factory=DarcySettings)

    def check(self) -> None:
        super().check()
        self.check_ranges(holdout=(0 < self.holdout < 1, "above 0 and below 1"))
        if self.data is None and (self.test or self.read != ReadSettings()):
            raise ValueError(
                "--test and the options that say how files are read need --data FILE."
            )
        if self.data is not None and self.darcy != DarcySettings():
            raise ValueError("--darcy.* options are for runs without --data.")
