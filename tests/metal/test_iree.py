"""Every program of every exported model becomes Metal shaders, with IREE's compiler."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("iree.compiler")

from metal.lanes import reference, reference_of  # noqa: E402

from models.export import ExportError, as_text  # noqa: E402
from models.programs import STAGES, example_models  # noqa: E402

PROGRAMS = [(name, stage, "float32") for name in example_models() for stage in STAGES]
PROGRAMS += [(name, "gradient", "float16") for name in example_models()]


@pytest.mark.parametrize(("name", "stage", "dtype"), PROGRAMS)
def test_program(lanes, name, stage, dtype):
    program = lanes.metal(reference(name, stage, dtype))
    assert len(program.kernels) > 5
    for kernel in program.kernels:
        assert kernel.source.count("kernel void ") == 1
        assert not re.search(r"\bdouble\b", kernel.source)


def test_float64_is_not_demoted(lanes):
    expected = reference_of("float32", lambda x: jnp.sin(x) * 2, [np.ones(4, "f4")])
    text = as_text(expected.lowered).replace("xf32", "xf64")
    from models.export import compile_program

    with pytest.raises(ExportError, match="f64"):
        compile_program(text, "metal", lanes.runner.folder / "float64.vmfb")
