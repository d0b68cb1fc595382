"""Losses against numpy in float64, analysis, and neuraloperator's own numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import losses

pytestmark = pytest.mark.usefixtures("quick_compilation")
GRIDS = [(17,), (8, 9), (5, 6, 4)]
relative_l2 = jax.jit(losses.relative_l2)
relative_h1 = jax.jit(losses.relative_h1, static_argnames="periodic")
GRADIENTS = {f: jax.jit(jax.grad(f)) for f in (relative_l2, relative_h1)}


def fields(grid, channels=1, batch=3, seed=0):
    random = np.random.default_rng(seed)
    shape = (batch, *grid, channels)
    return tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))


def reference_norm(field, periodic):
    """H1 norm of each sample in float64, by np.gradient's sibling: an explicit stencil.

    Returns (L2 norm, H1 norm), each the root of a mean square over grid and channels,
    channels added up as parts of one vector.
    """
    field = field.astype(np.float64)
    axes = range(1, field.ndim - 1)
    total = value = (field**2).mean(axis=tuple(range(1, field.ndim)))
    for axis, wraps in zip(axes, periodic, strict=True):
        n = field.shape[axis]
        matrix = np.zeros((n, n))
        for i in range(n):
            matrix[i, (i + 1) % n] += n / 2
            matrix[i, (i - 1) % n] -= n / 2
        if not wraps:
            one_sided = np.array([-11, 18, -9, 2]) * n / 6
            matrix[[0, -1]] = 0
            matrix[0, :4], matrix[-1, -4:] = one_sided, -one_sided[::-1]
        slope = np.moveaxis(np.tensordot(matrix, field, (1, axis)), 0, axis)
        total = total + (slope**2).mean(axis=tuple(range(1, field.ndim)))
    return np.sqrt(value), np.sqrt(total)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("periodic", [True, False, "first"])
def test_values_are_those_of_float64(grid, periodic):
    prediction, target = fields(grid, channels=2)
    if periodic == "first":
        periodic = (True,) + (False,) * (len(grid) - 1)
    flags = np.broadcast_to(periodic, len(grid))
    error, size = (reference_norm(f, flags) for f in (prediction - target, target))
    l2 = relative_l2(prediction, target)
    np.testing.assert_allclose(l2, (error[0] / size[0]).mean(), rtol=1e-6)
    h1 = relative_h1(prediction, target, periodic=periodic)
    np.testing.assert_allclose(h1, (error[1] / size[1]).mean(), rtol=1e-6)


def test_slope_of_a_sine_and_of_a_cubic():
    n = 256
    x = np.arange(n) / n
    sine = jnp.asarray(np.sin(2 * np.pi * x), jnp.float32)[None, :, None]
    _, norm = losses.h1_norms(sine, sine)
    # sqrt(1/2 + (2 pi)^2 / 2), less the O(h^2) of central differences
    np.testing.assert_allclose(norm[0], np.sqrt(0.5 + 2 * np.pi**2), rtol=2e-4)
    # The one-sided differences are exact for cubics, at both ends.
    cubic = jnp.asarray(x**3 - x, jnp.float32)[None, :, None]
    slope = losses._difference(cubic, 1, False)[0, :, 0]
    np.testing.assert_allclose(slope[0], -1.0, rtol=1e-3)
    np.testing.assert_allclose(slope[-1], 3 * x[-1] ** 2 - 1, rtol=1e-3)


@pytest.mark.parametrize("grid", GRIDS)
def test_neuraloperator_gives_the_same(grid):
    torch = pytest.importorskip("torch")
    peers = pytest.importorskip("neuralop.losses")
    prediction, target = fields(grid)
    there = [torch.tensor(np.moveaxis(f, -1, 1)) for f in (prediction, target)]
    d, batch = len(grid), len(target)
    # Theirs adds up over the batch; ours is the mean.
    l2 = peers.LpLoss(d=d, p=2)(*there).item() / batch
    np.testing.assert_allclose(relative_l2(prediction, target), l2, rtol=1e-6)
    for periodic in (True, False):
        flags = {f"periodic_in_{axis}": periodic for axis in "xyz"}
        h1 = peers.H1Loss(d=d, **flags)(*there).item() / batch
        np.testing.assert_allclose(
            relative_h1(prediction, target, periodic=periodic), h1, rtol=1e-6
        )


@pytest.mark.parametrize("loss", [relative_l2, relative_h1])
class TestEdges:
    def test_gradient_is_that_of_finite_differences(self, loss):
        prediction, target = (jnp.asarray(f) for f in fields((6, 5), channels=2))
        gradient = GRADIENTS[loss](prediction, target)
        direction = jnp.asarray(fields((6, 5), channels=2, seed=1)[0])
        step = 1e-2
        ahead, behind = (
            loss(prediction + sign * direction, target) for sign in (step, -step)
        )
        np.testing.assert_allclose(
            jnp.sum(gradient * direction), (ahead - behind) / (2 * step), rtol=1e-3
        )

    def test_gradient_is_zero_where_prediction_equals_target(self, loss):
        _, target = (jnp.asarray(f) for f in fields((6, 5)))
        for field in (target, 0 * target):
            assert loss(field, field) == 0
            assert not GRADIENTS[loss](field, field).any()

    def test_a_zero_target_is_measured_against_the_others(self, loss):
        prediction, target = (jnp.asarray(f) for f in fields((6, 5)))
        target = target.at[0].set(0)
        value = loss(prediction, target)
        # One sample of three, off by about the size of the others: a thousandfold.
        assert 100 < value < 1000
        assert jnp.isfinite(GRADIENTS[loss](prediction, target)).all()

    def test_all_zero_targets_give_the_absolute_error(self, loss):
        ones = jnp.ones((2, 6, 5, 1))
        np.testing.assert_allclose(loss(ones, 0 * ones), 1.0, rtol=1e-6)

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
    def test_units_do_not_matter(self, loss, scale):
        prediction, target = (jnp.asarray(f) for f in fields((6, 5)))
        value = loss(prediction * scale, target * scale)
        np.testing.assert_allclose(value, loss(prediction, target), rtol=1e-5)

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    def test_half_precision_adds_up_in_float32(self, loss, dtype):
        prediction, target = (
            (300 * jnp.asarray(f)).astype(dtype) for f in fields((64, 64))
        )
        value = loss(prediction, target)
        assert value.dtype == jnp.float32
        exact = loss(prediction.astype(jnp.float32), target.astype(jnp.float32))
        np.testing.assert_allclose(value, exact, rtol=1e-6)
        assert GRADIENTS[loss](prediction, target).dtype == dtype

    def test_shapes_that_differ_are_refused(self, loss):
        with pytest.raises(
            ValueError, match="one shape .* prediction.shape=\\(3, 6, 5"
        ):
            loss(jnp.zeros((3, 6, 5, 1)), jnp.zeros((3, 6, 5, 2)))
        with pytest.raises(ValueError, match="at least one grid axis"):
            loss(jnp.zeros((3, 6)), jnp.zeros((3, 6)))


def test_boundaries_that_do_not_fit_are_refused():
    field = jnp.zeros((1, 3, 8, 1))
    with pytest.raises(ValueError, match="at least 4 points; got 3 on axis 1"):
        losses.relative_h1(field, field, periodic=False)
    with pytest.raises(ValueError, match="each of the 2 grid axes"):
        losses.relative_h1(field, field, periodic=[True])
