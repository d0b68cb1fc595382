"""neuraloperator's constructor arguments: out of its metadata or shapes, and back."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.activation_names import activation_name
from models.fno import FNO
from models.torch_objects import TorchGlobal, TorchRecord

ARGUMENT_ORDER = (  # of neuraloperator 2.0.0's FNO, as positional arguments count
    "n_modes",
    "in_channels",
    "out_channels",
    "hidden_channels",
    "n_layers",
    "lifting_channel_ratio",
    "projection_channel_ratio",
    "positional_embedding",
    "non_linearity",
    "norm",
    "complex_data",
    "use_channel_mlp",
    "channel_mlp_dropout",
    "channel_mlp_expansion",
    "channel_mlp_skip",
    "fno_skip",
    "resolution_scaling_factor",
    "domain_padding",
    "fno_block_precision",
    "stabilizer",
    "max_n_modes",
    "factorization",
    "rank",
    "fixed_rank_modes",
    "implementation",
    "decomposition_kwargs",
    "separable",
    "preactivation",
    "conv_module",
)
REQUIRED = ARGUMENT_ORDER[:4]
SPECTRAL_CONV = TorchGlobal("neuralop.layers.spectral_convolution", "SpectralConv")
THEIR_DEFAULTS = {  # of the arguments that our model has not
    "complex_data": False,
    "factorization": None,
    "rank": 1.0,
    "fixed_rank_modes": False,
    "implementation": "factorized",
    "decomposition_kwargs": None,
    "separable": False,
    "conv_module": SPECTRAL_CONV,
}
UNUSED_WITH_DENSE_WEIGHTS = (
    "rank",
    "fixed_rank_modes",
    "implementation",
    "decomposition_kwargs",
)
TORCH_ACTIVATIONS = {
    name: TorchGlobal("torch.nn.functional", name)
    for name in ("relu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus")
} | {"gelu": TorchGlobal("torch._C._nn", "gelu")}


def arguments_from_metadata(
    metadata: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The constructor's arguments that neuraloperator's ``_metadata`` records.

    ``given``, ours, win over them.

    ``metadata`` holds keyword arguments, ``args`` (the positional ones), ``_name`` and
    ``_version``; functions, classes and modules in it may be a ``TorchGlobal`` or
    ``TorchRecord`` or, out of a live state dict, themselves. A ValueError names what
    our FNO can't be.
    """
    found = dict(metadata)
    name = found.pop("_name", "FNO")
    version = found.pop("_version", None)
    positional = found.pop("args", ())
    found |= dict(zip(ARGUMENT_ORDER, positional, strict=False))
    found.pop("verbose", None)
    if name != "FNO":
        raise ValueError(
            f"the weights are of neuraloperator's class {name}, but only FNO can be "
            "imported (for a subclass that computes the same, remove _metadata)"
        )
    unknown = [key for key in found if key not in ARGUMENT_ORDER]
    if unknown:
        raise ValueError(
            f"the metadata ({version=}) has arguments that neuraloperator 2.0's FNO "
            f"does not take: {', '.join(map(str, unknown[:5]))}. Save the weights with "
            "2.0, or remove _metadata and pass the arguments by name"
        )
    _check_their_own(found)
    padding = found.get("domain_padding")
    if not _is_padding(padding):
        found["domain_padding"] = None
        if isinstance(padding, tuple) and "domain_padding" not in given:
            warnings.warn(
                f"The metadata's domain_padding={padding} is overlooked, as by "
                "neuraloperator, which pads for a number or a list only: weights that "
                "were trained there know no padding.",
                stacklevel=4,
            )
    translate = {"non_linearity": _activation_name, "positional_embedding": _embedding}
    arguments = {
        key: translate.get(key, plain)(value)
        for key, value in found.items()
        if key not in THEIR_DEFAULTS and key not in given
    }
    return {**arguments, **given}


def arguments_to_metadata(model: FNO) -> dict[str, Any]:
    """All that neuraloperator's ``FNO.from_checkpoint`` needs, of our ``model``."""
    known = [key for key in ARGUMENT_ORDER if key not in THEIR_DEFAULTS]
    metadata = {key: _listed(getattr(model, key)) for key in known}
    metadata |= THEIR_DEFAULTS
    metadata["n_modes"] = tuple(model.n_modes)
    activation = activation_name(model.non_linearity)
    if activation not in TORCH_ACTIVATIONS:
        raise ValueError(
            f"non_linearity={model.non_linearity!r} has no name in torch: only "
            f"{', '.join(TORCH_ACTIVATIONS)} can be exported"
        )
    metadata["non_linearity"] = TORCH_ACTIVATIONS[activation]
    metadata["domain_padding"] = _padding_list(model.domain_padding)
    metadata["_version"] = "0.1.0"  # of neuraloperator 2.0's checkpoints
    metadata["args"] = ()
    metadata["_name"] = "FNO"
    return metadata


def arguments_from_shapes(
    shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that the shapes of a state dict tell, and those left to assume.

    Args:
        shapes: of the arrays, under neuraloperator's names without a prefix.
        given: constructor arguments that the caller knows.
    """
    _, hidden, *rows = shapes["fno_blocks.convs.0.weight.tensor"]
    n_dim = len(rows)
    told: dict[str, Any] = {
        "hidden_channels": hidden,
        "n_modes": (*rows[:-1], max(1, 2 * (rows[-1] - 1))),
        "n_layers": sum(key.endswith(".weight.tensor") for key in shapes),
        "lifting_channel_ratio": 0,
        "use_channel_mlp": "fno_blocks.channel_mlp.0.fcs.0.weight" in shapes,
    }
    if "lifting.fcs.1.weight" in shapes:
        told["lifting_channel_ratio"] = _ratio(shapes["lifting.fcs.0.weight"], hidden)
    told["projection_channel_ratio"] = _ratio(shapes["projection.fcs.0.weight"], hidden)
    told["out_channels"] = shapes["projection.fcs.1.weight"][0]
    if told["use_channel_mlp"]:
        inner = shapes["fno_blocks.channel_mlp.0.fcs.0.weight"][0]
        told["channel_mlp_expansion"] = inner / hidden
    assumed = {
        "non_linearity": "gelu",
        "domain_padding": None,
        "resolution_scaling_factor": None,
        "stabilizer": None,
        "preactivation": False,
    }
    if given.get("max_n_modes") is None:
        assumed["max_n_modes"] = None
    else:  # the rows are those, and the modes in use are anybody's guess
        assumed["n_modes"] = told.pop("n_modes")
    for skip, keys in (
        ("fno_skip", "fno_blocks.fno_skips.0"),
        ("channel_mlp_skip", "fno_blocks.channel_mlp_skips.0"),
    ):
        if f"{keys}.conv.weight" in shapes:
            told[skip] = "linear"
        elif f"{keys}.weight" in shapes:
            told[skip] = "soft-gating"
        elif skip == "fno_skip" or told["use_channel_mlp"]:
            assumed[skip] = "identity"  # or None: neither has weights
    if "fno_blocks.norm.0.norm.running_mean" in shapes:
        told["norm"] = "batch_norm"
    elif "fno_blocks.norm.0.weight" in shapes:
        told["norm"] = "group_norm"
    else:
        assumed["norm"] = None  # or instance_norm
    entering = shapes["lifting.fcs.0.weight"][1]
    if "in_channels" in given:
        has_grid = entering == given["in_channels"] + n_dim
        told["positional_embedding"] = "grid" if has_grid else None
    else:
        embedding = given.get(
            "positional_embedding", "grid" if entering > n_dim else None
        )
        assumed["positional_embedding"] = embedding
        told["in_channels"] = entering - (n_dim if embedding == "grid" else 0)
    return (
        {key: value for key, value in told.items() if key not in given},
        {key: value for key, value in assumed.items() if key not in given},
    )


def _ratio(shape: tuple[int, ...], hidden: int) -> float:
    ratio = shape[0] / hidden
    # The constructor rounds ratio * hidden down: stay clear of the edge.
    return ratio if int(ratio * hidden) == shape[0] else (shape[0] + 0.5) / hidden


def _check_their_own(found: Mapping[str, Any]) -> None:
    """Refuses values, other than the default, of arguments that our model has not."""
    for key, default in THEIR_DEFAULTS.items():
        value = found.get(key, default)
        if key in UNUSED_WITH_DENSE_WEIGHTS:
            continue
        if key == "conv_module":
            value = _names(value)
            default = (default.module, default.name)
        if key == "factorization" and str(value).lower() in ("none", "dense"):
            continue
        if value != default:
            raise ValueError(
                f"the weights are of an FNO with {key}={value}, which can't be "
                "imported: only dense weights on real data, of SpectralConv, can"
            )


def _names(value) -> tuple[str | None, str | None]:
    """Module and name of a function or class, be it one or a reference to one."""
    if isinstance(value, TorchGlobal):
        return value.module, value.name
    return getattr(value, "__module__", None), getattr(value, "__name__", None)


def _activation_name(value) -> str:
    attributes = {}
    if isinstance(value, TorchRecord):
        # torch.tanh is pickled as getattr(its class, "tanh"), torch.nn.GELU() as such.
        module, name = _names(value.kind)
        if name == "getattr" and len(value.arguments) == 2:
            module, name = "torch", value.arguments[1]
        attributes = value.state if isinstance(value.state, Mapping) else {}
    else:
        module, name = _names(value)
        if name is None:  # an instance: torch.nn.GELU()
            module, name = _names(type(value))
            attributes = vars(value) if hasattr(value, "__dict__") else {}
    ours = {"leakyrelu": "leaky_relu"}.get(str(name).lower(), str(name).lower())
    plain = ours in TORCH_ACTIVATIONS and str(module).split(".")[0] == "torch"
    changed = (
        attributes.get("approximate", "none") != "none"
        or attributes.get("negative_slope", 0.01) != 0.01
        or attributes.get("alpha", 1.0) != 1.0
        or attributes.get("beta", 1.0) != 1.0
        or attributes.get("threshold", 20.0) != 20.0
    )
    if not plain or changed:
        raise ValueError(
            f"non_linearity is {module}.{name}{' with other settings' * changed}, but "
            f"known are {', '.join(TORCH_ACTIVATIONS)}: pass non_linearity=, a name or "
            "a JAX function"
        )
    return ours


def _embedding(value) -> str | None:
    if value is None or isinstance(value, str):
        return value
    state = value.state if isinstance(value, TorchRecord) else vars(value)
    name = _names(value.kind if isinstance(value, TorchRecord) else type(value))[1]
    bounds = state.get("grid_boundaries") if isinstance(state, Mapping) else None
    unit = isinstance(bounds, (list, tuple)) and all(
        list(pair) == [0, 1] for pair in bounds
    )
    if name not in ("GridEmbeddingND", "GridEmbedding2D") or not unit:
        raise ValueError(
            f"positional_embedding is a {name} with the boundaries {bounds}: only a "
            "grid from 0 to 1 can be imported"
        )
    return "grid"


def _is_padding(value) -> bool:
    """Whether neuraloperator pads at all: it overlooks tuples, and sums a list."""
    return (isinstance(value, (int, float)) and value > 0) or (
        isinstance(value, list) and sum(value) > 0
    )


def _padding_list(padding):
    if padding is None or isinstance(padding, (int, float)):
        return padding
    fractions = []
    for axis in padding:
        before, after = axis if isinstance(axis, (list, tuple)) else (axis, axis)
        if before != after:
            raise ValueError(
                f"domain_padding={padding} differs between the two ends of an axis, "
                "which neuraloperator has not: it can't be exported"
            )
        fractions.append(float(before))
    return fractions


def plain(value):
    """Lists as tuples and numpy's numbers as Python's, so that models compare."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _listed(value):
    """Tuples as lists: neuraloperator takes no tuple for its paddings and scalings."""
    return (
        [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
    )
