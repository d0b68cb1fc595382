"""``python -m train.fno``: what a run makes, stops and goes on with, and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from models import FNO, load
from train import checkpoint, fno, run
from train import folder as files
from train.report import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = "--backend cpu --n-modes 4 --hidden-channels 3 --n-layers 1 --batch-size 4"
TINY = [*SMALL.split(), "--norm", "batch_norm", "--channel-mlp-dropout", "0.1"]
EPOCHS = 3

pytestmark = pytest.mark.usefixtures("quick_compilation")


def train(data, out, *options):
    arguments = ["--data", data, "--out", out, "--epochs", EPOCHS, *TINY, *options]
    return fno.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(smoothing_file, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(smoothing_file, out) == 0
    return out


def assert_same_run(one, other):
    assert (one / files.METRICS).read_bytes() == (other / files.METRICS).read_bytes()
    for name in (files.MODEL, checkpoint.LAST, checkpoint.BEST):
        (_, *a), (_, *b) = load(one / name), load(other / name)
        a[1].pop("settings")
        b[1].pop("settings")
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_run_makes_what_it_says(finished, smoothing_file):
    lines = read_metrics(finished / files.METRICS)
    assert [line["event"] for line in lines] == ["epoch"] * EPOCHS + ["test"]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 3]
    assert [line["step"] for line in lines[:-1]] == [5, 10, 15]  # 23 samples
    assert lines[2]["loss"] < lines[0]["loss"]
    assert lines[-1]["grid"] == [8, 8]
    assert lines[-1]["samples"] == 3  # a tenth was held out
    assert lines[-1]["zero_shot"] is False

    model, variables, extra = load(finished / files.MODEL)
    assert model == FNO(
        n_modes=(4, 4),
        in_channels=1,
        out_channels=1,
        hidden_channels=3,
        n_layers=1,
        norm="batch_norm",
        channel_mlp_dropout=0.1,
    )
    assert extra["tests"]["8 x 8"]["relative_l2"] == lines[-1]["relative_l2"]
    config = json.loads((finished / "config.json").read_text())
    assert json.loads(json.dumps(extra["settings"])) == config

    # The saved model and its normalisers give the errors that were printed.
    with np.load(smoothing_file) as data:
        inputs, targets = (data[key].astype(np.float64)[..., None] for key in "xy")
    for name, part in (("input", inputs[:-3]), ("target", targets[:-3])):
        moments = extra[f"{name}_normaliser"]
        np.testing.assert_allclose(moments["mean"], [part.mean()], rtol=1e-6)
        np.testing.assert_allclose(moments["std"], [part.std(ddof=1)], rtol=1e-6)
    encoded = (inputs[-3:] - inputs[:-3].mean()) / inputs[:-3].std(ddof=1)
    output = model.apply(variables, encoded.astype(np.float32))
    prediction = np.asarray(output) * targets[:-3].std(ddof=1) + targets[:-3].mean()
    errors = np.linalg.norm((prediction - targets[-3:]).reshape(3, -1), axis=1)
    errors /= np.linalg.norm(targets[-3:].reshape(3, -1), axis=1)
    np.testing.assert_allclose(errors.mean(), lines[-1]["relative_l2"], rtol=1e-5)
    np.testing.assert_allclose(errors.max(), lines[-1]["relative_l2_max"], rtol=1e-5)


def test_the_best_checkpoint_is_of_the_lowest_test_error(finished):
    lines = read_metrics(finished / files.METRICS)[:-1]
    best = min(lines, key=lambda line: line["relative_l2"])
    _, _, extra = load(finished / checkpoint.BEST)
    assert extra["best"] == {k: best[k] for k in ("epoch", "relative_l2")}
    assert extra["training"]["step"] == best["step"]
    _, _, extra = load(finished / checkpoint.LAST)
    assert extra["training"]["step"] == 15


class Crash(BaseException):
    """Stands for a kill: nothing catches it."""


def test_a_crash_at_any_write_resumes_to_the_same_run(
    finished, smoothing_file, tmp_path, monkeypatch
):
    """Each run makes three renamings, and dies before it makes a fourth.

    Renamings are the moments at which what is on the disk changes, lines of
    metrics.jsonl apart, and those come right before a checkpoint's.
    """
    replace = os.replace
    out = tmp_path / "run"
    crashes = 0
    while not files.is_finished(out):
        done = []

        def crash(source, target, done=done):
            if len(done) == 3:  # the settings and an epoch's two checkpoints
                raise Crash(target)
            done.append(target)
            replace(source, target)

        monkeypatch.setattr(os, "replace", crash)
        try:
            assert train(smoothing_file, out, "--resume") == 0
        except Crash:
            crashes += 1
            assert crashes < 20
    monkeypatch.undo()
    assert crashes >= EPOCHS
    assert_same_run(finished, out)


def start(environment, data, out, *options):
    """A run in a process of its own."""
    command = [sys.executable, "-m", "train.fno", "--data", data, "--out", out, *TINY]
    return subprocess.Popen(
        [str(part) for part in (*command, *options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(process, path, count):
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)


def test_kill_and_ctrl_c_resume_to_the_same_run(
    quick_compilation, smoothing_file, tmp_path
):
    """One run is killed, goes on, is stopped by Ctrl-C, and goes on again."""
    many = ["--epochs", "60"]
    assert train(smoothing_file, tmp_path / "a", *many) == 0
    out = tmp_path / "b"

    killed = start(quick_compilation, smoothing_file, out, *many)
    wait_for_lines(killed, out / files.METRICS, 3)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not files.is_finished(out)

    asked = start(quick_compilation, smoothing_file, out, *many, "--resume")
    wait_for_lines(asked, out / files.METRICS, 8)
    asked.send_signal(signal.SIGINT)
    output, errors = asked.communicate()
    assert asked.returncode == 130, errors
    assert "resumed after step" in output
    assert f"python -m train.fno --resume --out {out}" in output
    assert "Ctrl-C once more" in errors
    step = int(output.split("Stopped after step ")[1].split(".")[0])
    assert load(out / checkpoint.LAST)[2]["training"]["step"] == step < 300

    # The printed command: everything but the folder comes from the run itself.
    assert fno.main(["--resume", "--out", str(out)]) == 0
    assert_same_run(tmp_path / "a", out)


def test_a_finished_run_is_left_alone(finished, smoothing_file, capsys):
    before = (finished / files.MODEL).read_bytes()
    assert fno.main(["--resume", "--out", str(finished)]) == 0
    assert "finished already" in capsys.readouterr().out
    assert train(smoothing_file, finished) == 2
    message = capsys.readouterr().err
    assert "holds a finished run" in message
    assert "--resume" in message and "--overwrite" in message
    assert (finished / files.MODEL).read_bytes() == before


def test_other_settings_or_data_do_not_resume(
    finished, smoothing_file, tmp_path, capsys
):
    assert train(smoothing_file, finished, "--resume", "--learning-rate", "0.1") == 2
    message = capsys.readouterr().err
    assert re.search(r"here --learning-rate was \S+ and is 0.1\. Leave", message)

    with np.load(smoothing_file) as data:
        changed = {key: data[key] + np.float32(key == "y") for key in "xy"}
    path = tmp_path / "same-name.npz"
    path.write_bytes(smoothing_file.read_bytes())
    out = tmp_path / "run"
    assert train(path, out) == 0
    (out / files.PICTURE).unlink()
    np.savez(path, **changed)
    assert train(path, out, "--resume") == 2
    assert "must be what they were" in capsys.readouterr().err

    # The same numbers in another order have the same moments, and are other data.
    with np.load(smoothing_file) as data:
        np.savez(path, x=data["x"][::-1], y=data["y"])
    assert train(path, out, "--resume") == 2
    assert "must be what they were" in capsys.readouterr().err


def test_one_folder_takes_one_run_at_a_time(smoothing_file, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with files.reserved(out):
        assert train(smoothing_file, out) == 2
    assert "one run at a time" in capsys.readouterr().err
    assert train(smoothing_file, out, "--epochs", "1") == 0


def test_names_that_look_like_markup_or_formulas(smoothing_file, tmp_path, capsys):
    """Rich would read [lr=0.1] as a style, matplotlib $ as the start of a formula."""
    out = tmp_path / "run[lr=0.1] cost$x_{$"
    assert train(smoothing_file, out, "--epochs", "1") == 0
    printed = capsys.readouterr().out
    assert f"'{out / files.MODEL}'" in printed  # as a shell takes it


def test_overwrite_replaces_a_run(finished, smoothing_file, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for name in (files.METRICS, files.MODEL, files.PICTURE):
        (out / name).write_text("old")
    assert train(smoothing_file, out, "--overwrite") == 0
    assert_same_run(finished, out)
    assert (out / "notes.txt").read_text() == "mine"
    assert train(smoothing_file, out, "--overwrite", "--resume") == 2
    assert "use one" in capsys.readouterr().err


def test_embedded_set_zero_shot_and_numbered_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    darcy = ["--darcy.num-train", "8", "--darcy.num-test", "3"]
    options = [*TINY, "--epochs", "1", *darcy]
    assert fno.main(options) == 0
    output = capsys.readouterr().out
    assert "zero-shot" in output
    assert (tmp_path / "runs/darcy" / files.SAMPLES).exists()
    assert "train.predict runs/darcy/model.safetensors runs/darcy/samples.npz" in output
    _, same, finer = read_metrics(tmp_path / "runs/darcy" / files.METRICS)
    assert (same["zero_shot"], finer["zero_shot"]) == (False, True)
    assert same["grid"] < finer["grid"]
    assert fno.main(options) == 0
    assert "runs/darcy-2" in capsys.readouterr().out
    # To resume without --out is to resume the newest.
    (tmp_path / "runs/darcy-2" / files.PICTURE).unlink()
    assert fno.main(["--resume"]) == 0
    assert (tmp_path / "runs/darcy-2" / files.PICTURE).exists()


@pytest.mark.parametrize("num_axes", [1, 3])
def test_lines_and_volumes(num_axes, tmp_path):
    random = np.random.default_rng(0)
    for n, name in ((6, "train"), (9, "test")):
        shape = (5, *[n] * num_axes)
        np.savez(
            tmp_path / f"{name}.npz",
            x=random.normal(size=(*shape, 2)).astype(np.float32),
            y=random.normal(size=(*shape, 1)).astype(np.float32),
        )
    out = tmp_path / "run"
    options = ["--test", tmp_path / "test.npz", "--channel-axis", -1, "--loss", "h1"]
    assert train(tmp_path / "train.npz", out, *options, "--domain-padding", 0.2) == 0
    line = read_metrics(out / files.METRICS)[-1]
    assert line["grid"] == [9] * num_axes
    assert line["zero_shot"] is True
    assert load(out / files.MODEL)[0].in_channels == 2


class TestRefusals:
    """Each mistake: exit status 2, one message, and no run begun."""

    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(run, "train_epochs", None)  # nothing may come so far

    def refuse(self, capsys, *arguments):
        assert fno.main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    def pairs(self, path, shape=(8, 8, 8), **replaced):
        fields = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.savez(path, **{"x": fields, "y": fields, **replaced})
        return path

    def test_files_and_options_that_leave_nothing_to_train_on(self, tmp_path, capsys):
        data = self.pairs(tmp_path / "one.npz", shape=(1, 8, 8))
        error = self.refuse(capsys, "--data", data, "--batch-size", 1)
        assert "leaves none to train on" in error
        data = self.pairs(tmp_path / "narrow.npz", shape=(8, 8, 3))
        options = ["--no-h1-periodic", "--channel-axis", "None", "--batch-size", 2]
        error = self.refuse(capsys, "--data", data, *options)
        assert "needs 4 points along each axis" in error
        data = tmp_path / "scalars.npz"
        np.savez(data, x=np.float32(1), y=np.float32(1))
        assert "axis of space" in self.refuse(capsys, "--data", data)
        with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
            archive.writestr("x", "text")
            archive.writestr("y", "text")
        error = self.refuse(capsys, "--data", tmp_path / "text.npz")
        assert "is no array" in error

    def test_a_folder_that_cannot_be_made(self, tmp_path, capsys, smoothing_file):
        (tmp_path / "file").write_text("not a folder")
        out = tmp_path / "file" / "run"
        error = self.refuse(capsys, "--data", smoothing_file, "--out", out)
        assert "must be one that can be written" in error
        assert "--out" in error

    def test_data_with_nan(self, tmp_path, capsys):
        bad = np.ones((8, 8, 8), np.float32)
        bad[3, 2, 1] = np.nan
        data = self.pairs(tmp_path / "bad.npz", y=bad)
        error = self.refuse(capsys, "--data", data, "--out", tmp_path / "run")
        assert "NaN" in error
        assert not (tmp_path / "run").exists()

    def test_fewer_samples_than_a_batch(self, tmp_path, capsys):
        data = self.pairs(tmp_path / "few.npz")
        error = self.refuse(capsys, "--data", data, "--batch-size", 8)
        assert "7 samples for a batch of 8" in error
        assert list((tmp_path / "runs").iterdir()) == []

    @pytest.mark.parametrize(
        ("shape", "told"),
        [((8, 8, 8, 2), "got 2 and 2"), ((8, 8), "(8, 8)")],
    )
    def test_test_sets_that_do_not_fit(self, tmp_path, capsys, shape, told):
        data = self.pairs(tmp_path / "train.npz")
        test = self.pairs(tmp_path / "test.npz", shape)
        error = self.refuse(capsys, "--data", data, "--test", test, *TINY)
        assert told in error
        assert "test.npz" in error

    def test_files_that_are_absent_or_foreign(self, tmp_path, capsys):
        assert "nothing.npz" in self.refuse(capsys, "--data", tmp_path / "nothing.npz")
        (tmp_path / "text.npz").write_text("hello")
        assert "text.npz" in self.refuse(capsys, "--data", tmp_path / "text.npz")

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--epochs", "0"], "--epochs must be 1 or more; got 0"),
            (["--learning-rate", "-1"], "--learning-rate must be above 0"),
            (["--test", "x.npz"], "need --data"),
            (["--overwrite"], "add --out"),
            (["--n-modes", "4", "4", "4"], "--n-modes takes one number, or one for"),
            (["--hidden-channels", "0"], "hidden_channels is a whole number"),
            (["--backend", "metal"], "Metal backend"),
        ],
    )
    def test_options(self, tmp_path, capsys, monkeypatch, arguments, told):
        monkeypatch.setenv("JAXOPS_CACHE", str(tmp_path / "cache"))
        quick = ["--darcy.num-train", "4", "--darcy.num-test", "1", "--batch-size", "4"]
        assert told in self.refuse(capsys, *quick, *arguments)

    def test_an_unknown_option(self, capsys):
        with pytest.raises(SystemExit) as stop:
            fno.main(["--n-mode", "4"])
        assert stop.value.code == 2
        assert "--n-modes" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_keeps_the_last_good_state(
    smoothing_file, tmp_path, capsys
):
    out = tmp_path / "run"
    options = ["--learning-rate", "1e30", "--warmup", "1.0", "--norm", "none"]
    assert train(smoothing_file, out, *options) == 1
    error = capsys.readouterr().err
    assert "not finite" in error and "--learning-rate" in error
    assert not (out / files.MODEL).exists()


def test_nothing_starts_jax_before_the_backend_is_chosen():
    code = (
        "import train.fno, train.predict\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "import sys\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
