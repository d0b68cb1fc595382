"""The model of an enlargement, and what its file says of intensities, all checked."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from models import load
from models.volume_model import VolumeModel
from train.normalise import PERCENTILES, IntensityRange


class SavedModel(NamedTuple):
    """Of a file."""

    model: nn.Module
    variables: dict[str, Any]
    intensity: IntensityRange | None
    """Of the training data; None where it was saved without."""

    target: IntensityRange | None
    """Of the training data at high resolution; None where it was saved without."""

    percentiles: tuple[float, float]
    """Intensities of an input that are encoded as 0 and 1."""

    def output_range(self, intensity: IntensityRange) -> IntensityRange:
        """What the output is decoded by, for an input that was encoded by a range.

        The same, or, for a network that was trained on pairs of other intensities,
        what lies to it as those at high resolution lie to those at low resolution.
        """
        if None in (self.intensity, self.target) or self.intensity == self.target:
            return intensity
        gain = (self.target.high - self.target.low) / (
            self.intensity.high - self.intensity.low
        )
        low, high = (
            self.target.low + gain * (value - self.intensity.low)
            for value in (intensity.low, intensity.high)
        )
        return IntensityRange(low, high)

    @property
    def text(self) -> str:
        """One line for people."""
        weights = sum(leaf.size for leaf in jax.tree.leaves(self.variables))
        scale = " x ".join(map(str, self.model.scale))
        name = type(self.model).__name__
        return f"{name}, {weights:,} weights, scale {scale} (z, y, x)"


def read_model(path: Path) -> SavedModel:
    """Read a network that enlarges volumes of one channel.

    Raises:
        ValueError: for another one, and for what its file says of intensities and no
            range or percentiles can be; it names the file and the key. OSError: if it
            can't be read.
    """
    model, variables, extra = load(path)
    if not isinstance(model, VolumeModel):
        raise ValueError(
            f"{path} must be a network on volumes; it is a {type(model).__name__}. For "
            "operators there is python -m train.predict."
        )
    if (model.in_channels, model.out_channels) != (1, 1):
        raise ValueError(
            f"{path} must take and give one channel, since the channels of a volume "
            f"are enlarged one by one; it has {model.in_channels} and "
            f"{model.out_channels}."
        )
    percentiles = _percentiles(path, extra.get("percentiles", PERCENTILES))
    ranges = (_range(path, extra, key) for key in ("intensity", "target_intensity"))
    return SavedModel(model, variables, *ranges, percentiles)


def _range(path, extra, key) -> IntensityRange | None:
    value = extra.get(key)
    if value is None:
        return None
    if isinstance(value, dict) and all(map(_is_number, value.values())):
        try:
            return IntensityRange.from_dict(value)
        except (ValueError, OverflowError):  # no range, or other keys: told below
            pass
    raise ValueError(
        f"{path} must have finite numbers low < high in its '{key}'; got {value!r}. "
        "Save the model anew."
    )


def _percentiles(path, value) -> tuple[float, float]:
    sound = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    if not sound or not 0 <= value[0] < value[1] <= 100:
        raise ValueError(
            f"{path} must have two numbers that ascend within 0 to 100 as its "
            f"'percentiles'; got {value!r}. Save the model anew."
        )
    return value


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
