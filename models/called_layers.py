"""What a network is made of, found by tracing it: nothing is computed or typed in."""

import flax.linen as nn
import jax
import jax.numpy as jnp


def called_layers(model: nn.Module) -> list[nn.Module]:
    """Every module that ``model.init`` calls, in the order in which the calls start."""
    layers = []

    def record(call, args, kwargs, context):
        if context.method_name == "__call__":
            layers.append(context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        _shapes(model)
    return layers


def layer_arrays(model: nn.Module) -> dict[tuple[str, ...], dict[str, tuple]]:
    """The arrays that each layer has itself, in the order of :func:`called_layers`.

    Returns:
        The layer's path to {name: (collection, shape)}.
    """
    shapes = _shapes(model)
    result = {}
    for layer in called_layers(model):
        own = {}
        for collection, tree in shapes.items():
            for name in layer.path:
                tree = tree.get(name, {})
            own |= {
                name: (collection, leaf.shape)
                for name, leaf in tree.items()
                if hasattr(leaf, "shape")
            }
        if own:
            result[tuple(layer.path)] = own
    return result


def _shapes(model: nn.Module) -> dict:
    example = jnp.zeros(model.example_shape())
    return jax.eval_shape(lambda: model.init(jax.random.key(0), example))
