"""``python -m train.sr``: what a run makes, stops and goes on with, and refuses."""

import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile

from models import EDSR3D, load
from train import folder as files
from train import run, sr
from train.checkpoint import BEST, LAST
from train.data.degrade import Degradation
from train.normalise import IntensityRange
from train.report import read_metrics
from train.volume_metrics import psnr, ssim
from train.volume_sets import matched_blur

TINY = "--backend cpu --hidden-channels 2 --n-blocks 1 --patch 4 8 8 --batch-size 2"
TINY += " --epochs 2 --steps 2"

pytestmark = pytest.mark.usefixtures("quick_compilation")


def train(*arguments):
    return sr.main([*map(str, arguments), *TINY.split()])


def texture(shape=(6, 24, 32), seed=0):
    """A smooth random volume, uint16."""
    noise = np.random.default_rng(seed).normal(size=shape)
    smooth = Degradation(blur=(1.0, 1.5, 1.5)).reduce(noise)
    return (1000 + 3000 * (smooth - smooth.min())).astype(np.uint16)


@pytest.fixture(scope="module")
def volume_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("volumes") / "texture.tif"
    tifffile.imwrite(path, texture(), imagej=True, metadata={"axes": "ZYX"})
    return path


@pytest.fixture(scope="module")
def finished(volume_file, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(volume_file, "--out", out) == 0
    return out


def test_a_run_makes_what_it_says(finished):
    lines = read_metrics(finished / files.METRICS)
    assert [line["event"] for line in lines] == ["epoch", "epoch", "test"]
    assert [line["step"] for line in lines[:-1]] == [2, 4]
    model, variables, extra = load(finished / files.MODEL)
    assert model == EDSR3D(
        scale=(1, 2, 2), hidden_channels=2, n_blocks=1, input_skip="cubic"
    )
    config = json.loads((finished / "config.json").read_text())
    assert json.loads(json.dumps(extra["settings"])) == config
    assert extra["percentiles"] == (2.0, 99.8)
    assert extra["target_intensity"] == extra["intensity"]

    # The saved model gives the errors that were told, on the last quarter of x, which
    # was cut off before it was made coarser.
    whole = texture()
    made = Degradation((1, 2, 2), (0.0, matched_blur(2), matched_blur(2)))
    intensity = IntensityRange.fit([made.reduce(whole[:, :, :24])])
    assert extra["intensity"] == intensity.to_dict()
    low = intensity.encode(made.reduce(whole[:, :, 24:]))
    truth = intensity.encode(whole[:, :, 24:].astype(np.float32))
    ours = model.apply(variables, jnp.asarray(low[None, ..., None]))[0, ..., 0]
    line = lines[-1]
    assert line["shape"] == list(truth.shape)
    for name, metric in (("psnr", psnr), ("ssim", ssim)):
        value = metric(truth, np.asarray(ours))
        np.testing.assert_allclose(line[f"{name}_ours"], value, rtol=1e-5)
    np.testing.assert_allclose(lines[1]["psnr"], line["psnr_ours"], rtol=1e-6)
    assert extra["tests"]["0"]["ours"]["psnr"] == line["psnr_ours"]
    assert (finished / files.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_training_beats_cubic_interpolation(volume_file, tmp_path):
    """Of a blurred volume, which a few hundred small steps learn to sharpen."""
    out = tmp_path / "run"
    options = ["--learning-rate", 1e-2, "--epochs", 1, "--steps", 100]
    arguments = [volume_file, "--out", out, *TINY.split()[:-4], *options]
    assert sr.main([*map(str, arguments)]) == 0
    line = read_metrics(out / files.METRICS)[-1]
    assert line["psnr_ours"] > line["psnr_cubic"] + 0.5
    assert line["ssim_ours"] > line["ssim_cubic"]


class Crash(BaseException):
    """Stands for a kill: nothing catches it."""


def test_a_crash_at_any_write_resumes_to_the_same_run(
    finished, volume_file, tmp_path, monkeypatch
):
    replace, out, crashes = os.replace, tmp_path / "run", 0
    while not files.is_finished(out):
        done = []

        def crash(source, target, done=done):
            if len(done) == 3:
                raise Crash(target)
            done.append(target)
            replace(source, target)

        monkeypatch.setattr(os, "replace", crash)
        try:
            assert train(volume_file, "--out", out, "--resume") == 0
        except Crash:
            crashes += 1
            assert crashes < 10
    monkeypatch.undo()
    assert crashes >= 1
    assert (out / files.METRICS).read_bytes() == (finished / files.METRICS).read_bytes()
    for name in (files.MODEL, LAST, BEST):
        (_, *a), (_, *b) = load(finished / name), load(out / name)
        for extra in (a[1], b[1]):
            extra.pop("settings")
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)


def test_another_volume_does_not_resume(tmp_path, capsys):
    other = tmp_path / "texture.tif"
    tifffile.imwrite(other, texture(seed=1), imagej=True, metadata={"axes": "ZYX"})
    out = tmp_path / "run"
    assert train(other, "--out", out) == 0
    (out / files.PICTURE).unlink()
    tifffile.imwrite(other, texture(seed=2), imagej=True, metadata={"axes": "ZYX"})
    assert train(other, "--resume", "--out", out) == 2
    assert "must be what they were" in capsys.readouterr().err


def test_pairs_from_two_folders(tmp_path, capsys):
    """Of other intensities at low resolution; the scale is that of the files."""
    for name, factor in (("a", 1), ("b", 3)):
        high = texture(seed=factor) * factor
        low = Degradation((2, 2, 2)).reduce(high) / 100
        for folder, volume in (("high", high), ("low", low)):
            (tmp_path / folder).mkdir(exist_ok=True)
            tifffile.imwrite(
                tmp_path / folder / f"{name}.tif",
                volume,
                imagej=True,
                metadata={"axes": "ZYX"},
            )
    out = tmp_path / "run"
    pairs = [tmp_path / "high", "--low", tmp_path / "low", "--out", out]
    assert train(*pairs) == 0
    printed = capsys.readouterr().out
    assert "2 volumes" in printed
    model, _, extra = load(out / files.MODEL)
    assert model.scale == (2, 2, 2)
    ranges = extra["intensity"], extra["target_intensity"]
    assert ranges[0]["high"] < ranges[1]["high"] / 50
    lines = read_metrics(out / files.METRICS)[-2:]
    assert [line["volume"] for line in lines] == ["a.tif", "b.tif"]
    # Each is normalised by itself, so that low and high agree.
    assert all(line["psnr_cubic"] > 20 for line in lines)
    assert train(*pairs[:-1], tmp_path / "other", "--scale", 1, 2, 2) == 2
    assert "--scale must be what the files have" in capsys.readouterr().err


def test_pairs_given_as_files_go_by_the_order_they_are_given_in(tmp_path, capsys):
    for number, seed in (("9", 1), ("1", 2)):
        high = texture((4, 16, 24), seed)
        low = Degradation((1, 2, 2)).reduce(high)
        tifffile.imwrite(tmp_path / f"high{number}.tif", high, photometric="minisblack")
        path = tmp_path / f"low{10 - seed}.tif"
        tifffile.imwrite(path, low, photometric="minisblack")
    highs = [tmp_path / "high9.tif", tmp_path / "high1.tif"]
    lows = [tmp_path / "low9.tif", tmp_path / "low8.tif"]
    assert train(*highs, "--low", *lows, "--out", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "low9.tif -> high9.tif" in printed and "low8.tif -> high1.tif" in printed
    lines = read_metrics(tmp_path / "run" / files.METRICS)[-2:]
    assert all(line["psnr_cubic"] > 20 for line in lines)


def test_an_ome_set_in_a_folder_is_taken_once(tmp_path):
    stack = np.stack([texture((4, 16, 24), seed) for seed in (0, 1)])
    (tmp_path / "set").mkdir()
    name = tmp_path / "set" / "a.ome.tif"
    with tifffile.TiffWriter(name, ome=True) as writer:
        writer.write(stack, metadata={"axes": "CZYX"}, photometric="minisblack")
    for other in ("b.tif", "c.tif"):
        tifffile.imwrite(
            tmp_path / "set" / other, texture((4, 16, 24)), photometric="minisblack"
        )
    assert train(tmp_path / "set", "--out", tmp_path / "run") == 0
    lines = read_metrics(tmp_path / "run" / files.METRICS)
    names = [line["volume"] for line in lines if line["event"] == "test"]
    assert names == ["a.ome.tif, t 0, c 0", "a.ome.tif, t 0, c 1", "b.tif", "c.tif"]


def test_times_and_channels_and_folders_of_slices(tmp_path, capsys):
    stack = np.stack([texture(seed=s) for s in range(4)]).reshape(2, 2, 6, 24, 32)
    path = tmp_path / "times.tif"
    tifffile.imwrite(
        path, stack.swapaxes(1, 2), imagej=True, metadata={"axes": "TZCYX"}
    )
    assert train(path, "--out", tmp_path / "a") == 0
    lines = read_metrics(tmp_path / "a" / files.METRICS)[-4:]
    assert [line["volume"] for line in lines] == [
        f"times.tif, t {t}, c {c}" for t in (0, 1) for c in (0, 1)
    ]
    (tmp_path / "slices").mkdir()
    for z, plane in enumerate(texture()):
        tifffile.imwrite(tmp_path / f"slices/z{z}.tif", plane)
    assert train(tmp_path / "slices", "--out", tmp_path / "b") == 0
    (line,) = read_metrics(tmp_path / "b" / files.METRICS)[-1:]
    assert line["shape"] == [6, 24, 8]


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("one slice", texture((1, 24, 32))),
        ("small planes", texture((3, 16, 16))),
        ("odd sizes", texture((5, 21, 27))),
        ("constant", np.full((4, 16, 16), 7, np.uint16)),
        ("zeros", np.zeros((4, 16, 16), np.uint8)),
        ("float64", texture((4, 16, 16)).astype(np.float64)),
        ("big-endian", texture((4, 16, 16)).astype(">u2")),
    ],
)
def test_volumes_that_people_have(name, volume, tmp_path):
    path = tmp_path / "volume.tif"
    tifffile.imwrite(
        path,
        volume,
        photometric="minisblack",
        byteorder=">" if volume.dtype.str.startswith(">") else "<",
    )
    assert train(path, "--out", tmp_path / "run") == 0
    for line in read_metrics(tmp_path / "run" / files.METRICS):
        for key, value in line.items():
            if key.startswith(("rmse", "loss")):
                assert np.isfinite(value)


def test_voxels_that_are_not_numbers(tmp_path, capsys):
    volume = texture((4, 16, 24)).astype(np.float32)
    volume[1, 3, 5] = np.nan
    volume[2, 4, 20] = np.inf
    tifffile.imwrite(tmp_path / "volume.tif", volume, photometric="minisblack")
    assert train(tmp_path / "volume.tif", "--out", tmp_path / "run") == 0
    lines = read_metrics(tmp_path / "run" / files.METRICS)
    assert all(np.isfinite(line["loss"]) for line in lines[:-1])
    # The voxel that is infinite is in the part held out, and left out of the errors.
    assert "NaN or infinite voxels in the part held out: 1;" in capsys.readouterr().out
    assert lines[-1]["ssim_ours"] is None
    model, variables, extra = load(tmp_path / "run" / files.MODEL)
    made = Degradation((1, 2, 2), (0.0, matched_blur(2), matched_blur(2)))
    intensity = IntensityRange.from_dict(extra["intensity"])
    held_out = volume[:, :, 18:]
    low = np.nan_to_num(intensity.encode(made.reduce(held_out)))
    ours = np.asarray(model.apply(variables, jnp.asarray(low[None, ..., None])))
    known = np.isfinite(held_out)
    truth, ours = intensity.encode(held_out[known]), ours[0, ..., 0][known]
    np.testing.assert_allclose(lines[-1]["psnr_ours"], psnr(truth, ours), rtol=1e-5)
    volume[:, :, 18:] = np.nan
    tifffile.imwrite(tmp_path / "volume.tif", volume, photometric="minisblack")
    assert train(tmp_path / "volume.tif", "--out", tmp_path / "other") == 2
    assert "must have finite voxels" in capsys.readouterr().err


def test_a_point_spread_function_and_noise(tmp_path, volume_file, capsys):
    psf = np.zeros((5, 7, 7), np.float32)
    psf[2, 3, 3], psf[2, 3, 4] = 3, 1
    tifffile.imwrite(tmp_path / "psf.tif", psf)
    options = ["--psf", tmp_path / "psf.tif", "--photons", 50, "--noise", 0.02]
    assert train(volume_file, *options, "--out", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "psf.tif" in printed and "50 photons" in printed and "noise 0.02" in printed


class TestRefusals:
    """Each mistake: exit status 2, one message, and no run begun."""

    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(run, "train_epochs", None)  # nothing may come so far

    def refuse(self, capsys, *arguments):
        assert sr.main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--low", "x.tif", "--blur", "1"], "read .* or made"),
            (["--blur", "1", "--psf", "x.tif"], "--psf takes the place"),
            (["--blur", "1", "2"], "--blur must be one number or three"),
            (["--scale", "1", "2"], "--scale must be three whole numbers"),
            (["--scale", "17"], "from 1 to 16, or one for all; got 17"),
            (["--patch", "4", "4"], "--patch must be three"),
            (["--model", "unet3d", "--n-blocks", "2"], "--n-blocks is not an option"),
            (["--model", "rcan3d", "--hidden-channels", "4"], "reduction"),
            (["--holdout", "1.5"], "--holdout must be above 0"),
            (["--photons", "-3"], "--photons must be 0 or more"),
            (["--psf", "nothing.tif"], "nothing.tif"),
            (["--low", "nothing.tif"], "nothing.tif"),
            (["--axes", "ZYXX"], "axes"),
            (["--backend", "metal"], "Metal backend"),
        ],
    )
    def test_options(self, capsys, volume_file, options, told):
        error = self.refuse(capsys, volume_file, *options)
        assert re.search(told, error)

    def test_files(self, tmp_path, capsys):
        assert "nothing.tif" in self.refuse(capsys, "nothing.tif")
        (tmp_path / "text.tif").write_text("hello")
        assert "text.tif" in self.refuse(capsys, tmp_path / "text.tif")
        (tmp_path / "empty").mkdir()
        assert "empty" in self.refuse(capsys, tmp_path / "empty")
        colour = np.zeros((3, 16, 16, 3), np.uint8)
        tifffile.imwrite(tmp_path / "colour.tif", colour, photometric="rgb")
        assert "colour" in self.refuse(capsys, tmp_path / "colour.tif")
        tifffile.imwrite(
            tmp_path / "thin.tif", texture((2, 8, 3)), photometric="minisblack"
        )
        error = self.refuse(capsys, tmp_path / "thin.tif", "--scale", 1, 2, 2)
        assert "thin.tif" in error and "two cells" in error

    def test_options_without_a_volume(self, capsys):
        assert "need volumes" in self.refuse(capsys, "--low", "x.tif")


def test_the_embedded_volume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("--photons", 0, "--noise", 0, "--out", "bare") == 0
    printed = capsys.readouterr().out
    assert "photons" not in printed and "noise" not in printed
    assert train() == 0
    printed = capsys.readouterr().out
    assert "synthetic" in printed and "200 photons" in printed
    assert "python -m train.upscale runs/synthetic/model.safetensors" in printed
    (tmp_path / "runs/synthetic" / files.PICTURE).unlink()
    assert sr.main(["--resume"]) == 0
    assert (tmp_path / "runs/synthetic" / files.PICTURE).exists()
