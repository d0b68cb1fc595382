"""What a table of ``jaxops.metal.support`` is made of."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxops.metal import conditions
from jaxops.metal.program import Operation

EFFECTS = ("crash", "error", "wrong", "slow")


@dataclass(frozen=True)
class Entry:
    """Something that a plugin cannot do, or not well.

    Attributes:
        operations: names without "stablehlo."; empty: any.
        applies: whether it is about this operation.
        effect: one of ``EFFECTS``.
        why: what happens, in words.
        instead: what to use.
        source: where this is known from.
        is_caution: see ``jaxops.metal.support``.
    """

    operations: tuple[str, ...]
    effect: str
    why: str
    instead: str
    source: str
    applies: Callable[[Operation], bool] = lambda operation: True
    is_caution: bool = False


@dataclass(frozen=True)
class Target:
    """A plugin.

    Attributes:
        name: its distribution.
        platform: what JAX lowers for.
        version: that the table speaks of.
        entries: the first that applies to an operation is what is reported.
        known: the operations that it has, or None where no list of them is public.
        known_source: of that list.
        half: the half precisions that it computes in.
        has_rules: brings ways of its own to lower functions that JAX alone cannot.
    """

    name: str
    platform: str
    version: str
    entries: tuple[Entry, ...]
    half: tuple[str, ...]
    has_rules: bool = False
    known: frozenset[str] | None = None
    known_source: str = ""


COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
    "partition_id",
    "reduce_scatter",
    "replica_id",
)
IN_2D = "jaxops.conv3d, or 2D convolutions of the slices"
REAL = "real and imaginary part as two arrays or two channels; jaxops.dft"
LEADING = (
    "transpose or reshape, then jnp.matmul with the batch axes in front "
    "(jaxops.matmul.matmul); not einsum"
)
OUTSIDE = "move it out of the jitted function; jaxops.bridge.on_cpu for an op"
RESIZE = "jaxops.resize (linear, or pixel_shuffle) and an ordinary convolution"

METALJAX_README = "eterevsky/metaljax README.md, Coverage and known gaps"
IREE_RUN = "Metal shaders by IREE 3.13, run on a CPU: wrong values (a data race)"


def jax_issues(*numbers: int) -> str:
    return ", ".join(f"jax-ml/jax issue {number}" for number in numbers)


CAUTIONS_OF_ALL = (
    Entry(
        ("convolution",),
        "wrong",
        "grouped convolutions came out wrong in shaders that another compiler made",
        "shift, multiply and add; or a dense convolution",
        IREE_RUN,
        conditions.is_grouped,
        is_caution=True,
    ),
    Entry(
        ("convolution",),
        "slow",
        "a convolution over a grid with zeros between its points: a transposed one, or "
        "the gradient of a strided one",
        RESIZE,
        "ml-explore/mlx issue 3082 (it may allocate the whole im2col)",
        conditions.is_spread,
        is_caution=True,
    ),
)
