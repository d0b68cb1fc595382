"""How close a volume is to the truth: PSNR, SSIM, NRMSE and Fourier shell correlation.

Functions of host arrays, computed in float64; all but the last take a few slices at a
time. Each takes the truth first and raises ValueError for arrays that differ in shape,
are empty, not real or not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.fft
import scipy.ndimage

SLAB_VOXELS = 2**21  # that are worked on at a time
SIGMA, RADIUS = 1.5, 5  # of the window of SSIM: 11 voxels wide, as in its paper
THRESHOLD = 0.143  # of the correlation, where FSC reads off the resolution


def psnr(
    truth: np.ndarray, image: np.ndarray, data_range: float | None = None
) -> float:
    """Peak signal-to-noise ratio, 10 log10(data_range^2 / mean squared error), in dB.

    Arrays of any equal shape. data_range: the largest minus the smallest intensity;
    None takes that of the truth. Infinite for equal arrays.
    """
    error = _mean_square(truth, image)
    data_range = _data_range(truth, data_range)
    return 10 * float(np.log10(data_range**2 / error)) if error > 0 else np.inf


def nrmse(
    truth: np.ndarray, image: np.ndarray, normalisation: str = "euclidean"
) -> float:
    """Root mean squared error over a norm of the truth; arrays of any equal shape.

    normalisation: 'euclidean', the root of its mean square (the default of
    scikit-image's normalized_root_mse); 'range', its maximum minus its minimum.
    """
    error = np.sqrt(_mean_square(truth, image))
    if normalisation == "euclidean":
        norm = np.sqrt(_mean_square(truth))
    elif normalisation == "range":
        norm = _data_range(truth, None)
    else:
        raise ValueError(
            f"normalisation must be 'euclidean' or 'range', got {normalisation!r}"
        )
    if norm == 0:
        raise ValueError("the error can't be divided by the norm of a truth of zeros")
    return float(error / norm)


def ssim(
    truth: np.ndarray, image: np.ndarray, data_range: float | None = None
) -> float:
    """Mean structural similarity of volumes (z, y, x), 1 for equal ones.

    Wang et al., Image quality assessment: from error visibility to structural
    similarity (2004), with their Gaussian window of sigma 1.5 and 11 voxels, K1 = 0.01
    and K2 = 0.03, on three axes: what scikit-image computes with gaussian_weights=True
    and use_sample_covariance=False. As there, 5 voxels at each end of an axis do not
    count, for their windows reach beyond it. An axis shorter than the window is
    reflected and counts as a whole; a single slice has the SSIM of an image.

    data_range as for `psnr`.
    """
    if truth.ndim != 3:
        raise ValueError(f"ssim takes volumes (z, y, x), got {truth.shape=}")
    _mean_square(truth, image)
    data_range = _data_range(truth, data_range)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    total, count = 0.0, 0
    for outer, inner in _windowed_blocks(truth.shape):
        a, b = truth[outer].astype(np.float64), image[outer].astype(np.float64)
        mean_a, mean_b = _window_mean(a)[inner], _window_mean(b)[inner]
        variances = _window_mean(a * a)[inner] - mean_a**2
        variances += _window_mean(b * b)[inner] - mean_b**2
        covariance = _window_mean(a * b)[inner] - mean_a * mean_b
        similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
        similarity /= (mean_a**2 + mean_b**2 + c1) * (variances + c2)
        total += float(similarity.sum())
        count += similarity.size
    return total / count


def _windowed_blocks(shape):
    """Blocks of all voxels that count: with what their windows reach, and without."""
    bounds = [(RADIUS, n - RADIUS) if n > 2 * RADIUS else (0, n) for n in shape]
    depth = 32
    height = SLAB_VOXELS // ((depth + 2 * RADIUS) * shape[2]) - 2 * RADIUS
    steps = (depth, max(height, 8), shape[2])
    starts = (range(*bound, step) for bound, step in zip(bounds, steps, strict=True))
    for start in itertools.product(*starts):
        outer, inner = [], []
        for first, step, (_, last) in zip(start, steps, bounds, strict=True):
            stop = min(first + step, last)
            outer.append(slice(max(first - RADIUS, 0), stop + RADIUS))
            inner.append(slice(first - outer[-1].start, stop - outer[-1].start))
        yield tuple(outer), tuple(inner)


class ShellCorrelation(NamedTuple):
    """Fourier shell correlation of two volumes."""

    frequency: np.ndarray
    """(shells,) float64: middle of each shell, in cycles per unit of length."""

    correlation: np.ndarray
    """(shells,) float64, -1 to 1; 0 where both volumes have nothing."""

    resolution: float
    """1 / f at the first frequency f where the correlation falls below 0.143, in units
    of length; the Nyquist length where it never does; infinite where the first shell is
    below already."""

    def __str__(self) -> str:
        """The resolution, "<=" before one that the voxels limit."""
        limited = self.correlation.size and self.correlation.min() >= THRESHOLD
        return f"{'<= ' if limited else ''}{self.resolution:.3g}"


def shell_correlation(
    truth: np.ndarray,
    image: np.ndarray,
    voxel_size: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> ShellCorrelation:
    """Fourier shell correlation (FSC) of two volumes (z, y, x).

    The real part of sum(F conj(G)) / sqrt(sum|F|^2 sum|G|^2) over shells of equal
    frequency (Harauz and van Heel 1986); 0.143 is the threshold of Rosenthal and
    Henderson (2003), made for two independent halves of the data; between an image and
    a truth, the number is for comparing images with each other.

    Shells are one period of the longest side wide, and reach from one period to the
    Nyquist frequency of the smallest voxels: beyond that of larger voxels they lie in
    the plane. Means are subtracted, and an eighth at each end of an axis is faded out
    with a cosine (Tukey window), so that the jump from one end to the other is no
    structure that both share.

    Memory: about 50 bytes a voxel; cut large volumes.
    """
    if truth.ndim != 3:
        raise ValueError(f"FSC takes volumes (z, y, x), got {truth.shape=}")
    _mean_square(truth, image)
    sides = [(n, d) for n, d in zip(truth.shape, voxel_size, strict=True) if n > 1]
    if not sides or not all(np.isfinite(d) and d > 0 for d in voxel_size):
        raise ValueError(
            "FSC needs more than one voxel, and positive voxel sizes, got "
            f"{truth.shape=}, {voxel_size=}"
        )
    width = 1 / max(n * d for n, d in sides)
    nyquist = 1 / (2 * min(d for _, d in sides))
    num_shells = max(int(nyquist / width + 1e-9), 1)
    axes = [np.fft.fftfreq(n, d) for n, d in zip(truth.shape, voxel_size, strict=True)]
    axes[2] = np.abs(axes[2][: truth.shape[2] // 2 + 1])
    # A real volume's transform holds the frequencies with -x as well: they count.
    twice = np.full(len(axes[2]), 2.0)
    twice[0] = 1
    if truth.shape[2] % 2 == 0:
        twice[-1] = 1
    f, g = _transform(truth), _transform(image)
    sums = np.zeros((3, num_shells + 1))
    for z, frequency in enumerate(axes[0]):
        distance = np.sqrt(frequency**2 + axes[1][:, None] ** 2 + axes[2][None, :] ** 2)
        # Shell 0 is the mean alone, and the last + 1 what lies beyond Nyquist.
        shell = np.minimum(np.rint(distance / width).astype(int), num_shells + 1)
        for row, product in zip(
            sums,
            ((f[z] * g[z].conj()).real, np.abs(f[z]) ** 2, np.abs(g[z]) ** 2),
            strict=True,
        ):
            weights = (product * twice).ravel()
            row += np.bincount(shell.ravel(), weights, num_shells + 2)[:-1]
    cross, power_f, power_g = sums[:, 1:]
    norm = np.sqrt(power_f * power_g)
    correlation = np.where(norm > 0, cross / np.where(norm > 0, norm, 1), 0.0)
    frequency = width * np.arange(1, num_shells + 1)
    return ShellCorrelation(frequency, correlation, _resolution(frequency, correlation))


def _resolution(frequency, correlation):
    below = np.flatnonzero(correlation < THRESHOLD)
    if not len(below):
        return float(1 / frequency[-1])
    i = below[0]
    if i == 0:
        return np.inf
    part = (correlation[i - 1] - THRESHOLD) / (correlation[i - 1] - correlation[i])
    return float(1 / (frequency[i - 1] + part * (frequency[i] - frequency[i - 1])))


def _transform(volume):
    volume = volume.astype(np.float64)
    volume -= volume.mean()
    for axis, size in enumerate(volume.shape):
        if size > 1:
            position = (np.arange(size) + 0.5) / size
            edge = np.minimum(np.minimum(position, 1 - position) * 8, 1)
            shape = [-1 if i == axis else 1 for i in range(3)]
            volume *= (0.5 - 0.5 * np.cos(np.pi * edge)).reshape(shape)
    return scipy.fft.rfftn(volume, overwrite_x=True)


def _window_mean(volume):
    """The Gaussian mean around each voxel of (z, y, x), over reflected edges."""
    for axis in range(3):
        if volume.shape[axis] > 1:
            volume = scipy.ndimage.gaussian_filter1d(
                volume, SIGMA, axis, mode="reflect", radius=RADIUS
            )
    return volume


def _data_range(truth, data_range):
    if data_range is None:
        data_range = float(truth.max()) - float(truth.min())
    if not 0 < data_range < np.inf:
        raise ValueError(
            "data_range, the largest minus the smallest intensity, must be positive, "
            f"got {data_range}: give it where the truth is constant"
        )
    return data_range


def _mean_square(truth, image=None):
    """Mean of (truth - image)^2 in float64, of truth^2 without image."""
    if image is not None and (truth.shape != image.shape or truth.size == 0):
        raise ValueError(
            "truth and image must have one shape and not be empty, got "
            f"{truth.shape=}, {image.shape=}"
        )
    total = 0.0
    for a, b in _pieces(truth, image):
        total += float(np.sum((a - b) ** 2))
    if not np.isfinite(total):
        raise ValueError(
            "truth and image must be finite, got NaN, infinite or too large voxels: "
            "replace them first"
        )
    return total / truth.size


def _pieces(truth, image) -> Iterator[tuple[np.ndarray, np.ndarray | float]]:
    """A few slices of both at a time, in float64."""
    for array in (truth,) if image is None else (truth, image):
        if array.dtype.kind not in "biuf":
            raise ValueError(f"intensities must be real numbers, got {array.dtype}")
    depth = max(SLAB_VOXELS * len(truth) // truth.size, 1)
    for start in range(0, len(truth), depth):
        part = slice(start, start + depth)
        a = truth[part].astype(np.float64)
        yield a, 0.0 if image is None else image[part].astype(np.float64)
