"""How long programs take to compile: trace and lower, compile, first call.

    python benchmarks/compile.py [--backend gpu] [--models RCAN3D ..] [--json FILE]

Each model in a fresh process, with no cache of compiled programs: the program that
makes its weights (``init``), and a training step (mean squared error, its gradient,
AdamW, donated state). ``trace`` is tracing and lowering to StableHLO, ``compile`` is
XLA's part, ``first call`` runs the compiled program once and waits for it; ``ours`` is
their sum, what a user waits for. ``StableHLO`` counts the lines that XLA was given.
There is no peer here.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
import models  # noqa: E402
from benchmarks.fno import CASES  # noqa: E402
from benchmarks.measuring import (  # noqa: E402
    add_row,
    begin,
    in_own_process,
    parser,
    train_step,
    write,
)


class Trained(NamedTuple):
    """A model and the shapes of a batch: of the input, and of the output."""

    model: nn.Module
    shape: tuple[int, ...]
    output: tuple[int, ...]


def _fno(kind: type[models.FNO], key: str) -> Trained:
    case = CASES[key]
    model = kind(case.modes, 1, 1, case.hidden)
    return Trained(model, (case.batch, *case.grid, 1), (case.batch, *case.grid, 1))


def _volume(model: models.EDSR3D, batch: int, grid: tuple[int, ...]) -> Trained:
    finer = (size * by for size, by in zip(grid, model.scale, strict=True))
    return Trained(model, (batch, *grid, 1), (batch, *finer, 1))


# The FNOs of benchmarks/fno.py, and the networks and patches of benchmarks/sr.py.
PATCHES = 1, (16, 64, 64)
MODELS = {
    "FNO2D": _fno(models.FNO2D, "2d-64"),
    "FNO3D": _fno(models.FNO3D, "3d-32"),
    "RCAN3D": _volume(models.RCAN3D(), *PATCHES),
    "EDSR3D": _volume(models.EDSR3D(), *PATCHES),
    "UNet3D": _volume(models.UNet3D(), *PATCHES),
}


def compile_timed(function, *arguments, donate=()) -> tuple[Any, dict[str, Any]]:
    """The compiled program, and the seconds of its parts."""
    start = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
    traced = time.perf_counter()
    program = lowered.compile()
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    return program, {**seconds, "lines": lowered.as_text().count("\n")}


def measure(key: str) -> dict[str, Any]:
    """Seconds of init and step of one model, here."""
    model, shape, output = MODELS[key]
    x, y = jnp.ones(shape), jnp.ones(output)
    random_key = jax.random.key(0)
    jax.block_until_ready((x, y, random_key))
    program, init = compile_timed(model.init, random_key, x[:1])
    start = time.perf_counter()
    variables = jax.block_until_ready(program(random_key, x[:1]))
    init["first call"] = time.perf_counter() - start
    optimizer = optax.adamw(1e-3)
    carry = variables, jax.jit(optimizer.init)(variables)
    program, step = compile_timed(train_step(model, optimizer), carry, x, y, donate=0)
    start = time.perf_counter()
    jax.block_until_ready(program(carry, x, y))
    step["first call"] = time.perf_counter() - start
    return {"init": init, "train step": step}


def main() -> None:
    made = parser(__doc__, repeats=None)
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--child", choices=MODELS, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        jaxops.select_backend(options.backend)
        print(json.dumps(measure(options.child)))
        return
    record = begin(options)
    for key in options.models:
        arguments = ("--child", key, "--backend", options.backend)
        uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        found = in_own_process(__file__, *arguments, **uncached)
        for name, parts in (found or {}).items():
            lines = parts.pop("lines")
            results = {"ours": {"seconds": sum(parts.values())}}
            results |= {part: {"seconds": seconds} for part, seconds in parts.items()}
            results["StableHLO"] = {"rate": lines, "unit": "lines"}
            shape = MODELS[key].shape
            add_row(record, key, name, results, sizes={"input": shape})
    write(record, options.json)


if __name__ == "__main__":
    main()
