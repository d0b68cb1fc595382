"""What is known of jax-metal, Apple's own plugin: mostly from the issues of JAX.

Its source is not public, and there is no list of what it has.
"""

from jaxops.metal import conditions
from jaxops.metal.entries import (
    CAUTIONS_OF_ALL,
    COLLECTIVES,
    IN_2D,
    LEADING,
    OUTSIDE,
    REAL,
    RESIZE,
    Entry,
    Target,
    jax_issues,
)

JAX_METAL = Target(
    name="jax-metal",
    platform="METAL",
    version="0.1.1",
    half=("float16",),
    entries=(
        Entry(("fft",), "error", "it has no FFT", REAL, jax_issues(33883)),
        Entry(
            (),
            "error",
            "it has no complex numbers",
            REAL,
            jax_issues(16416),
            conditions.elements("complex<"),
        ),
        Entry(
            (),
            "error",
            "it has no float64",
            "float32; leave jax_enable_x64 off",
            jax_issues(20938, 16435),
            conditions.elements("f64"),
        ),
        Entry(
            (),
            "error",
            "it has no bfloat16",
            "float16 or float32",
            jax_issues(16417),
            conditions.elements("bf16"),
        ),
        Entry(
            ("convolution",),
            "crash",
            "a convolution of three spatial dimensions aborts the process",
            IN_2D,
            jax_issues(21554),
            conditions.has_more_than_two_spatial_axes,
        ),
        Entry(
            ("convolution",),
            "error",
            "a convolution over a grid with zeros between its points (a transposed "
            "one, or the gradient of a strided one) is not converted",
            RESIZE,
            jax_issues(19369),
            conditions.is_spread,
        ),
        Entry(
            ("dot_general",),
            "error",
            "the batch axes of a product must be its first",
            LEADING,
            jax_issues(20114, 20115),
            conditions.batch_does_not_lead,
        ),
        Entry(
            ("case",),
            "error",
            "lax.switch does not compile",
            "jnp.where, or lax.cond in lax.cond",
            jax_issues(20401),
            conditions.has_many_branches,
        ),
        Entry(
            ("case",),
            "error",
            "a branch of lax.cond or lax.switch that computes nothing does not compile",
            "jnp.where",
            jax_issues(21601, 20401),
            conditions.has_an_idle_branch,
        ),
        Entry(
            ("reduce",),
            "error",
            "a reduction of several arrays at once, as in argmax, is not converted",
            "several reductions; for argmax, compare with the maximum",
            jax_issues(21384),
            conditions.reduces_several,
        ),
        Entry(
            ("reduce_window",),
            "error",
            "cumulative sums as windows are not converted; jax 0.4.34 itself lowers "
            "jnp.cumsum another way for this plugin",
            "jax.lax.associative_scan, or a product with a triangular matrix",
            "jax-ml/jax pull request 21498",
            conditions.is_cumulative,
        ),
        Entry(
            ("reduce_window",),
            "error",
            "windows over anything but (batch, height, width, channels) of floats",
            "reshape and reduce (jaxops.pooling)",
            jax_issues(21389) + " (its traceback)",
            conditions.is_no_pooling,
        ),
        Entry(
            ("count_leading_zeros", "popcnt"),
            "error",
            "it does not count bits",
            "the CPU (jaxops.bridge.on_cpu)",
            jax_issues(21389, 28460),
        ),
        Entry(
            ("cholesky", "triangular_solve"),
            "error",
            "it has no linear algebra",
            OUTSIDE,
            jax_issues(16321),
        ),
        Entry(
            ("custom_call",),
            "error",
            "it calls no Python function",
            OUTSIDE,
            jax_issues(20375),
            conditions.is_callback,
        ),
        Entry(
            ("custom_call",),
            "error",
            "sharding constraints are not supported; jax before 0.5 makes one of each "
            "typed key that is passed to a jitted function",
            "a raw key (jax.random.key_data), wrapped inside (wrap_key_data)",
            "a run of jax 0.4.34; RuntimeWarning of jax for this plugin",
            conditions.is_sharding,
        ),
        Entry(
            ("custom_call",),
            "error",
            "it has no custom calls",
            OUTSIDE,
            jax_issues(16287, 20375),
        ),
        Entry(
            COLLECTIVES, "error", "it has one device", "no sharding", "one GPU a Mac"
        ),
        Entry(
            ("gather",),
            "crash",
            "a gather of so many elements can lock the whole machine",
            "smaller pieces, or a product with a one-hot matrix",
            jax_issues(23902),
            conditions.gathers_much,
        ),
        Entry(
            ("dynamic_slice", "dynamic_update_slice"),
            "wrong",
            "a start beyond the end is not moved back as JAX does; right where every "
            "start is in range, as in lax.scan",
            "clip the start first (jnp.clip)",
            jax_issues(21393, 21392),
            is_caution=True,
        ),
        Entry(
            ("pad",),
            "error",
            "padding between elements was not converted by versions before 0.1",
            "reshape and concatenate",
            jax_issues(20119, 16366),
            conditions.pads_between,
            is_caution=True,
        ),
        *CAUTIONS_OF_ALL,
    ),
)
