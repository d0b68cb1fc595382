"""Flax Linen models over jaxops, channels last; ``__all__`` lists what is public."""

from models.fno import FNO, FNO1D, FNO2D, FNO3D

__all__ = [
    "FNO",
    "FNO1D",
    "FNO2D",
    "FNO3D",
    "from_neuralop",
    "load",
    "save",
    "to_neuralop",
]

from models.bundle import load, save  # noqa: E402  (the bundle reads __all__)
from models.torch_weights import from_neuralop, to_neuralop  # noqa: E402
