"""The check of a device: what is right passes, and what is planted is named."""

import json
import os
import subprocess
import sys

import fake_plugins
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from models import verify
from models.programs import Program, example_models, program
from models.verify import Device, Row, verify_program
from models.verify_ops import OPERATIONS, operation_program
from models.verify_steps import apply, evaluate, flatten, relative_error, walk

CPU = Device(jax.devices("cpu")[0])


class Broken(Device):
    """A device that gets one primitive wrong from its ``after``th call in a run on."""

    def __init__(self, primitive, fault, after=0):
        super().__init__(CPU.device)
        object.__setattr__(self, "broken", (primitive, fault, after))
        object.__setattr__(self, "places", {})

    def apply(self, step, inputs):
        primitive, fault, after = self.broken
        outputs = apply(step, inputs)
        if step.equation.primitive.name != primitive:
            return outputs
        place = self.places.setdefault(id(step.equation), len(self.places))
        return [fault(y) for y in outputs] if place >= after else outputs

    def compiled(self, function):
        def run(*arguments):
            flat = flatten(function, arguments)
            results = evaluate(flat, jax.tree.leaves(arguments), self.apply)
            shape = jax.tree.structure(jax.eval_shape(function, *arguments))
            return jax.tree.unflatten(shape, results)

        return run


class FusedWrongly(Device):
    """Right one by one; a compiled program's sines are off, and what uses them."""

    def compiled(self, function):
        return Broken("sin", lambda y: y * 1.01).compiled(function)


def toy():
    def function(x, w):
        y = jax.jit(jnp.tanh)(x @ w)
        return jnp.sum(lax.cond(y[0, 0] > 9, jnp.cos, lambda v: v, y)), jnp.sin(y) * 2

    random = np.random.RandomState(0).standard_normal
    x, w = random((3, 4)).astype(np.float32), random((4, 5)).astype(np.float32)
    return Program("toy", function, (x, w))


def test_a_right_device_passes_and_is_timed():
    row = verify_program(toy(), CPU, CPU)
    assert row.ok and row.error < 1e-6 and not row.suspect
    assert min(row.device_seconds, row.cpu_seconds, row.compile_seconds) > 0
    assert verify_program(toy(), CPU, None).ok  # against single operations


@pytest.mark.parametrize(
    ("primitive", "fault"),
    [
        ("dot_general", lambda y: y * 1.01),
        ("tanh", lambda y: y + 0.01),
        ("sin", lambda y: y.at[0].set(0)),
        ("reduce_sum", lambda y: y * jnp.nan),
        ("cond", lambda y: y * 0.9),
    ],
)
def test_the_operation_at_fault_is_named(primitive, fault):
    row = verify_program(toy(), Broken(primitive, fault), CPU)
    assert not row.ok
    assert row.suspect.startswith(f"{primitive} ") and "-> float32[" in row.suspect
    assert "test_verify.py:" in row.suspect and "alone" in row.suspect
    assert str(row).splitlines()[1].strip() == row.suspect


def test_the_layer_at_fault_is_named():
    """The third matrix product of the forward pass, and not the ones behind it."""
    made = program("FNO1D", "forward")
    products = [
        str((step.callers[:1] or [step.equation])[0].source_info.name_stack)
        for step in flatten(made.function, made.arguments).steps
        if step.equation.primitive.name == "dot_general"
    ]
    row = verify_program(made, Broken("dot_general", lambda y: y * 1.01, after=2), CPU)
    assert not row.ok
    assert f" in {products[2]} (" in row.suspect and "FNO1D" in products[2]


def test_what_only_a_compiled_program_gets_wrong():
    row = verify_program(toy(), FusedWrongly(CPU.device), CPU)
    assert not row.ok
    assert (
        row.suspect.startswith("sin ") and "in the compiled program only" in row.suspect
    )


def test_what_a_device_raises_is_told():
    class Refusing(Device):
        def compiled(self, function):
            raise RuntimeError("no kernel\nand a long trace")

    row = verify_program(toy(), Refusing(CPU.device), CPU)
    assert row.error is None and not row.ok
    assert row.suspect == "RuntimeError: no kernel" and "FAILS" in str(row)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault():
    """Of a bias before an instance norm."""

    def function(x):
        return x, x[:1] * 1e-8

    row = verify_program(
        Program("tiny", function, (np.ones(3, np.float32),)),
        Broken("mul", lambda y: y * 3),
        CPU,
    )
    assert row.ok and row.error < 1e-4


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0], [0.0], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf], [-np.inf], np.inf),
        ([1.0, 1.0], [1.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error(found, expected, error):
    found, expected = np.asarray(found), np.asarray(expected)
    assert relative_error(found, expected) == pytest.approx(error)


def test_steps_are_the_program_with_calls_opened():
    flat = flatten(toy().function, toy().arguments)
    names = [step.equation.primitive.name for step in flat.steps]
    assert "tanh" in names and "pjit" not in names and "jit" not in names
    found = evaluate(flat, toy().arguments)
    wanted = jax.tree.leaves(jax.jit(toy().function)(*toy().arguments))
    assert max(map(relative_error, found, wanted)) < 1e-6
    assert [step for step, _, _ in walk(flat, toy().arguments)] == flat.steps


def test_every_operation_is_a_program():
    for name in OPERATIONS:
        made = operation_program(name)
        y, gradients = jax.eval_shape(made.function, *made.arguments)
        assert y.size and len(gradients) == len(made.arguments)


def test_every_model_is_verified():
    made = verify.programs(("jaxops", *example_models()), ("forward",), "float32")
    names = [p.name for p in made]
    assert len(names) == len(OPERATIONS) + len(example_models())


def test_the_command_and_its_report(tmp_path, monkeypatch, capsys):
    few = {name: OPERATIONS[name] for name in ("dense", "gelu")}
    monkeypatch.setattr(verify, "OPERATIONS", few)
    out = tmp_path / "report.json"
    assert verify.main(["--models", "jaxops", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 programs are right" in said and "operation by operation" in said
    report = json.loads(out.read_text())
    assert report["ok"] and report["versions"]["jax"] == jax.__version__
    assert [row["program"] for row in report["rows"]] == ["jaxops/dense", "jaxops/gelu"]
    assert report["rows"][0]["error"] <= report["rows"][0]["tolerance"]

    wrong = Row("jaxops/dense", 0.5, 1e-4, suspect="dot_general .. alone")
    monkeypatch.setattr(verify, "verify_program", lambda *arguments: wrong)
    assert verify.main(["--models", "jaxops", "--out", str(out)]) == 1
    assert "0 of 2 programs are right" in capsys.readouterr().out
    assert not json.loads(out.read_text())["ok"]


def test_from_the_shell_without_a_mac():
    run = subprocess.run(
        [sys.executable, "-m", "models.verify", "--backend", "metal"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": ""},
    )
    assert run.returncode == 2 and "needs a Mac" in run.stderr


ON_A_MAC = """
import sys
from jaxops import doctor, plugins
plugins.read_host = lambda: plugins.Host("Darwin", "arm64", "15.1", (3, 12))
from models import verify
verify.OPERATIONS = {"dense": verify.OPERATIONS["dense"]}
some = ["--models", "jaxops", "FNO1D", "--stages", "forward"]
sys.exit(verify.main(["--backend", "metal", *some]) or doctor.main(["--no-probes"]))
"""


def test_on_a_mac_the_plugin_is_held_against_the_cpu(tmp_path):
    """The plugin is a second CPU client under its name, which JAX really starts."""
    minor = ".".join(jax.__version__.split(".")[:2])
    requires = (f"jax>={minor}", f"jaxlib>={minor}")
    fake_plugins.add_plugin(tmp_path, "jax-mps", "0.11.1", requires, "mps")
    root = os.path.dirname(os.path.dirname(verify.__file__))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    environment.pop("JAX_PLATFORMS", None)
    run = subprocess.run(
        [sys.executable, "-c", ON_A_MAC],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "jax-mps 0.11.1" in run.stdout and "against the CPU" in run.stdout
    assert "2 of 2 programs are right" in run.stdout
    row = next(r for r in run.stdout.splitlines() if r.startswith("FNO1D/forward"))
    assert " ok " in row and " - " not in row  # a time of the CPU as well
    assert "jax-mps 0.11.1: fits" in run.stdout  # the doctor says so too
    assert "python -m models.verify --backend metal" in run.stdout
