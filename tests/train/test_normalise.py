"""Normalisers against numpy's longdouble moments and the cases that go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import normalise
from train.normalise import UnitGaussian


def fields(shape=(5, 6, 7, 3), dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    scales = np.array([1.0, 30.0, 0.01])[: shape[-1]]
    return (values * scales + scales * [3.0, -2.0, 0.0][: shape[-1]]).astype(dtype)


@pytest.mark.parametrize("shape", [(9, 4, 1), (5, 6, 7, 3), (3, 4, 2, 3, 2), (8, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_moments_are_those_of_all_samples_and_points(shape, dtype):
    x = fields(shape, dtype)
    rows = x.reshape(-1, shape[-1]).astype(np.longdouble)
    fitted = UnitGaussian.fit(x)
    np.testing.assert_allclose(fitted.mean, rows.mean(0), rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(fitted.std, rows.std(0, ddof=1), rtol=1e-13)
    encoded = fitted.encode(x)
    rows = encoded.reshape(-1, shape[-1]).astype(np.float64)
    np.testing.assert_allclose(rows.mean(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(rows.std(0, ddof=1), 1.0, rtol=1e-6)


def test_blocks_give_what_one_pass_gives(monkeypatch):
    x = fields()
    whole = UnitGaussian.fit(x)
    monkeypatch.setattr(normalise, "BLOCK_SIZE", 13)
    parts = UnitGaussian.fit(x)
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(parts.std, whole.std, rtol=1e-13)


@pytest.mark.parametrize("mean", [1e4, 1e6, -3e6])
def test_large_mean_does_not_cancel(mean):
    """neuraloperator 2.0.0's incremental fit gives std 0 or NaN here."""
    x = (mean + np.random.default_rng(0).normal(size=(4, 32, 32, 1))).astype(np.float32)
    fitted = UnitGaussian.fit(x)
    assert fitted.std[0] == pytest.approx(np.std(x.astype(np.float64), ddof=1))
    encoded = fitted.encode(x)
    # The mean, in float32, is rounded by half a unit in its last place at most.
    rounding = np.spacing(np.float32(abs(mean)))
    assert abs(encoded.astype(np.float64).mean()) <= rounding
    np.testing.assert_allclose(fitted.decode(encoded), x, atol=2 * rounding)


def test_one_sample_is_enough():
    x = fields((1, 8, 8, 2))
    fitted = UnitGaussian.fit(x)
    np.testing.assert_allclose(fitted.std, x.std((0, 1, 2), ddof=1), rtol=1e-5)
    assert np.isfinite(fitted.encode(x)).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -3e5, 1e-40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_channel_has_std_one(value, dtype):
    x = np.full((3, 50, 2), value, dtype)
    x[..., 1] = np.random.default_rng(0).normal(size=(3, 50))
    x[0, 0, 0] = np.nextafter(x[0, 0, 0], dtype(1))  # constant but for rounding
    fitted = UnitGaussian.fit(x)
    assert fitted.std[0] == 1.0 and 0.5 < fitted.std[1] < 2.0
    rounding = abs(value) * 2e-7 + 1e-44
    np.testing.assert_allclose(fitted.encode(x)[..., 0], 0.0, atol=rounding)


def test_a_single_number_has_std_one():
    fitted = UnitGaussian.fit(np.full((1, 1, 1), 7.0, np.float32))
    assert (fitted.mean[0], fitted.std[0]) == (7.0, 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_numpy_arrays_keep_dtype_and_come_back(dtype):
    x = fields(dtype=dtype)
    fitted = UnitGaussian.fit(x)
    encoded = fitted.encode(x)
    assert isinstance(encoded, np.ndarray) and encoded.dtype == dtype
    decoded = fitted.decode(encoded)
    assert decoded.dtype == dtype
    tolerance = 4 * float(np.finfo(dtype).eps)
    scale = np.abs(x.astype(np.float64)).max(axis=(0, 1, 2))
    assert np.all(np.abs(decoded.astype(np.float64) - x) <= tolerance * scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_jax_arrays_keep_dtype_also_when_traced(dtype):
    fitted = UnitGaussian.fit(fields())
    x = jnp.asarray(fields(seed=1)).astype(dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        encoded = jax.jit(fitted.encode)(x)
        decoded = jax.jit(fitted.decode)(encoded)
    assert isinstance(encoded, jax.Array)
    assert encoded.dtype == decoded.dtype == dtype
    reference = np.asarray(x.astype(jnp.float32), np.float64)
    reference = (reference - fitted.mean) / fitted.std
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(encoded.astype(jnp.float32)),
        reference,
        rtol=4 * tolerance,
        atol=4 * float(jnp.finfo(jnp.float32).eps) * 10,
    )


def test_saved_and_loaded_it_is_the_same():
    fitted = UnitGaussian.fit(fields())
    arrays = fitted.to_dict()
    assert set(arrays) == {"mean", "std"}
    assert all(a.shape == (3,) and a.dtype == np.float64 for a in arrays.values())
    loaded = UnitGaussian.from_dict(arrays)
    x = fields(seed=2)
    np.testing.assert_array_equal(loaded.encode(x), fitted.encode(x))
    arrays["mean"][0] = 9.0  # a copy: the normaliser cannot be changed through it
    np.testing.assert_array_equal(loaded.mean, fitted.mean)
    with pytest.raises(ValueError, match="read-only"):
        fitted.mean[0] = 9.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    x = fields()
    x[1, 2, 3, 1] = bad
    with pytest.raises(ValueError, match=r"finite values.* channels \[1\]"):
        UnitGaussian.fit(x)


@pytest.mark.parametrize(
    "action, message",
    [
        (lambda: UnitGaussian.fit(np.zeros((0, 4, 1))), "not empty, got array.shape="),
        (lambda: UnitGaussian.fit(np.zeros(4)), r"array.shape=\(4,\)"),
        (lambda: UnitGaussian.fit(np.zeros((2, 2), complex)), "needs real values"),
        (lambda: UnitGaussian([0.0], [0.0]), "std must be positive"),
        (lambda: UnitGaussian([0.0], [np.inf]), "must be finite"),
        (lambda: UnitGaussian([0.0, 1.0], [1.0]), r"must both have shape \(channels"),
        (lambda: UnitGaussian.from_dict({"mean": np.zeros(1)}), r"got \['mean'\]"),
        (
            lambda: UnitGaussian([0.0], [1.0]).encode(np.zeros((2, 3), np.float32)),
            r"must hold 1 channels, got x.shape=\(2, 3\)",
        ),
        (
            lambda: UnitGaussian([0.0], [1.0]).decode(np.zeros((2, 1), np.int32)),
            "must be floating point",
        ),
    ],
)
def test_mistakes_are_refused(action, message):
    with pytest.raises(ValueError, match=message):
        action()
