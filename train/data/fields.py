"""Gaussian random fields on the unit square, as cosine series.

One seed gives one field on every machine and with every numpy: only the raw 64-bit
stream of PCG64 is used, which numpy keeps for ever, while the methods of its
`Generator` may change.
"""

from __future__ import annotations

import functools

import numpy as np

INVERSE_LENGTH_SQUARED = 9.0


@functools.cache
def spectrum(num_modes: int) -> np.ndarray:
    """Standard deviations of the coefficients, (num_modes, num_modes), float64.

    Entry (k, l) is the square root 1 / (pi^2 (k^2 + l^2) + 9) of the eigenvalue of
    (-Laplace + 9 I)^-2 with zero Neumann conditions that belongs to the cosine
    cos(pi k x) cos(pi l y). Entry (0, 0) is 0: fields have zero mean over the square,
    as in the published data of arXiv:2010.08895, section 5.2.
    """
    wavenumbers = np.pi * np.arange(num_modes)
    eigenvalues = wavenumbers[:, None] ** 2 + wavenumbers**2 + INVERSE_LENGTH_SQUARED
    deviations = 1.0 / eigenvalues
    deviations[0, 0] = 0.0
    deviations.flags.writeable = False
    return deviations


@functools.cache
def cosines(num_points: int, num_modes: int) -> np.ndarray:
    """Cosines of unit norm on [0, 1] at equidistant nodes, both ends included.

    Returns (num_points, num_modes), float64: 1 for mode 0, sqrt(2) cos(pi k x) else.
    """
    nodes = np.arange(num_points) / (num_points - 1)
    matrix = np.cos(np.pi * np.outer(nodes, np.arange(num_modes)))
    matrix[:, 1:] *= np.sqrt(2.0)
    matrix.flags.writeable = False
    return matrix


def gaussian_field(
    random: np.random.PCG64, num_points: int, num_modes: int
) -> np.ndarray:
    """Draw a field from N(0, (-Laplace + 9 I)^-2), its mean removed.

    Returns (num_points, num_points), float64, values at the nodes (i, j) / (num_points
    - 1). The same state of `random` gives the same function at every `num_points`.
    """
    coefficients = standard_normals(random, num_modes**2).reshape(num_modes, num_modes)
    basis = cosines(num_points, num_modes)
    return basis @ (spectrum(num_modes) * coefficients) @ basis.T


def field_deviation(num_modes: int) -> float:
    """Root of the field's variance, averaged over the square."""
    # The cosines have unit norm: the mean variance is the sum of the eigenvalues.
    return float(np.sqrt(np.sum(spectrum(num_modes) ** 2)))


def stream(seed: int, *path: int) -> np.random.PCG64:
    """A random stream of its own for each seed and path, e.g. (part, sample)."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=path))


def standard_normals(random: np.random.PCG64, count: int) -> np.ndarray:
    """`count` independent N(0, 1) numbers, float64 (Box and Muller's method)."""
    raw = random.random_raw(2 * ((count + 1) // 2))
    uniforms = (raw >> np.uint64(11)) * 2.0**-53  # in [0, 1), multiples of 2^-53
    radius = np.sqrt(-2.0 * np.log1p(-uniforms[0::2]))
    angle = 2.0 * np.pi * uniforms[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return pairs.reshape(-1)[:count]
