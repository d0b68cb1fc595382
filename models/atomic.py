"""Files that are written whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path to write to, which becomes ``path`` once the block ends well.

    It lies in the same folder, which is made if it is missing; it is flushed to the
    disk and then renamed over ``path``. Where the block raises, or the process dies,
    ``path`` stays what it was.

    Raises:
        OSError: of the fitting class, with the path, where it can't be written.
    """
    target = Path(os.path.realpath(path))  # a link stays, and its target is replaced
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        for parent in target.parents:
            if parent.exists() and not parent.is_dir():
                raise NotADirectoryError(None, f"{parent} is no folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # some writers make a private file of their own
    except OSError as error:
        raise type(error)(
            f"{os.fspath(path)} can't be written ({error.strerror}): choose a file in "
            "a folder that you may write to"
        ) from error
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
