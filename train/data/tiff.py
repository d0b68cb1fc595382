"""Volumes in TIFF files: ImageJ, OME and plain ones, read and written part by part.

`open_volume` reads, `VolumeWriter` writes, `scaled_geometry` tells where an enlarged
volume lies, `to_dtype` makes its voxels those of the input.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tifffile

from train.data.tiff_axes import plane_order, resolve_axes
from train.data.tiff_file import open_file
from train.data.tiff_geometry import scaled_geometry
from train.data.tiff_volume import Source, Volume
from train.data.tiff_write import VolumeWriter, to_dtype

__all__ = [
    "Source",
    "Volume",
    "VolumeWriter",
    "files_in",
    "open_volume",
    "scaled_geometry",
    "to_dtype",
]

SUFFIXES = (".tif", ".tiff")


def open_volume(
    path_or_paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    series: int | None = None,
    axes: str | None = None,
) -> Volume:
    """Open a volume without reading its voxels.

    - path_or_paths: a TIFF; a folder of TIFFs with one slice each, in natural order
      (z2 before z10); or such files in the order given. Files of an OME set are found
      through its metadata.
    - series: which image of a file that holds several. Equal images of one slice each
      are one volume. Of pyramids, the largest level is taken.
    - axes: the names of the file's axes, slowest first, such as 'ZYX' or 'TCZYX',
      where the file names none or wrong ones. Axes without a name are read as Z.

    NaNs are voxels like others. Raises FileNotFoundError, and ValueError for what is
    no TIFF, truncated, damaged, of colour, complex, or of axes that can't be told.
    """
    files, whole = _list_files(path_or_paths)
    try:
        stored = open_file(files[0], series) if whole else _join(files, series)
        volume = _named(stored, axes)
        # A codec that is missing, or foreign data, shows before the work begins.
        volume.read(z_slice=slice(1), y_slice=slice(1), x_slice=slice(1))
    except ValueError as error:
        where = str(files[0] if whole else files[0].parent)
        if where in str(error):
            raise
        raise ValueError(f"{where} can't be opened: {error}") from error
    return volume


def files_in(folder: Path) -> list[Path]:
    """Its TIFFs, but for hidden ones, in natural order (z2 before z10)."""
    names = [
        entry.name
        for entry in folder.iterdir()
        if entry.suffix.lower() in SUFFIXES and not entry.name.startswith(".")
    ]
    return [folder / name for name in tifffile.natural_sorted(names)]


def _list_files(path_or_paths):
    """The files, and whether it is a single one to be read as a whole."""
    if isinstance(path_or_paths, str | os.PathLike):
        path = Path(path_or_paths)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        if not path.is_dir():
            return [path], True
        files = files_in(path)
        if not files:
            raise ValueError(f"{path} holds no file that ends in .tif or .tiff")
    else:
        files = [Path(path) for path in path_or_paths]
        if not files:
            raise ValueError("give at least one file, got an empty list")
        for path in files:
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist, or is no file")
    return files, len(files) == 1


def _named(stored, axes):
    names, notes = resolve_axes(stored.axes, stored.shape, axes)
    sizes, order = plane_order(names, stored.shape)
    kept = [axis for axis in "TC" if sizes[axis] > 1] + ["Z"]
    dtype = np.dtype(np.uint8) if stored.dtype.kind == "b" else stored.dtype
    if dtype.kind not in "iuf":
        raise ValueError(
            f"voxels must be integers or floats, got {dtype}: save the absolute values"
        )
    return Volume(
        name=stored.name,
        axes="".join(kept) + "YX",
        shape=(*(sizes[axis] for axis in kept), *stored.shape[-2:]),
        dtype=dtype.newbyteorder("="),
        voxel_size=stored.calibration.voxel_size,
        unit=stored.calibration.unit,
        origin=stored.calibration.origin,
        source=stored.source,
        notes=stored.notes + notes,
        provenance=stored.provenance,
        planes=tuple(stored.planes[i] for i in order),
    )


def _join(files, series):
    """Several files as one: those of an OME set, else one slice after the other."""
    first = open_file(files[0], series, alone=False)
    if len({plane.path for plane in first.planes}) > 1:
        given = {os.path.realpath(path) for path in files}
        found = {os.path.realpath(plane.path) for plane in first.planes}
        if found != given:
            raise ValueError(
                f"{files[0].name} is one of an OME set of {len(found)} files, and the "
                f"{len(given)} files given are not that set: give that file alone, or "
                "a folder with nothing else"
            )
        return first
    parts = [first, *(open_file(path, series, alone=False) for path in files[1:])]
    planes = []
    for path, part in zip(files, parts, strict=True):
        same = part.shape == first.shape and part.dtype == first.dtype
        if not same or part.axes != first.axes:
            raise ValueError(
                "files to join must have the same axes, shape and dtype, got "
                f"{_summary(first)} in {files[0].name} and {_summary(part)} in "
                f"{path.name}"
            )
        planes += part.planes
    long = [a for a, n in zip(first.axes, first.shape, strict=True) if n > 1]
    if set(long) - {"C", "Y", "X"}:
        raise ValueError(
            f"files to join must hold one slice each, got {_summary(first)} in "
            f"{files[0].name}: give one volume at a time"
        )
    return replace(
        first,
        name=files[0].parent.name or str(files[0].parent),
        axes="Q" + first.axes,
        shape=(len(files), *first.shape),
        planes=planes,
        notes=(
            *first.notes,
            f"{len(files)} files joined, from {files[0].name} to {files[-1].name}",
        ),
    )


def _summary(stored):
    return f"{stored.axes} {'x'.join(map(str, stored.shape))} {stored.dtype}"
