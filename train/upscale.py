"""Enlarge a volume with a saved network: ``python -m train.upscale MODEL IN OUT``.

From TIFF to TIFF, tile by tile in constant memory, exactly as the whole volume at once
would be. OUT appears when it is finished. What is done of it lies in a hidden folder
beside it, .NAME.upscale, which takes as much room as OUT uncompressed; a run that was
stopped or killed goes on from there when the same command is given again. Another
command with the same OUT is refused, unless it is told to --overwrite.

Exit status: 0, or 2 for a mistake in the options or the files, or 130 for Ctrl-C.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxops import host_memory
from jaxops.backend import Backend, BackendError, select_backend
from train import memory
from train.data.tiff import Volume, VolumeWriter, open_volume
from train.data.tiff_write import OME_DTYPES
from train.interrupt import StopRequest
from train.memory import bytes_text
from train.normalise import IntensityRange
from train.report import clock
from train.settings import parse
from train.tile_network import FORM, TileNetwork
from train.tile_plan import halved
from train.upscale_model import SavedModel, read_model
from train.upscale_report import TileReport
from train.upscale_run import (
    SLAB_SHARE,
    Job,
    check,
    counted,
    fit_ranges,
    foreign_ranges,
    memory_of,
    output_arguments,
    plan,
    plan_text,
    run_tiles,
    write_output,
)
from train.upscale_settings import UpscaleSettings
from train.upscale_work import (
    Stopped,
    Work,
    folder_of,
    has_work,
    key_of,
    open_work,
)

# What ImageJ and OME lack becomes what holds the same values, or nearly so.
NEAR_DTYPES = {"float16": "float32", "int64": "float64", "uint64": "float64"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Enlarge as the command line says; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(UpscaleSettings, "train.upscale", arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    hints: list[str] = []
    try:
        upscale(options, console, hints)
    except (ValueError, OSError, BackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except (Stopped, KeyboardInterrupt):
        print("\nStopped.", file=sys.stderr)
        status = 130
    else:
        return 0
    for hint in hints:
        print(hint, file=sys.stderr)
    return status


def upscale(options: UpscaleSettings, console: Console, hints: list[str]) -> None:
    """Read, enlarge, write.

    - hints: where it raises, what is to be told behind the error is added to them.

    Raises:
        BackendError: if the backend cannot be had.
        ValueError, OSError: if model and volume cannot be read or do not fit each
            other, nothing fits the memory or the disk, OUT cannot be written, or what
            another command has done of it is there.
        Stopped: if somebody asked for it.
    """
    start = time.monotonic()
    options.check_paths()
    if options.memory is not None:
        memory.parse_bytes(options.memory)
    if not has_work(options.out):
        _check_new(options)
    volume = open_volume(options.input, series=options.series, axes=options.axes)
    options.check_apart(volume)
    # Kept memory would lie beside that of other windows: the budget is for all of it.
    os.environ.setdefault(host_memory.SWITCH, "0")
    memory.give_back_freed_memory()
    backend = select_backend(options.backend)
    console.print(f"backend  {backend}")
    saved = read_model(options.model_file())
    if options.normalise == "model" and saved.intensity is None:
        raise ValueError(
            "--normalise model needs the intensities of the training data, and "
            f"{options.model} was saved without them. Use --normalise input."
        )
    console.print(f"model    {saved.text}")
    console.print(f"input    {volume.description}")
    dtype = _dtype(options, volume, console)
    arguments = {
        **output_arguments(volume, saved.model.scale, dtype),
        "compression": options.compression,
    }
    _try_writing(options.out, arguments, console)
    size = arguments["shape"][-3:]
    key = _key(options, volume, dtype, backend)
    shape = (len(volume.positions), *size)
    about = (
        f"{volume.name} with {options.model} to {dtype}, --normalise "
        f"{options.normalise}, {backend.platform}, jax {jax.__version__}"
    )
    opened = open_work(options.out, key, shape, dtype, about, options.overwrite)
    with opened as (work, what_became), _hinting(work, hints):
        network = TileNetwork(saved.model, saved.variables, volume.shape[-3])
        job = Job(volume, network, dtype, work, console)
        state = work.state
        is_complete = state.volume == len(volume.positions)
        if is_complete and _is_made(options.out, key):  # killed while it tidied up
            work.remove()
            console.print(f"{options.out} is finished already.")
            return
        _check_new(options)
        _check_disk(options.out, work)
        if what_became is not None:
            console.print(f"work     {what_became}")
        with StopRequest() as job.should_stop:
            tiling = None if is_complete else _plan(options, job)
            work.start()
            _choose_ranges(options, job, saved)
            if tiling is not None:
                _run(options, job, tiling)
            provenance = _provenance(options, job, key)
            notes = write_output(job, options.out, provenance, **arguments)
        counts = state.counts
        work.remove()
    console.print(f"wrote    {options.out}, in {clock(time.monotonic() - start)}")
    for note in (*notes, *_count_notes(counts, shape, dtype)):
        console.print(f"note     {note}")


@contextlib.contextmanager
def _hinting(work: Work, hints: list[str]) -> Iterator[None]:
    """Where the block raises, tell of what is done, and no more of it than is true."""
    try:
        yield
    except (Stopped, KeyboardInterrupt, OSError) as error:
        is_kept = work.has_progress if isinstance(error, OSError) else work.is_kept
        if is_kept:
            hints.append(
                f"What is done is kept in {work.folder}: the same command goes on from "
                "there."
            )
        raise
    except ValueError:  # the same command may well meet it again
        if work.has_progress:
            hints.append(f"What is done is kept in {work.folder}.")
        raise


def _count_notes(counts, shape, dtype) -> list[str]:
    num_voxels, notes = int(np.prod(shape, dtype=np.int64)), []
    if counts.replaced:
        are = "is" if counts.replaced == 1 else "are"
        notes.append(
            f"{counted(counts.replaced, 'voxel')} of the input {are} NaN or infinite; "
            "the network was given the low end of the intensities there"
        )
    if counts.clipped:
        were, are = ("was", "is") if counts.clipped == 1 else ("were", "are")
        notes.append(
            f"{counts.clipped:,} of {counted(num_voxels, 'voxel')} "
            f"({counts.clipped / num_voxels:.2%}) {were} beyond {dtype} and {are} "
            "clipped"
        )
    return notes


def _check_new(options):
    if options.out.exists() and not options.overwrite:
        raise ValueError(
            f"OUT must be a new file; {options.out} is there. Replace it with "
            "--overwrite, or choose another name."
        )


def _dtype(options, volume: Volume, console) -> np.dtype:
    if options.dtype != "like":
        return np.dtype(options.dtype)
    name = volume.dtype.name
    if name not in OME_DTYPES and name in NEAR_DTYPES:
        console.print(f"dtype    {NEAR_DTYPES[name]}: TIFF programs know no {name}")
        name = NEAR_DTYPES[name]
    return np.dtype(name)


def _try_writing(out: Path, arguments: dict[str, Any], console) -> None:
    """Find what can't be written before the work, not behind it."""
    writer = VolumeWriter(out, **arguments)
    writer.abandon()
    axes = "x".join(map(str, arguments["shape"]))
    console.print(
        f"output   {out}: {arguments['axes']} {axes} {arguments['dtype']}, "
        f"{'ImageJ' if writer.format == 'imagej' else 'OME'}"
    )


def _key(options: UpscaleSettings, volume: Volume, dtype, backend: Backend) -> str:
    return key_of(
        options.model_file(),
        sorted({plane.path for plane in volume.planes}),
        axes=volume.axes,
        shape=list(volume.shape),
        asked=[options.axes, options.series, options.normalise],
        dtype=dtype.name,
        runs=[backend.platform, backend.device_kind, jax.__version__, FORM],
    )


def _is_made(out: Path, key: str) -> bool:
    """Whether OUT is there, and what this command makes."""
    try:
        provenance = open_volume(out).provenance
    except (FileNotFoundError, ValueError):  # whatever is there is something else
        return False
    return provenance is not None and provenance.get("key") == key


def _check_disk(out: Path, work) -> None:
    folder = folder_of(out).parent
    needed = 2 * work.num_bytes - work.num_written
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"The disk of {folder} must have {bytes_text(needed)} free, for the output "
            f"and as much for the work until it is done; it has {bytes_text(free)}. "
            "Make room, or choose another OUT."
        )


def _choose_ranges(options, job: Job, saved: SavedModel) -> None:
    """Those of work that goes on; or as --normalise says."""
    state = job.work.state
    if state.ranges is not None:
        job.ranges = [IntensityRange.from_dict(values) for values in state.ranges]
    elif options.normalise == "input":
        job.ranges = fit_ranges(job, saved.percentiles)
    else:
        job.ranges = [saved.intensity] * job.volume.sizes["C"]
        for note in foreign_ranges(job):
            job.console.print(f"note     {note}")
    if state.ranges is None:
        state.ranges = [intensity.to_dict() for intensity in job.ranges]
        job.work.save()
    for c, intensity in enumerate(job.ranges):
        channel = f"channel {c}: " if len(job.ranges) > 1 else ""
        job.console.print(f"range    {channel}{intensity}")
        output = saved.output_range(intensity)
        job.output_ranges.append(output)
        if output != intensity:
            job.console.print(
                f"range    {channel}0 to 1 become {output.low:.6g} to {output.high:.6g}"
            )


def _run(options, job: Job, tiling) -> None:
    """Compute all tiles that are left."""
    if options.check:
        job.console.print(f"check    {check(job, tiling)}")
    with TileReport(len(job.volume.positions), job.console) as report:
        while True:
            try:
                run_tiles(job, tiling, report)
                return
            except (RuntimeError, MemoryError) as error:
                if not memory.is_out_of_memory(error):
                    raise
                smaller = halved(tiling)
                if smaller is None:
                    raise ValueError(
                        "The memory is too small for the smallest window, "
                        f"{tiling.window}. Close other programs, take --backend cpu, "
                        "or a smaller network."
                    ) from error
            tiling = smaller
            job.network.keep_only(tiling.window)
            job.work.state.change_window(tiling.window)
            job.work.save()
            window = " x ".join(map(str, tiling.window))
            job.console.print(
                f"memory   the device ran out of it: going on with {tiling.count} "
                f"windows of {window} a volume"
            )


def _plan(options, job: Job):
    """The tiles: those of work that goes on, where they still fit."""
    budget = memory.budget(options.memory)
    job.slab_limit = SLAB_SHARE * budget.total
    resident = memory.resident_memory() + memory.OVERHEAD
    state = job.work.state
    tiling = need = None
    if state.window is not None:
        tiling = job.network.tiling(job.size, state.window)
        need = memory_of(job, tiling.window, resident)
    if tiling is None or budget.share(need) > 1:
        tiling, need = plan(job, budget, resident)
        state.change_window(tiling.window)
    job.console.print(f"plan     {plan_text(tiling, need, budget)}")
    return tiling


def _provenance(options, job: Job, key: str) -> dict[str, Any]:
    """How the output was made: nothing in it differs between runs of one command."""
    model = job.network.model
    digest = hashlib.sha256(options.model_file().read_bytes()).hexdigest()
    made = {
        "command": "train.upscale",
        "model": {"class": type(model).__name__, "sha256": digest},
        "input": job.volume.name,
        "scale": list(model.scale),
        "halo": list(model.receptive_radius),
        "intensity": [intensity.to_dict() for intensity in job.ranges],
        "normalise": options.normalise,
        "jax": jax.__version__,
        "key": key,
    }
    if job.volume.provenance is not None:
        made["input_provenance"] = job.volume.provenance
    return made


if __name__ == "__main__":
    sys.exit(main())
