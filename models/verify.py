"""Every operation and model on this machine's device, held against its CPU.

``python -m models.verify --backend metal`` runs the small programs of
``models.verify_ops`` and ``models.programs`` (values, gradients, a training step, the
initialiser) on the device and on the CPU, and prints a table of errors and times that
goes into a report as it is; ``--out report.json`` writes it as JSON. Where a program is
off, it is taken apart until the operation at fault is named, and the exit code is 1.

On the CPU itself (``--backend cpu``) the compiled program is held against the same one
run operation by operation, which finds what XLA's optimiser gets wrong.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jaxops.backend import NAMES, Backend, BackendError, select_backend
from models.atomic import replace_file
from models.programs import DTYPES, STAGES, Program, example_models, program
from models.verify_ops import OPERATIONS, operation_program
from models.verify_steps import (
    Step,
    apply,
    evaluate,
    find_suspect,
    flatten,
    magnitude,
    relative_error,
)

# Of the largest value of an array. Float32 programs that are right agree within 3e-6;
# fast arithmetic may cost a digit, and TF32 costs three.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-mps", "metaljax")
PACKAGES += ("jax-metal", "mlx")


@dataclass(frozen=True)
class Device:
    """What runs programs: compiled as a whole, or one operation at a time."""

    device: jax.Device

    def put(self, values: Any) -> Any:
        return jax.device_put(values, self.device)

    def compiled(self, function: Callable) -> Callable:
        return jax.jit(function)

    def run(self, function: Callable, arguments: Sequence[Any]) -> Any:
        with jax.default_device(self.device):
            return self.compiled(function)(*self.put(arguments))

    def apply(self, step: Step, inputs: Sequence[Any]) -> list[Any]:
        with jax.default_device(self.device):
            return apply(step, self.put(inputs))


@dataclass(frozen=True)
class Row:
    """One program's result.

    Attributes:
        program: its name.
        error: the largest relative error of any array that it gives, or None where
            nothing came back.
        tolerance: of it.
        device_seconds, cpu_seconds: of a second run, or None.
        compile_seconds: of the first run on the device.
        suspect: the operation at fault, or what was raised; "" where all is well.
    """

    program: str
    error: float | None
    tolerance: float
    device_seconds: float | None = None
    cpu_seconds: float | None = None
    compile_seconds: float | None = None
    suspect: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    def __str__(self) -> str:
        def milliseconds(seconds):
            return "-" if seconds is None else f"{seconds * 1e3:.2f}"

        verdict = "ok" if self.ok else "WRONG" if self.error is not None else "FAILS"
        error = "-" if self.error is None else f"{self.error:.1e}"
        line = (
            f"{self.program:<36} {verdict:<6} {error:>8} "
            f"{milliseconds(self.device_seconds):>10} "
            f"{milliseconds(self.cpu_seconds):>10} "
            f"{milliseconds(self.compile_seconds):>10}"
        )
        return f"{line}\n    {self.suspect}" if self.suspect else line


HEADER = (
    f"{'program':<36} {'':<6} {'error':>8} {'device ms':>10} {'CPU ms':>10} "
    f"{'compile ms':>10}"
)


def verify_program(
    made: Program, device: Device, cpu: Device | None, dtype: str = "float32"
) -> Row:
    """Run a program on the device and on the CPU, and compare all that it gives.

    Args:
        made: what to run.
        device: where.
        cpu: the reference; None: the program runs operation by operation, on the CPU.
        dtype: that it computes in, for the tolerance.
    """
    tolerance = TOLERANCES[dtype]
    try:
        found, first, again = _timed(device, made)
        if cpu is None:
            expected, reference_seconds = _one_by_one(made), None
        else:
            expected, _, reference_seconds = _timed(cpu, made)
        error = _largest_error(jax.tree.leaves(found), jax.tree.leaves(expected))
        seconds = (again, reference_seconds, first)
        if error <= tolerance:
            return Row(made.name, error, tolerance, *seconds)
        suspect = name_suspect(made, device, tolerance)
        return Row(made.name, error, tolerance, *seconds, suspect)
    except Exception as raised:  # a plugin may raise anything; the next one is run
        lines = str(raised).splitlines() or [""]
        said = f"{type(raised).__name__}: {lines[0]}"
        return Row(made.name, None, tolerance, suspect=said)


def _largest_error(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Of any array, relative to its largest value.

    Arrays that are less than a hundredth of the largest one are measured against that
    hundredth: a gradient that is zero but for rounding has no error of its own.
    """
    least = 1e-2 * magnitude(expected)
    errors = (
        relative_error(*pair, at_least=least)
        for pair in zip(found, expected, strict=True)
    )
    return max(errors, default=0.0)


def _timed(device: Device, made: Program) -> tuple[Any, float, float]:
    """Results, and the seconds of a first and of a second call."""
    with jax.default_device(device.device):
        call = device.compiled(made.function)
        arguments = device.put(made.arguments)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            result = jax.block_until_ready(call(*arguments))
            times.append(time.perf_counter() - start)
    return jax.device_get(result), *times


def _cpu() -> jax.Device:
    return jax.devices("cpu")[0]


def _one_by_one(made: Program) -> list[Any]:
    with jax.default_device(_cpu()):
        flat = flatten(made.function, made.arguments)
        return evaluate(flat, jax.device_put(jax.tree.leaves(made.arguments), _cpu()))


def name_suspect(made: Program, device: Device, tolerance: float) -> str:
    """The operation that the device gets wrong, in words."""
    with jax.default_device(_cpu()):
        flat = flatten(made.function, made.arguments)
        arguments = jax.device_put(jax.tree.leaves(made.arguments), _cpu())
        # One operation has less time to go wrong in than a program of hundreds.
        suspect = find_suspect(
            flat, arguments, device.apply, device.run, tolerance / 10
        )
    if suspect is None:
        return "every operation is right alone, and with all values kept: fused wrongly"
    return str(suspect)


def programs(
    models: Sequence[str], stages: Sequence[str], dtype: str
) -> Iterator[Program]:
    """What is verified, the operations first."""
    if "jaxops" in models:
        for name in OPERATIONS:
            yield operation_program(name, dtype)
    for name in models:
        if name != "jaxops":
            for stage in stages:
                yield program(name, stage, dtype)


def report(backend: Backend, rows: Sequence[Row], dtype: str) -> dict[str, Any]:
    """The table with all that a reader needs to know of the machine, for JSON."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "backend": str(backend),
        "machine": platform.platform(),
        "versions": versions,
        "dtype": dtype,
        "ok": all(row.ok for row in rows),
        "rows": [{**asdict(row), "ok": row.ok} for row in rows],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    names = ("jaxops", *example_models())
    parser = argparse.ArgumentParser(
        prog="python -m models.verify", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--backend", default="auto", choices=NAMES)
    parser.add_argument(
        "--models", nargs="+", default=names, choices=names, help="all, unless given"
    )
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--out", metavar="FILE", help="write the table as JSON")
    options = parser.parse_args(argv)
    try:
        backend = select_backend(options.backend)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 2
    device = Device(jax.devices()[0])
    cpu = None if backend.name == "cpu" else Device(_cpu())
    against = "the CPU" if cpu else "the same programs run operation by operation"
    print(
        f"{backend}, against {against}\n{platform.platform()}\n\n{HEADER}", flush=True
    )
    rows = []
    for made in programs(options.models, options.stages, options.dtype):
        # The name is there first, in case the plugin ends the process.
        print(f"{made.name:<36}", end="\r", file=sys.stderr, flush=True)
        rows.append(verify_program(made, device, cpu, options.dtype))
        print(rows[-1], flush=True)
    wrong = [row for row in rows if not row.ok]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} programs are right")
    if options.out:
        with replace_file(options.out) as temporary:
            text = json.dumps(report(backend, rows, options.dtype), indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
        print(f"written to {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
