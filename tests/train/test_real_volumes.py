"""Published volumes: what is read of them, and a short training that gains on cubic."""

import numpy as np
import pytest
import tifffile
from realvolumes import volume_file

from train import folder as files
from train import sr
from train.data.degrade import read_psf
from train.data.tiff import open_volume
from train.report import read_metrics


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("nuclei", (60, 256, 256)),
        ("snow", (100, 100, 100)),
        ("lightsheet", (88, 320, 256)),
    ],
)
def test_volumes_are_read_whole(name, shape):
    volume = open_volume(volume_file(name))
    assert (volume.axes, volume.shape, volume.dtype) == ("ZYX", shape, np.uint16)
    np.testing.assert_array_equal(volume.read(), tifffile.imread(volume_file(name)))


def test_a_measured_point_spread_function():
    psf = read_psf(volume_file("psf"))
    assert psf.shape < (61, 128, 128)
    np.testing.assert_allclose(psf.sum(), 1, rtol=1e-5)
    assert np.unravel_index(psf.argmax(), psf.shape) == tuple(n // 2 for n in psf.shape)


def test_nuclei_gain_on_cubic_interpolation(tmp_path, quick_compilation):
    """A tiny network and a short training; ten minutes of a larger one give 2.4 dB."""
    out = tmp_path / "run"
    options = "--backend cpu --scale 1 2 2 --holdout 0.5 --epochs 1 --steps 100"
    options += " --hidden-channels 8 --n-blocks 2 --patch 8 24 24 --learning-rate 5e-3"
    arguments = [str(volume_file("nuclei")), "--out", str(out), *options.split()]
    assert sr.main(arguments) == 0
    line = read_metrics(out / files.METRICS)[-1]
    assert line["shape"] == [60, 256, 128]
    assert line["psnr_ours"] > line["psnr_cubic"] + 0.4
