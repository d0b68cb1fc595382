"""A trained volumetric network with its dense 3D kernels factorised."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxops.factorise import factorise
from models.volume_model import VolumeModel


def factorised(
    model: VolumeModel, variables: Mapping[str, Any], conv: str, rank: int
) -> tuple[VolumeModel, dict[str, Any], dict[str, float]]:
    """The network with each dense kernel replaced by its best factors (SVD).

    Layers that are exact with fewer terms than ``rank`` have these. Biases, flat
    kernels and everything else stay. The result can be trained further.

    Args:
        model: a volume model with ``conv="exact"``.
        variables: of the model, as nested dicts.
        conv: ``"separable"`` or ``"2plus1d"``, see :func:`jaxops.factorise`.
        rank: terms a kernel, at least 1.

    Returns:
        The model, its variables, and the relative error of each kernel by its name.

    Raises:
        ValueError: for another model, ``conv`` or ``rank``, or kernels that are not
            finite.
    """
    if not isinstance(model, VolumeModel) or model.conv != "exact":
        told = getattr(model, "conv", None)
        raise ValueError(
            'Only volume models with conv="exact" have dense kernels to factorise; got '
            f"{type(model).__name__} with conv={told!r}."
        )
    errors: dict[str, float] = {}
    result = model.clone(conv=conv, rank=rank, parent=None, name=None)

    def walk(tree, path):
        if not isinstance(tree, Mapping):
            return tree
        kernel = tree.get("kernel")
        if np.ndim(kernel) != 5 or kernel.shape[0] == 1:
            return {name: walk(leaf, (*path, name)) for name, leaf in tree.items()}
        kd, kh, kw, inputs, outputs = kernel.shape
        if conv == "separable":
            exact = min(kd, kh * kw * outputs)
        else:
            exact = min(kh * kw * inputs, kd * outputs)
        depth, plane, error = factorise(kernel, min(rank, exact), conv)
        errors["/".join(path)] = error
        layer = {"depth_kernel": depth, "plane_kernel": plane, "bias": tree["bias"]}
        if conv == "2plus1d":
            layer["plane_bias"] = np.zeros(plane.shape[-1], plane.dtype)
        return layer

    parameters = walk(variables["params"], ())
    return result, {**variables, "params": parameters}, errors
