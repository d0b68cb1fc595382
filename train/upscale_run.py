"""The steps of an enlargement: intensities, plan, tiles, and the finished TIFF."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from rich.console import Console

from train.data.tiff import Volume, VolumeWriter, scaled_geometry, to_dtype
from train.memory import Budget, Need, bytes_text
from train.normalise import IntensityRange
from train.tile_network import TileNetwork, run_tiled
from train.tile_plan import choose_tiling, halved, smallest_window
from train.tiles import Box, Sizes, Tiling
from train.upscale_report import TileReport
from train.upscale_work import Counts, Stopped, Work

BLOCK_BYTES = 2**24  # of what is read or written at a time, where that is free
SLAB_SHARE = 0.2  # of the budget, for decoded planes
TOLERANCE = 1e-5  # of the range, between tiles and the whole
SAMPLED_PLANES = 5  # a channel, to compare with the intensities of the training data
FOREIGN = 10.0  # times as wide or as narrow a range is not what a network learnt


@dataclass
class Job:
    """What is enlarged, by what, into what."""

    volume: Volume
    network: TileNetwork
    dtype: np.dtype
    work: Work
    console: Console
    should_stop: Callable[[], bool] = lambda: False
    ranges: list[IntensityRange] = field(default_factory=list)
    output_ranges: list[IntensityRange] = field(default_factory=list)
    slab_limit: float = 0.0
    """Bytes of decoded planes that may be kept from window to window."""

    slab: tuple[tuple, np.ndarray] | None = None
    """What is kept: (t, c, first, last plane), planes."""

    @property
    def size(self) -> Sizes:
        """Of each volume of the input: (depth, height, width)."""
        return self.volume.shape[-3:]

    def pause(self) -> None:
        if self.should_stop():
            raise Stopped


def output_arguments(volume: Volume, scale: Sizes, dtype) -> dict[str, Any]:
    """Shape, axes, dtype and geometry of the enlarged volume, for `VolumeWriter`."""
    voxel_size, origin = scaled_geometry(volume.voxel_size, volume.origin, scale)
    finer = [n * s for n, s in zip(volume.shape[-3:], scale, strict=True)]
    return {
        "shape": (*volume.shape[:-3], *finer),
        "axes": volume.axes,
        "dtype": dtype,
        "voxel_size": voxel_size,
        "unit": volume.unit,
        "origin": origin,
        "like": volume,
    }


def fit_ranges(job: Job, percentiles: tuple[float, float]) -> list[IntensityRange]:
    """The intensity range of each channel over all times, so that nothing flickers."""
    sizes = job.volume.sizes
    return [IntensityRange.fit(_blocks(job, c), percentiles) for c in range(sizes["C"])]


def foreign_ranges(job: Job) -> list[str]:
    """Notes on channels whose intensities are far from the ranges that were chosen, by
    a few planes of each."""
    notes = []
    for c, chosen in enumerate(job.ranges):
        times, planes = job.volume.sizes["T"], job.volume.sizes["Z"]
        sample = np.unique(np.linspace(0, planes - 1, SAMPLED_PLANES, dtype=int))
        try:
            own = IntensityRange.fit(_blocks(job, c, [times // 2], sample.tolist()))
        except ValueError:  # no finite voxel: nothing can be compared
            continue
        widths = own.high - own.low, chosen.high - chosen.low
        apart = own.low >= chosen.high or own.high <= chosen.low
        if apart or not 1 / FOREIGN <= widths[0] / widths[1] <= FOREIGN:
            channel = f"of channel {c} " if len(job.ranges) > 1 else ""
            notes.append(
                f"the intensities {channel}are {own.low:.6g} to {own.high:.6g}, far "
                f"from those of the training data, {chosen.low:.6g} to "
                f"{chosen.high:.6g}: --normalise input may do better"
            )
    return notes


def _blocks(
    job: Job,
    c: int,
    times: Sequence[int] | None = None,
    planes: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """A channel, or some planes of it, part by part."""
    sizes = job.volume.sizes
    row_bytes = sizes["X"] * job.volume.dtype.itemsize
    rows = min(max(1, BLOCK_BYTES // row_bytes), sizes["Y"])
    step = max(1, BLOCK_BYTES // (row_bytes * sizes["Y"]))
    if planes is None:
        parts = [slice(z, z + step) for z in range(0, sizes["Z"], step)]
    else:
        parts = [slice(z, z + 1) for z in planes]
    for t in range(sizes["T"]) if times is None else times:
        for part in parts:
            for y in range(0, sizes["Y"], rows):
                job.pause()
                yield job.volume.read(t, c, part, slice(y, y + rows))


def plan(job: Job, budget: Budget, resident: int) -> tuple[Tiling, Need]:
    """The largest windows that fit the budget, and what they take.

    - resident: bytes that are there without any window.

    Raises:
        ValueError: naming the least that would do, where nothing fits.
    """
    model = job.network.model
    axes = (job.size, model.receptive_radius, model.stride)

    def measure(window):
        return memory_of(job, window, resident)

    tiling = choose_tiling(
        *axes,
        measure=lambda window: budget.share(measure(window)),
        guess=lambda window: budget.share(memory_of(job, window, resident, True)),
        fixed=budget.share(Need(0, resident)),
    )
    if tiling is None:
        least = measure(smallest_window(*axes))
        raise ValueError(
            f"--memory must be at least {bytes_text(1.02 * budget.least(least))} for "
            f"this network, of which {bytes_text(resident)} are taken by the program "
            f"itself; got {bytes_text(budget.total)}. Give more, close other programs, "
            "or use a smaller network."
        )
    job.network.keep_only(tiling.window)
    return tiling, measure(tiling.window)


def memory_of(job: Job, window: Sizes, resident: int, is_guess: bool = False) -> Need:
    """What a window takes together with what is there anyway."""
    network = job.network
    need = network.need_by_trace(window) if is_guess else network.need(window)
    return Need(need.device, resident + _host_bytes(job, window), need.largest)


def _host_bytes(job: Job, window: Sizes) -> int:
    """On this side, for one window: as read, as floats, as handed over; its output."""
    points = int(np.prod(window, dtype=np.int64))
    finer = points * int(np.prod(job.network.model.scale))
    copies = 0 if jax.default_backend() == "cpu" else 4 * finer
    slab = _slab_bytes(job, window[0]) if _keeps_slab(job, window[0]) else 0
    return points * (job.volume.dtype.itemsize + 4 + 4) + copies + slab


def plan_text(tiling: Tiling, need: Need, budget: Budget) -> str:
    """One line for people."""
    window, halo = (" x ".join(map(str, n)) for n in (tiling.window, tiling.radius))
    if tiling.count == 1:
        return f"the whole of each volume at once, {_need_text(need, budget)}"
    return (
        f"{tiling.count} windows of {window} a volume, with a halo of {halo}: "
        f"{tiling.recomputed:.2f} times the volume is computed; "
        f"{_need_text(need, budget)}"
    )


def _need_text(need, budget):
    if budget.device is None:
        taken = bytes_text(need.host + need.device)
        return f"about {taken} of {bytes_text(budget.total)}"
    return (
        f"about {bytes_text(need.device)} of {bytes_text(budget.device)} on the device "
        f"and {bytes_text(need.host)} of {bytes_text(budget.total)} here"
    )


def encoded(job: Job, t: int, c: int, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """A part of the input as it is, and as the network takes it: float32, with the low
    end in place of NaN and infinities."""
    raw = _read(job, t, c, box)
    intensity = job.ranges[c]
    result = np.empty(raw.shape, np.float32)
    for plane, target in zip(raw, result, strict=True):
        if plane.dtype.kind == "f":
            plane = plane.astype(np.float64)
            plane[~np.isfinite(plane)] = intensity.low
        with np.errstate(over="ignore"):  # the output will not be finite, and told of
            target[:] = intensity.encode(plane)
    return raw, result


def _read(job, t, c, box):
    """Compressed planes are decoded once for all windows side by side, not for each."""
    depth, *plane = box
    if not _keeps_slab(job, depth.stop - depth.start):
        return job.volume.read(t, c, *box)
    key = (t, c, depth.start, depth.stop)
    if job.slab is None or job.slab[0] != key:
        job.slab = None  # before the next one, not beside it
        job.slab = (key, job.volume.read(t, c, depth))
    return job.slab[1][(slice(None), *plane)]


def _keeps_slab(job: Job, depth: int) -> bool:
    return not job.volume.memory_mapped and _slab_bytes(job, depth) <= job.slab_limit


def _slab_bytes(job: Job, depth: int) -> int:
    return depth * job.size[1] * job.size[2] * job.volume.dtype.itemsize


def check(job: Job, tiling: Tiling) -> str:
    """Compare a part of the volume, as large as a window, in tiles with the whole.

    Raises:
        ValueError: if they differ by more than `TOLERANCE` of the range.
    """
    start = [(n - w) // 2 for n, w in zip(tiling.size, tiling.window, strict=True)]
    box = tuple(slice(a, a + w) for a, w in zip(start, tiling.window, strict=True))
    part = encoded(job, *job.volume.positions[0], box)[1]
    tiles = halved(job.network.tiling(part.shape, part.shape))
    if tiles is None:
        return "the volume is too small for more than one tile"
    whole = job.network(part)
    difference = float(np.abs(run_tiled(job.network, tiles, part) - whole).max())
    extent = float(np.ptp(whole)) or 1.0
    sizes = (" x ".join(map(str, n)) for n in (tiles.window, tiles.size))
    told = (
        "{} windows of {} differ from the whole, {}, by at most {:.3g} of its range"
    ).format(tiles.count, *sizes, difference / extent)
    job.network.keep_only(tiling.window)
    if not difference <= TOLERANCE * extent:
        raise ValueError(f"tiles must equal the whole; {told}. Please report this.")
    return told


def run_tiles(job: Job, tiling: Tiling, report: TileReport) -> None:
    """All that is left of all volumes, into the work's file of voxels.

    Raises:
        Stopped: if that was asked for. ValueError: for an output that is not finite.
    """
    state, positions = job.work.state, job.volume.positions
    while state.volume < len(positions):
        t, c = positions[state.volume]
        if job.network.model.statistic_layers and tiling.count > 1:
            _collect(job, tiling, t, c, report)
        for slab in tiling.slabs:
            stop = slab[0].spans[0].stop
            if stop <= state.slices:
                continue
            for tile in slab[state.tiles :]:
                job.pause()
                counts = _run_tile(job, tile, t, c)
                state.slab_counts.add(counts)
                state.tiles += 1
                if state.tiles == len(slab):
                    state.end_slab(stop)
                if state.slices == tiling.size[0]:
                    state.end_volume()
                job.work.save()
                report.tile(tiling, state)


def _collect(job, tiling, t, c, report):
    statistics = job.work.state.statistics

    def read(tile):
        return encoded(job, t, c, tile.read)[1]

    for _ in statistics.collect(job.network, tiling, read):
        job.work.save()
        report.statistics(tiling, job.work.state)
        job.pause()


def _run_tile(job: Job, tile, t: int, c: int) -> Counts:
    """Compute a tile and write its core, but for slices that are done."""
    work, scale, intensity = job.work, job.network.model.scale, job.output_ranges[c]
    raw, window = encoded(job, t, c, tile.read)
    output = job.network(window, work.state.statistics.rows())
    del window
    done = max(0, work.state.slices - tile.spans[0].start)
    core = [slice(a, b) for a, b in tile.region]
    core[0] = slice(core[0].start + done, core[0].stop)
    counts = Counts()
    if raw.dtype.kind == "f":
        counts.replaced = sum(
            int(np.count_nonzero(~np.isfinite(plane[tuple(core[1:])])))
            for plane in raw[core[0]]
        )
    del raw
    kept, (depth, rows, columns) = tile.kept(scale), tile.place(scale)
    skipped = done * scale[0]
    planes = output[(slice(kept[0].start + skipped, kept[0].stop), *kept[1:])]
    for z, plane in enumerate(planes, start=depth.start + skipped):
        voxels, num_clipped = _decoded(plane, intensity, job.dtype)
        counts.clipped += num_clipped
        work.write(work.state.volume, z, rows, columns, voxels)
    return counts


def _decoded(plane, intensity, dtype):
    # Up to 16 bits float32 is exact enough: its error is a thousandth of a step.
    if dtype.itemsize > 2:
        plane = plane.astype(np.float64)
    plane = intensity.decode(plane)
    if not np.isfinite(plane).all():
        wrong = int(np.count_nonzero(~np.isfinite(plane)))
        raise ValueError(
            f"The output must be finite; {counted(wrong, 'voxel')} of a plane of "
            f"{plane.size:,} {'is' if wrong == 1 else 'are'} not. Look for extreme "
            "values in the input, or NaN in the model's weights."
        )
    return to_dtype(plane, dtype)


def counted(count: int, noun: str) -> str:
    """Such as 1 voxel, or 2,000 voxels."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def write_output(job: Job, out, provenance: dict, **arguments) -> tuple[str, ...]:
    """Make the TIFF of voxels that are all there; returns the writer's notes."""
    volumes, depth, height, width = job.work.shape
    planes = max(1, BLOCK_BYTES // (height * width * job.dtype.itemsize))
    with VolumeWriter(out, provenance=provenance, **arguments) as writer:
        for volume in range(volumes):
            for z in range(0, depth, planes):
                job.pause()
                stop = min(depth, z + planes)
                writer.append(job.work.read(volume, z, stop))
    return writer.notes
