"""Pure functions for neural operators, made of parts that an Apple GPU can run."""

from jaxops import dft
from jaxops.backend import (
    Backend,
    BackendError,
    select_backend,
    set_defaults,
    to_device,
)
from jaxops.spectral import spectral_conv

__all__ = [
    "Backend",
    "BackendError",
    "dft",
    "select_backend",
    "spectral_conv",
    "to_device",
]

set_defaults()  # importing makes no array, so this is early enough
