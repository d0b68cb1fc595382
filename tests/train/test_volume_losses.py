"""Losses of volumes against NumPy in float64, gradients against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from train.volume_losses import LOSSES


def ssim_loss(prediction, target):
    """Whole windows of 11 taps, one volume and channel at a time."""
    sizes = prediction.shape[1:4]
    radii = [min(5, (n - 1) // 2) for n in sizes]
    inside = tuple(slice(r, n - r) for r, n in zip(radii, sizes, strict=True))

    def smooth(x):
        for axis, radius in enumerate(radii):
            x = scipy.ndimage.gaussian_filter1d(x, 1.5, axis, radius=radius)
        return x[inside]

    values = []
    for p, t in zip(
        np.moveaxis(prediction, -1, 1).reshape(-1, *sizes),
        np.moveaxis(target, -1, 1).reshape(-1, *sizes),
        strict=True,
    ):
        mean_p, mean_t = smooth(p), smooth(t)
        var_p, var_t = smooth(p * p) - mean_p**2, smooth(t * t) - mean_t**2
        covariance = smooth(p * t) - mean_p * mean_t
        similar = (2 * mean_p * mean_t + 1e-4) * (2 * covariance + 9e-4)
        similar /= (mean_p**2 + mean_t**2 + 1e-4) * (var_p + var_t + 9e-4)
        values.append(similar)
    return 1 - np.mean(values)


REFERENCES = {
    "l1": lambda p, t: np.mean(np.abs(p - t)),
    "mse": lambda p, t: np.mean((p - t) ** 2),
    "charbonnier": lambda p, t: np.mean(np.sqrt((p - t) ** 2 + 1e-6)),
    "ssim": ssim_loss,
}
SHAPES = [(1, 13, 14, 12, 1), (2, 1, 16, 5, 1), (1, 4, 4, 4, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name, shape):
    random = np.random.default_rng(0)
    target = random.random(shape)
    prediction = target + 0.3 * random.normal(size=shape)
    loss = jax.jit(jax.value_and_grad(LOSSES[name]))
    value, gradient = loss(*(jnp.asarray(x, jnp.float32) for x in (prediction, target)))
    # Variances are differences of numbers near 1, which float32 rounds by 1e-7.
    np.testing.assert_allclose(
        value, REFERENCES[name](prediction, target), rtol=2e-5, atol=1e-6
    )
    direction = random.normal(size=shape)
    step = 1e-5
    ends = [REFERENCES[name](prediction + s * direction, target) for s in (step, -step)]
    slope = (ends[0] - ends[1]) / (2 * step)
    found = np.sum(np.asarray(gradient, np.float64) * direction)
    scale = np.linalg.norm(np.asarray(gradient, np.float64)) * np.linalg.norm(direction)
    # l1 is not smooth where prediction and target meet: a step may cross that point.
    assert abs(found - slope) < 1e-3 * scale


@pytest.mark.parametrize("name", LOSSES)
def test_equal_volumes_cost_next_to_nothing(name):
    x = jnp.asarray(np.random.default_rng(1).random((1, 12, 12, 12, 1)), jnp.float32)
    value, gradient = jax.value_and_grad(LOSSES[name])(x, x)
    assert abs(float(value)) <= (1.01e-3 if name == "charbonnier" else 1e-6)
    assert bool(jnp.all(jnp.isfinite(gradient)))
