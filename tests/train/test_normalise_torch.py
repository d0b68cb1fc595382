"""Normalisers against neuraloperator's UnitGaussianNormalizer."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("neuralop")

from train.normalise import UnitGaussian  # noqa: E402


def theirs(x):
    """Fitted to (samples, *grid, channels) as (samples, channels, *grid)."""
    from neuralop.data.transforms.normalizers import UnitGaussianNormalizer

    channels_first = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    axes = [0, *range(2, x.ndim)]
    normalizer = UnitGaussianNormalizer(dim=axes)
    normalizer.fit(channels_first)
    return normalizer, channels_first


@pytest.mark.parametrize("shape", [(20, 32, 1), (8, 9, 10, 3), (4, 5, 6, 7, 2)])
def test_encoded_and_decoded_values_agree(shape):
    random = np.random.default_rng(0)
    x = (3.0 * random.normal(size=shape) + random.normal(size=shape[-1])).astype("f4")
    fitted = UnitGaussian.fit(x)
    normalizer, channels_first = theirs(x)
    encoded = np.moveaxis(normalizer.transform(channels_first).numpy(), 1, -1)
    np.testing.assert_allclose(fitted.encode(x), encoded, rtol=1e-6, atol=1e-6)
    decoded = normalizer.inverse_transform(normalizer.transform(channels_first))
    np.testing.assert_allclose(
        fitted.decode(fitted.encode(x)),
        np.moveaxis(decoded.numpy(), 1, -1),
        rtol=1e-6,
        atol=1e-6 * np.abs(x).max(),
    )


@pytest.mark.parametrize("scale", [1e-2, 1e-5])
def test_small_fields_differ_by_their_epsilon_alone(scale):
    x = (scale * np.random.default_rng(1).normal(size=(10, 64, 1))).astype(np.float32)
    fitted = UnitGaussian.fit(x)
    normalizer, channels_first = theirs(x)
    encoded = np.moveaxis(normalizer.transform(channels_first).numpy(), 1, -1)
    with_epsilon = fitted.encode(x) * (fitted.std / (fitted.std + 1e-7))
    np.testing.assert_allclose(with_epsilon, encoded, rtol=2e-6, atol=1e-6)
