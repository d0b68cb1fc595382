"""Patches of volumes whose voxels tell where they come from."""

import itertools

import numpy as np
import pytest

from train.data.degrade import Degradation
from train.data.patches import PatchSet
from train.normalise import IntensityRange

UNIT = IntensityRange(0.0, 1.0)


def nearest(low, scale):
    for axis, factor in enumerate(scale):
        low = np.repeat(low, factor, axis)
    return low


def numbered(shape, dtype=np.float32):
    """Voxels 1, 2, 3, ..: each value stands for one place."""
    return np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype)


def patch_set(pairs, scale=(1, 2, 2), patch=(2, 4, 4), **options):
    options = {"intensity": UNIT, "keep_empty": 0.0, "threshold": 0.5} | options
    return PatchSet(pairs, scale=scale, patch=patch, **options)


def views(patch):
    """The 16 flips and turns of (d, h, w): 2 of the depth, 8 of the plane."""
    for flips in itertools.product((1, -1), repeat=3):
        flipped = patch[tuple(slice(None, None, step) for step in flips)]
        yield flipped
        yield flipped.swapaxes(1, 2)


def origin(patch, shape):
    return np.unravel_index(int(patch.min()) - 1, shape)


@pytest.mark.parametrize("scale", [(1, 2, 2), (2, 2, 2), (4, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize("patch", [(2, 4, 4), (3, 4, 6), (1, 5, 5)])
def test_low_and_high_are_flipped_and_turned_together(scale, patch):
    low = numbered((7, 9, 11))
    patches = patch_set([(low, nearest(low, scale))], scale, patch)
    seen = set()
    for batch in range(12):
        lows, highs = patches.draw(0, 1, batch, 8)
        assert lows.shape == (8, *patch, 1) and lows.dtype == np.float32
        size = tuple(p * s for p, s in zip(patch, scale, strict=True))
        assert highs.shape == (8, *size, 1) and highs.dtype == np.float32
        for one, other in zip(lows[..., 0], highs[..., 0], strict=True):
            np.testing.assert_array_equal(other, nearest(one, scale))
            z, y, x = origin(one, low.shape)
            source = low[z : z + patch[0], y : y + patch[1], x : x + patch[2]]
            kinds = [
                i
                for i, view in enumerate(views(source))
                if view.shape == one.shape and np.array_equal(view, one)
            ]
            assert kinds
            seen.update(kinds[:1])
    turns = scale[1] == scale[2] and patch[1] == patch[2]
    assert len(seen) == (16 if turns else 8) // (2 if patch[0] == 1 else 1)


def test_without_augmentation_patches_stay_as_they_are():
    low = numbered((7, 9, 11))
    lows, _ = patch_set([(low, nearest(low, (1, 2, 2)))], augment=False).draw(
        0, 0, 0, 9
    )
    for one in lows[..., 0]:
        z, y, x = origin(one, low.shape)
        np.testing.assert_array_equal(one, low[z : z + 2, y : y + 4, x : x + 4])


def test_every_voxel_is_drawn():
    low = numbered((5, 9, 11))
    lows, _ = patch_set([(low, nearest(low, (1, 2, 2)))]).draw(0, 0, 0, 2000)
    assert set(np.unique(lows)) == set(low.ravel())


def test_a_draw_depends_on_seed_epoch_and_batch_alone():
    low = numbered((7, 20, 20)) / 2800
    pairs = [(low, nearest(low, (1, 2, 2)))]
    noise = Degradation((1, 2, 2), poisson=20.0, gaussian=0.1)
    first, second = (patch_set(pairs, degradation=noise) for _ in range(2))
    expected = second.draw(3, 2, 5, 4)
    for other in ((4, 2, 5), (3, 1, 5), (3, 2, 4)):  # neither the order of the draws
        assert (first.draw(*other, 4)[1] != expected[1]).any()
    for got, wanted in zip(first.draw(3, 2, 5, 4), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_noise_is_fresh_and_in_low_alone():
    low = np.full((4, 8, 8), 0.5, np.float32)
    noise = Degradation((1, 2, 2), gaussian=0.1)
    patches = patch_set(
        [(low, nearest(low, (1, 2, 2)))], degradation=noise, threshold=0.1
    )
    lows, highs = patches.draw(0, 0, 0, 200)
    np.testing.assert_array_equal(highs, 0.5)
    assert lows.std() == pytest.approx(0.1, rel=0.05)
    assert len(np.unique(lows)) > 0.9 * lows.size


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2", np.int16, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_dtypes_and_encoding(dtype, order):
    low = np.asarray(numbered((3, 8, 8)) + 20, dtype, order=order)
    high = np.asarray(nearest(low, (1, 2, 2)), np.float32)
    patches = patch_set([(low, high)], intensity=IntensityRange(100.0, 130.0))
    lows, highs = patches.draw(0, 0, 0, 6)
    # In float64, before it is rounded to float32.
    allowed = ((low.astype(np.float64) - 100) / 30).astype(np.float32)
    assert np.isin(lows, allowed).all() and np.isin(highs, allowed).all()


def sparse(shape=(12, 80, 80), scale=(1, 2, 2)):
    low = np.zeros(shape, np.float32)
    low[4:7, 30:36, 3:9] = 1
    low[11, 0, 79] = 1  # a hot pixel
    return low, nearest(low, scale)


def test_empty_patches_are_left_out():
    patches = patch_set([sparse()], patch=(8, 16, 16))
    _, highs = patches.draw(0, 0, 0, 100)
    # All of a block that is seen: 0.5 % of an eighth of the patch, at least.
    assert (highs.mean(axis=(1, 2, 3, 4)) > 0.005 / 8).all()
    assert highs.mean() > 0.02
    assert 0.9 * patches.num_blocks < patches.num_empty < patches.num_blocks
    assert str(patches) == (
        "1 volume, patches of 8x16x16 to 8x32x32 voxels, out of 300 blocks, "
        f"{patches.num_empty} of them empty"
    )


def test_a_part_of_the_empty_ones_is_kept():
    patches = patch_set([sparse()], patch=(8, 16, 16), keep_empty=0.3)
    _, highs = patches.draw(0, 0, 0, 1000)
    is_empty = highs.max(axis=(1, 2, 3, 4)) == 0
    assert is_empty.mean() == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1.0])
def test_volumes_that_are_all_one_are_drawn_from(value):
    low = np.full((4, 8, 8), value, np.float32)
    patches = patch_set([(low, nearest(low, (1, 2, 2)))])
    lows, highs = patches.draw(0, 0, 0, 5)
    np.testing.assert_array_equal(lows, 1.0 if value == 1 else 0.0)
    np.testing.assert_array_equal(highs, 1.0 if value == 1 else 0.0)
    assert ("all of them empty" in str(patches)) == (value != 1)


def test_nan_is_encoded_as_zero_and_makes_a_block_empty():
    low = np.ones((4, 8, 40), np.float32)
    low[:, :, :24] = np.nan
    low[0, 0, 30] = np.inf
    patches = patch_set([(low, nearest(low, (1, 2, 2)))], patch=(4, 8, 8))
    lows, highs = patches.draw(0, 0, 0, 200)
    assert set(np.unique(lows)) == set(np.unique(highs)) == {0.0, 1.0}
    # The blocks of 24 NaN columns are 6 of 10; the others may be drawn with neighbours.
    assert patches.num_empty == 0.6 * patches.num_blocks
    assert (lows.mean(axis=(1, 2, 3, 4)) >= 0.4).all()


@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (5, 16, 16), (1, 1, 1), (3, 7, 40), (20, 33, 35)]
)
def test_volumes_thinner_than_the_patch(shape):
    low = numbered(shape)
    patches = patch_set([(low, nearest(low, (2, 2, 2)))], (2, 2, 2), (8, 32, 32))
    size = tuple(map(min, shape, (8, 32, 32)))
    assert patches.patch == size
    lows, highs = patches.draw(0, 0, 0, 3)
    assert lows.shape == (3, *size, 1)
    np.testing.assert_array_equal(highs[1, ..., 0], nearest(lows[1, ..., 0], (2, 2, 2)))


def test_a_rest_of_less_than_a_cell_is_left_out():
    low = numbered((3, 8, 8))
    high = np.pad(nearest(low, (1, 2, 3)), ((0, 0), (0, 1), (0, 2)))
    patches = patch_set([(low, high)], (1, 2, 3))
    lows, highs = patches.draw(0, 0, 0, 100)
    np.testing.assert_array_equal(highs[7, ..., 0], nearest(lows[7, ..., 0], (1, 2, 3)))
    assert highs.min() == 1


def test_several_volumes_of_several_sizes_and_dtypes():
    first, second = numbered((3, 8, 8), np.uint16), numbered((6, 5, 30)) + 1000
    pairs = [(v, nearest(v, (1, 2, 2))) for v in (first, second)]
    patches = patch_set(pairs, patch=(4, 8, 8))
    assert patches.patch == (3, 5, 8)
    lows, highs = patches.draw(0, 0, 0, 400)
    is_second = lows.min(axis=(1, 2, 3, 4)) > 1000
    assert ((lows.max(axis=(1, 2, 3, 4)) > 1000) == is_second).all()
    # As often as a volume has blocks: 2 x 4 x 2, and 6 x 3 x 8, cut at half a patch.
    assert patches.num_blocks == 3 * 4 * 2 + 6 * 3 * 8
    assert is_second.mean() == pytest.approx(144 / 168, abs=0.07)
    assert str(patches).startswith("2 volumes, patches of 3x5x8 to 3x10x16 voxels")


def test_each_pair_has_its_ranges():
    low = numbered((3, 8, 8))
    pairs = [(low, 10 * nearest(low, (1, 2, 2))), (low + 500, nearest(low, (1, 2, 2)))]
    ranges = [
        (IntensityRange(0, 192), IntensityRange(0, 1920)),
        (IntensityRange(500, 692), IntensityRange(0, 192)),
    ]
    patches = patch_set(pairs, intensity=ranges, threshold=0.9)
    lows, highs = patches.draw(0, 0, 0, 50)
    # Both are encoded alike, and seen alike: where they are above 0.9.
    assert lows.max() == 1 and (highs.max(axis=(1, 2, 3, 4)) > 0.9).all()
    for one, other in zip(lows[..., 0], highs[..., 0], strict=True):
        np.testing.assert_allclose(other, nearest(one, (1, 2, 2)), rtol=1e-6)
    with pytest.raises(ValueError, match="two for each pair .* got 1 for 2 pairs"):
        patch_set(pairs, intensity=ranges[:1])


class Watched:
    """A volume that notes the largest part that is read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.largest = self.total = 0

    def __getitem__(self, box):
        part = self.array[box]
        self.largest = max(self.largest, part.size)
        self.total += part.size
        return part


def test_volumes_are_read_part_by_part(tmp_path):
    low = np.memmap(tmp_path / "low", np.uint8, "w+", shape=(40, 128, 128))
    high = np.memmap(tmp_path / "high", np.uint8, "w+", shape=(40, 256, 256))
    high[:, 100:180, 30:90] = 200
    low, high = Watched(low), Watched(high)
    intensity = IntensityRange(0, 200)
    patches = patch_set([(low, high)], patch=(8, 16, 16), intensity=intensity)
    assert (low.total, high.total) == (0, high.array.size)  # one pass over the truth
    assert high.largest <= 4 * 16 * 256  # a strip of blocks
    low.total = high.total = 0
    patches.draw(0, 0, 0, 5)
    assert (low.total, high.total) == (5 * 8 * 16 * 16, 5 * 8 * 32 * 32)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([], {}, "at least one pair"),
        ([((4, 8, 8), (4, 16, 17))], {}, None),
        ([((4, 8, 8), (4, 16, 18))], {}, "times as large as low"),
        ([((4, 8, 8), (4, 8, 8))], {}, "times as large as low"),
        ([((8, 8), (16, 16))], {}, r"must be \(z, y, x\)"),
        ([((0, 8, 8), (0, 16, 16))], {}, "not empty"),
        ([((4, 8, 8), (4, 16, 16))], {"scale": (1, 2)}, "scale must be three whole"),
        ([((4, 8, 8), (4, 16, 16))], {"patch": (0, 2, 2)}, "patch must be three whole"),
        ([((4, 8, 8), (4, 16, 16))], {"keep_empty": 2}, "keep_empty must be"),
    ],
)
def test_mistakes(pairs, options, message):
    pairs = [tuple(map(np.ones, pair)) for pair in pairs]
    if message is None:
        assert patch_set(pairs, **options).patch == (2, 4, 4)
        return
    with pytest.raises(ValueError, match=message):
        patch_set(pairs, **options)


def test_volumes_are_real_numbers():
    x = np.ones((4, 8, 8), complex)
    with pytest.raises(ValueError, match="real numbers, got complex128"):
        patch_set([(x, x)], (1, 1, 1))
