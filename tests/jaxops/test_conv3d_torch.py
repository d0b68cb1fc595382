"""The golden file of 3D convolution holds what PyTorch says now."""

import warnings

import numpy as np
import pytest
from conv3d_cases import CASES, golden, reference

torch = pytest.importorskip("torch")


def test_the_golden_file_has_each_case_and_no_other():
    assert list(golden()) == list(CASES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_golden_values_are_pytorchs(case):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
        expected = reference(case)
    for found, value in zip(golden()[case.name], expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)
