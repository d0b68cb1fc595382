"""Which form of a 3D convolution ``form="auto"`` takes: a table, a row a device kind.

The choice hangs on the channels and the dtype, not on the grid, so that a tile of a
volume is computed as the whole is. (Winograd alone looks at the depth: see
``jaxops.conv3d_forms``.) ``benchmarks/conv3d.py`` measures what the table says.

``form="local"`` takes a form whose results hang, bit by bit, on nothing but the points
that their taps reach: tiles with a halo then equal the whole volume exactly, where
winograd leaves rounding errors of neighbouring slices, about 1e-6 of the range.
"""

from typing import Any

import jax.numpy as jnp

from jaxops.conv3d_forms import Forms
from jaxops.device import device_kind

# form: for most channels. local: in its place for "local".
# half: forward, input gradient and kernel gradient of half precision.
# few: up to this many output channels take "outshift" (an input gradient puts the input
#   channels out); up to this many input channels take few_inputs.
# kernel_gradient, side_by_side: see jaxops.conv3d_forms.Forms.
TABLE: dict[str, dict[str, Any]] = {
    "cpu": {
        "form": "winograd",
        "local": "concat",
        "half": ("concat", "concat", "products"),
        "few": 4,
        "few_inputs": "winograd",
        "kernel_gradient": "winograd",
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
        "form": "winograd",
        "local": "concat",
        "half": ("outshift", "concat", "joined"),
        "few": 4,
        "few_inputs": "concat",
        "kernel_gradient": "winograd",
        "side_by_side": False,
        "source": (
            "measured with jax 0.11.2 on an H200, 3x3x3: winograd took 0.65 of the "
            "time of concat in float32, 32 to 32 channels, forward and backward; from "
            "one channel concat half of winograd's; in bfloat16 the three forms of "
            "half 0.92 of outshift and 0.89 of concat throughout"
        ),
    },
    "metal": {
        "form": "concat",
        "local": "concat",
        "half": ("concat", "concat", "products"),
        "few": 4,
        "few_inputs": "concat",
        "kernel_gradient": "products",
        "side_by_side": False,
        "source": (
            "not measured: one 2D convolution of many channels is what Apple's plugins "
            "do fast, and gradients of kernels have no fast path as convolutions there"
        ),
    },
}


def chosen_forms(form: str, inputs: int, outputs: int, dtype: Any) -> Forms:
    """The forms for these channels; a form by its name is for both directions."""
    row = TABLE[device_kind()]
    few, half = row["few"], jnp.finfo(dtype).bits < 32
    kernel_gradient = row["half"][2] if half else row["kernel_gradient"]
    if kernel_gradient == "joined" and inputs <= few:
        kernel_gradient = "convolution"  # joins the few channels, not the many
    both = (form, form)
    if form in ("auto", "local"):
        if half:
            usual = row["half"][:2]
        else:
            usual = (row["form"] if form == "auto" else row["local"],) * 2
        from_few = row["few_inputs"] if "winograd" in usual else "concat"
        both = [
            "outshift" if out <= few else from_few if entering <= few else name
            for name, entering, out in zip(
                usual, (inputs, outputs), (outputs, inputs), strict=True
            )
        ]
    return Forms(*both, kernel_gradient, row["side_by_side"])
