"""Losses of volumetric networks: pure functions of intensities that are normalised.

Volumes are (batch, depth, height, width, channels); each loss is a scalar, smaller is
better, averaged over all that it is given.
"""

import jax
import jax.numpy as jnp
import numpy as np

CHARBONNIER_EPSILON = 1e-3  # Lai et al. 2017, arXiv:1704.03915
SSIM_SIGMA, SSIM_RADIUS = 1.5, 5  # Wang et al. 2004, 11 taps


def l1(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean absolute error."""
    return jnp.mean(jnp.abs(prediction - target))


def mse(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared error; its least value is the largest PSNR."""
    return jnp.mean(jnp.square(prediction - target))


def charbonnier(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean of sqrt(error^2 + eps^2), eps = 1e-3: the absolute error, smooth at zero."""
    error = prediction - target
    return jnp.mean(jnp.sqrt(jnp.square(error) + CHARBONNIER_EPSILON**2))


def ssim(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """1 - mean structural similarity (Wang et al. 2004), for a data range of 1.

    A Gaussian window of 11 taps an axis; an axis of fewer points has a window of them
    all. Only whole windows count. Written as shifts, products and sums, which every
    backend does well.
    """
    c1, c2 = 0.01**2, 0.03**2
    mean_p, mean_t = _smooth(prediction), _smooth(target)
    var_p = _smooth(prediction**2) - mean_p**2
    var_t = _smooth(target**2) - mean_t**2
    cov = _smooth(prediction * target) - mean_p * mean_t
    values = (2 * mean_p * mean_t + c1) * (2 * cov + c2)
    values = values / ((mean_p**2 + mean_t**2 + c1) * (var_p + var_t + c2))
    return 1 - jnp.mean(values)


LOSSES = {"l1": l1, "mse": mse, "charbonnier": charbonnier, "ssim": ssim}


def _smooth(x):
    for axis in (1, 2, 3):
        radius = min(SSIM_RADIUS, (x.shape[axis] - 1) // 2)
        taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / SSIM_SIGMA) ** 2)
        taps = (taps / taps.sum()).tolist()
        size = x.shape[axis] - 2 * radius
        x = sum(
            tap * jax.lax.slice_in_dim(x, i, i + size, axis=axis)
            for i, tap in enumerate(taps)
        )
    return x
