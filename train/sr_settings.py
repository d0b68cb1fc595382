"""What a run of `train.sr` is told beside what every run is told."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import models
from train.settings import TrainSettings

# The classes, and sizes that two CPU cores train in minutes; the papers' are larger.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "edsr3d": ("EDSR3D", {"hidden_channels": 16, "n_blocks": 4}),
    "rcan3d": ("RCAN3D", {"hidden_channels": 16, "n_groups": 2, "n_blocks": 2}),
    "unet3d": ("UNet3D", {"hidden_channels": 16, "n_levels": 2}),
    "mdcsrn": ("MDCSRN", {"n_blocks": 2, "n_units": 4, "growth": 8}),
    "depth-attention": ("DepthAttentionSR", {"hidden_channels": 16, "n_blocks": 4}),
}


@dataclass(frozen=True)
class NetworkSettings:
    """The network. Sizes that are left out make a small one, which two CPU cores train
    in minutes; the classes in `models` tell those of the papers."""

    model: Literal["edsr3d", "rcan3d", "unet3d", "mdcsrn", "depth-attention"] = "edsr3d"
    """Which network."""

    hidden_channels: int | None = None
    """Channels between; 16, unless given (mdcsrn has none)."""

    n_blocks: int | None = None
    """Residual, dense or slice-mixing blocks; 4, unless given, of rcan3d and mdcsrn 2
    (unet3d has none)."""

    n_groups: int | None = None
    """Residual groups of rcan3d; 2, unless given."""

    n_levels: int | None = None
    """Poolings of unet3d; 2, unless given."""

    conv: Literal["exact", "separable", "2plus1d"] = "exact"
    """3x3x3 kernels as they are, or factorised into depth and plane: a third of the
    weights."""

    upsampler: Literal["shuffle", "linear"] = "shuffle"
    """Pixel shuffle, or linear interpolation and a convolution."""

    input_skip: Literal["cubic", "linear", "none"] = "cubic"
    """Interpolated input that the network's output is added to."""

    def make(self, scale: tuple[int, int, int]) -> Any:
        """The linen module.

        Raises:
            ValueError: for an option that this network does not have, or that is out of
                its range.
        """
        name, sizes = MODELS[self.model]
        kind = getattr(models, name)
        known = {f.name for f in dataclasses.fields(kind)}
        given = dataclasses.asdict(self)
        del given["model"]
        arguments = {**sizes, **{k: v for k, v in given.items() if v is not None}}
        if self.input_skip == "none":
            arguments["input_skip"] = None
        for argument in arguments:
            if argument not in known:
                flag = "--" + argument.replace("_", "-")
                raise ValueError(f"{flag} is not an option of --model {self.model}.")
        if self.model == "unet3d" and scale[0] == 1:
            arguments["pool"] = (1, 2, 2)
        return kind(scale=scale, **arguments)


@dataclass(frozen=True)
class MakeSettings:
    """How low-resolution volumes are made where --low gives none."""

    blur: tuple[float, ...] = ()
    """Gaussian blur before the voxels are joined: standard deviations (z y x) in
    high-resolution voxels. By default that of a microscope whose voxels are as large as
    the joined ones, on the axes that are scaled."""

    psf: Path | None = None
    """TIFF of a point spread function in high-resolution voxels, in place of --blur."""

    photons: float | None = None
    """Shot noise: photons a low-resolution voxel has at full intensity; 0: none. By
    default none, for the synthetic volume 200."""

    noise: float | None = None
    """Gaussian noise: standard deviation relative to the intensity range. By default
    none, for the synthetic volume 0.01."""

    def check(self) -> None:
        """Raise ValueError for numbers out of range."""
        if len(self.blur) not in (0, 1, 3) or min(self.blur, default=0) < 0:
            got = " ".join(map(str, self.blur))
            raise ValueError(
                f"--blur must be one number or three (z y x), 0 or more; got {got}."
            )
        for name in ("photons", "noise"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e15:
                raise ValueError(f"--{name} must be 0 or more; got {value}.")


@dataclass(frozen=True)
class ReadSettings:
    """How TIFF files are read; see `train.data.tiff.open_volume`."""

    axes: str | None = None
    """Names of the axes of the files, such as ZYX or TCZYX, where they name none or
    wrong ones."""

    series: int | None = None
    """Which image of files that hold several."""


@dataclass(frozen=True)
class SRSettings(TrainSettings):
    """Train a super-resolution network on volumes in TIFF files.

    Low-resolution volumes come from --low, or are made of the ones given. Without any
    file, on a synthetic volume of tubes and blobs.
    """

    data: tyro.conf.Positional[tuple[Path, ...]] = ()
    """High-resolution volumes: TIFFs; folders of volumes; folders with one slice a
    file."""

    low: tuple[Path, ...] = ()
    """The same volumes at low resolution, as files or folders."""

    scale: tuple[int, ...] = ()
    """How much finer each axis becomes: z y x, or one number for all. By default 1 2 2;
    with --low, as the files say."""

    holdout: float = 0.25
    """Part of each volume, at the end of --holdout-axis, to test on."""

    holdout_axis: Literal["x", "y", "z"] = "x"
    """Axis of the part held out."""

    patch: tuple[int, ...] = (16, 32, 32)
    """Size of a training patch, z y x, in low-resolution voxels."""

    steps: int = 50
    """Steps an epoch."""

    epochs: int = 10
    """Epochs; each ends with a test and a checkpoint."""

    batch_size: int = 4
    """Patches a step."""

    learning_rate: float = 1e-3
    """Highest learning rate of AdamW; it rises linearly, then falls as a cosine."""

    loss: Literal["l1", "mse", "charbonnier", "ssim"] = "charbonnier"
    """What is minimised, on intensities that are normalised."""

    augment: bool = True
    """Take patches as they are, without flips and turns."""

    keep_empty: float = 0.05
    """Part of the patches that is drawn where nothing is to be seen."""

    network: Annotated[
        tyro.conf.OmitArgPrefixes[NetworkSettings], tyro.conf.arg(name="")
    ] = field(default_factory=NetworkSettings)

    make: Annotated[tyro.conf.OmitArgPrefixes[MakeSettings], tyro.conf.arg(name="")] = (
        field(default_factory=MakeSettings)
    )

    read: Annotated[tyro.conf.OmitArgPrefixes[ReadSettings], tyro.conf.arg(name="")] = (
        field(default_factory=ReadSettings)
    )

    def check(self) -> None:
        super().check()
        scale = self.scale or (1,)
        self.check_ranges(
            scale=(
                len(scale) in (1, 3) and min(scale) >= 1 and max(scale) <= 16,
                "three whole numbers (z y x) from 1 to 16, or one for all",
            ),
            holdout=(0 < self.holdout < 1, "above 0 and below 1"),
            patch=(
                len(self.patch) == 3 and min(self.patch) >= 1,
                "three whole numbers (z y x), 1 or more",
            ),
            steps=(self.steps >= 1, "1 or more"),
            keep_empty=(0 <= self.keep_empty <= 1, "from 0 to 1"),
        )
        self.make.check()
        if not self.data and (self.low or self.read != ReadSettings()):
            raise ValueError(
                "--low and the options that say how files are read need volumes to "
                "train on: python -m train.sr VOLUME.tif"
            )
        if self.low and self.make != MakeSettings():
            raise ValueError(
                "Low-resolution volumes are read (--low) or made (--blur, --psf, "
                "--photons, --noise): use one."
            )
        if self.make.blur and self.make.psf:
            raise ValueError("--psf takes the place of --blur: use one.")
