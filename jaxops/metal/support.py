"""What each Apple plugin is known to refuse, to get wrong and to be slow at: a table.

An entry names operations and a condition, what happens, what to use in their place,
and where that is known from: an issue, a version, a file of the plugin, or a run. None
of it was tried on an Apple GPU here. To add a plugin, add a `Target` to ``TARGETS``.

Effects: "crash" ends the process, "error" is raised, "wrong" is silent, "slow" runs.
An entry is a *refusal*, which fails an audit, or a *caution*: it runs, but is slow, or
is wrong under a condition that a program does not show.
"""

from jaxops.metal import conditions
from jaxops.metal.entries import (
    CAUTIONS_OF_ALL,
    COLLECTIVES,
    EFFECTS,
    IN_2D,
    METALJAX_README,
    OUTSIDE,
    Entry,
    Target,
)
from jaxops.metal.jax_metal import JAX_METAL

__all__ = ["EFFECTS", "TARGETS", "Entry", "Target"]

MLX_ENTRIES = (
    Entry(
        ("convolution",),
        "slow",
        "3D convolutions take 2 to 5 times as long as those of the slices",
        IN_2D,
        "ml-explore/mlx issue 3625",
        conditions.has_more_than_two_spatial_axes,
        is_caution=True,
    ),
    Entry(
        (),
        "wrong",
        "arrays of 2^31 elements and more come out wrong or zero",
        "smaller tiles or batches",
        "ml-explore/mlx issues 3248, 3138, 3979",
        conditions.is_large,
    ),
)

JAX_MPS_OPERATIONS = """
exponential log sqrt rsqrt negate abs floor ceil sine cosine tanh tan sign
log_plus_one round_nearest_even is_finite exponential_minus_one real imag add subtract
multiply divide maximum minimum power atan2 and or xor not shift_left
shift_right_logical shift_right_arithmetic clamp remainder cbrt popcnt compare select
logistic constant convert bitcast_convert reshape broadcast_in_dim concatenate
transpose reverse iota reduce reduce_window select_and_scatter return custom_call
composite optimization_barrier while case rng_bit_generator dot_general convolution
cholesky triangular_solve sort fft complex gather scatter slice dynamic_slice
dynamic_update_slice pad
"""

JAX_MPS = Target(
    name="jax-mps",
    platform="mps",
    version="0.10.11, 0.11.1",
    half=("float16", "bfloat16"),
    has_rules=True,
    known=frozenset(JAX_MPS_OPERATIONS.split()),
    known_source=(
        "one version of tillahoffmann/jax-mps src/pjrt_plugin/ops, pull request 159"
    ),
    entries=(
        Entry(
            (),
            "error",
            "it has no float64",
            "float32; leave jax_enable_x64 off",
            "tillahoffmann/jax-mps scripts/_pytest_skip_unsupported_plugin.py",
            conditions.elements("f64"),
        ),
        Entry(
            (),
            "error",
            "it has no 4-bit integers and no 8-bit floats",
            "int8, float16",
            "tillahoffmann/jax-mps scripts/_pytest_skip_unsupported_plugin.py",
            conditions.elements("f8", "f4", "i4", "i2"),
        ),
        Entry(
            ("custom_call",),
            "error",
            "it calls no Python function",
            OUTSIDE,
            "tillahoffmann/jax-mps src/pjrt_plugin/ops/control_flow.cc",
            conditions.is_callback,
        ),
        Entry(
            ("rng_bit_generator",),
            "wrong",
            'other random bits than on the CPU ("rbg" keys)',
            "threefry2x32 keys, the default",
            "tillahoffmann/jax-mps src/pjrt_plugin/ops/control_flow.cc",
        ),
        Entry(
            ("convolution",),
            "wrong",
            "grouped convolutions over a grid with zeros between its points, as in the "
            "gradient of a grouped strided one, are wrong with MLX before July 2026",
            "no groups where there are strides",
            "ml-explore/mlx pull request 3800",
            lambda operation: (
                conditions.is_grouped(operation) and conditions.is_spread(operation)
            ),
        ),
        Entry(
            COLLECTIVES,
            "error",
            "it has one device",
            "no sharding",
            "tillahoffmann/jax-mps scripts/_pytest_skip_unsupported_plugin.py",
        ),
        *MLX_ENTRIES,
        *CAUTIONS_OF_ALL,
    ),
)

METALJAX = Target(
    name="metaljax",
    platform="metal",
    version="0.11.9",
    half=("float16", "bfloat16"),
    has_rules=True,
    entries=(
        Entry(
            (),
            "error",
            "it computes nothing in float64",
            "float32; leave jax_enable_x64 off",
            f"{METALJAX_README} (METALJAX_F64)",
            conditions.elements("f64"),
        ),
        Entry(
            ("custom_call",),
            "slow",
            "a call of a Python function waits for the device",
            OUTSIDE,
            METALJAX_README,
            conditions.is_callback,
            is_caution=True,
        ),
        *MLX_ENTRIES,
        *CAUTIONS_OF_ALL,
    ),
)

TARGETS = {target.name: target for target in (JAX_METAL, JAX_MPS, METALJAX)}
