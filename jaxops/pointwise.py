"""What acts on each grid point alone: channel mixing and activations."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxops.device import barrier, device_kind
from jaxops.matmul import is_outer_sum, rows_matmul, sum_dtype


def dense(
    x: Float[Array, "*points channels"],
    kernel: Float[Array, "in_channels out_channels"],
    bias: Float[Array, " out_channels"] | None = None,
) -> Float[Array, "*points out_channels"]:
    """A 1x1 convolution: one product of two flat matrices.

    Flattened to rank 2 because the gradient of the kernel is then one long product too;
    with the spatial axes kept, XLA makes it a slow convolution-like reduction. On a GPU
    in TF32 or half precision, a number that is not finite makes up to three neighbours
    not finite too (see ``jaxops.matmul``).
    """
    if x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"The last axis of x must be the {kernel.shape[0]} input channels; "
            f"got {x.shape=}."
        )
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    kernel = kernel.astype(x.dtype)
    if _is_sum(kernel):
        y = _sum(flat, kernel)
    elif is_outer_sum(flat, kernel):
        y = rows_matmul(flat, kernel)
    else:
        y = barrier(rows_matmul(flat, kernel), "gpu")
    y = y.reshape(*x.shape[:-1], kernel.shape[1])
    return y if bias is None else y + on_all_points(bias.astype(y.dtype), y.shape)


def is_cheap(x, kernel) -> bool:
    """Whether ``dense(x, kernel)`` costs a gradient less again than kept: a GPU makes
    it of few numbers in the loop that reads it."""
    return device_kind() == "gpu" and is_outer_sum(x, kernel)


def _is_sum(kernel) -> bool:
    """A product of one output on a GPU: XLA joins sums with what is around them."""
    return device_kind() == "gpu" and kernel.shape[1] == 1


def _sum(x, kernel):
    """``x @ kernel`` of one output as a sum, and its gradients too.

    What a gradient sums over the points has the dtype of x, as all such sums have: of
    two dtypes they would be two programs, and the array between them written. Of rows
    of 128 numbers of half precision XLA writes all terms before; not of longer ones.
    """
    is_written = x.dtype.itemsize < 4 and x.shape[1] == 128
    weights = on_all_points(kernel.reshape(-1), x.shape, 256 if is_written else 64)
    products = at_least_float32(x) * at_least_float32(weights)
    return products.sum(axis=-1, keepdims=True).astype(x.dtype)


def dense_of(
    function: Callable,
    x: Float[Array, "*points channels"],
    kernel: Float[Array, "in_channels out_channels"],
) -> Float[Array, "*points out_channels"]:
    """``dense(function(x), kernel)``, the function acting on each number alone.

    Where a GPU makes a sum of it, a gradient computes the function again: reading and
    writing what it gives costs more.
    """

    def layer(x, kernel):
        return dense(function(x), kernel)

    if _is_sum(kernel):
        layer = jax.checkpoint(layer)
    return layer(x, kernel)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def on_all_points(
    values: Float[Array, " channels"], shape: tuple[int, ...], least: int = 64
) -> Float[Array, "*points channels"]:
    """``values`` at each point of an array of that shape: biases, gates.

    The gradient is a sum over the points. A GPU takes it over rows of ``least`` numbers
    or more, several points side by side where there are fewer channels: in rows of 32 a
    sum took up to 1.9 times as long. Sums of half precision are not made float32 here:
    XLA would write that array, and a step took 1.1 to 1.3 times as long.
    """
    return jnp.broadcast_to(values, shape)


@on_all_points.defjvp
def _on_all_points_derivative(shape, least, primals, tangents):
    (values,), (change,) = primals, tangents
    points, channels = math.prod(shape[:-1]), shape[-1]
    count = 1
    if device_kind() == "gpu":
        while 0 < count * channels < least and points % (2 * count) == 0:
            count *= 2
    if count > 1:
        rows = points // count, count * channels
        change = jnp.broadcast_to(jnp.tile(change, count), rows).reshape(shape)
    else:
        change = jnp.broadcast_to(change, shape)
    return on_all_points(values, shape, least), change


def at_least_float32(x):
    """For sums over many points: half precision would lose them."""
    return x.astype(sum_dtype(x))


# Of :func:`in_parts`: bytes of the widest array, in one part and from which on it is.
PART_BYTES, PARTS_FROM = 4 * 2**20, 16 * 2**20


def in_parts(
    function: Callable, x: Float[Array, "*points channels"], weights: Any, width: int
) -> Float[Array, "*points out_channels"]:
    """``function(x, weights)`` of what acts on each point alone, in small parts.

    On CPUs, where the widest array that the function makes, of ``width`` channels,
    would not fit in the cache: a forward pass of an FNO of 64 channels on 8 x 128 x 128
    points takes 0.9 of the time. Where a derivative is taken, the function is called as
    it is: its products of all points are faster.
    """
    points = math.prod(x.shape[:-1])
    size = points * width * x.dtype.itemsize
    if size < PARTS_FROM or device_kind() != "cpu":
        return function(x, weights)
    count = round(size / PART_BYTES)
    rows = points // count

    @jax.custom_jvp
    def apply(x, weights):
        flat = x.reshape(points, x.shape[-1])
        parts = flat[: rows * count].reshape(count, rows, x.shape[-1])
        y = lax.map(lambda part: function(part, weights), parts)
        y = y.reshape(rows * count, y.shape[-1])
        if rows * count < points:
            y = jnp.concatenate([y, function(flat[rows * count :], weights)])
        return y.reshape(*x.shape[:-1], y.shape[-1])

    apply.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return apply(x, weights)


# x P(x^2) / Q(x^2), lowest power first, is Phi(x) - 1/2 and gelu'(x) - 1/2 within 6e-9
# up to the bound, where float32 has 1/2: tests/fit_gelu.py makes these numbers.
_Rational = tuple[float, tuple[float, ...], tuple[float, ...]]
_CUMULATIVE: _Rational = (
    5.4,
    (
        0.00127447715,
        0.000106607993,
        1.48574931e-05,
        5.24899579e-07,
        2.03171489e-08,
        7.47124879e-11,
    ),
    (
        0.00319464075,
        0.000799664894,
        9.06571469e-05,
        5.9385016e-06,
        2.31274222e-07,
        3.88651771e-09,
    ),
)
_SLOPE: _Rational = (
    6.0,
    (
        0.000186048807,
        -4.20729837e-06,
        3.16403781e-06,
        6.64853427e-08,
        7.46801964e-09,
        2.61547878e-10,
        3.03155042e-12,
        -6.73369917e-15,
    ),
    (
        0.000233177611,
        7.24526913e-05,
        1.06284365e-05,
        9.6767452e-07,
        6.02954843e-08,
        2.5208785e-09,
        8.47742576e-11,
    ),
)

# For half precision, without a division: x P((x/bound)^2 - 1/2), lowest power first, is
# the same within 2e-6 and 3.2e-5.
_Polynomial = tuple[float, tuple[float, ...]]
_CUMULATIVE_OF_HALF: _Polynomial = (
    4.8,
    (
        0.147212706,
        -0.145967366,
        0.211647155,
        -0.323960429,
        0.489927316,
        -0.720608474,
        0.913686851,
        -0.881541985,
        1.21490882,
        -2.30310253,
        1.82544887,
    ),
)
_SLOPE_OF_HALF: _Polynomial = (
    4.8,
    (
        0.148473484,
        -0.160629819,
        0.29431747,
        -0.6286074,
        1.43295167,
        -3.21956374,
        4.88151118,
        -4.06699087,
        10.0299305,
        -28.4186371,
        24.4551941,
    ),
)


@jax.custom_jvp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Phi(x), Phi the normal distribution function: PyTorch's exact form.

    As accurate as by erf: within two roundings of float32; half precision within 1e-5
    before it is rounded; float64 takes erf. All else is products, sums and at most one
    division, so that it costs little more than reading and writing x, and no plugin
    needs an erf.

    The division comes last because XLA computes cheap operations again for each one
    that reads them, here at each end of a skip; a division is done once and its result
    kept.
    """
    if x.dtype == jnp.float64:
        return x * (1 + lax.erf(x * 0.5**0.5)) / 2
    wide = x.astype(jnp.float32)
    is_half = x.dtype.itemsize < 4
    bound = (_CUMULATIVE_OF_HALF if is_half else _CUMULATIVE)[0]
    factor = jnp.maximum(wide, -bound)  # below, Phi is 0 and the product too
    if is_half:
        return (factor * _half_plus_polynomial(_CUMULATIVE_OF_HALF, wide)).astype(
            x.dtype
        )
    numerator, denominator = _half_plus(_CUMULATIVE, wide)
    return factor * numerator / denominator


@gelu.defjvp
def _gelu_derivative(primals, tangents):
    """Phi(x) + x phi(x), phi the normal density, by a form of its own: nothing is kept
    for it from the forward pass but x."""
    (x,), (tangent,) = primals, tangents
    if x.dtype == jnp.float64:
        cumulative = (1 + lax.erf(x * 0.5**0.5)) / 2
        density = (2 * math.pi) ** -0.5 * jnp.exp(x * x / -2)
        return gelu(x), tangent * (cumulative + x * density)
    wide, change = x.astype(jnp.float32), tangent.astype(jnp.float32)
    if x.dtype.itemsize < 4:
        change = change * _half_plus_polynomial(_SLOPE_OF_HALF, wide)
    else:
        numerator, denominator = _half_plus(_SLOPE, wide)
        change = change * numerator / denominator
    return gelu(x), change.astype(x.dtype)


def _half_plus_polynomial(polynomial: _Polynomial, x):
    """1/2 + x P((x/bound)^2 - 1/2), x held to the bound: in powers of x^2 alone, terms
    much larger than their sum would cost digits."""
    bound, p = polynomial
    x = jnp.minimum(jnp.maximum(x, -bound), bound)
    return x * _polynomial(p, x * x * bound**-2 - 0.5) + 0.5


def _half_plus(rational: _Rational, x):
    """Numerator and denominator of 1/2 + x P(x^2) / Q(x^2), x held to the bound."""
    bound, p, q = rational
    x = jnp.minimum(jnp.maximum(x, -bound), bound)
    square = x * x
    denominator = _polynomial(q, square)
    numerator = denominator + x * _polynomial([2 * c for c in p], square)
    return numerator, denominator + denominator


def _polynomial(coefficients: Sequence[float], x):
    *others, value = coefficients
    value = jnp.full_like(x, value)
    for coefficient in reversed(others):
        value = value * x + coefficient
    return value


ACTIVATIONS: dict[str, Callable] = {
    "gelu": gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "identity": lambda x: x,
}


def activation(name_or_function: str | Callable) -> Callable:
    """The activation of that name; a function is returned as it is."""
    if callable(name_or_function):
        return name_or_function
    if name_or_function not in ACTIVATIONS:
        raise ValueError(
            f"non_linearity is a function or one of {', '.join(ACTIVATIONS)}; got "
            f"{name_or_function!r}."
        )
    return ACTIVATIONS[name_or_function]
