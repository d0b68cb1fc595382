"""Low-resolution volumes made from high-resolution ones: blur, fewer voxels, noise."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import scipy.fft
import scipy.ndimage

from train.data.tiff import open_volume

MOST_PHOTONS = 1e15  # numpy's generator takes up to 9e18
SLAB_VOXELS = 2**22  # of what is blurred at a time with a point spread function


@dataclass(frozen=True, eq=False)
class Degradation:
    """What a coarser microscope would have seen of a volume."""

    scale: tuple[int, int, int] = (1, 1, 1)
    """(sz, sy, sx): high-resolution voxels in one low-resolution voxel."""

    blur: tuple[float, float, float] | np.ndarray = (0.0, 0.0, 0.0)
    """Gaussian (z, y, x) standard deviations in high-resolution voxels; or a point
    spread function (z, y, x) with these voxels, not negative, whose centre is voxel
    size // 2 of each axis (the middle of an odd size). It is normalised to sum 1."""

    poisson: float | None = None
    """Photons a voxel at the encoded intensity 1; None: no shot noise."""

    gaussian: float = 0.0
    """Standard deviation of the read noise, relative to the intensity range."""

    def __post_init__(self):
        scale = tuple(self.scale)
        if len(scale) != 3 or not all(s == int(s) >= 1 for s in scale):
            raise ValueError(
                f"scale must be three whole numbers (z, y, x) above 0, got {self.scale}"
            )
        object.__setattr__(self, "scale", tuple(int(s) for s in scale))
        blur = np.asarray(self.blur, dtype=np.float64)
        if blur.shape != (3,) and (blur.ndim != 3 or blur.size == 0):
            raise ValueError(
                "blur must be three standard deviations (z, y, x) or a point spread "
                f"function of three axes, got shape {blur.shape}"
            )
        if not np.isfinite(blur).all() or (blur < 0).any():
            raise ValueError("blur must be finite and not negative")
        if blur.ndim == 3:
            if not blur.any():
                raise ValueError("a point spread function must not be 0 everywhere")
            blur = blur / blur.sum()
            blur.flags.writeable = False
            object.__setattr__(self, "blur", blur)
        else:
            object.__setattr__(self, "blur", tuple(blur.tolist()))
        if self.poisson is not None and not 0 < self.poisson < MOST_PHOTONS:
            raise ValueError(
                f"poisson must be a number of photons from 0 to {MOST_PHOTONS:.0e}, or "
                f"None for no shot noise, got {self.poisson}"
            )
        if not 0 <= self.gaussian < np.inf:
            raise ValueError(f"gaussian must not be negative, got {self.gaussian}")

    def reduce(self, volume: np.ndarray) -> np.ndarray:
        """Blur, then average cells of `scale` voxels; float32, without noise.

        The volume (z, y, x) has any real dtype. Points are the centres of cells, as in
        `jaxops.resize`. What does not fill a cell at the end of an axis is cut off
        before the blur; edges are reflected (half-sample symmetric). NaN and infinite
        voxels take no part; cells that are more than half made of them become NaN.

        Memory beside the volume: two to three times its size in float32, five with
        NaNs in it; and 100 MB for a point spread function.

        Raises ValueError for a volume smaller than a cell or, on an axis, than the
        point spread function.
        """
        if volume.ndim != 3 or any(
            n < s for n, s in zip(volume.shape, self.scale, strict=True)
        ):
            raise ValueError(
                "a volume to reduce must be (z, y, x) and hold at least one cell of "
                f"the scale {self.scale}, got {volume.shape=}"
            )
        if volume.dtype.kind not in "biuf":
            raise ValueError(f"a volume must be real numbers, got {volume.dtype=}")
        cut = tuple(
            slice(n // s * s) for n, s in zip(volume.shape, self.scale, strict=True)
        )
        volume = volume[cut].astype(np.float32, copy=False)
        is_finite = np.isfinite(volume)
        if is_finite.all():
            return self._reduce(volume)
        weight = self._reduce(is_finite.astype(np.float32))
        total = self._reduce(np.where(is_finite, volume, np.float32(0)))
        seen = weight > 0.5
        return np.where(seen, total / np.where(seen, weight, 1), np.nan).astype(
            np.float32
        )

    def _reduce(self, volume):
        if isinstance(self.blur, np.ndarray):
            return self._reduce_psf(volume)
        # The axis that shrinks most comes first: less to do for the others.
        for axis in sorted(range(3), key=lambda axis: -self.scale[axis]):
            if self.blur[axis] > 0:
                volume = scipy.ndimage.gaussian_filter1d(
                    volume, self.blur[axis], axis, mode="reflect"
                )
            volume = _average(volume, self.scale[axis], axis)
        return volume

    def _reduce_psf(self, volume):
        """Slab by slab, as products of real FFTs over reflected edges."""
        psf = self.blur
        if any(p > n for p, n in zip(psf.shape, volume.shape, strict=True)):
            raise ValueError(
                "a point spread function must not be larger than the volume on any "
                f"axis, got {psf.shape} for {volume.shape}: cut its dark borders off"
            )
        # out[i] = sum_k psf[k] volume[i + centre - k]
        before = [size - 1 - size // 2 for size in psf.shape]
        after = [size // 2 for size in psf.shape]
        y, x = (
            _reflected(-before[axis], volume.shape[axis] + after[axis], axis, volume)
            for axis in (1, 2)
        )
        halo = psf.shape[0] - 1
        depth = max(halo, SLAB_VOXELS // (y.size * x.size) - halo)
        depth = max(depth // self.scale[0], 1) * self.scale[0]
        depth = min(depth, volume.shape[0])
        shape = [
            scipy.fft.next_fast_len(n, real=True)
            for n in (depth + halo, y.size, x.size)
        ]
        transfer = scipy.fft.rfftn(psf.astype(np.float32), shape)
        slabs = []
        for start in range(0, volume.shape[0], depth):
            stop = min(start + depth, volume.shape[0])
            z = _reflected(start - before[0], stop + after[0], 0, volume)
            slab = volume[z][:, y][:, :, x]
            product = scipy.fft.rfftn(slab, shape, overwrite_x=True)
            product *= transfer
            slab = scipy.fft.irfftn(product, shape, overwrite_x=True)
            # The valid part: what no end of the slab has touched.
            slab = slab[
                halo : halo + stop - start,
                psf.shape[1] - 1 : psf.shape[1] - 1 + volume.shape[1],
                psf.shape[2] - 1 : psf.shape[2] - 1 + volume.shape[2],
            ]
            for axis in range(3):
                slab = _average(slab, self.scale[axis], axis)
            slabs.append(slab)
        return np.concatenate(slabs)

    def add_noise(self, low: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Noisy copy, float32, of encoded intensities of any shape; unbiased.

        Shot noise is that of max(low, 0); read noise is added to it. NaN stays NaN.
        """
        noisy = low.astype(np.float32)
        if self.poisson is not None:
            photons = np.where(noisy > 0, noisy, 0) * np.float64(self.poisson)
            photons = np.minimum(photons, MOST_PHOTONS)
            noisy += ((rng.poisson(photons) - photons) / self.poisson).astype(
                np.float32
            )
        if self.gaussian:
            noise = rng.standard_normal(noisy.shape, np.float32)
            noisy += np.float32(self.gaussian) * noise
        return noisy


def _average(volume, scale, axis):
    """Means of `scale` neighbours along an axis that `scale` divides."""
    if scale == 1:
        return volume
    shape = volume.shape
    cells = (*shape[:axis], shape[axis] // scale, scale, *shape[axis + 1 :])
    return volume.reshape(cells).mean(axis=axis + 1)


def _reflected(start, stop, axis, volume):
    """Indices of voxels `start` to `stop`, reflected at the ends of the axis."""
    size = volume.shape[axis]
    index = np.arange(start, stop) % (2 * size)
    return np.minimum(index, 2 * size - 1 - index)


def read_psf(path: str | os.PathLike) -> np.ndarray:
    """Read a point spread function from a TIFF: float32 (z, y, x), of odd sizes, sum 1.

    The median of the borders is the background, which is subtracted. What is connected
    to the brightest spot and at least 3 standard deviations above the background is
    kept, in a box with that spot in the centre. Voxels must have the size of those of
    the high-resolution volumes: nothing is resized.

    Raises ValueError for several times or channels, for NaN and infinite voxels, and
    where nothing is above the background.
    """
    volume = open_volume(path)
    if len(volume.positions) > 1:
        raise ValueError(
            f"{path}: a point spread function must have one time and one channel, got "
            f"{volume.axes} {volume.shape}: save the one that you mean by itself"
        )
    image = volume.read().astype(np.float32)
    if not np.isfinite(image).all():
        raise ValueError(f"{path}: a point spread function must not have NaN voxels")
    border = np.concatenate(
        [
            image.take([0, -1], axis).ravel()
            for axis in range(3)
            if image.shape[axis] > 1
        ]
        or [image.ravel()]
    )
    image -= np.median(border)
    deviation = 1.4826 * np.median(np.abs(border - np.median(border)))
    # Smoothed, so that a hot pixel is hardly ever taken for the centre.
    smooth = scipy.ndimage.uniform_filter(image, 3, mode="nearest")
    centre = np.unravel_index(smooth.argmax(), image.shape)
    around = tuple(slice(max(c - 1, 0), c + 2) for c in centre)
    nearby = np.unravel_index(image[around].argmax(), image[around].shape)
    centre = tuple(part.start + n for part, n in zip(around, nearby, strict=True))
    labels, _ = scipy.ndimage.label(image > 3 * deviation)
    if labels[centre] == 0:
        raise ValueError(
            f"{path}: a point spread function must be brighter in its centre than at "
            "its borders, and nothing in it is: is it the right file?"
        )
    spot = np.argwhere(labels == labels[centre])  # (voxels, 3)
    half = np.abs(spot - np.array(centre)).max(axis=0)
    psf = np.zeros(2 * half + 1, np.float32)
    psf[tuple((spot - np.array(centre) + half).T)] = image[tuple(spot.T)]
    return psf / psf.sum()
