"""Cases that hold the volume models to PyTorch networks, and PyTorch's side of them.

Weights and inputs come from ``numpy.random.RandomState``, whose numbers never change,
so the golden file holds what PyTorch makes of them alone: outputs and gradients.
``reference(case)`` needs torch; ``make_golden_volumes.py`` stores what it returns.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import models

GOLDEN = Path(__file__).parent / "golden" / "volumes.npz"

SIZES: dict[str, dict[str, Any]] = {
    "RCAN3D": {"hidden_channels": 4, "n_groups": 2, "n_blocks": 1, "reduction": 2},
    "EDSR3D": {"hidden_channels": 4, "n_blocks": 2},
    "UNet3D": {"hidden_channels": 3, "n_levels": 1},
    "MDCSRN": {"n_blocks": 2, "n_units": 2, "growth": 2},
    "DepthAttentionSR": {
        "hidden_channels": 4,
        "n_blocks": 1,
        "n_heads": 2,
        "depth_window": 2,
    },
}
GRID = (4, 6, 5)


@dataclass(frozen=True)
class Case:
    """One model and one call; ``arguments`` beside those of ``SIZES``."""

    name: str
    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, int, int] = GRID
    batch: int = 2
    train: bool = False

    def make(self):
        arguments = {**SIZES[self.model], **self.arguments}
        return getattr(models, self.model)(**arguments)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *self.grid, self.arguments.get("in_channels", 1))


def _cases() -> list[Case]:
    """Each model with each kind of convolution, upsampler and scale; sizes odd and
    even, one slice, one sample; together, as each case is a program to compile."""
    cases = []
    for model in SIZES:
        whole = {"scale": (1, 1, 1)}
        two = {"in_channels": 2, "out_channels": 2}
        linear = {"upsampler": "linear", "input_skip": "cubic"}
        thin = {"conv": "2plus1d", "scale": (4, 1, 1)}
        cases += [
            Case(f"{model}_plain", model, whole),
            Case(
                f"{model}_separable_odd_one_sample",
                model,
                {"conv": "separable", "scale": (1, 2, 2)},
                (5, 3, 7),
                batch=1,
            ),
            Case(f"{model}_2plus1d_one_slice", model, thin, (1, 5, 4), batch=1),
            Case(f"{model}_twice_as_fine", model, {"scale": 2}, (3, 2, 3)),
            Case(
                f"{model}_linear_two_channels",
                model,
                {"scale": (1, 2, 3), **two, **linear},
                (2, 4, 3),
            ),
        ]
    few = {"scale": 2, "n_blocks": 1}
    other = {"in_channels": 2, "out_channels": 3, "input_skip": None}
    return [
        *cases,
        Case(
            "EDSR3D_separable_twice", "EDSR3D", {**few, "conv": "separable"}, (2, 3, 2)
        ),
        Case("EDSR3D_2plus1d_twice", "EDSR3D", {**few, "conv": "2plus1d"}, (2, 3, 2)),
        Case(
            "EDSR3D_scaled_residuals",
            "EDSR3D",
            {**few, "residual_scaling": 0.1},
            (2, 3, 2),
        ),
        Case("UNet3D_flat_pool", "UNet3D", {"pool": (1, 2, 2), **other}, (3, 8, 6)),
        Case("UNet3D_two_levels", "UNet3D", {"n_levels": 2}, (3, 9, 8), batch=1),
        Case("MDCSRN_train", "MDCSRN", train=True),
        Case("MDCSRN_no_norm", "MDCSRN", {"norm": None, **other}),
        Case("DepthAttentionSR_gate", "DepthAttentionSR", {"mixing": "gate", **other}),
        Case(
            "DepthAttentionSR_window_longer_than_the_stack",
            "DepthAttentionSR",
            {"depth_window": 5},
            (3, 2, 3),
        ),
    ]


CASES = {case.name: case for case in _cases()}


def random_array(name: str, shape, case: Case) -> np.ndarray:
    """The numbers that belong to this name, of a size that keeps a network awake."""
    seed = zlib.crc32(f"{case.name} {name}".encode())
    values = np.random.RandomState(seed).standard_normal(tuple(shape))
    if name == "input":
        values = 0.5 + 0.25 * values
    elif name.endswith("running_var"):
        values = 0.5 + np.abs(values)
    elif name != "cotangent" and len(shape) > 1:
        values /= np.sqrt(np.prod(shape[1:]))  # of the inputs that are added up
    elif name != "cotangent":
        # Few ReLUs off; ones and zeros would hide a swapped scale and bias of a norm.
        values = 0.3 * values + (1 if "norm" in name and "weight" in name else 0.2)
    if "weigh." in name:  # channel attention: its gradients are not to drown
        values *= 3
    return values.astype(np.float32)


def random_state(shapes: dict[str, tuple[int, ...]], case: Case) -> dict[str, Any]:
    """A PyTorch state dict of these shapes."""
    return {name: random_array(name, shape, case) for name, shape in shapes.items()}


def reference(case: Case) -> dict[str, Any]:
    """PyTorch's names and shapes, output, gradients and new buffers."""
    import torch
    from torch_volume_networks import network

    net = network(case).train(case.train)
    names = [n for n in net.state_dict() if not n.endswith("num_batches_tracked")]
    state = random_state({n: net.state_dict()[n].shape for n in names}, case)
    net.load_state_dict(
        {n: torch.from_numpy(a) for n, a in state.items()}, strict=False
    )
    x = random_array("input", case.shape, case)
    output = net(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
    cotangent = random_array("cotangent", output.shape, case)
    (output * torch.from_numpy(cotangent)).sum().backward()
    gradients = {name: value.grad.numpy() for name, value in net.named_parameters()}
    gradients |= {name: a.numpy() for name, a in net.named_buffers() if name in state}
    return {
        "shapes": {name: array.shape for name, array in state.items()},
        "output": np.moveaxis(output.detach().numpy(), 1, -1),
        "gradients": {name: gradients[name] for name in state},
    }


def pack(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """As arrays for a file: names, shapes, and one vector of numbers."""
    names = list(result["shapes"])
    shapes = [" ".join(map(str, result["shapes"][name])) for name in names]
    parts = [result["output"], *(result["gradients"][name] for name in names)]
    return {
        "names": np.array(names),
        "shapes": np.array(shapes),
        "output_shape": np.array(result["output"].shape),
        "values": np.concatenate([part.reshape(-1) for part in parts]),
    }


def golden(case: Case) -> dict[str, Any]:
    """What ``reference(case)`` gave when the golden file was made."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        packed = {
            key: file[f"{case.name}/{key}"]
            for key in ("names", "shapes", "output_shape", "values")
        }
    shapes = {
        str(name): tuple(map(int, str(shape).split()))
        for name, shape in zip(packed["names"], packed["shapes"], strict=True)
    }
    values, arrays = packed["values"], []
    for shape in (tuple(packed["output_shape"]), *shapes.values()):
        count = int(np.prod(shape))
        arrays.append(values[:count].reshape(shape))
        values = values[count:]
    gradients = dict(zip(shapes, arrays[1:], strict=True))
    return {"shapes": shapes, "output": arrays[0], "gradients": gradients}
