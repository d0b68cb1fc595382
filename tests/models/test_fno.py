"""What FNO promises beside parity: arguments, shapes, modes of training, precision."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.device import trace_for
from models import FNO, FNO1D, FNO2D, FNO3D
from models.blocks import FNOBlock

SMALL = {"in_channels": 1, "out_channels": 2, "hidden_channels": 4, "n_layers": 2}


def field(grid, batch=2, channels=1, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((batch, *grid, channels)), jnp.float32)


def make(model, x, seed=0):
    return jax.jit(model.init)(jax.random.key(seed), x)


def call(model, variables, x, **options):
    """Compiled as a whole: many times faster here than an operation at a time."""
    rngs = options.pop("rngs", None)
    apply = jax.jit(lambda v, x, rngs: model.apply(v, x, rngs=rngs, **options))
    return apply(variables, x, rngs)


@pytest.mark.parametrize(
    ("cls", "grid"), [(FNO1D, (9,)), (FNO2D, (6, 7)), (FNO3D, (4, 5, 6))]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_dimension_and_batch(cls, grid, batch):
    model = cls(n_modes=(3,) * len(grid), **SMALL)
    x = field(grid, batch)
    variables = make(model, x)
    y = jax.jit(model.apply)(variables, x)
    assert y.shape == (batch, *grid, 2)
    assert y.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    assert jnp.isfinite(y).all()


@pytest.mark.parametrize("precision", ["highest", "tensorfloat32"])
@pytest.mark.parametrize("skip", ["linear", "soft-gating", "identity", None])
def test_the_forms_for_other_devices_are_the_same_function(skip, precision):
    """Traced for them and run here, where TF32 is float32: outputs and gradients within
    rounding."""
    small = {**SMALL, "hidden_channels": 16}  # enough for rows side by side
    model = FNO2D((4, 4), **small, fno_skip=skip, channel_mlp_skip=skip)
    x, y = field((9, 8)), field((9, 8), channels=2, seed=1)
    variables = make(model, x)

    def run(kind):
        def loss(v):
            output = model.apply(v, x)
            return ((output - y) ** 2).sum(), output

        with trace_for(kind), jax.default_matmul_precision(precision):
            return jax.jit(jax.grad(loss, has_aux=True))(variables)

    expected = run("cpu")
    for kind in ("gpu", "metal"):
        for ours, theirs in zip(
            *map(jax.tree.leaves, (run(kind), expected)), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * abs(theirs).max())


@pytest.mark.parametrize("skip", ["linear", "soft-gating", "identity", None])
@pytest.mark.parametrize("modes", [(3,), (4, 3), (2, 3, 2)])
def test_a_bias_before_the_first_block_is_what_its_readers_make_of_it(skip, modes):
    """On GPUs it is not added to the field, as on a CPU, but to one coefficient and to
    the biases behind."""
    model = FNO(modes, **SMALL, fno_skip=skip, channel_mlp_skip=skip)
    x = field((6, 7, 5)[: len(modes)])
    variables = make(model, x)
    shape = tuple(n + 2 for n in x.shape[1:-1])

    def loss(v):
        return (model.apply(v, x, shape) ** 2).sum()

    expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(variables)
    with trace_for("metal"):
        value, gradient = jax.jit(lambda v: jax.value_and_grad(loss)(v))(variables)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (gradient, expected_gradient)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * abs(theirs).max())


@pytest.mark.parametrize("skip", ["linear", "soft-gating", "identity", None])
def test_the_last_block_is_what_its_parts_are(skip):
    """Its linear part is joined with the first kernel of the channel MLP; a norm, here
    one that changes nothing, keeps the parts apart."""
    options = {"n_modes": (4, 4), "is_last": True, "fno_skip": skip}
    joined = FNOBlock(**options)
    apart = FNOBlock(**options, norm="batch_norm")
    x = field((9, 8), channels=6)
    variables = make(apart, x)
    stats = {
        name: {"mean": jnp.zeros(6), "var": jnp.full(6, 1 - 1e-5)}
        for name in ("norm_0", "norm_1")
    }

    def loss(params, block):
        given = {"params": params}
        if block is apart:
            given["batch_stats"] = stats
        return (block.apply(given, x) ** 2).sum()

    params = variables["params"]
    own = {name: params[name] for name in params if not name.startswith("norm")}
    value, gradient = jax.value_and_grad(loss)(own, joined)
    expected, expected_gradient = jax.value_and_grad(loss)(params, apart)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(gradient),
        jax.tree.leaves({name: expected_gradient[name] for name in own}),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * abs(theirs).max())


def test_samples_of_a_batch_do_not_mix():
    model = FNO2D((4, 4), **SMALL, norm="group_norm")
    x = field((8, 8), 3)
    variables = make(model, x)
    apply = jax.jit(model.apply)
    alone = jnp.concatenate([apply(variables, x[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(apply(variables, x), alone, atol=2e-6)


def test_a_periodic_shift_moves_the_output_where_there_is_no_grid_embedding():
    """Spectral convolutions and 1x1 ones commute with shifts, on odd grids too."""
    model = FNO2D((4, 4), **SMALL, positional_embedding=None)
    x = field((7, 9))
    variables = make(model, x)
    apply = jax.jit(model.apply)
    shifted = apply(variables, jnp.roll(x, (2, 3), (1, 2)))
    expected = jnp.roll(apply(variables, x), (2, 3), (1, 2))
    np.testing.assert_allclose(shifted, expected, atol=5e-6)


def test_spectral_layers_see_one_function_on_every_grid():
    """The same band-limited input on 16 and 24 points: linear parts agree exactly."""
    model = FNO1D(
        5, **SMALL, non_linearity="identity", use_channel_mlp=False,
        positional_embedding=None,
    )  # fmt: skip

    def sampled(n):
        t = np.arange(n) / n
        x = np.sin(2 * np.pi * t) + np.cos(4 * np.pi * t)
        return jnp.asarray(x[None, :, None], jnp.float32)

    variables = make(model, sampled(16))
    coarse = call(model, variables, sampled(16))
    fine = call(model, variables, sampled(24))
    np.testing.assert_allclose(coarse[:, ::2], fine[:, ::3], atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "output_shape", "expected"),
    [
        ({"resolution_scaling_factor": 2}, None, (32, 40)),
        ({"resolution_scaling_factor": [1, 1.5]}, None, (12, 15)),
        ({"resolution_scaling_factor": [[1, 2], [2, 1]]}, None, (16, 20)),
        ({}, (9, 13), (9, 13)),
        ({}, [(12, 8), (9, 13)], (9, 13)),
        ({}, [(12, 8), None], (12, 8)),
        ({"domain_padding": 0.25}, (9, 13), (9, 13)),
        ({"domain_padding": [(0, 0.5), 0]}, None, (8, 10)),
        ({"domain_padding": 0.2, "resolution_scaling_factor": 2}, None, (32, 40)),
        ({"domain_padding": (0.1, 0.3)}, None, (8, 10)),
    ],
)
def test_grid_of_the_output(arguments, output_shape, expected):
    model = FNO2D((4, 4), **SMALL, **arguments)
    x = field((8, 10))
    variables = make(model, x)
    y = call(model, variables, x, output_shape=output_shape)
    assert y.shape[1:-1] == expected


def test_padding_one_side_leaves_the_other_axis_alone():
    """Zero padding behind the field must not shift it: a causal time axis."""
    x = field((6, 8))
    both = FNO2D((4, 4), **SMALL, domain_padding=[(0.5, 0.5), 0])
    one = FNO2D((4, 4), **SMALL, domain_padding=[(0, 1.0), 0])
    variables = make(both, x)
    # Padded to the same size, and a spectral convolution commutes with shifts: equal.
    np.testing.assert_allclose(
        call(one, variables, x), call(both, variables, x), atol=5e-6
    )


def test_dropout_acts_in_training_only():
    model = FNO2D((4, 4), **SMALL, channel_mlp_dropout=0.5)
    x = field((8, 8))
    variables = make(model, x)
    still = call(model, variables, x)
    np.testing.assert_array_equal(still, call(model, variables, x))
    first, again, other = (
        call(model, variables, x, train=True, rngs={"dropout": jax.random.key(s)})
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - other).max() > 1e-3


@pytest.mark.parametrize("precision", ["half", "mixed"])
def test_half_precision_keeps_weights_float32_and_trains(precision):
    """Float16 spectral layers of any size, odd too, near float32; gradients finite."""
    x = field((7, 9))
    full = FNO2D((4, 4), **SMALL, stabilizer="tanh")
    low = full.clone(fno_block_precision=precision)
    variables = make(low, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))

    def loss(model, variables):
        y = model.apply(variables, x)
        return (y * y).mean(), y

    gradient, y = jax.jit(jax.grad(lambda v: loss(low, v), has_aux=True))(variables)
    expected = call(full, variables, x)
    assert y.dtype == jnp.float32
    error = jnp.abs(y - expected).max() / jnp.abs(expected).max()
    assert 0 < error < 1e-2  # float16 keeps 11 bits through two layers
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_float64_is_float64_where_it_is_switched_on():
    module = jax if hasattr(jax, "enable_x64") else jax.experimental
    enabled = module.enable_x64  # moved between versions
    with enabled(True):
        model = FNO1D(5, **SMALL, positional_embedding=None)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 1)))
        variables = jax.tree.map(lambda a: a.astype(jnp.float64), make(model, x))
        y = call(model, variables, x)
        assert y.dtype == jnp.float64
        moved = call(model, variables, jnp.roll(x, 2, 1))
        np.testing.assert_allclose(moved, jnp.roll(y, 2, 1), atol=1e-13)


def test_initial_distributions_are_neuraloperators():
    """Complex normal of variance 2/(in+out); uniform within 1/sqrt(fan_in)."""
    model = FNO2D((16, 16), 1, 1, hidden_channels=32)
    params = make(model, field((16, 16)))["params"]
    weight = np.asarray(params["blocks_0"]["conv"]["weight"])
    assert weight.shape == (2, 16, 9, 32, 32)
    # 147456 samples: the variance is known to 0.4 per cent, one standard deviation.
    np.testing.assert_allclose(weight[0].var(), 1 / 64, rtol=0.02)
    np.testing.assert_allclose(weight[1].var(), 1 / 64, rtol=0.02)
    kernel = np.asarray(params["projection"]["fcs_0"]["kernel"])
    assert kernel.shape == (32, 64)
    bound = 32**-0.5
    assert 0.95 * bound < np.abs(kernel).max() <= bound
    np.testing.assert_allclose(kernel.var(), bound**2 / 3, rtol=0.1)


def test_modes_above_the_grid_are_clamped_with_one_warning_a_layer():
    model = FNO2D((8, 8), **SMALL)
    x = field((4, 4))
    with pytest.warns(UserWarning, match="more than a grid of"):
        variables = make(model, x)
    assert variables["params"]["blocks_0"]["conv"]["weight"].shape[1:3] == (8, 5)


def test_names_and_defaults_are_neuraloperators():
    """Those that this model shares; from neuraloperator where it is installed."""
    neuralop = pytest.importorskip("neuralop.models")
    theirs = inspect.signature(neuralop.FNO.__init__).parameters
    ours = inspect.signature(FNO).parameters
    shared = [name for name in ours if name not in ("compat", "parent", "name")]
    assert set(shared) <= set(theirs)
    missing = set(theirs) - set(ours) - {"self"}
    assert missing == {
        "complex_data", "factorization", "rank", "fixed_rank_modes", "implementation",
        "decomposition_kwargs", "separable", "conv_module",
    }  # fmt: skip
    for name in shared:
        if name != "non_linearity":
            assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"hiden_channels": 4}, TypeError, "Did you mean 'hidden_channels'"),
        ({"n_modes": (4, 4, 4)}, ValueError, "one entry for each of 2 axes"),
        ({"n_modes": (4, 0)}, ValueError, "at least 1"),
        ({"n_layers": 0}, ValueError, "n_layers is a whole number of at least 1"),
        ({"hidden_channels": 4.0}, ValueError, "hidden_channels is a whole number"),
        ({"n_modes": (True, True)}, ValueError, "whole numbers"),
        ({"n_modes": None}, ValueError, "one whole number for each axis"),
        ({"lifting_channel_ratio": float("nan")}, ValueError, "is a number"),
        ({"domain_padding": float("inf")}, ValueError, "domain_padding"),
        ({"factorization": "Tucker"}, TypeError, "has no argument 'factorization'. It"),
        ({"norm": "layer"}, ValueError, "norm is one of 'instance_norm'"),
        ({"fno_skip": "conv"}, ValueError, "fno_skip is one of"),
        ({"positional_embedding": "sine"}, ValueError, "positional_embedding"),
        ({"stabilizer": "clip"}, ValueError, "stabilizer"),
        ({"compat": "neuralop"}, ValueError, "compat"),
        ({"fno_block_precision": "low"}, ValueError, "fno_block_precision"),
        ({"non_linearity": "geluu"}, ValueError, "non_linearity"),
        ({"channel_mlp_dropout": 1.0}, ValueError, "probability"),
        ({"channel_mlp_expansion": 0.01}, ValueError, "at least one hidden channel"),
        ({"projection_channel_ratio": 0}, ValueError, "projection"),
        ({"max_n_modes": (4, 2)}, ValueError, "what n_modes needs"),
        ({"domain_padding": -0.1}, ValueError, "none negative"),
        ({"domain_padding": [0.1]}, ValueError, "domain_padding"),
        ({"resolution_scaling_factor": 0}, ValueError, "positive number"),
        ({"resolution_scaling_factor": [1]}, ValueError, "one per layer"),
    ],
)
def test_wrong_arguments_are_told(arguments, error, text):
    with pytest.raises(error, match=text):
        FNO2D(**{"n_modes": (4, 4), **SMALL, **arguments})


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 8, 8), "channels last"),
        ((2, 8, 8, 3), "with 1 channels"),
        ((2, 1, 8, 8), "with 1 channels"),
        ((2, 8, 8, 8, 1), "channels last"),
    ],
)
def test_wrong_inputs_are_told(shape, text):
    model = FNO2D((4, 4), **SMALL)
    with pytest.raises(ValueError, match=text):
        model.init(jax.random.key(0), jnp.zeros(shape))


def test_masks_and_counts_are_taken_for_floats():
    """Bool coefficients are common; weights must not be cut to whole numbers."""
    model = FNO2D((4, 4), **SMALL, non_linearity="relu", use_channel_mlp=False)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (1, 8, 8, 1)))
    variables = make(model, x.astype(jnp.float32))
    expected = call(model, variables, x.astype(jnp.float32))
    for kind in (jnp.int32, bool):
        y = call(model, variables, x.astype(kind))
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, expected)
    with pytest.raises(TypeError, match="real fields"):
        call(model, variables, x.astype(jnp.complex64))


def test_an_empty_batch_gives_an_empty_batch():
    model = FNO2D((4, 4), **SMALL)
    variables = make(model, field((8, 8)))
    assert call(model, variables, jnp.zeros((0, 8, 8, 1))).shape == (0, 8, 8, 2)


def test_wrong_output_shape_is_told():
    model = FNO2D((4, 4), **SMALL)
    x = field((8, 8))
    for wrong in (8, (8,), (8, 8, 8), (8, 0), [(8, 8)], [(8, 8), 8], "88"):
        with pytest.raises(ValueError, match="output_shape is a grid of 2 sizes"):
            jax.eval_shape(lambda: model.init(jax.random.key(0), x, output_shape=wrong))  # noqa: B023


def test_nothing_is_compiled_that_an_apple_gpu_lacks():
    """No complex number, FFT, float64 or convolution, forward and gradient, 3D."""
    model = FNO3D((3, 4, 3), **SMALL, norm="batch_norm", domain_padding=0.2)
    x = field((4, 5, 6))

    def loss(variables):
        y, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return (y * y).mean(), new

    init = jax.jit(model.init)
    programs = [
        init.lower(jax.random.key(0), x),
        jax.jit(jax.grad(loss, has_aux=True)).lower(init(jax.random.key(0), x)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for program in programs:
            text = program.as_text()
            for banned in ("complex<", "f64", "fft", "convolution", "callback"):
                assert banned not in text, banned
