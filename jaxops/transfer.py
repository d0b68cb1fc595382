"""The one way from host memory to the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def to_device(tree: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """Move host arrays to the default device: the one way there.

    Apple's plugins fail on views with negative strides and on big-endian data, and have
    no float64. What arrives is a fresh copy: contiguous, native byte order, `dtype`.

    Args:
        tree: a pytree of numpy arrays, numbers, booleans or jax arrays, real, of any
            float, integer or boolean dtype, byte order and strides.
        dtype: real dtype of the result. Wider floats are rounded to it. Kinds only
            widen: booleans and integers may become floats, not the other way round.

    Returns:
        The same tree of jax arrays, shapes unchanged. A jax array that has the dtype
        already is passed through.

    Raises:
        ValueError: naming the leaf, if it is complex, masked or not a number, if a
            value does not fit `dtype`, or if `dtype` itself does not exist on a device.
    """
    target = np.dtype(dtype)
    if _kind(target) is None or jax.dtypes.canonicalize_dtype(target) != target:
        raise ValueError(
            f"to_device cannot make {target}: devices hold real numbers of 32 bits or "
            "fewer; ask for float32"
        )

    def move(path: Any, leaf: Any) -> jax.Array:
        return _move(f"to_device: leaf {jax.tree_util.keystr(path)}", leaf, target)

    return jax.tree_util.tree_map_with_path(move, tree)


_KINDS = (np.bool_, np.integer, np.floating)  # each is accepted where a later one is


def _kind(dtype: Any) -> int | None:
    """Rank among boolean, integer and float dtypes, or None for all others."""
    ranks = (rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))
    return next(ranks, None)


def _move(name: str, leaf: Any, target: np.dtype) -> jax.Array:
    source = leaf if isinstance(leaf, jax.Array) else np.asanyarray(leaf)
    _check_leaf(name, source, target)
    if isinstance(source, jax.Array):
        return source.astype(target)
    with np.errstate(over="raise"):
        try:
            # A copy of our own, which the device may alias: never the caller's memory.
            native = np.array(source, dtype=target, order="C", copy=True, subok=False)
        except FloatingPointError as error:
            raise ValueError(f"{name} has values too large for {target}") from error
    return jax.device_put(native)


def _check_leaf(name: str, source: Any, target: np.dtype) -> None:
    if jnp.issubdtype(source.dtype, np.complexfloating):
        raise ValueError(
            f"{name} is {source.dtype}, and devices get real numbers only; "
            "pass its real and imaginary part as two arrays or two channels"
        )
    kind = _kind(source.dtype)
    if kind is None:
        raise ValueError(f"{name} must be numbers or booleans; got {source.dtype}")
    if isinstance(source, np.ma.MaskedArray):
        raise ValueError(f"{name} is masked; fill its missing values first (.filled())")
    if kind > _kind(target):
        raise ValueError(
            f"{name} is {source.dtype}, and making it {target} would lose values; "
            "round or compare it first"
        )
    if jnp.issubdtype(target, np.integer) and kind == 1 and source.size:
        _check_range(name, source, target)


def _check_range(name: str, source: Any, target: np.dtype) -> None:
    low, high = int(source.min()), int(source.max())
    limits = np.iinfo(target)
    if low < limits.min or high > limits.max:
        raise ValueError(f"{name} has values too large for {target}: {low} to {high}")
