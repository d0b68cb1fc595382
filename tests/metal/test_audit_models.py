"""Every program of every exported model, against the table of every plugin.

JAX has no rules of its own for the plugins' platforms (but for cumulative sums on jax
0.4.34), so one lowered program stands for all three where no plugin is installed.
"""

import pytest

from jaxops.metal.audit import audit_module
from jaxops.metal.program import lower, trace
from jaxops.metal.support import TARGETS
from models.programs import STAGES, example_models, program


def assert_all_can_run(made, dtype="float32"):
    traced = trace(made.function, made.arguments, {})
    lowered = lower(traced, "METAL")
    for target in TARGETS.values():
        if dtype == "float32" or dtype in target.half:
            report = audit_module(*lowered, target)
            assert sum(report.operations.values()) > 10
            assert report.ok and not report.cautions, report
    return traced, lowered


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", list(example_models()))
def test_every_plugin_can_run_it(name, stage):
    assert_all_can_run(program(name, stage))


OTHER_FNOS = {"FNO", "FNO1D", "FNO3D"}  # FNO2D's layers


@pytest.mark.parametrize("name", [n for n in example_models() if n not in OTHER_FNOS])
def test_half_precision_is_no_other(name):
    """The gradient has the forward pass in it; weights and optimiser are float32."""
    assert_all_can_run(program(name, "gradient", "float16"), "float16")


def test_bfloat16_and_each_platform():
    traced, (module, _) = assert_all_can_run(
        program("FNO2D", "gradient", "bfloat16"), "bfloat16"
    )
    for target in TARGETS.values():
        assert str(lower(traced, target.platform)[0]) == str(module)
