"""Spectral convolutions: ours against FFTs, in XLA and in PyTorch, in one run.

    python benchmarks/spectral.py [--backend gpu] [--cases 2d-64 ..] [--json FILE]

Every contender multiplies the kept Fourier modes of the same field by the same weight:

* ours: ``jaxops.spectral_conv``, truncated transforms as real matrix products;
* XLA FFT: ``jnp.fft.rfftn``, the kept modes, a complex einsum, ``jnp.fft.irfftn``;
* torch FFT: the same in PyTorch, channels first, as it is done there;
* neuraloperator: its ``SpectralConv``, without bias.

Float32; a forward pass, or one with the gradients by field and weight. Each repeat runs
all, in one order and the next time in the other. Given are medians, quartiles, and the
median of the ratios to ours in the same repeat: 2 means that ours takes half the time.
Before that, all are compared: the largest difference to ours, in units of the largest
value. ``floor``: see benchmarks/floors.py. The cases are the layers of
benchmarks/fno.py, one in 1D, and ``2d-64-all``, which keeps all modes: the worst one
for products, where an FFT throws nothing away.
"""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
from benchmarks import floors  # noqa: E402
from benchmarks.fno import CASES as FNO_CASES  # noqa: E402
from benchmarks.fno import CPU_CASES, Case  # noqa: E402
from benchmarks.measuring import (  # noqa: E402
    Call,
    add_row,
    alternate,
    begin,
    parser,
    summary,
    write,
)

CASES = {
    "1d-1024": Case((64,), 64, (1024,), 16, 64),
    "2d-64-all": Case((64, 64), 32, (64, 64), 8, 16),
    **FNO_CASES,
}
PASSES = ("forward", "forward+backward")


def fft_conv(fft, x, weight, axes: tuple[int, ...], modes, einsum: Callable, zeros):
    """The FFT way, for jnp and for torch alike: the modes around zero, by axis, the
    last axis from zero on. ``zeros(shape, like)`` makes the empty spectrum."""
    grid = [x.shape[axis] for axis in axes]
    spectrum = fft.rfftn(x, None, axes)
    if len(axes) > 1:
        spectrum = fft.fftshift(spectrum, axes[:-1])
    window = [slice(None)] * x.ndim
    for axis, size, mode in zip(axes, grid, modes, strict=True):
        window[axis] = slice(size // 2 - mode // 2, size // 2 + (mode + 1) // 2)
    window[axes[-1]] = slice(0, modes[-1] // 2 + 1)
    product = einsum(spectrum[tuple(window)], weight)
    full = zeros(spectrum, tuple(window), product)
    if len(axes) > 1:
        full = fft.ifftshift(full, axes[:-1])
    return fft.irfftn(full, grid, axes)


def jax_calls(case: Case, x, weight, y, name: str) -> dict[str, Call]:
    dims = len(case.grid)
    kept = "uvw"[:dims]

    def by_fft(x, weight):
        def einsum(spectrum, weight):
            return jnp.einsum(f"b{kept}i,{kept}io->b{kept}o", spectrum, weight)

        def zeros(spectrum, window, product):
            shape = (*spectrum.shape[:-1], product.shape[-1])
            return jnp.zeros(shape, product.dtype).at[window].set(product)

        axes = tuple(range(1, dims + 1))
        return fft_conv(jnp.fft, x, weight, axes, case.modes, einsum, zeros)

    contenders = {
        "ours": (lambda x, w: jaxops.spectral_conv(x, w, case.modes), weight),
        "XLA FFT": (by_fft, weight[0] + 1j * weight[1]),
    }
    calls: dict[str, Call] = {}
    for contender, (function, own) in contenders.items():

        def program(x, weight, y, function=function):
            if name == "forward":
                return function(x, weight)
            output, pull = jax.vjp(function, x, weight)
            return output, *pull(y)

        arguments = jax.tree.map(jnp.asarray, (x, own, y))
        try:
            compiled = jax.jit(program).lower(*arguments).compile()
        except Exception as error:  # a backend without FFTs says so in its own way
            if contender == "ours":
                raise
            print(f"{contender} is left out: {error}", file=sys.stderr)
            continue
        calls[contender] = (
            functools.partial(compiled, *arguments),
            jax.block_until_ready,
        )
    return calls


def torch_calls(case: Case, x, weight, y, name: str) -> dict[str, Call]:
    """PyTorch's, or nothing where it or its device is not there."""
    try:
        import torch
    except ImportError as error:
        print(f"PyTorch is left out: {error}", file=sys.stderr)
        return {}
    platform = jax.default_backend()
    device = {"cpu": "cpu", "gpu": "cuda"}.get(platform, "mps")
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device != "cpu" and not there[device]():
        print(f"PyTorch is left out: it has no {device} here", file=sys.stderr)
        return {}

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    dims = len(case.grid)
    kept = "uvw"[:dims]
    x, y = (tensor(np.moveaxis(array, -1, 1)) for array in (x, y))
    weight = tensor(np.moveaxis(weight[0] + 1j * weight[1], (-2, -1), (0, 1)))

    def by_fft(x, weight):
        def einsum(spectrum, weight):
            return torch.einsum(f"bi{kept},io{kept}->bo{kept}", spectrum, weight)

        def zeros(spectrum, window, product):
            shape = (spectrum.shape[0], product.shape[1], *spectrum.shape[2:])
            full = torch.zeros(shape, dtype=product.dtype, device=device)
            full[window] = product
            return full

        axes = tuple(range(2, dims + 2))
        return fft_conv(torch.fft, x, weight, axes, case.modes, einsum, zeros)

    contenders = {"torch FFT": (by_fft, weight.clone())}
    try:
        from neuralop.layers.spectral_convolution import SpectralConv
    except ImportError as error:
        print(f"neuraloperator is left out: {error}", file=sys.stderr)
    else:
        layer = SpectralConv(case.hidden, case.hidden, case.modes, bias=False)
        layer.to(device)
        own = next(layer.parameters())
        with torch.no_grad():
            own.copy_(weight)
        contenders["neuraloperator"] = (lambda x, _: layer(x)), own

    def wait(_):
        if device != "cpu":
            getattr(torch, device).synchronize()

    calls = {}
    for contender, (function, own) in contenders.items():
        leaves = (x.clone(), own)

        def run(function=function, leaves=leaves):
            if name == "forward":
                with torch.no_grad():
                    return function(*leaves)
            for leaf in leaves:
                leaf.requires_grad_()
            output = function(*leaves)
            return output, *torch.autograd.grad(output, leaves, y)

        calls[contender] = run, wait
    return calls


def difference(found: Any, expected: Any) -> float:
    """The largest of output and gradients, in units of the largest value of each."""
    worst = 0.0
    found, expected = (f if isinstance(f, tuple) else (f,) for f in (found, expected))
    for index, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
        ours = np.asarray(ours)
        is_torch = not isinstance(theirs, jax.Array)
        theirs = np.asarray(theirs.detach().cpu() if is_torch else theirs)
        if index < 2:
            theirs = np.moveaxis(theirs, 1, -1) if is_torch else theirs
        else:  # the weight's; JAX gives the conjugate of PyTorch's
            theirs = np.moveaxis(theirs, (0, 1), (-2, -1)) if is_torch else theirs
            if np.iscomplexobj(theirs):
                sign = 1 if is_torch else -1
                theirs = np.stack([theirs.real, sign * theirs.imag])
        worst = max(worst, float(np.abs(theirs - ours).max() / np.abs(ours).max()))
    return worst


def measure(record, rates, key: str, name: str, options) -> None:
    """One row: all contenders in one case and pass."""
    case, on_cpu = CASES[key], jax.default_backend() == "cpu"
    batch = case.batch if on_cpu else case.gpu_batch
    rng = np.random.default_rng(0)
    rows = (*case.modes[:-1], case.modes[-1] // 2 + 1)
    x, y = (
        rng.standard_normal((batch, *case.grid, case.hidden), dtype=np.float32)
        for _ in range(2)
    )
    weight = rng.standard_normal(
        (2, *rows, case.hidden, case.hidden), dtype=np.float32
    ) / math.sqrt(case.hidden)
    calls = jax_calls(case, x, weight, y, name)
    calls |= torch_calls(case, x, weight, y, name)
    expected = calls["ours"][0]()
    errors = {key: difference(run(), expected) for key, (run, _) in calls.items()}
    times = alternate(calls, options.repeats, 1 if on_cpu else 20)
    results = summary(times, "ours")
    for contender, error in errors.items():
        results[contender]["difference"] = error
    shape = (case.grid, case.modes, batch, case.hidden, case.hidden)
    count = floors.spectral_conv(*shape, backward=name != "forward")
    floors.beside(results, floors.floor(count, rates, x.nbytes), "ours")
    sizes = case._replace(batch=batch)._asdict()
    del sizes["gpu_batch"]
    add_row(record, key, name, results, sizes=sizes)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    made.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    options = made.parse_args()
    record = begin(options, "torch", "neuraloperator")
    on_gpu = record["platform"] == "gpu"
    default = CASES if on_gpu else ("1d-1024", "2d-64-all", *CPU_CASES)
    rates = floors.measure_rates()
    for key in options.cases or default:
        for name in options.passes:
            measure(record, rates, key, name, options)
            jax.clear_caches()
    write(record, options.json)


if __name__ == "__main__":
    main()
