"""Files that can be made anew: under the user's cache folder, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import time
from pathlib import Path

import numpy as np

from models.atomic import replace_file

DIGEST_SIZE = hashlib.sha256().digest_size
STALE_SECONDS = 24 * 3600


def cache_folder() -> Path:
    """The folder for files that can be made anew; it need not exist yet.

    JAXOPS_CACHE if set, else the folder `jaxops` in the user's cache folder:
    ~/Library/Caches on macOS, LOCALAPPDATA on Windows, else XDG_CACHE_HOME or ~/.cache.
    """
    if chosen := os.environ.get("JAXOPS_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxops"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():  # unset, or relative: the XDG rules say to ignore it
        base = Path.home() / ".cache"
    return base / "jaxops"


class DamagedFile(ValueError):
    """A cache file is not what was written."""


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz file that ends in the SHA-256 digest of what stands before it.

    The file is whole or absent at every moment, also if this process is killed or
    another one writes the same file; folders are made. Raises OSError.
    """
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    _remove_stale(path)
    with replace_file(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote.

    Raises FileNotFoundError; DamagedFile if the digest does not fit; other OSErrors.
    """
    content = path.read_bytes()
    body, digest = content[:-DIGEST_SIZE], content[-DIGEST_SIZE:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedFile(f"{path} is damaged: its checksum does not fit")
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _remove_stale(path: Path) -> None:
    """Remove what killed processes left of this file; writing takes seconds, not days.

    Another process may remove the same leftover at the same time.
    """
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                leftover.unlink()
