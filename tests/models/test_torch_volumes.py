"""Weights of PyTorch networks by name, by order and by hand, without torch.

Numbers are compared in tests/parity; here: what goes where, and what is refused.
"""

import jax
import numpy as np
import pytest

from models import EDSR3D, MDCSRN, DepthAttentionSR, UNet3D
from models.torch_files import write_torch
from models.torch_native import conv3d_native
from models.torch_volumes import conv3d_errors, from_torch

MODEL = EDSR3D(hidden_channels=2, n_blocks=1, scale=(1, 1, 2))
# Of a network that has no names of ours; in the order of its layers.
SHAPES = {
    "first.weight": (2, 1, 3, 3, 3),
    "first.bias": (2,),
    "body.0.weight": (2, 2, 3, 3, 3),
    "body.0.bias": (2,),
    "body.2.weight": (2, 2, 3, 3, 3),
    "body.2.bias": (2,),
    "end.weight": (2, 2, 3, 3, 3),
    "end.bias": (2,),
    "up.weight": (4, 2, 3, 3, 3),
    "up.bias": (4,),
    "last.weight": (1, 2, 3, 3, 3),
    "last.bias": (1,),
}
OURS = ["head", "blocks_0/conv_0", "blocks_0/conv_1", "conv", "upsampler/conv", "tail"]


def random_state(shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()
    }


def array_of(variables, path):
    node = variables["params"]
    for name in path.split("/"):
        node = node[name]
    return np.asarray(node)


def by_our_names(state):
    theirs = list(dict.fromkeys(name.split(".w")[0].split(".b")[0] for name in state))
    renamed = dict(zip(theirs, (path.replace("/", ".") for path in OURS), strict=True))
    return {
        f"{renamed[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": array
        for name, array in state.items()
    }


def assert_imported(variables, state=None):
    state = random_state() if state is None else state
    for path, name in zip(OURS, list(state)[::2], strict=True):
        weight = np.moveaxis(array_of(variables, f"{path}/kernel"), (-1, -2), (0, 1))
        np.testing.assert_array_equal(weight, state[name])
        bias = state[name.replace("weight", "bias")]
        np.testing.assert_array_equal(array_of(variables, f"{path}/bias"), bias)
    leaves = jax.tree.leaves(variables)
    assert len(leaves) == 12 and all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_by_order():
    assert_imported(from_torch(random_state(), MODEL, report=None))


def test_by_our_names_in_any_order():
    state = by_our_names(random_state())
    assert "blocks_0.conv_1.weight" in state
    shuffled = dict(sorted(state.items()))
    assert list(shuffled) != list(state)
    assert_imported(from_torch(shuffled, MODEL, report=None))


def test_by_hand_where_the_order_is_another():
    state = random_state()
    last = {name: state.pop(name) for name in ("up.weight", "up.bias")}
    moved = {**last, **state}
    with pytest.raises(
        ValueError, match=r"up.weight has the shape .* head/kernel needs"
    ):
        from_torch(moved, MODEL, report=None)
    names = {"upsampler/conv": "up"}
    assert_imported(from_torch(moved, MODEL, names, report=None))
    names = {"upsampler/conv/kernel": "up.weight", "upsampler/conv/bias": "up.bias"}
    assert_imported(from_torch(moved, MODEL, names, report=None))


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_from_a_checkpoint_in_a_file(key, tmp_path):
    state = random_state()
    extra = {"epoch": 3, "optimizer": {"lr": 0.1}}
    write_torch(tmp_path / "net.pt", {key: state, **extra})
    assert_imported(from_torch(tmp_path / "net.pt", MODEL, report=None))


def test_counters_are_left_out_and_float64_becomes_float32():
    state = {k: v.astype(np.float64) for k, v in random_state().items()}
    state["norm.num_batches_tracked"] = np.array(5)
    assert_imported(from_torch(state, MODEL, report=None))


def test_linear_layers_and_flat_kernels_may_lack_their_axes():
    """Linear for a 1x1x1 convolution, Conv2d for one of a slice."""
    model = DepthAttentionSR(hidden_channels=2, n_blocks=1, n_heads=1, mixing="gate")
    flat = {"head": 5, "conv_0": 4, "norm": 0, "gate": 2, "value": 2, "tail": 5}
    state, rng = {}, np.random.default_rng(0)
    for layer, axes in [
        ("head", 5), ("conv_0", 4), ("conv_1", 4), ("norm", 1), ("gate", 2),
        ("value", 2), ("along", 3), ("out", 2), ("conv", 5), ("tail", 5),
    ]:  # fmt: skip
        entering, leaving = (1 if layer == "head" else 2), (1 if layer == "tail" else 2)
        taps = {5: (3, 3, 3), 4: (3, 3), 3: (9,)}.get(axes, ())
        shape = (leaving, entering, *taps) if axes > 1 else (leaving,)
        shape = (2, 1, 9) if layer == "along" else shape
        state[f"{layer}.weight"] = rng.standard_normal(shape).astype(np.float32)
        if layer != "along":
            state[f"{layer}.bias"] = rng.standard_normal(leaving).astype(np.float32)
    assert flat.keys() <= {name.split(".")[0] for name in state}
    variables = from_torch(state, model, report=None)
    block = variables["params"]["blocks_0"]
    np.testing.assert_array_equal(
        block["gate"]["value"]["kernel"], state["value.weight"].T
    )
    taps = np.asarray(block["gate"]["mix"]["depth_kernel"])
    np.testing.assert_array_equal(taps, state["along.weight"][:, 0].T)
    assert block["conv_0"]["kernel"].shape == (1, 3, 3, 2, 2)


def test_report_has_the_check_against_conv3d():
    lines = []
    from_torch(random_state(), MODEL, report=lines.append)
    assert lines[0] == "EDSR3D: 12 arrays, 661 parameters, found by order"
    assert "6 convolutions, largest difference" in lines[1]
    from_torch(by_our_names(random_state()), MODEL, report=lines.append)
    assert lines[2].endswith("found by name")
    assert len(lines) == 4


@pytest.mark.parametrize(
    "model",
    [
        EDSR3D(hidden_channels=3, n_blocks=1),
        EDSR3D(hidden_channels=3, n_blocks=1, conv="separable"),
        EDSR3D(hidden_channels=3, n_blocks=1, conv="2plus1d"),
        UNet3D(hidden_channels=2, n_levels=1),
    ],
    ids=["exact", "separable", "2plus1d", "unet"],
)
def test_single_convolutions_equal_native_ones(model):
    from models.torch_volumes import _slots

    shapes = {slot.torch_name: slot.torch_shape for slot in _slots(model)}
    errors = conv3d_errors(random_state(shapes), model)
    assert len(errors) == (7 if isinstance(model, UNet3D) else 6)
    assert 0 < max(errors.values()) < 1e-5


def test_the_definition_is_scipys(monkeypatch):
    """What checks an import where torch is missing, against an independent one."""
    ndimage = pytest.importorskip("scipy.ndimage")
    monkeypatch.setattr("models.torch_native._loaded_torch", lambda: None)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 4, 5, 6, 2))
    weight, bias = rng.standard_normal((3, 2, 3, 1, 5)), rng.standard_normal(3)
    y = conv3d_native(x, [weight, bias])
    for out in range(3):
        expected = bias[out] + sum(
            ndimage.correlate(x[0, ..., c], weight[out, c], mode="constant")
            for c in range(2)
        )
        np.testing.assert_allclose(y[0, ..., out], expected, atol=1e-12)


def changed(**changes):
    state = random_state()
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("state", "names", "text"),
    [
        (changed(last__bias=None), None, "12 arrays, and it 11; .* tail/bias"),
        (changed(more__weight=np.zeros((2, 2))), None, "and it 13; .* more.weight"),
        (
            changed(end__weight=np.zeros((2, 2, 3, 3, 1), np.float32)),
            None,
            r"end.weight has the shape \(2, 2, 3, 3, 1\) where conv/kernel needs",
        ),
        (
            changed(end__weight=np.zeros((2, 2, 3, 3), np.float32)),
            None,
            r"end.weight has the shape \(2, 2, 3, 3\) where conv/kernel needs",
        ),
        (changed(end__bias=np.zeros(2, int)), None, "conv would be int64, no floats"),
        (changed(), {"body": "end"}, "names has 'body', no layer or array"),
        (changed(), {"conv": "ends"}, "names asks for ends.weight"),
        ({"epoch": 3}, None, "holds no state dict"),
        ({"a": random_state(), "b": random_state()}, None, "no state dict, or several"),
    ],
)
def test_what_does_not_fit_is_told(state, names, text):
    with pytest.raises(ValueError, match=text):
        from_torch(state, MODEL, names, report=None)


def test_running_statistics_go_to_batch_stats():
    model = MDCSRN(n_blocks=1, n_units=1, growth=1)
    from models.torch_volumes import _slots

    shapes = {slot.torch_name: slot.torch_shape for slot in _slots(model)}
    state = random_state(shapes)
    variables = from_torch(state, model, report=None)
    norm = variables["batch_stats"]["blocks_0"]["units_0"]["norm"]
    name = "blocks_0.units_0.norm"
    np.testing.assert_array_equal(norm["mean"], state[f"{name}.running_mean"])
    np.testing.assert_array_equal(norm["var"], state[f"{name}.running_var"])
