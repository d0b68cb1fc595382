"""Importing and exporting neuraloperator's weights, without torch.

tests/parity holds the results to neuraloperator's; here are the files, the arguments
and what is refused. tests/golden/torch has files that neuraloperator 2.0.0 saved.
"""

import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import pointwise
from models import FNO, FNO2D
from models.torch_files import TorchGlobal, TorchRecord, read_torch, write_torch
from models.torch_weights import from_neuralop, to_neuralop

GOLDEN = Path(__file__).parents[1] / "golden" / "torch"
BASE = {"in_channels": 2, "out_channels": 3, "hidden_channels": 4, "n_layers": 2}
OPTIONS = {
    "defaults": {},
    "odd": {"n_modes": (5, 3)},
    "one mode": {"n_modes": (1, 1)},
    "narrow": {"lifting_channel_ratio": 0, "projection_channel_ratio": 0.3},
    "thirds": {"hidden_channels": 7, "lifting_channel_ratio": 5 / 7},
    "no mlp": {"use_channel_mlp": False},
    "mlp": {"channel_mlp_expansion": 1.3, "channel_mlp_skip": "linear"},
    "gates": {"fno_skip": "soft-gating"},
    "identity": {"fno_skip": "identity", "channel_mlp_skip": "identity"},
    "group": {"norm": "group_norm"},
    "batch": {"norm": "batch_norm", "n_layers": 1},
    "no grid": {"positional_embedding": None},
    "spare modes": {"max_n_modes": (6, 4)},
    "scaled": {
        "resolution_scaling_factor": ((1, 2), (0.5, 1)),
        "norm": "instance_norm",
    },
    "padded": {"domain_padding": ((0.1, 0.1), 0.25), "stabilizer": "tanh"},
    "others": {
        "non_linearity": "silu",
        "preactivation": True,
        "channel_mlp_dropout": 0.1,
        "fno_block_precision": "mixed",
    },
}


def make(n_dim=2, **options):
    """A model, and random variables of its shapes from ``model.init``."""
    model = FNO(**{"n_modes": (4,) * n_dim, **BASE, **options})
    fields = {"resolution_scaling_factor": None}  # which change no shape
    shapes = jax.eval_shape(
        lambda: model.clone(**fields).init(
            jax.random.key(0), jnp.zeros((1, *(16,) * n_dim, model.in_channels))
        )
    )
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    return model, jax.tree.map(draw, shapes)


def without_metadata(state):
    return {key: value for key, value in state.items() if key != "_metadata"}


def assert_same(variables, others):
    same = jax.tree.map(np.array_equal, variables, others)
    assert all(jax.tree.leaves(same))


# There and back


@pytest.mark.parametrize("n_dim", [1, 2, 3])
def test_round_trip_is_bit_equal_in_every_dimension(n_dim, tmp_path):
    model, variables = make(n_dim, norm="batch_norm")
    to_neuralop(model, variables, tmp_path / "new" / "name")
    again, variables_again = from_neuralop(tmp_path / "new" / "name_state_dict.pt")
    assert again == model
    assert_same(variables, variables_again)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(variables_again))
    short, _ = from_neuralop(tmp_path / "new" / "name")
    assert short == model


@pytest.mark.parametrize("name", OPTIONS)
def test_round_trip_over_the_options(name):
    """The arrays of the layout are those of ``model.init``, and all are carried."""
    model, variables = make(**OPTIONS[name])
    state = to_neuralop(model, variables)
    again, variables_again = from_neuralop(state, compat=model.compat)
    padding = {"padded": (0.1, 0.25)}.get(name, model.domain_padding)
    assert again == model.clone(domain_padding=padding)
    assert_same(variables, variables_again)
    assert jax.tree.structure(variables) == jax.tree.structure(variables_again)


def test_spectral_weights_and_kernels_are_laid_out_as_documented():
    model, variables = make(3)
    state = to_neuralop(model, variables)
    ours = variables["params"]["blocks_1"]["conv"]["weight"]
    theirs = state["fno_blocks.convs.1.weight.tensor"]
    assert theirs.dtype == np.complex64 and theirs.shape == (4, 4, 4, 4, 3)
    assert theirs[1, 2, 3, 0, 2] == ours[0, 3, 0, 2, 1, 2] + 1j * ours[1, 3, 0, 2, 1, 2]
    kernel = variables["params"]["lifting"]["fcs_0"]["kernel"]
    np.testing.assert_array_equal(state["lifting.fcs.0.weight"][:, :, 0], kernel.T)
    assert kernel.shape == (2 + 3, 8)
    gate = state["fno_blocks.channel_mlp_skips.0.weight"]
    assert gate.shape == (1, 4, 1, 1, 1)
    assert state["fno_blocks.convs.0.bias"].shape == (4, 1, 1, 1)


def test_a_file_of_neuraloperator_s():
    model, variables = from_neuralop(GOLDEN / "fno_state_dict.pt")
    assert model == FNO((4, 6), 1, 2, hidden_channels=3, n_layers=2, norm="batch_norm")
    with np.load(GOLDEN / "expected.npz") as file:
        expected = {k[4:]: file[k] for k in file.files if k.startswith("fno/")}
    state = without_metadata(to_neuralop(model, variables))
    assert sorted(state) == sorted(expected)
    for name, array in expected.items():
        assert state[name].dtype == array.dtype
        np.testing.assert_array_equal(state[name], array, err_msg=name)
    mean = variables["batch_stats"]["blocks_1"]["norm_0"]["mean"]
    np.testing.assert_array_equal(mean, expected["fno_blocks.norm.2.norm.running_mean"])


def test_metadata_beside_the_weights(tmp_path):
    """Weights without ``_metadata``, as torch users save them, next to its file."""
    state = without_metadata(read_torch(GOLDEN / "fno_state_dict.pt"))
    write_torch(tmp_path / "a_state_dict.pt", state)
    shutil.copy(GOLDEN / "fno_metadata.pkl", tmp_path / "a_metadata.pkl")
    model, _ = from_neuralop(tmp_path / "a_state_dict.pt")
    assert model.n_modes == (4, 6) and model.norm == "batch_norm"


# Arguments


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"args": ([4, 4], 2, 3, 4, 2), "n_layers": 4}, {"n_layers": 2}),
        ({"non_linearity": TorchGlobal("torch.nn.functional", "relu")}, "relu"),
        (
            {
                "non_linearity": TorchRecord(
                    TorchGlobal("__builtin__", "getattr"),
                    (TorchGlobal("torch._C", "_VariableFunctionsClass"), "tanh"),
                )
            },
            "tanh",
        ),
        (
            {
                "non_linearity": TorchRecord(
                    TorchGlobal("torch.nn.modules.activation", "GELU"),
                    state={"approximate": "none"},
                )
            },
            "gelu",
        ),
        (
            {
                "positional_embedding": TorchRecord(
                    TorchGlobal("neuralop.layers.embeddings", "GridEmbeddingND"),
                    state={"grid_boundaries": [[0, 1], [0.0, 1.0]]},
                )
            },
            {"positional_embedding": "grid"},
        ),
        ({"domain_padding": [0.1, 0]}, {"domain_padding": (0.1, 0)}),
        ({"domain_padding": [0, 0]}, {"domain_padding": None}),
        ({"domain_padding": 0}, {"domain_padding": None}),
        ({"factorization": "Dense", "rank": 0.3, "implementation": "x"}, {}),
        ({"verbose": True, "_version": "0.2.0"}, {}),
    ],
)
def test_metadata_becomes_arguments(metadata, expected):
    model, variables = make()
    state = to_neuralop(model, variables)
    state["_metadata"] |= metadata
    for name in metadata.get("args", ()) and ("n_modes", "in_channels"):
        del state["_metadata"][name]
    expected = {"non_linearity": expected} if isinstance(expected, str) else expected
    assert from_neuralop(state)[0] == model.clone(**expected)


def test_tuples_as_padding_are_none_as_in_neuraloperator():
    """It overlooks them silently, so that weights with them know no padding."""
    model, variables = make()
    state = to_neuralop(model, variables)
    state["_metadata"]["domain_padding"] = (0.1, 0.1)
    with pytest.warns(UserWarning, match="domain_padding=.0.1, 0.1. is overlooked"):
        assert from_neuralop(state)[0].domain_padding is None
    assert from_neuralop(state, domain_padding=(0.1, 0.1))[0].domain_padding == (
        0.1,
        0.1,
    )


def test_arguments_win_over_metadata():
    model, variables = make()
    state = to_neuralop(model, variables)
    state["_metadata"]["non_linearity"] = TorchGlobal("mine", "wave")
    again, _ = from_neuralop(
        state, "neuralop-2.0", non_linearity=jnp.sin, domain_padding=[0.1, 0.2]
    )
    assert again.non_linearity is jnp.sin
    assert again.domain_padding == (0.1, 0.2)
    assert again.compat == "neuralop-2.0"
    with pytest.raises(TypeError, match="no argument 'hidden'"):
        from_neuralop(state, non_linearity="gelu", hidden=4)


@pytest.mark.parametrize("n_dim", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_shapes_tell_most_arguments(name, n_dim):
    """Without metadata: what has a shape is found; the warning lists all else."""
    options = dict(OPTIONS[name])
    for key in ("n_modes", "max_n_modes"):
        if key in options:
            options[key] = (*options[key], 4)[-n_dim:]
    for key in ("domain_padding", "resolution_scaling_factor"):
        options.pop(key, None)
    model, variables = make(n_dim, **options)
    state = without_metadata(to_neuralop(model, variables))
    untold = {
        key: getattr(model, key)
        for key in ("non_linearity", "preactivation", "stabilizer", "max_n_modes")
    }
    untold |= {} if model.positional_embedding else {"positional_embedding": None}
    untold |= {"norm": model.norm} if model.norm == "instance_norm" else {}
    with pytest.warns(UserWarning, match="no metadata.*Assumed: ") as caught:
        again, variables_again = from_neuralop(state, **untold)
    assert_same(variables, variables_again)
    for key in untold:
        assert f" {key}=" not in str(caught[0].message)
    told = {
        key: getattr(again, key)
        for key in (
            "in_channels", "out_channels", "hidden_channels", "n_layers", "norm",
            "use_channel_mlp", "fno_skip", "positional_embedding",
        )
    }  # fmt: skip
    assert told == {key: getattr(model, key) for key in told}
    if model.max_n_modes is None:
        assert again.n_modes[:-1] == model.n_modes[:-1]
        assert again.n_modes[-1] // 2 == model.n_modes[-1] // 2
    else:
        assert " n_modes=" in str(caught[0].message)


def test_a_full_constructor_call_assumes_nothing():
    model, variables = make()
    state = without_metadata(to_neuralop(model, variables))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = from_neuralop(state, n_modes=[4, 4], **BASE)
    assert again == model


@pytest.mark.parametrize("prefix", ["module.", "model.fno.", ""])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_weights_inside_a_larger_checkpoint(prefix, key):
    model, variables = make()
    state = to_neuralop(model, variables)
    metadata = state.pop("_metadata")
    inside = {f"{prefix}{name}": array for name, array in state.items()}
    if prefix == "model.fno.":
        inside |= {"loss.weight": np.ones(2), "model.fc0.weight": np.ones(2)}
    inside["_metadata"] = metadata
    source = {key: inside, "epoch": 3, "optimiser": {"state": {}}} if key else inside
    again, variables_again = from_neuralop(source)
    assert again == model
    assert_same(variables, variables_again)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_other_float_types_become_float32(dtype):
    model, variables = make()
    state = to_neuralop(model, variables)
    for name, array in state.items():
        if name != "_metadata" and array.dtype == np.float32:
            state[name] = array.astype(dtype)
    _, again = from_neuralop(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {np.dtype(np.float32)}
    kernel = variables["params"]["lifting"]["fcs_0"]["kernel"]
    np.testing.assert_array_equal(
        again["params"]["lifting"]["fcs_0"]["kernel"],
        kernel.astype(dtype).astype(np.float32),
    )


# What is refused


def changed(**changes):
    """A state dict with arrays or metadata changed, or removed where None."""
    model, variables = make()
    state = to_neuralop(model, variables)
    for name, value in changes.items():
        if name in state["_metadata"] or name.startswith("_") or name == "n_modez":
            state["_metadata"][name] = value
        elif value is None:
            del state[name.replace("__", ".")]
        else:
            state[name.replace("__", ".")] = value
    return state


CONV = "fno_blocks__convs__0__weight"
REFUSED = {
    "unknown": (
        {"lifting__fcs__2__weight": np.ones(2)},
        "unknown: lifting.fcs.2.weight",
    ),
    "missing": ({"projection__fcs__1__bias": None}, "missing: projection.fcs.1.bias"),
    "shape": (
        {f"{CONV}__tensor": np.ones((4, 4, 6, 3), np.complex64)},
        r"has the shape \(4, 4, 6, 3\), but .*n_modes=\(4, 4\).* needs \(4, 4, 4, 3\)",
    ),
    "real": (
        {f"{CONV}__tensor": np.ones((4, 4, 4, 3), np.float32)},
        "is float32, but must be complex",
    ),
    "complex": (
        {"lifting__fcs__1__bias": np.ones(4, np.complex64)},
        "is complex64, but must be real",
    ),
    "integers": ({"lifting__fcs__1__bias": np.ones(4, int)}, "must be real floats"),
    "no array": ({"lifting__fcs__1__bias": [1, 2, 3, 4]}, "is a list, not an array"),
    "factorised": (
        {f"{CONV}__core": np.ones(2), f"{CONV}__factors__factor_0": np.ones(2)},
        "factorised",
    ),
    "on complex data": (
        {"fno_blocks__fno_skips__0__fr__conv__weight": np.ones(2)},
        "complex_data=True",
    ),
    "joint weights": (
        {"fno_blocks__convs__weight__0__tensor": np.ones(2)},
        "before 1.0",
    ),
    "factorization": ({"factorization": "Tucker"}, "factorization=Tucker"),
    "separable": ({"separable": True}, "separable=True"),
    "complex_data": ({"complex_data": True}, "complex_data=True"),
    "conv_module": (
        {"conv_module": TorchGlobal("neuralop.layers.x", "SphericalConv")},
        "SphericalConv",
    ),
    "class": ({"_name": "SFNO"}, "class SFNO"),
    "argument": ({"n_modez": 4}, "does not take: n_modez"),
    "norm": ({"norm": "ada_in"}, "norm is one of"),
    "activation": (
        {"non_linearity": TorchGlobal("torch.nn.functional", "mish")},
        "non_linearity is torch.nn.functional.mish",
    ),
    "tanh gelu": (
        {
            "non_linearity": TorchRecord(
                TorchGlobal("torch.nn.modules.activation", "GELU"),
                state={"approximate": "tanh"},
            )
        },
        "with other settings",
    ),
    "embedding": (
        {
            "positional_embedding": TorchRecord(
                TorchGlobal("neuralop.layers.embeddings", "GridEmbeddingND"),
                state={"grid_boundaries": [[0, 2], [0, 1]]},
            )
        },
        "boundaries",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_imported_is_told(name):
    changes, text = REFUSED[name]
    with pytest.raises(
        ValueError, match=rf"(?s)The state dict can't be imported.*{text}"
    ):
        from_neuralop(changed(**changes))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, "it has none"),
        ({"a": 1, 2: np.ones(2)}, "it has none, and the keys a, 2"),
        (
            {"a.lifting.fcs.0.weight": 1, "b.lifting.fcs.0.weight": 1},
            r"it has 2 \(a., b.\)",
        ),
        ({"fc0.weight": np.ones(2), "conv0.weights1": np.ones(2)}, "another FNO code"),
        ({"lifting.fcs.0.weight": np.ones((8, 3, 1))}, "not those of an FNO"),
        ({"lifting.fcs.0.weight": np.ones(2), "_metadata": 3}, "no dict of arguments"),
    ],
)
def test_other_state_dicts_are_told(source, text):
    with pytest.raises(ValueError, match=text):
        from_neuralop(source)


def test_other_files_are_told(tmp_path):
    path = tmp_path / "a_state_dict.pt"
    write_torch(path, [1, 2])
    with pytest.raises(ValueError, match="not a state dict"):
        from_neuralop(path)
    path.write_bytes(b"\x89HDF....")
    with pytest.raises(ValueError, match="h5py"):
        from_neuralop(path)
    shutil.copy(GOLDEN / "fno_state_dict.pt", path)
    state = without_metadata(read_torch(path))
    write_torch(path, state)
    write_torch(tmp_path / "a_metadata.pkl", [1])
    with pytest.raises(ValueError, match="a_metadata.pkl holds no dict"):
        from_neuralop(path)
    with pytest.raises(FileNotFoundError):
        from_neuralop(tmp_path / "absent")
    path.write_bytes((GOLDEN / "fno_state_dict.pt").read_bytes()[:-400])
    with pytest.raises(ValueError, match="truncated"):
        from_neuralop(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"domain_padding": ((0, 0.1), 0)}, "differs between the two ends"),
        ({"non_linearity": jnp.sin}, "no name in torch"),
        ({"non_linearity": "identity"}, "no name in torch"),
    ],
)
def test_what_neuraloperator_has_not_is_not_exported(options, text, tmp_path):
    model, variables = make(**options)
    with pytest.raises(ValueError, match=f"The model can't be exported: .*{text}"):
        to_neuralop(model, variables, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_functions_that_have_a_name_are_exported_by_it():
    model, variables = make(non_linearity=pointwise.gelu)
    state = to_neuralop(model, variables)
    assert state["_metadata"]["non_linearity"] == TorchGlobal("torch._C._nn", "gelu")


def test_variables_that_are_not_the_model_s_are_told():
    model, variables = make()
    with pytest.raises(ValueError, match="no array params/blocks_0/norm_0/scale"):
        to_neuralop(model.clone(norm="group_norm"), variables)
    with pytest.raises(ValueError, match="params/blocks_0/conv/bias has the shape"):
        to_neuralop(model.clone(hidden_channels=5), variables)


def test_all_fno_classes_are_exported_as_fno():
    _, variables = make()
    model = FNO2D((4, 4), **BASE)
    state = to_neuralop(model, variables)
    assert state["_metadata"]["_name"] == "FNO"
    assert type(from_neuralop(state)[0]) is FNO
