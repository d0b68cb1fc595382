"""Cases that hold 3D convolution and its relatives to PyTorch, and PyTorch's side.

``reference(case)`` needs torch. ``make_golden_conv3d.py`` stores what it returns, for
the lanes without torch. Arrays that go in are made anew from the name of the case.
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "conv3d.npz"


@dataclass(frozen=True)
class Case:
    """One call of ``op``, a function of ``jaxops.conv3d``; ``taps`` are its window."""

    name: str
    op: str
    sizes: tuple[int, int, int]
    taps: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    channels: tuple[int, int] = (2, 3)
    batch: int = 1

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """Ours: (kd, kh, kw, in, out), one of them for a group."""
        inputs, outputs = self.channels
        groups = self.options.get("groups", 1)
        if self.op == "conv_transpose3d":
            return (*self.taps, inputs, outputs // groups)
        return (*self.taps, inputs // groups, outputs)


def _cases() -> list[Case]:
    def conv(name, sizes, taps, channels=(2, 3), batch=1, **options):
        taps = (taps,) * 3 if isinstance(taps, int) else taps
        return Case(name, "conv3d", sizes, taps, options, channels, batch)

    def transpose(name, sizes, taps, channels=(3, 2), batch=1, **options):
        taps = (taps,) * 3 if isinstance(taps, int) else taps
        name = f"transpose_{name}"
        return Case(name, "conv_transpose3d", sizes, taps, options, channels, batch)

    def pool(op, name, sizes, taps, **options):
        taps = (taps,) * 3 if isinstance(taps, int) else taps
        return Case(f"{op}_{name}", f"{op}_pool3d", sizes, taps, options)

    reflect = {"padding_mode": "reflect"}
    replicate = {"padding_mode": "replicate"}
    circular = {"padding_mode": "circular"}
    return [
        # Kernels of all sizes; odd, even and single slices, rows, columns.
        conv("taps_1", (3, 4, 5), 1, batch=2),
        conv("taps_2", (6, 5, 4), 2, batch=2),
        conv("taps_3", (6, 4, 5), 3, batch=2),
        conv("taps_5", (4, 5, 6), 5),
        conv("taps_3_1_5", (5, 3, 6), (3, 1, 5)),
        conv("taps_5_2_3", (6, 5, 4), (5, 2, 3), padding="VALID"),
        conv("plane_only", (4, 5, 4), (1, 3, 3), batch=2),
        conv("depth_only", (5, 3, 4), (3, 1, 1), batch=2),
        conv("width_only", (2, 3, 6), (1, 1, 3)),
        conv("one_slice", (1, 4, 5), 3),
        conv("one_slice_valid", (1, 5, 4), (1, 2, 3), padding="VALID"),
        conv("one_point", (1, 1, 1), 3, batch=2),
        conv("one_row", (4, 1, 5), (2, 5, 3)),
        # Deep enough for several slices at a time, and not a multiple of them.
        conv("deep_2", (13, 2, 3), (2, 2, 2)),
        conv("deep_3", (11, 4, 3), 3, batch=2),
        conv("deep_4", (10, 3, 2), (4, 2, 1)),
        conv("deep_5", (9, 3, 3), (5, 3, 2)),
        conv("deep_depth_only", (9, 2, 3), (3, 1, 1)),
        # Strides, also larger than the kernel.
        conv("stride_2", (6, 5, 7), 3, batch=2, strides=2),
        conv("stride_3", (7, 8, 6), 3, strides=3, padding=1),
        conv("stride_2_taps_2", (6, 4, 5), 2, strides=2, padding="VALID"),
        conv("stride_3_taps_2", (8, 7, 6), 2, strides=3, padding=1),
        conv("stride_2_taps_1", (5, 4, 3), 1, strides=2),
        conv("stride_3_taps_5", (7, 6, 8), 5, strides=3, padding=2),
        conv("strides_2_1_3", (5, 4, 7), 3, strides=(2, 1, 3)),
        conv("strides_1_2_2", (9, 4, 5), 3, strides=(1, 2, 2)),
        conv("strides_3_1_1", (8, 3, 4), (5, 3, 2), strides=(3, 1, 1), padding=1),
        # Dilation.
        conv("dilation_2", (6, 5, 7), 3, batch=2, dilation=2),
        conv("dilation_2_taps_2", (4, 5, 6), 2, dilation=2, padding=1),
        conv("dilation_2_taps_5", (9, 9, 10), 5, dilation=2, padding="VALID"),
        conv("dilation_1_2_2", (9, 5, 4), 3, dilation=(1, 2, 2)),
        conv("dilation_2_stride_2", (6, 7, 5), 3, dilation=2, strides=2, padding=2),
        conv("dilation_2_stride_3", (8, 6, 7), 3, dilation=2, strides=3, padding=1),
        conv("dilation_2_stride_2_taps_2", (5, 6, 4), 2, dilation=2, strides=2),
        # Padding of all kinds.
        conv("valid", (4, 5, 6), (2, 3, 4), padding="VALID"),
        conv("padding_a_axis", (4, 3, 5), (2, 3, 5), padding=(0, 1, 3)),
        conv("padding_pairs", (5, 4, 3), 3, padding=((0, 2), (1, 0), (3, 1))),
        conv("padding_beyond_the_kernel", (3, 2, 3), (1, 2, 2), padding=2, strides=2),
        conv("reflect", (5, 4, 6), 3, batch=2, **reflect),
        conv("reflect_taps_2", (4, 5, 3), (2, 2, 4), **reflect),
        conv("reflect_all", (3, 4, 3), 5, padding=(2, 3, 2), **reflect),
        conv("replicate_one_slice", (1, 4, 3), 3, **replicate),
        conv("replicate_far", (2, 3, 2), (3, 2, 1), padding=(3, 2, 4), **replicate),
        conv("circular", (5, 4, 3), 3, batch=2, **circular),
        conv("circular_all", (2, 3, 4), (5, 3, 2), padding=(2, 3, 1), **circular),
        conv("circular_stride_2", (6, 5, 4), 3, strides=2, dilation=2, **circular),
        # Channels.
        conv("groups_2", (5, 4, 3), 3, (4, 6), groups=2),
        conv("groups_3_stride_2", (4, 5, 4), (3, 2, 3), (3, 6), groups=3, strides=2),
        conv("groups_2_dilation", (6, 3, 5), 2, (4, 2), 2, groups=2, dilation=2),
        conv("depthwise", (5, 4, 3), 3, (3, 3), 2, groups=3),
        conv("depthwise_twice", (4, 5, 5), 2, (2, 4), groups=2, strides=(2, 1, 2)),
        conv("from_one_channel", (8, 4, 5), 3, (1, 5)),
        conv("to_one_channel", (8, 4, 5), 3, (5, 1)),
        conv("six_channels", (9, 3, 4), 3, (6, 6)),
        # The transposed convolution.
        transpose("taps_2_stride_2", (3, 4, 2), 2, batch=2, strides=2),
        transpose("taps_3_stride_1", (3, 4, 5), 3, padding=1),
        transpose("doubling", (3, 2, 4), 3, strides=2, padding=1, output_padding=1),
        transpose("taps_4_stride_2", (3, 3, 2), 4, strides=2, padding=1),
        transpose("gaps", (2, 3, 3), 2, strides=3, padding=1),
        transpose("mixed", (3, 4, 3), (1, 5, 3), strides=(1, 2, 3), padding=(0, 2, 1)),
        transpose("dilation", (4, 3, 3), 3, strides=2, dilation=2, padding=2),
        transpose("dilation_stride_3", (2, 3, 3), 2, strides=3, dilation=2),
        transpose("dilation_alone", (3, 3, 2), 2, dilation=2, output_padding=1),
        transpose("groups", (3, 2, 3), 3, (4, 4), groups=2, strides=2, padding=1),
        transpose("taps_1", (2, 3, 2), 1, strides=2, output_padding=(1, 0, 1)),
        transpose("one_slice", (1, 3, 4), (4, 2, 3), strides=(4, 1, 1)),
        transpose("deep", (9, 2, 3), 3, padding=(2, 1, 1)),
        # Pooling.
        pool("average", "halves", (4, 6, 5), 2),
        pool("average", "padded", (5, 4, 7), 3, strides=2, padding=1),
        pool(
            "average",
            "uncounted",
            (5, 4, 7),
            3,
            strides=2,
            padding=1,
            count_include_pad=False,
        ),
        pool("average", "mixed", (5, 4, 7), (1, 2, 3), strides=(2, 1, 2)),
        pool("average", "same", (4, 5, 3), 3, strides=1, padding=1),
        pool("max", "halves", (4, 6, 5), 2),
        pool("max", "plane", (3, 4, 5), (1, 2, 2)),
        pool("max", "overlapping", (5, 4, 7), 3, strides=2, padding=1),
        pool("max", "gaps", (7, 6, 8), 2, strides=3),
        pool("max", "dilation", (6, 5, 7), (2, 3, 2), strides=1, dilation=2),
        pool("max", "ties", (4, 6, 4), (2, 3, 2), strides=(1, 2, 2), padding=(1, 1, 0)),
    ]


CASES = {case.name: case for case in _cases()}


def arrays(case: Case) -> list[np.ndarray]:
    """The input, and the kernel where the op has one, float32."""
    rng = np.random.default_rng(sum(case.name.encode()))
    x = rng.standard_normal((case.batch, *case.sizes, case.channels[0]))
    if case.name.endswith("ties"):
        x = np.round(x)
    if "pool" in case.op:
        return [x.astype(np.float32)]
    kernel = rng.standard_normal(case.kernel_shape)
    return [x.astype(np.float32), kernel.astype(np.float32)]


def cotangent(case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """What the gradients of the output are weighted with."""
    rng = np.random.default_rng(sum(case.name.encode()) + 1)
    return rng.standard_normal(shape).astype(np.float32)


def reference(case: Case) -> list[np.ndarray]:
    """PyTorch's output and its gradients by input and kernel, computed in float64."""
    import torch

    inputs = arrays(case)
    first = np.moveaxis(inputs[0], -1, 1)
    tensors = [torch.from_numpy(first.astype(np.float64)).requires_grad_()]
    if len(inputs) == 2:
        kernel = np.moveaxis(inputs[1], (3, 4), (1, 0))
        if case.op == "conv_transpose3d":
            kernel = np.swapaxes(kernel, 0, 1)
        tensors.append(torch.from_numpy(kernel.astype(np.float64)).requires_grad_())
    output = _torch_op(case, *tensors)
    weights = cotangent(case, (*output.shape[:1], *output.shape[2:], output.shape[1]))
    weights = torch.from_numpy(np.moveaxis(weights, -1, 1).astype(np.float64))
    (output * weights).sum().backward()
    found = [np.moveaxis(output.detach().numpy(), 1, -1)]
    found.append(np.moveaxis(tensors[0].grad.numpy(), 1, -1))
    if len(tensors) == 2:
        gradient = tensors[1].grad.numpy()
        if case.op == "conv_transpose3d":
            gradient = np.swapaxes(gradient, 0, 1)
        found.append(np.moveaxis(gradient, (0, 1), (4, 3)))
    return [np.ascontiguousarray(array, np.float32) for array in found]


def _torch_op(case: Case, x, kernel=None):
    from torch.nn import functional

    options = dict(case.options)
    if case.op == "conv_transpose3d":
        options["stride"] = options.pop("strides", 1)
        return functional.conv_transpose3d(x, kernel, **options)
    if case.op != "conv3d":
        options["stride"] = options.pop("strides", None)
        op = "avg_pool3d" if case.op == "average_pool3d" else "max_pool3d"
        return getattr(functional, op)(x, case.taps, **options)
    options["stride"] = strides = options.pop("strides", 1)
    mode = options.pop("padding_mode", "zeros")
    padding = options.pop("padding", "SAME")
    if padding == "VALID":
        padding = 0
    if padding == "SAME" and strides == 1 and mode == "zeros":
        padding = "same"
    elif padding == "SAME":
        padding = _same(case, strides, options.get("dilation", 1))
    if isinstance(padding, tuple) and (
        mode != "zeros" or isinstance(padding[0], tuple)
    ):
        pairs = [(p, p) if isinstance(p, int) else p for p in padding]
        widths = [p for pair in reversed(pairs) for p in pair]
        x = functional.pad(x, widths, mode="constant" if mode == "zeros" else mode)
        padding = 0
    return functional.conv3d(x, kernel, padding=padding, **options)


def _same(case: Case, strides, dilation) -> tuple[tuple[int, int], ...]:
    """As JAX pads; PyTorch has "same" without strides and for zeros alone."""
    from jax import lax

    strides = (strides,) * 3 if isinstance(strides, int) else strides
    dilation = (dilation,) * 3 if isinstance(dilation, int) else dilation
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, case.taps, strict=True)]
    return tuple(lax.padtype_to_pads(case.sizes, reach, strides, "SAME"))


def pack(results: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """All references as one vector and its index: thousands of small files are slow."""
    shapes = {name: [list(a.shape) for a in found] for name, found in results.items()}
    values = [array.reshape(-1) for found in results.values() for array in found]
    return {"values": np.concatenate(values), "index": np.array(json.dumps(shapes))}


@lru_cache(maxsize=1)
def golden() -> dict[str, list[np.ndarray]]:
    """What ``reference`` gave for each case when the golden file was made."""
    with np.load(GOLDEN, allow_pickle=False) as file:
        values, index = file["values"], json.loads(str(file["index"]))
    results, position = {}, 0
    for name, shapes in index.items():
        results[name] = []
        for shape in shapes:
            count = int(np.prod(shape))
            results[name].append(values[position : position + count].reshape(shape))
            position += count
    return results
