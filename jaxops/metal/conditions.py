"""Conditions on one operation, for the table of ``jaxops.metal.support``."""

from collections.abc import Callable

from jaxops.metal.program import Operation

MOST_ELEMENTS = 2**31  # MLX counts them in 32 bits
LARGE_GATHER = 2**24  # the one that is known to lock a machine gave 2**25 elements


def elements(*names: str) -> Callable[[Operation], bool]:
    """Whether an operand or a result has such an element, or one made of it."""

    def applies(operation: Operation) -> bool:
        types = (*operation.operands, *operation.results)
        return any(name in tensor.element for tensor in types for name in names)

    return applies


def has_more_than_two_spatial_axes(operation: Operation) -> bool:
    return len(operation.operands[0].shape) > 4


def batch_does_not_lead(operation: Operation) -> bool:
    for side in ("lhs", "rhs"):
        part = f"{side}_batching_dimensions"
        axes = operation.numbers("dot_dimension_numbers", part)
        if axes != tuple(range(len(axes))):
            return True
    return False


def is_spread(operation: Operation) -> bool:
    """Zeros between the points of the image."""
    return any(n > 1 for n in operation.numbers("lhs_dilation"))


def is_grouped(operation: Operation) -> bool:
    counts = ("feature_group_count", "batch_group_count")
    return any(operation.numbers(count)[0] > 1 for count in counts)


def pads_between(operation: Operation) -> bool:
    return any(operation.numbers("interior_padding"))


def is_cumulative(operation: Operation) -> bool:
    """A window over a whole axis that is padded: a cumulative sum."""
    windows = operation.numbers("window_dimensions")
    whole = (
        window == length > 1
        for window, length in zip(windows, operation.operands[0].shape, strict=True)
    )
    return any(whole) and any(operation.numbers("padding"))


def is_no_pooling(operation: Operation) -> bool:
    first = operation.operands[0]
    return len(first.shape) != 4 or not first.element.startswith(("f", "bf"))


def has_an_idle_branch(operation: Operation) -> bool:
    """A branch that computes nothing from what it is given."""
    idle = {"constant", "return"}
    return any(set(names) <= idle for names in operation.branches)


def has_many_branches(operation: Operation) -> bool:
    return len(operation.branches) > 2


def reduces_several(operation: Operation) -> bool:
    return len(operation.results) > 1


def is_callback(operation: Operation) -> bool:
    return "callback" in operation.called


def is_sharding(operation: Operation) -> bool:
    return operation.called == "Sharding"


def is_large(operation: Operation) -> bool:
    return any(tensor.size >= MOST_ELEMENTS for tensor in operation.results)


def gathers_much(operation: Operation) -> bool:
    return any(tensor.size >= LARGE_GATHER for tensor in operation.results)
