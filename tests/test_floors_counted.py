"""The counts of benchmarks/floors.py against XLA's own, of programs as they compile."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxops
from benchmarks import floors
from benchmarks.measuring import train_step
from models import FNO

# XLA counts what it compiles: arithmetic that it does twice rather than keep, rules for
# borders, polynomials; and it leaves out products that it finds to be constant. All
# that is small beside the products at these sizes.
FACTOR = 1.15

SPECTRAL = {
    "1d": ((64,), (16,)),
    "2d": ((24, 20), (8, 10)),
    "3d": ((12, 10, 8), (4, 6, 4)),
}


def analysis(function, *arguments) -> dict[str, float]:
    found = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return found[0] if isinstance(found, list) else found  # a list until jax 0.4.36


def assert_close(counted: float, found: float, factor: float = FACTOR) -> None:
    assert found / factor <= counted <= found * factor, counted / found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("key", SPECTRAL)
def test_spectral_conv(key, backward):
    grid, modes = SPECTRAL[key]
    x = jnp.zeros((4, *grid, 12))
    weight = jnp.zeros((2, *modes[:-1], modes[-1] // 2 + 1, 12, 16))

    def function(x, weight, y):
        def forward(x, weight):
            return jaxops.spectral_conv(x, weight, modes)

        if not backward:
            return forward(x, weight)
        output, pull = jax.vjp(forward, x, weight)
        return output, pull(y)

    y = jnp.zeros((4, *grid, 16))
    counted = floors.spectral_conv(grid, modes, 4, 12, 16, backward=backward)
    assert_close(counted.flop, analysis(function, x, weight, y)["flops"])


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("key", ["2d", "3d"])
def test_fno(key, step):
    grid, modes = SPECTRAL[key]
    model = FNO(modes, in_channels=1, out_channels=1, hidden_channels=16, n_layers=3)
    x = jnp.zeros((2, *grid, 1))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    counted = floors.fno(model, grid, 2, step=step)
    if step:
        optimizer = optax.adamw(1e-3)
        carry = variables, jax.eval_shape(optimizer.init, variables)
        with jax.numpy_dtype_promotion("standard"):  # optax has Python numbers
            found = analysis(train_step(model, optimizer), carry, x, x)
    else:
        found = analysis(model.apply, variables, x)
    assert_close(counted.flop, found["flops"])


@pytest.mark.parametrize("backward", [False, True])
def test_conv3d(backward):
    grid, taps = (6, 20, 20), (1, 3, 3)
    x, kernel = jnp.zeros((2, *grid, 8)), jnp.zeros((*taps, 8, 12))
    y = jnp.zeros((2, *grid, 12))

    def function(x, kernel, y):
        def forward(x, kernel):
            axes = ("NDHWC", "DHWIO", "NDHWC")
            return lax.conv_general_dilated(
                x, kernel, (1, 1, 1), "SAME", dimension_numbers=axes
            )

        if not backward:
            return forward(x, kernel)
        output, pull = jax.vjp(forward, x, kernel)
        return output, pull(y)

    counted = floors.conv3d(grid, taps, 2, 8, 12, backward=backward)
    assert_close(counted.flop, analysis(function, x, kernel, y)["flops"])


def test_bytes_of_a_step_hold_those_of_the_forward_pass_and_of_the_optimiser():
    model = FNO((8, 8), in_channels=1, out_channels=1, hidden_channels=16)
    x = jax.ShapeDtypeStruct((2, 32, 32, 1), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    weights = sum(leaf.size for leaf in jax.tree.leaves(variables))
    forward = floors.fno(model, (32, 32), 2)
    step = floors.fno(model, (32, 32), 2, step=True)
    # 1 x, 2 x 16 of five parts, 1 y, and the weights.
    assert forward.bytes == 4 * (2048 * (2 + 2 * 16 * 5) + weights)
    assert step.bytes > forward.bytes + 4 * 7 * weights


def test_a_floor_is_the_largest_part():
    rates = {"flop": 1e9, "copy": {2**20: 4e9, 2**30: 1e9}}
    count = floors.Count(flop=2e6, bytes=4e6)
    assert floors.floor(count, rates, 2**20)["bound"] == "FLOPs"
    slow = floors.floor(count, rates, 2**25)  # only the larger copy counts
    assert slow["bound"] == "bytes"
    assert slow["median_ms"] == pytest.approx(4.0)
