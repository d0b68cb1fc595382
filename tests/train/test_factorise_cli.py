"""``python -m train.factorise``: a model in, a cheaper model out."""

import json

import jax
import numpy as np
import pytest
import tifffile

from models import EDSR3D, FNO1D, load, save
from train import factorise
from train.settings import to_json
from train.sr_settings import MakeSettings, SRSettings

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = EDSR3D(scale=(1, 2, 2), hidden_channels=4, n_blocks=1, input_skip="cubic")
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 2, 4, 4, 1), "f4"))
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save(path, model, variables, intensity={"low": 0.0, "high": 9.0}, tests={"a": 1})
    return path


@pytest.fixture(scope="module")
def volume_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("volume") / "volume.tif"
    volume = np.random.default_rng(0).integers(0, 999, (4, 16, 24)).astype(np.uint16)
    tifffile.imwrite(path, volume, photometric="minisblack")
    return path


def run(*arguments):
    return factorise.main([str(argument) for argument in arguments])


def table(capsys):
    """Weights and PSNR as printed, of the dense and the factorised network."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in lines if line and line[0] in NAMES}
    return [(int(rows[n][1].replace(",", "")), float(rows[n][3])) for n in NAMES]


NAMES = ("dense", "factorised")


@pytest.mark.parametrize(("conv", "rank"), [("separable", 3), ("2plus1d", 99)])
def test_full_rank_changes_nothing(
    model_file, volume_file, tmp_path, capsys, conv, rank
):
    out = tmp_path / "out.safetensors"
    options = ["--rank", rank, "--conv", conv, "--volume", volume_file]
    assert run(model_file, out, *options, "--backend", "cpu") == 0
    (_, before), (_, after) = table(capsys)
    assert before == after
    model, _, extra = load(out)
    assert (model.conv, model.scale) == (conv, (1, 2, 2))
    assert extra["intensity"] == {"low": 0.0, "high": 9.0}
    assert extra["factorised"]["rank"] == rank
    assert extra["factorised"]["psnr_dense"] == pytest.approx(before, abs=0.01)
    assert "tests" not in extra  # those of the dense network


def test_volumes_are_made_coarser_as_in_training(volume_file, tmp_path, capsys):
    """With what a run of `train.sr` saves: without noise the error is another one."""
    model = EDSR3D(scale=(1, 2, 2), hidden_channels=2, n_blocks=1, input_skip="cubic")
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 2, 4, 4, 1), "f4"))
    found = []
    for number, noise in enumerate((0.0, 5.0)):
        settings = SRSettings(make=MakeSettings(blur=(0.0, 1.0, 1.0), noise=noise))
        path = tmp_path / f"{number}.safetensors"
        save(path, model, variables, settings=json.loads(to_json(settings)))
        out = tmp_path / f"out{number}.safetensors"
        assert run(path, out, "--rank", 3, "--volume", volume_file) == 0
        found.append(table(capsys)[0][1])
    assert found[0] > found[1] + 3


def test_rank_one_has_a_third_of_the_weights(model_file, volume_file, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert run(model_file, out, "--rank", 1, "--volume", volume_file) == 0
    (dense, _), (few, _) = table(capsys)
    _, variables, _ = load(out)
    assert few == sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert few < 0.45 * dense


def test_mistakes(model_file, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    assert run(model_file, out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    new = tmp_path / "new.safetensors"
    assert run(model_file, tmp_path / "new.tif") == 2
    assert "ends in .safetensors" in capsys.readouterr().err
    assert run(model_file, new, "--rank", 0) == 2
    assert "rank" in capsys.readouterr().err
    assert run(tmp_path / "nothing", new) == 2
    assert "nothing" in capsys.readouterr().err
    model = FNO1D(n_modes=(2,), in_channels=1, out_channels=1, hidden_channels=2)
    x = np.zeros((1, 4, 1), np.float32)
    save(tmp_path / "fno", model, jax.jit(model.init)(jax.random.key(0), x))
    assert run(tmp_path / "fno", new) == 2
    assert "FNO" in capsys.readouterr().err
    model, variables, _ = load(model_file)
    for settings in ({"make": None}, {"make": {"foo": 1}}, {"make": {"blur": "x"}}):
        save(tmp_path / "odd", model, variables, settings=settings)
        assert run(tmp_path / "odd", new) == 2
        assert f"{tmp_path / 'odd'}: settings.make" in capsys.readouterr().err
    assert not new.exists()
