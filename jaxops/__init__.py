"""Pure functions for neural operators, made of parts that an Apple GPU can run."""

from jaxops import dft
from jaxops.backend import (
    Backend,
    BackendError,
    select_backend,
    set_defaults,
    to_device,
)
from jaxops.conv3d import conv3d  # shadows the module's name, as jaxops.conv3d
from jaxops.spectral import spectral_conv

__all__ = [
    "Backend",
    "BackendError",
    "conv3d",
    "dft",
    "select_backend",
    "spectral_conv",
    "to_device",
]

set_defaults()  # importing makes no array, so this is early enough
