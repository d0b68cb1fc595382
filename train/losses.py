"""Relative errors between a predicted and a true field, for training and for tests.

Fields are channels last, ``(batch, *grid, channels)``, on one to three grid axes. A
sample has one norm over its grid and all its channels; a loss is the mean over samples:

    relative_l2 = mean_i  ||p_i - t_i|| / max(||t_i||, FLOOR * rms_j ||t_j||)

and ``relative_h1`` the same with ``||f||^2 + sum_a ||df/dx_a||^2`` for ``||f||^2``, the
domain of every axis being of length one.

The floor is for targets that are zero, or all but zero, for which a relative error
means nothing: they are measured against a thousandth of the root mean square norm of
the targets given together. Where every target is zero the error is absolute (the root
mean square of the prediction).

Squares are taken after division by the largest magnitude, and added up in float32
whatever the dtype of the fields, so neither half precision nor values such as 1e-25 or
1e+25 under- or overflow. The gradient where prediction equals target is zero.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

FLOOR = 1e-3


def relative_l2(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Mean over the samples of the relative L2 error.

    Args:
        prediction: (batch, *grid, channels), any float dtype.
        target: of the same shape.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: if the shapes differ or leave no grid axis.
    """
    return jnp.mean(_ratio(*l2_norms(prediction, target)))


def relative_h1(
    prediction: jax.Array, target: jax.Array, periodic: bool | Sequence[bool] = True
) -> jax.Array:
    """Mean over the samples of the relative H1 (Sobolev) error.

    Derivatives are central differences with spacing 1/n. ``periodic`` (one for all
    axes, or one an axis) wraps them around; otherwise the first and the last point get
    one-sided differences of third order, which need four points.

    Args:
        prediction: (batch, *grid, channels), any float dtype.
        target: of the same shape.
        periodic: whether the fields repeat beyond the grid.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: if the shapes differ, ``periodic`` does not fit the grid, or an axis
            that is not periodic has fewer than four points.
    """
    return jnp.mean(_ratio(*h1_norms(prediction, target, periodic)))


def l2_norms(prediction: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L2 norms (root mean squares) of the error and of the target, each (batch,)."""
    prediction, target = _checked(prediction, target)
    return _norm([prediction - target]), _norm([target])


def h1_norms(
    prediction: jax.Array, target: jax.Array, periodic: bool | Sequence[bool] = True
) -> tuple[jax.Array, jax.Array]:
    """H1 norms of the error and of the target, each (batch,); see `relative_h1`."""
    prediction, target = _checked(prediction, target)
    num_axes = target.ndim - 2
    flags = [periodic] * num_axes if isinstance(periodic, bool) else list(periodic)
    if len(flags) != num_axes:
        raise ValueError(
            f"periodic must be one flag, or one for each of the {num_axes} grid axes; "
            f"got {periodic!r} for {target.shape=}."
        )
    error = prediction - target  # differencing is linear: one pass less than two fields

    def terms(field):
        slopes = [_difference(field, axis + 1, flag) for axis, flag in enumerate(flags)]
        return [field, *slopes]

    return _norm(terms(error)), _norm(terms(target))


def _checked(prediction, target):
    if prediction.shape != target.shape or target.ndim < 3:
        raise ValueError(
            "prediction and target must have one shape (batch, *grid, channels) with "
            f"at least one grid axis; got {prediction.shape=}, {target.shape=}."
        )
    return prediction.astype(jnp.float32), target.astype(jnp.float32)


def _norm(fields):
    """Root of the summed mean squares of (batch, *grid, channels) fields: (batch,)."""
    flat = [field.reshape(field.shape[0], -1) for field in fields]  # (batch, points)
    largest = jnp.stack([jnp.max(jnp.abs(field), axis=1) for field in flat])
    scale = jax.lax.stop_gradient(jnp.max(largest, axis=0))  # (batch,)
    scale = jnp.where(scale > 0, scale, 1.0)
    square = sum(jnp.mean((field / scale[:, None]) ** 2, axis=1) for field in flat)
    # The root's slope at zero is infinite: keep zeros away from it, not from the sum.
    is_zero = square == 0
    return scale * jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square)))


def _ratio(error_norm, target_norm):
    """Relative error of each sample, the targets of this batch giving the floor."""
    scale = jnp.max(target_norm)
    scale = jnp.where(scale > 0, scale, 1.0)
    typical = scale * jnp.sqrt(jnp.mean((target_norm / scale) ** 2))
    denominator = jnp.maximum(target_norm, FLOOR * typical)
    return error_norm / jnp.where(denominator > 0, denominator, 1.0)


def _difference(field, axis, periodic):
    """First derivative along an axis of length one."""
    num_points = field.shape[axis]
    if periodic:
        ahead, behind = jnp.roll(field, -1, axis), jnp.roll(field, 1, axis)
        return (ahead - behind) * (num_points / 2)
    if num_points < 4:
        raise ValueError(
            "Differences on an axis that is not periodic need at least 4 points; got "
            f"{num_points} on axis {axis} of {field.shape=}. Use periodic=True or the "
            "L2 loss."
        )

    def part(start, stop):
        return jax.lax.slice_in_dim(field, start, stop, axis=axis)

    def point(index):
        return part(index % num_points, index % num_points + 1)

    inner = (part(2, num_points) - part(0, num_points - 2)) / 2
    # Third order: -11/6, 3, -3/2, 1/3 (Fornberg 1988, table 3).
    first = (-11 * point(0) + 18 * point(1) - 9 * point(2) + 2 * point(3)) / 6
    last = (11 * point(-1) - 18 * point(-2) + 9 * point(-3) - 2 * point(-4)) / 6
    return jnp.concatenate([first, inner, last], axis=axis) * num_points
