"""What every training run is told, and how it is read, saved and compared."""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from models.atomic import replace_file

CONFIG = "config.json"


@dataclass(frozen=True)
class TrainSettings:
    """What every run is told; each command adds its own."""

    backend: Literal["auto", "cpu", "gpu", "metal"] = "auto"
    """Device to train on; auto takes the best that is there."""

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

    micro_batch: int | None = None
    """Samples computed at a time, where a batch takes too much memory; their gradients
    are averaged. A divisor of --batch-size. By default all, in train.fno on a CPU as
    many as fit its cache."""

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
    """Epochs from one test to the next."""

    def check(self) -> None:
        """Raise ValueError for numbers out of range and settings that do not agree."""
        self.check_ranges(
            epochs=(self.epochs >= 1, "1 or more"),
            batch_size=(self.batch_size >= 1, "1 or more"),
            micro_batch=(
                self.micro_batch is None
                or (self.micro_batch >= 1 and self.batch_size % self.micro_batch == 0),
                f"a divisor of --batch-size, {self.batch_size}",
            ),
            learning_rate=(self.learning_rate > 0, "above 0"),
            weight_decay=(self.weight_decay >= 0, "0 or more"),
            warmup=(0 <= self.warmup <= 1, "from 0 to 1"),
            gradient_clip=(
                self.gradient_clip is None or self.gradient_clip > 0,
                "above 0",
            ),
            seed=(0 <= self.seed < 2**32, "from 0 to 4294967295"),
            test_every=(self.test_every >= 1, "1 or more"),
        )
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume keeps a run and --overwrite removes it: use one."
            )

    def check_ranges(self, **rules: tuple[bool, str]) -> None:
        """Raise ValueError for the first field that does not follow its rule: whether
        it does, and the rule in words."""
        for name, (is_good, rule) in rules.items():
            if not is_good:
                value = getattr(self, name)
                value = " ".join(map(str, value)) if isinstance(value, tuple) else value
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be {rule}; got {value}.")


Settings = TypeVar("Settings")


def parse(
    kind: type[Settings],
    module: str,
    arguments: Sequence[str],
    default: Settings | None = None,
) -> Settings:
    """Read a command line; ``default`` is what stands where it says nothing.

    An unknown option, or ``--help``, ends the program (SystemExit).
    """
    return tyro.cli(
        kind,
        prog=f"python -m {module}",
        args=list(arguments),
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


# What may differ between the start of a run and its resumption.
FREE = ("backend", "out", "resume", "overwrite")


def identity(settings: TrainSettings) -> dict[str, Any]:
    """All that a run's result depends on, as JSON has it."""
    values = json.loads(to_json(settings))
    return {name: value for name, value in values.items() if name not in FREE}


def to_json(settings: TrainSettings) -> str:
    """Settings as they are saved with a run; paths are made absolute."""
    return json.dumps(
        dataclasses.asdict(settings),
        indent=2,
        default=lambda path: str(path.absolute()),
    )


def write_settings(path: Path, settings: TrainSettings) -> None:
    """Save settings as JSON, whole or not at all."""
    with replace_file(path) as temporary:
        temporary.write_text(to_json(settings) + "\n", "utf-8")


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read what `write_settings` wrote.

    Raises:
        ValueError: if the file is something else, another command's or another
            version's.
    """
    try:
        return typed(kind, json.loads(path.read_bytes()), "it")
    except ValueError as error:
        raise ValueError(
            f"{path} must hold the settings of such a run, of this version; it does "
            f"not ({error}). Start anew with --overwrite, or elsewhere with --out."
        ) from error


def check_same(settings: TrainSettings, saved: TrainSettings) -> None:
    """Refuse to go on with a run under other settings.

    Raises:
        ValueError: naming the options that differ.
    """
    here, there = identity(settings), identity(saved)
    flags = _flags(type(settings))
    wrong = [
        f"{flag} was {old} and is {new}"
        for (flag, old), (_, new) in zip(
            _flat(there, flags), _flat(here, flags), strict=True
        )
        if old != new
    ]
    if wrong:
        raise ValueError(
            "A run must be resumed with the settings that it was started with; here "
            f"{'; '.join(wrong)}. Leave these options out, or start anew with another "
            "--out."
        )


def _flat(values, flags):
    for name, value in values.items():
        flag = flags.get(name, name)
        if isinstance(flag, dict):
            yield from _flat(value, flag)
        else:
            yield flag, value


def _flags(kind, prefix="--"):
    """The option of each field; nested fields have one dict for each group."""
    flags = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        bare = typing.get_args(hint)[0] if _is(hint, Annotated) else hint
        if dataclasses.is_dataclass(bare):
            # A group without a name of its own (tyro.conf.arg(name="")) has no prefix.
            inner = prefix if _is(hint, Annotated) else f"{prefix}{name}."
            flags[name] = _flags(bare, inner)
        elif _is(hint, Annotated):  # tyro.conf.Positional
            flags[name] = name.upper()
        else:
            flags[name] = f"{prefix}{name}".replace("_", "-")
    return flags


def typed(hint: Any, value: Any, where: str) -> Any:
    """A value from JSON or a saved model as the annotation has it; ``where`` names it.

    Raises:
        ValueError: if it is of another type.
    """
    if _is(hint, Annotated):
        return typed(typing.get_args(hint)[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True)
        if wrong := hints.keys() ^ value.keys():
            raise ValueError(f"{where} lacks or does not know {', '.join(wrong)}")
        return hint(**{k: typed(hints[k], v, k) for k, v in value.items()})
    arguments = typing.get_args(hint)
    if _is(hint, typing.Union) or _is(hint, types.UnionType):
        for argument in arguments:
            try:
                return typed(argument, value, where)
            except ValueError:  # another member may take it; else it is told below
                continue
    elif _is(hint, Literal) and value in arguments:
        return value
    elif _is(hint, tuple) and isinstance(value, list | tuple):
        each = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(each) == len(value):
            return tuple(typed(*pair, where) for pair in zip(each, value, strict=True))
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{where} can't be {value!r}")


def _is(hint, origin):
    return typing.get_origin(hint) is origin
