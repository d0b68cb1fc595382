"""The folder of a run: which one, whether it can be written, and what is in it."""

import contextlib
import uuid
from pathlib import Path

from train.checkpoint import BEST, LAST
from train.lock import locked
from train.settings import CONFIG

METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
PICTURE = "prediction.png"
SAMPLES = "samples.npz"
RUNS = Path("runs")


def is_run(folder: Path) -> bool:
    """Whether a run was begun there."""
    return any((folder / name).exists() for name in (CONFIG, METRICS, LAST, MODEL))


def is_finished(folder: Path) -> bool:
    """Whether a run ended there; the picture is the last file that it makes."""
    return (folder / MODEL).exists() and (folder / PICTURE).exists()


def has_settings(folder: Path) -> bool:
    """Whether the settings of a run are there."""
    return (folder / CONFIG).exists()


def model_file(path: Path) -> Path:
    """A model's file: the path, or of the folder of a finished run the one in it.

    Raises:
        ValueError: if there is none.
    """
    if path.is_dir():
        path = path / MODEL
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. Give a model.safetensors, or the folder of a "
            "finished run, such as runs/darcy."
        )
    return path


def newest() -> Path | None:
    """The run in runs/ that was written to last, or None."""
    runs = [folder for folder in RUNS.glob("*") if has_settings(folder)]
    return max(runs, key=lambda folder: folder.stat().st_mtime, default=None)


def make_fresh(name: str) -> Path:
    """Make the one of runs/NAME, runs/NAME-2, ... that comes after all there are."""
    number = max(_numbered(name), default=(0, None))[0] + 1
    while True:
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # another run took it
            number += 1
        else:
            return folder


def check_writable(folder: Path) -> None:
    """Make a folder and see that files can be made in it.

    Raises:
        ValueError: if it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex}.tmp"
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"The run's folder must be one that can be written; got {folder}: "
            f"{error.strerror or error}. Choose another with --out."
        ) from error


def reserved(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keep a run's folder to this process while the block lasts.

    Raises:
        ValueError: if another process trains there.
    """
    return locked(
        folder,
        f"A folder takes one run at a time; another process trains in {folder}. Wait "
        "for it, or choose another folder with --out.",
    )


def remove_run(folder: Path) -> None:
    """Remove a run's files, no others; first those that make it finished or alive."""
    for name in (MODEL, PICTURE, SAMPLES, LAST, BEST, METRICS, CONFIG):
        (folder / name).unlink(missing_ok=True)
    remove_leftovers(folder)
    remove_empty(folder / Path(LAST).parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of a run that was killed."""
    for name in (MODEL, PICTURE, SAMPLES, BEST, LAST, CONFIG):
        path = folder / name
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with contextlib.suppress(OSError):  # not there, or not empty: both are well
        folder.rmdir()


def _numbered(name):
    """Existing (number, folder) of runs/NAME, which is number 1, runs/NAME-2, ..."""
    found = []
    for folder in RUNS.iterdir() if RUNS.is_dir() else ():
        number = folder.name.removeprefix(f"{name}-")
        if folder.name == name:
            found.append((1, folder))
        elif number != folder.name and number.isdecimal():
            found.append((int(number), folder))
    return found
