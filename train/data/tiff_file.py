"""What one TIFF file holds: its image, geometry and metadata, complete or refused."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from train.data.tiff_geometry import Calibration
from train.data.tiff_metadata import (
    ome_files,
    read_ome,
    read_provenance,
    tag_calibration,
)
from train.data.tiff_planes import Plane, check_structure, series_planes
from train.data.tiff_volume import Source

MAX_LISTED = 8  # names in a message


@dataclass(frozen=True)
class Stored:
    """What a file holds, before its axes are named."""

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: np.dtype
    planes: list[Plane]
    calibration: Calibration
    source: Source
    notes: tuple[str, ...]
    provenance: dict[str, Any] | None


def open_file(path: Path, series: int | None, alone: bool = True) -> Stored:
    """Open one file, with tifffile's own remarks among the notes.

    - series: which image of several, or None.
    - alone: whether files of its OME set that are missing are an error. Else its own
      pages are read, if the set is one volume.

    Raises ValueError, whose message need not name the file.
    """
    pages = check_structure(path)
    remarks: list[str] = []
    with _listening(remarks), ExitStack() as stack:
        file = stack.enter_context(_opened(path))
        xml = file.ome_metadata
        missing, num_volumes = _missing_files(xml, path)
        if not missing:
            stored = _stored(path, file, series, xml, pages)
        elif alone or num_volumes > 1:
            advice = "give the files these names again"
            if num_volumes == 1:  # else a folder would not do
                advice += (
                    ", or, if each file is one slice of one volume, put them into a "
                    "folder with nothing else and give that folder"
                )
            raise ValueError(
                f"{path.name} belongs to an OME set, and the set's files "
                f"{listed(missing)} are missing: {advice}"
            )
        else:
            file = stack.enter_context(_opened(path, is_ome=False))
            stored = _stored(path, file, series, xml, pages)
            remarks.append(f"the order of the OME set is lost with {listed(missing)}")
    return replace(stored, notes=stored.notes + tuple(dict.fromkeys(remarks)))


@contextmanager
def _opened(path, **flags) -> Iterator[tifffile.TiffFile]:
    try:
        with tifffile.TiffFile(path, **flags) as file:
            yield file
    except tifffile.TiffFileError as error:
        raise ValueError(f"it is damaged or no TIFF ({error})") from error
    except (ValueError, OSError, MemoryError, ImportError):
        raise
    except Exception as error:  # tifffile falls over damaged files in many ways
        raise ValueError(
            f"it is damaged, or of a kind that tifffile can't read "
            f"({type(error).__name__}: {error})"
        ) from error


@contextmanager
def _listening(remarks) -> Iterator[None]:
    """Gather what tifffile logs, instead of printing it."""

    def take(record):
        remarks.append(f"tifffile says: {record.getMessage():.200}")
        return False

    logger = logging.getLogger("tifffile")
    logger.addFilter(take)
    try:
        yield
    finally:
        logger.removeFilter(take)


def _missing_files(xml, path):
    """Other files of an OME set that aren't there; the set's times and channels."""
    if xml is None:
        return [], 1
    names, num_volumes = ome_files(xml)
    return sorted(n for n in names if not (path.parent / n).exists()), num_volumes


def listed(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _stored(path, file, series, xml, pages):
    """What a file that is open holds."""
    index, chosen = _choose(file.series, series)
    first = chosen[0]
    axes, shape = _shape(first)
    planes, notes = [], []
    if axes.endswith("YX"):  # others are refused once the user's axes are known
        count = math.prod(shape[:-2])
        _check_declared(file, first, count)
        for one in chosen:
            planes += series_planes(one, count, *shape[-2:], pages)
    if len(chosen) > 1:
        axes, shape = f"Q{axes}", (len(chosen), *shape)
        notes.append(f"{len(chosen)} images written one by one are joined")
    if xml is not None and first.kind != "ome":
        notes.append("its OME metadata does not tell its axes: they are its pages'")
    if len(first.levels) > 1:
        notes.append(f"the largest of {len(first.levels)} levels of a pyramid")
    keyframe = first.keyframe
    if keyframe.dtype is None:
        raise ValueError(
            f"its voxels have a type that numpy lacks ({keyframe.bitspersample} bits)"
        )
    return Stored(
        path.name,
        axes,
        shape,
        keyframe.dtype,
        planes,
        notes=tuple(notes),
        **_described(file, first, index, xml),
    )


def _choose(found, series):
    """The index and the series to read: one, or several of one equal slice each."""
    if not found:
        raise ValueError("it holds no image")
    if series is not None:
        if isinstance(series, bool) or not 0 <= series < len(found):
            raise ValueError(
                f"series must be from 0 to {len(found) - 1}, got {series!r}; it holds "
                f"{listed([_told(i, s) for i, s in enumerate(found)])}"
            )
        return series, [found[series]]
    axes, shape = _shape(found[0])
    same = all(_shape(s) == (axes, shape) and s.dtype == found[0].dtype for s in found)
    if len(found) > 1 and not (same and math.prod(shape[:-2]) == 1):
        images = listed([_told(i, s) for i, s in enumerate(found)])
        raise ValueError(
            f"it holds {len(found)} images, and one is needed: choose with --series N "
            f"(in Python series=N), which is one of {images}"
        )
    return 0, list(found)


def _told(index, series):
    axes, shape = _shape(series)
    name = f" {series.name!r}" if series.name else ""
    return f"{index}: {axes} {'x'.join(map(str, shape))} {series.dtype}{name}"


def _shape(series):
    """Axes and shape as in the file, without samples where there is one."""
    axes, shape = series.axes, tuple(series.shape)
    if axes.endswith("S") and shape[-1] == 1:
        return axes[:-1], shape[:-1]
    return axes, shape


def _check_declared(file, series, count):
    """Raise ValueError where the metadata declares more planes than were found.

    tifffile falls back to what it finds; OME's missing planes show in the series.
    """
    declared = 0
    if series.kind != "ome" and file.imagej_metadata:
        metadata = file.imagej_metadata
        sizes = [metadata.get(key, 1) for key in ("frames", "slices", "channels")]
        declared = max(metadata.get("images", 1), math.prod(sizes))
    elif shape := _shaped_metadata(series.keyframe).get("shape"):
        declared = math.prod(shape) // math.prod(series.keyframe.shape[-2:])
    if declared > count:
        raise ValueError(
            f"it is truncated: its metadata declares {declared} planes, and {count} "
            "can be found; copy it anew from its source"
        )


def _shaped_metadata(page):
    """What tifffile itself writes as ImageDescription; empty if there is none."""
    text = page.description
    if not text.startswith('{"shape":'):
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"its description is damaged ({error})") from error


def _described(file, series, index, xml):
    """Calibration, source and provenance, by the names of `Stored`."""
    keyframe = series.keyframe
    metadata = file.imagej_metadata or _shaped_metadata(keyframe)
    if xml is not None:
        kind = "ome"
        calibration, kept = read_ome(xml, index)
    else:
        kind = "imagej" if file.imagej_metadata else "plain"
        calibration = tag_calibration(metadata, keyframe.tags)
        kept = metadata if kind == "imagej" else {}
    source = Source(
        format=kind,
        compression=_compression(keyframe.compression),
        predictor=keyframe.predictor != 1,
        bigtiff=file.is_bigtiff,
        metadata=kept,
    )
    provenance = read_provenance(metadata, xml)
    return {"calibration": calibration, "source": source, "provenance": provenance}


def _compression(value):
    try:
        name = tifffile.COMPRESSION(value).name.lower()
    except ValueError:  # a number that tifffile has no name for
        return str(int(value))
    return {"adobe_deflate": "deflate"}.get(name, name)
