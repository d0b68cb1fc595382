"""Every program of every exported model through MLX, within 1e-5 of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from metal import mlx_interpreter, mlx_ops  # noqa: E402
from metal.lanes import MLX_TOLERANCE, reference, reference_of  # noqa: E402

import models  # noqa: E402
from models.programs import STAGES, example_models  # noqa: E402

PROGRAMS = [(name, stage) for name in example_models() for stage in STAGES]


def test_every_exported_model_has_programs():
    exported = [getattr(models, name) for name in models.__all__]
    classes = {value.__name__ for value in exported if isinstance(value, type)}
    assert classes == set(example_models())


@pytest.mark.parametrize(("name", "stage"), PROGRAMS)
def test_program(lanes, name, stage):
    assert lanes.mlx_error(reference(name, stage)) <= MLX_TOLERANCE["float32"]


@pytest.mark.parametrize("name", example_models())
def test_half_precision(lanes, name):
    expected = reference(name, "gradient", "float16")
    assert lanes.mlx_error(expected) <= MLX_TOLERANCE["float16"]


@pytest.mark.parametrize("name", ["RCAN3D", "UNet3D"])
def test_bfloat16(lanes, name):
    """Not of operators: the constants in them cannot be read with jaxlib.mlir."""
    expected = reference(name, "gradient", "bfloat16")
    assert lanes.mlx_error(expected) <= MLX_TOLERANCE["bfloat16"]


def arrays(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def convolution(strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    return convolve


def gradients(function):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1))


IMAGE, KERNEL = (2, 7, 8, 4), (3, 2, 4, 6)
CASES = {
    "strided convolution": (convolution((2, 3)), (IMAGE, KERNEL)),
    "its gradients": (gradients(convolution((2, 3))), (IMAGE, KERNEL)),
    "dilated convolution": (convolution(dilation=(2, 1)), (IMAGE, KERNEL)),
    "convolution in groups": (convolution(groups=2), (IMAGE, (3, 2, 2, 6))),
    "uneven padding": (convolution(padding=((2, 0), (1, 3))), (IMAGE, KERNEL)),
    "transposed convolution": (
        lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME"),
        (IMAGE, KERNEL),
    ),
    "padding inside and off": (
        lambda x: jax.lax.pad(x, jnp.float32(3), ((-1, 2, 0), (1, -2, 2))),
        ((4, 5),),
    ),
    "dot with batch dimensions": (
        lambda x, y: jnp.einsum("bixy,ioxy->boxy", x, y),
        ((2, 3, 4, 5), (3, 6, 4, 5)),
    ),
    "loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * x + i, x),
        ((3,),),
    ),
    "window out of bounds": (
        lambda x: jax.lax.dynamic_slice(x, (jnp.int32(3), jnp.int32(-1)), (2, 2)),
        ((4, 5),),
    ),
    "reverse and reduce": (
        lambda x: jnp.flip(x, 0).max(0) + x.min(0) + x.prod(0),
        ((4, 5),),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operation(lanes, case):
    function, shapes = CASES[case]
    expected = reference_of(case, function, arrays(*shapes))
    assert lanes.mlx_error(expected) <= MLX_TOLERANCE["float32"]


def test_unknown_operations_are_not_skipped(lanes):
    expected = reference_of("sort", lambda x: jnp.sort(x), arrays((5,)))
    with pytest.raises(mlx_ops.UnknownOperation, match="stablehlo.sort"):
        lanes.mlx_error(expected)


def shifted_slice(op, x):
    starts = mlx_ops.integers(op, "start_indices")
    limits = mlx_ops.integers(op, "limit_indices")
    windows = []
    for start, limit, size in zip(starts, limits, x.shape, strict=True):
        step = -1 if start else int(limit < size)
        windows.append(slice(start + step, limit + step))
    return x[tuple(windows)]


def without_transposing(op, x):
    return x.reshape(mlx_ops.result_shape(op))


MUTATIONS = {
    "stablehlo.subtract": lambda op, x, y: y - x,
    "stablehlo.select": lambda op, c, yes, no: mx.where(c, no, yes),
    "stablehlo.slice": shifted_slice,
    "stablehlo.transpose": without_transposing,
    "stablehlo.rsqrt": lambda op, x: mx.rsqrt(x + 1e-3),
    "stablehlo.convolution": lambda op, x, k: mx.zeros(
        mlx_ops.result_shape(op), mlx_ops.result_dtype(op)
    ),
    "stablehlo.maximum": lambda op, x, y: mx.minimum(x, y),
    "stablehlo.exponential": lambda op, x: mx.exp(x * 1.001),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_mapping_is_found(lanes, monkeypatch, name):
    expected = reference("DepthAttentionSR", "gradient")
    monkeypatch.setitem(mlx_interpreter.OPERATIONS, name, MUTATIONS[name])
    assert lanes.mlx_error(expected) > MLX_TOLERANCE["float32"]
