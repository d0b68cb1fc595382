"""Peak memory of training steps: ours and neuraloperator's; volumes; what fits.

    python benchmarks/memory.py [--backend gpu] [--cases 2d-64 3d-32] [--json FILE]
    python benchmarks/memory.py --largest 16 [--run]

Each contender in a fresh process: imports, data, weights; then, on a CPU, the resident
size, the optimiser's state, ten steps (mean squared error, AdamW, float32), and how
far the peak of the resident size has grown beyond (``growth``). Ours is compiled
before; memory that was freed until then is given back to the system first, on both
sides. On a GPU ``growth`` is that of what the allocator hands out, of which the peak
cannot be reset in JAX: what XLA tries while it compiles may take more than the steps.

Neuraloperator and what is called ``freed`` run without ``jaxops.host_memory``, which
keeps freed pages for the next call. ``ours`` computes a batch as ``train.fno`` does by
default, ``in parts`` in four or two parts, as by its ``--micro-batch``. ``XLA`` is the
size that XLA plans for our step: temporaries, arguments and results. A ratio is theirs
by ours: 2 means that ours takes half the memory. Volume networks have no peer here:
given are XLA's plan, and its bytes a voxel of the input.

``--largest GB`` looks for the largest cubic grid on which an FNO3D (16 modes an axis,
32 channels, batch 1) fits, by XLA's plan alone, without running it; ``--run`` then runs
that one.
"""

import argparse
import ctypes
import functools
import gc
import json
import math
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
from benchmarks.compile import MODELS  # noqa: E402
from benchmarks.fno import CASES, CPU_CASES, LEARNING_RATE, Case, make_model  # noqa: E402
from benchmarks.measuring import (  # noqa: E402
    add_row,
    begin,
    in_own_process,
    parser,
    train_step,
    write,
)
from jaxops import host_memory  # noqa: E402
from models import FNO3D, to_neuralop  # noqa: E402
from train import loop  # noqa: E402
from train.volume_losses import mse  # noqa: E402

STEPS = 10  # a heap in pieces shows after some
# What a fresh process does, and whether it keeps freed host memory, as ours does.
SIDES = {
    "ours": ("ours", True),
    "ours, freed": ("ours", False),
    "ours in parts": ("ours", True),
    "ours in parts, freed": ("ours", False),
    "neuraloperator": ("neuraloperator", False),
}
PARTS = {"3d-32": 2}  # of a batch, see ``train.fno --micro-batch``; elsewhere 4
LARGEST = {"n_modes": (16, 16, 16), "hidden_channels": 32}
GRID_STEP = 8  # what --largest grows the grid by
VOLUMES = ("UNet3D", "EDSR3D", "RCAN3D")
PASSES = ("forward", "train step")


def planned_bytes(program) -> int:
    """What a compiled program takes by XLA's plan."""
    plan = program.memory_analysis()
    return (
        plan.temp_size_in_bytes
        + plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
    )


def plan(model, shape, output, name: str):
    """The compiled program of a pass, made of shapes alone."""
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, output))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    if name == "forward":
        return jax.jit(model.apply).lower(variables, x).compile()
    optimizer = optax.adamw(LEARNING_RATE)
    carry = variables, jax.eval_shape(optimizer.init, variables)
    step = jax.jit(train_step(model, optimizer), donate_argnums=0)
    return step.lower(carry, x, y).compile()


def resident() -> tuple[int, int]:
    """Bytes of the resident size: now, and its peak; the peak alone, twice, where
    there is no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if platform.system() == "Darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return tuple(1024 * int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM"))


def settle() -> int:
    """Give freed memory back, reset the peak, and return the resident size."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # the peak becomes the size now
    return resident()[0]


def our_growth(key: str, parts: str | None = None) -> dict[str, int]:
    x, y, variables = _start(key)
    model = make_model(CASES[key])
    if parts is None:
        micro_batch = loop.default_micro_batch(model, x.shape)
    else:
        micro_batch = len(x) // int(parts)
    optimizer = optax.adamw(LEARNING_RATE)
    step = loop.make_train_step(
        loop.make_forward(model, None, None), optimizer, mse, micro_batch
    )
    state = loop.create_state(model, optimizer, x.shape, seed=0)
    program = loop.compile_train_step(step).lower(state, (x, y)).compile()
    make_state = jax.jit(optimizer.init).lower(variables["params"]).compile()
    on_gpu = jax.default_backend() == "gpu"
    device = jax.devices()[0]
    batch = tuple(jax.block_until_ready(jnp.asarray(array)) for array in (x, y))
    state = state.replace(params=variables["params"], opt_state=None)
    del variables  # the steps take its place
    before = device.memory_stats()["bytes_in_use"] if on_gpu else settle()
    state = state.replace(opt_state=make_state(state.params))
    for _ in range(STEPS):
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
    peak = device.memory_stats()["peak_bytes_in_use"] if on_gpu else resident()[1]
    return {"growth": peak - before, "XLA": planned_bytes(program)}


def peer_growth(key: str) -> dict[str, int]:
    import torch
    from neuralop.models import FNO as PeerFNO

    x, y, variables = _start(key)
    case = CASES[key]
    weights = to_neuralop(make_model(case), variables)
    weights.pop("_metadata", None)
    on_gpu = jax.default_backend() == "gpu"
    device = "cuda" if on_gpu else "cpu"
    peer = PeerFNO(
        n_modes=case.modes, in_channels=1, out_channels=1, hidden_channels=case.hidden
    )
    weights = {name: torch.from_numpy(np.array(a)) for name, a in weights.items()}
    peer.load_state_dict(weights, strict=False)
    peer.to(device)
    x, y = (
        torch.from_numpy(np.moveaxis(array, -1, 1).copy()).to(device)
        for array in (x, y)
    )
    optimizer = torch.optim.AdamW(peer.parameters(), lr=LEARNING_RATE)
    del weights, variables
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else settle()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(peer(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident()[1]
    return {"growth": peak - before}


def _sizes(case: Case) -> dict[str, Any]:
    """A case's sizes, with the batch that this backend takes."""
    sizes = case._asdict()
    gpu_batch = sizes.pop("gpu_batch")
    return {**sizes, "batch": gpu_batch} if jax.default_backend() == "gpu" else sizes


def _start(key: str) -> tuple[np.ndarray, np.ndarray, Any]:
    case = CASES[key]
    shape = (_sizes(case)["batch"], *case.grid, 1)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    variables = jax.jit(make_model(case).init)(jax.random.key(0), jnp.asarray(x[:1]))
    return x, y, jax.block_until_ready(variables)


def volume_bytes(key: str) -> dict[str, int]:
    """Bytes by XLA's plan, of each pass."""
    model, shape, output = MODELS[key]
    return {name: planned_bytes(plan(model, shape, output, name)) for name in PASSES}


def cube(size: int) -> tuple[FNO3D, tuple[int, ...]]:
    model = FNO3D(in_channels=1, out_channels=1, **LARGEST)
    return model, (1, size, size, size, 1)


def largest_grid(gigabytes: float, name: str) -> tuple[int, int]:
    """Points an axis of the largest cube that fits, a multiple of GRID_STEP, and the
    bytes that XLA plans for it; (0, 0) where none does."""

    @functools.cache
    def needed(steps: int) -> int:
        model, shape = cube(steps * GRID_STEP)
        return planned_bytes(plan(model, shape, shape, name))

    limit, fits, fails = gigabytes * 1e9, 0, 2
    while needed(fails) <= limit:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if needed(middle) <= limit else (fits, middle)
    return (fits * GRID_STEP, needed(fits)) if fits else (0, 0)


def run_cube(size: int, name: str) -> dict[str, float]:
    """Seconds of one run, and how far the resident size grew."""
    model, shape = cube(size)
    program = plan(model, shape, shape, name)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 16, 1)))
    before = settle()
    x = jnp.ones(shape)
    start = time.perf_counter()
    if name == "forward":
        found = program(variables, x)
    else:
        state = jax.jit(optax.adamw(LEARNING_RATE).init)(variables)
        found = program((variables, state), x, x)
    jax.block_until_ready(found)
    return {"seconds": time.perf_counter() - start, "growth": resident()[1] - before}


def child(work: str, *arguments: str) -> dict[str, Any]:
    """What a fresh process does for its parent."""
    works = {"ours": our_growth, "neuraloperator": peer_growth, "volume": volume_bytes}
    if work in works:
        return works[work](*arguments)
    size, name = arguments
    return run_cube(int(size), name)


def report_largest(record: dict[str, Any], options) -> None:
    for name in PASSES:
        size, planned = largest_grid(options.largest, name)
        if not size:
            print(f"no grid fits {options.largest} GB: {name}", file=sys.stderr)
            continue
        results = {"XLA": {"bytes": planned}}
        if options.run:
            arguments = ("--backend", options.backend, "--child", "run", size, name)
            found = in_own_process(__file__, *arguments)
            if found:
                results["run"] = {"seconds": found["seconds"]}
                results["growth"] = {"bytes": found["growth"]}
        sizes = {"grid": (size,) * 3, **LARGEST, "batch": 1}
        add_row(record, f"largest in {options.largest} GB", name, results, sizes=sizes)


def main() -> None:
    made = parser(__doc__, repeats=None)
    made.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE")
    made.add_argument("--volumes", nargs="*", choices=VOLUMES, default=VOLUMES)
    made.add_argument("--largest", type=float, metavar="GB")
    made.add_argument("--run", action="store_true", help="of --largest: run it too")
    made.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        jaxops.select_backend(options.backend)
        print(json.dumps(child(*options.child)))
        return
    record = begin(options, "torch", "neuraloperator")
    if options.largest:
        report_largest(record, options)
        return write(record, options.json)
    cases = options.cases
    if cases is None:
        cases = CASES if record["platform"] == "gpu" else CPU_CASES
    for key in cases:
        sides = {}
        for side, (work, keeps) in SIDES.items():
            if side.endswith("freed") and record["platform"] != "cpu":
                continue
            environment = {} if keeps else {host_memory.SWITCH: "0"}
            parts = [PARTS.get(key, 4)] if "in parts" in side else []
            arguments = ("--backend", options.backend, "--child", work, key, *parts)
            sides[side] = in_own_process(__file__, *arguments, **environment)
        if not sides["ours"]:
            continue
        growth = {side: found["growth"] for side, found in sides.items() if found}
        results = {
            side: {"bytes": grown, "ratio": grown / growth["ours"]}
            for side, grown in growth.items()
        }
        for side in ("ours", "ours in parts"):
            if sides[side]:
                results[f"XLA, {side}"] = {"bytes": sides[side]["XLA"]}
        add_row(record, key, "train step", results, sizes=_sizes(CASES[key]))
        write(record, options.json)  # of all rows so far
    for key in options.volumes:
        arguments = ("--backend", options.backend, "--child", "volume", key)
        shape = MODELS[key].shape
        for name, planned in (in_own_process(__file__, *arguments) or {}).items():
            a_voxel = planned / math.prod(shape[:-1])
            results = {"XLA": {"bytes": planned}}
            results["a voxel"] = {"rate": a_voxel, "unit": "bytes"}
            add_row(record, key, name, results, sizes={"input": shape})
    write(record, options.json)


if __name__ == "__main__":
    main()
