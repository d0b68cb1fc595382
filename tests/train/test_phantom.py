"""The synthetic volume: the same everywhere, with something to see in every part."""

import numpy as np
import pytest
import scipy.ndimage

from train.data.degrade import Degradation
from train.data.patches import PatchSet
from train.data.phantom import phantom
from train.normalise import IntensityRange


@pytest.fixture(scope="module")
def default():
    return phantom()


def test_one_seed_gives_one_volume():
    """Numbers of numpy 2.4.6 and 2.5.5, which agreed in all bits."""
    volume = phantom((12, 40, 40), 3)
    assert volume.dtype == np.float32
    np.testing.assert_array_equal(phantom((12, 40, 40), 3), volume)
    assert volume.mean(dtype=np.float64) == pytest.approx(0.046939125, rel=1e-5)
    assert volume.std(dtype=np.float64) == pytest.approx(0.121949169, rel=1e-5)
    assert np.mean(phantom((12, 40, 40), 4) != volume) > 0.1


def test_bright_on_dark(default):
    assert default.shape == (48, 192, 192)
    assert default.min() == np.float32(0.02) and 1 < default.max() < 1.5
    assert 0.03 < np.mean(default > 0.1) < 0.2
    fitted = IntensityRange.fit([default])
    assert fitted.low == pytest.approx(0.02) and 0.7 < fitted.high < 1.1


def test_there_is_something_everywhere(default):
    """Also in what is held out at the end of an axis, and in most of the patches."""
    for axis in range(3):
        for part in np.array_split(default, 4, axis):
            assert np.mean(part > 0.1) > 0.02
    low = Degradation((1, 2, 2), (0.0, 1.0, 1.0)).reduce(default)
    patches = PatchSet(
        [(low, default)],
        scale=(1, 2, 2),
        patch=(16, 32, 32),
        intensity=IntensityRange.fit([low]),
    )
    assert patches.num_empty < 0.2 * patches.num_blocks


def test_there_is_detail_that_a_blur_takes_away(default):
    blurred = scipy.ndimage.gaussian_filter(default, 1.0)
    assert np.std(default - blurred) > 0.3 * np.std(default)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 16, 16), (3, 5, 90), (40, 2, 2)])
def test_small_and_thin_volumes(shape):
    volume = phantom(shape)
    assert volume.shape == shape and np.isfinite(volume).all() and volume.max() > 0.1


@pytest.mark.parametrize("shape", [(8, 8), (0, 8, 8)])
def test_mistakes(shape):
    with pytest.raises(
        ValueError, match=r"a phantom needs a shape \(z, y, x\) above 0"
    ):
        phantom(shape)
