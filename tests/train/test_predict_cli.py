"""``python -m train.predict``: outputs, errors and picture of a saved model."""

import jax
import numpy as np
import pytest

from models import FNO, load, save
from train import predict
from train.normalise import UnitGaussian

MEANS = {"input": ([1.0], [2.0]), "target": ([30.0], [10.0])}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model and data, and what the model should give."""
    folder = tmp_path_factory.mktemp("predict")
    model = FNO(
        n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=3, n_layers=1
    )
    inputs = np.random.default_rng(0).normal(size=(5, 7, 6, 1)).astype(np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), inputs)
    normalisers = {
        f"{name}_normaliser": UnitGaussian(*map(np.array, moments)).to_dict()
        for name, moments in MEANS.items()
    }
    (folder / "run").mkdir()
    save(folder / "run" / "model.safetensors", model, variables, **normalisers)
    save(folder / "plain.safetensors", model, variables)
    output = np.asarray(jax.jit(model.apply)(variables, (inputs - 1) / 2))
    targets = 30 + 10 * output + 1
    np.savez(folder / "pairs.npz", x=inputs[..., 0], y=targets[..., 0])
    np.savez(folder / "inputs.npz", x=inputs)
    return folder, inputs, targets - 1


def run(*arguments):
    return predict.main(["--backend", "cpu", *map(str, arguments)])


def test_pairs_give_outputs_errors_and_a_picture(made, tmp_path, capsys):
    folder, _, expected = made
    out, picture = tmp_path / "out.npz", tmp_path / "picture.png"
    options = ["--out", out, "--picture", picture, "--batch-size", 2]
    assert run(folder / "run", folder / "pairs.npz", *options) == 0
    with np.load(out) as arrays:
        assert set(arrays) == {"prediction", "relative_l2", "relative_h1"}
        np.testing.assert_allclose(arrays["prediction"], expected, rtol=1e-5)
        # The targets are the outputs plus one, all over.
        sizes = np.sqrt(((expected + 1) ** 2).mean(axis=(1, 2, 3)))
        np.testing.assert_allclose(arrays["relative_l2"], 1 / sizes, rtol=1e-4)
        mean = arrays["relative_l2"].mean()
    assert picture.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert f"{mean:.2%}" in output
    assert "5 samples of 7 x 6" in output
    assert str(out) in output and str(picture) in output


def test_inputs_alone_give_outputs_alone(made, tmp_path, monkeypatch):
    folder, _, expected = made
    monkeypatch.chdir(tmp_path)
    model = folder / "run" / "model.safetensors"
    assert run(model, folder / "inputs.npz", "--picture", "p.png") == 0
    with np.load(tmp_path / "inputs-prediction.npz") as arrays:
        assert set(arrays) == {"prediction"}
        np.testing.assert_allclose(arrays["prediction"], expected, rtol=1e-5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["inputs-prediction.npz", "p.png"]


def test_a_model_without_normalisers_takes_the_data_as_they_are(made, tmp_path):
    folder, inputs, expected = made
    data, out = tmp_path / "encoded.npz", tmp_path / "out.npz"
    np.savez(data, x=(inputs - 1) / 2)
    assert run(folder / "plain.safetensors", data, "--out", out) == 0
    plain = (expected - 30) / 10
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["prediction"], plain, rtol=1e-4, atol=1e-5)


class TestRefusals:
    def refuse(self, capsys, *arguments):
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    def test_another_number_of_channels(self, made, tmp_path, capsys):
        data = tmp_path / "two.npz"
        np.savez(data, x=np.zeros((3, 7, 6, 2), np.float32))
        out = tmp_path / "out.npz"
        assert "channel" in self.refuse(capsys, made[0] / "run", data, "--out", out)
        assert not out.exists()

    def test_a_cut_model(self, made, tmp_path, capsys):
        path = tmp_path / "cut.safetensors"
        path.write_bytes((made[0] / "plain.safetensors").read_bytes()[:-10])
        error = self.refuse(
            capsys, path, made[0] / "pairs.npz", "--out", tmp_path / "o"
        )
        assert "cut.safetensors" in error

    def test_outputs_that_cannot_be_written(self, made, tmp_path, capsys):
        model, data = made[0] / "run", made[0] / "pairs.npz"
        (tmp_path / "file").write_text("")
        error = self.refuse(capsys, model, data, "--out", tmp_path / "file" / "o.npz")
        assert "can be written" in error
        assert "is a folder" in self.refuse(capsys, model, data, "--out", tmp_path)
        assert "must not replace" in self.refuse(capsys, model, data, "--out", data)
        error = self.refuse(
            capsys, model, data, "--out", tmp_path / "o", "--picture", data
        )
        assert "must not replace" in error

    def test_an_unknown_option(self, made):
        with pytest.raises(SystemExit) as stop:
            run(made[0] / "run", made[0] / "pairs.npz", "--batchsize", 3)
        assert stop.value.code == 2


def test_outputs_never_replace_the_model_or_each_other(made, tmp_path, capsys):
    folder, _, _ = made
    model = folder / "run" / "model.safetensors"
    before = model.read_bytes()
    assert run(folder / "run", folder / "pairs.npz", "--out", model) == 2
    assert "must not replace" in capsys.readouterr().err
    assert model.read_bytes() == before
    both = tmp_path / "both.png"
    options = ["--out", both, "--picture", both]
    assert run(folder / "run", folder / "pairs.npz", *options) == 2
    assert "must be two files" in capsys.readouterr().err
    options = ["--out", tmp_path / "out.npz", "--picture", tmp_path / "p.pdf"]
    assert run(folder / "run", folder / "pairs.npz", *options) == 2
    assert "must end in .png" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_or_is_not_finite_is_told(made, tmp_path, capsys):
    folder, inputs, _ = made
    assert run(tmp_path / "nowhere", folder / "pairs.npz") == 2
    assert "does not exist" in capsys.readouterr().err
    wide = tmp_path / "wide.npz"
    np.savez(wide, x=np.concatenate([inputs, inputs], axis=-1))
    assert run(folder / "run", wide, "--channel-axis", "-1") == 2
    assert "channel" in capsys.readouterr().err
    model, variables, _ = load(folder / "plain.safetensors")
    spoilt = jax.tree.map(lambda leaf: np.asarray(leaf) * np.nan, variables)
    save(tmp_path / "spoilt.safetensors", model, spoilt)
    options = ["--out", tmp_path / "out.npz"]
    assert run(tmp_path / "spoilt.safetensors", folder / "inputs.npz", *options) == 2
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()
