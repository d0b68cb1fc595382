"""A folder that one process at a time works in."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where two processes in one folder are not told apart
    fcntl = None

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, message: str) -> Iterator[None]:
    """Keep a folder to this process while the block lasts.

    The system gives the lock back when a process ends, however it ends.

    Raises:
        ValueError: with that message, if another process has it.
    """
    with open(folder / LOCK, "ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(message) from error
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
