"""A volume in TIFF files, which is read part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from train.data.tiff_planes import Plane, read_planes


@dataclass(frozen=True)
class Source:
    """How a volume was stored, for a writer that keeps to it."""

    format: str = "plain"
    """'imagej', 'ome' or 'plain'."""

    compression: str = "none"
    """'none', 'deflate', or as tifffile names it, in lower case: 'lzw', 'jpeg', .."""

    predictor: bool = False
    bigtiff: bool = False

    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What ImageJ or OME know beside the geometry."""


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume in a file, or in several; made by `open_volume`."""

    name: str

    axes: str
    """ZYX, with T and C in front where the file has them: ZYX, CZYX, TZYX, TCZYX."""

    shape: tuple[int, ...]

    dtype: np.dtype
    """Integers or floats, in native byte order. Bits are uint8."""

    voxel_size: tuple[float | None, float | None, float | None] | None
    """(z, y, x) in `unit`, None where unknown."""

    unit: str | None
    """As the file spells it: 'micron', 'um', 'µm', .."""

    origin: tuple[float, float, float] | None
    """(z, y, x) of the centre of the first voxel, in `unit`."""

    source: Source

    notes: tuple[str, ...]
    """What was taken for granted: for people to read."""

    provenance: dict[str, Any] | None
    """As `VolumeWriter` wrote it into the file."""

    planes: tuple[Plane, ...] = field(repr=False)
    """In the order of T, C, Z."""

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths of T, C, Z, Y and X; 1 for an axis that the volume does not have."""
        return dict.fromkeys("TC", 1) | dict(zip(self.axes, self.shape, strict=True))

    @property
    def positions(self) -> list[tuple[int, int]]:
        """All (t, c), in order: the volumes (z, y, x) in it."""
        sizes = self.sizes
        return [(t, c) for t in range(sizes["T"]) for c in range(sizes["C"])]

    @property
    def memory_mapped(self) -> bool:
        """Whether the voxels lie in the file as they are; else they are decoded."""
        return all(plane.coded is None for plane in self.planes)

    @property
    def description(self) -> str:
        """One line for people."""
        size = "x".join(map(str, self.shape))
        parts = [f"{self.name}: {self.axes} {size} {self.dtype}"]
        if self.voxel_size is None:
            parts.append("voxel size unknown")
        else:
            sizes = ("?" if s is None else f"{s:.6g}" for s in self.voxel_size)
            unit = self.unit or "(no unit)"
            parts.append(f"voxel {' x '.join(sizes)} {unit} (z, y, x)")
        if self.origin is not None:
            parts.append(f"origin {', '.join(f'{o:.6g}' for o in self.origin)}")
        stored = {"imagej": "ImageJ", "ome": "OME", "plain": "plain TIFF"}
        parts.append(stored[self.source.format])
        if self.source.compression != "none":
            parts.append(self.source.compression)
        parts.append("memory-mapped" if self.memory_mapped else "decoded page by page")
        return "; ".join([", ".join(parts), *self.notes])

    def read(
        self,
        t: int = 0,
        c: int = 0,
        z_slice: slice = slice(None),
        y_slice: slice = slice(None),
        x_slice: slice = slice(None),
    ) -> np.ndarray:
        """Read a part of one volume.

        Slices have step 1; beyond the volume they are cut, as in numpy.

        Returns an array (z, y, x) of its own, in native byte order. Raises IndexError
        for a time or channel that the volume doesn't have, ValueError for another
        step or data that can't be decoded.
        """
        sizes = self.sizes
        for name, index, axis in (("t", t, "T"), ("c", c, "C")):
            if not 0 <= index < sizes[axis]:
                raise IndexError(
                    f"{name} must be from 0 to {sizes[axis] - 1}, got {index}: "
                    f"{self.name} has axes {self.axes} of {self.shape}"
                )
        z, y, x = (
            range(sizes[axis])[part]
            for axis, part in zip("ZYX", (z_slice, y_slice, x_slice), strict=True)
        )
        if any(part.step != 1 for part in (z, y, x)):
            raise ValueError(
                f"slices must have step 1, got {z_slice}, {y_slice}, {x_slice}: take "
                "every n-th voxel of what is read"
            )
        first = (t * sizes["C"] + c) * sizes["Z"]
        planes = self.planes[first + z.start : first + max(z.start, z.stop)]
        return read_planes(planes, self.dtype, y, x)
