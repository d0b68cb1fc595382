"""Training patches, drawn from volumes as they are needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from train.data.degrade import Degradation
from train.data.tiff_volume import Volume
from train.normalise import IntensityRange

Region = tuple[slice, slice, slice]
"""(z, y, x) slices with whole numbers for start and stop, and step 1."""

Scale = tuple[int, int, int]
"""(sz, sy, sx): high-resolution voxels in one low-resolution voxel."""

SEEN_PART = 0.005  # of the voxels of a block that is not empty: more than hot pixels


@dataclass(frozen=True)
class VolumePart:
    """A box of one (time, channel) of a `Volume`, read from its file when it is sliced.

    Has `shape`, `dtype` and `part[z_slice, y_slice, x_slice]`, an array (z, y, x).
    """

    volume: Volume
    time: int
    channel: int
    region: Region

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def dtype(self) -> np.dtype:
        return self.volume.dtype

    def __getitem__(self, slices: Region) -> np.ndarray:
        boxes = (
            range(part.start, part.stop)[wanted]
            for part, wanted in zip(self.region, slices, strict=True)
        )
        boxes = (slice(box.start, box.stop) for box in boxes)
        return self.volume.read(self.time, self.channel, *boxes)


def volume_parts(
    volume: Volume, region: Region | None = None
) -> list[np.ndarray | VolumePart]:
    """The volumes (z, y, x) of all (time, channel) positions, each cut to `region`.

    Where the file holds voxels as they are, these are `VolumePart`s that read from it.
    Where they have to be decoded, page by page, they are decoded once, here, into
    arrays of the file's dtype.
    """
    shape = volume.shape[-3:]
    region = region or (slice(None),) * 3
    region = tuple(
        slice(*part.indices(n)[:2]) for part, n in zip(region, shape, strict=True)
    )
    if volume.memory_mapped:
        return [VolumePart(volume, t, c, region) for t, c in volume.positions]
    return [volume.read(t, c, *region) for t, c in volume.positions]


class PatchSet:
    """Random patches of pairs of volumes, encoded, flipped and turned.

    Args:
        pairs: one or more (low, high): arrays, memory maps or `VolumePart`s (z, y, x),
            integers or floats, high being `scale` times as large, an axis (a rest of
            less than a cell at the end is left out).
        scale: whole numbers (sz, sy, sx).
        patch: (d, h, w) in voxels of low. Cut to the smallest of the volumes.
        intensity: encodes all; or, for each pair, what encodes low and what high.
        degradation: its noise is added to each low patch, fresh; None adds none.
        augment: flip each axis, and turn by 90 degrees in the plane where sy == sx and
            the patch is square there; each with probability 1/2.
        keep_empty: the part of the patches that is drawn where nothing is to be seen.
        threshold: encoded intensity above which a voxel is seen. A block (half a patch
            an axis) is empty where less than 0.5 % of its voxels in high are seen.

    Attributes:
        patch: (d, h, w) after the cut.
        num_blocks, num_empty: of all volumes. If all are empty, all are drawn from.

    NaN and infinite voxels are encoded as 0 and never seen. str() is one line to print.
    The volumes are read once as a whole, strip by strip, and then patch by patch.

    Raises ValueError for volumes that do not fit together.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        scale: Scale,
        patch: tuple[int, int, int],
        intensity: IntensityRange | Sequence[tuple[IntensityRange, IntensityRange]],
        degradation: Degradation | None = None,
        augment: bool = True,
        keep_empty: float = 0.05,
        threshold: float = 0.1,
    ):
        self._pairs = list(pairs)
        self._scale = _three("scale", scale)
        _check_pairs(self._pairs, self._scale)
        if not 0 <= keep_empty <= 1:
            raise ValueError(f"keep_empty must be from 0 to 1, got {keep_empty}")
        smallest = np.min([low.shape for low, _ in self._pairs], axis=0)
        self.patch = tuple(
            int(min(p, n))
            for p, n in zip(_three("patch", patch), smallest, strict=True)
        )
        if isinstance(intensity, IntensityRange):
            intensity = [(intensity, intensity)] * len(self._pairs)
        self._intensities = list(intensity)
        if len(self._intensities) != len(self._pairs):
            raise ValueError(
                "intensity must be one range, or two for each pair of volumes, got "
                f"{len(self._intensities)} for {len(self._pairs)} pairs"
            )
        self._degradation = degradation
        self._augment = augment
        self._can_turn = (
            self._scale[1] == self._scale[2] and self.patch[1] == self.patch[2]
        )
        self._keep_empty = keep_empty
        limits = [
            float(high.decode(np.float64(threshold))) for _, high in self._intensities
        ]
        # Edges of the blocks in low, an axis: as equal as they can be.
        self._edges = [
            [
                _edges(n, max(p // 2, 1))
                for p, n in zip(self.patch, low.shape, strict=True)
            ]
            for low, _ in self._pairs
        ]
        is_seen = [
            _seen_blocks(high, edges, self._scale, limit).ravel()
            for (_, high), edges, limit in zip(
                self._pairs, self._edges, limits, strict=True
            )
        ]
        self._ends = np.cumsum([len(blocks) for blocks in is_seen])
        is_seen = np.concatenate(is_seen)
        self._seen, self._empty = np.flatnonzero(is_seen), np.flatnonzero(~is_seen)
        self.num_blocks, self.num_empty = len(is_seen), len(self._empty)
        if not len(self._seen):
            self._seen = self._empty

    def __str__(self) -> str:
        low = "x".join(map(str, self.patch))
        high = "x".join(map(str, self._high_patch))
        plural = "" if len(self._pairs) == 1 else "s"
        text = f"{len(self._pairs)} volume{plural}, patches of {low} to {high} voxels"
        if self.num_empty == self.num_blocks:
            return f"{text}, out of {self.num_blocks} blocks, all of them empty"
        return (
            f"{text}, out of {self.num_blocks} blocks, {self.num_empty} of them empty"
        )

    @property
    def _high_patch(self):
        return tuple(map(operator.mul, self.patch, self._scale))

    def draw(
        self, seed: int, epoch: int, batch: int, batch_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Low (n, d, h, w, 1) and high (n, d*sz, h*sy, w*sx, 1), float32, encoded.

        Depends on the arguments and the volumes alone.
        """
        rng = np.random.Generator(np.random.PCG64([seed, epoch, batch]))
        lows = np.empty((batch_size, *self.patch, 1), np.float32)
        highs = np.empty((batch_size, *self._high_patch, 1), np.float32)
        for i, chances in enumerate(rng.random((batch_size, 9))):
            index, origin = self._place(*chances[:5])
            flips, turn = chances[5:8] < 0.5, chances[8] < 0.5
            for volume, intensity, scale, out in zip(
                self._pairs[index],
                self._intensities[index],
                ((1, 1, 1), self._scale),
                (lows[i, ..., 0], highs[i, ..., 0]),
                strict=True,
            ):
                if self._augment:
                    out = _turned(out, flips, turn and self._can_turn)
                box = tuple(
                    slice(o * s, (o + p) * s)
                    for o, p, s in zip(origin, self.patch, scale, strict=True)
                )
                encoded = intensity.encode(volume[box].astype(np.float64))
                out[:] = np.where(np.isfinite(encoded), encoded, 0.0)
        if self._degradation is not None:
            lows = self._degradation.add_noise(lows, rng)
        return lows, highs

    def _place(self, empty_chance, block_chance, *chances):
        """The number of the pair, and the origin (z, y, x) of the patch in low."""
        is_empty = empty_chance < self._keep_empty and len(self._empty)
        blocks = self._empty if is_empty else self._seen
        block = blocks[int(block_chance * len(blocks))]
        index = int(np.searchsorted(self._ends, block, side="right"))
        edges = self._edges[index]
        first = self._ends[index - 1] if index else 0
        cell = np.unravel_index(block - first, [len(e) - 1 for e in edges])
        origin = []
        for i, chance, edge, size in zip(cell, chances, edges, self.patch, strict=True):
            # The centre lies in the block, so that the patch has all of the block.
            start, stop = int(edge[i]), int(edge[i + 1])
            centre = start + int(chance * (stop - start))
            origin.append(min(max(centre - size // 2, 0), int(edge[-1]) - size))
        return index, origin


def _turned(patch, flips, turn):
    """A view of (z, y, x), with axes flipped, and y and x exchanged."""
    patch = patch[tuple(slice(None, None, -1 if flip else 1) for flip in flips)]
    return patch.swapaxes(1, 2) if turn else patch


def _edges(size, longest):
    """Where the fewest equal parts of at most that length begin and end."""
    number = math.ceil(size / longest)
    return np.arange(number + 1) * size // number


def _seen_blocks(high, edges, scale, limit):
    """Which blocks (z, y, x) hold voxels above the limit; reads strips along x."""
    z_edges, y_edges, x_edges = (edge * s for edge, s in zip(edges, scale, strict=True))
    is_seen = np.empty([len(edge) - 1 for edge in edges], bool)
    lengths = np.diff(x_edges)
    for i in range(len(z_edges) - 1):
        for j in range(len(y_edges) - 1):
            z, y = slice(*z_edges[i : i + 2]), slice(*y_edges[j : j + 2])
            strip = high[z, y, slice(0, int(x_edges[-1]))]
            seen = strip > limit
            if strip.dtype.kind == "f":
                seen &= strip < np.inf
            counts = np.add.reduceat(seen.sum(axis=(0, 1)), x_edges[:-1])
            voxels = strip.shape[0] * strip.shape[1] * lengths
            is_seen[i, j] = counts >= np.maximum(SEEN_PART * voxels, 1)
    return is_seen


def _three(name, values):
    numbers = tuple(values)
    if len(numbers) != 3 or not all(v == int(v) >= 1 for v in numbers):
        raise ValueError(
            f"{name} must be three whole numbers (z, y, x) above 0, got {values}"
        )
    return tuple(int(v) for v in numbers)


def _check_pairs(pairs, scale):
    if not pairs:
        raise ValueError("a PatchSet needs at least one pair of volumes, got none")
    for low, high in pairs:
        for volume in (low, high):
            if len(volume.shape) != 3 or 0 in volume.shape:
                raise ValueError(
                    f"volumes must be (z, y, x) and not empty, got {volume.shape}"
                )
            if volume.dtype.kind not in "biuf":
                raise ValueError(f"volumes must be real numbers, got {volume.dtype}")
        cells = tuple(map(operator.floordiv, high.shape, scale))
        if cells != tuple(low.shape):
            raise ValueError(
                f"high must be {scale} times as large as low, got shapes {high.shape} "
                f"and {low.shape}"
            )


def split(
    shape: tuple[int, int, int], scale: Scale, holdout: float = 0.25, axis: str = "x"
) -> tuple[Region, Region]:
    """(train region, test region) of a high-resolution volume of that shape (z, y, x).

    The test region is the end of the axis ('z', 'y' or 'x'), `holdout` of it (at least
    one cell of the scale). Bounds are multiples of the scale: what is left over at the
    ends of the axes is in neither. No voxel is in both.

    Raises ValueError for an axis of fewer than two cells and holdout not in (0, 1).
    """
    if axis not in ("z", "y", "x"):
        raise ValueError(f"axis must be 'z', 'y' or 'x', got {axis!r}")
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must be between 0 and 1, got {holdout}")
    number = "zyx".index(axis)
    scale = _three("scale", scale)
    cells = list(map(operator.floordiv, shape, scale))
    if min(cells) < 1 or cells[number] < 2:
        raise ValueError(
            f"to hold out a part of {axis}, a volume must have two cells of the scale "
            f"{scale} there and one on the other axes, got {tuple(shape)}: choose "
            "another axis, or a volume of its own as the test"
        )
    num_test = min(max(round(holdout * cells[number]), 1), cells[number] - 1)
    whole = [slice(0, n * s) for n, s in zip(cells, scale, strict=True)]
    border = (cells[number] - num_test) * scale[number]
    train, test = list(whole), list(whole)
    train[number] = slice(0, border)
    test[number] = slice(border, whole[number].stop)
    return tuple(train), tuple(test)


def low_region(region: Region, scale: Scale) -> Region:
    """The same region in low-resolution voxels; its bounds are divided by the scale."""
    return tuple(
        slice(part.start // s, part.stop // s)
        for part, s in zip(region, scale, strict=True)
    )


def pair_up(
    low: Sequence[Volume], high: Sequence[Volume]
) -> tuple[list[tuple[Volume, Volume]], Scale]:
    """Which volumes belong together, and the whole-number scale (sz, sy, sx).

    Equal names (without the suffix) belong together; where no names are equal, the
    order in which they are given decides.

    Raises ValueError, naming the files, where counts, names, times, channels or shapes
    do not fit.
    """
    if len(low) != len(high) or not low:
        raise ValueError(
            "each low-resolution volume needs its high-resolution one, got "
            f"{len(low)} and {len(high)}: {_names(low)}; {_names(high)}"
        )
    sides = [
        {Path(volume.name).stem: volume for volume in side} for side in (low, high)
    ]
    equal = sides[0].keys() & sides[1].keys()
    if len(low) > 1 and equal:
        if len(equal) < len(low):
            raise ValueError(
                "names of low- and high-resolution volumes must be equal for all of "
                f"them or for none, got {_names(low)}; {_names(high)}"
            )
        pairs = [(sides[0][n], sides[1][n]) for n in tifffile.natural_sorted(equal)]
    else:
        pairs = list(zip(low, high, strict=True))
    scales = [_scale(*pair) for pair in pairs]
    for pair, scale in zip(pairs, scales, strict=True):
        if scale != scales[0]:
            raise ValueError(
                f"all pairs must have one scale, got {scales[0]} for "
                f"{' and '.join(v.name for v in pairs[0])}, and {scale} for "
                f"{' and '.join(v.name for v in pair)}"
            )
    return pairs, scales[0]


def _names(volumes):
    return ", ".join(volume.name for volume in volumes) or "none"


def _scale(low, high):
    fits = all(low.sizes[a] == high.sizes[a] for a in "TC")
    fits = fits and not any(high.sizes[a] % low.sizes[a] for a in "ZYX")
    if not fits:
        raise ValueError(
            "a high-resolution volume must have a whole number of times the voxels of "
            "its low-resolution one on Z, Y and X, and the same T and C, got "
            f"{high.axes} {high.shape} in {high.name} and {low.axes} {low.shape} in "
            f"{low.name}"
        )
    return tuple(high.sizes[a] // low.sizes[a] for a in "ZYX")
