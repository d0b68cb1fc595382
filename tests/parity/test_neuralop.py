"""FNO with imported weights against neuraloperator 2.0.0, on whichever backend.

Every case runs from golden files; where torch and neuraloperator are installed, what
they give now is compared with the files too, and our exports are loaded there.
"""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from neuralop_cases import CASES, golden, pack, reference

from jaxops.backend import to_device
from models import from_neuralop, to_neuralop

needs_neuraloperator = pytest.mark.skipif(
    importlib.util.find_spec("neuralop") is None
    or not importlib.util.find_spec("torch"),
    reason="neuraloperator and torch are not installed (extra 'parity')",
)
every_case = pytest.mark.parametrize("name", CASES)
# A few layers of float32 products: 1e-6 is seen; 1e-5 is the promise.
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def ours(case, state, **changes):
    """Our model with these weights, its variables on the device."""
    model, variables = from_neuralop(
        state, **{**case.constructor, "compat": case.compat, **changes}
    )
    return model, jax.tree.map(lambda a: to_device(np.asarray(a)), variables)


def run(case, state, x, cotangent):
    """Output, gradients and new batch statistics, in one compiled program."""
    model, variables = ours(case, state)

    @jax.jit
    def call(variables):
        def loss(variables):
            output, new = model.apply(
                variables,
                x,
                output_shape=case.output_shape,
                train=case.train,
                mutable=["batch_stats"],
            )
            return (output * cotangent).sum(), (output, new)

        (_, (output, new)), gradients = jax.value_and_grad(loss, has_aux=True)(
            variables
        )
        return output, gradients["params"], new

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "n_modes=.* is more than a grid")
        return call(variables)


@every_case
def test_output_and_gradients(name):
    case = CASES[name]
    stored = golden(case)
    output, gradients, new = run(
        case,
        stored["state"],
        to_device(stored["input"]),
        to_device(stored["cotangent"]),
    )
    assert_close(output, stored["output"], OUTPUT_TOLERANCE, what="output")
    # neuraloperator's gradients travel the same way as its weights.
    _, expected = ours(case, stored["gradients"])
    leaves = jax.tree_util.tree_leaves_with_path(expected["params"])
    # A bias before a norm has gradient zero. In its place both sides have rounding of
    # the others: allow 1e-6 of the largest gradient for each.
    floor = 2e-2 * max(np.abs(leaf).max() for _, leaf in leaves)
    for path, leaf in leaves:
        value = gradients
        for key in path:
            value = value[key.key]
        what = jax.tree_util.keystr(path)
        assert_close(value, leaf, GRADIENT_TOLERANCE, floor, what)
    if case.train:
        for ours_, theirs in zip(
            jax.tree.leaves(new["batch_stats"]),
            jax.tree.leaves(expected["batch_stats"]),
            strict=True,
        ):
            assert_close(ours_, theirs, OUTPUT_TOLERANCE, what="batch_stats")


@every_case
def test_export_and_import_again_are_bit_equal(name):
    case = CASES[name]
    state = golden(case)["state"]
    model, variables = from_neuralop(state, **case.constructor, compat=case.compat)
    exported = to_neuralop(model, variables)
    metadata = exported.pop("_metadata")
    assert metadata["_name"] == "FNO"
    assert sorted(exported) == sorted(state)
    for key, array in state.items():
        assert exported[key].dtype == array.dtype
        np.testing.assert_array_equal(exported[key], array, err_msg=key)
    again, variables_again = from_neuralop(
        {**exported, "_metadata": metadata}, compat=case.compat
    )
    assert again == model
    same = jax.tree.map(np.array_equal, variables, variables_again)
    assert all(jax.tree.leaves(same))


@needs_neuraloperator
@every_case
@pytest.mark.filterwarnings("ignore")  # neuraloperator's own
def test_golden_files_are_what_neuraloperator_gives_now(name):
    case = CASES[name]
    stored = pack({k: v for k, v in golden(case).items()})
    fresh = pack(reference(case))
    assert str(stored["index"]) == str(fresh["index"])
    scale = np.abs(fresh["values"]).max()
    np.testing.assert_allclose(stored["values"], fresh["values"], atol=1e-5 * scale)


@needs_neuraloperator
@every_case
@pytest.mark.filterwarnings("ignore")
def test_neuraloperator_loads_what_we_export(name, tmp_path):
    """Through the files: same constructor arguments, same weights, same output as the
    model had on this processor; on another one the golden output is rounded otherwise.
    """
    import torch
    from neuralop.models import FNO

    case = CASES[name]
    stored = reference(case)
    model, variables = from_neuralop(
        stored["state"], **case.constructor, compat=case.compat
    )
    to_neuralop(model, variables, tmp_path / "exported")
    loaded = FNO.from_checkpoint(tmp_path, "exported").train(case.train)
    x = torch.from_numpy(np.moveaxis(stored["input"], -1, 1).copy())
    with torch.no_grad():
        output = loaded(x, output_shape=case.output_shape).numpy()
    np.testing.assert_array_equal(np.moveaxis(output, 1, -1), stored["output"])


def test_odd_grids_are_right_without_compat_and_differ_from_neuraloperator():
    """The switch matters: without it the odd-grid case gives another output."""
    case = CASES["2d_odd_grid"]
    stored = golden(case)
    model, variables = ours(case, stored["state"], compat=None)
    output = model.apply(variables, to_device(stored["input"]))
    error = np.abs(output - stored["output"]).max() / np.abs(stored["output"]).max()
    assert error > 0.05
    assert jnp.isfinite(output).all()
