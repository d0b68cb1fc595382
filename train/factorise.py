"""Make a trained network cheaper: ``python -m train.factorise MODEL OUT --rank 2``.

Dense 3x3x3 kernels become depth and plane factors, the best ones of a rank (SVD). Told
are the number of weights, the time of a forward pass and the PSNR, before and after, on
a volume of your own or a synthetic one that is made coarser as in training. The file
that is written is a model like any other: ``python -m train.upscale`` takes it.

The exit status is 0, or 2 for a mistake.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console

from jaxops.backend import BackendError, select_backend, to_device
from models import load, save
from models.factorised import factorised
from train.folder import check_writable, model_file
from train.settings import parse, typed
from train.sr_settings import MakeSettings, SRSettings
from train.volume_metrics import psnr
from train.volume_sets import data_range, load_sets

ROUNDS = 5  # of timing, the two networks in turns
MOST_VOXELS = 2**17  # of low resolution, that are timed and compared


@dataclass(frozen=True)
class FactoriseSettings:
    """Replace the dense 3x3x3 kernels of a trained network by cheaper factors."""

    model: tyro.conf.Positional[Path]
    """A model.safetensors of a volume network with exact convolutions, or the folder of
    its run."""

    out: tyro.conf.Positional[Path]
    """The file to write, a .safetensors."""

    rank: int = 2
    """Terms a kernel. For separable kernels 1 and 2 save time, 3 is exact; for 2plus1d
    it is the channels between plane and depth."""

    conv: Literal["separable", "2plus1d"] = "separable"
    """Depth taps, then a plane; or a plane, then depth taps."""

    volume: Path | None = None
    """High-resolution volume (TIFF) to measure the change on; else a synthetic one."""

    backend: Literal["auto", "cpu", "gpu", "metal"] = "auto"
    """Device to measure on."""

    overwrite: bool = False
    """Replace OUT if it exists."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as the command line says; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(FactoriseSettings, "train.factorise", arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    try:
        run(options, console)
    except (ValueError, OSError, BackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: FactoriseSettings, console: Console) -> None:
    """Factorise, measure, write.

    Raises:
        ValueError, OSError, BackendError: for what can't be done; nothing is written.
    """
    if options.out.exists() and not options.overwrite:
        raise ValueError(
            f"{options.out} exists. Replace it by --overwrite, or choose another name."
        )
    if options.out.suffix != ".safetensors":
        raise ValueError(f"The file to write ends in .safetensors; got {options.out}.")
    path = model_file(options.model)
    check_writable(options.out.absolute().parent)
    console.print(f"backend  {select_backend(options.backend)}")
    model, variables, extra = load(path)
    cheaper, changed, errors = factorised(model, variables, options.conv, options.rank)
    worst = max(errors, key=errors.get)
    mean = np.mean(list(errors.values()))
    console.print(
        f"kernels  {len(errors)} factorised, relative error {mean:.2%} on average, "
        f"{errors[worst]:.2%} at most ({worst})"
    )
    try:
        made = made_as_in_training(extra)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    low, truth = _test_volume(options, model, made)
    rows = {"dense": (model, variables), "factorised": (cheaper, changed)}
    outputs, seconds = _measure(rows, low)
    console.print(f"{'':10}     weights  forward (ms)  PSNR (dB)")
    note = {"conv": options.conv, "rank": options.rank}
    for name, (_, weights) in rows.items():
        number = sum(leaf.size for leaf in jax.tree.leaves(weights["params"]))
        value = psnr(truth, outputs[name], data_range(truth))
        note[f"psnr_{name}"] = value
        console.print(
            f"{name:10}  {number:10,}  {1000 * seconds[name]:12.1f}  {value:9.2f}"
        )
    for name in ("training", "tests", "best"):  # of the dense network
        extra.pop(name, None)
    save(options.out, cheaper, changed, **{**extra, "factorised": note})
    console.print(f"made {options.out}")


def made_as_in_training(extra: dict[str, Any]) -> MakeSettings:
    """How low-resolution volumes were made for the network, or by default.

    Raises:
        ValueError: if what is saved is no such settings.
    """
    settings = extra.get("settings", {})
    if not isinstance(settings, dict) or "make" not in settings:
        return MakeSettings()
    return typed(MakeSettings, settings["make"], "settings.make")


def _test_volume(options, model, made):
    """Encoded (z, y, x) volumes, low and high, as `train.sr` holds them out."""
    if options.volume is None and made.psf is not None:
        made = MakeSettings()  # a measured spread of light is of no use there
    sets = load_sets(
        SRSettings(
            data=() if options.volume is None else (options.volume,),
            scale=tuple(model.scale),
            holdout=0.5,
            make=made,
        )
    )
    low, high = sets.tests[0].low, sets.tests[0].high
    shape = list(low.shape)
    while np.prod(shape) > MOST_VOXELS:
        shape[int(np.argmax(shape))] //= 2
    finer = (n * s for n, s in zip(shape, model.scale, strict=True))
    return low[tuple(map(slice, shape))], high[tuple(map(slice, finer))]


def _measure(rows, low):
    """Outputs, and the median seconds of a forward pass, by name."""
    x = to_device(low[None, ..., None])
    programs = {name: jax.jit(model.apply) for name, (model, _) in rows.items()}
    weights = {
        name: jax.tree.map(to_device, variables)
        for name, (_, variables) in rows.items()
    }
    outputs = {
        name: np.asarray(program(weights[name], x))[0, ..., 0]
        for name, program in programs.items()
    }
    times = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(weights[name], x))
            times[name].append(time.perf_counter() - start)
    return outputs, {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    sys.exit(main())
