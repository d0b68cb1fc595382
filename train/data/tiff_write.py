"""Volumes written to TIFF, slab by slab, whole or not at all."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from models.atomic import replace_file
from train.data.tiff_geometry import Calibration, check_calibration
from train.data.tiff_metadata import (
    imagej_arguments,
    imagej_holds,
    ome_arguments,
)
from train.data.tiff_planes import relink_pages
from train.data.tiff_volume import Volume

# What ImageJ opens: unsigned 8 and 16 bits, signed 16 bits, 32-bit floats.
IMAGEJ_DTYPES = ("uint8", "uint16", "int16", "float32")
OME_DTYPES = ("int8", "int32", "uint32", "float64", *IMAGEJ_DTYPES)
# Offsets in a classic TIFF have 32 bits; the rest is left for pages and metadata.
CLASSIC_BYTES = 2**32 - 2**25
# Values of the tag. Of Deflate's two, 8 is the official one.
COMPRESSIONS = {"none": 1, "deflate": 8, "lzw": 5, "packbits": 32773}
COMPRESSIONS |= {"lzma": 34925, "zstd": 50000}
# libtiff, and so most programs, adds up differences of neighbours for these only.
WITH_DIFFERENCES = ("deflate", "lzw", "lzma", "zstd")
DEFAULT_COMPRESSION = "deflate"  # in the place of one that loses or can't be written


def to_dtype(array: np.ndarray, dtype: Any) -> tuple[np.ndarray, int]:
    """Convert voxels to a dtype without wrapping around.

    For integers, values are rounded (halves to even) and clipped to the dtype's range;
    NaN, which no integer can hold, becomes 0. For floats, finite values beyond the
    range are clipped, and NaN and infinities stay.

    Returns the array and how many of its values were clipped, NaN that became 0
    included. Raises ValueError for dtypes other than integers and floats.
    """
    array, dtype = np.asarray(array), np.dtype(dtype).newbyteorder("=")
    if array.dtype.name in ("float16", "bfloat16"):  # whose range numpy can't compare
        array = array.astype(np.float32)
    if array.dtype.kind not in "iuf" or dtype.kind not in "iuf":
        raise ValueError(
            "voxels are converted between integers and floats, got "
            f"{array.dtype} to {dtype}"
        )
    if dtype.kind == "f":
        if array.dtype.kind != "f" or np.can_cast(array.dtype, dtype):
            return array.astype(dtype), 0
        largest = array.dtype.type(np.finfo(dtype).max)
        clipped = np.isfinite(array) & (np.abs(array) > largest)
        return (
            np.where(clipped, np.copysign(largest, array), array).astype(dtype),
            int(np.count_nonzero(clipped)),
        )
    limits = np.iinfo(dtype)
    if array.dtype.kind != "f":
        return _clip_integers(array, dtype, limits)
    rounded = np.rint(array)
    # One above the maximum is a power of two, which every float holds exactly, unlike
    # the maximum itself.
    high = rounded >= float(limits.max + 1)
    low = rounded < float(limits.min)
    missing = np.isnan(rounded)
    num_clipped = sum(int(np.count_nonzero(mask)) for mask in (high, low, missing))
    if not num_clipped:
        return rounded.astype(dtype), 0
    result = np.where(high | low | missing, array.dtype.type(0), rounded).astype(dtype)
    result[high] = limits.max
    result[low] = limits.min
    return result, num_clipped


def _clip_integers(array, dtype, limits):
    own = np.iinfo(array.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    clipped = (array < low) | (array > high)
    return np.clip(array, low, high).astype(dtype), int(np.count_nonzero(clipped))


class VolumeWriter:
    """Writes a volume slab by slab, in constant memory.

        with VolumeWriter(path, volume.shape, volume.axes, volume.dtype) as writer:
            for t, c in volume.positions:
                for z in range(0, depth, 16):
                    writer.append(volume.read(t, c, slice(z, z + 16)))

    The file appears at `path` once all slabs are there and the block ends well; until
    then, whatever happens, `path` stays what it was.

    It becomes an ImageJ stack where ImageJ knows the dtype and 32 bits hold the size,
    else OME (BigTIFF where needed); a volume that was OME stays so, and a path that
    ends in .ome.tif asks for it. `notes` says what was not to be expected. Pages are
    grey ("minisblack") always.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        shape: Sequence[int],
        axes: str,
        dtype: Any,
        voxel_size: Sequence[float | None] | None = None,
        unit: str | None = None,
        origin: Sequence[float] | None = None,
        *,
        like: Volume | None = None,
        compression: str | None = "like",
        provenance: Mapping[str, Any] | None = None,
    ):
        """Open a temporary file beside `path`.

        - shape, axes: of ZYX, CZYX, TZYX or TCZYX.
        - dtype: of 8, 16 or 32 bit integers, float32 or float64.
        - voxel_size, origin: (z, y, x) in `unit`, None where unknown.
        - like: the volume this one was made from, whose format, compression and
          metadata of display, channels and time are kept.
        - compression: 'like' (none without a volume), None, or one of COMPRESSIONS.
        - provenance: how the volume was made: a dictionary of what JSON can hold.

        Raises ValueError for what can't be written, OSError where it can't be.
        """
        self.path = Path(path)
        self.notes: tuple[str, ...] = ()
        self._sizes = _sizes(shape, axes)
        self.dtype = np.dtype(dtype).newbyteorder("=")
        if self.dtype.name not in OME_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(OME_DTYPES)}, which ImageJ or OME "
                f"can hold, got {self.dtype}: convert with to_dtype"
            )
        calibration = check_calibration(Calibration(voxel_size, unit, origin))
        self.format, self.bigtiff = self._choose_format(calibration, like)
        self._compression, predictor = self._choose_compression(compression, like)
        self._position = 0  # planes written, in the order of T, C, Z
        self._stack = ExitStack()
        arguments = self._describe(calibration, like, provenance)
        temporary = self._stack.enter_context(replace_file(self.path))
        try:
            self._open(temporary, arguments, predictor)
        except BaseException as error:
            self._abandon(error)
            raise

    @property
    def position(self) -> tuple[int, int, int] | None:
        """(t, c, z) of the slice that is due, None after the last one."""
        num_times, num_channels, depth = self._sizes[:3]
        if self._position == num_times * num_channels * depth:
            return None
        volume, z = divmod(self._position, depth)
        return (*divmod(volume, num_channels), z)

    def append(self, slab: np.ndarray) -> None:
        """Write the next slices (z, y, x) of the volume that is due.

        Slabs come in the order of T, C and Z; one slab belongs to one time and channel.

        Raises ValueError for another shape or dtype, or one slice too many.
        """
        slab = np.asarray(slab)
        if self._stack is None:
            raise ValueError(f"{self.path} is closed: nothing can be appended")
        depth, height, width = self._sizes[2:]
        z = depth if self.position is None else self.position[2]
        if slab.ndim != 3 or slab.shape[1:] != (height, width):
            raise ValueError(
                f"a slab must have shape (slices, {height}, {width}), got {slab.shape}"
            )
        if slab.dtype.newbyteorder("=") != self.dtype:
            raise ValueError(
                f"a slab must have dtype {self.dtype}, got {slab.dtype}: convert with "
                "to_dtype, which rounds, clips and counts"
            )
        if len(slab) > depth - z:
            raise ValueError(
                f"a slab must end with the volume, which lacks {depth - z} of its "
                f"{depth} slices at (t, c, z) = {self.position}, got {len(slab)} slices"
            )
        for plane in slab:
            self._write_plane(np.ascontiguousarray(plane, self.dtype.newbyteorder("<")))
            self._position += 1

    def close(self) -> None:
        """Finish the file and put it in its place.

        Raises ValueError, and leaves nothing, where slices are missing. A second call
        does nothing.
        """
        if self._stack is None:
            return
        if self.position is not None:
            total = math.prod(self._sizes[:3])
            error = ValueError(
                f"{self.path} was not written: it must have {total} slices, got "
                f"{self._position}"
            )
            self._abandon(error)
            raise error
        stack, self._stack = self._stack, None
        with stack:
            self._finish()

    def abandon(self) -> None:
        """Give up: what was written is removed, and `path` stays what it was."""
        if self._stack is not None:
            self._abandon(RuntimeError("abandoned"))

    def __enter__(self) -> VolumeWriter:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.close()
        elif self._stack is not None:
            self._abandon(error)

    def _abandon(self, error):
        stack, self._stack = self._stack, None
        stack.__exit__(type(error), error, error.__traceback__)

    def _choose_format(self, calibration, like):
        num_bytes = math.prod(self._sizes) * self.dtype.itemsize
        num_bytes += math.prod(self._sizes[:3]) * 512  # the pages' directories
        large = num_bytes > CLASSIC_BYTES
        reasons = []
        if self.dtype.name not in IMAGEJ_DTYPES:
            reasons.append(f"ImageJ has no {self.dtype}")
        if large:
            reasons.append("an ImageJ stack ends at 4 GB")
        if not imagej_holds(calibration):
            reasons.append(f"its pixels a {calibration.unit} have no 32 bits")
        was_ome = like is not None and like.source.format == "ome"
        if was_ome or ".ome." in self.path.name.lower():
            return "ome", large or (was_ome and like.source.bigtiff)
        if not reasons:
            return "imagej", False
        self.notes += (f"written as OME: {', and '.join(reasons)}",)
        return "ome", large

    def _choose_compression(self, compression, like):
        """The name, and whether neighbours are subtracted first."""
        # ImageJ undoes the differences of integers, not those of floats.
        subtract = self.dtype.kind in "iu"
        if compression == "like":
            if like is None:
                return "none", False
            compression, subtract = like.source.compression, like.source.predictor
            if self.format == "imagej" and self.dtype.kind == "f":
                subtract = False
            if compression not in COMPRESSIONS:
                self.notes += (
                    f"compressed with {DEFAULT_COMPRESSION}, without loss, instead of "
                    f"{compression}",
                )
                compression, subtract = DEFAULT_COMPRESSION, self.dtype.kind in "iu"
        compression = "none" if compression is None else compression
        if compression not in COMPRESSIONS:
            raise ValueError(
                f"compression must be 'like', None or one of {', '.join(COMPRESSIONS)}"
                f", got {compression!r}"
            )
        return compression, subtract and compression in WITH_DIFFERENCES

    def _describe(self, calibration, like, provenance):
        kept, same_channels = {}, False
        num_times, num_channels, depth, height, width = self._sizes
        if like is not None and like.source.format == self.format:
            kept = like.source.metadata
            same_channels = like.sizes["C"] == num_channels
        extra = (calibration, kept, same_channels, provenance)
        if self.format == "imagej":
            sizes = (num_times, depth, num_channels, height, width)
            return imagej_arguments(sizes, *extra)
        return ome_arguments(self._sizes, self.dtype, *extra)

    def _open(self, temporary, arguments, predictor):
        self._temporary = temporary
        # ome=False, metadata=None: the description is ours, and so is the page order.
        self._tiff = tifffile.TiffWriter(
            temporary, bigtiff=self.bigtiff, byteorder="<", ome=False
        )
        self._stack.callback(self._tiff.close)
        self._arguments = {
            "photometric": "minisblack",
            "metadata": None,
            "software": "jaxops",
        }
        if self._compression != "none":
            self._arguments |= {
                "compression": COMPRESSIONS[self._compression],
                "predictor": predictor,
            }
            self._first_arguments = arguments
            return
        shape = (math.prod(self._sizes[:3]), *self._sizes[3:])
        self._start, _ = self._tiff.write(
            None,
            shape=shape,
            dtype=self.dtype,
            returnoffset=True,
            **self._arguments,
            **arguments,
        )
        self._tiff.close()
        self._file = self._stack.enter_context(temporary.open("r+b"))

    def _write_plane(self, plane):
        if self._compression == "none":
            self._file.seek(self._start + self._page() * plane.nbytes)
            self._file.write(plane.data)
        else:
            first = self._first_arguments if self._position == 0 else {}
            self._tiff.write(plane, **self._arguments, **first)

    def _page(self):
        """The page of the slice that is due: ImageJ has the channels of a slice
        together, and slabs come channel by channel."""
        t, c, z = self.position
        _, num_channels, depth = self._sizes[:3]
        if self.format == "imagej":
            return (t * depth + z) * num_channels + c
        return (t * num_channels + c) * depth + z

    def _finish(self):
        if self._compression == "none":
            self._file.flush()
            return
        self._tiff.close()
        num_times, num_channels, depth = self._sizes[:3]
        if self.format == "imagej" and min(num_channels, depth) > 1:
            written = np.arange(num_times * num_channels * depth)
            order = written.reshape(num_times, num_channels, depth).swapaxes(1, 2)
            relink_pages(self._temporary, order.ravel())


def _sizes(shape, axes):
    """Lengths of T, C, Z, Y, X."""
    if axes not in ("ZYX", "CZYX", "TZYX", "TCZYX") or len(axes) != len(shape):
        raise ValueError(
            "axes must be ZYX, CZYX, TZYX or TCZYX, with one length each, got "
            f"{axes!r} and {tuple(shape)}"
        )
    if any(int(size) != size or size < 1 for size in shape):
        raise ValueError(f"lengths must be integers from 1, got {tuple(shape)}")
    sizes = dict.fromkeys("TCZYX", 1)
    sizes |= zip(axes, map(int, shape), strict=True)
    return tuple(sizes.values())
