"""What acts on each grid point alone: channel mixing and activations."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxops.matmul import matmul


def dense(
    x: Float[Array, "*points channels"],
    kernel: Float[Array, "in_channels out_channels"],
    bias: Float[Array, " out_channels"] | None = None,
) -> Float[Array, "*points out_channels"]:
    """A 1x1 convolution: one product of two flat matrices.

    Flattened to rank 2 because the gradient of the kernel is then one long product too;
    with the spatial axes kept, XLA makes it a slow convolution-like reduction.
    """
    if x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"The last axis of x must be the {kernel.shape[0]} input channels; "
            f"got {x.shape=}."
        )
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = matmul(flat, kernel.astype(x.dtype))
    y = y.reshape(*x.shape[:-1], kernel.shape[1])
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


@jax.custom_jvp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Phi(x), Phi the normal distribution function: PyTorch's exact form.

    Written out because an Apple plugin replaces ``jax.nn.gelu``, and because the erfc
    form that JAX uses costs an exponential more.

    The division by two is one that compilers cannot turn into a product. XLA computes
    cheap operations again for each one that reads them, here at each end of a skip, and
    a product counts as cheap; a division is done once and its result kept. A forward
    pass of an FNO takes 0.7 of the time on a CPU by this, and half the memory.
    """
    two = jnp.maximum(jnp.minimum(x, 2), 2)
    return x * (1 + lax.erf(x * jnp.asarray(0.5**0.5, x.dtype))) / two


@gelu.defjvp
def _gelu_derivative(primals, tangents):
    """Phi(x) + x phi(x), phi the normal density.

    Phi is taken from erf(-x), so that compilers do not find it equal to that of the
    function: they would store it from the forward to the backward pass, which takes
    longer than computing it anew.
    """
    (x,), (tangent,) = primals, tangents
    half, width = (jnp.asarray(value, x.dtype) for value in (0.5, 0.5**0.5))
    cumulative = half * (1 - lax.erf(x * -width))
    density = jnp.asarray((2 * math.pi) ** -0.5, x.dtype) * jnp.exp(-half * (x * x))
    return gelu(x), tangent * (cumulative + x * density)


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
