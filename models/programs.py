"""A small program for each exported model and stage: what a proof compiles and runs.

``program("FNO2D", "gradient")`` is a pure function with its arguments, as an Apple GPU
compiles it, whatever device it is traced on. Sizes are the smallest that still have
every kind of layer. The audit, the interpreters and ``models.verify`` walk these, so a
model joins all of them once ``example_models`` has an instance of it.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import models
from jaxops.device import trace_for

STAGES = ("init", "forward", "gradient", "train_step")
DTYPES = ("float32", "float16", "bfloat16")
BATCH = 2
GRIDS = {1: (10,), 2: (8, 7), 3: (5, 4, 6)}  # points, by the number of spatial axes


class Program(NamedTuple):
    """A pure function of arrays, with arguments for it.

    Attributes:
        name: "MODEL/STAGE", with "/DTYPE" behind it where that is not float32.
        function: can be jitted, lowered and run; gives a pytree of arrays.
        arguments: pytrees of numpy arrays; random keys are raw, uint32 (2,).
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]


@functools.cache
def example_models() -> dict[str, nn.Module]:
    """A small, sensible instance of every model class that ``models`` exports.

    Among them are both norms' kinds (of a sample, of a batch), padding, every kind of
    convolution, every way to a finer grid, and odd and even sizes.
    """
    fno = {"in_channels": 1, "out_channels": 2, "hidden_channels": 4, "n_layers": 2}
    flat, fine = (1, 2, 2), (2, 2, 2)
    return {
        "FNO": models.FNO((4, 4), norm="batch_norm", domain_padding=0.25, **fno),
        "FNO1D": models.FNO1D((4,), norm="instance_norm", **fno),
        "FNO2D": models.FNO2D((4, 4), **fno),
        "FNO3D": models.FNO3D((2, 2, 4), **fno),
        "RCAN3D": models.RCAN3D(
            scale=flat, hidden_channels=6, n_groups=1, n_blocks=1, reduction=2
        ),
        "EDSR3D": models.EDSR3D(
            scale=fine, conv="separable", hidden_channels=4, n_blocks=1
        ),
        "UNet3D": models.UNet3D(scale=(2, 1, 1), hidden_channels=5, n_levels=1),
        "MDCSRN": models.MDCSRN(
            scale=flat, upsampler="linear", n_blocks=1, n_units=2, growth=2
        ),
        "DepthAttentionSR": models.DepthAttentionSR(
            scale=flat,
            conv="2plus1d",
            input_skip="cubic",
            hidden_channels=4,
            n_blocks=1,
            n_heads=2,
            depth_window=1,
        ),
    }


def program(model_name: str, stage: str, dtype: str = "float32") -> Program:
    """The program of an example model.

    Args:
        model_name: one of ``example_models()``.
        stage: one of ``STAGES``: ``init(key) -> variables``;
            ``forward(variables, x) -> y``; ``gradient(variables, x, target) -> (loss,
            (gradient of params, of x))``, both in inference mode; ``train_step(params,
            batch_stats, opt_state, x, target) -> (params, batch_stats, opt_state,
            loss)``, with AdamW.
        dtype: of x, the one that the model computes in. Weights are float32.

    Raises:
        ValueError: for another name, stage or dtype.
    """
    known = {
        "model_name": tuple(example_models()),
        "stage": STAGES,
        "dtype": DTYPES,
    }
    for argument, value in zip(known, (model_name, stage, dtype), strict=True):
        if value not in known[argument]:
            raise ValueError(
                f"program: {argument} is one of {', '.join(known[argument])}; got "
                f"{value!r}."
            )
    model = example_models()[model_name]
    function, arguments = _MAKERS[stage](model, model_name, np.dtype(dtype))
    name = f"{model_name}/{stage}" + ("" if dtype == "float32" else f"/{dtype}")
    return Program(name, as_on_metal(function), arguments)


def as_on_metal(function: Callable) -> Callable:
    """The function, traced as it is for an Apple GPU, on any device."""

    @functools.wraps(function)
    def traced(*arguments):
        with trace_for("metal"):
            return function(*arguments)

    return traced


def _init(model, name, dtype):
    sample = np.zeros(_input_shape(model), dtype)

    def init(key):
        return model.init(key, jnp.asarray(sample))

    return init, (np.asarray([0, 7], np.uint32),)


def _forward(model, name, dtype):
    def forward(variables, x):
        return model.apply(variables, x)

    return forward, (_variables(model, name), _input(model, name, dtype))


def _gradient(model, name, dtype):
    def gradient(variables, x, target):
        rest = {key: value for key, value in variables.items() if key != "params"}

        def loss(params, x):
            return _squared_error(model.apply({"params": params, **rest}, x), target)

        return jax.value_and_grad(loss, (0, 1))(variables["params"], x)

    target = _target(model, name)
    return gradient, (_variables(model, name), _input(model, name, dtype), target)


def _train_step(model, name, dtype):
    optimizer = optax.adamw(1e-3)

    def train_step(params, batch_stats, opt_state, x, target):
        def loss(params):
            variables = {"params": params}
            if batch_stats:
                variables["batch_stats"] = batch_stats
            y, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
            return _squared_error(y, target), new.get("batch_stats", {})

        grad = jax.value_and_grad(loss, has_aux=True)
        (value, new_stats), gradient = grad(params)
        with jax.numpy_dtype_promotion("standard"):  # optax has float ** int32
            changes, new_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, changes), new_stats, new_state, value

    variables = _variables(model, name)
    params = variables["params"]
    opt_state = jax.tree_util.tree_map_with_path(
        functools.partial(_moment, name), jax.eval_shape(optimizer.init, params)
    )
    x, target = _input(model, name, dtype), _target(model, name)
    return train_step, (params, variables.get("batch_stats", {}), opt_state, x, target)


_MAKERS = {
    "init": _init,
    "forward": _forward,
    "gradient": _gradient,
    "train_step": _train_step,
}


def _moment(name, path, shape):
    """Of a run under way: the first step of Adam divides rounding errors by theirs."""
    if not shape.shape and np.issubdtype(shape.dtype, np.integer):
        return np.full((), 3, shape.dtype)
    values = _random(f"{name}{jax.tree_util.keystr(path)}", shape.shape)
    squares = any(getattr(key, "name", "") == "nu" for key in path)
    return 0.01 + 0.01 * values**2 if squares else 1e-3 * values


def _squared_error(y, target):
    return jnp.mean((y.astype(jnp.float32) - target) ** 2)


def _input_shape(model: nn.Module) -> tuple[int, ...]:
    num_axes = len(model.n_modes) if hasattr(model, "n_modes") else 3
    return (BATCH, *GRIDS[num_axes], model.in_channels)


@functools.cache
def _shapes(name: str) -> tuple[Any, tuple[int, ...]]:
    """Of the variables and of the output."""
    model = example_models()[name]
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    x = jax.ShapeDtypeStruct(_input_shape(model), np.float32)
    variables = jax.eval_shape(model.init, key, x)
    return variables, jax.eval_shape(model.apply, variables, x).shape


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers, float32, that belong to the name."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return generator.standard_normal(shape, dtype=np.float32)


def _variables(model, name):
    """Weights that keep the values near one, and no bias, scale or mean at rest."""

    def leaf(path, shape):
        key = f"{name}{jax.tree_util.keystr(path)}"
        values, last = _random(key, shape.shape), path[-1].key
        if last == "var":
            return 0.5 + np.abs(values)
        if last == "scale" or (last == "weight" and values.ndim == 1):
            return 1 + 0.2 * values
        if values.ndim < 2:
            return 0.2 * values
        inputs = shape.shape[-2:-1] if last == "weight" else shape.shape[:-1]
        return values * np.float32(1 / math.sqrt(math.prod(inputs)))

    return jax.tree_util.tree_map_with_path(leaf, _shapes(name)[0])


def _input(model, name, dtype):
    return (0.5 + 0.3 * _random(f"{name}/x", _input_shape(model))).astype(dtype)


def _target(model, name):
    return 0.5 + 0.3 * _random(f"{name}/target", _shapes(name)[1])
