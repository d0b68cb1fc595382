"""What an enlargement is told: typed, read by tyro."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from train.data.tiff import SUFFIXES, Volume
from train.folder import model_file

LONGEST_NAME = 240  # bytes: file systems take 255, and hidden names are longer


@dataclass(frozen=True)
class UpscaleSettings:
    """Enlarge a volume with a saved super-resolution network, from TIFF to TIFF.

    Volumes may be larger than memory. Axes, voxel type, compression, voxel size, origin
    and metadata are kept; times and channels are enlarged one by one. If it was
    stopped, the same command goes on where it was.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A model.safetensors, or the folder of a finished run."""

    input: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN")]
    """A TIFF, a file of an OME set, or a folder of TIFFs with one slice each."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The TIFF to write."""

    backend: Literal["auto", "cpu", "gpu", "metal"] = "auto"
    """Device to run on; auto takes the best that is there."""

    memory: str | None = None
    """What the program may take, such as 2GB or 800MB; by default half of what is free.
    On a GPU with memory of its own, of each."""

    check: bool = False
    """Before the work, compare a part of the volume in tiles with the same as a
    whole."""

    axes: str | None = None
    """Names of the file's axes, slowest first, such as ZYX or TCZYX, where it has none
    or wrong ones."""

    series: int | None = None
    """Which image of a file that holds several, from 0."""

    normalise: Literal["input", "model"] = "input"
    """Intensities that the network takes as 0 and 1: percentiles of each channel of
    this volume, or those of the training data, saved with the model."""

    dtype: Literal[
        "like", "uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"
    ] = "like"
    """Voxel type of the output; like the input's, unless told otherwise."""

    compression: Literal[
        "like", "none", "deflate", "lzw", "zstd", "packbits", "lzma"
    ] = "like"
    """Compression of the output; like the input's, unless told otherwise."""

    overwrite: bool = False
    """Replace OUT if it is there, and unfinished work of another command for it."""

    def model_file(self) -> Path:
        """Of a folder, the file that a finished run has in it; ValueError if there is
        none."""
        return model_file(self.model)

    def check_paths(self) -> None:
        """Raise ValueError where OUT would not be a TIFF, or replace what is read."""
        if self.out.suffix.lower() not in SUFFIXES:
            raise ValueError(f"OUT must end in .tif or .tiff; got {self.out}.")
        length = len(os.fsencode(os.path.basename(os.path.realpath(self.out))))
        if length > LONGEST_NAME:
            raise ValueError(
                f"The name of OUT must be at most {LONGEST_NAME} bytes long; got one "
                f"of {length}. Choose a shorter one."
            )
        if self.out.is_dir():
            raise ValueError(f"OUT must be a file; {self.out} is a folder.")
        self._check_apart(self.input)
        self._check_apart(self.model_file())
        if self.input.is_dir() and self.out.resolve().parent == self.input.resolve():
            raise ValueError(
                f"OUT must not lie in the folder that is read, as one more slice of "
                f"it; got {self.out}. Choose another folder."
            )

    def check_apart(self, volume: Volume) -> None:
        """Raise ValueError where OUT would replace any file of the volume: IN may name
        one of a set, or hold links."""
        for path in sorted({plane.path for plane in volume.planes}):
            self._check_apart(path)

    def _check_apart(self, read):
        # The path tells where OUT is not there yet; two paths may be one file.
        is_same = os.path.realpath(read) == os.path.realpath(self.out) or (
            self.out.exists() and os.path.exists(read) and self.out.samefile(read)
        )
        if is_same:
            raise ValueError(
                f"OUT must not be a file that is read; {self.out} is {read}. Choose "
                "another name."
            )
