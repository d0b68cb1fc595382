"""The one matrix product that everything here is made of.

Five rules, kept in this file so that no other has to know them:

* **Shape.** A small matrix is applied along an axis as a batched product whose batch
  dimensions lead, ``(batch, m, n) @ (batch, n, columns)``: the only form that every
  Apple plugin takes, and several times faster on a CPU than the transposed copies that
  ``tensordot`` or ``einsum`` make there.
* **Left operands.** XLA's fast library for CPUs takes those that are contracted along
  their last axis. Others are transposed before, behind a barrier, without which XLA
  would make them the slow form again.
* **Sums.** On a GPU XLA adds a bias or another array to a product in its library, which
  takes slower forms for that and arrays written for it alone. Behind a barrier, which
  ``dense`` and ``spectral_conv`` set, the sum is made by the step that reads it.
* **Rows.** Where a GPU's matrix units multiply, short rows stand side by side as one.
* **Precision.** Float32 stays float32. GPUs multiply float32 in TF32 unless told
  otherwise, which costs a truncated Fourier transform three digits. A user who wants
  that says so with ``jax.default_matmul_precision("tensorfloat32")``.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxops.device import barrier, device_kind, has_barrier

# Of a gradient that is taken in parts: about so many of them, and rows of one: from,
# below. Two operands of 2048 rows and 64 channels take 1 MB.
PARTS, ROWS_OF_A_PART = 64, (512, 2049)
FEW = 4  # inputs, of which a product is a sum
GPU_ROWS = 2**18  # from which on parts were measured to be faster on an H200


def matmul(
    left: Float[Array, "..."], right: Float[Array, "..."]
) -> Float[Array, "..."]:
    """``left @ right`` at full precision, or at the one that the user has set."""
    return jnp.matmul(left, right, precision=matmul_precision())


@jax.custom_jvp
def rows_matmul(
    x: Float[Array, "rows inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "rows outputs"]:
    """``x @ kernel`` of many rows, with fast gradients on CPUs and GPUs.

    The gradient of the kernel is the product of two tall matrices along their rows.
    XLA's fast library for CPUs does not take it: it is taken there in parts whose rows
    lie in the cache, with the gradient of the output transposed, 1.2 to 1.8 times
    faster. On a GPU parts, as one batched product, keep the whole of it busy.
    """
    if is_outer_sum(x, kernel):
        return _outer_sum(x, kernel)
    return _side_by_side(x, kernel)


@rows_matmul.defjvp
def _rows_matmul_derivative(primals, tangents):
    (x, kernel), (x_change, kernel_change) = primals, tangents
    change = _side_by_side(barrier(x_change, "gpu"), kernel)
    return rows_matmul(x, kernel), change + _product_in_parts(x, kernel_change)


def is_outer_sum(x, kernel) -> bool:
    """Whether ``x @ kernel`` is taken as sums, which XLA joins with what reads them.

    It is where there are few inputs, on CPUs and, but for half precision, which XLA
    writes all the same, on GPUs.
    """
    if device_kind() == "metal" or (device_kind() == "gpu" and x.dtype.itemsize < 4):
        return False
    return x.shape[-1] <= FEW < kernel.shape[1]


def _outer_sum(x, kernel):
    shape = x.shape[0], kernel.shape[1]
    dtype = sum_dtype(x)
    columns, rows = x.astype(dtype).T, kernel.astype(dtype)
    terms = [
        jnp.broadcast_to(column[:, None], shape) * jnp.broadcast_to(row, shape)
        for column, row in zip(columns, rows, strict=True)
    ]
    return sum(terms[1:], terms[0]).astype(x.dtype)


def _side_by_side(x, kernel):
    """``x @ kernel``, with several rows as one where a GPU's matrix units multiply.

    The kernel then stands as often on the diagonal of a larger one. These units have
    time for the zeros; rows that are too short for them cost more: 32 to 16 channels
    took 165 us, with four rows as one 62 us, of which reading and writing take 50.
    """
    rows, (inputs, outputs) = x.shape[0], kernel.shape
    count = 1
    while (
        2 * count * max(inputs, outputs) <= 128
        and min(inputs, outputs) >= 8
        and rows % (2 * count) == 0
        and has_matrix_units(x.dtype)
    ):
        count *= 2
    if count == 1:
        return matmul(x, kernel)
    diagonal = jnp.eye(count, dtype=kernel.dtype)
    kernel = diagonal[:, None, :, None] * kernel[None, :, None, :]
    kernel = kernel.reshape(count * inputs, count * outputs)
    return matmul(x.reshape(rows // count, -1), kernel).reshape(rows, outputs)


def has_matrix_units(dtype) -> bool:
    """Of a GPU, for products of that dtype: for float32 where TF32 is allowed."""
    precision = jax.config.jax_default_matmul_precision
    is_full = precision in (None, "highest", "float32", "F32_F32_F32")
    is_short = dtype.itemsize < 4 or (dtype == jnp.float32 and not is_full)
    return device_kind() == "gpu" and is_short


def _product_in_parts(x, kernel):
    """``x @ kernel``; its transpose is the gradient that :func:`rows_matmul` names."""
    rows, inputs = x.shape
    outputs = kernel.shape[1]
    on_gpu = device_kind() == "gpu" and outputs >= 16 and rows >= GPU_ROWS
    transposes_y = has_barrier() and outputs <= inputs  # y: the gradient of the output
    transposes_x = has_barrier() and outputs > inputs >= 32 and outputs < 128
    fitting = [n for n in range(*ROWS_OF_A_PART) if rows >= n and rows % n == 0]
    if not (on_gpu or transposes_y or transposes_x) or not fitting:
        return matmul(x, kernel)
    if on_gpu and has_matrix_units(x.dtype) and x.dtype.itemsize == 4:
        missing = -inputs % 4  # of 16 bytes, which TF32's fast kernels read at once
        x = jnp.pad(x, [(0, 0), (0, missing)])
        kernel, inputs = jnp.pad(kernel, [(0, missing), (0, 0)]), inputs + missing
    count = rows // min(fitting, key=lambda n: abs(math.log(n * PARTS / rows)))
    x = x.reshape(count, rows // count, inputs)
    if on_gpu:
        y = matmul(x, jnp.broadcast_to(kernel, (count, inputs, outputs)))
    elif transposes_x:
        kernels = jnp.broadcast_to(kernel, (count, inputs, outputs))
        y = _flipped_matmul(barrier(_exchanged(x, 2)), kernels)
    else:
        kernels = jnp.broadcast_to(kernel.T, (count, outputs, inputs))
        axes = ((2,), (2,)), ((0,), (0,))
        columns = lax.dot_general(kernels, x, axes, precision=matmul_precision())
        y = _exchanged(barrier(columns), 1)
    return y.reshape(rows, outputs)


@jax.custom_jvp
def batched_matmul(
    left: Float[Array, "batch m n"], right: Float[Array, "batch n columns"]
) -> Float[Array, "batch m columns"]:
    """``left @ right`` of many small matrices, with gradients of the same form.

    As in :func:`along_axes`: the gradient of ``right`` is a plain product with
    ``left``, transposed before, in place of one along the axis that CPUs read slowly.
    """
    return matmul(left, right)


@batched_matmul.defjvp
def _batched_matmul_derivative(primals, tangents):
    (left, right), (left_change, right_change) = primals, tangents
    columns, change_of_columns = (x.transpose(0, 2, 1) for x in (left, left_change))
    if has_barrier():
        change = _flipped_matmul(barrier(change_of_columns), right)
    else:
        change = batched_matmul(left_change, right)
    change += _flipped_matmul(barrier(columns), right_change)
    return batched_matmul(left, right), change


def _exchanged(x: Float[Array, "batch m n"], axis: int) -> Float[Array, "batch n m"]:
    """The last two axes exchanged, ``axis``, of the channels, in blocks of 16.

    Before a plain transpose XLA's CPU compiler of jax 0.12 writes the array once more
    as it lies. A step in 3D takes 0.92 of the time by this.
    """
    batch, m, n = x.shape
    block = math.gcd(x.shape[axis], 16)
    blocks = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    moves = (1, 3) if axis == 2 else (3, 1)
    return jnp.moveaxis(blocks, *moves).reshape(batch, n, m)


def _flipped_matmul(left, right):
    """``left`` transposed, times ``right``: the gradient of ``right`` is a plain
    product with ``left``."""
    axes = ((1,), (1,)), ((0,), (0,))
    return lax.dot_general(left, right, axes, precision=matmul_precision())


def sum_dtype(x):
    """The dtype that sums of x are taken in: half precision would lose many terms."""
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype


def matmul_precision() -> str | None:
    """What to give a product or a convolution as ``precision``; None: the user's."""
    return "highest" if jax.config.jax_default_matmul_precision is None else None


def along_axis(
    matrix: np.ndarray, x: Float[Array, "..."], axis: int
) -> Float[Array, "..."]:
    """Apply ``matrix`` (m, n) to ``axis`` of ``x``, whose length is n; it becomes m.

    The matrix is a constant. It takes the dtype of ``x``.
    """
    return along_axes(matrix, x, axis, 1)


def along_axes(
    matrix: np.ndarray, x: Float[Array, "..."], axis: int, count: int
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
    batch, columns = math.prod(before), math.prod(after)
    matrix = matrix.astype(x.dtype)
    if columns == 1:  # one long product instead of many with a single column
        y = matmul(x.reshape(batch, n), jnp.asarray(matrix.T))
    else:
        y = _batched(matrix)(x.reshape(batch, n, columns))
    return y.reshape(*before, matrix.shape[0], *after)


def _batched(matrix: np.ndarray) -> Callable:
    """x (batch, n, columns) to ``matrix @ x``, with a gradient of the same form.

    The derivative contracts the transposed matrix along its first axis. Its transpose,
    which is what a gradient runs, is then a plain product with that matrix, where JAX's
    own would contract this matrix along the axis that CPUs read slowly.
    """

    def broadcast(constant: np.ndarray, batch: int):
        return jnp.broadcast_to(jnp.asarray(constant), (batch, *constant.shape))

    @jax.custom_jvp
    def apply(x):
        return matmul(broadcast(matrix, x.shape[0]), x)

    @apply.defjvp
    def apply_to_tangent(primals, tangents):
        (x,), (tangent,) = primals, tangents
        transposed = broadcast(matrix.T, x.shape[0])
        return apply(x), _flipped_matmul(transposed, barrier(tangent, "gpu"))

    return apply
