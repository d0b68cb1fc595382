"""Flax Linen models over jaxops, channels last; ``__all__`` lists what is public."""

from models.bundle import load, save
from models.fno import FNO, FNO1D, FNO2D, FNO3D
from models.torch_weights import from_neuralop, to_neuralop

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
