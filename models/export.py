"""A saved model as one file that IREE's runtime runs without JAX, on a Mac's GPU too.

    python -m models.export MODEL --target metal --out FILE.vmfb [--shape ..] [--source]

The weights lie in the file. The same program, compiled for this machine's CPU, is run
and compared with JAX before anything is written, and FILE.json says what goes in, what
comes out and how to run it. Needs ``iree-base-compiler`` here, and no more than
``iree-base-runtime`` where the file is used.
"""

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from jaxops.device import trace_for
from models.atomic import replace_file
from models.bundle import load

# Chosen by what was seen to work; Metal's text and formats are this version's.
IREE_VERSION = "3.13.0"
INSTALL = (
    f"pip install iree-base-compiler=={IREE_VERSION} iree-base-runtime=={IREE_VERSION}"
)
# Without the first flag IREE turns float64 into float32 and says nothing.
COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false",)
TARGET_FLAGS = {
    "metal": (
        "--iree-hal-target-device=metal",
        "--iree-metal-target-platform=macos",
        "--iree-metal-compile-to-metallib=false",  # Apple's compiler, on the Mac
    ),
    "vulkan": ("--iree-hal-target-device=vulkan",),
    "cpu": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=generic",
    ),
}
DEVICES = {"metal": "metal", "vulkan": "vulkan", "cpu": "local-task"}
LARGE = 512 * 2**20  # bytes of weights
TOLERANCE = 1e-4  # of the largest value, IREE's CPU kernels against JAX's

RUN = """import iree.runtime as rt
import numpy as np

config = rt.Config("{device}")
module = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, "{file}"), config)
x = np.zeros({shape}, np.{dtype})
print(module.main(x).to_host().shape)
"""


class ExportError(RuntimeError):
    """IREE is missing, refuses the program, or computes something else."""


class Exported(NamedTuple):
    """What :func:`export` wrote, and how far the check was off.

    Attributes:
        files: the module, its description and, where asked for, the Metal source.
        error: largest difference between IREE's CPU and JAX, relative to the largest
            value.
        how_to_run: Python that runs the module without JAX.
    """

    files: tuple[Path, ...]
    error: float
    how_to_run: str


def export(
    path: str | Path,
    out: str | Path,
    target: str = "metal",
    shape: Sequence[int] | None = None,
    source: bool = False,
) -> Exported:
    """Compiles a saved model's inference: ``main(x) -> y``, float32.

    Args:
        path: what ``models.save`` wrote.
        out: the module, ``.vmfb`` by convention; a description goes beside it.
        target: ``"metal"``, ``"vulkan"`` or ``"cpu"`` (of this machine's kind).
        shape: of x, batch and channels included, for the module has one shape; the
            model's ``example_shape()`` unless told otherwise.
        source: writes the Metal Shading Language text beside the module as well.

    Raises:
        ExportError: without IREE; where its compiler refuses the program; where the
            result on the CPU is not JAX's. Nothing is written then.
        ValueError: for another target, a shape that is not the model's, ``source``
            without Metal, or a file that is no saved model.
    """
    if target not in TARGET_FLAGS:
        raise ValueError(f"target is one of {', '.join(TARGET_FLAGS)}; got {target!r}.")
    if source and target != "metal":
        raise ValueError(f"Only the target metal has Metal source; got {target!r}.")
    find_compiler()
    model, variables, extra = load(path)
    shape = _input_shape(model, shape)
    out = Path(out)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    if num_bytes > LARGE:
        warnings.warn(
            f"The weights are {num_bytes / 2**20:.0f} MiB, and all of them are put "
            "into the module: compiling takes several times that memory.",
            stacklevel=2,
        )

    def main(x):
        return model.apply(variables, x)

    sample = np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)
    kind = "metal" if target in ("metal", "vulkan") else "cpu"
    with trace_for(kind):
        try:
            expected = np.asarray(jax.jit(main)(sample))
        except ValueError as error:
            raise ValueError(f"The model takes no {shape=}: {error}") from error
        program = stablehlo(main, sample)
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        error = _check(program, sample, expected, temporary)
        module, shaders = temporary / "module.vmfb", temporary / "shaders"
        dump = (f"--iree-hal-dump-executable-binaries-to={shaders}",) if source else ()
        compile_program(program, target, module, *dump)
        how_to_run = RUN.format(
            device=DEVICES[target], file=out.name, shape=shape, dtype=sample.dtype
        )
        about = {
            "model": type(model).__name__,
            "target": target,
            "iree": IREE_VERSION,
            "function": "main",
            "input": {"shape": list(shape), "dtype": "float32"},
            "output": {"shape": list(expected.shape), "dtype": str(expected.dtype)},
            "error_on_cpu": error,
            "how_to_run": how_to_run.splitlines(),
            "extra": _readable(extra),
        }
        texts = {out.with_suffix(".json"): json.dumps(about, indent=2) + "\n"}
        if source:
            texts[out.with_suffix(".metal")] = _joined(shaders)
        for name, text in texts.items():
            _write(name, text.encode())
        _write(out, module.read_bytes())
    return Exported((out, *texts), error, how_to_run)


def stablehlo(function: Callable, *arguments: Any, lone_sums: bool = True) -> str:
    """The program of a function, as text for IREE.

    Args:
        function: of arrays; jitted here.
        *arguments: pytrees, as ``jax.jit(function).lower`` takes them.
        lone_sums: puts a barrier behind each reduction, and behind each conversion of
            half precision to float32. IREE 3.13 otherwise joins, say, ``x - mean(x)``
            to one GPU kernel in which threads read sums of other threads with nothing
            that waits for them: Metal shaders of norms were wrong.
    """
    return as_text(jax.jit(function).lower(*arguments), lone_sums)


def as_text(lowered: jax.stages.Lowered, lone_sums: bool = True) -> str:
    """:func:`stablehlo` of what is lowered already."""
    if not lone_sums:
        return lowered.as_text()
    from jaxlib.mlir import ir

    with lowered.compiler_ir("stablehlo").context:
        copy = ir.Module.parse(lowered.as_text())
        _separate_sums(copy.operation)
        return str(copy)


def _separate_sums(operation) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo as dialect

    for region in operation.regions:
        for block in region:
            operations = list(block)
            for op, following in zip(operations, [*operations[1:], None], strict=True):
                if not (op.operation.name == "stablehlo.reduce" or _widens(op)):
                    _separate_sums(op.operation)
                    continue
                results = list(op.operation.results)
                uses = [list(result.uses) for result in results]
                with ir.InsertionPoint(following), ir.Location.unknown():
                    barrier = dialect.OptimizationBarrierOp(results)
                for places, new in zip(uses, barrier.results, strict=True):
                    for use in places:
                        use.owner.operands[use.operand_number] = new


def _widens(op) -> bool:
    """Whether this makes longer floats: IREE repeats it in each kernel with a sum."""
    from jaxlib.mlir import ir

    if op.operation.name != "stablehlo.convert":
        return False
    types = (op.operation.operands[0].type, op.operation.results[0].type)
    before, after = (ir.RankedTensorType(type_).element_type for type_ in types)
    return str(before) in ("f16", "bf16") and str(after) == "f32"


def compile_program(program: str, target: str, output: Path, *flags: str) -> None:
    """Writes a module of StableHLO text for one of ``TARGET_FLAGS``.

    Raises:
        ExportError: without IREE's compiler, or with what that says.
    """
    run_compiler(program, output, *COMMON_FLAGS, *TARGET_FLAGS[target], *flags)


def run_compiler(text: str, output: Path, *flags: str) -> None:
    """``iree-compile`` of a text; raises ExportError with what it says."""
    command = [find_compiler(), "-", *flags, "-o", str(output)]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode:
        raise ExportError(f"IREE can't compile the program:\n{result.stderr[:4000]}")


def find_compiler() -> str:
    """The path of ``iree-compile``, of the version that this project knows.

    Raises:
        ExportError: with the command that installs it.
    """
    for package in ("iree-base-compiler", "iree-base-runtime"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise ExportError(
                f"Exporting needs {package}, which is missing. Install it: {INSTALL}"
            ) from error
        if found != IREE_VERSION:
            raise ExportError(
                f"Exporting needs {package} {IREE_VERSION}, whose Metal shaders were "
                f"checked; got {found}. Install it: {INSTALL}"
            )
    from iree.compiler.tools.binaries import find_tool

    return find_tool("iree-compile")


def load_module(path: str | Path, device: str) -> Callable[..., list[np.ndarray]]:
    """A module's ``main``, from numpy arrays to numpy arrays."""
    import iree.runtime as runtime

    config = runtime.Config(device)
    module = runtime.load_vm_module(
        runtime.VmModule.copy_buffer(config.vm_instance, Path(path).read_bytes()),
        config,
    )

    def main(*arguments: np.ndarray) -> list[np.ndarray]:
        results = module["main"](*arguments)
        results = results if isinstance(results, tuple) else (results,)
        return [np.array(result.to_host()) for result in results]

    return main


def _check(program: str, sample, expected, folder: Path) -> float:
    module = folder / "check.vmfb"
    compile_program(program, "cpu", module)
    (result,) = load_module(module, "local-sync")(sample)
    scale = max(float(np.abs(expected).max()), math.ulp(0.0))
    error = float(np.abs(result - expected).max()) / scale
    if not error <= TOLERANCE:
        raise ExportError(
            f"On the CPU the exported program is off by {error:.1e} of the largest "
            f"value, more than {TOLERANCE:.0e}, so nothing was written. Please report "
            "it, with the model's configuration."
        )
    return error


def _input_shape(model: nn.Module, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None and not hasattr(model, "example_shape"):
        axes = "".join(" N" for _ in getattr(model, "n_modes", ())) or " .."
        raise ValueError(
            f"{type(model).__name__} runs on any grid, but a module on one: give "
            f"--shape BATCH{axes} {getattr(model, 'in_channels', 'CHANNELS')}."
        )
    shape = tuple(model.example_shape() if shape is None else shape)
    if not all(size >= 1 for size in shape):
        raise ValueError(f"Sizes of a shape are at least 1; got {shape=}.")
    return shape


def _readable(tree: Any) -> Any:
    """For JSON: what the file keeps beside the weights, such as its normalisers."""
    if isinstance(tree, dict):
        return {str(key): _readable(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_readable(value) for value in tree]
    if isinstance(tree, (np.ndarray, np.generic)):
        return tree.tolist() if tree.size <= 64 else f"an array {tree.shape}"
    return tree


def _joined(folder: Path) -> str:
    parts = [
        f"// {'-' * 20} {path.stem}\n{path.read_text()}"
        for path in sorted(folder.glob("*.metal"))
    ]
    return "\n".join(parts)


def _write(path: Path, data: bytes) -> None:
    with replace_file(path) as temporary:
        temporary.write_bytes(data)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models.export", description=export.__doc__.splitlines()[0]
    )
    parser.add_argument("model", metavar="MODEL", help="a file of models.save")
    parser.add_argument("--target", choices=TARGET_FLAGS, default="metal")
    parser.add_argument("--out", metavar="FILE", required=True, help="FILE.vmfb")
    parser.add_argument(
        "--shape",
        type=int,
        nargs="+",
        metavar="N",
        help="of the input: batch, grid, channels",
    )
    parser.add_argument(
        "--source", action="store_true", help="write the Metal shaders as well"
    )
    options = parser.parse_args(arguments)
    try:
        written = export(
            options.model, options.out, options.target, options.shape, options.source
        )
    except (ExportError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written.files:
        print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    print(f"compiled for the CPU it is within {written.error:.1e} of JAX")
    print(f"to run it, with iree-base-runtime alone:\n\n{written.how_to_run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
