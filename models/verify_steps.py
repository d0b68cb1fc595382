"""A program as a row of single operations, and which of them a device gets wrong.

The program's jaxpr is evaluated equation by equation, calls of other functions opened
up. Each equation gets the reference's inputs, so the first one whose outputs differ is
the culprit and not its victim. Where none is wrong alone, the program is compiled with
all its intermediate values as outputs, and the first that differs is named.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What holds a jaxpr that is evaluated once, as it stands.
CALLS = ("pjit", "jit", "closed_call", "core_call", "custom_jvp_call")
CALLS += ("custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat2")
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class Step(NamedTuple):
    """One equation, with the places of what it reads and writes in one flat table.

    Attributes:
        inputs: places, or the literal's value in a tuple of its own.
        outputs: places.
        callers: the equations of the calls that it lies in, the innermost last.
    """

    equation: Any
    inputs: tuple[int | tuple[Any], ...]
    outputs: tuple[int, ...]
    callers: tuple[Any, ...]


class Steps(NamedTuple):
    """A flat program.

    Attributes:
        steps: in order.
        arguments: positions of the flat arguments.
        constants: position and value.
        results: like `Step.inputs`.
    """

    steps: list[Step]
    arguments: tuple[int, ...]
    constants: list[tuple[int, Any]]
    results: tuple[int | tuple[Any], ...]


class Suspect(NamedTuple):
    """The operation that a device gets wrong.

    Attributes:
        operation: the primitive.
        types: of inputs and outputs.
        scope: the modules it lies in.
        line: of Python.
        error: relative.
        alone: whether it is wrong by itself, or only in the compiled program.
    """

    operation: str
    types: str
    scope: str
    line: str
    error: float
    alone: bool

    def __str__(self) -> str:
        how = "alone" if self.alone else "in the compiled program only"
        return (
            f"{self.operation} {self.types} in {self.scope or 'the program'} "
            f"({self.line}), off by {self.error:.1e} {how}"
        )


def flatten(function: Callable, arguments: Sequence[Any]) -> Steps:
    """The program of a function for these arguments."""
    closed = jax.make_jaxpr(function)(*arguments)
    flat = Steps([], (), [], ())
    table = _Table()
    positions = {}
    for variable in closed.jaxpr.invars:
        positions[variable] = table.new()
    given = tuple(positions.values())
    results = _flatten_into(flat, table, closed.jaxpr, closed.consts, positions)
    return flat._replace(arguments=given, results=results)


class _Table:
    def __init__(self):
        self.count = 0

    def new(self) -> int:
        self.count += 1
        return self.count - 1


def _flatten_into(flat, table, jaxpr, constants, positions, callers=()) -> tuple:
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        positions[variable] = table.new()
        flat.constants.append((positions[variable], value))

    def read(variable):
        return (variable.val,) if hasattr(variable, "val") else positions[variable]

    for equation in jaxpr.eqns:
        inputs = tuple(map(read, equation.invars))
        body = _body(equation)
        if body is None:
            outputs = tuple(table.new() for _ in equation.outvars)
            flat.steps.append(Step(equation, inputs, outputs, callers))
        else:
            inner, inner_constants = body
            own = dict(zip(inner.invars, inputs, strict=True))
            outputs = _flatten_into(
                flat, table, inner, inner_constants, own, (*callers, equation)
            )
        positions |= dict(zip(equation.outvars, outputs, strict=True))
    return tuple(map(read, jaxpr.outvars))


def _body(equation) -> tuple[Any, Sequence[Any]] | None:
    if equation.primitive.name not in CALLS:
        return None
    for name in BODIES:
        body = equation.params.get(name)
        if hasattr(body, "consts"):
            return body.jaxpr, body.consts
        if hasattr(body, "eqns"):
            return body, ()
    return None


def apply(step: Step, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of one equation, on the device that the inputs are on."""
    primitive = step.equation.primitive
    bound = primitive.get_bind_params(step.equation.params)
    # Older versions of jax give functions to bind with, newer ones none.
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    result = primitive.bind(*functions, *inputs, **parameters)
    return list(result) if primitive.multiple_results else [result]


def walk(
    program: Steps, arguments: Sequence[Any], apply: Callable = apply
) -> Iterator[tuple[Step, list[Any], list[Any]]]:
    """Each step with its inputs and outputs; the generator's value is the results."""
    table = dict(zip(program.arguments, arguments, strict=True)) | dict(
        program.constants
    )

    def read(place):
        return place[0] if isinstance(place, tuple) else table[place]

    for step in program.steps:
        inputs = list(map(read, step.inputs))
        outputs = apply(step, inputs)
        table |= dict(zip(step.outputs, outputs, strict=True))
        yield step, inputs, outputs
    return list(map(read, program.results))


def evaluate(
    program: Steps, arguments: Sequence[Any], apply: Callable = apply
) -> list[Any]:
    """The flat results, equation by equation."""
    steps = walk(program, arguments, apply)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def relative_error(found: Any, expected: Any, at_least: float = 0.0) -> float:
    """The largest difference, over the largest expected magnitude or ``at_least``.

    It is infinite where one of the two is not finite and the other is not so, and where
    the shapes differ.
    """
    found, expected = _plain(found), _plain(expected)
    if found.shape != expected.shape:
        return float("inf")
    good = np.isfinite(expected)
    if not np.array_equal(found[~good], expected[~good], equal_nan=True):
        return float("inf")
    difference = np.abs(found[good] - expected[good]).max(initial=0.0)
    scale = max(magnitude([expected]), at_least)
    error = float(difference / scale) if scale else float(difference)
    return error if np.isfinite(error) else float("inf")


def magnitude(values: Sequence[Any]) -> float:
    """Of the largest finite number in floating arrays."""
    found = [0.0]
    for value in values:
        if jnp.issubdtype(jnp.result_type(value), jnp.floating):
            plain = np.abs(_plain(value))
            found.append(plain[np.isfinite(plain)].max(initial=0.0))
    return float(max(found))


def _plain(value: Any) -> np.ndarray:
    if _is_key(value):
        value = jax.random.key_data(value)
    return np.asarray(value).astype(np.float64)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def find_suspect(
    program: Steps,
    arguments: Sequence[Any],
    apply_on_device: Callable,
    run_on_device: Callable,
    tolerance: float,
) -> Suspect | None:
    """The first operation that the device gets wrong.

    Args:
        program: see `flatten`.
        arguments: flat, on the reference's device.
        apply_on_device: like `apply`.
        run_on_device: ``(function, arguments) -> results``, compiled as a whole.
        tolerance: of the relative error of one operation.
    """
    expected = []
    for step, inputs, outputs in walk(program, arguments):
        # A sum of large numbers may be small, and then off by as much as it is large.
        scale = magnitude([v for v in inputs if not _is_key(v)])
        expected.append((outputs, scale))
        error = _worst(apply_on_device(step, inputs), outputs, scale)
        if error > tolerance:
            return _suspect(step, error, alone=True)

    def all_values(*arguments):
        return [outputs for _, _, outputs in walk(program, arguments)]

    found = run_on_device(all_values, arguments)
    for step, outputs, wanted in zip(program.steps, found, expected, strict=True):
        error = _worst(outputs, *wanted)
        if error > 10 * tolerance:  # these inputs have errors of their own
            return _suspect(step, error, alone=False)
    return None


def _worst(found: Sequence[Any], expected: Sequence[Any], scale: float) -> float:
    errors = (
        relative_error(*pair, at_least=scale)
        for pair in zip(found, expected, strict=True)
    )
    return max(errors, default=0.0)


def _suspect(step: Step, error: float, alone: bool) -> Suspect:
    equation = step.equation
    read = ", ".join(v.aval.str_short() for v in equation.invars)
    written = ", ".join(v.aval.str_short() for v in equation.outvars)
    around = (*step.callers, equation)
    scopes = (str(each.source_info.name_stack) for each in around)
    lines = map(_line, reversed(around))
    return Suspect(
        operation=equation.primitive.name,
        types=f"{read} -> {written}",
        scope="/".join(filter(None, scopes)),
        line=next(filter(None, lines), "unknown line"),
        error=error,
        alone=alone,
    )


def _line(equation: Any) -> str:
    from jax._src import source_info_util  # JAX has no public way to ask

    line = source_info_util.summarize(equation.source_info)
    path, colon, rest = line.partition(":")
    if not colon or path.startswith("<"):
        return ""
    return f"{os.path.relpath(path) if os.path.isabs(path) else path}:{rest}"
