"""Runs a lowered program through MLX, operation by operation.

Apple's maintained plugins compute with MLX. Here the same StableHLO that such a plugin
gets is walked with ``jaxlib.mlir``, and each operation is done by ``mlx.core`` on the
CPU: by the library, that is, not by a plugin's own lowering.
"""

from collections.abc import Sequence

import jax
import ml_dtypes
import mlx.core as mx
import numpy as np
from jaxlib.mlir import ir
from metal.mlx_ops import DTYPES, OPERATIONS, UnknownOperation

mx.set_default_device(mx.cpu)
RETURNS = ("func.return", "stablehlo.return")


def run(lowered: jax.stages.Lowered, arguments: Sequence) -> list[np.ndarray]:
    """The results of a lowered program, leaves in order.

    Args:
        lowered: of ``jax.jit(f).lower(..)``.
        arguments: its leaves that the program has kept, numpy arrays.

    Raises:
        UnknownOperation: for what ``OPERATIONS`` lacks.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in module.body
        }
        values = [_to_mlx(np.asarray(argument)) for argument in arguments]
        results = _call(functions, "main", values)
        mx.eval(results)
    return [_to_numpy(result) for result in results]


def _call(functions, name: str, arguments: list[mx.array]) -> list[mx.array]:
    block = functions[name].regions[0].blocks[0]
    return _run_block(functions, block, arguments, {})


def _run_block(functions, block, arguments, outer) -> list[mx.array]:
    """``outer`` holds the values that the block sees from around it."""
    values = dict(outer)
    values.update(zip(block.arguments, arguments, strict=True))
    for view in block:
        op = view.operation
        operands = [values[operand] for operand in op.operands]
        if op.name in RETURNS:
            return operands
        results = _run_operation(functions, op, operands, values)
        for result, value in zip(op.results, results, strict=True):
            expected = ir.RankedTensorType(result.type)
            if (
                list(value.shape) != list(expected.shape)
                or value.dtype != DTYPES[str(expected.element_type)]
            ):
                raise TypeError(
                    f"{op.name} gave {value.dtype}{value.shape}, not {expected}"
                )
            values[result] = value
    raise UnknownOperation("a block that does not return")


def _run_operation(functions, op, operands, values) -> list[mx.array]:
    if op.name == "func.call":
        callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        return _call(functions, callee, operands)
    if op.name == "stablehlo.while":
        condition, body = (region.blocks[0] for region in op.regions)
        state = operands
        while _run_block(functions, condition, state, values)[0].item():
            state = _run_block(functions, body, state, values)
            mx.eval(state)
        return state
    if op.name == "stablehlo.case":
        index = int(operands[0].item())
        last = len(op.regions) - 1
        region = op.regions[index if 0 <= index <= last else last]
        return _run_block(functions, region.blocks[0], [], values)
    if op.name == "stablehlo.optimization_barrier":
        return operands
    if op.name not in OPERATIONS:
        raise UnknownOperation(f"{op.name} is not mapped to MLX")
    return [OPERATIONS[op.name](op, *operands)]


def _to_mlx(value: np.ndarray) -> mx.array:
    if value.dtype.name == "bfloat16":
        return mx.array(value.astype(np.float32)).astype(mx.bfloat16)
    return mx.array(np.array(value, order="C"))


def _to_numpy(value: mx.array) -> np.ndarray:
    if value.dtype == mx.bfloat16:
        return np.array(value.astype(mx.float32)).astype(ml_dtypes.bfloat16)
    return np.array(value)
