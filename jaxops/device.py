"""The kind of device that a program is traced for, where its form hangs on that."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxops import plugins

_traced_for: ContextVar[str | None] = ContextVar("traced_for", default=None)


@contextmanager
def trace_for(kind: str) -> Iterator[None]:
    """What is traced inside is the program of that kind of device, wherever it runs."""
    token = _traced_for.set(kind)
    try:
        yield
    finally:
        _traced_for.reset(token)


def device_kind() -> str:
    """Of the device that arrays go to by default: "cpu", "gpu" or "metal"."""
    if kind := _traced_for.get():
        return kind
    device = jax.config.jax_default_device
    platform = getattr(device, "platform", device) or jax.default_backend()
    if platform in plugins.APPLE_PLATFORMS:
        return "metal"
    return "gpu" if platform in ("gpu", *plugins.GPU_PLUGINS) else "cpu"


def barrier(x, kind: str = "cpu"):
    """x, on that kind of device an array of its own: XLA may not change its form to
    suit one of its readers. See :func:`has_barrier`, and :func:`once`."""
    return lax.optimization_barrier(x) if has_barrier(kind) else x


def has_barrier(kind: str = "cpu") -> bool:
    """Whether :func:`barrier` is one: on that kind, where jax can differentiate it."""
    return device_kind() == kind and _barrier_has_a_transpose()


@functools.cache
def _barrier_has_a_transpose() -> bool:
    """Not in jax 0.4.34."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.eval_shape(jax.linear_transpose(lax.optimization_barrier, number), number)
    except NotImplementedError:
        return False
    return True


@jax.custom_jvp
def once(x):
    """x, on a CPU computed once, however many read it.

    Behind a barrier alone, XLA of jax 0.11 and before computes a sum again for each
    reader. It does not do so with a division; this one is by 1, whatever x is.
    """
    if device_kind() != "cpu":
        return x
    one = jnp.ones((), x.dtype)
    return x / lax.clamp(one, x, one)


@once.defjvp
def _once_derivative(primals, tangents):
    return once(*primals), tangents[0]
