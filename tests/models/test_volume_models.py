"""What the volume models promise beside parity with PyTorch."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_text import convolutions, faults
from run_once import run_once

import models
from jaxops.factorise import factorise
from models import EDSR3D, MDCSRN, RCAN3D, DepthAttentionSR, UNet3D
from models.volume_blocks import Conv, Kind, Upsampler

CLASSES = (RCAN3D, EDSR3D, UNet3D, MDCSRN, DepthAttentionSR)
SMALL = {
    RCAN3D: {"hidden_channels": 4, "n_groups": 1, "n_blocks": 2, "reduction": 2},
    EDSR3D: {"hidden_channels": 4, "n_blocks": 1},
    UNet3D: {"hidden_channels": 2, "n_levels": 1},
    MDCSRN: {"n_blocks": 2, "n_units": 1, "growth": 2},
    DepthAttentionSR: {
        "hidden_channels": 4,
        "n_blocks": 1,
        "n_heads": 2,
        "depth_window": 2,
    },
}
# The generator that compiles fast; values alone are looked at.
FAST = "unsafe_rbg"
every_model = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def small(cls, **arguments):
    return cls(**{**SMALL[cls], **arguments})


def volume(grid, batch=1, channels=1, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.random((batch, *grid, channels)), jnp.float32)


def shapes_of(model):
    x = jnp.zeros(model.example_shape())
    return jax.eval_shape(lambda: model.init(jax.random.key(0), x))


def random_variables(model, seed=0):
    """Of the shapes that ``model.init`` gives, without compiling it."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        scale = np.sqrt(max(np.prod(leaf.shape[:-1]), 4.0))
        return jnp.asarray(rng.standard_normal(leaf.shape) / scale, jnp.float32)

    variables = jax.tree.map(fill, shapes_of(model))
    if "batch_stats" in variables:
        variables["batch_stats"] = jax.tree.map(
            lambda a: 1 + jnp.abs(a), variables["batch_stats"]
        )
    return variables


def count(model):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes_of(model)["params"]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (RCAN3D(), 1_002_621),
        (RCAN3D(conv="separable"), 341_472),
        (RCAN3D(conv="2plus1d"), 452_769),
        (EDSR3D(), 693_761),
        (UNet3D(), 996_769),
        (MDCSRN(), 412_033),
    ],
)
def test_parameter_counts_are_those_of_the_papers(model, expected):
    assert count(model) == expected


def test_sizes_without_arguments():
    scales = {cls: cls().scale for cls in CLASSES}
    assert scales.pop(EDSR3D) == (2, 2, 2)
    assert set(scales.values()) == {(1, 1, 1)}
    assert all(cls.__name__ in models.__all__ for cls in CLASSES)
    assert EDSR3D(scale=3) == EDSR3D(scale=[3, 3, 3]) == EDSR3D(scale=np.array([3] * 3))


@every_model
@pytest.mark.parametrize(
    ("conv", "rank", "upsampler", "scale"),
    [
        ("exact", None, "shuffle", (1, 1, 1)),
        ("exact", None, "shuffle", (4, 1, 1)),
        ("exact", None, "linear", (1, 1, 3)),
        ("separable", None, "shuffle", (1, 2, 2)),
        ("separable", 2, "linear", (2, 2, 2)),
        ("2plus1d", None, "shuffle", (2, 2, 2)),
        ("2plus1d", 5, "shuffle", (3, 1, 1)),
    ],
)
def test_grid_of_the_output(cls, conv, rank, upsampler, scale):
    """Traced only; numbers are compared in tests/parity."""
    model = small(
        cls, scale=scale, conv=conv, rank=rank, upsampler=upsampler, out_channels=2,
        input_skip=None,
    )  # fmt: skip
    grid = (3, 4, 5)
    x = jax.ShapeDtypeStruct((2, *grid, 1), jnp.float32)
    y = jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x)[0], x)
    finer = tuple(n * s for n, s in zip(grid, scale, strict=True))
    assert (y.shape, y.dtype) == ((2, *finer, 2), jnp.float32)


def test_z_alone_takes_a_flat_kernel():
    params = shapes_of(small(EDSR3D, scale=(4, 1, 1)))["params"]
    assert params["upsampler"]["conv"]["kernel"].shape == (1, 3, 3, 4, 16)


def test_shuffles_start_as_nearest_points():
    """ICNR: before training, every point becomes a block of one value."""
    modules = [
        Upsampler(scale, kind=Kind(*kind))
        for scale, kind in [
            ((2, 2, 2), ("exact",)),
            ((1, 2, 3), ("separable", 2)),
            ((2, 1, 2), ("2plus1d",)),
            ((3, 1, 1), ("separable",)),
        ]
    ]
    x, key = volume((3, 4, 2), channels=3), jax.random.key(1, impl=FAST)

    def outputs(key, x):
        return [module.init_with_output(key, x)[0] for module in modules]

    for module, y in zip(modules, run_once(outputs, key, x), strict=True):
        y, scale = np.asarray(y), module.scale
        corner = y[:, :: scale[0], :: scale[1], :: scale[2]]
        assert corner.std() > 0.01
        for axis, factor in enumerate(scale, start=1):
            corner = np.repeat(corner, factor, axis)
        np.testing.assert_allclose(y, corner, rtol=1e-5, atol=1e-6)


def factors_of(params, conv, rank):
    """The parameters of a dense model as those of one with factored kernels."""
    result = {}
    for name, value in params.items():
        if "kernel" not in value:
            result[name] = factors_of(value, conv, rank)
            continue
        kernel = np.asarray(value["kernel"])
        result[name] = value
        if kernel.ndim == 5 and len(kernel) > 1:
            kd, kh, kw, entering, leaving = kernel.shape
            exact = {
                "separable": min(kd, kh * kw * leaving),
                "2plus1d": min(kh * kw * entering, kd * leaving),
            }[conv]
            depth, plane, error = factorise(kernel, min(rank, exact), conv)
            assert error < 1e-6
            result[name] = {
                "bias": value["bias"],
                "depth_kernel": depth,
                "plane_kernel": plane,
            }
            if conv == "2plus1d":
                result[name]["plane_bias"] = np.zeros(plane.shape[-1], np.float32)
    return result


@pytest.mark.parametrize(("conv", "rank"), [("separable", 3), ("2plus1d", 36)])
def test_factors_of_full_rank_are_the_dense_network(conv, rank):
    """What a rank is for: a trained model, made of factors, is the same function."""
    model = small(EDSR3D, scale=(1, 2, 2))
    params = random_variables(model)["params"]
    other = model.clone(conv=conv, rank=rank)
    factored = factors_of(params, conv, rank)
    expected = jax.tree.map(np.shape, shapes_of(other)["params"])
    assert jax.tree.map(np.shape, factored) == expected
    x = volume((5, 4, 6))
    dense = run_once(model.apply, {"params": params}, x)
    result = run_once(other.apply, {"params": factored}, x)
    np.testing.assert_allclose(result, dense, rtol=0, atol=2e-6 * np.ptp(dense))


def test_factored_kernels_start_with_the_variance_of_dense_ones():
    """So that a network trains alike with each: 1 / (3 x taps x channels)."""
    channels = 64
    x = jnp.zeros((1, 1, 3, 3, channels))
    expected = 1 / (3 * 27 * channels)

    def init(key):
        return {
            conv: Conv(channels, kind=Kind(conv)).init(key, x)["params"]
            for conv in ("exact", "separable", "2plus1d")
        }

    params = run_once(init, jax.random.key(0, impl=FAST))
    params = jax.tree.map(np.asarray, params)
    dense = params["exact"]["kernel"]
    assert np.abs(dense).max() <= (27 * channels) ** -0.5
    factors = params["separable"]
    separable = (
        factors["depth_kernel"][:, None, None, :, None] * factors["plane_kernel"]
    )
    factors = params["2plus1d"]
    both = np.einsum(
        "hwim,dmo->dhwio", factors["plane_kernel"], factors["depth_kernel"]
    )
    for kernel in (dense, separable, both):
        assert kernel.shape == (3, 3, 3, channels, channels)
        # 192 depth taps know their variance to 6.5 per cent, one standard deviation.
        np.testing.assert_allclose(kernel.var(), expected, rtol=0.2)


def test_radius_of_the_default_models():
    """By hand: one point a 3x3x3 convolution on the coarse grid, half on the fine one.

    CSBDeep gives 22 for its U-Net of depth 2 and kernels of 3, too.
    """
    assert RCAN3D().receptive_radius == (1 + 5 * (3 * 2 + 1) + 1 + 1,) * 3
    assert EDSR3D().receptive_radius == (1 + 8 * 2 + 1 + 1 + 1,) * 3
    assert UNet3D().receptive_radius == (22,) * 3
    assert MDCSRN().receptive_radius == (1 + 4 * 4,) * 3
    attention = DepthAttentionSR()
    assert attention.receptive_radius == (1 + 4 * 4 + 1 + 1, 1 + 4 * 2 + 1 + 1, 11)
    assert EDSR3D(scale=(4, 1, 1)).receptive_radius == (19, 20, 20)
    assert UNet3D().stride == (4, 4, 4)
    assert UNet3D(pool=(1, 2, 2)).stride == (1, 4, 4)
    assert UNet3D(pool=(1, 2, 2)).receptive_radius[0] == 10
    assert {cls().stride for cls in CLASSES if cls is not UNet3D} == {(1, 1, 1)}


RADII = [
    (RCAN3D, {"n_blocks": 1, "scale": (1, 2, 1)}),
    (EDSR3D, {"scale": (2, 1, 3), "upsampler": "linear"}),
    (UNet3D, {"hidden_channels": 4}),
    (
        UNet3D,
        {
            "hidden_channels": 4,
            "pool": (1, 2, 3),
            "scale": (2, 1, 1),
            "conv": "separable",
        },
    ),
    (MDCSRN, {"scale": (4, 1, 1), "conv": "2plus1d"}),
    (DepthAttentionSR, {"input_skip": "cubic", "scale": (1, 2, 1)}),
    (DepthAttentionSR, {"mixing": "gate"}),
]


@pytest.mark.parametrize(("cls", "arguments"), RADII)
def test_radius_is_what_the_gradient_reaches(cls, arguments):
    """The outputs of one block depend on the block and its halo: on no point less.

    With a form that sums nothing beyond, which Winograd's cancels up to rounding.
    """
    model = small(cls, **arguments, form="concat")
    radius, stride, scale = model.receptive_radius, model.stride, model.scale
    start = [s * -(-(r + 1) // s) for r, s in zip(radius, stride, strict=True)]
    stop = [a + s for a, s in zip(start, stride, strict=True)]
    grid = tuple(b + r + 1 for b, r in zip(stop, radius, strict=True))
    # Several samples: a maximum passes the gradient to one point of its window alone.
    x = volume(grid, batch=6)
    variables = random_variables(model)
    if model.statistic_layers:
        _, sums = jax.eval_shape(lambda: model.apply(variables, x, mutable=["sums"]))
        variables["means"] = jax.tree.map(
            lambda s: jnp.full(s.shape, 0.5), sums["sums"]
        )
    block = tuple(
        slice(a * s, b * s) for a, b, s in zip(start, stop, scale, strict=True)
    )

    def reached(x):
        def loss(x):
            y = model.apply(variables, x)[(slice(None), *block)]
            weights = jnp.asarray(np.random.default_rng(1).random(y.shape), y.dtype)
            return (y * weights).sum()

        return (jax.grad(loss)(x) != 0).any((0, 4))

    points = np.argwhere(np.asarray(run_once(reached, x)))
    expected = [a - r for a, r in zip(start, radius, strict=True)]
    assert points.min(0).tolist() == expected
    expected = [b + r - 1 for b, r in zip(stop, radius, strict=True)]
    assert points.max(0).tolist() == expected


def tiles(model, grid):
    """The volume in two pieces along its longest axis, each with its halo.

    A piece: its points of the input; of these its own; of the piece's output its own;
    their place in the whole output.
    """
    axis = int(np.argmax(grid))
    radius, stride, scale = model.receptive_radius, model.stride, model.scale
    cut = stride[axis] * -(-grid[axis] // (2 * stride[axis]))
    for start, stop in ((0, cut), (cut, grid[axis])):
        low = max(0, start - radius[axis]) // stride[axis] * stride[axis]
        points = [(0, n) for n in grid]
        own = [(0, n) for n in grid]
        points[axis] = low, min(grid[axis], stop + radius[axis])
        assert points[axis] != (0, grid[axis])
        own[axis] = start - low, stop - low
        fine = [slice(a * s, b * s) for (a, b), s in zip(own, scale, strict=True)]
        place = list(fine)
        place[axis] = slice(start * scale[axis], stop * scale[axis])
        part = [slice(*pair) for pair in points]
        yield slices(part), own, slices(fine), slices(place)


def slices(grid):
    return (slice(None), *grid)


def run_in_tiles(model, variables, x):
    finer = [n * s for n, s in zip(x.shape[1:-1], model.scale, strict=True)]
    whole = np.full((x.shape[0], *finer, model.out_channels), np.nan, np.float32)
    apply = jax.jit(model.apply)
    for part, _, own, place in tiles(model, x.shape[1:-1]):
        whole[place] = np.asarray(apply(variables, x[part]))[own]
    return whole


@pytest.mark.parametrize(
    ("cls", "arguments", "grid"),
    [
        (EDSR3D, {"scale": (1, 2, 2), "input_skip": "linear"}, (3, 4, 15)),
        (UNet3D, {}, (5, 27, 3)),
        (MDCSRN, {"scale": (2, 1, 1)}, (17, 1, 3)),
        (DepthAttentionSR, {}, (17, 4, 3)),
    ],
)
def test_tiles_make_the_whole(cls, arguments, grid):
    model = small(cls, **arguments)
    variables = random_variables(model)
    x = volume(grid)
    expected = np.asarray(jax.jit(model.apply)(variables, x))
    result = run_in_tiles(model, variables, x)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.ptp(expected))


def test_rcan_in_tiles_with_the_means_of_the_whole():
    """The recipe of its docstring, to its end; each pass makes one more layer right."""
    model = small(RCAN3D, n_groups=2, n_blocks=1)
    variables = random_variables(model)
    x = volume((2, 3, 30))
    x = x * jnp.broadcast_to(jnp.linspace(0, 3, 30).reshape(30, 1), x.shape)

    @functools.partial(jax.jit, static_argnums=2)
    def collect(variables, x, region=None):
        y, new = model.apply(variables, x, region=region, mutable=["sums"])
        return y, new["sums"]

    def in_tiles(variables):
        whole, total = np.zeros(x.shape, np.float32), None
        for part, region, own, place in tiles(model, x.shape[1:-1]):
            y, sums = collect(variables, x[part], tuple(region))
            whole[place] = np.asarray(y)[own]
            sums = jax.tree.map(lambda a: np.asarray(a, np.float64), sums)
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        return whole, jax.tree.map(lambda s: jnp.float32(s / x.size), total)

    expected, sums = collect(variables, x)
    means = [np.asarray(s) / x.size for s in jax.tree.leaves(sums)]
    assert len(means) == model.statistic_layers == 2
    alone, collected = in_tiles(variables)
    assert np.abs(alone - expected).max() > 1e-4 * np.ptp(expected)  # it matters
    for known in range(1, model.statistic_layers + 1):
        ours = jax.tree.leaves(collected)[known - 1]
        np.testing.assert_allclose(ours, means[known - 1], rtol=1e-5, atol=1e-6)
        result, collected = in_tiles({**variables, "means": collected})
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_means_of_another_shape_are_refused():
    model = small(RCAN3D)
    variables = random_variables(model)
    x = volume((2, 3, 4))
    _, sums = jax.eval_shape(lambda: model.apply(variables, x, mutable=["sums"]))
    variables["means"] = jax.tree.map(lambda s: jnp.zeros((2, 4)), sums["sums"])
    with pytest.raises(ValueError, match=r"attention/channels is .* got \(2, 4\)"):
        jax.eval_shape(lambda: model.apply(variables, x))


def test_variables_hold_parameters_alone():
    """No trace of sums or means after initialising: what is saved is the network."""
    assert set(shapes_of(small(RCAN3D))) == {"params"}
    assert set(shapes_of(small(MDCSRN))) == {"params", "batch_stats"}
    assert set(shapes_of(small(MDCSRN, norm=None))) == {"params"}


def programs(model, dtype, grid=(3, 4, 5)):
    """Lowered: initialising, and the gradient of a loss with the forward pass in it."""
    x = jax.ShapeDtypeStruct((2, *grid, model.in_channels), dtype)

    @jax.jit
    def init(x):  # a key as an argument is a custom call in jax 0.4.34
        return model.init(jax.random.key(0), x)

    variables = dict(jax.eval_shape(init, x))  # running statistics stay float32
    variables["params"] = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, dtype), variables["params"]
    )

    def loss(variables, x):
        y, new = model.apply(variables, x, train=True, mutable=["batch_stats", "sums"])
        return (y.astype(jnp.float32) ** 2).mean(), (y, new)

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return init.lower(x), gradient.lower(variables, x)


CHOICES = [
    {"scale": (1, 2, 2)},
    {"scale": (2, 2, 2), "conv": "separable", "upsampler": "linear"},
    {"scale": (4, 1, 1), "conv": "2plus1d", "input_skip": "cubic"},
]


def assert_apple_gpus_have_it(text, dtype):
    """Plain 2D convolutions of that dtype, and no op that a plugin lacks."""
    assert not faults(text)
    assert "fft" not in text and "callback" not in text
    element = {"float32": "f32", "bfloat16": "bf16"}[np.dtype(dtype).name]
    for line in convolutions(text):
        assert set(re.findall(r"x([a-z]+\d+)>", line)) == {element}, line


@every_model
@pytest.mark.parametrize("arguments", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_what_is_compiled(cls, arguments, dtype):
    """Initialiser, forward pass, gradient: for an Apple GPU, and half in half."""
    if cls is DepthAttentionSR and arguments.get("conv") == "separable":
        arguments = {**arguments, "mixing": "gate"}
    init, gradient = programs(small(cls, **arguments), dtype)
    assert_apple_gpus_have_it(init.as_text(), dtype)
    text = gradient.as_text()
    assert convolutions(text)
    assert_apple_gpus_have_it(text, dtype)
    (_, (y, _)), gradients = gradient.out_info
    assert y.dtype == dtype
    params = (gradients[0]["params"], gradients[1])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}


@every_model
def test_half_precision_is_near(cls):
    model = small(cls, scale=1)
    variables = random_variables(model)
    x = volume((3, 4, 5))
    full = run_once(model.apply, variables, x)
    half = run_once(model.apply, variables, x.astype(jnp.float16))
    assert half.dtype == jnp.float16  # though the weights are float32
    error = jnp.abs(half.astype(jnp.float32) - full).max() / jnp.abs(full).max()
    assert 0 < error < 1e-2  # float16 keeps 11 bits through a few layers


@every_model
@pytest.mark.parametrize("arguments", CHOICES, ids=str)
def test_bundle_brings_the_model_back(cls, arguments, tmp_path):
    model = small(cls, **arguments)
    variables = jax.tree.map(np.asarray, random_variables(model))
    models.save(tmp_path / "model.safetensors", model, variables, range=(0.0, 1.0))
    again, variables_again, extra = models.load(tmp_path / "model.safetensors")
    assert again == model
    assert again.receptive_radius == model.receptive_radius
    assert extra == {"range": (0.0, 1.0)}
    assert jax.tree.structure(variables) == jax.tree.structure(variables_again)
    same = jax.tree.map(np.array_equal, variables, variables_again)
    assert all(jax.tree.leaves(same))


def test_bundle_of_another_size_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    variables = random_variables(small(EDSR3D, n_blocks=2))
    with pytest.raises(ValueError, match="blocks_1/conv_0/bias is not the model's"):
        models.save(path, small(EDSR3D), variables)


@pytest.mark.parametrize(
    ("cls", "arguments", "error", "text"),
    [
        (RCAN3D, {"hiden_channels": 4}, TypeError, "Did you mean 'hidden_channels'"),
        (UNet3D, {"n_block": 4}, TypeError, "UNet3D has no argument 'n_block'"),
        (EDSR3D, {"scale": (1, 2)}, ValueError, r"scale is .* got scale=\(1, 2\)"),
        (EDSR3D, {"scale": 0}, ValueError, "at least 1; got scale=0"),
        (EDSR3D, {"scale": 1.5}, ValueError, "whole number"),
        (EDSR3D, {"scale": "2"}, ValueError, "whole number"),
        (EDSR3D, {"conv": "2+1"}, ValueError, "'exact', 'separable', '2plus1d'"),
        (EDSR3D, {"rank": 2}, ValueError, "rank is for conv"),
        (EDSR3D, {"rank": 0, "conv": "separable"}, ValueError, "rank is a whole"),
        (EDSR3D, {"form": "best"}, ValueError, "'auto', 'local'"),
        (EDSR3D, {"upsampler": "cubic"}, ValueError, "'shuffle', 'linear'"),
        (EDSR3D, {"input_skip": "nearest"}, ValueError, "'linear', 'cubic', None"),
        (EDSR3D, {"n_blocks": 0}, ValueError, "n_blocks is a whole number"),
        (EDSR3D, {"residual_scaling": -1}, ValueError, "positive number or None"),
        (UNet3D, {"out_channels": 2}, ValueError, r"\(1 and 2\) are equal"),
        (UNet3D, {"pool": (2, 2)}, ValueError, "pool is"),
        (RCAN3D, {"reduction": 33}, ValueError, "at most hidden_channels, 32"),
        (MDCSRN, {"norm": "instance_norm"}, ValueError, "'batch_norm', None"),
        (MDCSRN, {"growth": True}, ValueError, "growth is a whole number"),
        (DepthAttentionSR, {"n_heads": 5}, ValueError, "n_heads divides"),
        (DepthAttentionSR, {"mixing": "mean"}, ValueError, "'attention', 'gate'"),
    ],
)
def test_wrong_arguments_are_told(cls, arguments, error, text):
    with pytest.raises(error, match=text):
        cls(**arguments)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 4, 5), "float32"),
        ((1, 3, 4, 5), "float32"),
        ((1, 3, 4, 5, 2), "float32"),
        ((1, 0, 4, 5, 1), "float32"),
        ((1, 3, 4, 5, 1), "uint16"),
    ],
)
def test_wrong_inputs_are_told(shape, dtype):
    with pytest.raises(ValueError, match=r"takes floats .* with 1 channels.*x\[None"):
        small(EDSR3D).init(jax.random.key(0), jnp.zeros(shape, dtype))
