"""Where the channel axis is: what is found, what is asked, what is refused."""

import pytest

from train.data.axes import find_channel_axes, find_channel_axis


@pytest.mark.parametrize(
    "shapes, expected",
    [
        (((9, 16, 16), (9, 16, 16)), (None, None)),
        (((9, 64), (9, 64)), (None, None)),
        (((9, 8), (9, 8)), (None, None)),
        (((9, 8, 8), (9, 8, 8)), (None, None)),
        (((9, 20, 30), (9, 20, 30)), (None, None)),
        (((9, 17, 40, 30), (9, 17, 40, 30)), (None, None)),
        (((9, 1, 16, 16), (9, 16, 16)), (1, None)),
        (((9, 16, 16), (9, 16, 16, 1)), (None, -1)),
        (((9, 1, 16, 16), (9, 16, 16, 1)), (1, -1)),
        (((9, 1, 16, 16), (9, 1, 16, 16)), (1, 1)),
        (((9, 3, 16, 16), (9, 16, 16)), (1, None)),
        (((9, 16, 16, 3), (9, 16, 16)), (-1, None)),
        (((9, 3, 16, 16), (9, 2, 16, 16)), (1, 1)),
        (((9, 32, 2), (9, 32, 3)), (-1, -1)),
        (((9, 2, 32), (9, 32)), (1, None)),
        (((9, 3, 8, 8, 8), (9, 1, 8, 8, 8)), (1, 1)),
        (((9, 1, 8, 9, 10), (9, 8, 9, 10)), (1, None)),
    ],
)
def test_auto_finds_the_channel_axis(shapes, expected):
    assert find_channel_axes(*shapes) == expected


@pytest.mark.parametrize(
    "shapes",
    [
        ((9, 3, 64, 64), (9, 3, 64, 64)),  # three channels, or a flat box
        ((9, 64, 64, 10), (9, 64, 64, 10)),
        ((9, 12, 64), (9, 12, 64)),
    ],
)
def test_auto_asks_where_shapes_are_ambiguous(shapes):
    with pytest.raises(ValueError, match=r"is ambiguous: give .*as 1 .*None"):
        find_channel_axes(*shapes)
    assert find_channel_axes(*shapes, channel_axis=None) == (None, None)


def test_number_of_grid_axes_settles_what_is_ambiguous():
    shapes = (9, 3, 64, 64), (9, 3, 64, 64)
    assert find_channel_axes(*shapes, grid_ndim=2) == (1, 1)
    assert find_channel_axes(*shapes, grid_ndim=3) == (None, None)
    with pytest.raises(ValueError, match="on a grid of 1 axes cannot be found"):
        find_channel_axes(*shapes, grid_ndim=1)


@pytest.mark.parametrize(
    "shapes",
    [
        ((9, 16, 16, 16), (9, 16, 16)),  # 16 channels, first or last?
        ((9, 16, 16), (9, 17, 17)),
        ((9, 64, 64), (9, 10, 64)),
        ((9, 16), (9, 17, 16)),
        ((9, 1, 16, 1), (9, 16)),
        ((9, 1), (9, 1)),
    ],
)
def test_auto_refuses_to_guess(shapes):
    with pytest.raises(ValueError, match=r"cannot be found: give channel_axis .*as 1"):
        find_channel_axes(*shapes)


@pytest.mark.parametrize(
    "shapes, axis, expected",
    [
        (((9, 16, 16, 16), (9, 16, 16)), 1, (1, None)),
        (((9, 16, 16, 16), (9, 16, 16)), -1, (-1, None)),
        (((9, 16), (9, 17, 16)), 1, (None, 1)),
        (((9, 12, 64), (9, 12, 64)), 2, (-1, -1)),
        (((9, 6, 3, 7), (9, 6, 4, 7)), 2, (2, 2)),
        (((9, 6, 3, 7), (9, 6, 4, 7)), -2, (2, 2)),
    ],
)
def test_the_axis_that_is_given_is_taken(shapes, axis, expected):
    assert find_channel_axes(*shapes, channel_axis=axis) == expected


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (((9, 8, 8), (9, 8, 8)), {"channel_axis": 0}, "other than 0"),
        (((9, 8, 8), (9, 8, 8)), {"channel_axis": 3}, "channel_axis must be"),
        (((9, 8, 8), (9, 8, 8)), {"channel_axis": "last"}, "got 'last'"),
        (((9, 8, 8), (9, 8, 8)), {"channel_axis": True}, "got True"),
        (((9, 8), (9, 8)), {"channel_axis": 1}, "at least three axes"),
        (((9, 2, 8, 8), (9, 8)), {"channel_axis": 1}, "by that axis at most"),
        (((9, 2, 8), (9, 2, 9)), {"channel_axis": 1}, r"got \(8,\) and \(9,\) points"),
        (((9, 8), (9, 9)), {"channel_axis": None}, r"got \(8,\) and \(9,\) points"),
        (
            ((9, 2, 8), (9, 2, 8)),
            {"channel_axis": 1, "grid_ndim": 2},
            "the grid must have 2 axes, got 1",
        ),
    ],
)
def test_wrong_axes_are_refused(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        find_channel_axes(*shapes, **options)


@pytest.mark.parametrize(
    "shape, options, expected",
    [
        ((9, 16, 16), {}, None),
        ((9, 1, 16, 16), {}, 1),
        ((9, 16, 16, 1), {}, -1),
        ((9, 3, 64, 64), {"grid_ndim": 2}, 1),
        ((9, 3, 64, 64), {"num_channels": 1}, None),
        ((9, 3, 64, 64), {"num_channels": 3}, 1),
        ((9, 64, 64, 3), {"num_channels": 3}, -1),
        ((9, 20, 16, 16), {"num_channels": 20, "grid_ndim": 2}, 1),
        ((9, 3, 64, 64), {"channel_axis": 2}, 2),
    ],
)
def test_channel_axis_of_inputs_alone(shape, options, expected):
    assert find_channel_axis(shape, **options) == expected


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ((9, 3, 64, 64), {}, "ambiguous"),
        ((9, 16, 16, 16), {"num_channels": 16}, "ambiguous"),
        ((9, 64, 64), {"num_channels": 2}, "cannot be found"),
        ((9, 64, 64), {"grid_ndim": 3}, "cannot be found"),
    ],
)
def test_inputs_alone_that_cannot_be_told(shape, options, message):
    with pytest.raises(ValueError, match=message):
        find_channel_axis(shape, **options)
