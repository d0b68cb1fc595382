"""Spectral convolution: identities of analysis, and numpy's FFT in float64."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import spectral

GRIDS = [(8,), (9,), (8, 10), (7, 9), (8, 9), (9, 8), (6, 5, 8), (5, 6, 7)]


def band_limited(grid, highest, seed=0, batch=1, channels=2):
    """A function of continuous coordinates, sampled: |k| <= highest on each axis."""
    rng = np.random.default_rng(seed)
    points = np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij")
    x = np.zeros((batch, *grid, channels))
    for _ in range(6):
        k = rng.integers(-highest, highest + 1, len(grid))
        phase = 2 * np.pi * sum(ki * p for ki, p in zip(k, points, strict=True))
        shift = rng.uniform(0, 2 * np.pi, (batch, *(1,) * len(grid), channels))
        x += np.cos(phase[None, ..., None] + shift)
    return x


def identity_weight(rows, channels):
    weight = np.zeros((2, *rows, channels, channels), np.float32)
    weight[0] = np.eye(channels)
    return jnp.asarray(weight)


def rows_of(n_modes):
    return (*n_modes[:-1], n_modes[-1] // 2 + 1)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("output", ["same", "up", "down", "mixed"])
def test_identity_weights_reproduce_band_limited_fields(grid, output):
    """On its own grid and, the same function sampled anew, on finer and coarser."""
    change = {
        "same": (0, 0, 0),
        "up": (5, 4, 3),
        "down": (-1, -2, -1),
        "mixed": (7, -1, 2),
    }[output][: len(grid)]
    output_grid = tuple(n + d for n, d in zip(grid, change, strict=True))
    highest = 1 if min(output_grid) < 5 else 2
    n_modes = (5,) * len(grid)
    x = band_limited(grid, highest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = jaxops.spectral_conv(
            jnp.asarray(x, jnp.float32),
            identity_weight(rows_of(n_modes), 2),
            n_modes,
            output_grid,
        )
    expected = band_limited(output_grid, highest)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=1e-6 * scale)


@pytest.mark.parametrize("grid", [(16,), (15,), (16, 12), (15, 13), (9, 8, 10)])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_weights_ik_to_the_n_differentiate_sines(grid, order):
    """Along each axis in turn, against the derivative written down."""
    n_modes = (7,) * len(grid)
    rows = rows_of(n_modes)
    for axis, size in enumerate(grid):
        k = np.arange(rows[axis]) - (rows[axis] // 2 if axis < len(grid) - 1 else 0)
        factor = (2j * np.pi * k) ** order
        factor = factor.reshape([-1 if a == axis else 1 for a in range(len(grid))])
        factor = np.broadcast_to(factor, rows)[..., None, None]
        weight = jnp.asarray(np.stack([factor.real, factor.imag]), jnp.float32)
        t = np.arange(size) / size
        turn = order * np.pi / 2  # each derivative turns a sine by a quarter
        signal = np.sin(2 * np.pi * 3 * t + 0.3) + np.cos(2 * np.pi * t)
        derivative = (6 * np.pi) ** order * np.sin(2 * np.pi * 3 * t + 0.3 + turn)
        derivative += (2 * np.pi) ** order * np.cos(2 * np.pi * t + turn)
        shape = [size if a == axis else 1 for a in range(len(grid))]

        def spread(v, shape=shape):
            return np.broadcast_to(v.reshape(shape), grid)[None, ..., None]

        x = jnp.asarray(spread(signal), jnp.float32)
        y = jaxops.spectral_conv(x, weight, n_modes)
        # Float32 rounding of the signal's other modes is raised by (2 pi 3)^order too.
        scale = (6 * np.pi) ** order
        np.testing.assert_allclose(y, spread(derivative), atol=2e-6 * scale)


def numpy_spectral_conv(x, weight, n_modes, output_grid):
    """The same by complex FFTs: pick, multiply, place, irfftn."""
    grid = x.shape[1:-1]
    axes = tuple(range(1, 1 + len(grid)))
    weight = weight[0] + 1j * weight[1]
    spectrum = np.fft.rfftn(x.astype(np.float64), axes=axes, norm="forward")
    shape = (x.shape[0], *output_grid[:-1], output_grid[-1] // 2 + 1, weight.shape[-1])
    placed = np.zeros(shape, complex)
    small = [min(n, m) for n, m in zip(grid, output_grid, strict=True)]
    counts = [min(m, n) for m, n in zip(n_modes[:-1], small[:-1], strict=True)]
    kept = [range(-(c // 2), (c + 1) // 2) for c in counts]
    kept.append(range(min(n_modes[-1] // 2, small[-1] // 2) + 1))
    for k in np.ndindex(*(len(ks) for ks in kept)):
        k = tuple(ks[i] for ks, i in zip(kept, k, strict=True))
        source = tuple(i % n for i, n in zip(k, spectrum.shape[1:-1], strict=True))
        target = tuple(i % n for i, n in zip(k, placed.shape[1:-1], strict=True))
        row = [i + n // 2 for i, n in zip(k[:-1], weight.shape[: len(k) - 1])]  # noqa: B905
        row = (*row, k[-1])
        placed[(slice(None), *target)] = spectrum[(slice(None), *source)] @ weight[row]
    return np.fft.irfftn(placed, s=output_grid, axes=axes, norm="forward")


@pytest.mark.parametrize(
    ("grid", "output_grid", "n_modes", "rows"),
    [
        ((8,), (8,), (8,), (5,)),
        ((9,), (14,), (8,), (5,)),
        ((8, 8), (8, 8), (8, 8), (8, 5)),  # all modes, Nyquist included
        ((8, 8), (11, 6), (6, 6), (6, 4)),
        ((7, 9), (7, 9), (4, 5), (9, 5)),  # fewer modes than rows
        ((6, 6), (6, 6), (5, 4), (8, 6)),  # an odd number of rows cut off
        ((5, 4, 6), (5, 4, 6), (4, 4, 6), (4, 4, 4)),
        ((4, 4, 4), (7, 4, 5), (3, 4, 4), (3, 4, 3)),
    ],
)
def test_weights_that_are_not_hermitian_give_what_irfftn_gives(
    grid, output_grid, n_modes, rows
):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, *grid, 3)).astype(np.float32)
    weight = rng.standard_normal((2, *rows, 3, 4)).astype(np.float32)
    expected = numpy_spectral_conv(x, weight, n_modes, output_grid)
    y = jaxops.spectral_conv(jnp.asarray(x), jnp.asarray(weight), n_modes, output_grid)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=2e-6 * scale)


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("grid", [(8,), (7, 6), (4, 5, 6)])
def test_a_kernel_behind_is_a_1x1_convolution_of_the_result(grid, features):
    n_modes = (4,) * len(grid)
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, *grid, 2)).astype(np.float32)
    weight = rng.standard_normal((2, *n_modes[:-1], 3, 2, 4)).astype(np.float32)
    kernel = rng.standard_normal((4, features)).astype(np.float32)
    output_grid = tuple(n + 1 for n in grid)
    expected = numpy_spectral_conv(x, weight, n_modes, output_grid) @ kernel
    x, weight, kernel = (jnp.asarray(a) for a in (x, weight, kernel))
    y = jaxops.spectral_conv(x, weight, n_modes, output_grid, kernel=kernel)
    np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("compat", [None, "neuralop-2.0"])
@pytest.mark.parametrize("grid", [(8,), (7, 6), (4, 5, 6)])
def test_a_bias_of_the_input_is_added_at_each_point(grid, compat):
    """To another grid too, where ``compat`` loses the constant of an odd axis."""
    n_modes = (4,) * len(grid)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, *grid, 2)).astype(np.float32)
    weight = rng.standard_normal((2, *n_modes[:-1], 3, 2, 4)).astype(np.float32)
    bias = rng.standard_normal(2).astype(np.float32)
    added, x, weight, bias = (jnp.asarray(a) for a in (x + bias, x, weight, bias))
    for shape in (grid, tuple(n - 1 for n in grid)):
        expected = jaxops.spectral_conv(added, weight, n_modes, shape, compat)
        y = jaxops.spectral_conv(x, weight, n_modes, shape, compat, x_bias=bias)
        np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max())


def test_gradients_are_those_of_the_float64_reference():
    """Finite differences of numpy's FFT form, which is bilinear: exact to rounding."""
    grid, n_modes, rows = (5, 6), (4, 4), (4, 3)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, *grid, 2)).astype(np.float32)
    weight = rng.standard_normal((2, *rows, 2, 3)).astype(np.float32)
    cotangent = rng.standard_normal((2, *grid, 3)).astype(np.float32)

    def loss(x, weight):
        y = jaxops.spectral_conv(x, weight, n_modes)
        return (y * jnp.asarray(cotangent)).sum()

    gradients = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(weight))
    for index, gradient in enumerate(gradients):
        value = (x, weight)[index]
        expected = np.zeros(value.shape)
        for position in np.ndindex(*value.shape):
            unit = np.zeros(value.shape)
            unit[position] = 1
            arguments = [x, weight]
            arguments[index] = unit
            y = numpy_spectral_conv(*arguments, n_modes, grid)
            expected[position] = (y * cotangent).sum()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, atol=2e-6 * scale)


@pytest.mark.parametrize(("precision", "tolerance"), [("half", 2e-2), ("mixed", 5e-3)])
def test_half_precision_is_near_and_returns_the_input_dtype(precision, tolerance):
    """Float16 has 11 bits: 5e-4 a product, a few of them in a row."""
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((2, 8, 8, 4)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((2, 4, 3, 4, 4)), jnp.float32)
    full = jaxops.spectral_conv(x, weight, (4, 4))
    low = spectral.spectral_conv(x, weight, (4, 4), precision=precision)
    assert low.dtype == jnp.float32
    error = float(jnp.abs(low - full).max() / jnp.abs(full).max())
    assert 0 < error < tolerance


def test_more_modes_than_the_grid_has_are_clamped_with_a_warning():
    x = jnp.asarray(band_limited((6, 6), 2), jnp.float32)
    with pytest.warns(UserWarning, match=r"n_modes=\(8, 8\) is more than a grid"):
        y = jaxops.spectral_conv(x, identity_weight((8, 5), 2), (8, 8))
    np.testing.assert_allclose(y, x, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_modes": (4,)}, "one entry of n_modes"),
        ({"output_shape": (4,)}, "output_shape"),
        ({"n_modes": (6, 4)}, "needs .* rows of the weight"),
        ({"weight": jnp.zeros((2, 4, 3, 5, 2))}, "takes 5 channels"),
        ({"weight": jnp.zeros((4, 3, 2, 2))}, "real part first"),
        ({"output_shape": (0, 4)}, "at least one point"),
        ({"compat": "neuralop"}, "compat is None or"),
        ({"precision": "double"}, "precision is 'full'"),
    ],
)
def test_mistakes_are_told(arguments, text):
    call = {
        "x": jnp.zeros((1, 8, 8, 2)),
        "weight": jnp.zeros((2, 4, 3, 2, 2)),
        "n_modes": (4, 4),
    }
    with pytest.raises(ValueError, match=text):
        jaxops.spectral_conv(**{**call, **arguments})


def test_whole_numbers_are_taken_for_floats_and_complex_ones_refused():
    x, weight = jnp.arange(8)[None, :, None], jnp.ones((2, 3, 1, 1))
    y = jaxops.spectral_conv(x, weight, (4,))
    expected = jaxops.spectral_conv(x.astype(jnp.float32), weight, (4,))
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(TypeError, match="pass real numbers"):
        jaxops.spectral_conv(x, weight.astype(jnp.complex64), (4,))
