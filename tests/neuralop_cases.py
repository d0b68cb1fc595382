"""Cases that hold our FNO to neuraloperator 2.0.0, and neuraloperator's side of them.

``reference(case)`` needs torch and neuraloperator. ``make_golden_neuralop.py`` stores
what it returns, for the lanes without torch.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"

BASE = {"in_channels": 2, "out_channels": 3, "hidden_channels": 3, "n_layers": 2}
GRIDS = {1: (12,), 2: (8, 10), 3: (6, 4, 8)}
ODD_GRIDS = {1: (11,), 2: (7, 9), 3: (5, 4, 7)}
COMPAT = "neuralop-2.0"


@dataclass(frozen=True)
class Case:
    """One model and one call.

    ``arguments`` are the constructor's, beside ``BASE`` and n_modes; ``compat`` is ours
    alone, given where neuraloperator differs from the paper.
    """

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    output_shape: tuple[int, ...] | None = None
    compat: str | None = None
    train: bool = False
    batch: int = 2

    @property
    def constructor(self) -> dict[str, Any]:
        return {**BASE, "n_modes": (4,) * len(self.grid), **self.arguments}


def _cases() -> list[Case]:
    options: dict[str, dict[str, Any]] = {
        "defaults": {"n_layers": 4},
        "odd_modes": {"n_modes": 5},
        "all_modes_of_the_grid": {"n_modes": "grid"},
        "no_embedding": {"positional_embedding": None},
        "linear_lifting": {"lifting_channel_ratio": 0, "projection_channel_ratio": 1},
        "wide_ratios": {"lifting_channel_ratio": 3, "channel_mlp_expansion": 1.5},
        "no_channel_mlp": {"use_channel_mlp": False},
        "no_skips": {"fno_skip": None, "channel_mlp_skip": None},
        "identity_skips": {"fno_skip": "identity", "channel_mlp_skip": "identity"},
        "swapped_skips": {"fno_skip": "soft-gating", "channel_mlp_skip": "linear"},
        "relu": {"non_linearity": "relu"},
        "instance_norm": {"norm": "instance_norm"},
        "group_norm": {"norm": "group_norm"},
        "batch_norm": {"norm": "batch_norm"},
        "preactivation": {"preactivation": True},
        "preactivation_group_norm": {"preactivation": True, "norm": "group_norm"},
        "padding": {"domain_padding": 0.25},
        "padding_an_axis": {"domain_padding": "one axis"},
        "max_n_modes": {"max_n_modes": "two more"},
        "stabilizer": {"stabilizer": "tanh"},
        "dropout_off": {"channel_mlp_dropout": 0.5},
    }
    cases = []
    for n_dim, grid in GRIDS.items():
        for name, arguments in options.items():
            arguments = dict(arguments)
            if arguments.get("n_modes") == 5:
                arguments["n_modes"] = (5,) * n_dim
            if arguments.get("n_modes") == "grid":
                arguments["n_modes"] = grid
            if arguments.get("domain_padding") == "one axis":
                arguments["domain_padding"] = [0.0] * (n_dim - 1) + [0.25]
            if "max_n_modes" in arguments:
                arguments["max_n_modes"] = (6,) * (n_dim - 1) + (5,)
            cases.append(Case(f"{n_dim}d_{name}", grid, arguments))
        cases += [
            Case(f"{n_dim}d_batch_of_one", grid, batch=1),
            Case(
                f"{n_dim}d_batch_norm_train", grid, {"norm": "batch_norm"}, train=True
            ),
            Case(f"{n_dim}d_odd_grid", ODD_GRIDS[n_dim], compat=COMPAT),
            Case(
                f"{n_dim}d_odd_max_n_modes",
                grid,
                {"max_n_modes": (5,) * (n_dim - 1) + (4,)},
                compat=COMPAT,
            ),
            Case(
                f"{n_dim}d_more_modes_than_an_odd_grid",
                ODD_GRIDS[n_dim],
                {"n_modes": (12,) * n_dim},
                compat=COMPAT,
            ),
            Case(
                f"{n_dim}d_upscaled",
                grid,
                {"resolution_scaling_factor": [2, 1.5]},
                compat=COMPAT,
            ),
            Case(
                f"{n_dim}d_downscaled",
                grid,
                {"resolution_scaling_factor": 0.75},
                compat=COMPAT,
            ),
            Case(
                f"{n_dim}d_upscaled_padding",
                grid,
                {
                    "n_layers": 1,
                    "resolution_scaling_factor": 2,
                    "domain_padding": 0.25,
                },
                compat=COMPAT,
            ),
            Case(
                f"{n_dim}d_output_shape",
                grid,
                output_shape=tuple(n + 3 - i for i, n in enumerate(grid)),
                compat=COMPAT,
            ),
        ]
    return cases


CASES = {case.name: case for case in _cases()}


def random_arrays(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Input (batch, *grid, channels), and a generator's seed for all else."""
    rng = np.random.default_rng(sum(case.name.encode()))
    shape = (case.batch, *case.grid, case.constructor["in_channels"])
    return rng.standard_normal(shape).astype(np.float32), rng


def reference(case: Case) -> dict[str, Any]:
    """neuraloperator's output, parameter gradients and buffers, as numpy.

    Returns ``input``, ``cotangent`` and ``output`` channels last; ``state``, the state
    dict before the call (with ``_metadata``); ``gradients``, of the sum of output times
    cotangent, under the same names, and the buffers after the call.
    """
    import torch
    from neuralop.models import FNO

    arguments = dict(case.constructor)
    if "non_linearity" in arguments:
        arguments["non_linearity"] = getattr(
            torch.nn.functional, arguments["non_linearity"]
        )
    torch.manual_seed(0)
    model = FNO(**arguments).train(case.train)
    x, rng = random_arrays(case)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_complex():
                continue  # they keep their own random start
            if value.is_floating_point() and value.ndim and "running_var" not in name:
                # Ones and zeros would hide a swapped scale and bias.
                noise = rng.standard_normal(tuple(value.shape)) * 0.3
                value += torch.from_numpy(noise).to(value.dtype)
    state = {
        name: value.detach().numpy().copy() if name != "_metadata" else value
        for name, value in model.state_dict().items()
    }
    channels_first = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    output = model(channels_first, output_shape=case.output_shape)
    cotangent = rng.standard_normal(tuple(output.shape)).astype(np.float32)
    (output * torch.from_numpy(cotangent)).sum().backward()
    gradients = {
        name: np.zeros(value.shape, value.detach().numpy().dtype)
        if value.grad is None
        else value.grad.numpy()
        for name, value in model.named_parameters()
    }
    gradients |= {name: value.numpy() for name, value in model.named_buffers()}
    return {
        "input": x,
        "cotangent": np.moveaxis(cotangent, 1, -1),
        "output": np.moveaxis(output.detach().numpy(), 1, -1),
        "state": state,
        "gradients": gradients,
    }


def pack(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """A reference as one vector and its index: thousands of small files are slow."""
    index, parts = [], []
    for part, value in result.items():
        arrays = value if isinstance(value, dict) else {"": value}
        for name, array in arrays.items():
            if name != "_metadata":
                index.append([part, name, array.dtype.str, list(array.shape)])
                flat = np.ascontiguousarray(array).reshape(-1)
                flat = flat.view(np.float32) if flat.dtype.kind == "c" else flat
                parts.append(flat.astype(np.float32))
    return {"values": np.concatenate(parts), "index": np.array(json.dumps(index))}


def unpack(values: np.ndarray, index: np.ndarray) -> dict[str, Any]:
    """The inverse of :func:`pack`, without ``_metadata``."""
    result: dict[str, Any] = {}
    position = 0
    for part, name, dtype, shape in json.loads(str(index)):
        count = int(np.prod(shape)) * (2 if np.dtype(dtype).kind == "c" else 1)
        flat = values[position : position + count]
        position += count
        is_complex = np.dtype(dtype).kind == "c"
        flat = flat.view(np.complex64) if is_complex else flat.astype(dtype)
        if name:
            result.setdefault(part, {})[name] = flat.reshape(shape)
        else:
            result[part] = flat.reshape(shape)
    return result


def golden_path(case: Case) -> Path:
    return GOLDEN / f"neuralop_{len(case.grid)}d.npz"


def golden(case: Case) -> dict[str, Any]:
    """What ``reference(case)`` gave when the golden files were made."""
    with np.load(golden_path(case), allow_pickle=False) as file:
        return unpack(file[f"{case.name}/values"], file[f"{case.name}/index"])
