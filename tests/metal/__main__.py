"""``python -m tests.metal``: every exported model's programs, a way to Metal a column.

Nothing here runs on an Apple GPU. The audits hold the lowered program against a table
of what plugins are known to refuse; MLX runs it on the CPU; IREE compiles it to Metal
shaders, whose text runs on the CPU. A number is the largest error, relative to the
largest value of an array, against XLA; of shaders in two orders of threads, the larger.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402
from metal.exceptions import KNOWN  # noqa: E402
from metal.lanes import (  # noqa: E402
    MLX_TOLERANCE,
    SHADER_TOLERANCE,
    Lanes,
    reference,
)

from jaxops.metal.audit import audit_module  # noqa: E402
from jaxops.metal.program import lower, trace  # noqa: E402
from jaxops.metal.support import TARGETS  # noqa: E402
from models.programs import STAGES, example_models, program  # noqa: E402

COLUMNS = (*(f"audit {name}" for name in TARGETS), "MLX", "Metal compile")
COLUMNS += ("Metal shaders run",)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.metal", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=example_models(), metavar="NAME")
    parser.add_argument(
        "--half", action="store_true", help="the gradients in float16 as well"
    )
    options = parser.parse_args()
    names = options.models or list(example_models())
    rows = [(name, stage, "float32") for name in names for stage in STAGES]
    if options.half:
        rows += [(name, "gradient", "float16") for name in names]
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    start, failures = time.monotonic(), []
    widths = [max(len(column), 9) for column in COLUMNS]
    print(_row("program", COLUMNS, widths), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lanes = Lanes(Path(folder))
        for row in rows:
            entries, problems = _check(lanes, *row)
            failures += problems
            name = "/".join(row[: 2 if row[2] == "float32" else 3])
            print(_row(name, entries, widths), flush=True)
        print("\nKnown faults of the tools, and whether they are still there:")
        for known in KNOWN:
            there = known.still(lanes)
            print(f"* {known.lane}: {known.what}: {known.why}.")
            print(f"  Instead: {known.instead}. {'Still so.' if there else 'GONE.'}")
            if not there:
                failures.append(f"{known.what}: no longer so, take it off the table")
    print(f"\n{time.monotonic() - start:.0f} s; {len(failures)} failures")
    for failure in failures:
        print(f"FAILED {failure}")
    return bool(failures)


def _check(lanes: Lanes, name: str, stage: str, dtype: str):
    """A row's entries, and what failed, with why."""
    made = program(name, stage, dtype)
    entries, problems = [], []

    def enter(column: str, check: Callable[[], str]) -> None:
        try:
            entries.append(check())
        except Exception as error:  # an entry of the table, whatever it is
            entries.append("FAILED")
            problems.append(f"{made.name}, {column}: {type(error).__name__}: {error}")

    lowered = lower(trace(made.function, made.arguments, {}), "METAL")
    for target in TARGETS.values():
        enter(f"audit {target.name}", lambda target=target: _audit(target, lowered))
    expected = reference(name, stage, dtype)
    enter("MLX", lambda: _within(lanes.mlx_error(expected), MLX_TOLERANCE[dtype]))
    enter("Metal compile", lambda: f"{len(lanes.metal(expected).kernels)} kernels")
    enter(
        "Metal shaders run",
        lambda: _within(max(lanes.shader_errors(expected)), SHADER_TOLERANCE[dtype]),
    )
    return entries, problems


def _audit(target, lowered) -> str:
    report = audit_module(*lowered, target)
    if not report.ok:
        raise AssertionError(str(report))
    return "pass" if not report.cautions else f"pass, {len(report.cautions)} cautions"


def _within(error: float, tolerance: float) -> str:
    if not error <= tolerance:
        raise AssertionError(f"off by {error:.1e}, more than {tolerance:.0e}")
    return f"{error:.1e}"


def _row(name: str, entries, widths) -> str:
    cells = [f"{entry:>{width}}" for entry, width in zip(entries, widths, strict=True)]
    return "  ".join((f"{name:<34}", *cells))


if __name__ == "__main__":
    sys.exit(main())
