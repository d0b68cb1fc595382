"""Whether an Apple plugin can run a function: its lowered program against the table.

From the shell::

    python -m jaxops.metal.audit package.module:function --args "f32[1,64,64,1]" "i32[]"
    python -m jaxops.metal.audit package.module:make    # make() gives (function, args)

exits with 0 if nothing is in the way, with 1 if something is, and with 2 if the
function could not be had or traced.
"""

import argparse
import importlib
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxops.metal.program import Operation, lower, operations, trace
from jaxops.metal.support import TARGETS, Entry, Target

__all__ = ["Report", "Violation", "audit", "audit_module", "audit_traced"]

# What only hands on: the operation that made such a value is the one to report.
HANDING_ON = ("return", "func.return", "func.call", "call")


@dataclass(frozen=True)
class Violation:
    """Something in a program that a plugin refuses, or that asks for care.

    Attributes:
        operation: its name in StableHLO; what a custom call calls stands behind it.
        type: operand and result types, as in "f32[2,3] -> f32[2]".
        line: "file.py:12", the innermost Python line outside of installed packages.
        effect: "crash", "error", "wrong" (silently) or "slow".
        why, instead, source: see `jaxops.metal.support.Entry`.
        count: how often that line does it.
    """

    operation: str
    type: str
    line: str
    effect: str
    why: str
    instead: str
    source: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = self.line or "(no Python line)"
        head = f"{where}  {self.effect}: {self.operation} {self.type}{times}"
        body = f"{self.why}.\nInstead: {self.instead}.\nSource: {self.source}."
        lines = [
            textwrap.fill(line, 84, subsequent_indent="  ")
            for line in body.splitlines()
        ]
        return "\n".join((head, textwrap.indent("\n".join(lines), "    ")))


@dataclass(frozen=True)
class Report:
    """What an audit found. Empty, and so false, where nothing is in the way.

    Iterating gives the violations; ``str()`` is a text for people.

    Attributes:
        target: the plugin, and the version that the table speaks of.
        violations: what the plugin refuses or gets wrong.
        cautions: what runs, but slowly, or wrong under a condition that the program
            does not show.
        operations: how often each operation is in the program, by its StableHLO name.
    """

    target: str
    violations: tuple[Violation, ...]
    cautions: tuple[Violation, ...]
    operations: Mapping[str, int]

    @property
    def ok(self) -> bool:
        return not self.violations

    def __len__(self) -> int:
        return len(self.violations)

    def __iter__(self) -> Iterator[Violation]:
        return iter(self.violations)

    def __str__(self) -> str:
        found = len(self.violations) or "nothing"
        lines = [
            f"{self.target}: {found} in the way, {len(self.cautions)} to mind, in "
            f"{sum(self.operations.values())} operations"
        ]
        lines += map(str, self.violations)
        lines += (f"to mind: {caution}" for caution in self.cautions)
        return "\n".join(lines)


def audit(
    function: Callable, *arguments: Any, target: str = "jax-metal", **options: Any
) -> Report:
    """Hold the program of a function against what an Apple plugin can run.

    The function is traced and lowered for the plugin's platform on this machine, which
    needs neither the plugin nor a Mac; it is not compiled and does not run. Forward
    pass alone: give ``jax.grad(function)`` to look at the gradient too.

    Args:
        function: any JAX function, jitted or not.
        *arguments, **options: of the function. Arrays, or `jax.ShapeDtypeStruct` for
            them, are the program's arguments; all else (numbers, flags, None) is
            constant, except to a function that is jitted already. (One that has run
            here keeps the forms of 3D convolutions that this machine takes: audit
            the function before it is jitted.)
        target: "jax-metal", "jax-mps" or "metaljax".

    Returns:
        What is in the way, with the Python line, the reason and what to use instead.
        The table (`jaxops.metal.support`) holds what is known; a clean report is no
        proof.

    Raises:
        ValueError: for an unknown target. What the function raises while it is traced.

    Example:
        ``assert not jaxops.audit(jax.grad(loss), params, x, target="jax-mps")``
    """
    if target not in TARGETS:
        raise ValueError(
            f"audit: target is one of {', '.join(TARGETS)}; got {target!r}."
        )
    return audit_traced(trace(function, arguments, options), TARGETS[target])


def audit_traced(traced: Any, plugin: Target) -> Report:
    """`audit` of what `jaxops.metal.program.trace` gives: one tracing, any plugins."""
    return audit_module(*lower(traced, plugin.platform), plugin)


def audit_module(module: Any, obstacle: Exception | None, plugin: Target) -> Report:
    """`audit` of what `jaxops.metal.program.lower` gives."""
    found: dict[tuple, Violation] = {}
    cautions: dict[tuple, Violation] = {}
    counts: Counter[str] = Counter()
    for operation in operations(module):
        counts[operation.name] += 1
        for entry in _applying(operation, plugin):
            _add(cautions if entry.is_caution else found, entry, operation)
    if obstacle is not None and not found:
        violation = _of_lowering(obstacle, plugin)
        (cautions if plugin.has_rules else found)[("lowering",)] = violation
    return Report(
        f"{plugin.name} {plugin.version}",
        tuple(found.values()),
        tuple(cautions.values()),
        counts,
    )


def _applying(operation: Operation, plugin: Target) -> Iterator[Entry]:
    """The first refusal that applies, or every caution."""
    if operation.name in HANDING_ON or _is_inner_function(operation):
        return
    entries = [
        entry
        for entry in plugin.entries
        if (not entry.operations or operation.name in entry.operations)
        and entry.applies(operation)
    ]
    refusals = [entry for entry in entries if not entry.is_caution]
    if refusals:
        yield refusals[0]
    elif plugin.known is not None and _is_unknown(operation.name, plugin.known):
        yield Entry(
            (),
            "error",
            f"{operation.name} is not among the operations of {plugin.name}",
            "other operations, or the CPU (jaxops.bridge.on_cpu)",
            plugin.known_source,
        )
    else:
        yield from entries


def _is_inner_function(operation: Operation) -> bool:
    return operation.name == "func.func" and operation.text("sym_name") != '"main"'


def _is_unknown(name: str, known: frozenset[str]) -> bool:
    """Other dialects are functions of the program, or become StableHLO."""
    return "." not in name and name not in known


def _add(found: dict, entry: Entry, operation: Operation) -> None:
    key = (entry.why, operation.line)
    if key in found:
        found[key] = replace(found[key], count=found[key].count + 1)
        return
    name = operation.name
    if name == "func.func":
        name = "argument"
    elif name == "custom_call":
        name = f"custom_call {operation.called}"
    types = ", ".join(map(str, operation.results))
    if operation.operands:
        types = f"{', '.join(map(str, operation.operands))} -> {types}"
    found[key] = Violation(
        name,
        types,
        operation.line,
        entry.effect,
        entry.why,
        entry.instead,
        entry.source,
    )


def _of_lowering(obstacle: Exception, plugin: Target) -> Violation:
    primitive = re.search(r"primitive '(\w+)'", str(obstacle))
    return Violation(
        operation=primitive.group(1) if primitive else "lowering",
        type="",
        line="",
        effect="error",
        why=f"JAX alone cannot lower it for this plugin: {obstacle}",
        instead="other operations, or the CPU (jaxops.bridge.on_cpu)",
        source=f"jax {jax.__version__}",
    )


# The command.

ELEMENTS = {
    "bool": jnp.bool_,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    **{f"i{n}": jnp.dtype(f"int{n}") for n in (8, 16, 32)},
    **{f"u{n}": jnp.dtype(f"uint{n}") for n in (8, 16, 32)},
}


def parse_argument(text: str) -> jax.ShapeDtypeStruct:
    """``"f32[2,3]"`` as a shape and dtype; ``"f32[]"`` is one number."""
    match = re.fullmatch(r"(\w+)\[([\d, ]*)\]", text.strip())
    if match is None or match.group(1) not in ELEMENTS:
        raise ValueError(
            f'an argument is written like "f32[1,64,64,1]", with one of '
            f"{', '.join(ELEMENTS)}; got {text!r}"
        )
    lengths = filter(str.strip, match.group(2).split(","))
    return jax.ShapeDtypeStruct(tuple(map(int, lengths)), ELEMENTS[match.group(1)])


def find_function(name: str, texts: Sequence[str] | None) -> tuple[Callable, tuple]:
    """A function by "module:name" with its arguments, or those that it returns."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"a function is written module:function; got {name!r}")
    try:
        function = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be had: {error}") from error
    if texts is not None:
        return function, tuple(map(parse_argument, texts))
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ValueError(
            f"{name}() gives no (function, arguments); give the shapes of its "
            'arguments with --args "f32[1,64,64,1]" .., or --args alone for none'
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxops.metal.audit",
        description="Whether an Apple plugin can run a JAX function.",
    )
    parser.add_argument("function", help="module:function")
    parser.add_argument(
        "--args",
        nargs="*",
        metavar="TYPE",
        help='types of its arguments, as in "f32[1,64,64,1]"; without this option the '
        "function is called and gives (function, arguments)",
    )
    parser.add_argument(
        "--target", default="jax-metal", choices=(*TARGETS, "all"), help="the plugin"
    )
    options = parser.parse_args(argv)
    targets = TARGETS if options.target == "all" else (options.target,)
    try:
        function, arguments = find_function(options.function, options.args)
        traced = trace(function, arguments, {})
        reports = [audit_traced(traced, TARGETS[name]) for name in targets]
    except Exception as error:  # the user's code may raise anything; it is told
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
