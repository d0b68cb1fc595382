"""Layers that are computed as one are what they are one after the other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import resize
from jaxops.conv3d import conv3d
from models import EDSR3D, RCAN3D, UNet3D
from models.volume_blocks import joined_conv

CHANNELS, BETWEEN, OUT = 3, 2, 2


def random(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def one_after_the_other(x, first, last, scale, _):
    for i, (kernel, bias) in enumerate((first, last)):
        x = conv3d(x, kernel, form="concat")
        x = x + jnp.broadcast_to(bias, x.shape)
        x = x if i else resize.pixel_shuffle(x, scale)
    return x


@pytest.mark.parametrize(
    ("scale", "grid", "taps", "form"),
    [
        ((2, 2, 2), (3, 4, 5), (3, 3, 3), "auto"),
        ((1, 2, 3), (6, 3, 4), (3, 3, 3), "local"),
        ((3, 1, 1), (3, 3, 4), (1, 3, 3), "sum"),
    ],
)
def test_joined_convolutions_are_those_one_after_the_other(scale, grid, taps, form):
    """Both of the same numbers, ends of axes included; so are their gradients. Sums of
    some hundred products in another order: 1e-6 of the largest, a few times over."""
    between = BETWEEN * int(np.prod(scale))
    x = random(2, *grid, CHANNELS)
    first = random(*taps, CHANNELS, between, seed=1), random(between, seed=2)
    last = random(3, 3, 3, BETWEEN, OUT, seed=3), random(OUT, seed=4)

    def with_gradients(function):
        def loss(x, first, last):
            y = function(x, first, last, scale, form)
            return (y * random(*y.shape, seed=5)).sum(), y

        run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (_, y), gradients = jax.jit(run)(x, first, last)
        return y, *jax.tree.leaves(gradients)

    pairs = zip(
        with_gradients(joined_conv), with_gradients(one_after_the_other), strict=True
    )
    for found, expected in pairs:
        assert found.shape == expected.shape
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("cls", [EDSR3D, RCAN3D])
def test_models_with_many_channels_join_their_last_convolutions(cls, monkeypatch):
    """And the output stays, up to sums in another order in a network of few layers."""
    blocks = {"n_groups": 1} if cls is RCAN3D else {}
    model = cls(hidden_channels=16, n_blocks=1, scale=(1, 2, 2), **blocks)
    x = random(1, 4, 5, 6, 1)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    called = []

    def record(call, args, kwargs, context):
        called.append(context.module.name)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        found = jax.jit(model.apply)(variables, x)
    assert "head" in called and "tail" not in called
    monkeypatch.setattr(type(model), "is_initializing", lambda self: True)
    expected = jax.jit(lambda v, x: model.apply(v, x))(variables, x)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * largest)


@pytest.mark.parametrize("pool", [(2, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("form", ["auto", "local"])
def test_nearest_points_are_convolved_on_their_own_grid(pool, form):
    """Where gradients are taken all layers are run as they are."""
    model = UNet3D(hidden_channels=3, n_levels=1, pool=pool, form=form)
    x = random(2, 5, 7, 8, 1)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def loss(variables, x):
        y = model.apply(variables, x)
        return jnp.square(y).sum(), y

    found = jax.jit(model.apply)(variables, x)
    run = jax.jit(jax.grad(loss, has_aux=True))
    largest = np.abs(expected := run(variables, x)[1]).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6 * largest)
    if jax.default_backend() == "cpu":
        assert (found != expected).any()
