"""The one matrix product that everything here is made of.

Two rules, kept in this file so that no other has to know them:

* **Shape.** A small matrix is applied along an axis as a batched product whose batch
  dimensions lead, ``(batch, m, n) @ (batch, n, columns)``: the only form that every
  Apple plugin takes, and several times faster on a CPU than the transposed copies that
  ``tensordot`` or ``einsum`` make there.
* **Precision.** Float32 stays float32. GPUs multiply float32 in TF32 unless told
  otherwise, which costs a truncated Fourier transform three digits. A user who wants
  that says so with ``jax.default_matmul_precision("tensorfloat32")``.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul(
    left: Float[Array, "..."], right: Float[Array, "..."]
) -> Float[Array, "..."]:
    """``left @ right`` at full precision, or at the one that the user has set."""
    return jnp.matmul(left, right, precision=matmul_precision())


def matmul_precision() -> str | None:
    """What to give a product or a convolution as ``precision``; None: the user's."""
    return "highest" if jax.config.jax_default_matmul_precision is None else None


def along_axis(
    matrix: Float[Array, "m n"], x: Float[Array, "..."], axis: int
) -> Float[Array, "..."]:
    """Apply ``matrix`` (m, n) to ``axis`` of ``x``, whose length is n; it becomes m.

    Takes the dtype of ``x``.
    """
    return along_axes(matrix, x, axis, 1)


def along_axes(
    matrix: Float[Array, "m n"], x: Float[Array, "..."], axis: int, count: int
) -> Float[Array, "..."]:
    """Like :func:`along_axis` for ``count`` neighbouring axes taken as one."""
    axis = axis % x.ndim
    before, after = x.shape[:axis], x.shape[axis + count :]
    n = math.prod(x.shape[axis : axis + count])
    if matrix.shape[1] != n:
        raise ValueError(
            f"A matrix with {matrix.shape[1]} columns cannot be applied to {n} values: "
            f"{matrix.shape=}, {x.shape=}, {axis=}, {count=}."
        )
    m, batch, columns = matrix.shape[0], math.prod(before), math.prod(after)
    matrix = matrix.astype(x.dtype)
    if columns == 1:  # one long product instead of many with a single column
        y = matmul(x.reshape(batch, n), matrix.T)
    else:
        matrices = jnp.broadcast_to(matrix, (batch, m, n))
        y = matmul(matrices, x.reshape(batch, n, columns))
    return y.reshape(*before, m, *after)
