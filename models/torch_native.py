"""PyTorch's side of an import: the order of a network's layers, and its own results.

torch is not imported: where a network of its is given, it is there already.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


def native_name() -> str:
    """What :func:`conv3d_native` computes with."""
    torch = _loaded_torch()
    if torch is None:
        return "the definition of Conv3d in float64"
    return f"PyTorch {torch.__version__}'s Conv3d"


def _loaded_torch():
    return sys.modules.get("torch")


def conv3d_native(x: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Convolutions one behind the other, zeros around, as ``nn.Conv3d`` computes them.

    Args:
        x: (1, depth, height, width, channels).
        arrays: weights (out, in / groups, kd, kh, kw), each with its bias (out,), if it
            has one, behind it.
    """
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for array in arrays:
        if array.ndim == 1:
            steps[-1] = (steps[-1][0], array)
        else:
            steps.append((array, np.zeros(len(array), np.float32)))
    y = np.moveaxis(x, -1, 1)
    one = _by_definition if _loaded_torch() is None else _by_torch
    for weight, bias in steps:
        y = one(y, weight, bias, y.shape[1] // weight.shape[1])
    return np.moveaxis(y, 1, -1)


def _by_torch(x, weight, bias, groups: int) -> np.ndarray:
    torch = _loaded_torch()
    padding = [size // 2 for size in weight.shape[2:]]
    with torch.no_grad():
        return torch.nn.functional.conv3d(
            *(torch.from_numpy(np.ascontiguousarray(a)) for a in (x, weight, bias)),
            padding=padding,
            groups=groups,
        ).numpy()


def _by_definition(x, weight, bias, groups: int) -> np.ndarray:
    """out[o, p] = bias[o] + the sum over taps t and channels c of weight[o, c, t]
    x[c, p + t]."""
    grid, taps = x.shape[2:], weight.shape[2:]
    around = [(0, 0), (0, 0), *((size // 2, size // 2) for size in taps)]
    x = np.pad(x.astype(np.float64), around)
    x = x.reshape(len(x), groups, -1, *x.shape[2:])
    weight = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
    y = np.zeros((len(x), *weight.shape[:2], *grid))
    for tap in np.ndindex(*taps):
        window = tuple(slice(t, t + n) for t, n in zip(tap, grid, strict=True))
        shifted = x[(..., *window)]
        y += np.einsum("goc,bgcdhw->bgodhw", weight[(..., *tap)], shifted)
    y = y.reshape(len(x), -1, *grid)
    return y + bias.astype(np.float64).reshape(1, -1, 1, 1, 1)


def run_network(network: Any, x: np.ndarray) -> np.ndarray:
    """An ``nn.Module`` on a volume of ours, in evaluation mode; channels last again."""
    torch = _loaded_torch()
    was_training = network.training
    parameter = next(network.parameters())
    volume = torch.from_numpy(np.moveaxis(x, -1, 1).copy())
    network.eval()
    try:
        with torch.no_grad():
            y = network(volume.to(parameter.device, parameter.dtype))
    finally:
        network.train(was_training)
    return np.moveaxis(y.detach().float().cpu().numpy(), 1, -1)


def call_order(network: Any, shape: Sequence[int]) -> dict[str, Any]:
    """The state dict of an ``nn.Module``, its layers in the order of their calls.

    Args:
        network: is run once on zeros.
        shape: of these: ours, (batch, depth, height, width, channels).

    Raises:
        ValueError: for a layer that is called twice: ours have weights of their own.
    """
    order: dict[str, int] = {}
    calls = []
    for name, module in network.named_modules():
        own = [*module.named_parameters(recurse=False)]
        own += module.named_buffers(recurse=False)
        if own:

            def record(module, inputs, name=name):
                if name in order:
                    raise ValueError(
                        f"The network calls {name} twice; shared weights can't be "
                        "imported."
                    )
                order[name] = len(order)

            calls.append(module.register_forward_pre_hook(record))
    try:
        run_network(network, np.zeros(shape, np.float32))
    finally:
        for call in calls:
            call.remove()
    state = network.state_dict()
    last = len(order)  # what is never called stays, and is told as left over
    by_layer = sorted(state, key=lambda key: order.get(key.rpartition(".")[0], last))
    return {key: state[key] for key in by_layer}
