"""Degradation against scipy.ndimage in float64, and against sums written out."""

import itertools
import tracemalloc

import numpy as np
import pytest
import scipy.ndimage
import tifffile

import train.data.degrade as degrade
from train.data.degrade import Degradation, read_psf


def volume(shape=(9, 12, 14), seed=0):
    return np.random.default_rng(seed).random(shape).astype(np.float32)


def cells(array, scale):
    """Means of cells, one by one; what fills none is left out."""
    size = [n // s for n, s in zip(array.shape, scale, strict=True)]
    result = np.empty(size)
    for index in itertools.product(*map(range, size)):
        cell = tuple(
            slice(i * s, (i + 1) * s) for i, s in zip(index, scale, strict=True)
        )
        result[index] = array[cell].astype(np.float64).mean()
    return result


def cut(array, scale):
    return array[
        tuple(slice(n // s * s) for n, s in zip(array.shape, scale, strict=True))
    ]


@pytest.mark.parametrize("scale", [(1, 1, 1), (1, 2, 2), (4, 1, 1), (2, 3, 5)])
@pytest.mark.parametrize("sigmas", [(0, 0, 0), (2.0, 1.0, 0.7), (0, 3.0, 0)])
def test_gaussian_blur_and_means_of_cells(scale, sigmas):
    x = volume()
    blurred = scipy.ndimage.gaussian_filter(
        cut(x, scale).astype(np.float64), sigmas, mode="reflect"
    )
    low = Degradation(scale, sigmas).reduce(x)
    assert low.dtype == np.float32
    np.testing.assert_allclose(low, cells(blurred, scale), rtol=2e-6)


def convolved(x, psf):
    """Every sum written out: out[i] = sum_k psf[k] x[i + size // 2 - k]."""
    pad = [(s - 1 - s // 2, s // 2) for s in psf.shape]
    padded = np.pad(x.astype(np.float64), pad, mode="symmetric")
    out = np.zeros(x.shape)
    for k in itertools.product(*map(range, psf.shape)):
        start = [s - 1 - i for s, i in zip(psf.shape, k, strict=True)]
        part = tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))
        out += psf[k] * padded[part]
    return out


@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (1, 1, 1), (1, 4, 3), (2, 2, 2), (9, 3, 6)]
)
@pytest.mark.parametrize("scale", [(1, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("slab", [2**22, 1])
def test_point_spread_function(shape, scale, slab, monkeypatch):
    monkeypatch.setattr(degrade, "SLAB_VOXELS", slab)
    x = volume((10, 11, 12))
    psf = np.random.default_rng(1).random(shape)
    low = Degradation(scale, psf).reduce(x)
    expected = convolved(cut(x, scale), psf / psf.sum())
    np.testing.assert_allclose(low, cells(expected, scale), atol=1e-6)


def test_a_point_becomes_the_function_centred_on_it():
    psf = np.random.default_rng(1).random((3, 4, 5))
    point = np.zeros((9, 9, 9), np.float32)
    point[4, 4, 4] = 1
    image = Degradation(blur=psf).reduce(point)
    box = tuple(slice(4 - s // 2, 4 - s // 2 + s) for s in psf.shape)
    np.testing.assert_allclose(image[box], psf / psf.sum(), atol=1e-7)
    assert image.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("blur", [(1.5, 1.0, 0.5), np.ones((3, 3, 3))])
@pytest.mark.parametrize("scale", [(2, 2, 2), (1, 3, 2)])
def test_a_ramp_is_seen_at_the_centres_of_cells(blur, scale):
    """Cell i covers voxels s i to s i + s - 1: its centre is at s i + (s - 1) / 2."""
    size = (40, 42, 44)
    z, y, x = np.meshgrid(*map(np.arange, size), indexing="ij")
    low = Degradation(scale, blur).reduce(2.0 * z - 3.0 * y + 0.5 * x)
    centres = [
        s * np.arange(n // s) + (s - 1) / 2 for n, s in zip(size, scale, strict=True)
    ]
    z, y, x = np.meshgrid(*centres, indexing="ij")
    inner = (slice(8, -8) if scale[0] == 1 else slice(4, -4), *[slice(4, -4)] * 2)
    expected = (2.0 * z - 3.0 * y + 0.5 * x)[inner]
    np.testing.assert_allclose(low[inner], expected, atol=2e-4)


@pytest.mark.parametrize("shape", [(1, 16, 16), (1, 1, 40), (5, 2, 2)])
@pytest.mark.parametrize("blur", [(2.0, 2.0, 2.0), np.ones((1, 1, 1))])
def test_single_slices_and_thin_volumes(shape, blur):
    scale = (1, 2, 2) if min(shape[1:]) > 1 else (1, 1, 2)
    low = Degradation(scale, blur).reduce(np.full(shape, 3.0))
    np.testing.assert_allclose(low, 3, rtol=1e-6)
    assert low.shape == tuple(n // s for n, s in zip(shape, scale, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, ">u2", np.float64])
def test_dtypes(dtype):
    x = (100 * volume()).astype(dtype)
    low = Degradation((1, 2, 2), (1, 1, 1)).reduce(x)
    expected = Degradation((1, 2, 2), (1, 1, 1)).reduce(x.astype(np.float32))
    assert low.dtype == np.float32 and low.dtype.isnative
    np.testing.assert_array_equal(low, expected)


@pytest.mark.parametrize("blur", [(1.0, 1.0, 1.0), np.ones((3, 3, 3))])
def test_nan_spoils_its_neighbours_only_where_it_is_most_of_them(blur):
    x = np.full((8, 16, 16), 5.0, np.float32)
    x[:, :, :6], x[4, 9, 9], x[2, 2, 12] = np.nan, np.inf, -np.inf
    low = Degradation((2, 2, 2), blur).reduce(x)
    np.testing.assert_array_equal(np.isnan(low).all(axis=(0, 1)), [1] * 3 + [0] * 5)
    np.testing.assert_allclose(low[:, :, 3:], 5, rtol=1e-6)


def test_memory_is_a_small_multiple_of_the_volume():
    x = volume((32, 128, 128))
    tracemalloc.start()
    Degradation((1, 2, 2), (1, 1, 1)).reduce(x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * x.nbytes


def test_the_volume_is_left_alone():
    for x in (volume(), np.where(volume() > 0.9, np.nan, volume())):
        before = x.copy()
        Degradation((1, 2, 2), (1, 1, 1), 10.0, 0.1).reduce(x)
        np.testing.assert_array_equal(x, before)


def test_noise_has_the_moments_of_its_sources():
    low = np.repeat(np.float32([-0.5, 0.0, 0.25, 1.0]), 200_000).reshape(4, -1)
    noisy = Degradation(poisson=50.0, gaussian=0.1).add_noise(
        low, np.random.default_rng(0)
    )
    assert noisy.dtype == np.float32
    noise = noisy.astype(np.float64) - low
    # Five standard errors; photons n have variance n, which is 1 / photons of 1.
    variance = np.maximum(low[:, 0], 0) / 50 + 0.1**2
    assert (np.abs(noise.mean(1)) < 5 * np.sqrt(variance / low.shape[1])).all()
    np.testing.assert_allclose(noise.var(1), variance, rtol=5 * np.sqrt(2 / 2e5) * 2)


def test_noise_is_drawn_from_the_generator_alone():
    low = volume()
    before = low.copy()
    blurry = Degradation(poisson=50.0, gaussian=0.1)
    first, second = (blurry.add_noise(low, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(low, before)
    other = blurry.add_noise(low, np.random.default_rng(4))
    assert (other != first).any()


def test_without_noise_and_with_nan():
    low = volume()
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(Degradation().add_noise(low, rng), low)
    low[0, 0, 0] = np.nan
    noisy = Degradation(poisson=1e12).add_noise(1e9 * low, rng)
    assert np.isnan(noisy[0, 0, 0]) and np.isfinite(noisy).sum() == low.size - 1


def spot(shape, centre, sigmas=(1.5, 1.0, 1.0)):
    grid = np.ogrid[tuple(map(slice, shape))]
    square = sum(
        ((g - c) / s) ** 2 for g, c, s in zip(grid, centre, sigmas, strict=True)
    )
    return np.exp(-square / 2)


def test_a_measured_function_loses_background_noise_and_hot_pixels(tmp_path):
    truth = spot((21, 31, 33), (9, 17, 14))
    noise = np.random.default_rng(0).normal(0, 3, truth.shape)
    image = np.rint(100 + noise + 2000 * truth)
    image[3, 4, 5] = 10_000
    tifffile.imwrite(tmp_path / "psf.tif", image.astype(np.uint16))
    psf = read_psf(tmp_path / "psf.tif")
    assert psf.dtype == np.float32 and psf.sum() == pytest.approx(1)
    assert psf.min() >= 0 and all(size % 2 for size in psf.shape)
    half = np.array(psf.shape) // 2
    expected = spot(psf.shape, half)
    # Six deviations of the noise: three are cut off, three are left.
    tolerance = 6 * 3 / 2000 * psf.max()
    np.testing.assert_allclose(psf, expected / expected.sum(), atol=tolerance)
    assert max(psf.shape) < 15


def test_a_computed_function_without_background(tmp_path):
    truth = spot((9, 9, 9), (4, 4, 4), (0.5, 0.5, 0.5)).astype(np.float32)
    truth[truth < 1e-4] = 0
    tifffile.imwrite(tmp_path / "psf.tif", truth)
    psf = read_psf(tmp_path / "psf.tif")
    half = np.array(psf.shape) // 2
    inner = tuple(slice(4 - h, 5 + h) for h in half)
    np.testing.assert_allclose(psf, truth[inner] / truth.sum(), rtol=1e-5)


def test_a_flat_function_has_one_slice(tmp_path):
    image = spot((1, 15, 15), (0, 6, 7))
    tifffile.imwrite(tmp_path / "psf.tif", (1000 * image).astype(np.uint16))
    assert read_psf(tmp_path / "psf.tif").shape[0] == 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((5, 6, 7), np.uint8), "brighter in its centre"),
        (np.full((5, 6, 7), 9.0), "brighter in its centre"),
        (np.where(np.eye(5) == 1, np.nan, np.ones((5, 5, 5))), "NaN"),
    ],
)
def test_what_is_no_function(image, message, tmp_path):
    path = tmp_path / "psf.tif"
    tifffile.imwrite(path, image.astype(np.float32))
    with pytest.raises(ValueError, match=f"psf.tif: .*{message}"):
        read_psf(path)


def test_a_function_has_one_channel(tmp_path):
    path = tmp_path / "psf.tif"
    image = np.ones((3, 2, 6, 7), np.uint16)
    tifffile.imwrite(path, image, imagej=True, metadata={"axes": "ZCYX"})
    with pytest.raises(ValueError, match="one time and one channel, got CZYX"):
        read_psf(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": (2, 2)}, "scale must be three whole numbers"),
        ({"scale": (1, 0, 1)}, "scale must be three whole numbers"),
        ({"scale": (1, 1.5, 1)}, "scale must be three whole numbers"),
        ({"blur": (1.0, 1.0)}, "three standard deviations"),
        ({"blur": (1.0, -1.0, 0.0)}, "finite and not negative"),
        ({"blur": np.zeros((3, 3, 3))}, "not be 0 everywhere"),
        ({"blur": np.full((3, 3, 3), np.nan)}, "finite and not negative"),
        ({"poisson": 0.0}, "photons"),
        ({"gaussian": -0.1}, "gaussian must not be negative"),
    ],
)
def test_mistakes_in_a_degradation(arguments, message):
    with pytest.raises(ValueError, match=message):
        Degradation(**arguments)


def test_mistakes_in_a_volume():
    with pytest.raises(ValueError, match=r"at least one cell of the scale \(1, 2, 2\)"):
        Degradation((1, 2, 2)).reduce(np.zeros((4, 1, 4)))
    with pytest.raises(ValueError, match=r"must be \(z, y, x\)"):
        Degradation().reduce(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="real numbers"):
        Degradation().reduce(np.zeros((4, 4, 4), complex))
    with pytest.raises(ValueError, match=r"larger than the volume .* \(5, 3, 3\) for"):
        Degradation(blur=np.ones((5, 3, 3))).reduce(np.zeros((4, 4, 4)))


def test_a_psf_of_a_few_voxels_is_read_as_it_is(tmp_path):
    psf = np.zeros((5, 7, 7), np.float32)
    psf[2, 3, 3], psf[2, 3, 4] = 3, 1
    tifffile.imwrite(tmp_path / "psf.tif", psf, photometric="minisblack")
    expected = np.array([[[0, 0.75, 0.25]]], np.float32)
    np.testing.assert_allclose(read_psf(tmp_path / "psf.tif"), expected)
