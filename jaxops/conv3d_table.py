"""Which form of a 3D convolution ``form="auto"`` takes: a table, a row a device kind.

The choice hangs on the channels and the dtype, not on the grid, so that a tile of a
volume is computed as the whole is. (Winograd alone looks at the depth: see
``jaxops.conv3d_forms``.) ``benchmarks/conv3d.py`` measures what the table says.

``form="local"`` takes a form whose results hang, bit by bit, on nothing but the points
that their taps reach: tiles with a halo then equal the whole volume exactly, where
winograd leaves rounding errors of neighbouring slices, about 1e-6 of the range.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops import plugins
from jaxops.conv3d_forms import Forms

# form: for most channels. local: in its place for "local", and for half precision.
# few: up to this many output channels take "outshift" (an input gradient puts the input
#   channels out).
# kernel_gradient, half_kernel_gradient, side_by_side: see jaxops.conv3d_forms.Forms.
TABLE: dict[str, dict[str, Any]] = {
    "cpu": {
        "form": "winograd",
        "few": 4,
        "local": "concat",
        "kernel_gradient": "winograd",
        "half_kernel_gradient": "products",
        "side_by_side": True,
        "source": (
            "measured with jax 0.10.2 on 2 cores of an AMD EPYC (Zen 5, AVX-512), by "
            "CPU time, 14 shapes of 1 to 256 channels with kernels of 2, 3, 5 and (3, "
            "1, 1): winograd took 0.53 to 0.84 of the time of the next form, as much "
            "at 16 channels; outshift 0.44 and 0.76 of it at 1 and 4 output channels; "
            "kernel gradients by winograd 0.5 to 0.85 of those by products"
        ),
    },
    "gpu": {
        "form": "concat",
        "few": 4,
        "local": "concat",
        "kernel_gradient": "convolution",
        "half_kernel_gradient": "convolution",
        "side_by_side": False,
        "source": (
            "measured for concat with JAX's own gradients alone, on an H200, 3x3x3, 32 "
            "to 32 channels: 3.72 ms in float32 against 7.39 of cuDNN's conv3d"
        ),
    },
    "metal": {
        "form": "concat",
        "few": 4,
        "local": "concat",
        "kernel_gradient": "products",
        "half_kernel_gradient": "products",
        "side_by_side": False,
        "source": (
            "not measured: one 2D convolution of many channels is what Apple's plugins "
            "do fast, and gradients of kernels have no fast path as convolutions there"
        ),
    },
}


def device_kind() -> str:
    """The row of the table for the device that arrays go to by default."""
    device = jax.config.jax_default_device
    platform = getattr(device, "platform", device) or jax.default_backend()
    if platform in plugins.APPLE_PLATFORMS:
        return "metal"
    return "gpu" if platform in ("gpu", *plugins.GPU_PLUGINS) else "cpu"


def chosen_forms(form: str, inputs: int, outputs: int, dtype: Any) -> Forms:
    """The forms for these channels; a form by its name is for both directions."""
    row = TABLE[device_kind()]
    half = jnp.finfo(dtype).bits < 32
    both = (form, form)
    if form in ("auto", "local"):
        usual = row["local"] if half or form == "local" else row["form"]
        both = ("outshift" if n <= row["few"] else usual for n in (outputs, inputs))
    kernel_gradient = row["half_kernel_gradient" if half else "kernel_gradient"]
    return Forms(*both, kernel_gradient, row["side_by_side"])
