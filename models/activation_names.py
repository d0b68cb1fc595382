"""Names for activation functions, so that a model can be described in a file."""

from collections.abc import Callable

from jaxops.pointwise import ACTIVATIONS


def activation_name(name_or_function: str | Callable) -> str | None:
    """The name under which ``jaxops.pointwise`` knows an activation, or None."""
    for name, function in ACTIVATIONS.items():
        if name_or_function == name or name_or_function is function:
            return name
    return None
