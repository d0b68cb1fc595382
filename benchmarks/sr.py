"""Training super-resolution networks: ours against nn.Conv3d in PyTorch, in one run.

    python benchmarks/sr.py [--backend gpu] [--cases ..] [--compile] [--json FILE]

Both sides are one network in the sizes of models' defaults, with the same weights, on
the same patches, as many as --batch of --patch voxels, and make the same steps: the
mean absolute error, its gradient and Adam; or a forward pass. Each repeat runs all
contenders, in one order and the next time in the other. Given are medians, their
quartiles, and the median of the ratios to ours in the same repeat: 2 means that ours
takes half the time. The outputs of the forward pass, and the losses of the first step,
are compared with ours in float32: differences in units of the largest value.

``torch compiled`` comes with --compile. On a GPU also: TF32 on both sides, and
bfloat16, PyTorch's by autocast; a measurement is the mean of ten calls in a row, for
which it waits once. ``first_call_s`` of ours is tracing and compiling, and
``temporaries_bytes`` is what the compiled program takes beside arguments and results.
"""

import contextlib
import copy
import functools
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.fno import OURS, Stepper  # noqa: E402
from benchmarks.measuring import Call, alternate, summary  # noqa: E402
from models import EDSR3D, RCAN3D, UNet3D, from_torch  # noqa: E402
from train.volume_losses import l1  # noqa: E402

CASES = {"RCAN3D": RCAN3D, "EDSR3D": EDSR3D, "UNet3D": UNet3D}
PASSES = ("forward", "train step")
BATCH = {"gpu": 4}  # elsewhere 1
LEARNING_RATE = 1e-4


class Side:
    """The contenders of one side, and what is told of them beside times."""

    def __init__(self):
        self.calls: dict[str, Call] = {}
        self.found: dict[str, np.ndarray] = {}  # of the first call
        self.told: dict[str, dict[str, float]] = {}


def ours(model, variables, x, y, name: str, kinds) -> Side:
    optimizer, side = optax.adam(LEARNING_RATE), Side()
    for kind in kinds:
        precision, dtype = OURS[kind]

        def step(carry, x, y):
            variables, state = carry

            def loss(variables):
                return l1(model.apply(variables, x).astype(jnp.float32), y)

            value, gradient = jax.value_and_grad(loss)(variables)
            changes, state = optimizer.update(gradient, state, variables)
            return (optax.apply_updates(variables, changes), state), value

        own, sent = jax.tree.map(jnp.array, variables), jnp.asarray(x, dtype)
        start = time.perf_counter()
        with jax.default_matmul_precision(precision):
            if name == "forward":
                program = jax.jit(model.apply).lower(own, sent).compile()
                run = functools.partial(program, own, sent)
            else:
                carry, batch = (own, optimizer.init(own)), (sent, jnp.asarray(y))
                program = jax.jit(step, donate_argnums=0).lower(carry, *batch).compile()
                run = Stepper(program, carry, batch)
        side.told[kind] = {"first_call_s": time.perf_counter() - start}
        analysis = program.memory_analysis()
        if analysis is not None:
            side.told[kind]["temporaries_bytes"] = analysis.temp_size_in_bytes
        side.calls[kind] = run, jax.block_until_ready
        side.found[kind] = np.asarray(run()).astype(np.float32)
    return side


def peers(net, x, y, name: str, kinds) -> Side:
    import torch

    on_gpu, side = jax.default_backend() == "gpu", Side()
    device = "cuda" if on_gpu else "cpu"
    torch.backends.cudnn.benchmark = True
    batch = [torch.from_numpy(np.moveaxis(a, -1, 1).copy()).to(device) for a in (x, y)]
    for kind in kinds:
        module = copy.deepcopy(net).to(device)
        optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
        function = torch.compile(module) if "compiled" in kind else module

        def forward(function=function):
            with torch.no_grad():
                return function(batch[0])

        def step(function=function, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.l1_loss(function(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        work = forward if name == "forward" else step

        def run(work=work, kind=kind):
            torch.backends.cuda.matmul.allow_tf32 = "tf32" in kind
            torch.backends.cudnn.allow_tf32 = "tf32" in kind
            half = contextlib.nullcontext()
            if "bfloat16" in kind:
                half = torch.autocast(device, torch.bfloat16)
            with half:
                return work()

        def wait(_):
            if on_gpu:
                torch.cuda.synchronize()

        start = time.perf_counter()
        first = run()
        wait(first)
        side.told[kind] = {"first_call_s": time.perf_counter() - start}
        found = first.detach().float().cpu().numpy()
        side.found[kind] = np.moveaxis(found, 1, -1) if found.ndim else found
        side.calls[kind] = run, wait
    return side


def measure(record: dict[str, Any], case: str, name: str, options) -> None:
    """One row: all contenders in one case and pass."""
    on_gpu, model = jax.default_backend() == "gpu", CASES[case]()
    try:
        import torch
        from torch_volume_networks import NETWORKS, AddInput
    except ImportError as error:
        message = f"the weights are PyTorch's, which is not there: {error}"
        raise SystemExit(message) from error
    torch.manual_seed(0)
    net = AddInput(NETWORKS[case](model), model)
    variables = from_torch(net, model, report=None)
    batch = options.batch or BATCH.get(jax.default_backend(), 1)
    rng = np.random.default_rng(0)
    x = rng.random((batch, *options.patch, 1), np.float32)
    finer = [n * s for n, s in zip(options.patch, model.scale, strict=True)]
    y = rng.random((batch, *finer, 1), np.float32)
    kinds = list(OURS) if on_gpu else ["ours"]
    side = ours(model, variables, x, y, name, kinds)
    kinds = ["torch", "torch tf32", "torch bfloat16"] if on_gpu else ["torch"]
    if options.compile:
        kinds += [kind.replace("torch", "torch compiled") for kind in kinds]
    if on_gpu and not torch.cuda.is_available():
        print("PyTorch is left out: it finds no GPU", file=sys.stderr)
        kinds = []
    other = peers(net, x, y, name, kinds)
    calls, found = side.calls | other.calls, side.found | other.found
    results = summary(alternate(calls, options.repeats, 10 if on_gpu else 1), "ours")
    for kind, told in (side.told | other.told).items():
        error = np.abs(found[kind] - found["ours"]).max()
        difference = float(error / np.abs(found["ours"]).max())
        results[kind] |= {"difference": difference, **told}
    sizes = {
        "batch": batch,
        "patch": list(options.patch),
        "scale": list(model.scale),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(variables)),
    }
    measuring.add_row(record, case, name, results, sizes=sizes)
    for kind, told in side.told.items():
        text = f"  {kind}: traced and compiled in {told['first_call_s']:.1f} s"
        if "temporaries_bytes" in told:
            text += f", temporaries {told['temporaries_bytes'] / 1e6:.0f} MB"
        print(text, flush=True)


def main() -> None:
    parser = measuring.parser(__doc__, repeats=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--patch", nargs=3, type=int, default=(16, 64, 64))
    parser.add_argument("--batch", type=int, help="patches; 4 on a GPU, else 1")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    options = parser.parse_args()
    record = measuring.begin(options, "torch")
    for case in options.cases:
        for name in options.passes:
            measure(record, case, name, options)
            jax.clear_caches()
    measuring.write(record, options.json)


if __name__ == "__main__":
    main()
