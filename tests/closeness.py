"""How parity tests compare: the largest error, relative to the largest value."""

import numpy as np


def assert_close(value, expected, tolerance, floor=0.0, what=""):
    """Hold the error to ``tolerance`` times the largest expected value or ``floor``."""
    expected = np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(), floor)
    error = np.abs(np.asarray(value, np.float64) - expected).max()
    assert error <= tolerance * scale, f"{what}: {error / scale:.1e} of {scale:.1e}"
