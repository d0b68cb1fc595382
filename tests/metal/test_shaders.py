"""Every program's Metal shaders, run on the CPU, within 2e-5 of XLA in two orders."""

import re

import pytest

pytest.importorskip("iree.compiler")
pytest.importorskip("iree.runtime")

from metal.exceptions import KNOWN  # noqa: E402
from metal.lanes import SHADER_TOLERANCE, errors_of, reference  # noqa: E402

from models.programs import STAGES, example_models  # noqa: E402

PROGRAMS = [(name, stage, "float32") for name in example_models() for stage in STAGES]
PROGRAMS += [(name, "gradient", "float16") for name in example_models()]


@pytest.mark.parametrize(("name", "stage", "dtype"), PROGRAMS)
def test_program(lanes, name, stage, dtype):
    forward, reverse = lanes.shader_errors(reference(name, stage, dtype))
    assert max(forward, reverse) <= SHADER_TOLERANCE[dtype]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.what[:30])
def test_known_fault_is_still_there(lanes, known):
    """Where it is not, it can be taken off the table, with what avoids it."""
    assert known.still(lanes)


# A program, and what of a shader's text is replaced by what.
FNO2D, UNET3D = ("FNO2D", "forward"), ("UNet3D", "gradient")
ATTENTION = ("DepthAttentionSR", "forward")
MUTATIONS = {
    "index off by one": (
        UNET3D,
        r"_m0\[(_\d+) \+ (\d+)u\] = ",
        r"_m0[\1 + \2u + 1u] = ",
    ),
    "no barrier": (UNET3D, r"threadgroup_barrier\([\w:]+\);", ""),
    "another lane": (UNET3D, r"(spvSubgroupShuffleXor\(\w+), 1u", r"\1, 2u"),
    "another loop bound": (UNET3D, r"< int\((\d+)u\); \)", r"< int(\1u) - 1; )"),
    "another constant": (FNO2D, r"0\.00319464\d+", "0.0032"),
    "the other of two": (FNO2D, r"fast::max", "fast::min"),
    "another threadgroup": (
        FNO2D,
        r"gl_WorkGroupID\.x \* (\d+)u",
        r"gl_WorkGroupID.x * (\1u - 1u)",
    ),
    "operands swapped": (ATTENTION, r"= (\S+) - (\S+);", r"= \2 - \1;"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_shader_is_found(lanes, mutation):
    """One kernel is changed, the first that has the text; none would be no test."""
    program, pattern, replacement = MUTATIONS[mutation]
    expected = reference(*program)
    compiled = lanes.metal(expected)
    kernels = list(compiled.kernels)
    for i, kernel in enumerate(kernels):
        start = kernel.source.index("kernel void ")
        text, count = re.subn(pattern, replacement, kernel.source[start:], count=1)
        if count:
            kernels[i] = kernel._replace(source=kernel.source[:start] + text)
            break
    else:
        pytest.fail(f"no kernel of {program} has {pattern}")
    changed = lanes.runner.build(compiled._replace(kernels=tuple(kernels)))
    assert max(errors_of(changed, expected)) > SHADER_TOLERANCE["float32"]


def test_barriers_order_threads(lanes):
    """Without its barrier a kernel is right in one order of threads, by luck."""
    expected = reference(*UNET3D)
    compiled = lanes.metal(expected)
    kernels = [
        kernel._replace(source=kernel.source.replace(BARRIER, ""))
        for kernel in compiled.kernels
    ]
    assert any(BARRIER in kernel.source for kernel in compiled.kernels)
    changed = lanes.runner.build(compiled._replace(kernels=tuple(kernels)))
    errors = errors_of(changed, expected)
    assert errors[0] != errors[1] and max(errors) > SHADER_TOLERANCE["float32"]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def test_threads_that_wait_at_different_places_end(lanes, capfd):
    """A hang on a GPU is an error here, not a hang of the test."""
    expected = reference(*UNET3D)
    compiled = lanes.metal(expected)
    kernels = [
        kernel._replace(
            source=kernel.source.replace(
                BARRIER,
                f"if (gl_LocalInvocationID.x != 1u) {BARRIER} else simd_sum(1.0);",
            )
        )
        for kernel in compiled.kernels
    ]
    changed = lanes.runner.build(compiled._replace(kernels=tuple(kernels)))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        errors_of(changed, expected)
    assert "threads wait for each other" in capfd.readouterr().err
