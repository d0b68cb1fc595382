"""Named arrays in .pt, .npz, .mat and HDF5 files, read as late as possible."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.torch_files import read_torch

HDF5_START = b"\x89HDF\r\n\x1a\n"
# A MATLAB v7.3 file begins with 512 bytes for people, then HDF5 follows.
MATLAB_HEADER_SIZE = 512
MATLAB_NUMBERS = ("double", "single", "logical", *(f"int{n}" for n in (8, 16, 32, 64)))
MATLAB_NUMBERS += tuple(f"uint{n}" for n in (8, 16, 32, 64))


@dataclass(frozen=True)
class Stored:
    """One array of a file that is open."""

    read: Callable[[int | None], np.ndarray]
    """read(limit): the array, of axis 0 at most `limit` entries (None: all)."""

    describe: Callable[[], str]
    """Shape and dtype, for messages."""


@contextmanager
def open_arrays(path: str | Path) -> Iterator[dict[str, Stored]]:
    """The arrays of a file by name, as long as the block lasts.

    The suffix names the kind: .pt or .pth, .npz, .mat (v5 or v7.3), .h5 or .hdf5.

    Raises FileNotFoundError, IsADirectoryError, ValueError for another suffix or a file
    that is truncated or of another kind, ValueError too if HDF5 needs h5py installed.
    """
    path = Path(path)
    openers = {
        ".pt": _open_torch,
        ".pth": _open_torch,
        ".npz": _open_numpy,
        ".mat": _open_matlab,
        ".h5": _open_hdf5,
        ".hdf5": _open_hdf5,
    }
    opener = openers.get(path.suffix.lower())
    if opener is None:
        raise ValueError(
            f"{path}: the suffix must be one of {', '.join(openers)}, got "
            f"{path.suffix!r}; save the fields as x and y in an .npz file"
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a file in it")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    with opener(path) as arrays:
        yield arrays


def _loaded(array: np.ndarray) -> Stored:
    return Stored(
        lambda limit: array[:limit] if array.ndim else array,
        lambda: f"{array.shape} {array.dtype}",
    )


@contextmanager
def _open_torch(path):
    content = read_torch(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a dictionary of tensors such as x and y, got "
            f"{type(content).__name__}"
        )
    yield {
        str(key): _loaded(value)
        for key, value in content.items()
        if isinstance(value, np.ndarray)
    }


@contextmanager
def _open_numpy(path):
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            raise ValueError(f"{path} is no .npz file (no zip archive) or is truncated")
        file.seek(0)
        try:
            archive = np.load(file, allow_pickle=False)
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
            raise _unreadable(path, ".npz", error) from error
        with archive:
            yield {key: _numpy_stored(path, archive, key) for key in archive.files}


def _numpy_stored(path, archive, key):
    def read(limit):
        array = _attempt(path, f".npz (key {key!r})", lambda: archive[key])
        if not isinstance(array, np.ndarray):
            raise ValueError(
                f"{path} is a zip archive, but its entry {key!r} is no array: save the "
                "fields with np.savez"
            )
        return array[:limit] if array.ndim else array

    def describe():
        array = read(None)
        return f"{array.shape} {array.dtype}"

    return Stored(read, describe)


@contextmanager
def _open_matlab(path):
    with open(path, "rb") as file:
        start = file.read(MATLAB_HEADER_SIZE + len(HDF5_START))
    if HDF5_START in (start[: len(HDF5_START)], start[MATLAB_HEADER_SIZE:]):
        with _open_hdf5(path, reverse=True) as arrays:
            yield arrays
        return
    import scipy.io  # a slow import that other files do without

    listing = _attempt(path, "MATLAB v5", lambda: scipy.io.whosmat(path))
    arrays = {}
    for key, shape, kind in listing:
        if kind in MATLAB_NUMBERS:
            arrays[key] = Stored(
                lambda limit, key=key: _attempt(
                    path,
                    f"MATLAB v5 (key {key!r})",
                    lambda: scipy.io.loadmat(path, variable_names=[key])[key],
                )[:limit],
                lambda shape=shape, kind=kind: f"{shape} {kind}",
            )
    yield arrays


@contextmanager
def _open_hdf5(path, reverse=False):
    try:
        import h5py
    except ImportError as error:
        raise ValueError(
            f"{path} is an HDF5 file: to read it, pip install h5py"
        ) from error
    with _attempt(path, "HDF5", lambda: h5py.File(path, "r")) as file:
        yield {
            key: _hdf5_stored(path, key, value, reverse)
            for key, value in file.items()
            if isinstance(value, h5py.Dataset) and value.ndim > 0
        }


def _hdf5_stored(path, key, dataset, reverse):
    shape = dataset.shape[::-1] if reverse else dataset.shape

    def read(limit):
        limit = shape[0] if limit is None else limit
        kind = f"HDF5 (key {key!r})"
        if reverse:  # MATLAB's axes come in reverse: the samples are last
            return _attempt(path, kind, lambda: dataset[..., :limit]).T
        return _attempt(path, kind, lambda: dataset[:limit])

    return Stored(read, lambda: f"{shape} {dataset.dtype}")


def _attempt(path, kind, action):
    """Do `action` with a library; its many errors mean that the file is not sound."""
    try:
        return action()
    except (MemoryError, ImportError, PermissionError):
        raise
    except Exception as error:
        raise _unreadable(path, kind, error) from error


def _unreadable(path, kind, error):
    return ValueError(
        f"{path} cannot be read as {kind}: it is truncated or of another kind "
        f"({type(error).__name__}: {error})"
    )
