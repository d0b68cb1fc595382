"""Floors: counted work over the rates that this machine reaches.

    python benchmarks/floors.py [--backend gpu] [--json FILE]

Rates: a square matrix product, and a copy (bytes read and bytes written) of arrays of
several sizes; the best of several calls each, on a GPU of twenty in a row. Counts: of
a spectral convolution, of an FNO's forward pass and training step, and of a 3D
convolution:

* FLOPs of the products: Fourier transforms are products with truncated matrices, a
  convolution is the direct one, so that an FFT or a Winograd form may come below its
  floor. Beside them arithmetic on elements, polynomials of activations included, and
  twice as much again in a backward pass, where each product is two, but for the first
  layer, whose input needs no gradient.
* bytes that have to move where nothing stays in a cache from one block to the next:
  each block's input and output once, weights once; for a step also its input again, two
  gradients, the weights' own, and what AdamW reads and writes.

floor = the larger of FLOPs and bytes, each over its rate. Its ratio to
ours is the part of our time that it would take; nothing says that it can be reached.
"""

import functools
import math
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import add_row, begin, parser, write  # noqa: E402
from jaxops.dft import kept_wavenumbers  # noqa: E402
from models import FNO  # noqa: E402

PRECISIONS = {  # dtype, and the precision of products
    "float32": (jnp.float32, "highest"),
    "tf32": (jnp.float32, "tensorfloat32"),
    "bfloat16": (jnp.bfloat16, "default"),
}
COPIED = (2**22, 2**25, 2**28)  # bytes
GELU_FLOP, SLOPE_FLOP = 28, 34  # a value: jaxops.pointwise.gelu, and its derivative
ADAMW_FLOP = 14  # a weight: two averages, their corrections, a root, decay and step
ADAMW_ARRAYS = 7  # reads weight, gradient and two averages, writes all but the gradient


@dataclass(frozen=True)
class Count:
    """FLOPs and bytes."""

    flop: float = 0
    bytes: float = 0

    def __add__(self, other: "Count") -> "Count":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Count(*(one + another for one, another in pairs))

    def __mul__(self, times: float) -> "Count":
        return Count(*(times * one for one in astuple(self)))


def transform(grid, modes, batch: int, channels: int) -> Count:
    """FLOPs of a truncated DFT of real fields, or of its inverse; no bytes.

    As jaxops.dft does it: real waves an axis, then the signs of all axes but the last.
    """
    kept = [len(k) for k in kept_wavenumbers(modes, grid)]
    waves = [2 * (n // 2 + 1) for n in kept[:-1]] + [2 * kept[-1]]
    fields, flop = batch * channels, 0
    for axis, (size, count) in enumerate(zip(grid, waves, strict=True)):
        columns = fields * math.prod(waves[:axis]) * math.prod(grid[axis + 1 :])
        flop += 2 * count * size * columns
    for axis in range(len(grid) - 1):
        columns = fields * math.prod(waves[:axis]) * math.prod(kept[axis + 1 :])
        flop += 2 * (2 * kept[axis]) * (2 * waves[axis]) * columns
    return Count(flop)


def spectral_conv(
    grid, modes, batch: int, inputs: int, outputs: int, itemsize=4, backward=False
) -> Count:
    """A spectral convolution; ``backward``: also its gradients by input and weight."""
    kept = math.prod(len(k) for k in kept_wavenumbers(modes, grid))
    points, weights = batch * math.prod(grid), 2 * kept * inputs * outputs
    products = (
        transform(grid, modes, batch, inputs)
        + Count(8 * batch * kept * inputs * outputs)
        + transform(grid, modes, batch, outputs)
    )
    if backward:  # a transform's matrix is constant: its gradient is one product
        products = products * 2 + Count(8 * batch * kept * inputs * outputs)
    fields = points * (inputs + outputs) * (2 if backward else 1)
    fields += points * inputs if backward else 0
    moved = fields + weights * (3 if backward else 1)
    return products + Count(bytes=itemsize * moved)


def conv3d(
    grid, taps, batch: int, inputs: int, outputs: int, itemsize=4, backward=False
) -> Count:
    """A 3D convolution, zeros beyond the borders counted in; as above."""
    points, weights = batch * math.prod(grid), math.prod(taps) * inputs * outputs
    moved = points * (inputs + outputs) + weights
    if backward:
        moved += points * (2 * inputs + outputs) + 2 * weights
    products = 2 * points * weights * (3 if backward else 1)
    return Count(products, bytes=itemsize * moved)


def _layer(points: int, inputs: int, outputs: int, backward, first=False) -> Count:
    """A 1x1 convolution; no bytes."""
    return Count(2 * points * inputs * outputs * (3 - first if backward else 1))


def fno(model: FNO, grid, batch: int, itemsize: int = 4, step: bool = False) -> Count:
    """A forward pass, or a step with AdamW, of an FNO with neuraloperator's default
    blocks: a linear and a soft-gating skip, a channel MLP, no norm, no padding."""
    width, layers = model.hidden_channels, model.n_layers
    points = batch * math.prod(grid)
    lifted = int(model.lifting_channel_ratio * width)
    projected = int(model.projection_channel_ratio * width)
    inner = round(width * model.channel_mlp_expansion)
    inputs = model.in_channels
    joined = inputs + (len(grid) if model.positional_embedding else 0)
    kept = math.prod(len(k) for k in kept_wavenumbers(model.n_modes, grid))

    weighted = Count(8 * batch * kept * width**2 * (3 if step else 1))
    there = transform(grid, model.n_modes, batch, width) * (2 if step else 1)
    block = _layer(points, width, width, step) + _layer(points, width, inner, step)
    products = (block + there) * (layers - 1)
    # The last one applies the MLP's first kernel to the weights of the linear skip, and
    # to the coefficients, so that its transform back has fewer channels.
    products += transform(grid, model.n_modes, batch, inner) * (2 if step else 1)
    products += _layer(points, width, inner, step)
    products += _layer(2 * batch * kept, width, inner, step)
    products += (there + weighted + _layer(points, inner, width, step)) * layers
    products += _layer(points, joined, lifted, step, first=True)
    products += _layer(points, lifted, width, step)
    products += _layer(points, width, projected, step)
    products += _layer(points, projected, model.out_channels, step)

    acts = points * (lifted + projected + layers * inner + (2 * layers - 2) * width)
    # Biases, the sum with the linear skip, the gated skip and its sum.
    sums = layers * (5 * width + inner) - 2 * (width - inner)
    sums += lifted + projected  # the bias in between is that of one coefficient
    elements = points * (sums + model.out_channels)
    weights = layers * (2 * kept * width**2 + width**2 + 2 * width * inner)
    weights += layers * (3 * width + inner)  # biases, gates
    weights += (joined + 1) * lifted + (lifted + 1) * width
    weights += (width + 1) * projected + (projected + 1) * model.out_channels

    fields = points * (inputs + 2 * width * (layers + 1) + model.out_channels)
    if not step:
        flop = elements + GELU_FLOP * acts
        return products + Count(flop, itemsize * fields + 4 * weights)
    # Each block reads its input again and the gradient of its output, and writes that
    # of its input; the lifting writes none, the projection reads target and output.
    fields += points * (3 * width * layers + inputs + width)
    fields += points * (2 * width + 2 * model.out_channels)
    moved = itemsize * fields + 4 * weights * (3 + ADAMW_ARRAYS)
    flop = 3 * elements + (GELU_FLOP + SLOPE_FLOP) * acts + ADAMW_FLOP * weights
    return products + Count(flop, moved)


def measure_rates(precision: str = "float32") -> dict[str, Any]:
    """What this machine does a second: ``flop``, and ``copy``, bytes by the size of the
    array that is copied."""
    dtype, products = PRECISIONS[precision]
    on_cpu = jax.default_backend() == "cpu"
    n = 2048 if on_cpu else 8192
    keys = jax.random.split(jax.random.key(0), 2)
    left, right = (jax.random.normal(key, (n, n), dtype) for key in keys)
    product = jax.jit(functools.partial(jnp.matmul, precision=products))
    copies = {}
    for size in COPIED:
        array = jnp.ones(size // jnp.dtype(dtype).itemsize, dtype)
        copies[size] = 2 * size / _best_seconds(jax.jit(jnp.negative), array)
    return {
        "flop": 2 * n**3 / _best_seconds(product, left, right),
        "copy": copies,
    }


def _best_seconds(function, *arguments, repeats: int = 7) -> float:
    in_a_row = 1 if jax.default_backend() == "cpu" else 20
    jax.block_until_ready(function(*arguments))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(in_a_row):
            found = function(*arguments)
        jax.block_until_ready(found)
        best = min(best, (time.perf_counter() - start) / in_a_row)
    return best


def floor(count: Count, rates: dict[str, Any], field_bytes: float) -> dict[str, Any]:
    """The floor as one of a row's results, and which of the two it is.

    ``field_bytes`` is the size of the largest field that a block reads: a rate is taken
    from copies of at least that size, since smaller ones may stay in a cache.
    """
    copy = max(
        rate
        for size, rate in rates["copy"].items()
        if size >= min(field_bytes, max(rates["copy"]))
    )
    parts = {
        "FLOPs": count.flop / rates["flop"],
        "bytes": count.bytes / copy,
    }
    bound = max(parts, key=parts.get)
    parts_ms = {key: 1e3 * seconds for key, seconds in parts.items()}
    return {"median_ms": parts_ms[bound], "bound": bound, "parts_ms": parts_ms}


def beside(results: dict[str, Any], found: dict[str, Any], ours: str) -> None:
    """Put a floor into a row's results, with its ratio to ours."""
    ratio = found["median_ms"] / results[ours]["median_ms"]
    results["floor"] = {**found, "ratio": ratio}


def main() -> None:
    from benchmarks.conv3d import SHAPES
    from benchmarks.fno import CASES, make_model

    made = parser(__doc__, repeats=None)
    made.add_argument("--precision", choices=PRECISIONS, action="append")
    options = made.parse_args()
    record = begin(options)
    on_cpu = record["platform"] == "cpu"
    precisions = options.precision or (["float32"] if on_cpu else list(PRECISIONS))
    for precision in precisions:
        rates = measure_rates(precision)
        results = {"matrix product": {"rate": rates["flop"] / 1e9, "unit": "GFLOP/s"}}
        for size, rate in rates["copy"].items():
            name = f"copy of {size >> 20} MiB"
            results[name] = {"rate": rate / 1e9, "unit": "GB/s"}
        add_row(record, "rates", precision, results)
        item = jnp.dtype(PRECISIONS[precision][0]).itemsize
        print(f"\n{'':34}{'GFLOP':>9}{'MB':>9}{'floor ms':>10}")
        counts = {}
        for key, case in CASES.items():
            batch = case.batch if on_cpu else case.gpu_batch
            points = batch * math.prod(case.grid)
            shape = (case.grid, case.modes, batch, case.hidden, case.hidden, item)
            field = points * case.hidden * item
            for backward in (False, True):
                name = "forward+backward" if backward else "forward"
                found = spectral_conv(*shape, backward=backward)
                counts[f"spectral {key}", name] = found, field
            for step in (False, True):
                name = "train step" if step else "forward"
                found = fno(make_model(case), case.grid, batch, item, step)
                counts[f"fno {key}", name] = found, field
        for key, (inputs, outputs, taps, grid, batch) in SHAPES.items():
            field = batch * math.prod(grid) * max(inputs, outputs) * item
            for backward in (False, True):
                name = "forward+backward" if backward else "forward"
                shape = (grid, taps, batch, inputs, outputs, item)
                counts[f"conv3d {key}", name] = conv3d(*shape, backward), field
        for (case, name), (count, field) in counts.items():
            found = floor(count, rates, field)
            print(
                f"{case + ', ' + name:34}{count.flop / 1e9:9.2f}"
                f"{count.bytes / 1e6:9.1f}"
                f"{found['median_ms']:10.3f} {found['bound']}"
            )
            row = {"case": case, "pass": name, "precision": precision}
            record["rows"].append({**row, "results": {"floor": found}})
    write(record, options.json)


if __name__ == "__main__":
    main()
