"""Errors over a set: exact whatever the batches, and one trace for all of them."""

import jax
import numpy as np
import pytest

from train import losses, metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")


def pair(num_samples, seed=0):
    random = np.random.default_rng(seed)
    shape = (num_samples, 6, 5, 2)
    return tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))


def errors_in_batches(prediction, target, batch_size, norms=metrics.error_norms):
    batches = list(metrics.batchwise(norms, (prediction, target), batch_size))
    return metrics.sample_errors(batches)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 11, 100])
def test_errors_do_not_depend_on_the_batches(batch_size):
    prediction, target = pair(11)
    target[3] = 0  # measured against the whole set, so batches must not matter here too
    errors = errors_in_batches(prediction, target, batch_size)
    assert errors.l2.shape == errors.h1.shape == (11,)
    difference = (prediction - target).astype(np.float64).reshape(11, -1)
    error, size = (
        np.sqrt((f.astype(np.float64).reshape(11, -1) ** 2).mean(axis=1))
        for f in (difference, target)
    )
    floor = losses.FLOOR * np.sqrt((size**2).mean())
    np.testing.assert_allclose(errors.l2, error / np.maximum(size, floor), rtol=1e-6)
    summary = metrics.summary(errors)
    assert summary["relative_l2"] == errors.l2.mean()
    assert summary["relative_l2_max"] == errors.l2[3]
    assert summary["relative_h1"] == errors.h1.mean()
    assert summary["relative_h1_max"] == errors.h1.max()


def test_mean_is_that_of_the_loss():
    prediction, target = pair(5)
    summary = metrics.summary(errors_in_batches(prediction, target, 2))
    l2 = losses.relative_l2(prediction, target)
    h1 = losses.relative_h1(prediction, target)
    np.testing.assert_allclose(summary["relative_l2"], l2, rtol=1e-6)
    np.testing.assert_allclose(summary["relative_h1"], h1, rtol=1e-6)


def test_zero_targets_alone_give_absolute_errors():
    prediction, target = np.ones((2, 3, 6, 5, 1), np.float32) * np.float32(0.5)
    errors = errors_in_batches(prediction, 0 * target, 2)
    np.testing.assert_allclose(errors.l2, 0.5, rtol=1e-6)


def test_the_last_batch_is_filled_up_not_traced_anew():
    shapes = []

    @jax.jit
    def norms(prediction, target):
        shapes.append(prediction.shape)
        return metrics.error_norms(prediction, target)

    errors_in_batches(*pair(11), batch_size=4, norms=norms)
    assert shapes == [(4, 6, 5, 2)]


def test_results_come_in_order_and_without_the_filling():
    values = np.arange(10, dtype=np.float32)[:, None]
    batches = metrics.batchwise(lambda x: {"twice": 2 * x}, (values,), 4)
    rows = [batch["twice"] for batch in batches]
    assert [len(batch) for batch in rows] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(rows), 2 * values)


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"lengths \[3, 2\]"):
        next(metrics.batchwise(lambda x, y: x, (np.zeros(3), np.zeros(2)), 2))
    with pytest.raises(ValueError, match="batch_size=0"):
        next(metrics.batchwise(lambda x: x, (np.zeros(3),), 0))
