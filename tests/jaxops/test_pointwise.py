"""1x1 convolutions and activations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import pointwise
from jaxops.device import once, trace_for
from jaxops.matmul import along_axis


@pytest.mark.parametrize("points", [(3,), (2, 5), (2, 3, 4, 5)])
def test_dense_is_a_product_at_each_point(points):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*points, 4)).astype(np.float32)
    kernel = rng.standard_normal((4, 6)).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    y = pointwise.dense(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(bias))
    expected = x.astype(np.float64) @ kernel + bias
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "metal"])
@pytest.mark.parametrize("shape", [(3, 16), (16, 1), (16, 16)])
def test_dense_layers_have_their_gradients_in_every_form(kind, shape):
    """Few inputs, one output, many of both; with a function before."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(size)
        for size in ((2, 12, shape[0]), shape, shape[1:], (2, 12, shape[1]))
    ]
    x, kernel, bias, y = (jnp.asarray(a, jnp.float32) for a in arrays)

    def loss(x, kernel, bias):
        hidden = pointwise.dense_of(jnp.tanh, x, kernel)
        found = hidden + pointwise.on_all_points(bias, hidden.shape)
        return (found * y).sum(), found

    with trace_for(kind):
        gradient = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        (of_x, of_kernel, of_bias), found = gradient(x, kernel, bias)
    x, kernel, bias, y = arrays
    hidden = np.tanh(x)
    expected = (
        (found, hidden @ kernel + bias),
        (of_x, (y @ kernel.T) * (1 - hidden**2)),
        (of_kernel, np.einsum("bni,bno->io", hidden, y)),
        (of_bias, y.sum((0, 1))),
    )
    for ours, theirs in expected:
        atol = 2e-6 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("channels", [1, 3, 16, 32, 64, 65])
@pytest.mark.parametrize("points", [(0,), (7,), (4, 6)])
def test_what_stands_on_all_points_has_sums_over_them_as_gradient(points, channels):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal(channels), jnp.float32)
    y = rng.standard_normal((*points, channels)).astype(np.float32)

    def loss(values):
        return (pointwise.on_all_points(values, y.shape) * y).sum()

    for kind in ("cpu", "gpu"):
        with trace_for(kind):
            gradient = jax.jit(jax.grad(loss))(values)
        expected = y.astype(np.float64).sum(tuple(range(len(points))))
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=2e-6)


def test_what_is_read_often_is_computed_once():
    """Three readers behind reshapes; values that a division by 1 must not change."""
    x = jnp.asarray([[0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-37, -3.0, 7.0]])
    found = jax.jit(once)(x)
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(jnp.signbit(found), jnp.signbit(x))
    gradient = jax.grad(lambda x: (once(x) * 3).sum())(x)
    np.testing.assert_array_equal(gradient, jnp.full_like(x, 3))

    def readers(x, b, w):
        b = jnp.broadcast_to(b, (4, 6, 8))
        y = once(x.reshape(4, 6, 8) + b)
        return y.reshape(24, 8) @ w, jnp.swapaxes(y.reshape(4, 48), 0, 1), y * b

    shapes = [jnp.ones(s) for s in ((24, 8), (8,), (8, 5))]
    text = jax.jit(readers).lower(*shapes).compile().as_text()
    assert text.count(" divide(") == 1


def exact_gelu(x):
    """Value, slope and curvature, in float64."""
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x])
    return x * cumulative, cumulative + x * density, (2 - x**2) * density


def test_gelu_is_the_exact_form_with_its_derivative():
    x = jnp.linspace(-12, 12, 4001)
    value, slope, curvature = exact_gelu(np.asarray(x, np.float64))
    error = np.abs(np.asarray(pointwise.gelu(x), np.float64) - value)
    two_roundings = 2 * jnp.finfo(jnp.float32).eps
    assert (error / np.maximum(abs(x), 1)).max() <= two_roundings
    first = jax.grad(lambda x: pointwise.gelu(x).sum())
    np.testing.assert_allclose(first(x), slope, atol=3e-7)
    _, forward = jax.jvp(pointwise.gelu, (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(forward, slope, atol=3e-7)
    second = jax.grad(lambda x: first(x).sum())
    np.testing.assert_allclose(second(x), curvature, atol=2e-6)


def test_gelu_far_out_and_without_a_number():
    x = jnp.asarray([-np.inf, -3e38, -10, 10, 3e38, np.inf, np.nan])
    value, slope = jax.jvp(pointwise.gelu, (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(value, [0, 0, 0, 10, 3e38, np.inf, np.nan], atol=1e-6)
    np.testing.assert_allclose(slope, [0, 0, 0, 1, 1, 1, np.nan], atol=2e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gelu_in_half_precision_is_rounded_once(dtype):
    """Besides a polynomial's error, which is 4.8 times 1.9e-6 at most for the value and
    3.1e-5 for the slope: an eighth of what float16 rounds a slope of 1 by."""
    x = jnp.linspace(-8, 8, 1001).astype(dtype)
    tangent = jnp.full_like(x, 3)
    value, change = jax.jvp(pointwise.gelu, (x,), (tangent,))
    assert value.dtype == change.dtype == x.dtype
    exact, slope, _ = exact_gelu(np.asarray(x, np.float64))
    for ours, expected, atol in (
        (value, exact, 1e-5),
        (change, 3 * slope, 3 * 3.2e-5),
    ):
        half_a_step = jnp.finfo(dtype).eps / 2
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), expected, rtol=half_a_step * 1.01, atol=atol
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gelu_of_half_precision_far_out(dtype):
    x = jnp.asarray([-np.inf, -6e4, -10, 10, 6e4, np.inf, np.nan], dtype)
    value, slope = jax.jvp(pointwise.gelu, (x,), (jnp.ones_like(x),))
    expected = np.where(np.arange(7) < 3, 0, np.asarray(x, np.float32))
    np.testing.assert_allclose(np.asarray(value, np.float32), expected, atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(slope, np.float32), [0, 0, 0, 1, 1, 1, np.nan], atol=1e-6
    )


def test_gelu_in_float64_is_exact_to_float64():
    x = np.linspace(-6, 6, 101)
    value, slope, curvature = exact_gelu(x)
    module = jax if hasattr(jax, "enable_x64") else jax.experimental
    with module.enable_x64(True):  # moved between versions
        x = jnp.asarray(x)
        first = jax.grad(lambda x: pointwise.gelu(x).sum())
        second = jax.grad(lambda x: first(x).sum())
        np.testing.assert_allclose(pointwise.gelu(x), value, atol=1e-15)
        np.testing.assert_allclose(first(x), slope, atol=1e-15)
        np.testing.assert_allclose(second(x), curvature, atol=1e-15)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_along_axis_is_tensordot(axis):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    matrix = rng.standard_normal((7, x.shape[axis])).astype(np.float32)
    expected = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
    y = along_axis(matrix, jnp.asarray(x), axis)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_along_axis_has_all_derivatives():
    """Forward, backward, mapped and twice, though its first one is written by hand."""
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((3, 4))
    x, v = (rng.standard_normal((5, 4, 2)).astype(np.float32) for _ in range(2))

    def squares(x):
        return jnp.sum(along_axis(matrix, x, 0) ** 2)

    gram = 2 * matrix.T @ matrix
    expected = np.einsum("ij,bjc->bic", gram, x)
    np.testing.assert_allclose(jax.vmap(jax.grad(squares))(x), expected, rtol=1e-5)
    _, change = jax.vmap(lambda x, v: jax.jvp(squares, (x,), (v,)))(x, v)
    np.testing.assert_allclose(change, (expected * v).sum((1, 2)), rtol=1e-4)
    _, second = jax.jvp(jax.grad(squares), (x[0],), (v[0],))
    np.testing.assert_allclose(second, gram @ v[0], rtol=1e-5)


def test_matrix_products_are_full_precision_unless_the_user_says_otherwise():
    def product(a):
        return along_axis(np.eye(4), a[None], 1)

    square = jnp.zeros((4, 4))
    text = jax.jit(product).lower(square).as_text()
    assert "HIGHEST" in text
    with jax.default_matmul_precision("tensorfloat32"):
        text = jax.jit(product).lower(square).as_text()
    assert "HIGHEST" not in text


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="4 input channels"):
        pointwise.dense(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
    with pytest.raises(ValueError, match="non_linearity is a function or one of gelu"):
        pointwise.activation("geluu")
    with pytest.raises(ValueError, match="cannot be applied to 3 values"):
        along_axis(np.zeros((2, 4)), jnp.zeros((2, 3)), 1)
