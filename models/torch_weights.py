"""FNO weights from and to neuraloperator 2.0.0, without torch.

Its arrays are channels first, (out, in, 1) for a 1x1 convolution and complex
(in, out, *rows) for a spectral weight; ours are (in, out) and real (2, *rows, in, out),
the real part first. Everything else is a reshape, so that the way there and back is
bit-equal. Reference: what neuraloperator 2.0.0 (MIT) saves.
"""

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxops.backend import to_device
from models.fno import FNO
from models.torch_arguments import (
    REQUIRED,
    arguments_from_metadata,
    arguments_from_shapes,
    arguments_to_metadata,
    plain,
)
from models.torch_files import read_torch, write_torch

ANCHOR = "lifting.fcs.0.weight"  # in every state dict of an FNO, after the prefix
FOREIGN_KEYS = {
    r"fno_blocks\.convs\.\d+\.weight\.(core|weights|factors\.)": (
        "its spectral weights are factorised (TFNO): only dense weights can be imported"
    ),
    r"(lifting|projection|fno_blocks\..*)\.f[ri]\.": (
        "it is of an FNO with complex_data=True: only FNOs on real data can be imported"
    ),
    r"fno_blocks\.convs\.weight": (
        "it is of neuraloperator before 1.0: load it there and save it with 2.0"
    ),
    r"(fc0|conv0|spconv_layers\.0|spec_encoder)\.": (
        "it is of another FNO code than neuraloperator's, which can't be imported"
    ),
}


def from_neuralop(source, compat: str | None = None, **arguments) -> tuple[FNO, dict]:
    """Our FNO with neuraloperator's weights.

    Args:
        source: a state dict (names to numpy arrays or torch tensors) or the path of a
            file with one: ``NAME_state_dict.pt``, or ``NAME`` for short. It may be part
            of a larger one: prefixes such as ``module.`` are found, and a state dict
            under one key of a checkpoint is. The constructor's arguments are read from
            its ``_metadata``, or from ``NAME_metadata.pkl`` beside the file.
        compat: ``"neuralop-2.0"`` for neuraloperator's own results on odd grids and
            where layers change the grid; see :class:``models.FNO``.
        **arguments: of the constructor, which win over the metadata. Without metadata,
            ``n_modes`` and the three channel counts together make a constructor call,
            with its defaults; short of that the rest is read off the shapes, and a
            warning lists what they can't tell.

    Returns:
        The model, and its variables as float32 arrays on the default device.

    Raises:
        ValueError: names the unknown, missing or misshaped arrays, or what can't be
            imported (factorised, separable or complex weights, other classes).
    """
    state, metadata, where = _read_source(source)
    try:
        arrays = _find_arrays(state)
        model = FNO(**_all_arguments(arrays, metadata, arguments), compat=compat)
        return model, to_device(_variables(model, arrays))
    except ValueError as error:
        raise ValueError(
            f"{where} can't be imported: {str(error).rstrip('.')}."
        ) from error


def to_neuralop(
    model: FNO, variables: Mapping, path: str | os.PathLike | None = None
) -> dict[str, Any]:
    """neuraloperator's state dict of our model, and its files.

    On odd grids, and where layers change the grid, neuraloperator computes something
    else than a model without ``compat="neuralop-2.0"``.

    Args:
        model, variables: as from :func:``from_neuralop`` or training.
        path: ``FOLDER/NAME``, to write ``FOLDER/NAME_state_dict.pt`` and
            ``FOLDER/NAME_metadata.pkl`` too, for
            ``neuralop.models.FNO.from_checkpoint(FOLDER, NAME)``.

    Returns:
        Names to numpy arrays of neuraloperator's types and shapes, and ``_metadata``.

    Raises:
        ValueError: for what neuraloperator has not (padding that differs between two
            ends, a function as ``non_linearity``), or arrays that are not the model's.
        OSError: names the file that can't be written.
    """
    try:
        metadata = arguments_to_metadata(model)
        state = {
            item.key: item.to_torch(_leaf(variables, item)) for item in _items(model)
        }
    except ValueError as error:
        raise ValueError(
            f"The model can't be exported: {str(error).rstrip('.')}."
        ) from error
    for key in [key for key in state if key.endswith("running_var")]:
        tracked = key.removesuffix("running_var") + "num_batches_tracked"
        state[tracked] = np.array(0, np.int64)  # torch's BatchNorm insists on it
    state["_metadata"] = metadata
    if path is not None:
        write_torch(f"{os.fspath(path)}_state_dict.pt", state)
        write_torch(f"{os.fspath(path)}_metadata.pkl", metadata)
    return state


@dataclass(frozen=True)
class _Item:
    """One array: its place in the variables, its name there, and its shape there."""

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]

    @property
    def is_spectral(self):
        return self.key.endswith(".weight.tensor")

    @property
    def is_kernel(self):
        return self.path[-1] == "kernel"

    @property
    def our_shape(self):
        if self.is_spectral:
            return (2, *self.shape[2:], *self.shape[:2])
        if self.is_kernel:
            return self.shape[1::-1]
        return (max(self.shape),)

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        if self.is_spectral:
            ours = np.empty(self.our_shape, np.float32)
            for part, values in zip(ours, (array.real, array.imag), strict=True):
                part[...] = np.moveaxis(values, (0, 1), (-2, -1))
            return ours
        array = array[..., 0].T if self.is_kernel else array.reshape(-1)
        return np.asarray(array, np.float32)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        if self.is_spectral:
            theirs = np.empty(self.shape, np.complex64)
            theirs.real, theirs.imag = np.moveaxis(array, (-2, -1), (1, 2))
            return theirs
        array = array.T if self.is_kernel else array
        return np.ascontiguousarray(array, np.float32).reshape(self.shape)


def _items(model: FNO) -> list[_Item]:
    """Every array of the model, in neuraloperator's order."""
    n_dim, hidden = len(model.n_modes), model.hidden_channels
    ones = (1,) * n_dim
    rows = (*model.n_modes[:-1], model.n_modes[-1] // 2 + 1)
    rows = rows if model.max_n_modes is None else tuple(model.max_n_modes)
    layers = range(model.n_layers)
    items = []

    def add(path: str, key: str, shape: tuple[int, ...], collection="params"):
        items.append(_Item((collection, *path.split("/")), key, shape))

    def add_mlp(path: str, key: str, channels: list[int]):
        for i, (entering, leaving) in enumerate(
            zip(channels[:-1], channels[1:], strict=True)
        ):
            add(
                f"{path}/fcs_{i}/kernel",
                f"{key}.fcs.{i}.weight",
                (leaving, entering, 1),
            )
            add(f"{path}/fcs_{i}/bias", f"{key}.fcs.{i}.bias", (leaving,))

    def add_skips(name: str, key: str, kind: str | None):
        for i in layers:
            place = f"blocks_{i}/{name}"
            if kind == "linear":
                shape = (hidden, hidden, 1)
                add(f"{place}/kernel", f"fno_blocks.{key}.{i}.conv.weight", shape)
            elif kind == "soft-gating":
                shape = (1, hidden, *ones)
                add(f"{place}/weight", f"fno_blocks.{key}.{i}.weight", shape)

    for i in layers:
        place, key = f"blocks_{i}/conv", f"fno_blocks.convs.{i}"
        add(f"{place}/bias", f"{key}.bias", (hidden, *ones))
        add(f"{place}/weight", f"{key}.weight.tensor", (hidden, hidden, *rows))
    add_skips("fno_skip", "fno_skips", model.fno_skip)
    if model.use_channel_mlp:
        inner = round(hidden * model.channel_mlp_expansion)
        for i in layers:
            place, key = f"blocks_{i}/channel_mlp", f"fno_blocks.channel_mlp.{i}"
            add_mlp(place, key, [hidden, inner, hidden])
        add_skips("channel_mlp_skip", "channel_mlp_skips", model.channel_mlp_skip)
    if model.norm in ("group_norm", "batch_norm"):
        inside = ".norm" if model.norm == "batch_norm" else ""
        for i in range(2 * model.n_layers):  # two a layer
            place = f"blocks_{i // 2}/norm_{i % 2}"
            key = f"fno_blocks.norm.{i}{inside}"
            add(f"{place}/scale", f"{key}.weight", (hidden,))
            add(f"{place}/bias", f"{key}.bias", (hidden,))
            if model.norm == "batch_norm":
                add(f"{place}/mean", f"{key}.running_mean", (hidden,), "batch_stats")
                add(f"{place}/var", f"{key}.running_var", (hidden,), "batch_stats")
    entering = model.in_channels + (n_dim if model.positional_embedding else 0)
    lifted = int(model.lifting_channel_ratio * hidden)
    add_mlp("lifting", "lifting", [entering, *([lifted] if lifted else []), hidden])
    projected = int(model.projection_channel_ratio * hidden)
    add_mlp("projection", "projection", [hidden, projected, model.out_channels])
    return items


def _leaf(variables: Mapping, item: _Item) -> np.ndarray:
    """The array of ``variables`` at the item's place, checked."""
    leaf: Any = variables
    for name in item.path:
        if not isinstance(leaf, Mapping) or name not in leaf:
            raise ValueError(f"the variables have no array {'/'.join(item.path)}")
        leaf = leaf[name]
    array = np.asarray(leaf)
    if array.shape != item.our_shape:
        raise ValueError(
            f"{'/'.join(item.path)} has the shape {array.shape}, but the model's is "
            f"{item.our_shape}"
        )
    return array


def _read_source(source) -> tuple[Mapping, Mapping | None, str]:
    """(state dict, metadata from a file beside it, what to call the source)."""
    if isinstance(source, Mapping):
        return source, None, "The state dict"
    path = Path(source)
    if not path.exists() and Path(f"{path}_state_dict.pt").exists():
        path = Path(f"{path}_state_dict.pt")
    state = read_torch(path)
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{path} holds {state!r:.80}, not a state dict: save model.state_dict() "
            "there, not the model"
        )
    beside = Path(f"{str(path).removesuffix('_state_dict.pt')}_metadata.pkl")
    if path.name.endswith("_state_dict.pt") and beside.exists():
        metadata = read_torch(beside)
        if isinstance(metadata, Mapping):
            return state, metadata, str(path)
        raise ValueError(f"{beside} holds no dict of arguments: save the model again")
    return state, None, str(path)


def _find_arrays(state: Mapping) -> dict[str, Any]:
    """The entries of the one FNO in ``state``, without prefix, and ``_metadata``."""
    if not _prefixes(state):
        nested = [v for v in state.values() if isinstance(v, Mapping) and _prefixes(v)]
        if len(nested) == 1:
            state = {"_metadata": state.get("_metadata"), **nested[0]}
    prefixes = _prefixes(state)
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    arrays = {
        key.removeprefix(prefix): value
        for key, value in state.items()
        if isinstance(key, str) and key.startswith(prefix)
    }
    for pattern, meaning in FOREIGN_KEYS.items():
        if any(re.search(rf"(^|\.){pattern}", key) for key in arrays):
            raise ValueError(meaning)
    if len(prefixes) != 1:
        found = f"{len(prefixes)} ({', '.join(prefixes)})" if prefixes else "none"
        raise ValueError(
            f"one FNO has one array that is called {ANCHOR}, behind a prefix at most; "
            f"it has {found}, and the keys {_some(state)}. Pass the part that is an FNO"
        )
    if state.get("_metadata") is not None:
        arrays["_metadata"] = state["_metadata"]
    return arrays


def _prefixes(state: Mapping) -> list[str]:
    return [
        key.removesuffix(ANCHOR)
        for key in state
        if isinstance(key, str) and (key == ANCHOR or key.endswith(f".{ANCHOR}"))
    ]


def _some(keys) -> str:
    names = [str(key) for key in keys if isinstance(key, (str, int))]
    more = f", ... ({len(names)})" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _all_arguments(arrays, metadata, given) -> dict[str, Any]:
    given = {key: plain(value) for key, value in given.items()}
    own = arrays.pop("_metadata", None)
    if own is not None or metadata is not None:
        metadata = metadata if own is None else own
        if not isinstance(metadata, Mapping):
            raise ValueError("its _metadata is no dict of arguments")
        return arguments_from_metadata(metadata, given)
    if all(name in given for name in REQUIRED):
        return given
    shapes = {key: tuple(np.shape(value)) for key, value in arrays.items()}
    if len(shapes.get("fno_blocks.convs.0.weight.tensor", ())) < 3 or any(
        f"projection.fcs.{i}.weight" not in shapes for i in (0, 1)
    ):
        raise ValueError(f"the arrays are not those of an FNO: {_some(shapes)}")
    told, assumed = arguments_from_shapes(shapes, given)
    if assumed:
        listed = ", ".join(f"{key}={value!r}" for key, value in assumed.items())
        warnings.warn(
            "The state dict has no metadata, and its shapes don't tell all of the "
            f"arguments. Assumed: {listed}. Pass those that differ to from_neuralop.",
            stacklevel=3,
        )
    return {**told, **assumed, **given}


def _variables(model: FNO, arrays: dict[str, Any]) -> dict:
    """The variables of ``model``; each array of the state dict is checked and used."""
    items = _items(model)
    missing = [item.key for item in items if item.key not in arrays]
    wanted = {item.key for item in items}
    unknown = [
        key
        for key in arrays
        if key not in wanted and not re.fullmatch(r".*\.num_batches_tracked", key)
    ]
    if missing or unknown:
        raise ValueError(
            f"the arrays are not those of {_described(model)}; missing: "
            f"{_some(missing) or 'none'}; unknown: {_some(unknown) or 'none'}"
        )
    variables: dict = {}
    for item in items:
        array = _host_array(item.key, arrays[item.key])
        if array.shape != item.shape:
            raise ValueError(
                f"{item.key} has the shape {array.shape}, but {_described(model)} "
                f"needs {item.shape}"
            )
        if (
            array.dtype.kind == "c"
        ) != item.is_spectral or array.dtype.kind in "biuUOS":
            kind = "complex" if item.is_spectral else "real"
            raise ValueError(f"{item.key} is {array.dtype}, but must be {kind} floats")
        place = variables
        for name in item.path[:-1]:
            place = place.setdefault(name, {})
        place[item.path[-1]] = item.to_ours(array)
    return variables


def _described(model: FNO) -> str:
    return (
        f"an FNO with n_modes={model.n_modes}, {model.in_channels=}, "
        f"{model.out_channels=}, {model.hidden_channels=}, {model.n_layers=}, "
        f"{model.norm=}"
    ).replace("model.", "")


def _host_array(key: str, value) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().resolve_conj()
        if str(value.dtype) == "torch.bfloat16":  # numpy has none of its own
            value = value.float()
        return value.numpy()
    if not hasattr(value, "__array__"):
        raise ValueError(f"{key} is a {type(value).__name__}, not an array")
    return np.asarray(value)
