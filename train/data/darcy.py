"""Darcy flow: -div(a grad u) = 1 on the unit square, u = 0 on its boundary.

Pairs of a coefficient a and the solution u, as in section 5.2 of Li et al., "Fourier
Neural Operator for Parametric Partial Differential Equations" (arXiv:2010.08895). The
equation is solved on nodes that include the boundary, n an axis at i / (n - 1).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.linalg
from threadpoolctl import threadpool_limits

from train.data import fields
from train.data.cache import DamagedFile, cache_folder, read_arrays, write_arrays
from train.data.pairs import Pairs, make_pairs

logger = logging.getLogger(__name__)

# Part of every cache file's name: raise it when the same settings give other numbers.
SOLVER_VERSION = 1
TRAIN, TEST = 0, 1


@dataclass(frozen=True)
class DarcySettings:
    """What a Darcy data set is made of; equal settings give equal data.

    Sample i of either part depends on the settings and on i, not on the counts.
    """

    kind: Literal["piecewise", "lognormal"] = "piecewise"
    """Coefficient, from a Gaussian random field g drawn from N(0, (-Laplace +
    9 I)^-2), zero Neumann conditions, zero mean: "lognormal" is exp(log_std * g / (g's
    standard deviation)), "piecewise" is 12 where g >= 0 and 3 where g < 0."""

    grid: Literal["midpoints", "nodes"] = "midpoints"
    """Where the n points an axis of a data set lie, out of the fine grid: "midpoints"
    of n cells, (i + 1/2) / n, or "nodes" with both ends, i / (n - 1), as published. An
    FNO sums over them for its Fourier coefficients, with an error of O(1/n^2) over
    midpoints and O(1/n) over nodes, for fields that are not periodic. Measured
    zero-shot errors at twice the resolution were 1.1 to 1.4 times those at the training
    resolution with midpoints, and 2 to 3 times with nodes."""

    fine_resolution: int = 129
    """Nodes an axis, ends included, of the grid on which the equation is solved."""

    train_resolution: int = 32
    """Points an axis of the training grid, a subset of the fine grid: n midpoints need
    a fine resolution of 2 k n + 1, n nodes need k (n - 1) + 1, for an integer k."""

    test_resolutions: tuple[int, ...] = (32, 64)
    """Points an axis of the test grids, which all show the same test samples."""

    num_train: int = 1000
    """Number of training samples."""

    num_test: int = 100
    """Number of test samples; none of them is a training sample."""

    seed: int = 0
    """Seed of all samples, at least 0."""

    num_modes: int = 64
    """Cosines an axis in the random field, at most the fine resolution."""

    log_std: float = 0.5
    """Standard deviation of log(a), averaged over the square ("lognormal" only)."""

    high: float = 12.0
    """Coefficient where the field is not negative ("piecewise" only)."""

    low: float = 3.0
    """Coefficient where the field is negative ("piecewise" only)."""

    def __post_init__(self):
        if self.kind not in ("lognormal", "piecewise"):
            raise ValueError(
                f"kind must be 'lognormal' or 'piecewise', got {self.kind!r}"
            )
        if self.grid not in ("midpoints", "nodes"):
            raise ValueError(f"grid must be 'midpoints' or 'nodes', got {self.grid!r}")
        if self.fine_resolution < 5:
            raise ValueError(
                f"fine_resolution must be at least 5, got {self.fine_resolution}"
            )
        if len(set(self.test_resolutions)) != len(self.test_resolutions):
            raise ValueError(
                f"test_resolutions must differ, got {self.test_resolutions}"
            )
        for resolution in (self.train_resolution, *self.test_resolutions):
            points_of(self, resolution)
        if min(self.num_train, self.num_test) < 1:
            raise ValueError(
                "num_train and num_test must be at least 1, got "
                f"{self.num_train} and {self.num_test}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if not 2 <= self.num_modes <= self.fine_resolution:
            raise ValueError(
                "num_modes must be from 2 to the fine resolution "
                f"{self.fine_resolution}, got {self.num_modes}"
            )
        if not (self.log_std > 0 and self.high > 0 and self.low > 0):
            raise ValueError(
                "log_std, high and low must be positive, got "
                f"{self.log_std}, {self.high} and {self.low}"
            )


def points_of(settings: DarcySettings, resolution: int) -> slice:
    """The nodes of the fine grid, along an axis, that make a grid of `resolution`.

    Raises ValueError, with the resolutions that are possible, if none do.
    """
    intervals = settings.fine_resolution - 1
    steps = {intervals // s: s for s in range(1, intervals) if intervals % s == 0}
    if settings.grid == "midpoints":
        possible = {n: slice(s // 2, None, s) for n, s in steps.items() if s % 2 == 0}
    else:
        possible = {n + 1: slice(0, None, s) for n, s in steps.items()}
    if resolution not in possible:
        raise ValueError(
            f"{resolution} {settings.grid} an axis are no subset of the fine grid of "
            f"{settings.fine_resolution} nodes; possible are {sorted(possible)}"
        )
    return possible[resolution]


def darcy_dataset(
    settings: DarcySettings, progress: Callable[[int, int], None] | None = None
) -> dict:
    """Return {"train": Pairs, "test": {resolution: Pairs}}, from the cache or solved.

    Inputs are the coefficient a, targets the solution u, one channel each. While data
    is made, `progress(done, total)` is called after every sample; a cached data set
    makes no call. The cache file (`cache_folder()`) is named after the settings. One
    that is damaged is made anew, and a cache that cannot be used is done without; the
    log gets one line either way.
    """
    path = cache_folder() / cache_name(settings)
    description = _describe(settings)
    try:
        arrays = read_arrays(path)
        if str(arrays["settings"]) != description:
            raise DamagedFile(f"{path} holds a data set with other settings")
    except FileNotFoundError:
        arrays = None
    except (DamagedFile, OSError) as error:
        logger.warning("%s; making it anew", error)
        arrays = None
    if arrays is None:
        # Threads make these small factorisations slower, and ten times slower where
        # other work keeps the cores busy.
        with threadpool_limits(limits=1, user_api="blas"):
            arrays = _make(settings, progress)
        arrays["settings"] = np.array(description)
        try:
            write_arrays(path, arrays)
        except OSError as error:
            logger.warning("the data set is not cached: %s", error)
    return {
        "train": _pairs(settings, arrays, "train", settings.train_resolution),
        "test": {
            n: _pairs(settings, arrays, "test", n) for n in settings.test_resolutions
        },
    }


def cache_name(settings: DarcySettings) -> str:
    """The cache file's name: the main settings for people, and a hash of all."""
    digest = hashlib.sha256(_describe(settings).encode()).hexdigest()[:16]
    return (
        f"darcy-v{SOLVER_VERSION}-{settings.kind}-{settings.num_train}+"
        f"{settings.num_test}-{settings.fine_resolution}to{settings.train_resolution}"
        f"-seed{settings.seed}-{digest}.npz"
    )


def coefficient(settings: DarcySettings, part: int, index: int) -> np.ndarray:
    """Coefficient a of one sample on the fine grid, (n, n), float64, positive.

    `part` is TRAIN or TEST, `index` counts from 0.
    """
    random = fields.stream(settings.seed, part, index)
    field = fields.gaussian_field(random, settings.fine_resolution, settings.num_modes)
    if settings.kind == "piecewise":
        return np.where(field >= 0.0, settings.high, settings.low)
    scale = settings.log_std / fields.field_deviation(settings.num_modes)
    return np.exp(scale * field)


def solve_darcy(
    coefficient: np.ndarray, forcing: np.ndarray | float = 1.0
) -> np.ndarray:
    """Solve -div(a grad u) = f with u = 0 on the boundary of the unit square.

    `coefficient` (n, n) holds a > 0 at all nodes; `forcing` is a number or (n, n), of
    which only interior nodes count. Returns u (n, n), float64, exact to rounding for
    the discrete equations: five-point finite volumes, whose flux through the face
    between two nodes takes the harmonic mean of their coefficients. The error is
    O(h^2) for smooth a, and also where a jumps half-way between nodes.

    The matrix is banded and positive definite: its Cholesky factorisation costs n^4
    operations at any contrast (on one core, without threads: 1.5 ms for n = 61, 3 ms
    for n = 85, 13 ms for n = 129).

    Raises ValueError for other shapes and for coefficients that are not positive.
    """
    a = np.asarray(coefficient, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.shape[0] < 4:
        raise ValueError(
            f"the coefficient must be (n, n) with n at least 4, got {a.shape}"
        )
    if not (np.isfinite(a).all() and a.min() > 0.0):
        raise ValueError("the coefficient must be positive and finite everywhere")
    n = a.shape[0]
    m = n - 2  # interior nodes an axis; node (i, j) is unknown number i * m + j
    flux_x, flux_y = face_coefficients(a)
    flux_x, flux_y = flux_x[:, 1:-1], flux_y[1:-1, :]  # (m + 1, m), (m, m + 1)
    # Row d of LAPACK's lower band storage is the d-th subdiagonal.
    band = np.zeros((m * m, m + 1)).T
    band[0] = (flux_x[1:] + flux_x[:-1] + flux_y[:, 1:] + flux_y[:, :-1]).reshape(-1)
    along_y = -flux_y[:, 1:]
    along_y[:, -1] = 0.0  # the last node of a row and the first of the next
    band[1] = along_y.reshape(-1)
    band[m, : m * (m - 1)] = -flux_x[1:-1].reshape(-1)
    load = np.broadcast_to(np.asarray(forcing, dtype=np.float64), (n, n))[1:-1, 1:-1]
    solution = np.zeros((n, n))
    solution[1:-1, 1:-1] = scipy.linalg.solveh_banded(
        band, load.reshape(-1) / (n - 1) ** 2, lower=True, overwrite_ab=True
    ).reshape(m, m)
    return solution


def face_coefficients(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Harmonic means of neighbours: (n, n) to (n - 1, n) and (n, n - 1)."""
    return (
        2.0 * a[1:] * a[:-1] / (a[1:] + a[:-1]),
        2.0 * a[:, 1:] * a[:, :-1] / (a[:, 1:] + a[:, :-1]),
    )


def _make(settings, progress):
    """Solve all samples: {"train31_inputs": (samples, n, n, 1) float32, ...}."""
    total = settings.num_train + settings.num_test
    parts = (
        ("train", TRAIN, settings.num_train, (settings.train_resolution,)),
        ("test", TEST, settings.num_test, settings.test_resolutions),
    )
    arrays = {}
    done = 0
    for name, part, count, resolutions in parts:
        for n in resolutions:
            for role in ("inputs", "targets"):
                arrays[f"{name}{n}_{role}"] = np.empty((count, n, n, 1), np.float32)
        for index in range(count):
            a = coefficient(settings, part, index)
            u = solve_darcy(a)
            for n in resolutions:
                along = points_of(settings, n)
                arrays[f"{name}{n}_inputs"][index, ..., 0] = a[along, along]
                arrays[f"{name}{n}_targets"][index, ..., 0] = u[along, along]
            done += 1
            if progress is not None:
                progress(done, total)
    return arrays


def _pairs(settings, arrays, name, n) -> Pairs:
    return make_pairs(
        arrays[f"{name}{n}_inputs"],
        arrays[f"{name}{n}_targets"],
        f"Darcy flow, {settings.kind} coefficient, {name} part, seed {settings.seed}, "
        f"{n} x {n} {settings.grid} of {settings.fine_resolution} nodes an axis",
    )


def _describe(settings) -> str:
    facts = {"solver": SOLVER_VERSION} | dataclasses.asdict(settings)
    return json.dumps(facts, sort_keys=True)
