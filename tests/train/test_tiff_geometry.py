"""Voxel sizes and origins of enlarged volumes, units, names of axes."""

import numpy as np
import pytest

from train.data.tiff import scaled_geometry
from train.data.tiff_axes import plane_order, resolve_axes
from train.data.tiff_geometry import convert_length, ome_unit


def centres(origin, size, count):
    return origin + size * np.arange(count)


@pytest.mark.parametrize("scale", [(1, 2, 2), (2, 2, 2), (4, 1, 3), (5, 7, 1)])
def test_small_voxels_fill_the_large_ones(scale):
    # Without the formula: s voxels lie in one, so the mean of their centres is its own.
    size, origin = (2.0, 0.5, 0.25), (-3.0, 10.0, 0.125)
    new_size, new_origin = scaled_geometry(size, origin, scale)
    for axis, s in enumerate(scale):
        fine = centres(new_origin[axis], new_size[axis], 6 * s).reshape(6, s)
        coarse = centres(origin[axis], size[axis], 6)
        np.testing.assert_allclose(fine.mean(1), coarse, rtol=1e-12)
        assert new_size[axis] * s == pytest.approx(size[axis])


def test_origin_moves_down_by_a_quarter_voxel_at_scale_two():
    assert scaled_geometry((2.0, 1.0, 1.0), (0.0, 0.0, 5.0), (1, 2, 2)) == (
        (2.0, 0.5, 0.5),
        (0.0, -0.25, 4.75),
    )


def test_shrinking_undoes_enlarging():
    size, origin = (2.0, 0.5, 0.25), (1.0, 2.0, 3.0)
    there = scaled_geometry(size, origin, (2, 4, 3))
    back = scaled_geometry(*there, (1 / 2, 1 / 4, 1 / 3))
    np.testing.assert_allclose(back, (size, origin), rtol=1e-12)


def test_unknown_geometry():
    assert scaled_geometry(None, None, (1, 2, 2)) == (None, None)
    # Without an origin, the result is where the first voxel lies against the input's.
    assert scaled_geometry((None, 1.0, 1.0), None, (2, 2, 1)) == (
        (None, 0.5, 1.0),
        (0.0, -0.25, 0.0),
    )
    assert scaled_geometry((1.0, 1.0, 1.0), None, (1, 1, 1))[1] is None


@pytest.mark.parametrize("scale", [(2, 2), (1, 0, 2), (1, -2, 2), (1, 2, float("nan"))])
def test_scales_that_are_none(scale):
    with pytest.raises(ValueError, match="three finite numbers above 0"):
        scaled_geometry((1.0, 1.0, 1.0), None, scale)


def test_units():
    for spelled in ("um", "micron", "µm", "\u03bcm", "Microns", " micrometer "):
        assert ome_unit(spelled) == "µm"
    assert ome_unit("inch") == "in"
    assert ome_unit(None) == ome_unit("pixels") == "pixel"
    assert ome_unit("furlong") == "reference frame"
    assert convert_length(250, "nm", "micron") == pytest.approx(0.25)
    assert convert_length(3, "furlong", "furlong") == 3
    assert convert_length(3, "furlong", "mile") is None
    assert convert_length(3, "pixel", "um") is None


@pytest.mark.parametrize(
    "file_axes, shape, given, names",
    [
        ("YX", (5, 6), None, "YX"),
        ("QYX", (4, 5, 6), None, "ZYX"),
        ("IYX", (4, 5, 6), "tyx", "TYX"),
        ("QZYX", (1, 4, 5, 6), None, "-ZYX"),
        ("QZYX", (1, 4, 5, 6), "ZYX", "-ZYX"),
        ("TCZYX", (2, 1, 4, 5, 6), None, "T-ZYX"),
        ("QYX", (4, 5, 6), "TCZYX", "ZYX"),
        ("SYX", (3, 5, 6), "ZYX", "ZYX"),
        ("QQYX", (2, 4, 5, 6), "CZYX", "CZYX"),
    ],
)
def test_axes_that_can_be_named(file_axes, shape, given, names):
    assert resolve_axes(file_axes, shape, given)[0] == names


@pytest.mark.parametrize(
    "file_axes, shape, given, message",
    [
        ("YXS", (5, 6, 3), None, "colour image"),
        ("YXS", (5, 6, 3), "ZYX", "colour image"),
        ("SYX", (3, 5, 6), None, "give --axes ZYX"),
        ("ZSYX", (4, 3, 5, 6), None, "give --axes ZCYX"),
        ("YXZ", (5, 6, 4), None, "must be the last two"),
        ("QQYX", (2, 4, 5, 6), None, "can't be told"),
        ("AZYX", (2, 4, 5, 6), None, "can't be told"),
        ("QZYX", (2, 4, 5, 6), None, "can't be told"),
        ("QYX", (4, 5, 6), "XYZ", "end with YX"),
        ("QYX", (4, 5, 6), "ZZYX", "once each"),
        ("QQYX", (2, 4, 5, 6), "ZYX", "a letter for each axis"),
    ],
)
def test_axes_that_can_not(file_axes, shape, given, message):
    with pytest.raises(ValueError, match=message):
        resolve_axes(file_axes, shape, given)


def test_planes_in_the_order_of_time_channel_slice():
    shape = (2, 4, 3, 5, 6)  # ImageJ: T, Z, C
    sizes, order = plane_order("TZCYX", shape)
    assert sizes == {"T": 2, "C": 3, "Z": 4}
    expected = np.arange(24).reshape(shape[:3]).swapaxes(1, 2)
    np.testing.assert_array_equal(order, expected.ravel())
