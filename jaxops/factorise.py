"""Trained dense kernels as a few cheaper ones."""

import numpy as np
from jax.typing import ArrayLike


def factorise(
    kernel: ArrayLike, rank: int, form: str = "separable"
) -> tuple[np.ndarray, np.ndarray, float]:
    """The best depth and plane factors of a dense 3D kernel, by SVD on the host.

    ``"separable"``, for :func:`jaxops.conv3d.separable_conv3d`:

        kernel[t, i, j, c, o] = sum_r depth[r, t, c] plane[r, i, j, c, o]

    a decomposition for each input channel c of its (kd, kh kw out) matrix, exact at
    rank min(kd, kh kw out). It costs rank * (kd in + kh kw in out) products a point,
    against kd kh kw in out of the dense kernel: for 3x3x3 about rank / 3 of it, so that
    rank 1 and 2 save time, and rank 3 is the kernel itself.

    ``"2plus1d"``, for :func:`jaxops.conv3d.conv2plus1d`:

        kernel[t, i, j, c, o] = sum_r plane[i, j, c, r] depth[t, r, o]

    one decomposition of the (kh kw in, kd out) matrix, exact at rank min(kh kw in, kd
    out). It costs rank * (kh kw in + kd out) products a point: with as many channels
    out as in, rank = out takes 4/9 of the time of a dense 3x3x3 kernel, and exactness
    4/3 of it.

    Args:
        kernel: (kd, kh, kw, in, out), on the host or a device.
        rank: terms of the sum, from 1 to that of exactness.
        form: which sum.

    Returns:
        ``depth`` and ``plane`` with these axes, in the dtype of the kernel, and the
        relative error, |kernel - sum| / |kernel| in the Frobenius norm.

    Raises:
        ValueError: for a rank out of reach, another form, or a kernel that has not five
            axes or is not finite.
    """
    dense = np.asarray(kernel)
    if dense.ndim != 5 or not np.all(np.isfinite(dense.astype(np.float64))):
        raise ValueError(
            "kernel is (kd, kh, kw, in, out) of finite numbers; got "
            f"{dense.shape=}, finite: {bool(np.all(np.isfinite(dense)))}."
        )
    kd, kh, kw, inputs, outputs = dense.shape
    wide = dense.astype(np.float64)
    if form == "separable":
        matrices = wide.transpose(3, 0, 1, 2, 4).reshape(inputs, kd, -1)
    elif form == "2plus1d":
        matrices = wide.transpose(1, 2, 3, 0, 4).reshape(kh * kw * inputs, kd * outputs)
    else:
        raise ValueError(f"form is separable or 2plus1d; got {form!r}.")
    exact = min(matrices.shape[-2:])
    if not 1 <= rank <= exact:
        raise ValueError(
            f"rank goes from 1 to {exact}, where the {form} factors of a kernel "
            f"{dense.shape} are exact; got {rank}."
        )
    left, values, right = np.linalg.svd(matrices, full_matrices=False)
    root = np.sqrt(values[..., :rank])  # both factors of one scale, good for training
    left = (left[..., :rank] * root[..., None, :]).astype(dense.dtype)
    right = (right[..., :rank, :] * root[..., None]).astype(dense.dtype)
    if form == "separable":  # left (in, kd, rank), right (in, rank, kh kw out)
        depth = left.transpose(2, 1, 0)
        plane = right.reshape(inputs, rank, kh, kw, outputs).transpose(1, 2, 3, 0, 4)
    else:  # left (kh kw in, rank), right (rank, kd out)
        plane = left.reshape(kh, kw, inputs, rank)
        depth = right.reshape(rank, kd, outputs).transpose(1, 0, 2)
    product = left.astype(np.float64) @ right.astype(np.float64)
    size = np.linalg.norm(matrices)
    error = float(np.linalg.norm(product - matrices) / size) if size else 0.0
    return np.ascontiguousarray(depth), np.ascontiguousarray(plane), error
