"""The volumes that a super-resolution run trains and tests on."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data.degrade import Degradation, read_psf
from train.data.patches import (
    low_region,
    pair_up,
    split,
    volume_parts,
)
from train.data.phantom import phantom
from train.data.tiff import Volume, files_in, open_volume
from train.normalise import IntensityRange
from train.sr_settings import SRSettings

DEFAULT_SCALE = (1, 2, 2)
# Of the synthetic volume: photons at full intensity, and read noise.
PHANTOM_PHOTONS, PHANTOM_NOISE = 200.0, 0.01
MOST_TESTED = 2**25  # high-resolution voxels of a volume that is tested on


@dataclass(frozen=True)
class HeldOut:
    """A part of a volume that is not trained on; (z, y, x) float32, encoded.

    ``is_finite`` tells the voxels of high that are numbers in the file; None: all.
    """

    name: str
    low: np.ndarray
    high: np.ndarray
    is_finite: np.ndarray | None = None


@dataclass(frozen=True)
class VolumeSets:
    """All that a run trains and tests on.

    Attributes:
        pairs: (low, high) volumes (z, y, x), of any dtype, perhaps still in their file.
        ranges: of each pair: what encodes low, and what encodes high.
        tests: the parts held out.
        scale: (z, y, x), high over low.
        degradation: what made low of high; None where both were read.
        intensity, target_intensity: ranges of all low, and of all high volumes.
        voxel_size, unit: of the high-resolution volumes, (z, y, x).
        lines: what to tell of them.
        digest: tells them from other data.
    """

    pairs: list[tuple]
    ranges: list[tuple[IntensityRange, IntensityRange]]
    tests: list[HeldOut]
    scale: tuple[int, int, int]
    degradation: Degradation | None
    intensity: IntensityRange
    target_intensity: IntensityRange
    voxel_size: tuple[float, float, float]
    unit: str
    lines: list[str]
    digest: str


def load_sets(options: SRSettings) -> VolumeSets:
    """Read or make the volumes, and hold out a part of each.

    Raises:
        ValueError, OSError: for files that can't be read, or don't fit.
    """
    if not options.data:
        return _phantom_sets(options)
    volumes = _open_all(options.data, options)
    lines = [f"data     {volume.description}" for volume in volumes]
    if options.low:
        lows = _open_all(options.low, options)
        lines += [f"low      {volume.description}" for volume in lows]
        couples, scale = pair_up(lows, volumes)
        lines += [f"pair     {low.name} -> {high.name}" for low, high in couples]
        if options.scale and _sizes(options.scale) != scale:
            raise ValueError(
                f"--scale must be what the files have: {scale}; got {options.scale}. "
                "Leave it out."
            )
        degradation = None
    else:
        couples = [(None, volume) for volume in volumes]
        scale, degradation = _degradation(options)
        lines.append(f"low      made: {_told(degradation, options)}")
    named = []
    for low, high in couples:
        try:
            regions = split(
                high.shape[-3:], scale, options.holdout, options.holdout_axis
            )
        except ValueError as error:
            raise ValueError(f"{high.name}: {error}") from error
        highs = [volume_parts(high, region) for region in regions]
        if low is None:
            lows = [[None] * len(high.positions)] * 2
        else:
            lows = [volume_parts(low, low_region(r, scale)) for r in regions]
        for i, (t, c) in enumerate(high.positions):
            name = high.name + (f", t {t}, c {c}" if len(high.positions) > 1 else "")
            named.append((name, *((lows[k][i], highs[k][i]) for k in (0, 1))))
    sizes = volumes[0].voxel_size
    known = sizes is not None and None not in sizes
    return _sets(
        options,
        named,
        scale,
        degradation,
        tuple(sizes) if known else (1.0, 1.0, 1.0),
        (volumes[0].unit or "unit") if known else "voxel",
        lines,
    )


def _phantom_sets(options):
    volume = phantom(seed=options.seed)
    scale, degradation = _degradation(options, PHANTOM_PHOTONS, PHANTOM_NOISE)
    regions = split(volume.shape, scale, options.holdout, options.holdout_axis)
    shape = " x ".join(map(str, volume.shape))
    lines = [
        f"data     synthetic: tubes and blobs, {shape} (z, y, x)",
        f"low      made: {_told(degradation, options)}",
    ]
    parts = ((None, np.ascontiguousarray(volume[region])) for region in regions)
    named = [("synthetic", *parts)]
    return _sets(options, named, scale, degradation, (1.0, 1.0, 1.0), "voxel", lines)


def _sets(options, named, scale, degradation, voxel_size, unit, lines):
    """``named``: name, (low, high) to train on, (low, high) to test on."""
    pairs, ranges, tests = [], [], []
    made = degradation is not None
    digest = hashlib.sha256()
    for name, (low, high), (test_low, test_high) in named:
        test_high = _middle(test_high, scale)
        test_low = None if test_low is None else _middle(test_low, (1, 1, 1), scale)
        if made:
            low, test_low = (
                degradation.reduce(np.asarray(part[:, :, :]))
                for part in (high, test_high)
            )
        low_range = _fit(name, low)
        high_range = low_range if made else _fit(name, high)
        lines.append(f"range    {name}: {low_range}")
        test_low = low_range.encode(test_low.astype(np.float32))
        if made:
            rng = np.random.Generator(np.random.PCG64([options.seed, len(tests)]))
            test_low = degradation.add_noise(test_low, rng)
        test_high = high_range.encode(test_high.astype(np.float32))
        pairs.append((low, high))
        ranges.append((low_range, high_range))
        for volume in (low, high, test_low, test_high):
            _update(digest, volume)
        is_finite = np.isfinite(test_high)
        if not is_finite.any():
            raise ValueError(
                f"{name}: the part held out must have finite voxels, and has none. "
                "Hold out another part: --holdout-axis, --holdout."
            )
        missing = is_finite.size - np.count_nonzero(is_finite)
        if missing:
            lines.append(
                f"note     {name}: NaN or infinite voxels in the part held out: "
                f"{missing}; PSNR and NRMSE leave them out, and there is no SSIM"
            )
        for volume in (test_low, test_high):
            np.nan_to_num(volume, copy=False, nan=0.0, posinf=1.0, neginf=0.0)
        known = is_finite if missing else None
        tests.append(HeldOut(name, test_low, test_high, known))
    lows, highs = zip(*pairs, strict=True)
    intensity, target = ranges[0]  # of a single pair: it is not read once more
    if len(pairs) > 1:
        intensity = IntensityRange.fit(_slabs(lows))
        target = intensity if made else IntensityRange.fit(_slabs(highs))
    return VolumeSets(
        pairs,
        ranges,
        tests,
        scale,
        degradation,
        intensity,
        target,
        voxel_size,
        unit,
        lines,
        digest.hexdigest(),
    )


def _fit(name, volume):
    try:
        return IntensityRange.fit(_slabs([volume]))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _degradation(options, photons=None, noise=0.0):
    """The scale, and what makes volumes that much coarser."""
    scale = _sizes(options.scale or DEFAULT_SCALE)
    make = options.make
    if make.psf is not None:
        blur = read_psf(make.psf)
    elif make.blur:
        blur = make.blur * 3 if len(make.blur) == 1 else make.blur
    else:
        blur = tuple(matched_blur(s) for s in scale)
    photons = photons if make.photons is None else make.photons or None
    noise = noise if make.noise is None else make.noise
    return scale, Degradation(scale, blur, photons, noise)


def data_range(truth: np.ndarray) -> float:
    """For PSNR and SSIM: largest minus smallest, or 1 where all is the same."""
    return float(np.ptp(truth)) or 1.0


def matched_blur(scale: int) -> float:
    """Standard deviation, in fine voxels, that joining voxels calls for beforehand.

    A microscope whose voxels are half the width of its spread (Nyquist) has a Gaussian
    of 0.85 voxels. To be that of the coarse voxels, the fine volume's own such spread
    and the (s^2 - 1) / 12 of the averaging need this much besides.
    """
    return float(np.sqrt((0.85**2 - 1 / 12) * (scale**2 - 1)))


def _told(degradation, options):
    if options.make.psf is not None:
        blur = f"blurred with {options.make.psf}"
    else:
        sigmas = ", ".join(f"{sigma:.2f}" for sigma in degradation.blur)
        blur = f"Gaussian blur {sigmas} voxels"
    parts = [blur, f"cells of {' x '.join(map(str, degradation.scale))} averaged"]
    if degradation.poisson is not None:
        parts.append(f"{degradation.poisson:g} photons")
    if degradation.gaussian:
        parts.append(f"noise {degradation.gaussian:g}")
    return ", ".join(parts) + " (z, y, x)"


def _sizes(scale: Sequence[int]) -> tuple[int, int, int]:
    return tuple(scale) * 3 if len(scale) == 1 else tuple(scale)


def _open_all(paths: Sequence[Path], options: SRSettings) -> list[Volume]:
    """All volumes of files and folders, in natural order within a folder."""
    how = {"axes": options.read.axes, "series": options.read.series}
    volumes = []
    for path in paths:
        if not path.is_dir():
            volumes.append(open_volume(path, **how))
            continue
        files = files_in(path)
        alone = [open_volume(file, **how) for file in files[:2]]
        if len(alone) < 2 or all(v.sizes["Z"] * len(v.positions) == 1 for v in alone):
            volumes.append(open_volume(path, **how))  # one slice a file
            continue
        seen = set()  # an OME set is found through each of its files
        for file in files:
            volume = open_volume(file, **how)
            planes = {str(Path(plane.path).resolve()) for plane in volume.planes}
            if not planes <= seen:
                volumes.append(volume)
            seen |= planes
    return volumes


def _middle(volume, scale, outer=(1, 1, 1)):
    """At most MOST_TESTED high-resolution voxels, cut at the end of z and of y.

    ``outer``: how many of these one voxel stands for, an axis."""
    z, y, x = (n * o for n, o in zip(volume.shape, outer, strict=True))
    step_z, step_y = scale[0] * outer[0], scale[1] * outer[1]
    z = min(z, max(MOST_TESTED // (y * x) // step_z, 1) * step_z)
    y = min(y, max(MOST_TESTED // (z * x) // step_y, 1) * step_y)
    return np.asarray(volume[: z // outer[0], : y // outer[1], :])


def _slabs(volumes) -> Iterator[np.ndarray]:
    for volume in volumes:
        depth = max(1, 2**22 // max(1, volume.shape[1] * volume.shape[2]))
        for start in range(0, volume.shape[0], depth):
            yield np.asarray(volume[start : start + depth, :, :])


def _update(digest, volume):
    """Shape, dtype and three planes: enough to notice that it is another one."""
    digest.update(f"{volume.shape} {volume.dtype}".encode())
    for index in sorted({0, volume.shape[0] // 2, volume.shape[0] - 1}):
        plane = np.asarray(volume[index : index + 1, :, :])
        digest.update(np.ascontiguousarray(plane).data)
