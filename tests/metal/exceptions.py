"""What is known to go wrong on the way to Metal, and what a user does instead.

Each is tested to go wrong still (test_shaders.py), so that none outlives its cause.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from metal.lanes import SHADER_TOLERANCE, Lanes, Reference, reference, reference_of

from models.export import ExportError


class Known(NamedTuple):
    """A fault of a tool on the way to Metal.

    Attributes:
        what: the operation or form of a program.
        lane: where it goes wrong.
        why: as far as it was seen.
        instead: what a user does, or this project does for them.
        still: whether it goes wrong, given ``Lanes``.
    """

    what: str
    lane: str
    why: str
    instead: str
    still: Callable[[Lanes], bool]


def _wrong_shaders(lanes: Lanes, expected: Reference, **options) -> bool:
    errors = lanes.shader_errors(expected, **options)
    return max(errors) > 100 * SHADER_TOLERANCE[expected.dtype]


def _norm_in_one_kernel(lanes: Lanes) -> bool:
    return _wrong_shaders(lanes, reference("FNO1D", "forward"), lone_sums=False)


def _bfloat16(lanes: Lanes) -> bool:
    try:
        lanes.metal(reference("FNO2D", "forward", "bfloat16"))
    except ExportError:
        return True
    return False


def _grouped_convolution(lanes: Lanes) -> bool:
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )

    random = np.random.default_rng(0)
    shapes = (1, 4, 4, 4), (3, 3, 2, 4)
    arguments = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
    return _wrong_shaders(lanes, reference_of("grouped", convolve, arguments))


KNOWN = (
    Known(
        "a sum along any axis but the last, and what is done with it, in one kernel "
        "(norms, softmax)",
        "Metal shaders run",
        "IREE 3.13.0 sets no barrier between the threads that sum and those that read "
        "the sum: results hang on the order of threads",
        "export with models.export, which keeps sums in kernels of their own; the "
        "shaders of all models are right with it",
        _norm_in_one_kernel,
    ),
    Known(
        "bfloat16",
        "Metal compile",
        "IREE 3.13.0 makes SPIR-V that does not hold together: a bitcast of 32 to 16 "
        "bits",
        "float16, or float32",
        _bfloat16,
    ),
    Known(
        "2D convolution in groups, other than depthwise",
        "Metal shaders run",
        "IREE 3.13.0 lets threads set to zero what other threads have summed already",
        "one convolution a group, side by side; no model of this project has groups",
        _grouped_convolution,
    ),
)
