"""A trained model as one ``.safetensors`` file, which loads without other knowledge.

Arrays lie under flat names: ``variables/params/blocks_0/conv/weight``, and
``extra/NAME/..`` for what the caller adds. The file's metadata holds, as JSON, the
class and the arguments of the model, the rest of ``extra``, and the provenance. The
file is a length, a JSON header and raw arrays (github.com/huggingface/safetensors).
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import models
from jaxops.backend import to_device
from models.activation_names import activation_name
from models.atomic import replace_file

FORMAT = "jaxops bundle"
FORMAT_VERSION = "1"
DTYPES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "float16 bfloat16 float32 float64"
)
PACKAGES = ("jaxops", "jax", "jaxlib", "flax", "numpy")


def save(
    path: str | os.PathLike, model: nn.Module, variables: Mapping, **extra
) -> None:
    """Writes a model, its variables and whatever goes with them into one file.

    Args:
        path: of the file; ``.safetensors`` by convention. It is written whole or not at
            all, and missing folders are made.
        model: one of the classes in ``models.__all__``.
        variables: nested dicts of arrays, as from ``model.init``; their dtypes stay.
        **extra: nested dicts of arrays, numbers, strings, tuples of these, None.

    Raises:
        ValueError: names what can't be kept: a function without a name in
            ``jaxops.pointwise.ACTIVATIONS``, another class, a key with a slash,
            variables that are not the model's.
        OSError: where the file can't be written.
    """
    if _known_classes().get(type(model).__name__) is not type(model):
        known = ", ".join(_known_classes())
        raise ValueError(
            f"Only models of models.__all__ can be saved and loaded ({known}); got a "
            f"{type(model).__name__}."
        )
    arrays: dict[str, np.ndarray] = {}
    strays = _leaves(_take_arrays("variables", variables, arrays))
    if strays:
        raise ValueError(f"variables are nested dicts of arrays, unlike {strays}.")
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": _description(model),
        "extra": json.dumps(_take_arrays("extra", extra, arrays)),
        "provenance": json.dumps(_provenance()),
    }
    try:
        _check_shapes(model, variables)
    except ValueError as error:
        raise ValueError(f"The model can't be saved: {_told(error)}.") from error
    with replace_file(path) as temporary:
        try:
            save_file(arrays, temporary, metadata)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{os.fspath(path)} can't be written: {error}") from error


def load(path: str | os.PathLike) -> tuple[nn.Module, dict, dict]:
    """Reads what :func:`save` wrote.

    Returns:
        The model; its variables, on the default device, in the dtypes of the file
        (64 bits become 32 unless JAX's x64 mode is on); and ``extra``, with numpy
        arrays and with lists as tuples.

    Raises:
        ValueError: for a truncated or foreign file, a newer format, an unknown class or
            argument, arrays that are missing, misshaped or not the model's.
        OSError: where the file can't be opened.
    """
    try:
        metadata, arrays = _read(path)
        model = _build(metadata["model"])
        tree = _nest(arrays, metadata["extra"])
        _check_shapes(model, tree["variables"])
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} can't be loaded: {_told(error)}."
        ) from error
    variables = jax.tree.map(
        lambda leaf: to_device(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)),
        tree["variables"],
    )
    return model, variables, tree["extra"]


def provenance(path: str | os.PathLike) -> dict[str, Any]:
    """When, by which command line and with which versions a bundle was written."""
    try:
        return _read(path, with_arrays=False)[0]["provenance"]
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} can't be read: {_told(error)}.") from error


def _known_classes() -> dict[str, type[nn.Module]]:
    found = {name: getattr(models, name) for name in models.__all__}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    }


def _argument_names(model_class: type[nn.Module]) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(model_class)
        if field.init and field.name not in ("parent", "name")
    ]


def _description(model: nn.Module) -> str:
    """Class and arguments of a model as JSON."""
    arguments = {
        name: _plain(name, getattr(model, name))
        for name in _argument_names(type(model))
    }
    return json.dumps({"class": type(model).__name__, "arguments": arguments})


def _plain(where: str, value: Any) -> Any:
    """``value`` as JSON has it; an activation function as its name."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Callable) and activation_name(value) is not None:
        return activation_name(value)
    if isinstance(value, Callable):
        raise ValueError(
            f"{where} is a function, {getattr(value, '__name__', value)!r}, which no "
            "file can hold: give the model a name in jaxops.pointwise.ACTIVATIONS"
        )
    raise ValueError(
        f"{where} is of the type {type(value).__name__}, which can't be kept: use "
        "arrays in nested dicts, numbers, strings, tuples and None"
    )


def _take_arrays(where: str, tree: Mapping, arrays: dict[str, np.ndarray]) -> dict:
    """Moves the arrays in ``tree`` to ``arrays`` under flat names; returns the rest."""
    rest = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise ValueError(f"a key of {where} is {key!r}, no text without a slash")
        name = f"{where}/{key}"
        if isinstance(value, Mapping):
            rest[key] = _take_arrays(name, value, arrays)
        elif hasattr(value, "__array__") and not isinstance(value, np.generic):
            arrays[name] = _host_array(name, value)
        else:
            rest[key] = _plain(name, value)
    return rest


def _host_array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value, order="C")
    if array.dtype.name not in DTYPES:
        raise ValueError(f"{name} is {array.dtype}, but kept can be {DTYPES}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _leaves(rest: dict, where: str = "variables") -> list[str]:
    """The names in what :func:`_take_arrays` left that are no dicts."""
    names = []
    for key, value in rest.items():
        name = f"{where}/{key}"
        names += _leaves(value, name) if isinstance(value, dict) else [name]
    return names


def _provenance() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None  # run from a checkout that is not installed
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "command_line": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def _read(path, with_arrays: bool = True) -> tuple[dict, dict[str, np.ndarray]]:
    """The parsed metadata of a bundle, and its arrays by their flat names."""
    with open(path, "rb") as file:  # an OSError with the path, where there is none
        if file.read(1) == b"":
            raise ValueError("it is empty")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _checked_metadata(file.metadata())
            names = file.keys() if with_arrays else []
            return metadata, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(
            f"it is truncated or no .safetensors file ({error}): copy it again, or "
            "give a file that models.save wrote"
        ) from error


def _told(error: Exception) -> str:
    return str(error).rstrip(".")


def _checked_metadata(raw: Mapping[str, str] | None) -> dict[str, dict]:
    raw = raw or {}
    if raw.get("format") != FORMAT:
        raise ValueError(
            "it is a .safetensors file, but not one that models.save wrote"
        )
    if raw.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"its format version is {raw.get('format_version')!r}, but this version of "
            f"jaxops reads {FORMAT_VERSION!r}: upgrade jaxops"
        )
    parsed = {}
    for name in ("model", "extra", "provenance"):
        try:
            parsed[name] = _tuples(json.loads(raw.get(name, "")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its {name} is no JSON ({error})") from error
        if not isinstance(parsed[name], dict):
            raise ValueError(f"its {name} is no JSON object")
    return parsed


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _build(described: dict) -> nn.Module:
    known = _known_classes()
    name, arguments = described.get("class"), described.get("arguments")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"its model is a {name!r}; known are {', '.join(known)}")
    if not isinstance(arguments, dict):
        raise ValueError("its model has no arguments")
    unknown = set(arguments) - set(_argument_names(known[name]))
    if unknown:
        raise ValueError(f"{name} has no argument {', '.join(sorted(unknown))}")
    try:
        return known[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its arguments: {error}") from error


def _nest(arrays: Mapping[str, np.ndarray], extra: dict) -> dict[str, dict]:
    tree: dict[str, dict] = {"variables": {}, "extra": extra}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node: Any = tree
        if not parents or parents[0] not in tree:
            raise ValueError(f"its array {name} belongs neither to variables nor extra")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"its array {name} lies inside another")
        if last in node:
            raise ValueError(f"its array {name} stands where something else does")
        node[last] = array
    return tree


def _check_shapes(model: nn.Module, variables: dict) -> None:
    """Refuses variables that are not those that ``model.init`` makes."""
    wanted, got = _wanted_shapes(_description(model)), _shapes(variables)
    wrong = [f"{name} is missing" for name in wanted if name not in got]
    wrong += [f"{name} is not the model's" for name in got if name not in wanted]
    wrong += [
        f"{name} has the shape {got[name]}, not {shape}"
        for name, shape in wanted.items()
        if got.get(name, shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"its arrays don't fit its model: {'; '.join(wrong[:3])}{more}"
        )


@functools.lru_cache(maxsize=8)
def _wanted_shapes(description: str) -> dict[str, Sequence[int]]:
    """What ``model.init`` makes; traced once, since each checkpoint of a run asks."""
    model = _build(_tuples(json.loads(description)))
    # Shapes don't depend on the scaling, but a small example could shrink to nothing.
    if hasattr(model, "resolution_scaling_factor"):
        model = model.clone(resolution_scaling_factor=None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "n_modes=.* is more than a grid")
            return _shapes(
                jax.eval_shape(
                    lambda: model.init(
                        jax.random.key(0), jnp.zeros(_example_shape(model))
                    )
                )
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"its model can't be initialised: {error}") from error


def _shapes(tree: Mapping, where: str = "") -> dict[str, Sequence[int]]:
    found = {}
    for key, value in tree.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            found |= _shapes(value, f"{name}/")
        else:
            found[name] = tuple(value.shape)
    return found


def _example_shape(model: nn.Module) -> tuple[int, ...]:
    """The shape of a small input: what the model says itself (``example_shape()``), or,
    for an operator, a few points along each axis, whatever its modes."""
    if hasattr(model, "example_shape"):
        return model.example_shape()
    return (1, *(4,) * len(model.n_modes), model.in_channels)
