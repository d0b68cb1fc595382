"""Metrics against sums over windows and shells written out, analysis, scikit-image."""

import itertools
import tracemalloc

import numpy as np
import pytest

from train import volume_metrics
from train.volume_metrics import nrmse, psnr, shell_correlation, ssim


def pair(shape, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.random(shape)
    return truth, truth + noise * (rng.random(shape) - 0.5)


def test_psnr_and_nrmse_are_their_formulas():
    truth, image = pair((7, 8, 9))
    error = np.mean((truth - image) ** 2)
    largest = truth.max() - truth.min()
    assert psnr(truth, image) == pytest.approx(10 * np.log10(largest**2 / error))
    assert psnr(truth, image, 2.0) == pytest.approx(10 * np.log10(4 / error))
    norm = np.linalg.norm(truth)
    assert nrmse(truth, image) == pytest.approx(np.linalg.norm(truth - image) / norm)
    assert nrmse(truth, image, "range") == pytest.approx(np.sqrt(error) / largest)
    assert psnr(truth, truth) == np.inf and nrmse(truth, truth) == 0


@pytest.mark.parametrize("shape", [(12,), (12, 23), (12, 23, 15), (2, 3, 4, 5)])
@pytest.mark.parametrize("voxels", [1, 50, 2**21])
def test_pieces_change_nothing(shape, voxels, monkeypatch):
    truth, image = pair(shape)
    expected = psnr(truth, image), nrmse(truth, image)
    monkeypatch.setattr(volume_metrics, "SLAB_VOXELS", voxels)
    assert (psnr(truth, image), nrmse(truth, image)) == pytest.approx(expected)


def test_integers_do_not_wrap():
    truth, image = np.uint8([[[0, 200]]]), np.uint8([[[100, 100]]])
    assert psnr(truth, image) == pytest.approx(20 * np.log10(2))
    assert nrmse(truth, image) == pytest.approx(np.sqrt(20000 / 40000))


def windowed_ssim(truth, image, data_range):
    """The sum over each window, written out; short axes are reflected."""
    offsets = np.arange(-5, 6)
    taps = np.exp(-(offsets**2) / (2 * 1.5**2))
    taps /= taps.sum()
    window = np.ones((1, 1, 1))
    pads = []
    for axis, size in enumerate(truth.shape):
        if size > 1:
            shape = [-1 if i == axis else 1 for i in range(3)]
            window = window * taps.reshape(shape)
        pads.append((5, 5) if 1 < size < 11 else (0, 0))
    a, b = (
        np.pad(v.astype(np.float64), pads, mode="symmetric") for v in (truth, image)
    )
    values = []
    for start in itertools.product(
        *(range(n - w + 1) for n, w in zip(a.shape, window.shape, strict=True))
    ):
        box = tuple(slice(i, i + w) for i, w in zip(start, window.shape, strict=True))
        x, y = a[box], b[box]
        mean_x, mean_y = (window * x).sum(), (window * y).sum()
        var_x = (window * (x - mean_x) ** 2).sum()
        var_y = (window * (y - mean_y) ** 2).sum()
        covariance = (window * (x - mean_x) * (y - mean_y)).sum()
        c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
        values.append(
            (2 * mean_x * mean_y + c1)
            * (2 * covariance + c2)
            / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
        )
    return np.mean(values)


@pytest.mark.parametrize(
    "shape",
    [(12, 13, 14), (11, 11, 12), (1, 15, 16), (3, 14, 12), (10, 2, 7), (1, 1, 1)]
    + [(1, 1, 20)],
)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_ssim_is_the_mean_over_windows(shape, offset):
    truth, image = pair(shape, 0.5)
    truth, image = truth + offset, image + offset
    expected = windowed_ssim(truth, image, 0.8)
    assert ssim(truth, image, 0.8) == pytest.approx(expected, rel=1e-8)


def test_ssim_is_that_of_scikit_image():
    """0.26.0: gaussian_weights=True, use_sample_covariance=False; 3D, then 2D."""
    truth, image = pair((12, 23, 15), 1.5)
    assert ssim(truth, image, 1.0) == pytest.approx(0.49045411330011607, rel=1e-9)
    assert ssim(truth[:1], image[:1], 1.0) == pytest.approx(
        0.4380089071298849, rel=1e-9
    )


@pytest.mark.parametrize("voxels", [1, 3000])
def test_blocks_of_ssim_change_nothing(voxels, monkeypatch):
    for shape in ((45, 30, 12), (1, 40, 12), (45, 3, 4)):
        truth, image = pair(shape, 0.5)
        expected = ssim(truth, image)
        with monkeypatch.context() as patch:
            patch.setattr(volume_metrics, "SLAB_VOXELS", voxels)
            assert ssim(truth, image) == pytest.approx(expected, rel=1e-12)


def test_ssim_of_equal_and_of_opposite_volumes():
    truth, _ = pair((12, 12, 12))
    assert ssim(truth, truth) == pytest.approx(1)
    assert ssim(truth, 1 - truth) < 0


def test_memory_is_bounded():
    truth = np.zeros((40, 256, 256), np.uint8)
    truth[:, 100:] = 200
    image = truth.copy()
    tracemalloc.start()
    psnr(truth, image, 255)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 8 * volume_metrics.SLAB_VOXELS


def shells(truth, image, voxel_size):
    """Sums over shells of the whole complex transform, frequency by frequency."""

    def transform(volume):
        volume = volume - volume.mean()
        for axis, n in enumerate(volume.shape):
            if n > 1:
                x = (np.arange(n) + 0.5) / n
                fade = np.ones(n)
                fade[x < 1 / 8] = 0.5 - 0.5 * np.cos(8 * np.pi * x[x < 1 / 8])
                fade[x > 7 / 8] = fade[x < 1 / 8][::-1]
                volume = volume * np.expand_dims(
                    fade, [i for i in range(3) if i != axis]
                )
        return np.fft.fftn(volume)

    f, g = transform(truth), transform(image)
    frequencies = [
        np.fft.fftfreq(n, d) for n, d in zip(truth.shape, voxel_size, strict=True)
    ]
    distance = np.sqrt(
        sum(k**2 for k in np.meshgrid(*frequencies, indexing="ij", sparse=True))
    )
    long = [(n, d) for n, d in zip(truth.shape, voxel_size, strict=True) if n > 1]
    width = 1 / max(n * d for n, d in long)
    count = int(1 / (2 * min(d for _, d in long)) / width + 1e-9)
    result = []
    for i in range(1, max(count, 1) + 1):
        shell = np.rint(distance / width) == i
        cross = np.sum(f[shell] * np.conj(g[shell])).real
        norm = np.sqrt(np.sum(np.abs(f[shell]) ** 2) * np.sum(np.abs(g[shell]) ** 2))
        result.append(cross / norm)
    return width * np.arange(1, max(count, 1) + 1), result


@pytest.mark.parametrize(
    ("shape", "voxel_size"),
    [
        ((12, 13, 14), (1.0, 1.0, 1.0)),
        ((5, 20, 21), (4.0, 0.5, 0.5)),
        ((16, 7, 9), (0.3, 0.2, 0.1)),
        ((1, 16, 18), (2.0, 1.0, 1.0)),
        ((8, 1, 1), (1.0, 1.0, 1.0)),
    ],
)
def test_shells_are_summed_over_the_whole_spectrum(shape, voxel_size):
    truth, image = pair(shape, 2.0)
    expected = shells(truth, image, voxel_size)
    got = shell_correlation(truth, image, voxel_size)
    np.testing.assert_allclose(got.frequency, expected[0])
    np.testing.assert_allclose(got.correlation, expected[1], atol=1e-12)
    nyquist = 1 / (2 * min(d for n, d in zip(shape, voxel_size, strict=True) if n > 1))
    assert got.frequency[-1] <= nyquist * (1 + 1e-9)


def test_correlation_of_white_noise_is_that_of_its_powers():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((32, 32, 32))
    image = truth + 0.5 * rng.standard_normal(truth.shape)
    curve = shell_correlation(truth, image)
    np.testing.assert_allclose(curve.correlation[6:], 1 / np.sqrt(1.25), atol=0.05)
    other = shell_correlation(truth, rng.standard_normal(truth.shape))
    np.testing.assert_allclose(other.correlation[6:], 0, atol=0.1)
    same = shell_correlation(truth, 3 * truth + 7)
    np.testing.assert_allclose(same.correlation, 1)
    assert same.resolution == pytest.approx(2)  # two voxels: never below


def test_resolution_is_where_signal_sinks_below_noise():
    """Everything beyond a third of Nyquist is replaced, so the curve falls there."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((4, 64, 64))
    k = np.sqrt(sum(np.square(f) for f in np.ix_(*map(np.fft.fftfreq, (4, 64, 64)))))
    spectrum, other = (
        np.fft.fftn(v) for v in (truth, rng.standard_normal(truth.shape))
    )
    image = np.fft.ifftn(np.where(k < 0.5 / 3, spectrum, other)).real
    for size in (1.0, 0.2):
        curve = shell_correlation(truth, image, (size,) * 3)
        assert curve.resolution == pytest.approx(6 * size, rel=0.1)


def test_resolution_of_nothing_in_common():
    truth, _ = pair((8, 8, 8))
    assert shell_correlation(truth, -truth).resolution == np.inf
    assert shell_correlation(truth, np.zeros((8, 8, 8))).resolution == np.inf


@pytest.mark.parametrize("metric", [psnr, nrmse, ssim, shell_correlation])
def test_mistakes(metric):
    good = pair((4, 5, 6))[0]
    bad = good.copy()
    bad[1, 2, 3] = np.nan
    for truth, image in (
        (good, bad),
        (bad, good),
        (np.where(bad > 0, good, 1e200), good),
    ):
        with (
            pytest.raises(ValueError, match="finite, got NaN"),
            np.errstate(all="ignore"),
        ):
            metric(truth, image)
    with pytest.raises(ValueError, match=r"one shape .* got truth.shape=\(4, 5, 6\)"):
        metric(good, good[1:])
    with pytest.raises(ValueError, match="not be empty"):
        metric(good[:0], good[:0])
    with pytest.raises(ValueError, match="real numbers, got complex128"):
        metric(good, good.astype(complex))


def test_more_mistakes():
    flat = np.ones((3, 4, 5))
    for metric in (psnr, ssim):
        with pytest.raises(ValueError, match="data_range, .* got 0"):
            metric(flat, flat + 1)
        assert np.isfinite(metric(flat, flat + 1, 1.0))
    with pytest.raises(ValueError, match="'euclidean' or 'range', got 'max'"):
        nrmse(flat, flat, "max")
    with pytest.raises(ValueError, match="truth of zeros"):
        nrmse(0 * flat, flat)
    for metric in (ssim, shell_correlation):
        with pytest.raises(ValueError, match=r"volumes \(z, y, x\), got truth.shape"):
            metric(flat[0], flat[0])
    for shape, size in (((1, 1, 1), (1, 1, 1)), ((2, 3, 4), (1, 0, 1))):
        with pytest.raises(ValueError, match="more than one voxel, and positive"):
            shell_correlation(np.ones(shape), np.ones(shape), size)
