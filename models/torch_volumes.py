"""Weights of PyTorch's ``nn.Conv3d`` networks into the volume models, without torch.

PyTorch has no standard network for volumes, so arrays are found by our names, or by
their order and shapes. Its arrays are channels first: (out, in, kd, kh, kw) for a
convolution, (in, 1, kd, 1, 1) for the depth taps of a separable one; everything is a
reshape, or a move of axes. The import is checked against native convolutions at once.
"""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxops.backend import to_device
from models.called_layers import layer_arrays
from models.native_check import convolution_errors, network_error, volume_shape
from models.torch_files import read_torch
from models.torch_native import call_order, native_name
from models.torch_weights import _host_array as host_array
from models.volume_model import VolumeModel

Report = Callable[[str], Any] | None
SAME = 1e-3  # what rounding may make of one network's output, TF32 included


def from_torch(
    source,
    model: VolumeModel,
    names: Mapping[str, str] | None = None,
    report: Report = print,
) -> dict:
    """The variables of ``model``, from a PyTorch network of the same layers.

    Where all arrays have our names (``groups_0.blocks_1.conv_0.weight``, the path of
    our layer with dots), names decide. Else their order does, each shape being checked:
    for a network the order in which it calls its layers, for a state dict the order of
    its entries. Only with a network does the check see whether the rest is the same too
    (activations, shortcuts, order of pixel shuffles), so pass that where you have it.

    Args:
        source: an ``nn.Module``; a state dict, alone or under one key of a checkpoint;
            or the path of a file with one (read without torch, no code run).
        model: ours, with the same sizes.
        names: for what order would not find: our layer, ``groups_0/conv``, to theirs,
            ``body.3``; or our array, ``groups_0/conv/kernel``, to theirs.
        report: is called with each line of the check, see :func:`conv3d_errors` and
            :func:`models.native_check.network_error`; None: no check.

    Returns:
        The variables, float32, on the default device.

    Raises:
        ValueError: names the first array that is missing, left over or misshaped.
        OSError: where the file can't be opened.
    """
    pairs = _matched(source, model, names)
    variables: dict = {}
    for slot, _, array in pairs:
        place = variables
        for name in slot.path[:-1]:
            place = place.setdefault(name, {})
        place[slot.path[-1]] = slot.to_ours(array)
    variables = to_device(variables)
    if report is not None:
        count = sum(array.size for slot, _, array in pairs if slot.path[0] == "params")
        how = "name" if all(s.torch_name == name for s, name, _ in pairs) else "order"
        report(
            f"{type(model).__name__}: {len(pairs)} arrays, {count:,} parameters, found "
            f"by {how if names is None else 'the names given'}"
        )
        errors = convolution_errors(model, variables, _by_layer(pairs))
        worst = max(errors, key=errors.__getitem__)
        report(
            f"against {native_name()}: {len(errors)} convolutions, largest difference "
            f"{errors[worst]:.1e} of the output, in {worst}"
        )
        if _is_network(source):
            error = network_error(source, model, variables)
            report(f"the whole network: largest difference {error:.1e} of the output")
            if error > SAME:
                warnings.warn(
                    f"With these weights the {type(model).__name__} computes something "
                    f"else than the PyTorch network: {error:.1e} of the output apart. "
                    "Compare activations, shortcuts and the last layers.",
                    stacklevel=2,
                )
    return variables


def conv3d_errors(
    source, model: VolumeModel, names: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Each imported convolution against the native one with the original weights.

    Native is ``torch.nn.functional.conv3d`` where torch has been imported, else the
    definition in numpy's float64. Arguments as in :func:`from_torch`.

    Returns:
        Our layer's path to the largest difference on a small random volume, relative to
        the largest output.
    """
    pairs = _matched(source, model, names)
    variables = from_torch(source, model, names, report=None)
    return convolution_errors(model, variables, _by_layer(pairs))


def _by_layer(pairs) -> dict[str, list[np.ndarray]]:
    arrays: dict[str, list] = {}
    for slot, _, array in pairs:
        arrays.setdefault(slot.layer, []).append(slot.to_torch_shape(array))
    return arrays


@dataclass(frozen=True)
class _Slot:
    """One array of ours, and what PyTorch calls it and how it lies there."""

    path: tuple[str, ...]  # collection, layers, name
    shape: tuple[int, ...]
    layer: str  # path of ours with slashes
    key: str  # after the layer's name
    axes: tuple[int, ...]  # of ours, in PyTorch's order; the rest have one point
    torch_shape: tuple[int, ...]

    @property
    def title(self) -> str:
        return "/".join(self.path[1:])

    @property
    def torch_name(self) -> str:
        return f"{self.layer.replace('/', '.')}.{self.key}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """With fewer axes, those of one tap are missing: a Linear or Conv2d may do."""
        wanted, got = (
            (*s[:2], *(n for n in s[2:] if n > 1)) for s in (self.torch_shape, shape)
        )
        return shape == self.torch_shape or (
            len(shape) < len(self.torch_shape) and wanted == got
        )

    def to_torch_shape(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array, np.float32).reshape(self.torch_shape)

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        moved = [self.shape[axis] for axis in self.axes]
        array = self.to_torch_shape(array).reshape(moved)
        return array.transpose(np.argsort(self.axes))


# Name of ours, number of axes: key of torch's; our axes in their order; where they are
# among torch's (out, in, kd, kh, kw).
_LAYOUTS = {
    ("kernel", 5): ("weight", (4, 3, 0, 1, 2), (0, 1, 2, 3, 4)),
    ("kernel", 2): ("weight", (1, 0), (0, 1)),
    ("depth_kernel", 2): ("depth.weight", (1, 0), (0, 2)),
    ("depth_kernel", 3): ("depth.weight", (2, 1, 0), (0, 1, 2)),
    ("plane_kernel", 4): ("plane.weight", (3, 2, 0, 1), (0, 1, 3, 4)),
    ("plane_bias", 1): ("plane.bias", (0,), None),
    ("bias", 1): ("bias", (0,), None),
    ("scale", 1): ("weight", (0,), None),
    ("mean", 1): ("running_mean", (0,), None),
    ("var", 1): ("running_var", (0,), None),
    ("relative_bias", 2): ("relative_bias", (0, 1), None),
}
# The order within a layer, in PyTorch's state dicts.
_ORDER = {
    "exact": ("kernel", "scale", "bias", "mean", "var", "relative_bias"),
    "separable": ("depth_kernel", "plane_kernel", "bias"),
    "2plus1d": ("plane_kernel", "plane_bias", "depth_kernel", "bias"),
}


def _slots(model: VolumeModel) -> list[_Slot]:
    """Every array of the model, layers in the order of their calls."""
    if model.conv == "separable" and model.rank is not None:
        raise ValueError("PyTorch has no layer for separable kernels of a rank")
    slots = []
    for layer, own in layer_arrays(model).items():
        form = "exact"
        if "depth_kernel" in own:
            form = "2plus1d" if "plane_bias" in own else "separable"
        slots += [
            _slot(layer, name, *own[name], form) for name in _ORDER[form] if name in own
        ]
    return slots


def _slot(layer, name: str, collection: str, shape, form: str) -> _Slot:
    key, axes, places = _LAYOUTS[name, len(shape)]
    if name == "bias" and form != "exact":
        key = {"separable": "plane.bias", "2plus1d": "depth.bias"}[form]
    torch_shape = tuple(shape[axis] for axis in axes)
    if places is not None:
        padded = [1] * 5
        for place, size in zip(places, torch_shape, strict=True):
            padded[place] = size
        torch_shape = tuple(padded)
    path = (collection, *layer, name)
    return _Slot(path, tuple(shape), "/".join(layer), key, axes, torch_shape)


def _matched(source, model, names) -> list[tuple[_Slot, str, np.ndarray]]:
    """Each array of the model, with its name and its array in the source."""
    arrays, where = _read(source, model)
    try:
        pairs = _match(_slots(model), arrays, dict(names or {}))
        for slot, _, array in pairs:
            if array.dtype.kind not in "fV":  # V: bfloat16 of ml_dtypes
                raise ValueError(f"{slot.layer} would be {array.dtype}, no floats")
        return pairs
    except ValueError as error:
        raise ValueError(
            f"{where} can't be imported into {type(model).__name__}: "
            f"{str(error).rstrip('.')}."
        ) from error


def _match(slots: list[_Slot], arrays: dict[str, np.ndarray], names: dict[str, str]):
    layers = {slot.layer for slot in slots}
    strange = [name for name in names if name not in layers | {s.title for s in slots}]
    if strange:
        raise ValueError(
            f"names has {strange[0]!r}, no layer or array of the model, which has "
            f"{', '.join(sorted(layers))}"
        )
    by_name = {slot.path: slot.torch_name for slot in slots}
    if names or not set(by_name.values()) <= set(arrays):
        by_name = {
            slot.path: names.get(slot.title, f"{names.get(slot.layer)}.{slot.key}")
            for slot in slots
            if slot.layer in names or slot.title in names
        }
        missing = [name for name in by_name.values() if name not in arrays]
        if missing:
            raise ValueError(f"names asks for {missing[0]}, but it has {_some(arrays)}")
    rest = [name for name in arrays if name not in set(by_name.values())]
    wanted = [slot for slot in slots if slot.path not in by_name]
    for slot, name in zip(wanted, rest, strict=False):
        if not slot.fits(arrays[name].shape):
            raise ValueError(_misfit(slot, name, arrays[name]))
    if len(wanted) != len(rest):
        both = min(len(wanted), len(rest))
        alone = [slot.title for slot in wanted[both:]] + rest[both:]
        raise ValueError(
            f"the model has {len(slots)} arrays, and it {len(arrays)}; left without a "
            f"partner are {_some(alone)}. Give the model the network's sizes"
        )
    by_name |= {slot.path: name for slot, name in zip(wanted, rest, strict=True)}
    for slot in slots:
        if not slot.fits(arrays[by_name[slot.path]].shape):
            name = by_name[slot.path]
            raise ValueError(_misfit(slot, name, arrays[name]))
    return [(slot, by_name[slot.path], arrays[by_name[slot.path]]) for slot in slots]


def _misfit(slot: _Slot, name: str, array: np.ndarray) -> str:
    return (
        f"{name} has the shape {array.shape} where {slot.title} needs "
        f"{slot.torch_shape}. Give the model the network's sizes, or say with names "
        "which layer is which"
    )


def _some(names) -> str:
    names = list(names)
    more = f", ... ({len(names)})" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _read(source, model) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of a source by name, in the order that counts, and what to call it."""
    if _is_network(source):
        state, where = call_order(source, volume_shape(model)), "The network"
    elif isinstance(source, Mapping):
        state, where = source, "The state dict"
    else:
        state, where = read_torch(source), os.fspath(source)
    if isinstance(state, Mapping) and not _has_arrays(state):
        inner = [v for v in state.values() if isinstance(v, Mapping) and _has_arrays(v)]
        state = inner[0] if len(inner) == 1 else None
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{where} holds no state dict, or several: pass the one of the network "
            "(names to arrays), as model.state_dict() gives it."
        )
    arrays = {
        name: host_array(name, value)
        for name, value in state.items()
        if hasattr(value, "shape") and not re.search(r"num_batches_tracked$", str(name))
    }
    return arrays, where


def _has_arrays(state: Mapping) -> bool:
    return any(len(getattr(value, "shape", ())) >= 2 for value in state.values())


def _is_network(source) -> bool:
    return callable(source) and hasattr(source, "state_dict")
