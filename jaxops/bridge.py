"""One function on the CPU, for a device that lacks an operation, and what that costs.

``on_cpu(function)`` fetches the arguments, computes on the CPU and sends the result
back. It is for eager code between jitted parts: each call waits for the device, and no
compiler sees across it. Where an operation is needed in every layer, contractions that
the device has are the better way; ``benchmarks/bridge.py`` measures both.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import plugins


class BridgeError(RuntimeError):
    """A bridge was used where it cannot be: inside a traced function."""


@dataclass
class Cost:
    """What a bridge has cost so far; ``str()`` says it in one line.

    Attributes:
        calls: forward and backward ones.
        bytes: that went to the CPU and back.
        seconds: of moving and computing, without waiting for the arguments.
        moving_seconds: of these, of moving.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    moving_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.calls} calls over the bridge, {self.bytes / 2**20:.2f} MiB, "
            f"{self.seconds:.3f} s, of which {self.moving_seconds:.3f} s to move it"
        )


class Bridge:
    """A function that runs on the CPU, whatever device its arguments are on.

    Attributes:
        cost: a `Cost`, which may be set to a fresh one.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.cost = Cost()
        update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = partial(self.function, **options)

        @jax.custom_vjp
        def call(*arguments):
            return self._cross(function, arguments)

        def forward(*arguments):
            # The pullback is a pytree, whose residuals stay on the CPU.
            kept = []

            def with_pullback(*arguments):
                result, pullback = jax.vjp(function, *arguments)
                kept.append(pullback)
                return result

            device = _device_of(arguments)
            result = self._cross(with_pullback, arguments)
            return result, _Pullback(kept[0], device)

        def backward(pullback, cotangents):
            return self._cross(pullback.function, (cotangents,), pullback.device)

        call.defvjp(forward, backward)
        return call(*arguments)

    def _cross(self, function: Callable, arguments: tuple, device: Any = None) -> Any:
        _refuse_tracers(self.__name__, arguments)
        device = device or _device_of(arguments)
        cpu = jax.devices("cpu")[0]
        jax.block_until_ready(arguments)  # the device's own time is not the bridge's
        start = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(arguments, cpu))
        arrived = time.perf_counter()
        with jax.default_device(cpu):
            result = jax.block_until_ready(function(*there))
        computed = time.perf_counter()
        _refuse_what_no_apple_gpu_has(self.__name__, result, device)
        back = jax.block_until_ready(jax.device_put(result, device))
        end = time.perf_counter()
        self.cost.calls += 1
        self.cost.bytes += _bytes(there) + _bytes(back)
        self.cost.seconds += end - start
        self.cost.moving_seconds += (arrived - start) + (end - computed)
        return back


@jax.tree_util.register_pytree_node_class
class _Pullback:
    """A pullback with the device that its cotangents go back to."""

    def __init__(self, function: Any, device: Any):
        self.function, self.device = function, device

    def tree_flatten(self):
        return (self.function,), self.device

    @classmethod
    def tree_unflatten(cls, device, children):
        return cls(children[0], device)


def on_cpu(function: Callable) -> Bridge:
    """The function, run on the CPU, with its result on the device of the arguments.

    Reverse-mode derivatives (`jax.grad`, `jax.vjp`) run on the CPU as well. Arguments
    are arrays, or pytrees of them; keyword arguments are constants.

    Returns:
        A `Bridge`; its ``cost`` counts calls, bytes and seconds.

    Raises:
        BridgeError: when it is called inside `jax.jit`, `jax.vmap` or a loop of
            `jax.lax`.
        TypeError: for a result that no Apple GPU can hold, complex or of 64 bits, when
            the arguments are on one.

    Example:
        ``median = on_cpu(jnp.median)``; ``y = decode(median(encode(x)))`` with jitted
        ``encode`` and ``decode``; ``print(median.cost)``.
    """
    return Bridge(function)


def _refuse_tracers(name: str, arguments: Any) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        raise BridgeError(
            f"on_cpu({name}) runs eagerly, between jitted functions, and was called "
            "inside jax.jit, jax.vmap or a loop of jax.lax. Split the function there "
            "and jit its parts, or use operations that the device has "
            "(jaxops.audit names them)."
        )


def _refuse_what_no_apple_gpu_has(name: str, result: Any, device: Any) -> None:
    if device.platform not in plugins.APPLE_PLATFORMS:
        return
    for leaf in jax.tree.leaves(result):
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating) or dtype == "float64":
            raise TypeError(
                f"on_cpu({name}) gives {dtype}, which {device} cannot hold; return "
                "float32: real and imaginary part as two arrays"
            )


def _device_of(arguments: Any) -> Any:
    """Of the first array; else where arrays go by default."""
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return next(iter(leaf.devices()))
    return jax.config.jax_default_device or jax.devices()[0]


def _bytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
