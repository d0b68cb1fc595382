"""Resizing against scipy and PyTorch; closed forms where PyTorch is absent."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

from jaxops import resize

CASES = [
    ((6,), (9,)),
    ((9,), (6,)),
    ((7,), (12,)),
    ((6, 5), (6, 10)),
    ((8, 9), (5, 4)),
    ((1, 4), (3, 8)),
    ((4, 3, 6), (7, 6, 3)),
]


def field(grid):
    return np.random.default_rng(0).standard_normal((2, *grid, 3)).astype(np.float32)


@pytest.mark.parametrize(("grid", "sizes"), CASES)
def test_fourier_is_scipys_resample(grid, sizes):
    x = field(grid)
    expected = x.astype(np.float64)
    for axis, size in enumerate(sizes, start=1):
        expected = scipy.signal.resample(expected, size, axis=axis)
    y = resize.fourier(jnp.asarray(x), sizes)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("align_corners", [False, True])
def test_linear_keeps_straight_lines_and_cubic_constants(align_corners):
    """Straight lines away from the edges, where the edge value is repeated."""
    old, new = 9, 24
    position = np.arange(new) / (new - 1) * (old - 1)
    if not align_corners:
        position = (np.arange(new) + 0.5) * old / new - 0.5
    line = jnp.asarray(3 * np.arange(old) + 1, jnp.float32)[None, :, None]
    y = resize.linear(line, (new,), align_corners=align_corners)
    inside = (position >= 0) & (position <= old - 1)
    expected = 3 * position[inside] + 1
    np.testing.assert_allclose(np.asarray(y)[0, inside, 0], expected, rtol=2e-6)
    flat = resize.cubic(jnp.ones((1, old, 1)), (new,), align_corners=align_corners)
    np.testing.assert_allclose(flat, 1, rtol=2e-6)


def test_cubic_at_a_midpoint_is_the_kernels_value():
    """Keys' kernel with a = -0.75 at 1/2 and 3/2: 0.59375 and -0.09375."""
    x = jnp.asarray([0, 0, 1, 0, 0], jnp.float32)[None, :, None]
    y = resize.cubic(x, (9,), align_corners=True)
    expected = [0, -0.09375, 0, 0.59375, 1, 0.59375, 0, -0.09375, 0]
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-7)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("grid", "sizes"), CASES)
def test_linear_and_cubic_are_pytorchs(grid, sizes, align_corners):
    torch = pytest.importorskip("torch")
    x = field(grid)
    channels_first = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    modes = [(resize.linear, ("linear", "bilinear", "trilinear")[len(grid) - 1])]
    modes += [(resize.cubic, "bicubic")] if len(grid) == 2 else []
    for function, mode in modes:
        expected = torch.nn.functional.interpolate(
            channels_first, size=sizes, mode=mode, align_corners=align_corners
        )
        expected = np.moveaxis(expected.numpy(), 1, -1)
        y = function(jnp.asarray(x), sizes, align_corners=align_corners)
        np.testing.assert_allclose(y, expected, atol=5e-6)


def test_a_large_fourier_matrix_is_made_in_little_memory():
    """Published 1D data have 8192 points; the sum over wavenumbers is a product."""
    x = np.cos(2 * np.pi * 5 * np.arange(3000) / 3000)
    y = resize.fourier(jnp.asarray(x[None, :, None], jnp.float32), (4001,))
    expected = np.cos(2 * np.pi * 5 * np.arange(4001) / 4001)
    # A sum of 3000 products in float32.
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-5)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="one size of at least 1 for each"):
        resize.fourier(jnp.zeros((1, 4, 4, 1)), (4,))
