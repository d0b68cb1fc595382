"""The ways that a program is checked without a Mac, each giving an error or a refusal.

``Lanes`` keeps what is made on the way, so that tests and the table (``__main__.py``)
compile and run each program once.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from metal.iree_metal import MetalProgram, compile_to_metal
from metal.shader_run import Module, ShaderRunner

from models.export import as_text
from models.programs import program

# Of a leaf's largest value. A ulp of float16 is 1e-3, of bfloat16 8e-3.
MLX_TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
SHADER_TOLERANCE = {"float32": 2e-5, "float16": 1e-2}
# Some leaves are zero but for rounding: the gradient of a bias before a norm, or of an
# attention's keys. What one ulp of the arguments changes, times this, is no error.
# Ratios up to 2.5 were seen in float32; MLX, IREE and XLA round at other places.
SPREADS = 8


class Reference(NamedTuple):
    """A lowered program, and what XLA makes of it on the CPU.

    Attributes:
        name: of the program.
        dtype: that it computes in.
        lowered: by ``jax.jit(..).lower``.
        arguments: leaves, in the order of the program's own arguments.
        expected: leaves of the result.
        spread: how far each moves if all arguments move by one ulp.
    """

    name: str
    dtype: str
    lowered: jax.stages.Lowered
    arguments: list[np.ndarray]
    expected: list[np.ndarray]
    spread: list[float]


@functools.cache
def reference(model_name: str, stage: str, dtype: str = "float32") -> Reference:
    expected = reference_of(*program(model_name, stage, dtype), dtype)
    if dtype == "float32":
        return expected
    # Half precision is as good as its own rounding, which float32 shows.
    exact = reference(model_name, stage)
    spread = [
        max(own, _largest_difference(half, leaf))
        for own, half, leaf in zip(
            expected.spread, expected.expected, exact.expected, strict=True
        )
    ]
    return expected._replace(spread=spread)


def reference_of(name: str, function, arguments, dtype="float32") -> Reference:
    # Every leaf stays an argument, whether it is used or not.
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    # Without LLVM's optimisations: compiling takes an eighth of the time.
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})

    def leaves(*values) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(*values))]

    expected = leaves(*arguments)
    random = np.random.default_rng(0)
    moved = leaves(*jax.tree.map(functools.partial(_one_ulp_on, random), arguments))
    spread = [_largest_difference(a, b) for a, b in zip(expected, moved, strict=True)]
    flat = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
    return Reference(name, dtype, lowered, flat, expected, spread)


def _one_ulp_on(random, leaf):
    leaf = np.asarray(leaf)
    if leaf.dtype.kind in "iub":
        return leaf
    ulp = np.asarray(jax.numpy.finfo(leaf.dtype).eps, np.float32)
    signs = random.choice(np.float32([-1, 1]), leaf.shape)
    return (leaf.astype(np.float32) * (1 + ulp * signs)).astype(leaf.dtype)


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    if not a.size:
        return 0.0
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def largest_error(
    results: Sequence[np.ndarray], expected: Reference, tolerance: float
) -> float:
    """Of all leaves, relative to a leaf's largest value; infinite for NaN.

    What is more than the tolerance, but no more than rounding, is left out.

    Raises:
        TypeError: for another number of leaves, another shape or dtype.
    """
    errors = [0.0]
    for result, leaf, spread in zip(
        results, expected.expected, expected.spread, strict=True
    ):
        if result.shape != leaf.shape or result.dtype != leaf.dtype:
            raise TypeError(
                f"{expected.name}: {result.dtype}{result.shape} in place of "
                f"{leaf.dtype}{leaf.shape}"
            )
        difference = _largest_difference(result, leaf)
        scale = float(np.abs(leaf.astype(np.float64)).max(initial=0.0)) or 1.0
        error = float("inf") if np.isnan(difference) else difference / scale
        if error <= tolerance or not difference <= SPREADS * spread:
            errors.append(error)
    return max(errors)


class Lanes:
    """Programs through MLX, to Metal and through their shaders, each made once.

    Args:
        folder: for what is compiled; may be removed afterwards.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._metal: dict[tuple[str, bool], MetalProgram] = {}

    @functools.cached_property
    def runner(self) -> ShaderRunner:
        return ShaderRunner(self._folder)

    def mlx_error(self, expected: Reference) -> float:
        """Raises UnknownOperation where an operation is not mapped."""
        from metal import mlx_interpreter  # not where there is no MLX

        results = mlx_interpreter.run(expected.lowered, expected.arguments)
        return largest_error(results, expected, MLX_TOLERANCE[expected.dtype])

    def metal(self, expected: Reference, lone_sums: bool = True) -> MetalProgram:
        """Raises ExportError where IREE refuses the program."""
        key = (expected.name, lone_sums)
        if key not in self._metal:
            text = as_text(expected.lowered, lone_sums)
            self._metal[key] = compile_to_metal(text, self._folder)
        return self._metal[key]

    def shader_errors(
        self, expected: Reference, lone_sums: bool = True
    ) -> tuple[float, float]:
        """Threads in forward and in reverse order."""
        return errors_of(self.runner.build(self.metal(expected, lone_sums)), expected)


def errors_of(module: Module, expected: Reference) -> tuple[float, float]:
    tolerance = SHADER_TOLERANCE[expected.dtype]
    forward, reverse = (
        largest_error(module(expected.arguments, reverse), expected, tolerance)
        for reverse in (False, True)
    )
    return forward, reverse
