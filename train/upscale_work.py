"""The work of an enlargement that has not ended: a hidden folder beside the output.

    state.json   what is done, and a digest of that; replaced whole after each tile
    voxels.raw   the output's voxels (volume, z, y, x), where they are done
    .lock        kept by the process that works here

A process may be killed at any moment: what state.json counts as done is on the disk.
Work is removed by the command that finishes it, or by --overwrite, and no other way.
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.atomic import replace_file
from train.lock import locked
from train.tile_network import Statistics

STATE, VOXELS = "state.json", "voxels.raw"
SUFFIX = ".upscale"
STATE_VERSION = 1


class Stopped(Exception):
    """Somebody asked the work to stop; it can go on."""


@dataclass
class Counts:
    """Voxels to tell of."""

    clipped: int = 0
    """Output voxels that the voxel type could not hold."""

    replaced: int = 0
    """NaN and infinite input voxels, for which the network was given the low end."""

    def add(self, other: "Counts") -> None:
        self.clipped += other.clipped
        self.replaced += other.replaced


@dataclass
class State:
    """How far the work is."""

    key: str
    """Of what is enlarged, by what, and how: see `key_of`."""

    about: str = ""
    """The same for people: what a command that must not remove the work tells."""

    ranges: list[dict[str, float]] | None = None
    """Intensity ranges, one a channel, once they are known."""

    window: list[int] | None = None
    """Of the tiles."""

    volume: int = 0
    """Volumes (time and channel) that are done."""

    slices: int = 0
    """Of the next one, input slices that are done."""

    tiles: int = 0
    """Of the slab of tiles that follows, done."""

    counts: Counts = field(default_factory=Counts)
    """Over all slices that are done."""

    slab_counts: Counts = field(default_factory=Counts)
    """Over the tiles that are done of the slab that follows."""

    statistics: Statistics = field(default_factory=Statistics)
    """Of the volume that follows."""

    @property
    def has_progress(self) -> bool:
        """Whether any tile is done."""
        return self.has_voxels or bool(self.statistics.passes or self.statistics.tiles)

    @property
    def has_voxels(self) -> bool:
        """Whether any of the output is done."""
        return bool(self.volume or self.slices or self.tiles)

    def end_slab(self, slices: int) -> None:
        """All slices up to this one are done."""
        self.counts.add(self.slab_counts)
        self.slices = slices
        self._start_slab()

    def end_volume(self) -> None:
        self.volume, self.slices = self.volume + 1, 0
        self.statistics = Statistics()

    def change_window(self, window: tuple[int, ...]) -> None:
        """Go on with other tiles: what is not a whole slab is done anew."""
        self.window = list(window)
        self.statistics.restart_pass()
        self._start_slab()

    def _start_slab(self):
        self.tiles, self.slab_counts = 0, Counts()


def key_of(model_file: Path, files: list[str], **options: Any) -> str:
    """A digest of the model's content, of the input's files (path, size, time of
    change) and of whatever else settles the voxels."""
    with open(model_file, "rb") as file:
        model = hashlib.sha256(file.read()).hexdigest()
    stats = [(os.path.realpath(name), os.stat(name)) for name in files]
    described = {
        "model": model,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        **options,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class Work:
    """The folder, while this process works there; made by `open_work`."""

    def __init__(self, folder: Path, state: State, shape, dtype):
        self.folder, self.state, self.shape = folder, state, tuple(shape)
        self.dtype = np.dtype(dtype)
        self.has_progress = state.has_progress  # on the disk
        self._file = None

    @property
    def num_bytes(self) -> int:
        """Of the voxels."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_kept(self) -> bool:
        """Whether the next process can go on from what is on the disk."""
        return (self.folder / STATE).exists()

    def has_lost_voxels(self) -> bool:
        """Whether the state speaks of voxels whose file is gone or cut."""
        path = self.folder / VOXELS
        size = path.stat().st_size if path.is_file() else 0
        return self.state.has_voxels and size != self.num_bytes

    @property
    def num_written(self) -> int:
        """Bytes of the voxels that have room on the disk already."""
        path = self.folder / VOXELS
        return path.stat().st_blocks * 512 if path.exists() else 0

    def start(self) -> None:
        """Make the file of voxels, or open it."""
        path = self.folder / VOXELS
        path.touch()
        # The system buffers anyway; what is written here is told to be so at once.
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        self._file.truncate(self.num_bytes)

    def write(self, volume: int, z: int, rows: slice, columns: slice, plane) -> None:
        """Write a part of one plane of the output."""
        plane = np.ascontiguousarray(plane, self.dtype)
        *_, height, width = self.shape
        start = ((volume * self.shape[1] + z) * height + rows.start) * width
        if plane.shape[1] == width:
            self._write_at(start, plane)
            return
        for i, row in enumerate(plane):
            self._write_at(start + i * width + columns.start, row)

    def _write_at(self, position, values):
        self._file.seek(position * self.dtype.itemsize)
        data = memoryview(values).cast("B")
        while len(data):
            data = data[self._file.write(data) :]

    def read(self, volume: int, start: int, stop: int) -> np.ndarray:
        """Planes of one volume of the output: (z, y, x)."""
        shape = (stop - start, *self.shape[2:])
        first = (volume * self.shape[1] + start) * math.prod(shape[1:])
        self._file.seek(first * self.dtype.itemsize)
        result = np.empty(shape, self.dtype)
        data = memoryview(result).cast("B")
        while len(data):
            count = self._file.readinto(data)
            if not count:
                raise OSError(f"{self.folder / VOXELS} was cut: remove that folder")
            data = data[count:]
        return result

    def save(self) -> None:
        """Write down the state; the voxels that it speaks of are on the disk before."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        with replace_file(self.folder / STATE) as temporary:
            temporary.write_text(_encode(self.state))
        self.has_progress = self.state.has_progress

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Remove the folder: OUT is there."""
        self.close()
        _clear(self.folder)


def folder_of(out: Path) -> Path:
    """Where the work for an output lies."""
    target = Path(os.path.realpath(out))
    return target.with_name(f".{target.name}{SUFFIX}")


def has_work(out: Path) -> bool:
    return (folder_of(out) / STATE).exists()


@contextlib.contextmanager
def open_work(
    out: Path, key: str, shape, dtype, about: str = "", may_replace: bool = False
) -> Iterator[tuple[Work, str | None]]:
    """The work for an output, this process's own while the block lasts; and a line for
    people on what became of work that was there, or None.

    - shape: (volumes, z, y, x) of the output, of this dtype.
    - about: of the command, for people.
    - may_replace: whether work of another command is removed.

    What killed processes left of OUT itself is removed. So is work in which no tile is
    done, where the block raises.

    Raises:
        ValueError: if another process works there, or for work of another command, or
            a state that is damaged. OSError: if it can't be written.
    """
    folder = folder_of(out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(
            folder,
            f"An output is made by one process at a time; another works in {folder}. "
            "Wait for it, or choose another OUT.",
        ):
            work, note = _begin(folder, State(key, about), shape, dtype, may_replace)
            name = folder.name.removesuffix(SUFFIX)
            for leftover in folder.parent.glob(f"{glob.escape(name)}.*.tmp"):
                leftover.unlink(missing_ok=True)
            try:
                yield work, note
            except Exception as error:
                if not (work.has_progress or isinstance(error, Stopped)):
                    (folder / STATE).unlink(missing_ok=True)
                raise
            finally:
                work.close()
                if not (folder / STATE).exists():
                    _clear(folder)
    finally:
        with contextlib.suppress(OSError):  # not empty, or gone: both are well
            folder.rmdir()


def _begin(folder, fresh: State, shape, dtype, may_replace):
    """The work that goes on or begins, and what is told of what was there."""
    state = refusal = None
    try:
        state = _read_state(folder / STATE)
    except ValueError as error:
        refusal = (
            f"{folder / STATE} must be what this version of the program wrote; {error}."
            f" Remove {folder}, or give --overwrite to do so."
        )
    if state is not None and state.key != fresh.key:
        refusal = (
            f"{folder} holds the unfinished work of another command, of another device "
            f"or version of JAX, or of files that have changed since ({state.about}). "
            "Give that command again to go on there, --overwrite to remove it, or "
            "another OUT."
        )
    if refusal is not None and not may_replace:
        raise ValueError(refusal)
    note = None
    if refusal is not None:
        note = f"begins anew: what {folder} held is removed"
    elif state is not None:
        work = Work(folder, state, shape, dtype)
        if not work.has_lost_voxels():
            return work, f"goes on from {folder}"
        note = f"begins anew: {folder / VOXELS} is gone or cut, so that nothing counts"
    _clear(folder)
    return Work(folder, fresh, shape, dtype), note


def _clear(folder):
    """Remove the work's own files; the state first, without which nothing counts."""
    for path in (folder / STATE, folder / VOXELS, *folder.glob(f".{STATE}.*.tmp")):
        path.unlink(missing_ok=True)


def _encode(state: State) -> str:
    values = dataclasses.asdict(state)
    return json.dumps({"digest": _digest(values), "state": values})


def _digest(values) -> str:
    """Without which nothing in a state is believed: no value of it need be checked."""
    text = json.dumps([STATE_VERSION, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_state(path) -> State | None:
    """None where there is none. Raises ValueError for one that is damaged, changed or
    of another version."""
    try:
        content = json.loads(path.read_bytes())
        values = content["state"]
        if content["digest"] != _digest(values):
            raise ValueError("it was changed, or another version wrote it")
        kinds = {"counts": Counts, "slab_counts": Counts, "statistics": Statistics}
        return State(**values | {name: kinds[name](**values[name]) for name in kinds})
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    except (TypeError, KeyError) as error:
        raise ValueError("it is damaged, or another version wrote it") from error
