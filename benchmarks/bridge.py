"""What the bridge to the CPU costs an FNO, next to contractions on the device itself.

    python benchmarks/bridge.py [--backend metal] [--grid 64] [--json FILE]

Two ways to run the Fourier layers of one small network, with the same weights:

* contractions: `jaxops.spectral_conv`, the whole network in one jitted function;
* bridge: an FFT and its inverse on the CPU over `jaxops.bridge.on_cpu`, twice a layer,
  between jitted parts, with the product of the kept modes on the device.

Forward pass, and loss with all gradients. Each repeat runs both, in one order and the
next time in the other; given are medians and the median of the ratios, and what the
bridge itself counted a call. On a CPU the bridge has nothing to move, and shows what
leaving the compiled program costs alone.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jaxops  # noqa: E402
from jaxops.bridge import Cost, on_cpu  # noqa: E402
from jaxops.pointwise import dense, gelu  # noqa: E402
from jaxops.spectral import multiply  # noqa: E402


def fft_of_kept(x, *, modes: int):
    """(batch, x, y, c) to (batch, 2, modes, modes // 2 + 1, c), real part first."""
    spectrum = jnp.fft.rfft2(x, axes=(1, 2), norm="forward")
    spectrum = jnp.fft.fftshift(spectrum, axes=1)
    start = x.shape[1] // 2 - modes // 2
    kept = spectrum[:, start : start + modes, : modes // 2 + 1]
    return jnp.stack([kept.real, kept.imag], axis=1)


def inverse_of_kept(z, *, grid: tuple[int, int]):
    """Back to the field on the grid."""
    kept = z[:, 0] + 1j * z[:, 1]
    batch, modes, half, channels = kept.shape
    start = grid[0] // 2 - modes // 2
    shape = (batch, grid[0], grid[1] // 2 + 1, channels)
    spectrum = jnp.zeros(shape, kept.dtype)
    spectrum = spectrum.at[:, start : start + modes, :half].set(kept)
    spectrum = jnp.fft.ifftshift(spectrum, axes=1)
    return jnp.fft.irfft2(spectrum, grid, axes=(1, 2), norm="forward")


def make_weights(channels: int, modes: int, layers: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)

    def normal(*shape):
        return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    return [
        {
            "spectral": normal(2, modes, modes // 2 + 1, channels, channels),
            "skip": normal(channels, channels),
        }
        for _ in range(layers)
    ]


def by_contractions(weights, x, modes: int):
    for layer in weights:
        y = jaxops.spectral_conv(x, layer["spectral"], (modes, modes))
        x = gelu(y + dense(x, layer["skip"]))
    return x


def by_bridge(weights, x, modes: int, there: Callable, back: Callable):
    for layer in weights:
        z = there(x, modes=modes)
        z = _multiply(z, layer["spectral"])
        x = _join(back(z, grid=x.shape[1:3]), x, layer["skip"])
    return x


_multiply = jax.jit(multiply)
_join = jax.jit(lambda y, x, kernel: gelu(y + dense(x, kernel)))


def loss_of(network: Callable) -> Callable:
    return jax.value_and_grad(lambda weights, x: jnp.mean(network(weights, x) ** 2))


def measure(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compile
        jax.block_until_ready(call())
    for repeat in range(repeats):
        order = list(calls) if repeat % 2 == 0 else list(reversed(calls))
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def compare(found: Any, expected: Any) -> float:
    """The largest difference of any array, relative to its largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    errors = (
        np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
        for a, b in pairs
    )
    return float(max(errors))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    there, back = on_cpu(fft_of_kept), on_cpu(inverse_of_kept)
    weights = jax.device_put(
        make_weights(options.channels, options.modes, options.layers)
    )
    shape = (options.batch, options.grid, options.grid, options.channels)
    x = jax.device_put(np.random.default_rng(1).standard_normal(shape, np.float32))
    contractions = functools.partial(by_contractions, modes=options.modes)
    bridge = functools.partial(by_bridge, modes=options.modes, there=there, back=back)
    ways = {
        "forward": (jax.jit(contractions), bridge),
        "forward+backward": (jax.jit(loss_of(contractions)), loss_of(bridge)),
    }
    rows = []
    for name, (ours, theirs) in ways.items():
        difference = compare(theirs(weights, x), ours(weights, x))
        if difference > 1e-4:
            raise RuntimeError(f"the two ways differ by {difference:.1e} in {name}")
        there.cost, back.cost = Cost(), Cost()
        times = measure(
            {
                "contractions": functools.partial(ours, weights, x),
                "bridge": functools.partial(theirs, weights, x),
            },
            options.repeats,
        )
        pairs = zip(times["bridge"], times["contractions"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        runs = options.repeats + 1
        costs = (there.cost, back.cost)
        row = {
            "pass": name,
            "contractions_ms": statistics.median(times["contractions"]),
            "bridge_ms": statistics.median(times["bridge"]),
            "ratio": ratio,
            "difference": difference,
            "calls_a_run": sum(cost.calls for cost in costs) / runs,
            "mib_a_run": sum(cost.bytes for cost in costs) / runs / 2**20,
            "crossing_ms_a_run": sum(cost.seconds for cost in costs) / runs * 1e3,
            "moving_ms_a_run": sum(cost.moving_seconds for cost in costs) / runs * 1e3,
            "ms": times,
        }
        rows.append(row)
        print(
            f"{name:18}{row['contractions_ms']:12.2f} ms{row['bridge_ms']:12.2f} ms"
            f"{ratio:8.2f}{difference:10.1e}   {row['calls_a_run']:.0f} calls, "
            f"{row['mib_a_run']:.1f} MiB, {row['crossing_ms_a_run']:.2f} ms, of which "
            f"{row['moving_ms_a_run']:.2f} to move",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=jaxops.backend.NAMES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--grid", type=int, default=64)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--modes", type=int, default=16, help="even")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    backend = jaxops.select_backend(options.backend)
    print(backend)
    print(f"{'':18}{'contractions':>15}{'bridge':>15}{'ratio':>8}{'differs':>10}")
    rows = run(options)
    if options.json:
        sizes = {
            name: getattr(options, name)
            for name in ("batch", "grid", "channels", "modes", "layers", "repeats")
        }
        record = {
            "date": date.today().isoformat(),
            "backend": str(backend),
            "sizes": sizes,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
