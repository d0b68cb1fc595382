"""Zero mean and unit variance, a channel at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Rows of one block of the passes over the data: bounds the float64 copies.
BLOCK_SIZE = 2**18


@dataclass(frozen=True, eq=False)
class UnitGaussian:
    """Encodes x as (x - mean) / std, channel by channel; channels are the last axis.

    `encode` and `decode` take numpy and jax arrays (*any, channels), keep the kind and
    the dtype of the array, and can be traced by jax. Half precision is computed in
    float32.

    A channel that is constant, or varies by less than the rounding of its values, has
    std 1: it is encoded as 0 and never divided by a number near 0.

    neuraloperator's UnitGaussianNormalizer divides by std + 1e-7 instead: its encoded
    values differ by 1e-7 / std, relatively.
    """

    mean: np.ndarray
    """(channels,) float64: mean over samples and grid."""

    std: np.ndarray
    """(channels,) float64, positive: unbiased standard deviation over both."""

    def __post_init__(self):
        for name in ("mean", "std"):
            value = np.array(getattr(self, name), dtype=np.float64)
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        if self.mean.ndim != 1 or self.mean.shape != self.std.shape:
            raise ValueError(
                "mean and std must both have shape (channels,), got "
                f"{self.mean.shape=} and {self.std.shape=}"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.std).all()):
            raise ValueError(
                f"mean and std must be finite, got {self.mean=} and {self.std=}"
            )
        if not (self.std > 0.0).all():
            raise ValueError(f"std must be positive, got {self.std=}")

    @classmethod
    def fit(cls, array: np.ndarray) -> UnitGaussian:
        """Fit to (samples, *grid, channels): all axes but the last are averaged over.

        Raises ValueError for empty or complex arrays and for NaN or infinite values.
        """
        array = np.asarray(array)
        if array.ndim < 2 or array.size == 0:
            raise ValueError(
                "fit needs an array (samples, *grid, channels) that is not empty, got "
                f"{array.shape=}"
            )
        if np.issubdtype(array.dtype, np.complexfloating):
            raise ValueError(f"fit needs real values, got {array.dtype=}")
        rows = array.reshape(-1, array.shape[-1])  # (samples and grid, channels)
        count = len(rows)
        blocks = range(0, count, BLOCK_SIZE)

        def block(start):
            return rows[start : start + BLOCK_SIZE].astype(np.float64)

        largest = np.max([np.abs(block(i)).max(axis=0) for i in blocks], axis=0)
        if not np.isfinite(largest).all():
            raise ValueError(
                f"fit needs finite values, got NaN or infinity in {array.shape=}, in "
                f"the channels {np.flatnonzero(~np.isfinite(largest)).tolist()}"
            )
        # Separate passes in float64: no cancellation, however large the mean is. The
        # second corrects the rounding of the first.
        mean = sum(block(i).sum(axis=0) for i in blocks) / count
        residual = sum((block(i) - mean).sum(axis=0) for i in blocks) / count
        mean = mean + residual
        squares = sum(((block(i) - mean) ** 2).sum(axis=0) for i in blocks)
        std = np.sqrt(squares / max(count - 1, 1))
        precision = array.dtype if array.dtype.kind == "f" else np.float64
        rounding = largest * float(np.finfo(precision).eps)
        # Devices may flush what is below float32's smallest normal number to 0.
        constant = std <= np.maximum(rounding, float(np.finfo(np.float32).tiny))
        return cls(mean, np.where(constant, 1.0, std))

    def encode(self, x):
        """(x - mean) / std, for (*any, channels)."""
        work, mean, std = self._prepare(x)
        return ((work - mean) / std).astype(x.dtype)

    def decode(self, x):
        """x * std + mean, the inverse of `encode`, for (*any, channels)."""
        work, mean, std = self._prepare(x)
        return (work * std + mean).astype(x.dtype)

    def to_dict(self) -> dict[str, np.ndarray]:
        """{"mean": (channels,), "std": (channels,)}, float64, for a saved model."""
        return {"mean": self.mean.copy(), "std": self.std.copy()}

    @classmethod
    def from_dict(cls, arrays: dict[str, np.ndarray]) -> UnitGaussian:
        """The inverse of `to_dict`. Raises ValueError for other keys."""
        if set(arrays) != {"mean", "std"}:
            raise ValueError(
                f"a UnitGaussian has the keys 'mean' and 'std', got {sorted(arrays)}"
            )
        return cls(np.asarray(arrays["mean"]), np.asarray(arrays["std"]))

    def _prepare(self, x):
        """x in the dtype to compute in, and mean and std of that dtype and rank."""
        channels = self.mean.shape[0]
        if x.ndim < 1 or x.shape[-1] != channels:
            raise ValueError(
                f"the last axis must hold {channels} channels, got {x.shape=}"
            )
        if x.dtype.kind in "biuc":
            raise ValueError(f"x must be floating point, got {x.dtype=}")
        dtype = np.dtype(np.float32) if x.dtype.itemsize < 4 else x.dtype
        shape = (1,) * (x.ndim - 1) + (channels,)  # equal ranks: nothing is implied
        mean = self.mean.astype(dtype).reshape(shape)
        std = self.std.astype(dtype).reshape(shape)
        return x.astype(dtype), mean, std
