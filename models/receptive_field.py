"""How far a network looks, added up from the layers that it runs.

A layer that looks at neighbours, or changes the grid, has a method ``reach(need)``: how
many points beyond a block of its input it takes to give ``need`` points beyond that
block of its output, an axis. Blocks begin and end on whole points of the coarsest grid.
One that does not stand in the chain of layers, but beside all of it, says so with
``beside_the_network = True``.
"""

import functools

import flax.linen as nn

from models.called_layers import called_layers

Sizes = tuple[int, ...]


@functools.lru_cache(maxsize=64)
def receptive_radius(model: nn.Module) -> Sizes:
    """Points of the input beyond a block that its part of the output depends on.

    Args:
        model: with ``example_shape()``; hashable, as models with tuples are.

    Returns:
        One number an axis. Shortcuts run beside longer chains of layers, so that all
        layers, taken as one chain, bound them: never too small.
    """
    reaches = [layer for layer in called_layers(model) if hasattr(layer, "reach")]
    beside = [getattr(layer, "beside_the_network", False) for layer in reaches]
    nothing = (0,) * (len(model.example_shape()) - 2)
    chain = nothing
    for layer, is_beside in zip(reversed(reaches), reversed(beside), strict=True):
        chain = chain if is_beside else layer.reach(chain)
    radii = [chain] + [
        layer.reach(nothing) for layer, b in zip(reaches, beside, strict=True) if b
    ]
    return tuple(max(axis) for axis in zip(*radii, strict=True))
