"""StableHLO operations as calls of ``mlx.core``, one function each.

``OPERATIONS`` maps an operation's name to ``function(op, *operands)``, operands and
result being MLX arrays. What is not in it is not run.
"""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

DTYPES = {
    "i1": mx.bool_,
    "i8": mx.int8,
    "i16": mx.int16,
    "i32": mx.int32,
    "i64": mx.int64,
    "ui8": mx.uint8,
    "ui16": mx.uint16,
    "ui32": mx.uint32,
    "ui64": mx.uint64,
    "f16": mx.float16,
    "bf16": mx.bfloat16,
    "f32": mx.float32,
}
OPERATIONS: dict[str, Callable] = {}


class UnknownOperation(NotImplementedError):
    """An operation, or a form of one, that is not mapped to MLX."""


def operation(*names: str):
    def register(function):
        for name in names:
            OPERATIONS[name] = function
        return function

    return register


def result_shape(op) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(op.results[0].type).shape)


def result_dtype(op) -> mx.Dtype:
    return dtype_of(op.results[0].type)


def dtype_of(type_) -> mx.Dtype:
    name = str(ir.RankedTensorType(type_).element_type)
    if name not in DTYPES:
        raise UnknownOperation(f"MLX has no {name}")
    return DTYPES[name]


def integers(op, name: str, default: Sequence[int] | None = None) -> list[int]:
    """An attribute that is a list of whole numbers."""
    if name not in op.attributes:
        if default is None:
            raise UnknownOperation(f"{op.name} without {name}")
        return list(default)
    return [int(value) for value in op.attributes[name]]


for _names, _function in {
    ("add",): mx.add,
    ("subtract",): mx.subtract,
    ("multiply",): mx.multiply,
    ("maximum",): mx.maximum,
    ("minimum",): mx.minimum,
    ("power",): mx.power,
    ("negate",): mx.negative,
    ("abs",): mx.abs,
    ("sqrt",): mx.sqrt,
    ("rsqrt",): mx.rsqrt,
    ("exponential",): mx.exp,
    ("exponential_minus_one",): mx.expm1,
    ("log",): mx.log,
    ("log_plus_one",): mx.log1p,
    ("logistic",): mx.sigmoid,
    ("tanh",): mx.tanh,
    ("sine",): mx.sin,
    ("cosine",): mx.cos,
    ("floor",): mx.floor,
    ("ceil",): mx.ceil,
    ("sign",): mx.sign,
}.items():
    operation(*(f"stablehlo.{name}" for name in _names))(
        lambda op, *operands, function=_function: function(*operands)
    )
operation("chlo.erf")(lambda op, x: mx.erf(x))
operation("chlo.erf_inv")(lambda op, x: mx.erfinv(x))
operation("chlo.square")(lambda op, x: mx.square(x))


@operation("stablehlo.divide")
def divide(op, x, y):
    if mx.issubdtype(x.dtype, mx.floating):
        return mx.divide(x, y)
    if mx.issubdtype(x.dtype, mx.unsignedinteger):
        return mx.floor_divide(x, y)
    raise UnknownOperation("division of signed integers, which rounds to zero")


@operation("stablehlo.and", "stablehlo.or", "stablehlo.xor", "stablehlo.not")
def bits(op, *operands):
    name = op.name.removeprefix("stablehlo.")
    is_bool = operands[0].dtype == mx.bool_
    functions = {
        "and": mx.logical_and if is_bool else mx.bitwise_and,
        "or": mx.logical_or if is_bool else mx.bitwise_or,
        "xor": mx.not_equal if is_bool else mx.bitwise_xor,
        "not": mx.logical_not if is_bool else mx.bitwise_invert,
    }
    return functions[name](*operands)


@operation("stablehlo.shift_left", "stablehlo.shift_right_logical")
def shift(op, x, amount):
    """By as many bits as there are, or more, all are gone."""
    if not mx.issubdtype(x.dtype, mx.unsignedinteger):
        raise UnknownOperation(f"{op.name} of {x.dtype}")
    left = op.name.endswith("left")
    width = mx.array(8 * x.dtype.size, x.dtype)
    within = mx.minimum(amount, width - mx.array(1, x.dtype))
    shifted = (mx.left_shift if left else mx.right_shift)(x, within)
    return mx.where(amount < width, shifted, mx.zeros_like(x))


@operation("stablehlo.compare")
def compare(op, x, y):
    direction = stablehlo.ComparisonDirectionAttr(
        op.attributes["comparison_direction"]
    ).value
    functions = {
        "EQ": mx.equal,
        "NE": mx.not_equal,
        "LT": mx.less,
        "LE": mx.less_equal,
        "GT": mx.greater,
        "GE": mx.greater_equal,
    }
    return functions[direction](x, y)


@operation("stablehlo.select")
def select(op, condition, yes, no):
    return mx.where(condition, yes, no)


@operation("stablehlo.clamp")
def clamp(op, low, x, high):
    return mx.minimum(mx.maximum(x, low), high)


@operation("stablehlo.convert")
def convert(op, x):
    dtype = result_dtype(op)
    return mx.not_equal(x, mx.zeros_like(x)) if dtype == mx.bool_ else x.astype(dtype)


@operation("stablehlo.bitcast_convert")
def bitcast_convert(op, x):
    dtype = result_dtype(op)
    if dtype.size != x.dtype.size:
        raise UnknownOperation("bitcast_convert to numbers of another size")
    return x.view(dtype)


@operation("stablehlo.constant")
def constant(op):
    value = op.attributes["value"]
    if not isinstance(value, ir.DenseElementsAttr):  # a subclass, by its elements
        raise UnknownOperation(f"a constant of the kind {type(value).__name__}")
    dtype, shape = result_dtype(op), result_shape(op)
    if value.is_splat:
        number = value.get_splat_value().value
        return mx.full(shape, mx.array(number, dtype), dtype)
    if dtype == mx.bfloat16:  # numpy has no view of it
        return (
            mx.array([float(number) for number in value]).reshape(shape).astype(dtype)
        )
    return mx.array(np.array(value).reshape(shape), dtype)


@operation("stablehlo.iota")
def iota(op):
    shape, axis = result_shape(op), int(op.attributes["iota_dimension"])
    line = mx.arange(shape[axis]).astype(result_dtype(op))
    ones = [1] * len(shape)
    ones[axis] = shape[axis]
    return mx.broadcast_to(line.reshape(ones), shape)


@operation("stablehlo.broadcast_in_dim")
def broadcast_in_dim(op, x):
    shape = result_shape(op)
    places = integers(op, "broadcast_dimensions")
    if places != sorted(places):
        raise UnknownOperation("broadcast_in_dim that changes the order of axes")
    ones = [1] * len(shape)
    for size, place in zip(x.shape, places, strict=True):
        ones[place] = size
    return mx.broadcast_to(x.reshape(ones), shape)


@operation("stablehlo.reshape")
def reshape(op, x):
    return x.reshape(result_shape(op))


@operation("stablehlo.transpose")
def transpose(op, x):
    return mx.transpose(x, integers(op, "permutation"))


@operation("stablehlo.reverse")
def reverse(op, x):
    for axis in integers(op, "dimensions"):
        x = mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis=axis)
    return x


@operation("stablehlo.concatenate")
def concatenate(op, *parts):
    return mx.concatenate(list(parts), axis=int(op.attributes["dimension"]))


@operation("stablehlo.slice")
def slice_(op, x):
    limits = ("start_indices", "limit_indices", "strides")
    lists = (integers(op, name) for name in limits)
    return x[tuple(slice(*window) for window in zip(*lists, strict=True))]


@operation("stablehlo.dynamic_slice")
def dynamic_slice(op, x, *starts):
    return x[_window(x.shape, integers(op, "slice_sizes"), starts)]


@operation("stablehlo.dynamic_update_slice")
def dynamic_update_slice(op, x, update, *starts):
    y = mx.array(x)
    y[_window(x.shape, update.shape, starts)] = update
    return y


def _window(shape, sizes, starts) -> tuple[slice, ...]:
    """Windows that would stick out are moved back, as StableHLO has it."""
    places = [
        min(max(int(start.item()), 0), whole - size)
        for whole, size, start in zip(shape, sizes, starts, strict=True)
    ]
    return tuple(slice(p, p + s) for p, s in zip(places, sizes, strict=True))


@operation("stablehlo.pad")
def pad(op, x, value):
    low = integers(op, "edge_padding_low")
    high = integers(op, "edge_padding_high")
    between = integers(op, "interior_padding")
    whole, into, out = [], [], []
    for size, before, after, gap in zip(x.shape, low, high, between, strict=True):
        spread = size + max(size - 1, 0) * gap
        start = max(before, 0)
        whole.append(start + spread + max(after, 0))
        into.append(slice(start, start + spread, gap + 1))
        out.append(slice(max(-before, 0), whole[-1] - max(-after, 0)))
    y = mx.full(whole, value, x.dtype)
    if x.size:
        y[tuple(into)] = x
    return y[tuple(out)]


@operation("stablehlo.dot_general")
def dot_general(op, x, y):
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    x_batch = list(numbers.lhs_batching_dimensions)
    y_batch = list(numbers.rhs_batching_dimensions)
    x_sum = list(numbers.lhs_contracting_dimensions)
    y_sum = list(numbers.rhs_contracting_dimensions)
    x_free = [i for i in range(x.ndim) if i not in x_batch + x_sum]
    y_free = [i for i in range(y.ndim) if i not in y_batch + y_sum]
    batch = [x.shape[i] for i in x_batch]
    terms = math.prod(x.shape[i] for i in x_sum)
    rows = [x.shape[i] for i in x_free]
    columns = [y.shape[i] for i in y_free]
    left = mx.transpose(x, x_batch + x_free + x_sum)
    right = mx.transpose(y, y_batch + y_sum + y_free)
    left = left.reshape(*batch, math.prod(rows), terms)
    right = right.reshape(*batch, terms, math.prod(columns))
    dtype = result_dtype(op)
    product = mx.matmul(left.astype(dtype), right.astype(dtype))
    return product.reshape(*batch, *rows, *columns)


@operation("stablehlo.convolution")
def convolution(op, x, kernel):
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    num_axes = len(numbers.input_spatial_dimensions)
    if not 1 <= num_axes <= 2:
        raise UnknownOperation(f"a convolution along {num_axes} axes")
    if int(op.attributes["batch_group_count"]) != 1:
        raise UnknownOperation("a convolution with groups in the batch")
    ones = [1] * num_axes
    x = mx.transpose(
        x,
        [numbers.input_batch_dimension, *numbers.input_spatial_dimensions]
        + [numbers.input_feature_dimension],
    )
    kernel = mx.transpose(
        kernel,
        [numbers.kernel_output_feature_dimension, *numbers.kernel_spatial_dimensions]
        + [numbers.kernel_input_feature_dimension],
    )
    reversal = [bool(v) for v in integers(op, "window_reversal", [0] * num_axes)]
    if len(set(reversal)) != 1:
        raise UnknownOperation("a convolution that turns the kernel along one axis")
    padding = [[0, 0]] * num_axes
    if "padding" in op.attributes:
        padding = np.array(op.attributes["padding"]).reshape(num_axes, 2).tolist()
    if min(map(min, padding)) < 0:
        raise UnknownOperation("a convolution with negative padding")
    y = mx.conv_general(
        x,
        kernel,
        stride=integers(op, "window_strides", ones),
        padding=tuple([pair[i] for pair in padding] for i in range(2)),
        kernel_dilation=integers(op, "rhs_dilation", ones),
        input_dilation=integers(op, "lhs_dilation", ones),
        groups=int(op.attributes["feature_group_count"]),
        flip=reversal[0],
    )
    places = [numbers.output_batch_dimension, *numbers.output_spatial_dimensions]
    places.append(numbers.output_feature_dimension)
    return mx.transpose(y, [places.index(axis) for axis in range(y.ndim)])


# What a reduction's region may be: its one operation, and MLX's along axes.
REDUCTIONS = {
    "stablehlo.add": (mx.sum, mx.add),
    "stablehlo.multiply": (mx.prod, mx.multiply),
    "stablehlo.maximum": (mx.max, mx.maximum),
    "stablehlo.minimum": (mx.min, mx.minimum),
    "stablehlo.and": (mx.all, mx.logical_and),
    "stablehlo.or": (mx.any, mx.logical_or),
}


@operation("stablehlo.reduce")
def reduce(op, *operands):
    body = [inner.operation for inner in op.regions[0].blocks[0]]
    if len(operands) != 2 or len(body) != 2 or body[0].name not in REDUCTIONS:
        raise UnknownOperation(f"a reduction by {[inner.name for inner in body]}")
    if body[0].name in ("stablehlo.and", "stablehlo.or") and (
        operands[0].dtype != mx.bool_
    ):
        raise UnknownOperation("a reduction of bits")
    along, combine = REDUCTIONS[body[0].name]
    x, initial = operands
    y = along(x, axis=integers(op, "dimensions")).astype(x.dtype)
    return combine(y, initial)
