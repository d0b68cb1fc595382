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
    "audit",
    "conv3d",
    "dft",
    "select_backend",
    "spectral_conv",
    "to_device",
]


def __getattr__(name: str):
    if name == "audit":  # imported where it is used, not with every program
        from jaxops.metal.audit import audit

        return audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


set_defaults()  # importing makes no array, so this is early enough
