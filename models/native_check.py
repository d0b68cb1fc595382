"""Imported weights against what they came from: native Conv3d, and whole networks."""

import functools
import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import numpy as np

from jaxops.backend import to_device
from models.blocks import Dense
from models.called_layers import called_layers
from models.torch_native import conv3d_native, run_network
from models.volume_blocks import Conv
from models.volume_model import VolumeModel

GRID = (5, 6, 7)  # of the volumes that single convolutions are checked on


def convolution_errors(
    model: VolumeModel,
    variables: Mapping,
    weights: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, float]:
    """Each convolution of ours against the native one with the original weights.

    Args:
        model, variables: ours.
        weights: our layer's path, with slashes, to the arrays of PyTorch's layer, or of
            its two layers, each weight (out, in / groups, kd, kh, kw) and its bias.

    Returns:
        Our layer's path to the largest difference on a random volume of ``GRID``
        points, relative to the largest output.
    """
    rng = np.random.default_rng(0)
    errors = {}
    for layer in called_layers(model):
        if not isinstance(layer, (Conv, Dense)):
            continue
        own = variables["params"]
        for name in layer.path:
            own = own[name]
        path = "/".join(layer.path)
        depthwise = "depth_kernel" in own and "plane_bias" not in own
        entering = weights[path][0].shape[0 if depthwise else 1]
        x = rng.standard_normal((1, *GRID, entering)).astype(np.float32)
        expected = conv3d_native(x, weights[path])
        alone = layer.clone(parent=None, name=None)
        errors[path] = _relative(_apply(alone, {"params": own}, to_device(x)), expected)
    return errors


def network_error(
    network,
    model: VolumeModel,
    variables: Mapping,
    shape: Sequence[int] | None = None,
    seed: int = 0,
) -> float:
    """A PyTorch network and ours with its weights, on one random volume.

    Args:
        network: ``nn.Module`` on (batch, channels, depth, height, width); it is run in
            evaluation mode.
        model, variables: from :func:`models.from_torch`.
        shape: of the volume, ours: (batch, depth, height, width, channels).
        seed: of the numbers from 0 to 1 in it.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ValueError: where the shapes of the two outputs differ.
    """
    shape = volume_shape(model) if shape is None else shape
    x = np.random.default_rng(seed).random(shape, np.float32)
    expected = run_network(network, x)
    ours = np.asarray(_apply(model, variables, to_device(x)))
    if ours.shape != expected.shape:
        raise ValueError(
            f"The PyTorch network makes {expected.shape} out of {x.shape}, but the "
            f"{type(model).__name__} {ours.shape}: they are not the same network."
        )
    return _relative(ours, expected)


def volume_shape(model: VolumeModel) -> tuple[int, ...]:
    """Of a small volume that every layer of the model has work on."""
    grid = (stride * math.ceil(8 / stride) for stride in model.stride)
    return (1, *grid, model.in_channels)


@functools.partial(jax.jit, static_argnums=0)
def _apply(layer: nn.Module, variables, x):
    return layer.apply(variables, x)


def _relative(ours, expected) -> float:
    expected = np.asarray(expected, np.float64)
    scale = max(float(np.abs(expected).max()), np.finfo(np.float32).tiny)
    return float(np.abs(np.asarray(ours, np.float64) - expected).max()) / scale
