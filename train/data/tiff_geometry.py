"""Where a volume lies in space: voxel sizes, units of length and the origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Metres in each unit that OME spells so (schema 2016-06, UnitsLength).
METRES = {
    "km": 1e3,
    "m": 1.0,
    "dm": 1e-1,
    "cm": 1e-2,
    "mm": 1e-3,
    "µm": 1e-6,
    "nm": 1e-9,
    "pm": 1e-12,
    "Å": 1e-10,
    "in": 0.0254,
}
# Other spellings that ImageJ and people write, in lower case.
SPELLINGS = {
    "um": "µm",
    "\u03bcm": "µm",  # the Greek letter, beside the micro sign
    "micron": "µm",
    "microns": "µm",
    "micrometer": "µm",
    "micrometre": "µm",
    "nanometer": "nm",
    "nanometre": "nm",
    "millimeter": "mm",
    "millimetre": "mm",
    "centimeter": "cm",
    "centimetre": "cm",
    "meter": "m",
    "metre": "m",
    "angstrom": "Å",
    "\u212b": "Å",  # the sign, beside the letter
    "inch": "in",
    "pixels": "pixel",
}


@dataclass(frozen=True)
class Calibration:
    """Voxel size (z, y, x) in `unit`, None where unknown; origin (z, y, x) likewise.

    The origin is the position of the centre of the first voxel.
    """

    voxel_size: tuple[float | None, float | None, float | None] | None = None
    unit: str | None = None
    origin: tuple[float, float, float] | None = None


def scaled_geometry(
    voxel_size: Sequence[float | None] | None,
    origin: Sequence[float] | None,
    scale: Sequence[float],
) -> tuple[tuple[float | None, ...] | None, tuple[float, ...] | None]:
    """Voxel size and origin of a volume that was enlarged by `scale` an axis.

    The origin is the centre of the first voxel. Voxels of size d fill space, so the
    volume begins half a voxel before it, at origin - d / 2. Enlarged by s it begins at
    the same place with voxels of d / s, whose first centre lies at
    (origin - d / 2) + (d / s) / 2 = origin - d (s - 1) / (2 s): the origin moves
    towards the edge, by (s - 1) / (2 s) input voxels, in the negative direction. This
    is the convention of half-pixel centres, in which output voxel j lies at input
    coordinate (j + 1/2) / s - 1/2.

    - voxel_size (z, y, x), any unit, None (as a whole or for an axis) where unknown: it
      stays unknown, and the origin of that axis stays.
    - origin (z, y, x), the same unit, or None: counts as 0, so that the result is the
      shift against the input; None stays None where nothing moves.
    - scale (z, y, x), each a finite number above 0.

    Returns (voxel_size, origin). Raises ValueError for other scales.
    """
    if len(scale) != 3 or not all(math.isfinite(s) and s > 0 for s in scale):
        raise ValueError(
            "scale must be three finite numbers above 0, for z, y and x, got "
            f"{tuple(scale)}"
        )
    sizes = (None,) * 3 if voxel_size is None else tuple(voxel_size)
    shifts = tuple(
        0.0 if size is None else size * (s - 1) / (2 * s)
        for size, s in zip(sizes, scale, strict=True)
    )
    if voxel_size is not None:
        voxel_size = tuple(
            None if size is None else size / s
            for size, s in zip(sizes, scale, strict=True)
        )
    if origin is None and not any(shifts):
        return voxel_size, None
    start = (0.0,) * 3 if origin is None else origin
    return voxel_size, tuple(o - d for o, d in zip(start, shifts, strict=True))


def ome_unit(unit: str | None) -> str | None:
    """The unit as OME spells it: of length, 'pixel', else 'reference frame'.

    None, which means that nobody knows, is 'pixel'.
    """
    if unit is None:
        return "pixel"
    unit = unit.strip()
    spelled = SPELLINGS.get(unit.lower(), unit)
    return spelled if spelled in (*METRES, "pixel") else "reference frame"


def convert_length(value: float, unit: str | None, target: str | None) -> float | None:
    """The value in another unit of length; None where the two can't be compared."""
    if unit == target:
        return value
    unit, target = ome_unit(unit), ome_unit(target)
    if unit in METRES and target in METRES:
        return value * (METRES[unit] / METRES[target])
    return value if unit == target == "pixel" else None


def check_calibration(calibration: Calibration) -> Calibration:
    """The same with floats; ValueError where sizes or positions can't be written."""
    sizes, origin = calibration.voxel_size, calibration.origin
    if sizes is not None:
        fits = len(sizes) == 3 and all(
            size is None or (math.isfinite(size) and size > 0) for size in sizes
        )
        if not fits:
            raise ValueError(
                "voxel_size must be three finite numbers above 0 (or None), for z, y "
                f"and x, got {sizes!r}"
            )
        sizes = tuple(None if size is None else float(size) for size in sizes)
    if origin is not None:
        if len(origin) != 3 or not all(math.isfinite(o) for o in origin):
            raise ValueError(
                f"origin must be three finite numbers, for z, y and x, got {origin!r}"
            )
        origin = tuple(float(o) for o in origin)
    return Calibration(sizes, calibration.unit, origin)
