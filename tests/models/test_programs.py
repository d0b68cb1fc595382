"""The programs that the proofs walk: every model, every stage, as Metal has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from run_once import run_once

import models
from jaxops.device import device_kind, trace_for
from models.programs import DTYPES, STAGES, example_models, program


def leaves(tree):
    return jax.tree.leaves(tree)


def test_every_exported_model_has_an_example():
    exported = {
        name
        for name in models.__all__
        if isinstance(value := getattr(models, name), type)
        and issubclass(value, nn.Module)
    }
    assert set(example_models()) == exported, "give the new model an example"
    for name, model in example_models().items():
        assert type(model) is getattr(models, name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", list(example_models()))
def test_programs_trace_to_real_finite_shapes(name, stage):
    made = program(name, stage)
    assert made.name == f"{name}/{stage}"
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves(made.arguments))
    result = jax.eval_shape(made.function, *made.arguments)
    dtypes = {leaf.dtype for leaf in leaves(result)}
    assert dtypes <= {np.dtype("float32"), np.dtype("int32")}
    if stage == "train_step":  # a step can follow a step
        before = jax.tree.map(lambda a: (a.shape, a.dtype), made.arguments[:3])
        assert before == jax.tree.map(lambda a: (a.shape, a.dtype), result[:3])


def test_arguments_are_the_same_at_each_call_and_differ_between_leaves():
    first, second = (program("FNO2D", "forward").arguments for _ in range(2))
    assert all(map(np.array_equal, leaves(first), leaves(second)))
    params = first[0]["params"]
    kernels = [params[f"blocks_{i}"]["fno_skip"]["kernel"] for i in range(2)]
    assert not np.array_equal(*kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_compute_in_the_dtype_of_x(dtype):
    for name in ("FNO2D", "EDSR3D"):
        made = program(name, "forward", dtype)
        assert jax.eval_shape(made.function, *made.arguments).dtype == jnp.dtype(dtype)


def test_a_train_step_lowers_the_loss_and_moves_every_weight():
    made = program("FNO", "train_step")
    step = jax.jit(made.function)
    before, data = made.arguments[:3], made.arguments[3:]
    state, losses = before, []
    for _ in range(5):
        *state, loss = step(*state, *data)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    same = map(np.array_equal, leaves(tuple(state)), leaves(before))
    assert not any(same)


def test_init_is_the_models_own():
    made = program("FNO1D", "init")
    found = run_once(made.function, *made.arguments)
    wanted = example_models()["FNO1D"].init(
        jax.random.key(7), jnp.zeros((1, 10, 1), jnp.float32)
    )
    assert all(
        np.allclose(*pair) for pair in zip(leaves(found), leaves(wanted), strict=True)
    )


def test_programs_are_those_of_an_apple_gpu():
    """The CPU's own forms of a convolution and its gradient are others than Metal's."""
    assert device_kind() != "metal"
    made = program("RCAN3D", "gradient")
    plain = made.function.__wrapped__

    def text(function):
        lowered = jax.jit(lambda *arguments: function(*arguments))
        return lowered.lower(*made.arguments).as_text()

    with trace_for("metal"):
        metal = text(plain)
    assert device_kind() != "metal"
    assert text(made.function) == metal != text(plain)


@pytest.mark.parametrize(
    "arguments", [("FNO4D", "init"), ("FNO", "train"), ("FNO", "init", "float64")]
)
def test_other_names_are_refused(arguments):
    with pytest.raises(
        ValueError, match=f"one of .*got '{arguments[-1]}|one of .*FNO4D"
    ):
        program(*arguments)
