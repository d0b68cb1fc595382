"""What networks take instead of physical values: `UnitGaussian`, `IntensityRange`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# Rows of one block of the passes over the data: bounds the float64 copies.
BLOCK_SIZE = 2**18

# A range of intensities below these parts of what else occurs is that of the noise in a
# volume with few bright voxels, and not of what is to be seen. The first compares with
# all but a twentieth of the voxels above the range, so that hot pixels do not decide;
# the second with the maximum.
SPARSE, TAIL = 0.05, 1 / 20
TINY = 1e-4
PERCENTILES = (2.0, 99.8)  # of CARE (Weigert et al. 2018): background and light
HOT = 8  # voxels that may be faults of a detector, in volumes of 1e5 and more


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


@dataclass(frozen=True)
class IntensityRange:
    """Encodes x as (x - low) / (high - low), whatever the shape; nothing is clipped.

    `encode` and `decode` take numpy and jax arrays of any shape and can be traced by
    jax. Floats keep their dtype (half precision is computed in float32); integers
    become float32. NaNs and infinities stay what they are.
    """

    low: float
    """Intensity that is encoded as 0."""

    high: float
    """Intensity that is encoded as 1; above `low`."""

    num_ignored: int = field(default=0, compare=False)
    """NaN and infinite voxels that `fit` left out."""

    def __post_init__(self):
        for name in ("low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not (np.isfinite(self.high - self.low) and self.low < self.high):
            raise ValueError(
                "low and high must be finite and low below high, got "
                f"{self.low=} and {self.high=}"
            )

    def __str__(self) -> str:
        text = f"intensities {self.low:.6g} to {self.high:.6g} are encoded as 0 to 1"
        if self.num_ignored:
            voxels = "voxel" if self.num_ignored == 1 else "voxels"
            text += f"; {self.num_ignored} NaN or infinite {voxels} left out"
        return text

    @classmethod
    def fit(
        cls,
        blocks: Iterable[np.ndarray],
        percentiles: tuple[float, float] = PERCENTILES,
    ) -> IntensityRange:
        """Fit to percentiles of all voxels of the blocks, in one pass, 60 MB of memory.

        Blocks are real arrays of any shapes and dtypes: the slabs of a volume, or of
        several, chained. Percentiles are numpy's (linear). They are exact for integers
        of up to 16 bits; of other numbers, the leading 13 bits of the distance from the
        first one count: the error is below 1.3e-4 of that distance.

        A volume with few bright voxels is not left to its background: where the range
        is less than 0.05 of the one to the 99.99th percentile (for 99.8; the tail is a
        twentieth as long), it widens to that; where it has no width, or less than 1e-4
        of minimum to maximum, to the maximum, and to the minimum if need be; the 8
        brightest voxels of a large volume don't count, unless they are all there is. A
        constant volume has high = low + 1.

        Raises ValueError for complex values and where no voxel is finite.
        """
        first, last = percentiles
        if not 0 <= first < last <= 100:
            raise ValueError(
                f"percentiles must ascend within 0 to 100, got {percentiles}"
            )
        counts = _Counts()
        for block in blocks:
            counts.add(np.asarray(block))
        if not counts.total:
            raise ValueError(
                "fit needs at least one finite voxel, got "
                f"{counts.num_ignored} NaN or infinite ones and no other"
            )
        smallest, largest = counts.smallest, counts.largest
        low, high, top = counts.percentiles((first, last, 100 - TAIL * (100 - last)))
        if 0 < high - low < SPARSE * (top - low):
            high = top
        for brightest in (counts.largest_but_hot(), largest):
            if high - low <= TINY * (brightest - smallest):
                high = brightest
                if high - low <= TINY * (brightest - smallest):
                    low = smallest
            if high > low:
                break  # few voxels beyond are taken for faults of the detector
        if low == high:
            high = low + max(1.0, float(np.spacing(abs(low))))
        return cls(low, high, counts.num_ignored)

    def encode(self, x):
        """(x - low) / (high - low), for numbers of any shape."""
        work, dtype = _as_floats(x)
        return ((work - self.low) / (self.high - self.low)).astype(dtype)

    def decode(self, x):
        """x * (high - low) + low, the inverse of `encode`."""
        work, dtype = _as_floats(x)
        return (work * (self.high - self.low) + self.low).astype(dtype)

    def to_dict(self) -> dict[str, float]:
        """{"low": .., "high": ..}, for a saved model."""
        return {"low": self.low, "high": self.high}

    @classmethod
    def from_dict(cls, values: dict[str, float]) -> IntensityRange:
        """The inverse of `to_dict`. Raises ValueError for other keys."""
        if set(values) != {"low", "high"}:
            raise ValueError(
                f"an IntensityRange has the keys 'low' and 'high', got {sorted(values)}"
            )
        return cls(values["low"], values["high"])


def _as_floats(x):
    """x in the dtype to compute in, and the dtype of the result."""
    if x.dtype.kind == "c":
        raise ValueError(f"intensities must be real, got {x.dtype=}")
    if x.dtype.kind in "biu":
        # Integers of 32 bits and more lose digits in float32 before the subtraction.
        is_wide = x.dtype.itemsize > 2 and isinstance(x, np.ndarray | np.generic)
        return x.astype(np.float64 if is_wide else np.float32), np.dtype(np.float32)
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x, x.dtype


class _Counts:
    """How often each intensity occurs, in 64-bit counts of constant memory."""

    PIECE = 2**20  # voxels at a time: bounds the copies
    SMALLEST, LARGEST = -(2**15), 2**16 - 1  # of the integers that are counted singly
    SHIFT = 11  # bits of a float32 that are left out: 12 of the fraction stay

    def __init__(self):
        self.total = self.num_ignored = 0
        self.smallest, self.largest = np.inf, -np.inf
        self._integers = np.zeros(self.LARGEST - self.SMALLEST + 1, np.int64)
        self._floats = np.zeros(2 ** (32 - self.SHIFT), np.int64)
        self._origin = None  # floats count by their distance from it

    def add(self, block):
        if block.dtype.kind not in "biuf":
            raise ValueError(f"intensities must be real numbers, got {block.dtype=}")
        voxels = block.reshape(-1)
        for start in range(0, voxels.size, self.PIECE):
            piece = voxels[start : start + self.PIECE]
            if piece.dtype.kind != "f" and piece.dtype.itemsize <= 2:
                self._integers += np.bincount(
                    piece.astype(np.int32) - self.SMALLEST,
                    minlength=self._integers.size,
                )
            else:
                piece = piece.astype(np.float64)
                is_finite = np.isfinite(piece)
                self.num_ignored += int(piece.size - np.count_nonzero(is_finite))
                piece = piece[is_finite]
                if not piece.size:
                    continue
                self._count_floats(piece)
            self.total += piece.size
            self.smallest = min(self.smallest, float(piece.min()))
            self.largest = max(self.largest, float(piece.max()))

    def _count_floats(self, piece):
        if self._origin is None:
            self._origin = piece[0]
        limit = float(np.finfo(np.float32).max)
        distance = np.clip(piece - self._origin, -limit, limit).astype(np.float32)
        keys = (distance.view(np.uint32) >> self.SHIFT).astype(np.int64)
        self._floats += np.bincount(keys, minlength=self._floats.size)

    def largest_but_hot(self):
        """The largest intensity, of large volumes without the 8 largest."""
        if self.total < 1e5:
            return self.largest
        (value,) = self.percentiles([100 * (1 - HOT / (self.total - 1))])
        return value

    def percentiles(self, percents):
        used = np.flatnonzero(self._integers)
        values, counts = used + float(self.SMALLEST), self._integers[used]
        if self._origin is not None:
            used = np.flatnonzero(self._floats)
            keys = used.astype(np.uint32) << self.SHIFT
            # The middle of what falls on one key, but for 0, which is exact.
            keys += np.where(keys << 1 == 0, 0, 1 << (self.SHIFT - 1)).astype(np.uint32)
            distance = keys.view(np.float32).astype(np.float64)
            values = np.concatenate([values, distance + self._origin])
            counts = np.concatenate([counts, self._floats[used]])
        order = np.argsort(values, kind="stable")
        values = np.clip(values[order], self.smallest, self.largest)
        ends = np.cumsum(counts[order])
        for percent in percents:
            position = (self.total - 1) * (percent / 100)
            below = int(position)
            ranks = np.array([below, min(below + 1, self.total - 1)])
            a, b = values[np.searchsorted(ends, ranks, side="right")]
            yield float(a + (b - a) * (position - below))
