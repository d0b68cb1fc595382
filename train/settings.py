"""What a training run is told: typed, read by tyro, saved with the run."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from models.atomic import replace_file
from train.data.darcy import DarcySettings

CONFIG = "config.json"
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
class Settings:
    """Train a Fourier neural operator on pairs of input and target fields.

    Without --data, on Darcy flow: pairs that are solved for here, once, and kept in the
    user's cache folder.
    """

    backend: Literal["auto", "cpu", "gpu", "metal"] = "auto"
    """Device to train on; auto takes the best that is there."""

    data: Path | None = None
    """File of training pairs: .pt, .npz, .mat or HDF5."""

    test: tuple[Path, ...] = ()
    """Files of test pairs, at the training resolution or others (zero-shot)."""

    holdout: float = 0.1
    """Fraction of --data, from its end, to test on where no --test is given."""

    out: Path | None = None
    """Folder of the run. By default a fresh one: runs/NAME, runs/NAME-2, ..."""

    resume: bool = False
    """Go on with the run in --out (by default the newest) where it was stopped."""

    overwrite: bool = False
    """Replace the run in --out."""

    epochs: int = 20
    """Times that the training set is gone through."""

    batch_size: int = 20
    """Samples a step."""

    loss: Literal["l2", "h1"] = "l2"
    """Relative L2 error, or relative H1 error (field and slopes)."""

    h1_periodic: bool = True
    """Slopes, in loss and tests, are taken around the ends of each axis; with the flag
    they are one-sided there."""

    learning_rate: float = 3e-3
    """Highest learning rate of AdamW; it rises linearly, then falls as a cosine."""

    weight_decay: float = 1e-4
    """Weight decay of AdamW."""

    warmup: float = 0.05
    """Fraction of the run in which the learning rate rises."""

    gradient_clip: float | None = None
    """Largest norm of a gradient; larger ones are scaled down."""

    seed: int = 0
    """Seed of weights, order and dropout."""

    test_every: int = 1
    """Epochs between tests at the training resolution."""

    model: Annotated[
        tyro.conf.OmitArgPrefixes[ModelSettings], tyro.conf.arg(name="")
    ] = field(default_factory=ModelSettings)

    read: Annotated[tyro.conf.OmitArgPrefixes[ReadSettings], tyro.conf.arg(name="")] = (
        field(default_factory=ReadSettings)
    )

    darcy: DarcySettings = field(default_factory=DarcySettings)

    def check(self) -> None:
        """Raise ValueError for numbers out of range and settings that do not agree."""
        ranges = {
            "epochs": self.epochs >= 1,
            "batch_size": self.batch_size >= 1,
            "learning_rate": self.learning_rate > 0,
            "weight_decay": self.weight_decay >= 0,
            "warmup": 0 <= self.warmup <= 1,
            "gradient_clip": self.gradient_clip is None or self.gradient_clip > 0,
            "seed": 0 <= self.seed < 2**32,
            "test_every": self.test_every >= 1,
            "holdout": 0 < self.holdout < 1,
        }
        for name, is_good in ranges.items():
            if not is_good:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is out of range: got {getattr(self, name)}.")
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume keeps a run and --overwrite removes it: use one."
            )
        if self.data is None and (self.test or self.read != ReadSettings()):
            raise ValueError(
                "--test and the options that say how files are read need --data FILE."
            )
        if self.data is not None and self.darcy != DarcySettings():
            raise ValueError("--darcy.* options are for runs without --data.")


def parse(arguments: Sequence[str], default: Settings | None = None) -> Settings:
    """Read a command line; ``default`` is what stands where it says nothing.

    An unknown option, or ``--help``, ends the program (SystemExit).
    """
    return tyro.cli(
        Settings,
        prog="python -m train.fno",
        args=list(arguments),
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


# What may differ between the start of a run and its resumption.
FREE = ("backend", "out", "resume", "overwrite")


def identity(settings: Settings) -> dict[str, Any]:
    """All that a run's result depends on, as JSON has it."""
    values = json.loads(to_json(settings))
    return {name: value for name, value in values.items() if name not in FREE}


def to_json(settings: Settings) -> str:
    """Settings as they are saved with a run; paths are made absolute."""
    return json.dumps(
        dataclasses.asdict(settings),
        indent=2,
        default=lambda path: str(path.absolute()),
    )


def write_settings(path: Path, settings: Settings) -> None:
    """Save settings as JSON, whole or not at all."""
    with replace_file(path) as temporary:
        temporary.write_text(to_json(settings) + "\n", "utf-8")


def read_settings(path: Path) -> Settings:
    """Read what `write_settings` wrote.

    Raises:
        ValueError: if the file is something else, or another version's.
    """
    try:
        values = json.loads(path.read_bytes())
        for name, kind in (
            ("model", ModelSettings),
            ("read", ReadSettings),
            ("darcy", DarcySettings),
        ):
            values[name] = kind(**_tuples(values[name]))
        values = _tuples(values)
        values["test"] = tuple(Path(name) for name in values["test"])
        for name in ("data", "out"):
            values[name] = None if values[name] is None else Path(values[name])
        return Settings(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold the settings of a run of this version; it does not "
            f"({error}). Start anew with --overwrite, or elsewhere with --out."
        ) from error


def check_same(settings: Settings, saved: Settings) -> None:
    """Refuse to go on with a run under other settings.

    Raises:
        ValueError: naming the options that differ.
    """
    here, there = identity(settings), identity(saved)
    wrong = [
        f"{name} was {old} and is {new}"
        for (name, old), (_, new) in zip(_flat(there), _flat(here), strict=True)
        if old != new
    ]
    if wrong:
        raise ValueError(
            "A run must be resumed with the settings that it was started with; here "
            f"{'; '.join(wrong)}. Leave these options out, or start anew with another "
            "--out."
        )


def _flat(values, prefix="--"):
    for name, value in values.items():
        if isinstance(value, dict):
            inner = f"{prefix}{name}." if name == "darcy" else prefix
            yield from _flat(value, inner)
        else:
            yield f"{prefix}{name}".replace("_", "-"), value


def _tuples(values):
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
