"""Volume models with imported weights against PyTorch networks, on whichever backend.

Every case runs from a golden file; where torch is installed, what PyTorch gives now is
compared with the file too.
"""

import importlib.util

import jax
import numpy as np
import pytest
from closeness import assert_close
from run_once import run_once
from volume_cases import CASES, golden, pack, random_array, random_state, reference

from jaxops.backend import to_device
from models.torch_volumes import from_torch

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed (extra 'parity')",
)
every_case = pytest.mark.parametrize("name", CASES)
# A few layers of float32 products: 1e-6 is seen; 1e-5 is the promise.
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def run(model, variables, x, cotangent, train):
    """Output, gradients and new batch statistics, in one compiled program."""

    def call(variables):
        def loss(params):
            output, new = model.apply(
                {**variables, "params": params}, x, train=train, mutable=["batch_stats"]
            )
            return (output * cotangent).sum(), (output, new)

        gradient = jax.value_and_grad(loss, has_aux=True)
        (_, (output, new)), gradients = gradient(variables["params"])
        return output, gradients, new

    return run_once(call, variables)


@every_case
def test_output_and_gradients(name):
    case = CASES[name]
    stored = golden(case)
    model = case.make()
    state = random_state(stored["shapes"], case)
    variables = from_torch(state, model, report=None)
    x = to_device(random_array("input", case.shape, case))
    channels_first = np.moveaxis(stored["output"], -1, 1).shape
    cotangent = np.moveaxis(random_array("cotangent", channels_first, case), 1, -1)
    output, gradients, new = run(model, variables, x, to_device(cotangent), case.train)
    assert output.shape == stored["output"].shape
    assert_close(output, stored["output"], OUTPUT_TOLERANCE, what="output")
    # PyTorch's gradients travel the same way as its weights.
    expected = from_torch(stored["gradients"], model, report=None)
    leaves = jax.tree_util.tree_leaves_with_path(expected["params"])
    # A bias of keys has gradient zero, and rounding of the others in its place: hold
    # it to 1e-6 of the largest gradient, eight roundings; one was seen.
    floor = 1e-2 * max(np.abs(leaf).max() for _, leaf in leaves)
    for path, leaf in leaves:
        value = gradients
        for key in path:
            value = value[key.key]
        what = jax.tree_util.keystr(path)
        assert_close(value, leaf, GRADIENT_TOLERANCE, floor, what)
    for ours, theirs in zip(
        jax.tree.leaves(new), jax.tree.leaves(expected.get("batch_stats")), strict=True
    ):
        assert_close(ours, theirs, OUTPUT_TOLERANCE, what="batch_stats")


@needs_torch
@every_case
def test_golden_file_is_what_pytorch_gives_now(name):
    case = CASES[name]
    stored, fresh = pack(golden(case)), pack(reference(case))
    for key in ("names", "shapes", "output_shape"):
        np.testing.assert_array_equal(stored[key], fresh[key])
    scale = np.abs(fresh["values"]).max()
    np.testing.assert_allclose(stored["values"], fresh["values"], atol=1e-5 * scale)


def test_cases_are_awake():
    """All but what is zero by its nature has a gradient that a mistake would change."""
    for case in CASES.values():
        gradients = golden(case)["gradients"]
        top = max(np.abs(value).max() for value in gradients.values())
        asleep = {
            name
            for name, value in gradients.items()
            if np.abs(value).max() < 1e-3 * top and "inner." not in name
        }
        assert len(asleep) <= 3, (case.name, asleep)
