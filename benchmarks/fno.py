"""Training FNOs: ours against neuraloperator's, eager and compiled, in one run.

    python benchmarks/fno.py [--backend gpu] [--cases 2d-64 ..] [--json FILE]

Both sides have the same architecture and the same weights, neuraloperator's defaults
(channel MLP, soft-gating and linear skips), and make the same steps: the mean squared
error, its gradient and AdamW; or a forward pass. Ours computes a batch in as many parts
as ``train.fno`` does by default: on a CPU those that fit its cache. Each repeat runs
all contenders, in one order and the next time in the other. Given are medians, their
quartiles, and the median of the ratios to ours in the same repeat: 2 means that ours
takes half the time. Outputs are compared with ours in float32, in units of the largest
number there. On a CPU each row is measured in three fresh processes, ``--repeats``
times in each: where arrays come to lie in memory changes from one to the next, and time
by up to a fifth.

On a GPU also: TF32 on both sides, and ours in bfloat16; a measurement is the mean of
twenty calls in a row, for which it waits once. ``compile`` is what the first call took.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
from benchmarks.measuring import (  # noqa: E402
    Call,
    Results,
    add_row,
    alternate,
    begin,
    in_own_process,
    parser,
    summary,
    train_step,
    write,
)
from models import FNO, to_neuralop  # noqa: E402
from train.loop import default_micro_batch  # noqa: E402


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
    step = train_step(model, optimizer, default_micro_batch(model, x.shape))
    step = jax.jit(step, donate_argnums=0)
    forward = jax.jit(model.apply)
    calls = {}
    for kind in kinds:
        precision, dtype = OURS[kind]
        sent = [jnp.asarray(array, dtype) for array in (x, y)]
        own = jax.tree.map(jnp.array, variables)
        start = time.perf_counter()
        with jax.default_matmul_precision(precision):
            if name == "forward":
                program = forward.lower(own, sent[0]).compile()
                run = functools.partial(program, own, sent[0])
            else:
                carry = (own, optimizer.init(own))
                program = step.lower(carry, *sent).compile()
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


def measure(key: str, name: str, options: argparse.Namespace) -> Results:
    """One row: all contenders in one case and pass."""
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
    results = summary(alternate(calls, options.repeats, 20 if on_gpu else 1), "ours")
    if name == "forward":
        for kind, difference in differences(calls).items():
            results[kind]["difference"] = difference
    return results


def differences(calls: dict[str, Call]) -> dict[str, float]:
    """Of each contender's output to ours in float32, in units of its largest number."""
    expected = np.asarray(calls["ours"][0]())
    found = {}
    for kind, (run, _) in calls.items():
        y = run()
        if "neural" in kind:
            y = np.moveaxis(y.cpu().numpy(), 1, -1)
        y = np.asarray(y, np.float32)
        found[kind] = float(np.abs(y - expected).max() / np.abs(expected).max())
    return found


def together(runs: list[Results]) -> Results:
    """The measurements of several processes as those of one."""
    results = summary(
        {kind: [ms for run in runs for ms in run[kind]["ms"]] for kind in runs[0]},
        "ours",
    )
    for kind, row in runs[0].items():
        if "difference" in row:
            results[kind]["difference"] = max(run[kind]["difference"] for run in runs)
    return results


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    made.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    made.add_argument("--no-compile", action="store_true", help="eager peers only")
    made.add_argument("--processes", type=int, help="of each row; 3 on a CPU, else 1")
    made.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        jaxops.select_backend(options.backend)
        print(json.dumps(measure(*options.child, options)))
        return
    record = begin(options, "torch", "neuraloperator")
    on_gpu = record["platform"] == "gpu"
    processes = options.processes or (3 if record["platform"] == "cpu" else 1)
    arguments = ["--backend", options.backend, "--repeats", options.repeats]
    arguments += ["--no-compile"] if options.no_compile else []
    for key in options.cases or (CASES if on_gpu else CPU_CASES):
        for name in options.passes:
            child = (__file__, *arguments, "--child", key, name)
            runs = [in_own_process(*child) for _ in range(processes)]
            if all(runs):
                results = together(runs)
                add_row(record, key, name, results, sizes=CASES[key]._asdict())
                write(record, options.json)  # of all rows so far


if __name__ == "__main__":
    main()
