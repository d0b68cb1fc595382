"""3D convolution and its relatives against PyTorch's own ops, and their programs.

The expected values come from PyTorch in float64 by way of a golden file; in the lane
with torch, ``test_conv3d_torch.py`` makes them anew.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv3d_cases import CASES, Case, arrays, cotangent, golden
from jax import lax
from program_text import convolutions, faults

import jaxops
from jaxops import conv3d_table
from jaxops.conv3d import (
    average_pool3d,
    conv_transpose3d,
    max_pool3d,
)
from jaxops.conv3d_forms import FORMS, KERNEL_FORMS, Forms, winograd_coefficients
from jaxops.device import device_kind

OPS = {
    "conv3d": jaxops.conv3d,
    "conv_transpose3d": conv_transpose3d,
    "average_pool3d": average_pool3d,
    "max_pool3d": max_pool3d,
}
# Of the largest value. Float32 sums of at most 1000 terms; the errors are below 1e-6.
TOLERANCE = 3e-6
DIRECTIONS = ("output", "gradient by input", "gradient by kernel")


def outcome(case: Case, **options) -> tuple[list[jax.Array], str]:
    """Output and gradients, as in ``golden()``, and the text of their one program."""
    given = [jnp.asarray(array) for array in arrays(case)]
    weights = jnp.asarray(cotangent(case, golden()[case.name][0].shape))

    def call(*given):
        if len(given) == 1:
            given = (*given, case.taps)
        return OPS[case.op](*given, **case.options, **options)

    def program(given, weights):
        output, pull = jax.vjp(call, *given)
        return [output, *pull(weights)]

    lowered = jax.jit(program).lower(given, weights)
    return compiled(lowered)(given, weights), lowered.as_text()


def compiled(lowered):
    """Machine code that is not optimised: the same sums in half the time to compile."""
    return lowered.compile({"xla_backend_optimization_level": 0})


def assert_is_golden(case: Case, **options) -> str:
    found, text = outcome(case, **options)
    for direction, ours, expected in zip(
        DIRECTIONS, found, golden()[case.name], strict=False
    ):
        assert ours.shape == expected.shape, direction
        assert ours.dtype == jnp.float32, direction
        atol = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=atol, err_msg=direction)
    assert not faults(text)
    return text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_pytorch_in_a_program_of_2d_parts(case):
    text = assert_is_golden(case)
    depthwise = case.options.get("groups", 0) == case.channels[0]
    if "pool" in case.op or depthwise or case.taps[1:] == (1, 1):
        assert not convolutions(text)  # slices, sums and products do


# The geometries in which the forms differ: how the depth is padded, cut and strided.
FORM_CASES = ("deep_2", "deep_3", "deep_5", "strides_2_1_3", "dilation_2", "valid")
FORM_CASES += ("padding_beyond_the_kernel", "transpose_taps_4_stride_2")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FORM_CASES)
def test_forms_are_exact(name, form):
    """Each form of both directions, and each way to kernel gradients, in turns."""
    kernel_form = KERNEL_FORMS[FORMS.index(form) % len(KERNEL_FORMS)]
    forms = Forms(form, form, kernel_form, side_by_side=form in ("sum", "outshift"))
    assert_is_golden(CASES[name], form=forms)


@pytest.mark.parametrize("kind", conv3d_table.TABLE)
def test_every_row_of_the_table_is_exact(kind, monkeypatch):
    monkeypatch.setattr(conv3d_table, "device_kind", lambda: kind)
    for name in ("deep_3", "to_one_channel", "six_channels"):
        assert_is_golden(CASES[name])


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("METAL", "metal"), ("mps", "metal"), ("gpu", "gpu"), ("cuda", "gpu")]
    + [("cpu", "cpu"), ("tpu", "cpu")],
)
def test_each_platform_has_a_row(platform, kind, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert device_kind() == kind


def test_a_form_by_name_is_taken():
    """Seen by the number of 2D convolutions, for 3 taps in 9 slices of the output."""

    def count(**options):
        call = jax.jit(lambda x, k: jaxops.conv3d(x, k, **options))
        text = call.lower(jnp.zeros((1, 9, 4, 4, 8)), jnp.zeros((3, 3, 3, 8, 8)))
        return len(convolutions(text.as_text()))

    counts = {form: count(form=form) for form in FORMS}
    assert counts == {"sum": 3, "concat": 1, "outshift": 1, "winograd": 6}
    assert count(form="winograd", strides=2) == 1  # concat instead
    assert count(form="auto") == 6  # on a CPU


def test_tiles_of_local_forms_are_the_whole_bit_by_bit():
    """Three layers, with a halo of three points; winograd differs in rounding."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((1, 14, 10, 20, 8)), jnp.float32)
    kernels = jnp.asarray(rng.standard_normal((3, 3, 3, 3, 8, 8)) / 15, jnp.float32)

    @functools.partial(jax.jit, static_argnames="form")
    def network(x, form):
        for kernel in kernels:
            x = jax.nn.relu(jaxops.conv3d(x, kernel, form=form))
        return x

    differences = {}
    for form in ("local", "winograd"):
        whole = network(x, form)
        tile = network(x[:, 1:12, :, 3:15], form)
        inside = whole[:, 4:9, :, 6:12], tile[:, 3:8, :, 3:9]
        differences[form] = float(jnp.abs(inside[0] - inside[1]).max())
    assert differences["local"] == 0
    assert 0 < differences["winograd"] < 2e-6 * float(jnp.abs(whole).max())


def test_winograd_is_exact_in_fractions():
    """Its coefficients make a correlation of any kernel, up to their own rounding."""
    for taps in (2, 3, 4, 5):
        slices, kernel, out = map(np.asarray, winograd_coefficients(taps))
        made = np.einsum("op,pt,ps->ots", out, kernel, slices)
        expected = np.zeros_like(made)
        for o in range(made.shape[0]):
            expected[o, range(taps), range(o, o + taps)] = 1
        np.testing.assert_allclose(made, expected, atol=1e-14)


def test_errors_with_many_channels_stay_small():
    """1e-5 of the largest value is what is promised; 3 x 3 x 3 x 64 = 1728 terms."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 8, 6, 6, 64)).astype(np.float32)
    kernel = rng.standard_normal((3, 3, 3, 64, 8)).astype(np.float32)
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3, 3), (1, 2, 3))
    expected = np.einsum("bdhwctij,tijco->bdhwo", windows, kernel, optimize=True)
    scale = np.abs(expected).max()
    for form in FORMS:
        call = jax.jit(functools.partial(jaxops.conv3d, form=form))
        y = call(jnp.asarray(x), jnp.asarray(kernel))
        np.testing.assert_allclose(y, expected, atol=2e-6 * scale, err_msg=form)


@pytest.mark.parametrize("strides", [1, 2])
def test_gradients_of_gradients_are_of_2d_parts_too(strides):
    """A penalty on the gradient, against XLA's own 3D convolution."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((1, 7, 4, 5, 2)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 3, 2, 3)), jnp.float32)

    def native(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (strides,) * 3,
            "SAME",
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )

    def penalty_gradients(convolve):
        def penalty(x, kernel):
            def energy(x, kernel):
                return jnp.sum(jnp.tanh(convolve(x, kernel)) ** 2)

            parts = jax.grad(energy, (0, 1))(x, kernel)
            return sum(jnp.sum(part**2) for part in parts)

        return jax.jit(jax.grad(penalty, (0, 1))).lower(x, kernel)

    ours = penalty_gradients(lambda x, k: jaxops.conv3d(x, k, strides=strides))
    theirs = penalty_gradients(native)
    assert not [line for line in faults(ours.as_text()) if "convolution" in line]
    assert faults(theirs.as_text())  # the test would see a 3D convolution
    for mine, expected in zip(
        compiled(ours)(x, kernel), compiled(theirs)(x, kernel), strict=True
    ):
        np.testing.assert_allclose(mine, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", ["auto", "sum", "outshift"])
def test_half_precision_stays_half_with_sums_in_float32(dtype, form):
    """Half a unit in the last place a tap's rounding, not one that grows with N."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((1, 6, 8, 8, 16)), dtype)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 3, 16, 8)), dtype)

    weights = jnp.asarray(rng.standard_normal((1, 6, 8, 8, 8)), dtype)

    def program(x, kernel):
        call = functools.partial(jaxops.conv3d, form=form)
        output, pull = jax.vjp(call, x, kernel)
        return output, *pull(weights.astype(x.dtype))

    found = jax.jit(program)(x, kernel)
    wide = [array.astype(jnp.float32) for array in (x, kernel)]
    expected_values = jax.jit(program)(*wide[:2])
    for mine, expected in zip(found, expected_values, strict=True):
        assert mine.dtype == dtype
        atol = float(jnp.finfo(dtype).eps) * float(jnp.abs(expected).max())
        np.testing.assert_allclose(mine.astype(jnp.float32), expected, atol=atol)


def test_convolutions_are_full_precision_unless_the_user_says_otherwise():
    def text():
        call = jax.jit(jax.grad(lambda k: jnp.sum(jaxops.conv3d(x, k)), 0))
        return call.lower(jnp.zeros((3, 3, 3, 8, 8))).as_text()

    x = jnp.zeros((1, 4, 4, 4, 8))
    assert "HIGHEST" in text()
    with jax.default_matmul_precision("tensorfloat32"):
        assert "HIGHEST" not in text()


def test_vmap_over_volumes():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((3, 2, 5, 4, 4, 2)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 3, 2, 3)), jnp.float32)
    y = jax.jit(jax.vmap(lambda one: jaxops.conv3d(one, kernel)))(x)
    flat = jax.jit(jaxops.conv3d)(x.reshape(6, 5, 4, 4, 2), kernel)
    np.testing.assert_allclose(y.reshape(flat.shape), flat, atol=1e-5)


def test_the_name_in_the_package_is_the_function():
    from jaxops.conv3d import conv3d

    assert jaxops.conv3d is conv3d


X, KERNEL = jnp.zeros((1, 4, 5, 6, 4)), jnp.zeros((3, 3, 3, 4, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": 0}, "strides is a whole number of at least 1"),
        ({"strides": (1, 2)}, "strides is a whole number of at least 1"),
        ({"dilation": True}, "dilation is a whole number"),
        ({"padding": "same"}, 'padding is "SAME", "VALID"'),
        ({"padding": (1, 2)}, 'padding is "SAME", "VALID"'),
        ({"padding": -1}, "none negative"),
        ({"padding": ((1, 1), (1, 1), (1, 1, 1))}, "none negative"),
        ({"padding_mode": "mirror"}, "padding_mode is one of zeros, reflect"),
        ({"padding_mode": "reflect", "padding": 4}, "at most 3 points beyond an axis"),
        ({"padding_mode": "circular", "padding": 5}, "at most 4 points beyond an axis"),
        ({"padding": "VALID", "dilation": 2}, "must fit into the padded volume"),
        ({"groups": 2}, "with the channels of x in"),
        ({"groups": 3}, "groups is a number that divides"),
        (
            {"form": "winogrand"},
            "form is auto, local, sum, concat, outshift, winograd, or a Forms",
        ),
    ],
)
def test_mistakes_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        jaxops.conv3d(X, KERNEL, **options)


def test_more_mistakes_are_told():
    half = jnp.bfloat16
    with pytest.raises(ValueError, match="would lose the digits that bfloat16 has"):
        jaxops.conv3d(X.astype(half), KERNEL.astype(half), form="winograd")
    with pytest.raises(ValueError, match="output_padding is less than the stride"):
        conv_transpose3d(X, KERNEL, strides=2, output_padding=2)
    with pytest.raises(ValueError, match="padding leaves nothing"):
        conv_transpose3d(X, KERNEL, padding=4)
    with pytest.raises(ValueError, match="in, out / groups"):
        conv_transpose3d(X[..., :3], KERNEL)
    with pytest.raises(ValueError, match="at most half a window of padding"):
        max_pool3d(X, 2, padding=(0, 2, 0))
    with pytest.raises(ValueError, match="window is a whole number of at least 1"):
        average_pool3d(X, (2, 0, 2))
    with pytest.raises(ValueError, match="must fit into the padded volume"):
        max_pool3d(X, 5)
