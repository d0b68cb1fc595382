"""A lowered program as its operations, each with types, attributes and Python line.

JAX lowers for a platform whose plugin need not be there, so a program for an Apple GPU
can be read on any machine. Where only the plugin's own rules could lower a function it
is lowered for the CPU in their place, and what the CPU would call is looked at.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax

from jaxops.device import trace_for


class Tensor(NamedTuple):
    """Shape (-1: unknown) and element type: "f32", "bf16", "ui64", "complex<f32>"."""

    shape: tuple[int, ...]
    element: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.element}[{','.join(map(str, self.shape))}]"


class Operation:
    """One operation of a lowered program.

    Attributes:
        name: without "stablehlo.", as in "dot_general"; other dialects keep theirs.
    """

    def __init__(self, raw: Any, outer_line: Callable[[], str] = str):
        self._raw = raw
        self._outer_line = outer_line
        self.name: str = raw.name.removeprefix("stablehlo.")

    @cached_property
    def operands(self) -> tuple[Tensor, ...]:
        """What is no tensor (tokens, tuples) is left out."""
        return tuple(filter(None, (_tensor(str(o.type)) for o in self._raw.operands)))

    @cached_property
    def results(self) -> tuple[Tensor, ...]:
        """Of a function: what it takes."""
        values = self._raw.results
        if self.name == "func.func":
            blocks = self._raw.regions[0].blocks
            values = blocks[0].arguments if len(blocks) else ()
        return tuple(filter(None, (_tensor(str(v.type)) for v in values)))

    def text(self, attribute: str) -> str:
        """An attribute as MLIR prints it; "" if there is none."""
        attributes = self._raw.attributes
        return str(attributes[attribute]) if attribute in attributes else ""

    def numbers(self, attribute: str, part: str = "") -> tuple[int, ...]:
        """The whole numbers in an attribute, or in its ``part = [..]``; () if none."""
        text = self.text(attribute)
        if part:
            found = re.search(rf"{part} = \[([^\]]*)\]", text)
            text = found.group(1) if found else ""
        text = text.removeprefix("array<i64").partition(" : ")[0]
        return tuple(map(int, re.findall(r"-?\d+", text)))

    @property
    def called(self) -> str:
        """What a custom call calls."""
        return self.text("call_target_name").strip('"')

    @cached_property
    def branches(self) -> tuple[tuple[str, ...], ...]:
        """For each region, the names of the operations in it."""
        return tuple(
            tuple(Operation(c.operation).name for b in r.blocks for c in b.operations)
            for r in self._raw.regions
        )

    @cached_property
    def line(self) -> str:
        """``file.py:12``, the user's innermost Python line; "" where none is known.

        Of what holds the operation, or calls it, where it has none itself.
        """
        return _line(str(self._raw.location)) or self._outer_line()


def trace(function: Callable, arguments: tuple, options: dict) -> Any:
    """What `lower` takes; convolutions take the forms that they have on Apple GPUs.

    Arrays and `jax.ShapeDtypeStruct` are arguments of the program; all else is
    constant, except to a function that is jitted already.
    """
    with trace_for("metal"):
        if hasattr(function, "trace"):
            return function.trace(*arguments, **options)
        return _trace(function, arguments, options)


def _trace(function: Callable, arguments: tuple, options: dict) -> Any:
    leaves, tree = jax.tree.flatten((arguments, options))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def of_arrays(arrays):
        rest = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        mixed = [next(rest) if traced else leaf for leaf, traced in pairs]
        arguments, options = jax.tree.unflatten(tree, mixed)
        return function(*arguments, **options)

    arrays = [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced]
    return jax.jit(of_arrays).trace(arrays)


def lower(traced: Any, platform: str) -> tuple[Any, Exception | None]:
    """The MLIR module for a platform, and what kept it from being for that one."""
    try:
        return _module(traced, platform), None
    except (NotImplementedError, ValueError) as error:
        return _module(traced, "cpu"), error


def _module(traced: Any, platform: str) -> Any:
    return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


def operations(module: Any) -> Iterator[Operation]:
    """Every operation of every function, those in nested regions too."""
    calls: dict[str, Operation] = {}  # the first call of each function
    found: list[Operation] = []
    for function in module.body.operations:
        name = Operation(function.operation).text("sym_name").strip('"')

        def line_of_call(name: str = name) -> str:
            return calls[name].line if name in calls else ""

        found.append(Operation(function.operation, line_of_call))
        found.extend(_walk(function.operation, line_of_call))
    for operation in found:
        if operation.name == "func.call":
            calls.setdefault(operation.text("callee").lstrip("@"), operation)
    yield from found


def _walk(raw: Any, outer_line: Callable[[], str]) -> Iterator[Operation]:
    for region in raw.regions:
        for block in region.blocks:
            for child in block.operations:
                operation = Operation(child.operation, outer_line)
                yield operation
                yield from _walk(child.operation, lambda o=operation: o.line)


@lru_cache(maxsize=4096)
def _tensor(text: str) -> Tensor | None:
    found = re.fullmatch(r"tensor<((?:(?:\d+|\?)x)*)(.+)>", text)
    if found is None:
        return None
    lengths = found.group(1).split("x")[:-1]
    shape = tuple(-1 if length == "?" else int(length) for length in lengths)
    return Tensor(shape, found.group(2).partition(",")[0])


def _line(location: str) -> str:
    """The innermost line outside of installed packages, or the innermost."""
    found = re.findall(r'"([^"]*)":(\d+):\d+', location)
    # From here on out it is who asks, and not the program.
    lines = list(itertools.takewhile(lambda line: line[0] != __file__, found))
    own = [line for line in lines if f"{os.sep}site-packages{os.sep}" not in line[0]]
    for path, number in (*own, *lines):
        short = os.path.relpath(path) if os.path.isabs(path) else path
        return f"{path if short.startswith('..') else short}:{number}"
    return ""
