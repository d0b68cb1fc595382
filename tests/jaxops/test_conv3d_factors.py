"""Separable and (2+1)D convolutions, kernels factorised, and the pixel shuffle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_text import convolutions, faults

import jaxops
from jaxops.conv3d import (
    conv2plus1d,
    factorise,
    pixel_shuffle,
    pixel_unshuffle,
    separable_conv3d,
)

OPTIONS = [
    {},
    {"strides": (2, 1, 3), "dilation": (1, 2, 1), "padding": ((0, 2), (1, 1), (2, 0))},
    {"strides": 2, "padding": 1, "padding_mode": "reflect"},
]


def randoms(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def assert_close(found, expected):
    """In units of the largest value; 1e-5 is promised."""
    atol = 3e-6 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def with_gradients(function, *args):
    """Value, gradients of a weighted sum, and the text of the program of all."""

    def program(*args):
        output, pull = jax.vjp(function, *args)
        weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32))
        return output, *pull(weights.reshape(output.shape))

    lowered = jax.jit(program).lower(*args)
    run = lowered.compile({"xla_backend_optimization_level": 0})  # compiles faster
    return run(*args), lowered.as_text()


def check(factored, dense_kernel, x, *factors, options):
    """``factored(x, *factors)`` is the convolution with ``dense_kernel(*factors)``."""
    found, text = with_gradients(lambda *a: factored(*a, **options), x, *factors)
    expected, _ = with_gradients(
        lambda x, *f: jaxops.conv3d(x, dense_kernel(*f), **options), x, *factors
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs)
    assert not faults(text)
    if not options:
        assert len(convolutions(text)) == 2  # forward and input gradient


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rank", [None, 2])
def test_separable_is_the_dense_convolution_of_the_product(rank, options):
    front = () if rank is None else (rank,)
    shapes = (2, 5, 6, 7, 3), (*front, 3, 3), (*front, 2, 3, 3, 4)

    def dense(depth, plane):
        if rank is None:
            depth, plane = depth[None], plane[None]
        return jnp.einsum("rtc,rijco->tijco", depth, plane, precision="highest")

    check(separable_conv3d, dense, *randoms(*shapes), options=options)


@pytest.mark.parametrize("options", OPTIONS)
def test_2plus1d_is_the_dense_convolution_of_the_product(options):
    shapes = (2, 5, 6, 7, 3), (2, 3, 3, 5), (3, 5, 4)

    def dense(plane, depth):
        return jnp.einsum("ijcm,tmo->tijco", plane, depth, precision="highest")

    check(conv2plus1d, dense, *randoms(*shapes), options=options)


def test_2plus1d_with_a_bias_between():
    """Zeros lie around what the bias has been added to, as between two layers."""
    x, plane, depth = randoms((1, 4, 5, 6, 3), (3, 3, 3, 5), (3, 5, 2))
    bias = jnp.arange(5, dtype=jnp.float32)

    @jax.jit
    def steps(x, plane, depth):
        x = jaxops.conv3d(x, plane[None])
        return jaxops.conv3d(x + jnp.broadcast_to(bias, x.shape), depth[:, None, None])

    y = jax.jit(conv2plus1d)(x, plane, depth, bias)
    assert_close(y, steps(x, plane, depth))


def rebuilt(form, depth, plane):
    terms = "rtc,rijco->tijco" if form == "separable" else "tro,ijcr->tijco"
    return np.einsum(terms, depth.astype(np.float64), plane.astype(np.float64))


@pytest.mark.parametrize(("form", "exact"), [("separable", 3), ("2plus1d", 12)])
def test_factors_are_exact_at_full_rank_and_run(form, exact):
    x, kernel = randoms((1, 6, 5, 4, 3), (3, 2, 3, 3, 4))
    depth, plane, error = factorise(kernel, exact, form)
    assert error < 1e-6
    assert depth.dtype == plane.dtype == np.float32
    np.testing.assert_allclose(rebuilt(form, depth, plane), kernel, atol=1e-6)
    if form == "separable":
        y = jax.jit(separable_conv3d)(x, jnp.asarray(depth), jnp.asarray(plane))
    else:
        y = jax.jit(conv2plus1d)(x, jnp.asarray(plane), jnp.asarray(depth))
    assert_close(y, jax.jit(jaxops.conv3d)(x, kernel))


@pytest.mark.parametrize("form", ["separable", "2plus1d"])
def test_factors_are_the_best_of_their_rank_and_the_error_is_theirs(form):
    """Eckart and Young: what is missing is the tail of the singular values."""
    (kernel,) = randoms((3, 3, 3, 4, 5), seed=1)
    dense = np.asarray(kernel, np.float64)
    if form == "separable":
        matrices = dense.transpose(3, 0, 1, 2, 4).reshape(4, 3, -1)
    else:
        matrices = dense.transpose(1, 2, 3, 0, 4).reshape(36, 15)
    values = np.linalg.svd(matrices, compute_uv=False)
    for rank in (1, 2):
        depth, plane, error = factorise(kernel, rank, form)
        missing = np.linalg.norm(rebuilt(form, depth, plane) - dense)
        tail = np.linalg.norm(values[..., rank:]) / np.linalg.norm(dense)
        assert error == pytest.approx(tail, rel=1e-6)
        assert error == pytest.approx(missing / np.linalg.norm(dense), rel=1e-6)


def test_a_product_of_factors_is_found_again():
    depth, plane = randoms((1, 3, 4), (1, 3, 3, 4, 5), seed=2)
    kernel = jnp.einsum("rtc,rijco->tijco", depth, plane, precision="highest")
    *_, error = factorise(kernel, 1)
    assert error < 1e-6
    *_, error = factorise(jnp.zeros((3, 3, 3, 2, 2)), 1)
    assert error == 0


@pytest.mark.parametrize("factors", [(2, 3, 4), (1, 2, 2), (4, 1, 1)])
def test_pixel_shuffle_is_einops_order(factors):
    """b d h w (c rd rh rw) -> b (d rd) (h rh) (w rw) c, point by point."""
    sizes, channels = (2, 3, 1), 2
    (x,) = randoms((2, *sizes, channels * int(np.prod(factors))))
    y = pixel_shuffle(x, factors)
    assert y.shape == (2, *(n * r for n, r in zip(sizes, factors, strict=True)), 2)
    for (b, *point, c), value in np.ndenumerate(np.asarray(y)):
        coarse = tuple(p // r for p, r in zip(point, factors, strict=True))
        inner = [p % r for p, r in zip(point, factors, strict=True)]
        channel = np.ravel_multi_index((c, *inner), (channels, *factors))
        assert value == x[(b, *coarse, channel)]
    np.testing.assert_array_equal(pixel_unshuffle(y, factors), x)


def test_pixel_shuffle_is_pytorchs_in_two_dimensions():
    torch = pytest.importorskip("torch")
    (x,) = randoms((2, 3, 4, 18))
    y = torch.nn.functional.pixel_shuffle(torch.tensor(np.moveaxis(x, -1, 1)), 3)
    expected = np.moveaxis(y.numpy(), 1, -1)
    np.testing.assert_array_equal(pixel_shuffle(x, (3, 3)), expected)


def test_mistakes_are_told():
    (x,) = randoms((1, 4, 5, 6, 4))
    with pytest.raises(ValueError, match="got 3 channels, factors"):
        pixel_shuffle(x[..., :3], (2, 1, 1))
    with pytest.raises(ValueError, match="One factor of at least 1"):
        pixel_shuffle(x, (2, 2))
    with pytest.raises(ValueError, match="sizes that its factors divide"):
        pixel_unshuffle(x, (2, 2, 2))
    with pytest.raises(ValueError, match="rank goes from 1 to 3"):
        factorise(np.ones((3, 3, 3, 2, 2)), 4)
    with pytest.raises(ValueError, match="form is separable or 2plus1d"):
        factorise(np.ones((3, 3, 3, 2, 2)), 1, "cp")
    with pytest.raises(ValueError, match="of finite numbers"):
        factorise(np.full((3, 3, 3, 2, 2), np.nan), 1)
    with pytest.raises(ValueError, match=r"depth_kernel is \(kd, in\)"):
        separable_conv3d(x, jnp.ones((3, 4)), jnp.ones((2, 3, 3, 4, 5)))
    with pytest.raises(ValueError, match=r"depth_kernel \(kd, middle, out\)"):
        conv2plus1d(x, jnp.ones((3, 3, 4, 5)), jnp.ones((3, 6, 2)))
