"""Training data: equations solved here, and files that people bring."""

from train.data.darcy import DarcySettings, darcy_dataset
from train.data.formats import read_inputs, read_pairs
from train.data.pairs import Pairs

__all__ = ["DarcySettings", "Pairs", "darcy_dataset", "read_inputs", "read_pairs"]
