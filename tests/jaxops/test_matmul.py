"""Products whose derivatives are written by hand, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import pointwise
from jaxops.device import has_barrier, trace_for
from jaxops.matmul import GPU_ROWS, batched_matmul, rows_matmul

ROWS = 2 * 1031  # two parts of a gradient; a prime number of rows has none
SHAPES = {
    "more inputs": (ROWS, 5, 3),
    "square": (ROWS, 4, 4),
    "more outputs": (ROWS, 32, 33),
    "few inputs": (ROWS, 3, 8),
    "few rows and inputs": (5, 1, 9),
    "many outputs": (ROWS, 32, 128),
    "no parts": (2063, 5, 3),
    "few rows": (7, 5, 3),
}


def normal(*shape, seed=0):
    rng = np.random.default_rng((seed, *shape))
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def assert_near(ours, expected):
    """Sums of up to 2063 products: 1e-5 of the largest is a hundred roundings."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_matmul_has_all_derivatives(name):
    rows, inputs, outputs = SHAPES[name]
    x, k, y = normal(rows, inputs), normal(inputs, outputs), normal(rows, outputs)
    dx, dk = normal(rows, inputs, seed=1), normal(inputs, outputs, seed=1)
    x64, k64, y64, dx64, dk64 = (np.asarray(a, np.float64) for a in (x, k, y, dx, dk))
    assert_near(rows_matmul(x, k), x64 @ k64)

    def loss(x, k):
        return (rows_matmul(x, k) * y).sum()

    of_x, of_k = jax.jit(jax.grad(loss, (0, 1)))(x, k)
    assert_near(of_x, y64 @ k64.T)
    assert_near(of_k, x64.T @ y64)
    _, change = jax.jvp(rows_matmul, (x, k), (dx, dk))
    assert_near(change, dx64 @ k64 + x64 @ dk64)

    def squares(k):
        return (rows_matmul(x, k) ** 2).sum() / 2

    _, second = jax.jvp(jax.grad(squares), (k,), (dk,))
    assert_near(second, x64.T @ (x64 @ dk64))
    mapped = jax.vmap(jax.grad(loss, 1), (0, None))(jnp.stack([x, dx]), k)
    assert_near(mapped[1], dx64.T @ y64)


def test_no_rows_give_a_gradient_of_zeros():
    k = normal(5, 3)
    of_k = jax.grad(lambda k: rows_matmul(jnp.zeros((0, 5)), k).sum())(k)
    np.testing.assert_array_equal(of_k, np.zeros((5, 3)))


def text_for(kind, function, *args):
    with trace_for(kind):
        return jax.jit(lambda *a: function(*a)).lower(*args).as_text()


def test_barriers_stand_where_they_help():
    """On CPUs before the gradient of the kernel, on GPUs behind that of the input."""

    def of_x(x, k):
        return jax.grad(lambda x: rows_matmul(x, k).sum())(x)

    def of_k(x, k):
        return jax.grad(lambda k: rows_matmul(x, k).sum())(k)

    x, k = jnp.zeros((ROWS, 5)), jnp.zeros((5, 3))
    found = {
        (kind, function.__name__)
        for kind in ("cpu", "gpu", "metal")
        for function in (of_x, of_k)
        if "optimization_barrier" in text_for(kind, function, x, k)
    }
    with trace_for("gpu"):
        expected = {("cpu", "of_k"), ("gpu", "of_x")} if has_barrier("gpu") else set()
    assert found == expected


@pytest.mark.parametrize(
    ("inputs", "read", "precision"),
    [(16, 16, "highest"), (3, 3, "highest"), (3, 4, "tensorfloat32")],
)
def test_a_gpu_takes_the_gradient_of_a_large_kernel_in_parts(inputs, read, precision):
    """Of 16 bytes a row, where TF32's kernels read so many."""
    rows, outputs = GPU_ROWS, 17
    x, y = normal(rows, inputs), normal(rows, outputs)
    k, weights = normal(inputs, outputs), normal(inputs, outputs, seed=1)

    def gradients(x, y, k):
        return jax.grad(lambda x, k: (rows_matmul(x, k) * y).sum(), (0, 1))(x, k)

    parts = f"tensor<128x2048x{read}xf32>"
    with jax.default_matmul_precision(precision):
        assert parts in text_for("gpu", gradients, x, y, k)
        assert parts not in text_for("gpu", gradients, x[1:], y[1:], k)
        with trace_for("gpu"):
            of_x, of_k = jax.jit(lambda *a: gradients(*a))(x, y, k)
            _, change = jax.jvp(lambda k: rows_matmul(x, k), (k,), (weights,))
    x64, y64, k64, weights64 = (np.asarray(a, np.float64) for a in (x, y, k, weights))
    assert_near(of_x, y64 @ k64.T)
    assert_near(of_k, x64.T @ y64)
    assert_near(change, x64 @ weights64)


@pytest.mark.parametrize("rows", [4 * 31, 2 * 31, 31])
@pytest.mark.parametrize("shape", [(32, 16), (8, 9)])
def test_rows_stand_side_by_side_where_matrix_units_multiply(rows, shape):
    """As many as divide their number and fit in 128; the function stays the same."""
    x, k, y = normal(rows, shape[0]), normal(*shape), normal(rows, shape[1])

    def gradients(x, y, k):
        return jax.grad(lambda x, k: (rows_matmul(x, k) * y).sum(), (0, 1))(x, k)

    count = {124: 4, 62: 2, 31: 1}[rows]
    joined = f"tensor<{rows // count}x{count * shape[0]}xf32>"
    with jax.default_matmul_precision("tensorfloat32"):
        assert joined in text_for("gpu", gradients, x, y, k)
        with trace_for("gpu"):
            of_x, of_k = jax.jit(lambda *a: gradients(*a))(x, y, k)
            found = jax.jit(lambda *a: rows_matmul(*a))(x, k)
    x64, y64, k64 = (np.asarray(a, np.float64) for a in (x, y, k))
    assert_near(found, x64 @ k64)
    assert_near(of_x, y64 @ k64.T)
    assert_near(of_k, x64.T @ y64)
    if count > 1:
        assert joined not in text_for("gpu", gradients, x, y, k)  # in full precision
        half = [a.astype(jnp.bfloat16) for a in (x, y, k)]
        assert joined.replace("f32", "bf16") in text_for("gpu", gradients, *half)
        assert joined not in text_for("cpu", gradients, x, y, k)


@pytest.mark.parametrize(
    ("kind", "dtype", "is_sum"),
    [
        ("cpu", "float32", True),
        ("cpu", "bfloat16", True),
        ("gpu", "float32", True),
        ("gpu", "bfloat16", False),
        ("metal", "float32", False),
    ],
)
def test_a_product_of_few_inputs_is_a_sum(kind, dtype, is_sum):
    x, k, y = (normal(*s).astype(dtype) for s in ((31, 4), (4, 5), (31, 5)))

    def layer(x, k):
        return pointwise.dense(x, k)

    assert ("dot_general" in text_for(kind, layer, x, k)) != is_sum
    assert "dot_general" in text_for(
        kind, layer, jnp.concatenate([x, x], 1), normal(8, 5)
    )
    with trace_for(kind):
        found = jax.jit(lambda *a: layer(*a))(x, k)
        loss = jax.grad(lambda x, k: (layer(x, k) * y).sum(), (0, 1))
        of_x, of_k = jax.jit(loss)(x, k)
    x64, k64, y64 = (np.asarray(v, np.float64) for v in (x, k, y))
    for ours, expected in (
        (found, x64 @ k64),
        (of_x, y64 @ k64.T),
        (of_k, x64.T @ y64),
    ):
        scale = np.abs(expected).max() * jnp.finfo(dtype).eps
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), expected, rtol=0, atol=4 * scale
        )


@pytest.mark.parametrize("batch", [1, 3])
def test_batched_matmul_has_all_derivatives(batch):
    a, b, y = normal(batch, 4, 5), normal(batch, 5, 6), normal(batch, 4, 6)
    da, db = normal(batch, 4, 5, seed=1), normal(batch, 5, 6, seed=1)
    a64, b64, y64, da64, db64 = (np.asarray(v, np.float64) for v in (a, b, y, da, db))
    of_a, of_b = jax.grad(lambda a, b: (batched_matmul(a, b) * y).sum(), (0, 1))(a, b)
    assert_near(of_a, y64 @ b64.transpose(0, 2, 1))
    assert_near(of_b, a64.transpose(0, 2, 1) @ y64)
    _, change = jax.jvp(batched_matmul, (a, b), (da, db))
    assert_near(change, da64 @ b64 + a64 @ db64)

    def squares(b):
        return (batched_matmul(a, b) ** 2).sum() / 2

    _, second = jax.jvp(jax.grad(squares), (b,), (db,))
    assert_near(second, a64.transpose(0, 2, 1) @ (a64 @ db64))


def two_layers(x, weights):
    first, second = weights
    return pointwise.dense(pointwise.gelu(pointwise.dense(x, first)), second)


@pytest.mark.parametrize("points", [(2, 5, 7), (64,)])  # with and without a remainder
def test_in_parts_is_the_whole(points, monkeypatch):
    x, weights = normal(*points, 3), (normal(3, 8), normal(8, 2))

    def apply(x, weights):
        return pointwise.in_parts(two_layers, x, weights, 8)

    def loops(function, kind="cpu"):
        with trace_for(kind):
            jaxpr = jax.make_jaxpr(lambda *a: function(*a))(x, weights)
            return str(jaxpr).count("scan[")

    def loss(function):
        return lambda x, weights: (function(x, weights) ** 2).sum()

    assert not loops(apply)
    monkeypatch.setattr(pointwise, "PARTS_FROM", 1)
    monkeypatch.setattr(pointwise, "PART_BYTES", 16 * 8 * 4)  # of 16 points
    assert loops(apply) == 1
    assert not loops(apply, "metal")
    assert not loops(jax.grad(loss(apply)))
    assert_near(apply(x, weights), two_layers(x, weights))
    for ours, expected in zip(
        jax.tree.leaves(jax.grad(loss(apply), (0, 1))(x, weights)),
        jax.tree.leaves(jax.grad(loss(two_layers), (0, 1))(x, weights)),
        strict=True,
    ):
        assert_near(ours, expected)
    _, change = jax.jvp(apply, (x, weights), (x, weights))
    _, expected = jax.jvp(two_layers, (x, weights), (x, weights))
    assert_near(change, expected)
