"""The Darcy solver against analysis, and the data sets that it makes."""

import dataclasses

import numpy as np
import pytest

from train.data.darcy import (
    TEST,
    TRAIN,
    DarcySettings,
    coefficient,
    darcy_dataset,
    face_coefficients,
    points_of,
    solve_darcy,
)

SMALL = DarcySettings(
    kind="lognormal",
    log_std=1.0,
    fine_resolution=17,
    train_resolution=4,
    test_resolutions=(4, 8),
    num_train=3,
    num_test=2,
    num_modes=8,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, which does not exist yet."""
    monkeypatch.setenv("JAXOPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mesh(n):
    nodes = np.linspace(0.0, 1.0, n)
    return np.meshgrid(nodes, nodes, indexing="ij")


def order(errors):
    """Observed orders of convergence between grids of halved spacing."""
    return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))


def test_solver_is_second_order_for_a_smooth_coefficient():
    errors = []
    for n in (17, 33, 65):
        x, y = mesh(n)
        a = 2.0 + np.cos(np.pi * x) * np.sin(2 * np.pi * y) + x
        a_x = 1.0 - np.pi * np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        a_y = 2 * np.pi * np.cos(np.pi * x) * np.cos(2 * np.pi * y)
        u = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        u_x = np.pi * np.cos(np.pi * x) * np.sin(2 * np.pi * y)
        u_y = 2 * np.pi * np.sin(np.pi * x) * np.cos(2 * np.pi * y)
        forcing = -(a_x * u_x + a_y * u_y - 5 * np.pi**2 * a * u)
        errors.append(np.abs(solve_darcy(a, forcing) - u).max())
    assert np.all(np.abs(order(errors) - 2.0) < 0.1)
    assert errors[-1] < 2e-3


def test_solver_meets_the_series_for_a_constant_coefficient():
    def exact(n, a):
        x, y = mesh(n)
        u = np.zeros((n, n))
        for m in range(1, 400, 2):
            k = m * np.pi
            # cosh(k (y - 1/2)) / cosh(k / 2), written so that nothing overflows
            ratio = np.exp(k * (np.abs(y - 0.5) - 0.5))
            ratio *= (1 + np.exp(-2 * k * np.abs(y - 0.5))) / (1 + np.exp(-k))
            u += 4 / (a * k**3) * (1 - ratio) * np.sin(k * x)
        return u

    coarse, fine = (solve_darcy(np.full((n, n), 3.0)) for n in (33, 65))
    errors = [np.abs(u - exact(len(u), 3.0)).max() for u in (coarse, fine)]
    assert abs(order(errors)[0] - 2.0) < 0.1
    # Extrapolation leaves O(h^4), and more near the corners, where u is not smooth.
    extrapolated = (4 * fine[::2, ::2] - coarse) / 3
    assert np.abs(extrapolated - exact(33, 3.0)).max() < 2e-2 * errors[0]


def test_solution_turns_with_the_coefficient():
    a = np.exp(np.random.default_rng(0).normal(size=(12, 12)))
    u = solve_darcy(a)
    np.testing.assert_allclose(solve_darcy(a.T), u.T, rtol=1e-12)
    np.testing.assert_allclose(solve_darcy(a[::-1]), u[::-1], rtol=1e-12)
    np.testing.assert_allclose(solve_darcy(5.0 * a), u / 5.0, rtol=1e-12)
    assert u[1:-1, 1:-1].min() > 0.0  # the maximum principle
    assert not u[[0, -1]].any() and not u[:, [0, -1]].any()


def test_solution_operator_is_self_adjoint():
    random = np.random.default_rng(1)
    a = np.where(random.normal(size=(14, 14)) > 0, 12.0, 3.0)
    f, g = random.normal(size=(2, 14, 14))
    f_solved, g_solved = solve_darcy(a, f), solve_darcy(a, g)
    assert np.sum(f_solved * g) == pytest.approx(np.sum(f * g_solved), rel=1e-11)


def test_what_flows_out_is_what_the_source_brings():
    n = 23
    a = np.exp(np.random.default_rng(2).normal(size=(n, n)))
    u = solve_darcy(a)
    along_x, along_y = face_coefficients(a)
    # Flux through the outermost faces; u = 0 beyond them. Edge length h over gap h.
    outflow = (along_x[0] * u[1] + along_x[-1] * u[-2]).sum()
    outflow += (along_y[:, 0] * u[:, 1] + along_y[:, -1] * u[:, -2]).sum()
    assert outflow == pytest.approx((n - 2) ** 2 / (n - 1) ** 2, rel=1e-12)


def test_flux_is_continuous_where_the_coefficient_jumps():
    """u = g(x) sin(pi y), with u and a u_x continuous at x = 1/2, between two nodes."""
    left, right, middle = 12.0, 3.0, 0.3
    errors, jumps = [], []
    for n in (16, 32, 64):
        x, y = mesh(n)
        s = x - 0.5
        a = np.where(s < 0, left, right)
        bend = np.where(s < 0, 2 / left - 4 * middle, -2 / right - 4 * middle)
        g = middle + s / a + bend * s**2  # a g' = 1 at s = 0, g = 0 at both ends
        forcing = a * (np.pi**2 * g - 2 * bend) * np.sin(np.pi * y)
        u = solve_darcy(a, forcing)
        errors.append(np.abs(u - g * np.sin(np.pi * y)).max())
        # Slopes at the jump from three nodes at h/2, 3h/2 and 5h/2 on either side.
        slope = np.array([-2.0, 3.0, -1.0]) * (n - 1)
        flux_right = right * (slope @ u[n // 2 : n // 2 + 3])
        flux_left = -left * (slope @ u[n // 2 - 1 : n // 2 - 4 : -1])
        exact = np.sin(np.pi * y[0])
        jumps.append(np.abs(flux_left - flux_right).max())
        assert np.abs(flux_right - exact).max() < 20.0 / n**2
    assert np.all(np.abs(order(errors) - 2.0) < 0.15)
    assert np.all(order(jumps) > 1.8)
    assert jumps[-1] < 1e-2


@pytest.mark.parametrize(
    "a, message",
    [
        (np.ones((4, 5)), "must be \\(n, n\\)"),
        (np.ones((3, 3)), "at least 4"),
        (np.zeros((4, 4)), "positive and finite"),
        (np.full((4, 4), np.nan), "positive and finite"),
        (np.full((4, 4), np.inf), "positive and finite"),
    ],
)
def test_solver_refuses(a, message):
    with pytest.raises(ValueError, match=message):
        solve_darcy(a)


def test_smallest_grid():
    u = solve_darcy(np.ones((4, 4)))  # all interior nodes alike: 4 u - 2 u = h^2
    np.testing.assert_allclose(u[1:-1, 1:-1], 1 / 18, rtol=1e-14)


def test_one_seed_gives_one_set_on_every_machine():
    settings = dataclasses.replace(SMALL, kind="lognormal", log_std=0.5)
    a = coefficient(settings, TRAIN, 0)
    # Written by the first version: any change must raise SOLVER_VERSION.
    golden = [
        2.3616402739224926,
        2.209334328772788,
        0.3266487208161124,
        0.7580155897898128,
    ]
    np.testing.assert_allclose(a[[0, 0, -1, -1], [0, -1, 0, -1]], golden, rtol=1e-12)
    assert not np.array_equal(a, coefficient(settings, TEST, 0))
    other = dataclasses.replace(settings, seed=1)
    assert not np.array_equal(a, coefficient(other, TRAIN, 0))


def test_kinds_of_coefficient():
    piecewise = dataclasses.replace(SMALL, kind="piecewise")
    smooth = dataclasses.replace(SMALL, kind="lognormal", log_std=0.7)
    a = np.stack([coefficient(piecewise, TRAIN, i) for i in range(50)])
    logs = np.log(np.stack([coefficient(smooth, TRAIN, i) for i in range(300)]))
    assert set(np.unique(a)) == {3.0, 12.0}
    np.testing.assert_array_equal(a == 12.0, logs[:50] >= 0.0)
    trapezoid = np.ones(17)
    trapezoid[[0, -1]] = 0.5
    weights = np.outer(trapezoid, trapezoid) / 16**2
    # 300 fields with some 3 effective modes each: 5 % is about three deviations.
    assert np.sqrt((logs**2 * weights).sum((1, 2)).mean()) == pytest.approx(
        0.7, rel=0.1
    )


@pytest.mark.parametrize("kind", ["lognormal", "piecewise"])
@pytest.mark.parametrize("grid, coarse, fine", [("midpoints", 4, 8), ("nodes", 5, 17)])
def test_data_is_the_fine_solution_at_its_points(kind, grid, coarse, fine):
    settings = dataclasses.replace(
        SMALL,
        kind=kind,
        grid=grid,
        train_resolution=coarse,
        test_resolutions=(coarse, fine),
    )
    sets = darcy_dataset(settings)
    assert list(sets["test"]) == [coarse, fine]
    for part, resolution, pairs in (
        (TRAIN, coarse, sets["train"]),
        (TEST, coarse, sets["test"][coarse]),
        (TEST, fine, sets["test"][fine]),
    ):
        assert pairs.inputs.shape == (3 - part, resolution, resolution, 1)
        assert pairs.targets.shape == pairs.inputs.shape
        for array in (pairs.inputs, pairs.targets):
            assert array.dtype == np.float32 and array.flags.c_contiguous
        for i in range(len(pairs)):
            a = coefficient(settings, part, i)
            along = points_of(settings, resolution)
            np.testing.assert_array_equal(
                pairs.inputs[i, ..., 0], a[along, along].astype(np.float32)
            )
            np.testing.assert_array_equal(
                pairs.targets[i, ..., 0],
                solve_darcy(a)[along, along].astype(np.float32),
            )


@pytest.mark.parametrize("grid", ["midpoints", "nodes"])
def test_points_lie_where_the_settings_say(grid):
    fine, resolution = (97, 24) if grid == "midpoints" else (85, 29)
    settings = DarcySettings(
        grid=grid,
        fine_resolution=fine,
        train_resolution=resolution,
        test_resolutions=(resolution,),
    )
    points = np.linspace(0, 1, fine)[points_of(settings, resolution)]
    if grid == "midpoints":
        np.testing.assert_allclose(points, (np.arange(24) + 0.5) / 24, rtol=1e-14)
    else:
        np.testing.assert_allclose(points, np.arange(29) / 28, rtol=1e-14)


def test_samples_do_not_depend_on_the_counts():
    few = darcy_dataset(SMALL)
    many = darcy_dataset(dataclasses.replace(SMALL, num_train=5, num_test=4))
    np.testing.assert_array_equal(few["train"].targets, many["train"].targets[:3])
    for n in (4, 8):
        np.testing.assert_array_equal(
            few["test"][n].targets, many["test"][n].targets[:2]
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "smooth"}, "kind must be 'lognormal' or 'piecewise', got 'smooth'"),
        ({"grid": "cells"}, "grid must be 'midpoints' or 'nodes', got 'cells'"),
        ({"fine_resolution": 4}, "fine_resolution must be at least 5, got 4"),
        ({"train_resolution": 5}, r"5 midpoints .* possible are \[2, 4, 8\]"),
        ({"test_resolutions": (4, 16)}, r"16 midpoints .* of 17 nodes"),
        ({"grid": "nodes"}, r"4 nodes .* possible are \[3, 5, 9, 17\]"),
        ({"test_resolutions": (4, 4)}, r"must differ, got \(4, 4\)"),
        ({"num_test": 0}, "at least 1, got 3 and 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"num_modes": 18}, "from 2 to the fine resolution 17, got 18"),
        ({"log_std": 0.0}, "must be positive, got 0.0"),
        ({"low": float("nan")}, "must be positive"),
    ],
)
def test_settings_refuse(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
