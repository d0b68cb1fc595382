"""Tiles fill a volume, have their halo, and give what the whole volume gives."""

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import EDSR3D, MDCSRN, RCAN3D, DepthAttentionSR, UNet3D
from train.tile_network import Statistics, TileNetwork, run_tiled
from train.tile_plan import choose_tiling, halved
from train.tiles import Tiling, keeps_depth, spans, window_sizes

EDSR = {"hidden_channels": 5, "n_blocks": 1}
UNET = {"hidden_channels": 3, "n_levels": 1}
# Interpolation is a product with a matrix of the axis' size, rounded as that is summed.
BARE = {**UNET, "input_skip": None}


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 150), st.integers(0, 9), st.integers(1, 4))
def test_cores_fill_an_axis_with_their_halo_around_them(size, radius, stride):
    counts = []
    for window in window_sizes(size, radius, stride):
        found = spans(size, window, radius, stride)
        counts.append(len(found))
        edges = [span.start for span in found] + [size]
        assert edges == [0] + [span.stop for span in found]
        for first, start, stop in found:
            assert 0 <= first <= start < stop <= first + window <= size
            assert first % stride == 0
            assert first == 0 or start - first >= radius
            assert first + window == size or first + window - stop >= radius
            assert start % stride == 0
            assert stop == size or stop % stride == 0
    assert counts == sorted(set(counts))
    assert counts[0] == 1


def test_a_window_that_is_too_short_or_ends_beside_the_end_is_refused():
    with pytest.raises(ValueError, match=r"at least 9 long.*window=8, size=20"):
        spans(20, 8, 4, 1)
    with pytest.raises(ValueError, match="shorter than its axis by a multiple"):
        spans(20, 15, 2, 2)


def test_halving_goes_on_to_the_smallest_window_and_ends():
    tiling = Tiling((30, 64, 50), (30, 64, 50), (3, 3, 3), (1, 2, 2))
    volumes = []
    while tiling is not None:
        volumes.append(np.prod(tiling.window))
        smallest, tiling = tiling.window, halved(tiling)
    assert (np.diff(volumes) < 0).all()
    pairs = zip(volumes[:-1], volumes[1:], strict=True)
    assert all(after <= max(before / 2, volumes[-1]) for before, after in pairs)
    sizes = zip((30, 64, 50), (3, 3, 3), (1, 2, 2), strict=True)
    assert smallest == tuple(window_sizes(*axis)[-1] for axis in sizes)


def test_the_depth_is_cut_only_where_no_window_with_all_of_it_fits():
    size, radius, stride = (20, 90, 40), (5, 5, 5), (1, 1, 1)
    assert keeps_depth(size[0], radius[0]) and not keeps_depth(21, 5)

    def chosen(limit, size=size):
        share = functools.partial(_part_of, limit)
        return choose_tiling(size, radius, stride, share, share)

    smallest = chosen(20 * 11 * 11)
    assert smallest.window == (20, 11, 11)
    cut = chosen(20 * 11 * 11 - 1)
    assert cut.window[0] < 20 and np.prod(cut.window) < 20 * 11 * 11
    assert halved(smallest).window[0] < 20
    while cut is not None:
        assert cut.window[0] < 20
        cut = halved(cut)
    assert chosen(11**3).window == (11, 11, 11)
    assert chosen(11**3 - 1) is None


def _part_of(limit, window):
    return np.prod(window) / limit


def network_of(cls, arguments):
    """With random variables, all different; made without compiling anything."""
    model, rng = cls(**arguments), np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros(model.example_shape()))
    )

    def drawn(leaf):
        if len(leaf.shape) == 1:  # biases, scales and variances
            return jnp.asarray(rng.uniform(0.2, 0.4, leaf.shape), leaf.dtype)
        spread = np.prod(leaf.shape[:-1]) ** -0.5
        return jnp.asarray(spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return TileNetwork(model, jax.tree.map(drawn, shapes))


def volume(size):
    return np.random.default_rng(1).random(size, np.float32)


def largest_difference(network, size, window):
    """Between tiles and the whole, against the range; and the programs compiled."""
    tiling = network.tiling(size, window)
    x = volume(size)
    whole = network(x)
    scale = network.model.scale
    assert whole.shape == tuple(n * s for n, s in zip(size, scale, strict=True))
    network._programs.clear()
    tiles = run_tiled(network, tiling, x)
    return np.abs(tiles - whole).max() / np.ptp(whole), len(network._programs)


@pytest.mark.parametrize(
    ("cls", "arguments", "size", "window"),
    [
        (EDSR3D, {**EDSR, "scale": (1, 2, 2)}, (9, 31, 33), (9, 17, 14)),
        (EDSR3D, {**EDSR, "scale": (2, 2, 2)}, (17, 16, 16), (14, 16, 16)),
        (EDSR3D, {**EDSR, "scale": (4, 1, 1)}, (27, 21, 5), (16, 15, 5)),
        (EDSR3D, {**EDSR, "residual_scaling": 0.3}, (1, 37, 35), (1, 17, 16)),
        (UNet3D, {**BARE, "scale": (1, 2, 2)}, (5, 29, 27), (5, 23, 27)),
        (UNet3D, {**BARE, "scale": (2, 2, 2)}, (24, 16, 16), (22, 16, 16)),
        (UNet3D, {**BARE, "scale": (4, 1, 1)}, (1, 44, 23), (1, 22, 23)),
        (UNet3D, {**UNET, "input_skip": "cubic", "scale": 2}, (9, 27, 16), (9, 23, 16)),
        (UNet3D, {**UNET, "pool": (1, 2, 3)}, (21, 25, 34), (13, 23, 31)),
    ],
)
def test_tiles_equal_the_whole_exactly(cls, arguments, size, window):
    network = network_of(cls, arguments)
    assert network.tiling(size, window).count > 1
    assert largest_difference(network, size, window) == (0, 1)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (MDCSRN, {"n_blocks": 2, "n_units": 2, "growth": 3, "scale": (1, 2, 2)}),
        (DepthAttentionSR, {"hidden_channels": 8, "n_blocks": 1, "depth_window": 2}),
        (UNet3D, {**UNET, "conv": "separable", "scale": (2, 2, 2)}),
        (EDSR3D, {**EDSR, "conv": "2plus1d", "upsampler": "linear"}),
    ],
)
def test_tiles_of_other_networks_equal_the_whole_up_to_rounding(cls, arguments):
    network = network_of(cls, arguments)
    size = (6, 29, 26)
    window = halved(network.tiling(size, size)).window
    difference, num_programs = largest_difference(network, size, window)
    assert difference <= 1e-6
    assert num_programs == 1


@functools.cache
def attentive():
    """A network with three statistic layers, a volume, and its tiles."""
    sizes = {"hidden_channels": 4, "reduction": 2, "n_groups": 1, "n_blocks": 3}
    network = network_of(RCAN3D, sizes)
    tiling = network.tiling((2, 40, 3), (2, 31, 3))
    assert tiling.count == 2
    x = volume(tiling.size) * np.linspace(0, 3, 40, dtype=np.float32)[:, None]
    return network, x, tiling


def test_statistics_of_the_whole_volume_make_attention_exact():
    network, x, tiling = attentive()
    whole = network(x)
    tile = tiling.tiles[0]
    alone = network(x[tile.read])[tile.kept((1, 1, 1))]
    assert np.abs(alone - whole[tile.place((1, 1, 1))]).max() > 1e-4 * np.ptp(whole)
    assert np.abs(run_tiled(network, tiling, x) - whole).max() < 1e-5 * np.ptp(whole)


def test_collecting_goes_on_from_what_was_saved():
    """Plain lists in between, as a file has them; the very same numbers at the end."""
    network, x, tiling = attentive()

    def read(tile):
        return x[tile.read]

    straight = Statistics()
    num_steps = sum(1 for _ in straight.collect(network, tiling, read))
    assert 1 < straight.passes <= network.model.statistic_layers == 3
    assert num_steps == straight.passes * tiling.count
    state = Statistics()
    while not state.is_settled:
        next(state.collect(network, tiling, read))
        state = Statistics(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert state == straight


def test_a_pass_that_changes_nothing_is_the_last():
    """Where attention is constant, the second pass finds the means of the first."""
    network, x, tiling = attentive()
    flat = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * float("attention" not in str(path)),
        network.variables,
    )
    statistics, other = Statistics(), copy.copy(network)  # with the programs
    other.variables = flat
    for _ in statistics.collect(other, tiling, lambda tile: x[tile.read]):
        pass
    assert statistics.passes == 2


@pytest.mark.parametrize(
    ("cls", "arguments", "size", "window"),
    [
        (EDSR3D, {"hidden_channels": 10, "n_blocks": 1}, (9, 31, 17), (9, 20, 17)),
        (UNet3D, {**BARE, "scale": (1, 2, 2)}, (12, 29, 27), (12, 23, 27)),
    ],
)
def test_tiles_as_deep_as_the_volume_equal_what_the_model_gives(
    cls, arguments, size, window
):
    """In its fastest form, Winograd's, whose groups of slices are the same in both."""
    local = network_of(cls, arguments)
    network = TileNetwork(local.model.clone(form="auto"), local.variables, size[0])
    tiling = network.tiling(size, window)
    assert tiling.count > 1 and halved(tiling).window[0] == size[0]
    x = volume(size)
    program = jax.jit(network.model.clone(form="auto").apply)
    whole = np.asarray(program(network.variables, x[None, ..., None]))[0, ..., 0]
    np.testing.assert_array_equal(run_tiled(network, tiling, x), whole)
    assert (whole != local(x)).any()


def test_tiles_that_cut_the_depth_equal_the_whole_in_a_local_form():
    local = network_of(EDSR3D, {"hidden_channels": 10, "n_blocks": 1})
    size, window = (20, 12, 24), (14, 12, 24)
    network = TileNetwork(local.model, local.variables, size[0])
    tiling, x = network.tiling(size, window), volume(size)
    assert keeps_depth(size[0], tiling.radius[0]) and tiling.count > 1
    np.testing.assert_array_equal(run_tiled(network, tiling, x), local(x))
    assert (network(x) != local(x)).any()
