"""The operations of ``jaxops``, each as a small program: values and gradients."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops import dft, pointwise, pooling, resize
from jaxops.conv3d import conv2plus1d, separable_conv3d
from jaxops.conv3d_forms import FORMS
from models.programs import Program, as_on_metal

KEPT = ((-2, -1, 0, 1), (0, 1, 2))


def _softmax(x):
    return jax.nn.softmax(x, axis=-1)


def _loop(x):
    def step(carry, row):
        carry = carry * jnp.asarray(0.5, x.dtype) + row
        return carry, carry * row

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)[1]


def _bits(x):
    key = jax.random.wrap_key_data(jnp.asarray([1, 2], jnp.uint32), impl="threefry2x32")
    return x * jax.random.uniform(key, x.shape, x.dtype)


VOLUME = (2, 4, 5, 6, 3)
FIELD = (2, 8, 7, 3)
# name: the function and the shapes of its arguments.
OPERATIONS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "dense": (pointwise.dense, (FIELD, (3, 5), (5,))),
    **{name: (f, (FIELD,)) for name, f in pointwise.ACTIVATIONS.items()},
    "dft.forward": (partial(dft.forward, wavenumbers=KEPT), (FIELD,)),
    "dft.inverse": (
        partial(dft.inverse, wavenumbers=KEPT, sizes=(8, 7)),
        ((2, 2, 4, 3, 3),),
    ),
    "resize.fourier": (partial(resize.fourier, sizes=(9, 6)), (FIELD,)),
    "spectral_conv": (
        partial(jaxops.spectral_conv, n_modes=(4, 4)),
        (FIELD, (2, 4, 3, 3, 5)),
    ),
    "spectral_conv to another grid": (
        partial(jaxops.spectral_conv, n_modes=(4, 4), output_shape=(9, 12)),
        (FIELD, (2, 4, 3, 3, 5)),
    ),
    **{
        f"conv3d {form}": (
            partial(jaxops.conv3d, form=form),
            (VOLUME, (3, 3, 3, 3, 4)),
        )
        for form in FORMS
    },
    "conv3d strided": (
        partial(jaxops.conv3d, strides=(1, 2, 2)),
        (VOLUME, (3, 3, 3, 3, 4)),
    ),
    "separable_conv3d": (separable_conv3d, (VOLUME, (3, 3), (3, 3, 3, 4))),
    "conv2plus1d": (conv2plus1d, (VOLUME, (3, 3, 3, 4), (3, 4, 2), (4,))),
    "max_pool3d": (partial(pooling.max_pool3d, window=(2, 2, 2)), ((1, 4, 4, 6, 3),)),
    "resize.linear": (partial(resize.linear, sizes=(7, 8, 9)), (VOLUME,)),
    "resize.cubic": (partial(resize.cubic, sizes=(7, 8, 9)), (VOLUME,)),
    "pixel_shuffle": (
        partial(resize.pixel_shuffle, factors=(2, 1, 2)),
        ((1, 2, 3, 4, 8),),
    ),
    "softmax": (_softmax, (FIELD,)),
    "scan": (_loop, (FIELD,)),
    "threefry": (_bits, (FIELD,)),
}


def operation_program(name: str, dtype: str = "float32") -> Program:
    """Value and gradients of half the summed squares of one of ``OPERATIONS``."""
    function, shapes = OPERATIONS[name]
    seed = zlib.crc32(name.encode())
    generator = np.random.Generator(np.random.PCG64(seed))
    arguments = tuple(
        generator.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))
        for shape in shapes
    )

    def values_and_gradients(*arguments: Any):
        def half_square(*arguments):
            y = function(*arguments)
            return jnp.sum(y.astype(jnp.float32) ** 2) / 2, y

        inputs = tuple(range(len(arguments)))
        (_, y), gradients = jax.value_and_grad(half_square, inputs, has_aux=True)(
            *arguments
        )
        return y, gradients

    return Program(f"jaxops/{name}", as_on_metal(values_and_gradients), arguments)
