"""Which volumes belong together, their parts in files, and the part held out."""

import itertools

import numpy as np
import pytest
import tifffile

from train.data.degrade import Degradation
from train.data.patches import (
    PatchSet,
    VolumePart,
    low_region,
    pair_up,
    split,
    volume_parts,
)
from train.data.tiff import open_volume
from train.normalise import IntensityRange


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_parts_of_tiff_volumes(compression, tmp_path):
    stack = np.arange(2 * 3 * 5 * 16 * 18, dtype=np.uint16).reshape(2, 5, 3, 16, 18)
    tifffile.imwrite(
        tmp_path / "a.tif",
        stack,
        imagej=True,
        metadata={"axes": "TZCYX"},
        compression=compression,
    )
    volume = open_volume(tmp_path / "a.tif")
    region = (slice(1, 5), slice(0, 16), slice(4, 18))
    parts = volume_parts(volume, region)
    assert len(parts) == 6
    kind = np.ndarray if compression else VolumePart
    for part, (t, c) in zip(parts, itertools.product(range(2), range(3)), strict=True):
        assert isinstance(part, kind)
        assert part.shape == (4, 16, 14) and part.dtype == np.uint16
        expected = stack[t, 1:5, c, :, 4:18]
        np.testing.assert_array_equal(part[:, :, :], expected)
        np.testing.assert_array_equal(part[1:3, 2:99, -5:-1], expected[1:3, 2:, -5:-1])
        assert part[3:3, :, :].size == 0
    whole = volume_parts(volume)
    assert whole[0].shape == (5, 16, 18)
    patches = PatchSet(
        list(zip(parts, parts, strict=True)),
        scale=(1, 1, 1),
        patch=(2, 4, 4),
        intensity=IntensityRange(0.0, 1.0),
    )
    lows, highs = patches.draw(0, 0, 0, 20)
    np.testing.assert_array_equal(lows, highs)


@pytest.mark.parametrize("axis", ["z", "y", "x"])
@pytest.mark.parametrize("scale", [(1, 2, 2), (4, 3, 1)])
@pytest.mark.parametrize("holdout", [0.01, 0.25, 0.5, 0.99])
def test_split_shares_no_voxel(axis, scale, holdout):
    shape = (17, 30, 41)
    train, test = split(shape, scale, holdout, axis)
    used = np.zeros(shape, int)
    used[train] += 1
    used[test] += 2
    sizes = tuple(n // s * s for n, s in zip(shape, scale, strict=True))
    assert set(np.unique(used[tuple(map(slice, sizes))])) == {1, 2}
    assert (used > 0).sum() == np.prod(sizes)
    number = "zyx".index(axis)
    cells, step = shape[number] // scale[number], scale[number]
    width = test[number].stop - test[number].start
    assert width / step == min(max(round(holdout * cells), 1), cells - 1)
    assert train[number].start == 0 and test[number].stop == sizes[number]
    # Each part reduced alone is that part of the cells of the whole.
    x = np.random.default_rng(0).random(shape)
    whole = Degradation(scale).reduce(x)
    for region in (train, test):
        part = Degradation(scale).reduce(x[region])
        np.testing.assert_allclose(part, whole[low_region(region, scale)], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4, 3), (1, 2, 2)), "must have two cells"),
        (((4, 1, 8), (1, 2, 2)), "must have two cells"),
        (((4, 8, 8), (1, 2, 2), 1.0), "holdout must be between 0 and 1"),
        (((4, 8, 8), (1, 2, 2), 0.5, "c"), "axis must be 'z', 'y' or 'x', got 'c'"),
    ],
)
def test_what_can_not_be_split(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(*arguments)


def written(folder, shapes):
    folder.mkdir(exist_ok=True)
    volumes = []
    for name, shape in shapes.items():
        tifffile.imwrite(
            folder / name,
            np.ones(shape, np.uint16),
            photometric="minisblack",
            metadata={"axes": "CZYX"[-len(shape) :]},
            ome=len(shape) == 4,
        )
        volumes.append(open_volume(folder / name))
    return volumes


def test_pairs_by_name(tmp_path):
    low = written(tmp_path / "low", {f"{n}.tif": (4, 8, n) for n in (9, 10, 11)})
    high = written(
        tmp_path / "high", {f"{n}.tiff": (4, 16, 3 * n) for n in (11, 9, 10)}
    )
    pairs, scale = pair_up(low, high)
    assert scale == (1, 2, 3)
    names = [(a.name, b.name) for a, b in pairs]
    assert names == [(f"{n}.tif", f"{n}.tiff") for n in (9, 10, 11)]


def test_pairs_in_the_order_given(tmp_path):
    low = written(tmp_path, {f"z{n}_low.tif": (4, 8, n) for n in (10, 9)})
    high = written(tmp_path, {f"{n}_high.tif": (8, 8, n) for n in (10, 9)})
    pairs, scale = pair_up(low, high)
    assert scale == (2, 1, 1)
    assert [a.name for a, _ in pairs] == ["z10_low.tif", "z9_low.tif"]


def test_one_pair_needs_no_names(tmp_path):
    (low,) = written(tmp_path, {"a.ome.tif": (2, 4, 8, 8)})
    (high,) = written(tmp_path, {"b.ome.tif": (2, 4, 16, 24)})
    assert pair_up([low], [high]) == ([(low, high)], (1, 2, 3))


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ({"a.tif": (4, 8, 8)}, {}, r"got 1 and 0: a\.tif; none"),
        ({}, {}, "got 0 and 0: none; none"),
        (
            {"a.tif": (4, 8, 8)},
            {"b.tif": (4, 17, 16)},
            r"17, 16\) in b.tif and .* a.tif",
        ),
        (
            {"a.tif": (4, 8, 8)},
            {"b.tif": (4, 4, 4)},
            r"4, 4\) in b.tif and .* in a.tif",
        ),
        (
            {"a.ome.tif": (2, 4, 8, 8)},
            {"b.ome.tif": (3, 4, 8, 8)},
            r"CZYX \(3, 4, 8, 8\) in b.ome.tif and CZYX .* in a.ome.tif",
        ),
        (
            {"a.tif": (4, 8, 8), "b.tif": (4, 8, 8)},
            {"a.tif": (4, 8, 8), "c.tif": (4, 8, 8)},
            "names of low- and high-resolution volumes must be equal for all",
        ),
        (
            {"a.tif": (4, 8, 8), "b.tif": (4, 8, 8)},
            {"a.tif": (4, 8, 8), "b.tif": (4, 16, 16)},
            r"one scale, got \(1, 1, 1\) for a.tif and a.tif, and \(1, 2, 2\) for b",
        ),
    ],
)
def test_what_can_not_be_paired(low, high, message, tmp_path):
    sides = written(tmp_path / "low", low), written(tmp_path / "high", high)
    with pytest.raises(ValueError, match=message):
        pair_up(*sides)
