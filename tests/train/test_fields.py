"""Random fields against the theory of their covariance."""

import numpy as np
import pytest
import scipy.stats

from train.data import fields


def mesh(n):
    nodes = np.linspace(0.0, 1.0, n)
    return np.meshgrid(nodes, nodes, indexing="ij")


def test_field_has_the_covariance_of_the_theory():
    num_samples, num_points, num_modes = 4000, 4, 6
    samples = np.stack(
        [
            fields.gaussian_field(fields.stream(7, i), num_points, num_modes)
            for i in range(num_samples)
        ]
    ).reshape(num_samples, -1)
    x, y = (axis.reshape(-1) for axis in mesh(num_points))
    theory = np.zeros((num_points**2, num_points**2))
    for k in range(num_modes):
        for m in range(num_modes):
            if k + m > 0:
                wave = np.cos(np.pi * k * x) * np.cos(np.pi * m * y)
                wave *= np.sqrt(2) ** ((k > 0) + (m > 0))
                theory += np.outer(wave, wave) / (np.pi**2 * (k**2 + m**2) + 9) ** 2
    variance = np.diag(theory)
    # Standard deviations of the sample mean and of the sample covariance.
    mean_error = np.sqrt(variance / num_samples)
    error = np.sqrt((np.outer(variance, variance) + theory**2) / num_samples)
    assert np.all(np.abs(samples.mean(axis=0)) < 4.5 * mean_error)
    assert np.all(np.abs(samples.T @ samples / num_samples - theory) < 4.5 * error)


def test_field_has_its_mean_variance_and_no_mean():
    # Gauss-Legendre nodes integrate the cosines over the square to rounding.
    nodes, weights = np.polynomial.legendre.leggauss(60)
    waves = np.cos(np.pi * np.outer((nodes + 1) / 2, np.arange(8)))
    waves[:, 1:] *= np.sqrt(2)
    gram = waves.T @ (weights[:, None] / 2 * waves)
    np.testing.assert_allclose(gram, np.eye(8), atol=1e-12)
    np.testing.assert_allclose(  # those of the code, at nodes that both have
        fields.cosines(3, 8)[[0, 2]],
        np.where(np.arange(8) > 0, np.sqrt(2), 1) * [[1.0] * 8, [1.0, -1.0] * 4],
        atol=1e-14,
    )
    assert fields.spectrum(8)[0, 0] == 0.0
    sums = sum(
        1 / (np.pi**2 * (k * k + m * m) + 9) ** 2
        for k in range(8)
        for m in range(8)
        if k + m
    )
    assert fields.field_deviation(8) == pytest.approx(np.sqrt(sums), rel=1e-14)


def test_field_is_one_function_on_every_grid():
    coarse = fields.gaussian_field(fields.stream(3, 1), 9, 8)
    fine = fields.gaussian_field(fields.stream(3, 1), 33, 8)
    np.testing.assert_allclose(fine[::4, ::4], coarse, rtol=1e-12, atol=1e-15)


def test_normals_are_normal_and_come_from_the_raw_stream():
    draws = fields.standard_normals(fields.stream(5), 20001)
    assert draws.shape == (20001,)
    assert scipy.stats.kstest(draws, "norm").pvalue > 0.01
    assert abs(np.corrcoef(draws[:-1:2], draws[1::2])[0, 1]) < 0.03
    u, v = np.random.Generator(fields.stream(5)).random(2)
    expected = np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)
    assert draws[0] == pytest.approx(expected, rel=1e-12)
