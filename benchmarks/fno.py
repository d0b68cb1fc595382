"""Training FNOs: ours against neuraloperator's, eager and compiled, in one run.

    python benchmarks/fno.py [--backend gpu] [--cases 2d-64 ..] [--json FILE]

Both sides have the same architecture and the same weights, neuraloperator's defaults
(channel MLP, soft-gating and linear skips), and make the same steps: the mean squared
error, its gradient and AdamW; or a forward pass. Each repeat runs all contenders, in
one order and the next time in the other. Given are medians, their quartiles, and the
median of the ratios to ours in the same repeat: 2 means that ours takes half the time.
Before that, all outputs are compared with ours in float32, in units of the largest.

On a GPU also: TF32 on both sides, and ours in bfloat16; a measurement is the mean of
twenty calls in a row, for which it waits once. ``compile`` is what the first call took.
"""

import argparse
import functools
import json
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
from benchmarks.measuring import Call, alternate, summary, versions  # noqa: E402
from models import FNO, to_neuralop  # noqa: E402


class Case(NamedTuple):
    modes: tuple[int, ...]
    hidden: int
    grid: tuple[int, ...]
    batch: int
    gpu_batch: int


CASES = {
    "2d-64": Case((16, 16), 32, (64, 64), 8, 16),
    "2d-128": Case((32, 32), 64, (128, 128), 8, 16),
    "2d-256": Case((64, 64), 64, (256, 256), 8, 8),
    "3d-32": Case((8, 8, 8), 32, (32, 32, 32), 2, 4),
    "3d-64": Case((16, 16, 16), 32, (64, 64, 64), 4, 4),
}
CPU_CASES = ("2d-64", "2d-128", "3d-32")
PASSES = ("forward", "train step")
# Ours: the precision of products, and the dtype of the fields.
OURS = {
    "ours": ("highest", jnp.float32),
    "ours tf32": ("tensorfloat32", jnp.float32),
    "ours bfloat16": ("highest", jnp.bfloat16),
}
LEARNING_RATE = 1e-3


def our_calls(case: Case, name: str, variables, x, y, kinds) -> dict[str, Call]:
    model = make_model(case)
    optimizer = optax.adamw(LEARNING_RATE)
    calls = {}
    for kind in kinds:
        precision, dtype = OURS[kind]

        def forward(variables, x):
            return model.apply(variables, x)

        def step(carry, x, y):
            variables, state = carry

            def loss(variables):
                error = (model.apply(variables, x) - y).astype(jnp.float32)
                return jnp.mean(jnp.square(error))

            value, gradient = jax.value_and_grad(loss)(variables)
            changes, state = optimizer.update(gradient, state, variables)
            return (optax.apply_updates(variables, changes), state), value

        sent = [jnp.asarray(array, dtype) for array in (x, y)]
        own = jax.tree.map(jnp.array, variables)
        start = time.perf_counter()
        with jax.default_matmul_precision(precision):
            if name == "forward":
                program = jax.jit(forward).lower(own, sent[0]).compile()
                run = functools.partial(program, own, sent[0])
            else:
                carry = (own, optimizer.init(own))
                program = jax.jit(step, donate_argnums=0).lower(carry, *sent).compile()
                run = Stepper(program, carry, sent)
        calls[kind] = run, jax.block_until_ready
        tell_compile(kind, start, program)
    return calls


class Stepper:
    """Steps that go on from each other, as in training."""

    def __init__(self, program, carry, batch):
        self.program, self.carry, self.batch = program, carry, batch

    def __call__(self):
        self.carry, value = self.program(self.carry, *self.batch)
        return value


def peer_calls(case: Case, name: str, variables, x, y, kinds) -> dict[str, Call]:
    """neuraloperator's, or nothing where it or its device is not there."""
    try:
        import torch
        from neuralop.models import FNO as PeerFNO
    except ImportError as error:
        print(f"neuraloperator is left out: {error}", file=sys.stderr)
        return {}
    on_gpu = jax.default_backend() == "gpu"
    device = "cuda" if on_gpu else "cpu"
    weights = to_neuralop(make_model(case), variables)
    weights.pop("_metadata", None)
    calls = {}
    for kind in kinds:
        torch.backends.cuda.matmul.allow_tf32 = "tf32" in kind
        torch.backends.cudnn.allow_tf32 = "tf32" in kind
        peer = PeerFNO(
            n_modes=case.modes,
            in_channels=1,
            out_channels=1,
            hidden_channels=case.hidden,
        )
        state = {
            key: torch.from_numpy(np.array(value)) for key, value in weights.items()
        }
        peer.load_state_dict(state, strict=False)
        peer.to(device)
        optimizer = torch.optim.AdamW(peer.parameters(), lr=LEARNING_RATE)
        batch = [
            torch.from_numpy(np.moveaxis(a, -1, 1).copy()).to(device) for a in (x, y)
        ]
        function = torch.compile(peer) if "compiled" in kind else peer

        def forward(function=function, batch=batch):
            with torch.no_grad():
                return function(batch[0])

        def step(function=function, batch=batch, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(function(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        def wait(_):
            if on_gpu:
                torch.cuda.synchronize()

        def run(work=forward if name == "forward" else step, tf32="tf32" in kind):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            return work()

        start = time.perf_counter()
        wait(run())
        tell_compile(kind, start, None)
        calls[kind] = run, wait
    return calls


def make_model(case: Case) -> FNO:
    return FNO(
        n_modes=case.modes, in_channels=1, out_channels=1, hidden_channels=case.hidden
    )


def tell_compile(kind: str, start: float, program) -> None:
    text = f"  first call of {kind}: {time.perf_counter() - start:.1f} s"
    analysis = program.memory_analysis() if program is not None else None
    if analysis is not None:
        text += f", temporaries {analysis.temp_size_in_bytes / 1e6:.0f} MB"
    print(text, file=sys.stderr, flush=True)


def measure(key: str, name: str, options) -> dict[str, Any]:
    """One row: all contenders in one case and pass, printed and returned."""
    case, on_gpu = CASES[key], jax.default_backend() == "gpu"
    batch = case.gpu_batch if on_gpu else case.batch
    rng = np.random.default_rng(0)
    x, y = (
        rng.standard_normal((batch, *case.grid, 1), dtype=np.float32) for _ in range(2)
    )
    model = make_model(case)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.asarray(x[:1]))
    ours = list(OURS) if on_gpu else ["ours"]
    peers = ["neuraloperator", "neuraloperator compiled"]
    if on_gpu:
        peers += ["neuraloperator compiled tf32"]
    if options.no_compile:
        peers = ["neuraloperator"]
    calls = our_calls(case, name, variables, x, y, ours)
    calls |= peer_calls(case, name, variables, x, y, peers)
    if name == "forward":
        expected = np.asarray(calls["ours"][0]())
        for kind, (run, _) in calls.items():
            found = run()
            if "neural" in kind:
                found = np.moveaxis(found.cpu().numpy(), 1, -1)
            found = np.asarray(jnp.asarray(found, jnp.float32))
            error = np.abs(found - expected).max() / np.abs(expected).max()
            print(f"  {kind} differs by {error:.1e}", file=sys.stderr)
    results = summary(alternate(calls, options.repeats, 20 if on_gpu else 1), "ours")
    print(f"\n{key} {case}, {name}")
    print(f"{'':30}{'median ms':>10}{'quartiles':>18}{'/ ours':>8}")
    for kind, result in results.items():
        spread = "{:.2f} - {:.2f}".format(*result["quartiles_ms"])
        print(f"{kind:30}{result['median_ms']:10.2f}{spread:>18}{result['ratio']:8.2f}")
    sys.stdout.flush()
    return {"case": key, "sizes": case._asdict(), "pass": name, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=jaxops.backend.NAMES)
    parser.add_argument("--repeats", type=int, default=11, help="at least 2")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--no-compile", action="store_true", help="eager peers only")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # PyTorch needs some
    backend = jaxops.select_backend(options.backend)
    cases = options.cases or (CASES if backend.name == "gpu" else CPU_CASES)
    record: dict[str, Any] = {"date": date.today().isoformat(), "backend": str(backend)}
    record["versions"] = versions("jax", "jaxlib", "torch", "neuraloperator")
    record |= {"repeats": options.repeats, "rows": []}
    print(record["backend"])
    print(", ".join(f"{key} {value}" for key, value in record["versions"].items()))
    for key in cases:
        for name in options.passes:
            record["rows"].append(measure(key, name, options))
            jax.clear_caches()
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
