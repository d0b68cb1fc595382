"""Saved training states: whole files, from which a run goes on as if never stopped.

A checkpoint is a model file (`models.save`) with the rest of the training state beside
the weights, so `models.load` and ``python -m train.predict`` take it like any other.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.backend import to_device
from models import load, save
from train.loop import TrainState

LAST = "checkpoints/last.safetensors"
BEST = "checkpoints/best.safetensors"
WEIGHTS = ("params", "batch_stats")


def save_checkpoint(path: Path, model: Any, state: TrainState, **extra: Any) -> None:
    """Write a state, whole or not at all: the file of before stays until then.

    Args:
        path: of the file; its folder is made.
        model: the linen module that the weights belong to.
        state: what to save, on any device.
        extra: more to keep: nested dicts of arrays, numbers, strings and None.
    """
    names, leaves, _ = _named(state)
    training = {}
    for name, leaf in zip(names, jax.device_get(leaves), strict=True):
        if name[0] not in WEIGHTS:
            _put(training, name, np.asarray(leaf))
    save(path, model, jax.device_get(state.variables), training=training, **extra)


def restore_checkpoint(path: Path, target: TrainState) -> tuple[TrainState, dict]:
    """Read a state of the kind of ``target``, which gives structure, shapes and dtypes.

    Args:
        path: of the file.
        target: a fresh state of the same model and optimiser.

    Returns:
        The state, bit for bit what was saved, and the ``extra`` it was saved with.

    Raises:
        ValueError: if the file is cut off, is no checkpoint, or is one of another model
            or optimiser; the message names the first arrays that differ.
        FileNotFoundError: if there is none.
    """
    _, variables, extra = load(path)
    if "training" not in extra:
        raise ValueError(
            f"{path} must hold a training state to go on from; it holds a model only."
        )
    saved = dict(_leaves({**extra.pop("training"), **variables}))
    names, leaves, structure = _named(target)
    wrong = _differences(saved, dict(zip(names, leaves, strict=True)))
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(
            f"{path} must hold the state of this model and optimiser; it differs: "
            f"{'; '.join(wrong[:3])}{more}. Give the options that the run was started "
            "with, or start anew with --overwrite."
        )
    restored = [
        to_device(saved[name], dtype=leaf.dtype)
        for name, leaf in zip(names, leaves, strict=True)
    ]
    # A copy that is the device's own: on a CPU the arrays above may still be numpy's
    # memory, and a step that reuses its arguments' memory would write into that.
    restored = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays])(restored)
    return jax.tree_util.tree_unflatten(structure, restored), extra


def _differences(saved, wanted):
    """What is wrong with saved arrays, in words: {name: array} against {name: leaf}."""
    wrong = [f"{'/'.join(name)} is missing" for name in wanted if name not in saved] + [
        f"{'/'.join(name)} is unknown" for name in saved if name not in wanted
    ]
    for name in wanted.keys() & saved.keys():
        got, want = saved[name], wanted[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            wrong.append(
                f"{'/'.join(name)} is {got.dtype}{list(got.shape)} there, "
                f"{want.dtype}{list(want.shape)} here"
            )
    return sorted(wrong)


def _named(tree):
    """Names (tuples of strings), leaves and structure of a tree."""
    entries, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [tuple(_text(key) for key in path) for path, _ in entries]
    return names, [leaf for _, leaf in entries], structure


def _text(key):
    """A key of a path as text: of a dict, a named tuple or dataclass, or a tuple."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"A training state has no keys of type {type(key).__name__}.")


def _put(tree, name, leaf):
    for key in name[:-1]:
        tree = tree.setdefault(key, {})
    tree[name[-1]] = leaf


def _leaves(tree, name=()):
    """Names and leaves of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*name, key))
        else:
            yield (*name, key), value
