"""IntensityRange against numpy's percentiles, and the volumes that go wrong."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import normalise
from train.normalise import IntensityRange

PERCENTILES = (2.0, 99.8)


def volume(dtype, shape=(13, 40, 31), seed=0):
    values = np.random.default_rng(seed).gamma(2.0, 40.0, shape)
    if np.issubdtype(dtype, np.signedinteger):
        values -= 100
    return np.clip(values, 0 if dtype == np.uint8 else -128, 255).astype(dtype)


def slabs(array, thickness=4):
    return (array[i : i + thickness] for i in range(0, len(array), thickness))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.bool_])
@pytest.mark.parametrize("percentiles", [PERCENTILES, (0, 100), (12.34, 56.78)])
def test_small_integers_are_exact(dtype, percentiles):
    x = volume(dtype) if dtype != np.bool_ else volume(np.uint8) > 50
    low, high = np.percentile(x.astype(np.float64), percentiles)
    assert low < high
    fitted = IntensityRange.fit(slabs(x), percentiles)
    assert (fitted.low, fitted.high) == pytest.approx((low, high), rel=1e-14)
    assert fitted.num_ignored == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", np.int32])
@pytest.mark.parametrize("offset", [0, 3e4, -2e4])
def test_others_are_right_to_a_part_of_the_range(dtype, offset):
    x = (volume(np.float64) + offset).astype(dtype)
    wide = x.astype(np.float64)
    expected = np.percentile(wide, PERCENTILES)
    fitted = IntensityRange.fit(slabs(x))
    error = np.abs([fitted.low, fitted.high] - expected).max()
    assert error < 1.3e-4 * np.ptp(wide)


def test_an_offset_costs_no_digits():
    """The voxels count by their distance from the first, not by their size."""
    x = 1e7 + np.random.default_rng(0).random((20, 30, 30))
    fitted = IntensityRange.fit([x])
    expected = np.percentile(x, PERCENTILES)
    np.testing.assert_allclose([fitted.low, fitted.high], expected, rtol=0, atol=2e-4)


def test_volumes_of_several_dtypes_are_chained():
    parts = [volume(np.uint16), volume(np.float32, seed=1), volume(np.int16, seed=2)]
    together = np.concatenate([part.astype(np.float64).ravel() for part in parts])
    fitted = IntensityRange.fit(parts)
    expected = np.percentile(together, PERCENTILES)
    np.testing.assert_allclose([fitted.low, fitted.high], expected, atol=0.05)


def test_pieces_of_a_block_change_nothing(monkeypatch):
    x = volume(np.float32)
    whole = IntensityRange.fit([x])
    monkeypatch.setattr(normalise._Counts, "PIECE", 101)
    assert IntensityRange.fit(slabs(x, 3)) == whole


def test_nan_and_infinity_are_left_out_and_counted():
    clean = volume(np.float32)
    x = clean.copy()
    x[:3], x[3, 3, :5], x[4, 4, :2] = np.nan, np.inf, -np.inf
    is_finite = np.isfinite(x)
    fitted = IntensityRange.fit(slabs(x))
    expected = np.percentile(clean[is_finite].astype(np.float64), PERCENTILES)
    np.testing.assert_allclose([fitted.low, fitted.high], expected, atol=0.05)
    assert fitted.num_ignored == np.count_nonzero(~is_finite)
    assert f"{fitted.num_ignored} NaN or infinite voxels left out" in str(fitted)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_few_bright_voxels_are_not_erased(dtype):
    x = np.zeros((20, 50, 50), dtype)
    x[3, 4, 5:9], x[3, 4, 9] = 100, 200
    assert IntensityRange.fit([x]) == IntensityRange(0, 200)
    faint = x.astype(np.float32)
    faint += 1e-3 * np.random.default_rng(0).random(x.shape, np.float32)
    fitted = IntensityRange.fit([faint])
    assert fitted.low < 1e-3 and fitted.high == faint.max()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_beads_are_not_left_to_the_noise_around_them(dtype):
    """0.1 % of the voxels: fewer than lie above the 99.8th percentile."""
    rng = np.random.default_rng(0)
    x = rng.normal(100, 3, (20, 60, 60))
    x.flat[rng.permutation(x.size)[:72]] = rng.uniform(4000, 5000, 72)
    x[0, 0, 0] = 65535  # a hot pixel does not decide
    fitted = IntensityRange.fit([x.astype(dtype)])
    assert 90 < fitted.low < 100 and 4000 < fitted.high < 5010


def test_few_dark_voxels_are_not_erased():
    x = np.full((20, 50, 50), 200, np.uint8)
    x[3, 4, 5] = 10
    assert IntensityRange.fit([x]) == IntensityRange(10, 200)


def test_a_bright_outlier_does_not_widen_the_range():
    x = volume(np.uint16)
    x[0, 0, 0] = 65535
    assert IntensityRange.fit([x]).high < 400


@pytest.mark.parametrize("value", [0, 7, -3.5, 1e20])
def test_a_constant_volume_is_encoded_as_zeros(value):
    x = np.full((4, 5, 6), value)
    fitted = IntensityRange.fit([x])
    assert fitted.low == value and fitted.high > value
    if value < 1e20:
        assert fitted.high == value + 1
    np.testing.assert_array_equal(fitted.encode(x), 0)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_more_voxels_than_32_bits_count(dtype, monkeypatch):
    """2^33 voxels: counted for real would take minutes, so each counts 2^20 times."""
    bincount = np.bincount
    monkeypatch.setattr(np, "bincount", lambda *a, **k: bincount(*a, **k) << 20)
    x = np.repeat([3, 500, 900], [2000, 6000, 192]).astype(dtype)
    counts = normalise._Counts()
    counts.add(x)
    counts.total <<= 20
    assert counts.total == 2**33
    low, high, top = counts.percentiles((24.3, 24.5, 99.8))
    assert (low, high, top) == pytest.approx((3, 500, 900), rel=1e-4)


def test_memory_does_not_grow_with_the_volume():
    block = volume(np.float32, (8, 256, 256))
    tracemalloc.start()
    IntensityRange.fit(block for _ in range(8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 * 2**20  # the counts, one array of them beside, and the copies


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_encode_and_decode_keep_the_dtype(dtype):
    fitted = IntensityRange(90.0, 600.0)
    x = np.linspace(50, 700, 24).reshape(2, 3, 4).astype(dtype)
    encoded = fitted.encode(x)
    assert encoded.dtype == dtype and encoded.shape == x.shape
    expected = (x.astype(np.float64) - 90) / 510
    epsilon = np.finfo(dtype).eps
    np.testing.assert_allclose(encoded, expected, atol=2 * epsilon)
    np.testing.assert_allclose(fitted.decode(encoded), x, rtol=4 * epsilon)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.bool_])
def test_integers_become_float32(dtype):
    x = np.array([[0, 1], [1, 200]]).astype(dtype)
    encoded = IntensityRange(0.5, 2.5).encode(x)
    assert encoded.dtype == np.float32
    np.testing.assert_array_equal(encoded, (x.astype(np.float64) - 0.5) / 2)


def test_wide_integers_keep_their_digits():
    x = np.array([2**30, 2**30 + 1], np.int32)
    encoded = IntensityRange(2**30, 2**30 + 1).encode(x)
    np.testing.assert_array_equal(encoded, [0, 1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_jax_arrays_also_when_traced(dtype):
    fitted = IntensityRange(90.0, 600.0)
    x = jnp.asarray(np.arange(0, 512, 64).reshape(2, 4, 1), dtype)
    result = jax.jit(fitted.encode)(x)
    assert result.dtype == (jnp.float32 if dtype == jnp.int32 else dtype)
    expected = (np.asarray(x, np.float64) - 90) / 510
    tolerance = 4e-3 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=tolerance)
    assert fitted.decode(result).dtype == result.dtype


def test_nan_stays_nan():
    encoded = IntensityRange(0, 2).encode(np.array([np.nan, 1, np.inf]))
    np.testing.assert_array_equal(encoded, [np.nan, 0.5, np.inf])


def test_a_dictionary_and_back():
    fitted = IntensityRange(90, 600, num_ignored=3)
    again = IntensityRange.from_dict(fitted.to_dict())
    assert again == fitted
    assert str(again) == "intensities 90 to 600 are encoded as 0 to 1"
    with pytest.raises(ValueError, match="keys 'low' and 'high', got"):
        IntensityRange.from_dict({"low": 1.0, "mean": 2.0})


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (np.nan, 1), (0, np.inf)])
def test_low_is_below_high(low, high):
    with pytest.raises(ValueError, match="finite and low below high"):
        IntensityRange(low, high)


def test_mistakes():
    for blocks in ([], [np.full((2, 2), np.nan)], [np.zeros((0, 3))]):
        with pytest.raises(ValueError, match="at least one finite voxel"):
            IntensityRange.fit(blocks)
    with pytest.raises(ValueError, match="real numbers, got"):
        IntensityRange.fit([np.zeros(3, np.complex64)])
    with pytest.raises(ValueError, match="percentiles must ascend"):
        IntensityRange.fit([np.zeros(3)], (99, 2))
    with pytest.raises(ValueError, match="must be real"):
        IntensityRange(0, 1).encode(np.zeros(3, np.complex64))


def test_a_few_hot_voxels_do_not_take_the_range():
    volume = (
        np.random.default_rng(0).normal(1000, 50, (10, 100, 120)).astype(np.float32)
    )
    normal = IntensityRange.fit([volume])
    volume[3, 4, 5:9] = 1e30
    found = IntensityRange.fit([volume])
    assert abs(found.high - normal.high) < 1 and abs(found.low - normal.low) < 1
