"""The bridge to the CPU: results, derivatives, costs, and where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxops import bridge, plugins
from jaxops.bridge import BridgeError, Cost, on_cpu

X = np.random.RandomState(0).standard_normal((4, 6)).astype(np.float32)


def low_pass(x):
    """What an Apple GPU lacks, with real arrays at both ends."""
    spectrum = jnp.fft.rfft(x)
    return jnp.fft.irfft(spectrum.at[:, 2:].set(0), x.shape[-1])


def test_values_and_gradients_are_those_of_the_function():
    bridged = on_cpu(low_pass)
    scale = jax.jit(lambda x: x * 3)

    def loss(function, x):
        return jnp.sum(scale(function(scale(x))) ** 3)

    np.testing.assert_array_equal(bridged(X), low_pass(X))
    found = jax.grad(lambda x: loss(bridged, x))(jnp.asarray(X))
    wanted = jax.grad(lambda x: loss(low_pass, x))(jnp.asarray(X))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    value, _ = jax.value_and_grad(lambda x: loss(bridged, x))(jnp.asarray(X))
    np.testing.assert_allclose(value, loss(low_pass, jnp.asarray(X)), rtol=1e-6)


def test_the_gradient_agrees_with_differences():
    bridged = on_cpu(lambda x: jnp.sum(jnp.sin(x) ** 2))
    slope = jax.grad(bridged)(jnp.asarray(X))
    np.testing.assert_allclose(slope, np.sin(2 * X), rtol=1e-5, atol=1e-6)


def test_several_arguments_options_and_trees():
    def mixed(pair, weight, *, power):
        return {"y": pair[0] * weight**power, "z": pair[1]}

    bridged = on_cpu(mixed)
    result = bridged((X, X[:1]), jnp.float32(2), power=3)
    np.testing.assert_allclose(result["y"], 8 * X)
    found = jax.grad(lambda w: bridged((X, X[:1]), w, power=3)["y"].sum())(
        jnp.float32(2)
    )
    np.testing.assert_allclose(found, 12 * X.sum(), rtol=1e-5)
    assert bridged.__name__ == "mixed"


def test_results_come_back_to_the_device_of_the_arguments(monkeypatch):
    sent = []
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda x, device: sent.append(device) or put(x, device)
    )
    x = put(X, jax.devices()[-1])
    y = on_cpu(low_pass)(x)
    assert sent == [jax.devices("cpu")[0], jax.devices()[-1]]
    assert y.devices() == x.devices()


def test_costs_are_counted():
    bridged = on_cpu(low_pass)
    assert bridged.cost == Cost()
    bridged(X)
    assert bridged.cost.calls == 1
    assert bridged.cost.bytes == 2 * X.nbytes  # there and back
    assert 0 < bridged.cost.moving_seconds < bridged.cost.seconds
    jax.grad(lambda x: jnp.sum(bridged(x)))(jnp.asarray(X))
    assert bridged.cost.calls == 3 and bridged.cost.bytes == 6 * X.nbytes
    assert str(bridged.cost).startswith("3 calls over the bridge, 0.00 MiB, ")
    bridged.cost = Cost()
    assert bridged.cost.calls == 0


@pytest.mark.parametrize(
    "traced",
    [
        lambda f: jax.jit(f)(X),
        lambda f: jax.vmap(f)(X[None]),
        lambda f: lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
        lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(X),
        lambda f: jax.grad(jax.jit(lambda x: jnp.sum(f(x))))(X),
    ],
)
def test_it_is_refused_inside_traced_functions(traced):
    bridged = on_cpu(low_pass)
    with pytest.raises(BridgeError, match=r"on_cpu\(low_pass\) runs eagerly.*Split"):
        traced(bridged)
    assert bridged.cost.calls == 0


def test_complex_numbers_are_not_sent_to_an_apple_gpu(monkeypatch):
    bridged = on_cpu(lambda x: jnp.fft.rfft(x))
    assert bridged(X).dtype == np.complex64  # another device may hold them
    monkeypatch.setattr(plugins, "APPLE_PLATFORMS", (jax.devices()[0].platform,))
    with pytest.raises(TypeError, match="complex64.*real and imaginary part"):
        bridged(X)


def test_errors_of_the_function_pass_through():
    with pytest.raises(TypeError):
        bridge.on_cpu(jnp.sin)("text")
