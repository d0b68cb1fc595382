"""Prints the coefficients of ``jaxops.pointwise.gelu``: ``python tests/fit_gelu.py``.

Phi(x) - 1/2 and gelu'(x) - 1/2 are odd: x P(x^2) / Q(x^2) is fitted to them on
[0, bound], where they reach 1/2 to float32's accuracy, with the largest error as small
as it can be: weighted least squares, the weights of Lawson's iteration.

For half precision x P((x/bound)^2 - 1/2), without a division.
"""

import math

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial import chebyshev as Chebyshev

POINTS, ITERATIONS = 400, 60


def cumulative(x: float) -> float:
    return math.erf(x / math.sqrt(2)) / 2


def slope(x: float) -> float:
    return cumulative(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def fit(function, bound: float, odd_degree: int, even_degree: int):
    """Largest error, coefficients of P and of Q, lowest power first.

    Q is 1/2 at the bound, so that no number passes the largest float before it is
    divided.
    """
    nodes = bound * (1 - np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS)) / 2
    values = np.array([function(x) for x in nodes])
    square = (nodes / bound) ** 2
    powers_of_p = nodes[:, None] * square[:, None] ** np.arange(odd_degree + 1)
    powers_of_q = values[:, None] * square[:, None] ** np.arange(1, even_degree + 1)
    columns = np.concatenate([powers_of_p, -powers_of_q], axis=1)
    weight, denominator = np.ones(POINTS), np.ones(POINTS)
    best = math.inf, None
    for _ in range(ITERATIONS):
        scale = np.sqrt(weight) / denominator
        found = np.linalg.lstsq(columns * scale[:, None], values * scale, rcond=1e-18)
        p, q = np.split(found[0], [odd_degree + 1])
        denominator = 1 + powers_of_q @ q / values
        error = np.abs(powers_of_p @ p / denominator - values)
        best = min(best, (error.max(), (p, np.r_[1, q])), key=lambda pair: pair[0])
        weight = weight * (error / error.max() + 1e-3)
        weight /= weight.sum()
    error, polynomials = best
    scale = 1 / (2 * polynomials[1].sum())
    return error, *(c * scale / bound ** (2.0 * np.arange(len(c))) for c in polynomials)


def fit_polynomial(function, bound: float, count: int):
    """Largest error and ``count`` coefficients of P((x/bound)^2 - 1/2), lowest first.

    At the bound x P is 1/2: 1/(2 bound) + (1/2 - s) R(s), R found as Chebyshev's
    polynomials of 2 s.
    """
    nodes = bound * (1 - np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS)) / 2
    s = (nodes / bound) ** 2 - 0.5
    target = np.array([function(x) for x in nodes]) - nodes / (2 * bound)
    columns = Chebyshev.chebvander(2 * s, count - 2) * (nodes * (0.5 - s))[:, None]
    weight, best = np.ones(POINTS), (math.inf, None)
    for _ in range(5 * ITERATIONS):
        scale = np.sqrt(weight)
        found = np.linalg.lstsq(columns * scale[:, None], target * scale, rcond=1e-18)
        error = np.abs(columns @ found[0] - target)
        best = min(best, (error.max(), found[0]), key=lambda pair: pair[0])
        weight = weight * (error / error.max() + 1e-3)
        weight /= weight.sum()
    error, chebyshev = best
    rest = Polynomial(Chebyshev.cheb2poly(chebyshev))(Polynomial([0, 2]))
    return error, (Polynomial([0.5, -1]) * rest + 1 / (2 * bound)).coef


if __name__ == "__main__":
    for function, bound, degrees in ((cumulative, 5.4, (5, 5)), (slope, 6.0, (7, 6))):
        error, p, q = fit(function, bound, *degrees)
        print(f"{function.__name__} up to {bound}: largest error {error:.1e}")
        print("  P", ", ".join(f"{c:.9g}" for c in p))
        print("  Q", ", ".join(f"{c:.9g}" for c in q))
    for function in (cumulative, slope):
        error, p = fit_polynomial(function, 4.8, 11)
        print(f"{function.__name__} of half precision: largest error {error:.1e}")
        print("  P", ", ".join(f"{c:.9g}" for c in p))
