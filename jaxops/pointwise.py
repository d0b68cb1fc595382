"""What acts on each grid point alone: channel mixing and activations."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
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


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Phi(x), Phi the normal distribution function: PyTorch's exact form.

    Written out because an Apple plugin replaces ``jax.nn.gelu``, and because the erfc
    form that JAX uses costs an exponential more.
    """
    half = jnp.asarray(0.5, x.dtype)
    return half * x * (1 + jax.lax.erf(x * jnp.asarray(0.5**0.5, x.dtype)))


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
