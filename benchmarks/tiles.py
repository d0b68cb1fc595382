"""Enlarging a volume: ours, whole and in exact tiles, PyTorch's whole, MONAI's tiles.

    python benchmarks/tiles.py [--memory 1GB] [--networks UNet3D ..] [--json FILE]

All run one network with the same weights on one float32 volume, of --size. ``ours
whole`` is the model as it stands; ``ours in tiles`` is what train.upscale runs: the
windows that fit, with their halos, in memory and without files. They may take half of
what is free, as there, or --memory: where a single window fits, nothing is computed
twice, and less memory is what forces tiles. ``torch
whole`` is the network written with nn.Conv3d, without gradients, which is MONAI's way
where a volume fits; ``monai gaussian`` is monai.inferers.sliding_window_inference on
it, windows of --roi, four at a time, an overlap of 0.25, blended with a Gaussian.

Each repeat runs all of them, in one order and the next time in the other. Given are
medians, their quartiles, millions of voxels of the input a second, and the median of
the ratios to ours in tiles in the same repeat: 2 means that ours takes half the time.
Differences are the largest: of ours in tiles to ours whole, of both torch rows to torch
whole, of ours whole to torch whole; in units of the output's standard deviation.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.measuring import Call, alternate, summary  # noqa: E402
from jaxops import to_device  # noqa: E402
from models import EDSR3D, UNet3D, from_torch  # noqa: E402
from train import memory  # noqa: E402
from train.memory import Budget, bytes_text, parse_bytes  # noqa: E402
from train.tile_network import TileNetwork, run_tiled  # noqa: E402
from train.tile_plan import choose_tiling  # noqa: E402
from train.tiles import Tiling  # noqa: E402

NETWORKS = {"UNet3D": UNet3D, "EDSR3D": EDSR3D}
CONTENDERS = ("ours whole", "ours in tiles", "torch whole", "monai gaussian")
OURS = "ours in tiles"
WINDOWS_AT_A_TIME, OVERLAP = 4, 0.25


def our_calls(
    model, variables, volume, budget: Budget
) -> tuple[dict[str, Call], Tiling]:
    program = jax.jit(model.apply).lower(variables, _batch(volume)).compile()

    def whole():
        return np.asarray(program(variables, _batch(volume)))[0, ..., 0]

    network = TileNetwork(model, variables, volume.shape[0])
    tiling = choose_tiling(
        volume.shape,
        model.receptive_radius,
        model.stride,
        measure=lambda window: budget.share(network.need(window)),
        guess=lambda window: budget.share(network.need_by_trace(window)),
    )
    if tiling is None:
        told = bytes_text(budget.total)
        raise SystemExit(f"--memory must be enough for a window; {told} is not")
    network.keep_only(tiling.window)

    def tiles():
        return run_tiled(network, tiling, volume)

    calls = {"ours whole": (whole, _nothing), "ours in tiles": (tiles, _nothing)}
    return calls, tiling


def torch_calls(net, volume, roi) -> dict[str, Call]:
    import torch

    x = torch.from_numpy(volume)[None, None]

    def whole():
        with torch.no_grad():
            return net(x)[0, 0].numpy()

    calls = {"torch whole": (whole, _nothing)}
    try:
        from monai.inferers import sliding_window_inference
    except ImportError as error:
        print(f"MONAI is left out: {error}", file=sys.stderr)
        return calls

    def blended():
        with torch.no_grad():
            y = sliding_window_inference(
                x, roi, WINDOWS_AT_A_TIME, net, overlap=OVERLAP, mode="gaussian"
            )
        return y[0, 0].numpy()

    return {**calls, "monai gaussian": (blended, _nothing)}


def budget_of(options) -> Budget:
    """What a window may take, beside what the process takes already."""
    if options.memory is not None:
        return Budget(parse_bytes(options.memory))
    budget = memory.budget(None)
    return replace(budget, total=budget.total - memory.resident_memory())


def _batch(volume: np.ndarray):
    return to_device(volume[None, ..., None])


def _nothing(found: Any) -> None:
    """To wait for: all of them return arrays of the host."""


def differences(outputs: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest, in standard deviations of the output; see the top of this file."""
    references = {"ours whole": "torch whole", "ours in tiles": "ours whole"}
    found = {}
    for name, output in outputs.items():
        reference = outputs.get(references.get(name, "torch whole"))
        if reference is not None:
            error = np.abs(output - reference).max() / reference.std()
            found[name] = float(error)
    return found


def measure(record: dict[str, Any], name: str, options) -> None:
    """One row: a network by all contenders."""
    try:
        import torch
        from torch_volume_networks import NETWORKS as TORCH_NETWORKS
        from torch_volume_networks import AddInput
    except ImportError as error:
        message = f"the weights are PyTorch's, which is not there: {error}"
        raise SystemExit(message) from error
    model = NETWORKS[name]()
    torch.manual_seed(0)
    net = AddInput(TORCH_NETWORKS[name](model), model).eval()
    variables = from_torch(net, model, report=None)
    volume = np.random.default_rng(0).random(options.size, np.float32)
    calls, tiling = our_calls(model, variables, volume, budget := budget_of(options))
    calls |= torch_calls(net, volume, options.roi)
    calls = {key: calls[key] for key in calls if key in (OURS, *options.contenders)}
    last: dict[str, np.ndarray] = {}
    calls = {key: _keeping(last, key, call) for key, call in calls.items()}
    results = summary(alternate(calls, options.repeats, 1), OURS)
    apart = differences(last)
    for key, result in results.items():
        result["voxels_per_second"] = volume.size / (1e-3 * result["median_ms"])
        if key in apart:
            result["difference"] = apart[key]
    sizes = {
        "volume": list(volume.shape),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(variables)),
        "memory": bytes_text(budget.total),
        "windows": tiling.count,
        "window": list(tiling.window),
        "halo": list(tiling.radius),
        "computed": round(tiling.recomputed, 3),
        "roi": list(options.roi),
        "torch threads": torch.get_num_threads(),
    }
    measuring.add_row(record, name, "forward", results, sizes=sizes)
    for key, result in results.items():
        print(f"{key:28}{1e-6 * result['voxels_per_second']:8.3f} Mvoxel/s")


def _keeping(last: dict[str, np.ndarray], name: str, call: Call) -> Call:
    """The call, whose last output is kept."""
    run, wait = call

    def kept():
        last[name] = run()
        return last[name]

    return kept, wait


def main() -> None:
    parser = measuring.parser(__doc__, repeats=3)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--size", nargs=3, type=int, default=(32, 256, 256))
    parser.add_argument(
        "--memory", help="that a window may take; half of what is free by default"
    )
    parser.add_argument("--roi", nargs=3, type=int, default=(32, 96, 96))
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS,
        help="beside ours in tiles",
    )  # fmt: skip
    options = parser.parse_args()
    record = measuring.begin(options, "torch", "monai")
    for name in options.networks:
        measure(record, name, options)
        jax.clear_caches()
    measuring.write(record, options.json)


if __name__ == "__main__":
    main()
