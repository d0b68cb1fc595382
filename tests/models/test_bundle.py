"""One file a model: what is kept, what is refused, and that no file is half written."""

import json
import os
import stat
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxops import pointwise
from models import FNO, FNO1D, FNO2D, FNO3D
from models.bundle import load, provenance, save

BASE = {"in_channels": 1, "out_channels": 2, "hidden_channels": 3, "n_layers": 2}


def random_variables(model, seed=0):
    """Of the shapes that ``model.init`` gives, from the layout, without running it."""
    grid = (16,) * len(model.n_modes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modes above this grid
        shapes = jax.eval_shape(
            lambda: model.init(
                jax.random.key(0), jnp.zeros((1, *grid, model.in_channels))
            )
        )
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes
    )


@pytest.fixture
def model():
    return FNO2D((4, 4), **BASE, norm="batch_norm")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


MODELS = {
    "1d": lambda: FNO1D(5, **BASE),
    "2d": lambda: FNO2D([4, 6], **BASE, domain_padding=[0.1, (0, 0.25)]),
    "3d": lambda: FNO3D((4, 4, 4), **BASE, norm="group_norm", max_n_modes=[6, 5, 4]),
    "any": lambda: FNO((4, 4), **BASE, norm="batch_norm", compat="neuralop-2.0"),
    "shrinking": lambda: FNO((4, 4), **BASE, resolution_scaling_factor=[0.25, [2, 1]]),
    "bare": lambda: FNO(
        (4,),
        **BASE,
        fno_skip=None,
        channel_mlp_skip="identity",
        lifting_channel_ratio=0,
    ),
    "more modes than points": lambda: FNO1D(200, **BASE),
    "function with a name": lambda: FNO1D(4, **BASE, non_linearity=jax.nn.relu),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_and_variables_come_back(name, path):
    model = MODELS[name]()
    variables = random_variables(model.clone(resolution_scaling_factor=None))
    save(path, model, variables)
    again, variables_again, extra = load(path)
    assert type(again) is type(model)
    assert extra == {}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(variables_again))
    assert_same(variables, variables_again)
    if name == "function with a name":
        assert again.non_linearity == "relu"
    elif name == "2d":
        assert (again.n_modes, again.domain_padding) == ((4, 6), (0.1, (0, 0.25)))
    elif name == "shrinking":
        assert again.resolution_scaling_factor == (0.25, (2, 1))
    elif name != "3d":
        assert again == model


def test_the_model_computes_the_same(path):
    model = FNO1D(4, **BASE)
    variables = random_variables(model)
    save(path, model, variables)
    again, variables_again, _ = load(path)
    x = np.random.default_rng(1).standard_normal((2, 8, 1)).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(model.apply)(variables, x), jax.jit(again.apply)(variables_again, x)
    )


def test_extra_comes_back(model, path):
    extra = {
        "normaliser": {
            "mean": np.arange(3.0),
            "std": jnp.ones((2, 2), jnp.float16),
            "name": "unit gaussian",
            "deeper": {"mask": np.array([True, False]), "nothing": None, "empty": {}},
        },
        "number": 0.1,
        "numpy_number": np.float32(0.5),
        "infinite": float("inf"),
        "large": 2**60,
        "flag": True,
        "listed": [1, ("a", [None])],
        "foreign": np.arange(3, dtype=">f4"),
        "strided": np.arange(6, dtype=np.int64).reshape(2, 3).T[::-1],
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.uint8),
        "bfloat16": np.array([1.5], ml_dtypes.bfloat16),
    }
    save(path, model, random_variables(model), **extra)
    again = load(path)[2]
    assert set(again) == set(extra)
    assert again["normaliser"]["deeper"]["nothing"] is None
    assert again["normaliser"]["deeper"]["empty"] == {}
    assert again["normaliser"]["name"] == "unit gaussian"
    assert again["listed"] == (1, ("a", (None,)))
    for key in ("number", "numpy_number", "infinite", "large", "flag"):
        assert again[key] == extra[key] and not isinstance(again[key], np.generic)
    for key in ("foreign", "strided", "scalar", "empty", "bfloat16"):
        assert isinstance(again[key], np.ndarray)
        assert again[key].dtype == extra[key].dtype.newbyteorder("=")
        np.testing.assert_array_equal(again[key], extra[key])
    assert again["normaliser"]["mean"].dtype == np.float64
    assert again["normaliser"]["std"].dtype == np.float16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_variables_stay_so(dtype, model, path):
    variables = jax.tree.map(lambda a: jnp.asarray(a, dtype), random_variables(model))
    save(path, model, variables)
    assert_same(variables, load(path)[1])


def test_float64_arrives_as_jax_has_it(model, path):
    variables = jax.tree.map(np.float64, random_variables(model))
    save(path, model, variables)
    expected = np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(load(path)[1])} == {expected}


def test_the_file_tells_what_it_is(model, path):
    """Other programs read the arrays by their names, and people the rest as JSON."""
    variables = random_variables(model)
    save(path, model, variables, note="a text")
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        weight = file.get_tensor("variables/params/blocks_0/conv/weight")
    expected = variables["params"]["blocks_0"]["conv"]["weight"]
    np.testing.assert_array_equal(weight, expected)
    described = json.loads(metadata["model"])
    assert described["class"] == "FNO2D"
    assert described["arguments"]["hidden_channels"] == 3
    assert json.loads(metadata["extra"]) == {"note": "a text"}


def test_provenance(model, path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["python -m train.fno", "--epochs", "3"])
    save(path, model, random_variables(model))
    written = provenance(path)
    assert written["command_line"] == ("python -m train.fno", "--epochs", "3")
    assert written["versions"]["jax"] == jax.__version__
    assert written["date"].endswith("+00:00")


# Files that are not whole, or not ours


@pytest.fixture
def good(model, path):
    save(path, model, random_variables(model), note={"array": np.ones(2)})
    return path


def test_a_file_cut_anywhere_is_refused(good, tmp_path):
    data = good.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for position in [*range(0, len(data), 1 + len(data) // 40), len(data) - 1]:
        cut.write_bytes(data[:position])
        with pytest.raises(ValueError, match=r"cut.safetensors can't be loaded: it is"):
            load(cut)
    cut.write_bytes(data + b"more")
    with pytest.raises(ValueError, match="truncated or no .safetensors"):
        load(cut)


def test_flipped_bits_load_or_are_refused(good, tmp_path):
    data = np.frombuffer(good.read_bytes(), np.uint8)
    header = 8 + int(data[:8].view(np.uint64)[0])
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.safetensors"
    for _ in range(60):
        copy = data.copy()
        copy[rng.integers(0, header)] ^= 1 << rng.integers(8)
        damaged.write_bytes(copy.tobytes())
        try:
            model, _, _ = load(damaged)
            assert isinstance(model, nn.Module)
        except ValueError as error:
            assert "damaged.safetensors can't be loaded" in str(error)


@pytest.mark.parametrize(
    "data", [b"PK\x03\x04" + bytes(200), b"\x89HDF" + bytes(200), b"x", b"{" * 100]
)
def test_foreign_files_are_refused(data, path):
    path.write_bytes(data)
    with pytest.raises(ValueError, match="can't be loaded: it is truncated or no"):
        load(path)


def test_other_safetensors_files_are_refused(path):
    save_file({"x": np.ones(2)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="not one that models.save wrote"):
        load(path)
    with pytest.raises(ValueError, match="not one that models.save wrote"):
        provenance(path)


def test_absent_files_and_folders_are_the_system_s_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


def described(**changes):
    model = {
        "class": "FNO2D",
        "arguments": {"n_modes": [4, 4], **BASE, "norm": "batch_norm"},
    }
    model["arguments"].update(changes.pop("arguments", {}))
    return {"model": json.dumps({**model, **changes})}


WEIGHT = "variables/params/blocks_0/conv/weight"
CHANGED = {
    "version": ({"format_version": "2"}, {}, "format version is '2'.*upgrade jaxops"),
    "json": ({"model": "{"}, {}, "its model is no JSON"),
    "deep json": ({"extra": "[" * 10**5}, {}, "its extra is no JSON"),
    "list": ({"extra": "[]"}, {}, "its extra is no JSON object"),
    "class": (
        described(**{"class": "os.system"}),
        {},
        "is a 'os.system'; known are .*FNO",
    ),
    "function": (described(**{"class": "save"}), {}, "its model is a 'save'"),
    "no class": (described(**{"class": ["FNO"]}), {}, "its model is a "),
    "no arguments": (
        described(arguments={}) | {"model": '{"class": "FNO"}'},
        {},
        "no arg",
    ),
    "argument": (described(arguments={"modes": 3}), {}, "has no argument modes"),
    "parent": (described(arguments={"parent": None}), {}, "has no argument parent"),
    "value": (described(arguments={"norm": "x"}), {}, "refuses its arguments: .*norm"),
    "type": (described(arguments={"n_layers": "x"}), {}, "refuses its arguments"),
    "fraction": (
        described(arguments={"hidden_channels": 2.5}),
        {},
        "refuses its arguments",
    ),
    "smaller": (
        described(arguments={"n_layers": 1}),
        {},
        "blocks_1/.* not the model's",
    ),
    "larger": (
        described(arguments={"n_layers": 3}),
        {},
        "blocks_2/.* is missing.* and 13 more",
    ),
    "missing": ({}, {WEIGHT: None}, "params/blocks_0/conv/weight is missing"),
    "shape": ({}, {WEIGHT: np.ones(3)}, r"has the shape \(3,\), not \(2, 4, 3, 3, 3\)"),
    "unknown": ({}, {f"{WEIGHT}_2": np.ones(3)}, "weight_2 is not the model's"),
    "stray": ({}, {"other/x": np.ones(3)}, "neither to variables nor extra"),
    "no name": ({}, {"variables": np.ones(3)}, "neither to variables nor extra"),
    "inside": ({}, {f"{WEIGHT}/x": np.ones(3)}, "lies inside another|else does"),
    "taken": ({"extra": '{"note": 1}'}, {}, "lies inside another"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_files_that_do_not_fit_together_are_refused(name, good):
    metadata, arrays, text = CHANGED[name]
    with safe_open(good, framework="numpy") as file:
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        written = file.metadata()
    kept |= {key: array for key, array in arrays.items() if array is not None}
    kept = {key: array for key, array in kept.items() if arrays.get(key, 0) is not None}
    save_file(kept, good, {**written, **metadata})
    with pytest.raises(ValueError, match=f"can't be loaded: .*{text}"):
        load(good)


# What can't be saved


class Other(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features)(x)


class Mine(FNO):
    """A class of the user's own, which no other program can find again."""


def wave(x):
    return jnp.sin(x)


@pytest.mark.parametrize(
    ("model", "extra", "text"),
    [
        (Other(), {}, "Only models of models.__all__.*got a Other"),
        (Mine((4, 4), **BASE), {}, "got a Mine"),
        (FNO2D((4, 4), **BASE, non_linearity=wave), {}, "a function, 'wave'"),
        (None, {"x": object()}, "extra/x is of the type object"),
        (None, {"x": {1: 2}}, "a key of extra/x is 1"),
        (None, {"x": {"a/b": 2}}, "a key of extra/x is 'a/b'"),
        (None, {"x": {"": 2}}, "a key of extra/x is ''"),
        (None, {"x": [np.ones(2)]}, r"extra/x\[0\] is of the type ndarray"),
        (None, {"x": np.array(["text"])}, "extra/x is <U4"),
        (None, {"x": np.ones(2, np.complex64)}, "extra/x is complex64"),
    ],
)
def test_what_can_not_be_saved_is_named(model, extra, text, path):
    model = model or FNO2D((4, 4), **BASE)
    variables = {"params": {"kernel": np.ones(2)}}
    path.write_bytes(b"what was there")
    with pytest.raises(ValueError, match=text):
        save(path, model, variables, **extra)
    assert path.read_bytes() == b"what was there"
    assert list(path.parent.iterdir()) == [path]


def test_variables_are_arrays(model, path):
    with pytest.raises(ValueError, match="unlike.*variables/params/a"):
        save(path, model, {"params": {"a": 1}})


def test_activations_that_have_a_name_are_saved_by_it(path):
    model = FNO1D(4, **BASE, non_linearity=pointwise.gelu)
    save(path, model, random_variables(model))
    assert load(path)[0].non_linearity == "gelu"


# Written whole or not at all


def test_a_save_that_fails_leaves_the_old_file(model, path, monkeypatch):
    save(path, model, random_variables(model, 0))
    before = path.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(OSError, match="the disk is full"):
                save(path, model, random_variables(model, 1))
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]


def test_a_save_replaces_the_file_and_keeps_a_link(model, path, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    save(link, model, random_variables(model, 0))
    save(link, model, random_variables(model, 1))
    assert link.is_symlink()
    assert_same(load(path)[1], random_variables(model, 1))


def test_the_file_is_as_readable_as_other_files(model, path, tmp_path):
    (tmp_path / "other").write_text("")
    save(path, model, random_variables(model))
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )


def test_folders_are_made_and_impossible_ones_told(model, tmp_path):
    variables = random_variables(model)
    save(tmp_path / "new" / "folder" / "m.safetensors", model, variables)
    assert load(tmp_path / "new" / "folder" / "m.safetensors")[0] == model
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is no folder"):
        save(tmp_path / "file" / "m.safetensors", model, variables)
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save(tmp_path / "new", model, variables)
    with pytest.raises(OSError, match="/proc/.* can't be written"):
        save("/proc/jaxops/m.safetensors", model, variables)


def test_what_could_not_be_loaded_again_is_not_saved(path):
    model = FNO2D((4, 4), **BASE)
    with pytest.raises(ValueError, match="can't be saved: .* is missing"):
        save(path, model, {"params": {}})
    assert not path.exists()
