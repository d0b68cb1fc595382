"""Where the planes of a TIFF lie in its file, whether all are there, and their voxels.

tifffile reads what is there of a truncated file, without an error: so the chain of
directories is walked here, and every offset is compared with the size of the file.
"""

from __future__ import annotations

import math
import operator
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Bytes of each data type of a tag (TIFF 6.0, section 2; BigTIFF: 16 to 18).
TYPE_SIZES = dict(
    zip(range(1, 14), (1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4), strict=True)
)
TYPE_SIZES |= {16: 8, 17: 8, 18: 8}
# A standard tag (TIFF 6.0 ends there) or one of ImageJ's blocks lies in the file. Of
# others, programs have left bad offsets in sound files.
LAST_STANDARD_TAG = 532
IMAGEJ_TAGS = (50838, 50839)
# What has been read through a map stays resident until the map is closed.
MAPPED_BYTES = 2**25


@dataclass(frozen=True)
class Coded:
    """Strips or tiles of one plane, which tifffile decodes."""

    segments: tuple[tuple[int, int], ...]
    """(offset, number of bytes) of each, row by row."""

    first: int
    """Index of the first one among those of the page."""

    shape: tuple[int, int]
    """Rows and columns of a segment."""

    decode: Callable[..., Any]
    """tifffile.TiffPage.decode of the page's layout."""

    tables: bytes | None
    """Tables that all JPEG segments of the page share."""


@dataclass(frozen=True)
class Plane:
    """One plane (y, x) of voxels in a file."""

    path: str
    page: int
    shape: tuple[int, int]
    dtype: np.dtype
    """As stored, with its byte order."""

    offset: int | None
    """Where the rows begin, if they lie there one after the other as they are."""

    coded: Coded | None = None


def check_structure(path: str | os.PathLike) -> list[int]:
    """The offsets of a TIFF's pages, which are there as a whole; else ValueError."""
    size = os.path.getsize(path)
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes): copy it anew from its source")
    with open(path, "rb") as file:
        start = file.read(16)
        order = {b"II": "<", b"MM": ">"}.get(start[:2], "")
        if order and size < 4:
            raise ValueError(
                f"{path} is truncated: it ends at byte {size}, within the first four; "
                "copy it anew from its source"
            )
        version = struct.unpack(f"{order}H", start[2:4])[0] if order else 0
        if version not in (42, 43):
            raise ValueError(
                f"{path} is no TIFF: it must begin with II or MM and 42 or 43, got "
                f"{start[:4]!r}; convert it, for example with ImageJ"
            )
        return list(_directories(file, path, size, order, version == 43))


def relink_pages(path: str | os.PathLike, order: Sequence[int]) -> None:
    """Chain the pages of a sound little-endian TIFF in another order, in place.

    Page `order[0]` comes first, and so on. The voxels stay where they are.
    """
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        big = file.read(4)[2] == 43
        pages = list(_directories(file, path, size, "<", big))
        pointer = struct.Struct("<Q" if big else "<I")
        count_format, entry_size = ("<Q", 20) if big else ("<H", 12)
        count_size = struct.calcsize(count_format)
        position = 8 if big else 4
        for offset in [*(pages[i] for i in order), 0]:
            file.seek(position)
            file.write(pointer.pack(offset))
            if offset:
                file.seek(offset)
                number = struct.unpack(count_format, file.read(count_size))[0]
                position = offset + count_size + number * entry_size


def _directories(
    file: BinaryIO, path: str | os.PathLike, size: int, order: str, big: bool
) -> Iterator[int]:
    """The offsets of the pages, each checked to lie in the file as a whole."""
    pointer = struct.Struct(order + ("Q" if big else "I"))
    count_format = struct.Struct(order + ("Q" if big else "H"))
    entry = struct.Struct(order + ("HHQQ" if big else "HHII"))
    seen: set[int] = set()

    def read(offset, number):
        if offset + number > size:
            raise ValueError(
                f"{path} is truncated: page {len(seen)} needs bytes up to "
                f"{offset + number}, and the file ends at {size}; copy it anew from "
                "its source"
            )
        file.seek(offset)
        return file.read(number)

    position = 8 if big else 4
    while offset := pointer.unpack(read(position, pointer.size))[0]:
        if offset in seen:
            raise ValueError(
                f"{path} is damaged: the page at byte {offset} follows on itself"
            )
        number = count_format.unpack(read(offset, count_format.size))[0]
        entries = read(offset + count_format.size, number * entry.size)
        for code, kind, count, value in entry.iter_unpack(entries):
            num_bytes = count * TYPE_SIZES.get(kind, 0)
            needed = code <= LAST_STANDARD_TAG or code in IMAGEJ_TAGS
            if needed and num_bytes > pointer.size:
                read(value + num_bytes, 0)
        seen.add(offset)
        yield offset
        position = offset + count_format.size + number * entry.size


def series_planes(
    series: Any, count: int, height: int, width: int, pages: Sequence[int]
) -> list[Plane]:
    """The planes of a tifffile.TiffPageSeries, in its order.

    `pages` are the offsets that `check_structure` returned. Raises ValueError where the
    file or the series has fewer than `count` planes, or where one reaches beyond the
    end of its file.
    """
    keyframe = series.keyframe
    if keyframe.shaped[1] > 1:
        raise ValueError(
            f"page {keyframe.index} holds a stack of planes of its own (ImageDepth "
            f"{keyframe.shaped[1]}): save each slice as a page"
        )
    start = None if series.is_multifile else series.dataoffset
    if start is None:
        planes = [plane for page in series for plane in _page_planes(page)]
        if len(planes) < count:
            raise ValueError(
                f"it is truncated: its metadata declares {count} planes, and it has "
                f"{len(planes)}; copy it anew from its source"
            )
    else:
        path, shape = _path(keyframe), (height, width)
        dtype = keyframe.dtype.newbyteorder(keyframe.parent.byteorder)
        num_bytes = height * width * dtype.itemsize
        end = start + count * num_bytes
        _check_extent(path, keyframe.index, [(start, end - start)])
        # tifffile believes a description in the first page, and would read the next
        # page's directory as voxels.
        if any(start <= page < end for page in pages):
            raise ValueError(
                f"it is truncated: its metadata declares {count} planes, and pages "
                "begin before these would end; copy it anew from its source"
            )
        planes = [
            Plane(path, keyframe.index + i, shape, dtype, start + i * num_bytes)
            for i in range(count)
        ]
    return planes[:count]


def _path(page):
    handle = page.parent.filehandle
    return os.path.join(handle.dirname, handle.name)


def _page_planes(page):
    if page is None:
        raise ValueError(
            "it is truncated or a file of its series is missing: its metadata declares "
            "more planes than are there"
        )
    keyframe = page.keyframe
    samples, _, height, width, _ = keyframe.shaped
    dtype = keyframe.dtype.newbyteorder(page.parent.byteorder)
    offsets, counts = page.dataoffsets, page.databytecounts
    path = _path(page)
    # A series tells for its first page only whether strips follow on one another.
    ends = (offset + count for offset, count in zip(offsets, counts, strict=False))
    if keyframe.is_final and all(map(operator.eq, ends, offsets[1:])):
        num_bytes = height * width * dtype.itemsize
        _check_extent(path, page.index, [(offsets[0], samples * num_bytes)])
        for sample in range(samples):
            start = offsets[0] + sample * num_bytes
            yield Plane(path, page.index, (height, width), dtype, start)
        return
    if keyframe.is_tiled:
        segment = (keyframe.tilelength, keyframe.tilewidth)
    else:
        segment = (min(keyframe.rowsperstrip, height), width)
    number = math.ceil(height / segment[0]) * math.ceil(width / segment[1])
    if min(len(offsets), len(counts)) < samples * number:
        raise ValueError(
            f"page {page.index} must have {samples * number} strips or tiles, got "
            f"{min(len(offsets), len(counts))}: the file is truncated or damaged"
        )
    _check_extent(path, page.index, zip(offsets, counts, strict=True))
    for sample in range(samples):
        part = slice(sample * number, (sample + 1) * number)
        segments = tuple(zip(offsets[part], counts[part], strict=True))
        tables = page.jpegtables
        coded = Coded(segments, part.start, segment, keyframe.decode, tables)
        yield Plane(path, page.index, (height, width), dtype, None, coded)


def _check_extent(path, page, segments):
    """Raise ValueError unless all (offset, number of bytes) lie in the file."""
    size = os.path.getsize(path)
    for offset, count in segments:
        if offset <= 0 or count <= 0 or offset + count > size:
            raise ValueError(
                f"{Path(path).name} is truncated: the data of page {page} should lie "
                f"at bytes {offset} to {offset + count}, and the file ends at {size}; "
                "copy it anew from its source"
            )


def read_planes(
    planes: Sequence[Plane], dtype: np.dtype, rows: range, columns: range
) -> np.ndarray:
    """Parts of planes, as (plane, row, column) in that dtype, in native byte order.

    Plain data is mapped into memory, copied and let go, so that what stays resident is
    the result; coded data is decoded strip by strip or tile by tile.

    Raises ValueError for data that can't be decoded.
    """
    result = np.empty((len(planes), len(rows), len(columns)), dtype)
    if result.size == 0:
        return result
    with ExitStack() as stack:
        opened: dict[tuple[str, bool], Any] = {}
        num_mapped = 0
        for plane, target in zip(planes, result, strict=True):
            key = (plane.path, plane.coded is None)
            if key not in opened:
                opened[key] = (
                    np.memmap(plane.path, np.uint8, mode="r")
                    if plane.coded is None
                    else stack.enter_context(open(plane.path, "rb"))
                )
            if plane.coded is None:
                _copy(plane, opened[key], target, rows, columns)
                num_mapped += len(rows) * plane.shape[1] * plane.dtype.itemsize
                if num_mapped > MAPPED_BYTES:
                    num_mapped = 0
                    del opened[key]  # the memory goes back as the map is closed
            else:
                _decode(plane, opened[key], target, rows, columns)
    return result


def _copy(plane, bytes_of_file, target, rows, columns):
    row_bytes = plane.shape[1] * plane.dtype.itemsize
    start = plane.offset + rows.start * row_bytes
    part = bytes_of_file[start : start + len(rows) * row_bytes].view(plane.dtype)
    target[:] = part.reshape(len(rows), -1)[:, columns.start : columns.stop]


def _decode(plane, file, target, rows, columns):
    """Decode the segments that overlap rows and columns, and take those parts."""
    height, width = plane.coded.shape
    segments_a_row = math.ceil(plane.shape[1] / width)
    for i in range(rows.start // height, math.ceil(rows.stop / height)):
        for j in range(columns.start // width, math.ceil(columns.stop / width)):
            top, left = i * height, j * width
            y = range(max(rows.start, top), min(rows.stop, top + height))
            x = range(max(columns.start, left), min(columns.stop, left + width))
            segment = _segment(plane, file, i * segments_a_row + j)
            target[_within(y, rows.start), _within(x, columns.start)] = segment[
                _within(y, top), _within(x, left)
            ]


def _within(part, start):
    return slice(part.start - start, part.stop - start)


def _segment(plane, file, index):
    """One strip or tile, (row, column), with rows beyond the plane cut or not."""
    offset, count = plane.coded.segments[index]
    file.seek(offset)
    arguments = {"jpegtables": plane.coded.tables} if plane.coded.tables else {}
    try:
        segment, _, _ = plane.coded.decode(
            file.read(count), plane.coded.first + index, **arguments
        )
    except (MemoryError, ImportError, OSError):
        raise
    except Exception as error:  # whatever a codec raises: the data is not sound
        raise ValueError(
            f"{plane.path}: page {plane.page} can't be decoded, it is damaged or of a "
            f"kind that tifffile can't read ({type(error).__name__}: {error})"
        ) from error
    return segment[0, :, :, 0]
