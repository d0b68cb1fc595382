"""Flax Linen models over jaxops, channels last; ``__all__`` lists what is public."""

from models.bundle import load, save
from models.depth_attention import DepthAttentionSR
from models.edsr3d import EDSR3D
from models.fno import FNO, FNO1D, FNO2D, FNO3D
from models.mdcsrn import MDCSRN
from models.rcan3d import RCAN3D
from models.torch_volumes import from_torch
from models.torch_weights import from_neuralop, to_neuralop
from models.unet3d import UNet3D

__all__ = [
    "DepthAttentionSR",
    "EDSR3D",
    "FNO",
    "FNO1D",
    "FNO2D",
    "FNO3D",
    "MDCSRN",
    "RCAN3D",
    "UNet3D",
    "from_neuralop",
    "from_torch",
    "load",
    "save",
    "to_neuralop",
]
