"""torch's files, read and written without torch and without running pickled code.

``torch.save`` writes a zip archive of uncompressed entries: ``NAME/data.pkl``, a pickle
of the saved object in which each tensor refers to a storage, ``NAME/data/KEY``, one
entry a storage with its raw numbers, and ``NAME/byteorder``. Before torch 1.6 it wrote
a row of pickles and then the storages. Both are read here; the first is written.
"""

import io
import os
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from models.atomic import replace_file
from models.torch_emit import dump_pickle
from models.torch_objects import (
    TYPED_STORAGES,
    UNTYPED_STORAGE,
    TorchGlobal,
    TorchRecord,
    checked_global,
)
from models.torch_pickle import load_pickle

__all__ = ["TorchGlobal", "TorchRecord", "read_torch", "write_torch"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
ALIGNMENT = 64  # of the storages in a file, as torch aligns them
ZIP_ERRORS = (  # what zipfile raises for an archive with damaged directory entries
    zipfile.BadZipFile,
    struct.error,
    NotImplementedError,
    OverflowError,
    EOFError,
    ValueError,
)
KNOWN_STARTS = {
    b"\x89HDF": "it is an HDF5 file: open it with h5py",
    b"MATLAB": "it is a MATLAB file: open it with scipy.io.loadmat",
    b"\x93NUMPY": "it is a .npy file: open it with numpy.load",
    b"version https://git-lfs": "it is a Git LFS pointer, no file: run `git lfs pull`",
    b"<": "it is a web page or XML, not the file: download it again",
    b"{": "it is JSON, not a file of torch's",
}


def read_torch(path: str | os.PathLike) -> Any:
    """What ``torch.save`` wrote, read without torch and without running any code.

    Each number is copied once, from the file into memory.

    Args:
        path: of a file in torch's zip format, or in the older one of torch before 1.6.

    Returns:
        Plain data. Tensors and parameters are numpy arrays (bfloat16 and float8 of the
        types of ``ml_dtypes``), which share memory where the tensors did; dicts, lists,
        tuples, sets, strings and numbers are themselves, torch's dtypes numpy's. A
        function or class is a :class:`TorchGlobal`, an instance of a class a
        :class:`TorchRecord`: names and data, nothing that runs.

    Raises:
        OSError: where the file can't be opened.
        ValueError: with the path, for a file that is not torch's, is truncated or
            damaged (checksums included), or has tensors outside their storages.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(32)
        file.seek(0)
        try:
            if start.startswith(b"PK"):
                return _read_zip(file, size)
            if start.startswith(b"\x80"):
                return _read_legacy(file, size)
            raise ValueError(_foreign(start, size))
        except ValueError as error:
            raise ValueError(f"{path} can't be read: {error}") from error


def _foreign(start: bytes, size: int) -> str:
    if size == 0:
        return "it is empty: write or download it again"
    for known, meaning in KNOWN_STARTS.items():
        if start.startswith(known):
            return meaning
    return (
        "it is not a file of torch.save, which starts with b'PK' or b'\\x80'; this one "
        f"starts with {start[:8]!r}"
    )


def _damaged(what) -> ValueError:
    return ValueError(f"it is truncated or damaged ({what}): copy or download it again")


def _read_zip(file: BinaryIO, size: int):
    archive = _Archive.open(file, size)
    order = (
        bytes(archive.read("byteorder"))
        if "byteorder" in archive.entries
        else b"little"
    )
    if order not in (b"little", b"big"):
        raise _damaged("its byteorder is neither little nor big")
    swap = order.decode() != sys.byteorder
    storages = {}

    def load_storage(identity):
        dtype, key, count, _ = _storage_identity(identity)
        if key not in storages:
            data = archive.read(f"data/{key}")
            if count * dtype.itemsize > data.size:
                raise _damaged(
                    f"storage {key} has {data.size} bytes for {count} of {dtype}"
                )
            storages[key] = _in_host_order(data[: count * dtype.itemsize], dtype, swap)
        if storages[key].dtype != dtype:
            raise ValueError(f"storage {key} is named with two types")
        return storages[key]

    return load_pickle(io.BytesIO(archive.read("data.pkl")), load_storage, swap)


def _storage_identity(identity: tuple):
    """(dtype, key, number of items, the rest) of a tensor's storage in the pickle."""
    if len(identity) < 5:
        raise TypeError("a storage is named in an unknown way")
    kind, storage, key, _location, count, *rest = identity
    if not all(type(text) is str for text in (kind, key)) or kind != "storage":
        raise TypeError("a storage is named in an unknown way")
    if type(count) is not int or count < 0:
        raise TypeError("a storage has no length")
    if checked_global(storage) == UNTYPED_STORAGE:
        return np.dtype(np.uint8), key, count, rest
    if storage not in TYPED_STORAGES:
        raise ValueError(
            f"it has numbers in a {storage}, which numpy has no type for: convert them "
            "in torch (e.g. with .dequantize() or .float()) and save again"
        )
    return TYPED_STORAGES[storage], key, count, rest


def _in_host_order(data: np.ndarray, dtype: np.dtype, swap: bool) -> np.ndarray:
    """The bytes ``data`` as numbers of ``dtype``, in place."""
    part = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    if swap and part > 1:
        data.view(f"u{part}").byteswap(inplace=True)
    numbers = data.view(dtype)
    if dtype == np.bool_:  # a byte other than 0 and 1 would be no bool of numpy's
        np.not_equal(data, 0, out=numbers)
    return numbers


@dataclass(frozen=True)
class _Archive:
    """The entries of one of torch's zip archives, by their names in its one folder."""

    file: BinaryIO
    size: int
    entries: dict[str, zipfile.ZipInfo]
    checksums: bool  # torch.serialization.set_crc32_options(False) leaves them zero

    @classmethod
    def open(cls, file, size):
        try:
            found = zipfile.ZipFile(file).infolist()
        except ZIP_ERRORS as error:
            raise _damaged(f"a zip archive of {size} bytes; {error}") from error
        names = [entry.filename for entry in found]
        tops = [name[: -len("data.pkl")] for name in names if _is_pickle(name)]
        if len(tops) != 1:
            if names and all(name.endswith(".npy") for name in names):
                raise ValueError("it is an .npz archive: open it with numpy.load")
            raise ValueError(
                "it is a zip archive, but not of torch.save, which makes one entry "
                f"NAME/data.pkl; this one has {len(tops)}"
            )
        if f"{tops[0]}constants.pkl" in names:
            raise ValueError(
                "it is a TorchScript archive (torch.jit.save), which holds a program: "
                "load it with torch.jit.load and save its state_dict() with torch.save"
            )
        # Entries are raw pieces of the file, none compressed and together no larger, so
        # that no small file unpacks into a large one.
        for entry in found:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(
                    f"its entry {entry.filename:.80} is compressed or encrypted, which "
                    "torch.save never does: save it again with torch.save"
                )
        entries = {entry.filename.removeprefix(tops[0]): entry for entry in found}
        if len(entries) != len(found) or sum(e.file_size for e in found) > size:
            raise _damaged("its entries overlap")
        return cls(file, size, entries, any(entry.CRC for entry in found))

    def read(self, name: str) -> np.ndarray:
        """The bytes of one entry, read once into memory of their own."""
        entry = self.entries.get(name)
        if entry is None:
            raise _damaged(f"the entry {name} is missing")
        header = b""
        if 0 <= entry.header_offset < self.size:
            self.file.seek(entry.header_offset)
            header = self.file.read(30)
        if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
            raise _damaged(f"the entry {name} has no header")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = entry.header_offset + 30 + name_length + extra_length
        if start + entry.file_size > self.size:
            raise _damaged(f"the entry {name} ends after the file does")
        self.file.seek(start)
        data = np.empty(entry.file_size, np.uint8)
        _read_into(self.file, data)
        if self.checksums and zlib.crc32(data) != entry.CRC:
            raise _damaged(f"the checksum of {name} is wrong")
        return data


def _is_pickle(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/data.pkl")


def _read_into(file: BinaryIO, data: np.ndarray) -> None:
    if file.readinto(data) != data.nbytes:
        raise _damaged(f"it ends within {data.nbytes} bytes of numbers")


class _Bounded:
    """A stream that never asks for more bytes than the file has left."""

    def __init__(self, file, size):
        self.file, self.size = file, size
        self.readline, self.tell = file.readline, file.tell

    def read(self, count):
        return self.file.read(min(count, self.size - self.tell()))


def _read_legacy(file: BinaryIO, size: int):
    """The format before torch 1.6: pickles of a magic number, the version, the system,
    the object and the storages' keys; then each storage, behind its length."""
    stream = _Bounded(file, size)
    try:
        magic = load_pickle(stream, _no_storage)
    except ValueError:
        magic = None
    if magic != LEGACY_MAGIC:
        raise ValueError(
            "it is a pickle, but not of torch.save, and to read it would mean to run "
            "it: save its arrays with numpy.savez where it was made"
        )
    version, _system = (
        load_pickle(stream, _no_storage),
        load_pickle(stream, _no_storage),
    )
    if version != 1001:
        raise ValueError("it is in a version of torch's old format that is unknown")
    start = file.tell()
    storages = {}

    def load_storage(identity):
        if len(identity) == 4:  # ("module", a class, its file and its source text)
            return checked_global(identity[1])
        dtype, key, count, rest = _storage_identity(identity)
        if key not in storages:
            total = count * dtype.itemsize + sum(s.nbytes for s in storages.values())
            if total > size:
                raise _damaged(f"storage {key} is larger than the file")
            storages[key] = np.empty(count, dtype)
        if storages[key].dtype != dtype:
            raise ValueError(f"storage {key} is named with two types")
        part = rest[0] if rest else None
        return storages[key] if part is None else _part(storages[key], part)

    load_pickle(stream, load_storage)  # finds the storages, which the file has later
    keys = load_pickle(stream, _no_storage)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise _damaged("it has no list of storages")
    if sorted(keys) != sorted(storages):
        raise _damaged("its list of storages is not the one it uses")
    for key in keys:
        storage = storages[key]
        if file.read(8) != struct.pack("<q", storage.size):
            raise _damaged(f"storage {key} has another length than its tensors say")
        data = storage.view(np.uint8)
        _read_into(file, data)
        _in_host_order(data, storage.dtype, sys.byteorder != "little")
    file.seek(start)
    return load_pickle(stream, load_storage)


def _part(storage, part):
    """Part of an old storage, from (key of the part, first item, number of items)."""
    if not isinstance(part, tuple) or len(part) != 3:
        raise TypeError("a part of a storage is named in an unknown way")
    _, first, length = part
    if type(first) is not int or type(length) is not int:
        raise TypeError("a part of a storage has no length")
    if not 0 <= first <= first + length <= storage.size:
        raise _damaged("a part of a storage reaches outside it")
    return storage[first : first + length]


def _no_storage(_):
    raise TypeError("a tensor stands where none can")


def write_torch(path: str | os.PathLike, value: Any) -> None:
    """Write a file as ``torch.save`` does, for ``torch.load``, whole or not at all.

    Args:
        path: of the file; missing folders are made.
        value: arrays of numpy's or JAX's, which become tensors; dicts, ``OrderedDict``,
            lists, tuples, strings, numbers, bools and None of these; numpy dtypes,
            which become torch's; and :class:`TorchGlobal`, which becomes a reference to
            that function or class (``torch.load`` then needs ``weights_only=False``).

    Raises:
        ValueError: names what in ``value`` can't be written, and where it is.
        OSError: names the file that can't be written.
    """
    pickled, storages = dump_pickle(value)
    with (
        replace_file(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        _write_entry(archive, "data.pkl", pickled)
        _write_entry(archive, "byteorder", b"little")
        for key, storage in enumerate(storages):
            _write_entry(archive, f"data/{key}", storage.reshape(-1).view(np.uint8))
        _write_entry(archive, "version", b"3\n")


def _write_entry(archive: zipfile.ZipFile, name: str, data: bytes | np.ndarray):
    entry = zipfile.ZipInfo(f"archive/{name}")  # dated 1980, so that files are the same
    entry.file_size = len(data)
    long_entry = len(data) * 1.05 > zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + 30 + len(entry.filename) + 20 * long_entry + 4
    padding = -start % ALIGNMENT
    entry.extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=long_entry) as stream:
        stream.write(data)
