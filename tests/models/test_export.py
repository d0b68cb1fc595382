"""A saved model as an IREE module: what is refused, and what runs where IREE is."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import export as module
from models.export import ExportError, as_text, export, main, stablehlo

HAS_IREE = importlib.util.find_spec("iree") is not None
needs_iree = pytest.mark.skipif(not HAS_IREE, reason="IREE is not installed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An operator with a norm, on grids of any size."""
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    model = models.FNO1D((3,), 1, 2, 4, n_layers=1, norm="instance_norm")
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 1)))
    models.save(path, model, variables, input={"mean": np.float32(2.5)}, note="a note")
    return path


def norm(x):
    return x - jnp.broadcast_to(x.mean(0, keepdims=True), x.shape)


def test_sums_are_kept_in_kernels_of_their_own():
    x = np.ones((4, 3), np.float32)
    lowered = jax.jit(norm).lower(x)
    text = as_text(lowered)
    assert text.count("stablehlo.reduce") == text.count("optimization_barrier") == 1
    reduced = text.index("stablehlo.reduce")
    assert text.index("optimization_barrier") < text.index("stablehlo.divide", reduced)
    assert "optimization_barrier" not in as_text(lowered, lone_sums=False)
    assert "optimization_barrier" not in lowered.as_text()  # stays as it was


def test_half_precision_is_made_longer_in_a_kernel_of_its_own():
    text = stablehlo(lambda x: norm(x.astype(jnp.float32)), np.ones((4, 3), np.float16))
    assert text.count("optimization_barrier") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cuda"}, "target is one of metal, vulkan, cpu; got 'cuda'"),
        ({"target": "cpu", "source": True}, "Only the target metal has Metal source"),
    ],
)
def test_wrong_arguments(saved, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export(saved, tmp_path / "model.vmfb", **options)
    assert not list(tmp_path.iterdir())


def test_without_iree(saved, tmp_path, capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "version", version)
    assert main([str(saved), "--out", str(tmp_path / "model.vmfb")]) == 1
    told = capsys.readouterr().err
    assert "which is missing. Install it: pip install iree-base-compiler==3.13" in told
    assert not list(tmp_path.iterdir())


@needs_iree
def test_other_version(monkeypatch):
    monkeypatch.setattr(module, "IREE_VERSION", "2.0")
    with pytest.raises(ExportError, match="needs iree-base-compiler 2.0.*got 3.13.0"):
        module.find_compiler()


@needs_iree
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (None, r"give --shape BATCH N 1"),
        ((1, 8, 3), r"takes no shape=\(1, 8, 3\).*1 channels"),
        ((0, 8, 1), "at least 1"),
    ],
)
def test_wrong_shape(saved, tmp_path, shape, message):
    with pytest.raises(ValueError, match=message):
        export(saved, tmp_path / "model.vmfb", "cpu", shape)
    assert not list(tmp_path.iterdir())


@needs_iree
def test_nothing_is_written_where_the_result_is_another(saved, tmp_path, monkeypatch):
    def without_sums(lowered, lone_sums=True):
        return lowered.as_text().replace("stablehlo.multiply", "stablehlo.subtract")

    monkeypatch.setattr(module, "as_text", without_sums)
    with pytest.raises(ExportError, match="off by .* of the largest value"):
        export(saved, tmp_path / "model.vmfb", "cpu", (1, 8, 1))
    assert not list(tmp_path.iterdir())


@needs_iree
def test_metal(saved, tmp_path, capsys):
    out = tmp_path / "model.vmfb"
    assert main([str(saved), "--out", str(out), "--shape", *"291", "--source"]) == 0
    told = capsys.readouterr().out
    assert 'rt.Config("metal")' in told and "of JAX" in told
    source = (tmp_path / "model.metal").read_text()
    assert "kernel void main_dispatch_0" in source
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["input"] == {"shape": [2, 9, 1], "dtype": "float32"}
    assert about["output"] == {"shape": [2, 9, 2], "dtype": "float32"}
    assert about["extra"] == {"input": {"mean": 2.5}, "note": "a note"}
    assert about["error_on_cpu"] < 1e-5
    assert source[source.index("kernel void") :].encode()[:80] in out.read_bytes()


@needs_iree
def test_module_runs_without_jax(saved, tmp_path):
    exported = export(saved, tmp_path / "model.vmfb", "cpu", (2, 9, 1))
    model, variables, _ = models.load(saved)
    x = np.random.default_rng(1).standard_normal((2, 9, 1), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    code = exported.how_to_run.replace(
        "np.zeros((2, 9, 1), np.float32)", "np.load('x.npy')"
    )
    assert "np.load" in code
    code += (
        "import sys\nassert not {'jax', 'jaxlib', 'flax', 'models'} & {*sys.modules}\n"
    )
    code += "np.save('y.npy', module.main(x).to_host())\n"
    # -I: neither this folder nor the environment's PYTHONPATH.
    told = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == "(2, 9, 2)"
    expected = np.asarray(model.apply(variables, x))
    error = np.abs(np.load(tmp_path / "y.npy") - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()


@needs_iree
def test_volume_model_with_its_example_shape(tmp_path):
    model = models.EDSR3D(scale=(1, 2, 2), hidden_channels=4, n_blocks=1)
    variables = model.init(jax.random.key(0), jnp.zeros(model.example_shape()))
    models.save(tmp_path / "model.safetensors", model, variables)
    exported = export(
        tmp_path / "model.safetensors", tmp_path / "out" / "m.vmfb", "cpu"
    )
    assert exported.error < 1e-5
    assert json.loads((tmp_path / "out/m.json").read_text())["output"]["shape"][2] == 2


@needs_iree
def test_large_weights_are_warned_of(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 100)
    with pytest.warns(UserWarning, match="all of them are put into the module"):
        export(saved, tmp_path / "model.vmfb", "cpu", (1, 8, 1))
