"""Small computations that a plugin is known to get wrong without a word.

Each has a reference in numpy that shares no code with JAX. None is known to end the
process, as a 3D convolution does with jax-metal. ``jaxops.doctor`` runs them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops import dft
from jaxops.conv3d import conv3d
from jaxops.transfer import to_device

LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Probe:
    """One fault that a device may have.

    Attributes:
        name: what is computed.
        computed: on the default device; gives an array.
        expected: the same in numpy.
        tolerance: of the largest difference, relative to the largest expected value.
        known: where the fault is known from.
        remedy: what to do where it is there.
    """

    name: str
    computed: Callable[[], jax.Array]
    expected: Callable[[], np.ndarray]
    tolerance: float
    known: str
    remedy: str


@dataclass(frozen=True)
class Outcome:
    """Of a probe: ``error`` is relative; None: nothing came back (see ``said``)."""

    probe: Probe
    error: float | None
    said: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.probe.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"FAILS  {self.probe.name}: {self.said}; {self._advice}"
        line = f"{self.probe.name}: off by {self.error:.1e}"
        return f"ok     {line}" if self.ok else f"WRONG  {line}; {self._advice}"

    @property
    def _advice(self) -> str:
        return f"{self.probe.remedy} ({self.probe.known})"


def run_probe(probe: Probe) -> Outcome:
    """Run it on the default device; what the device raises is told, not raised."""
    expected = np.asarray(probe.expected(), np.float64)
    try:
        found = np.asarray(probe.computed()).astype(np.float64)
    except Exception as error:  # a plugin may raise anything
        lines = str(error).splitlines() or [""]
        return Outcome(probe, None, f"{type(error).__name__}: {lines[0]}")
    if found.shape != expected.shape:
        return Outcome(probe, None, f"shape {found.shape}, not {expected.shape}")
    difference = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
    return Outcome(probe, float(difference) if np.isfinite(difference) else math.inf)


def _random(*shape: int) -> np.ndarray:
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32)


def _beyond_the_end() -> jax.Array:
    take = jax.jit(lambda x, start: lax.dynamic_slice(x, (start,), (2,)))
    return take(to_device(np.arange(1.0, 4.0)), to_device(2, jnp.int32))


def _written_beyond_the_end() -> jax.Array:
    put = jax.jit(lambda x, y, start: lax.dynamic_update_slice(x, y, (start, start)))
    x, y = np.arange(1.0, 7.0).reshape(2, 3), np.arange(7.0, 11.0).reshape(2, 2)
    return put(to_device(x), to_device(y), to_device(1, jnp.int32))


GROUPED = (_random(1, 6, 6, 4), _random(3, 3, 2, 4))  # two groups, stride two


def _grouped(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (2, 2), "VALID", dimension_numbers=LAYOUT, feature_group_count=2
    )


def _grouped_strided() -> jax.Array:
    return jax.jit(lambda *pair: _grouped(*pair))(*to_device(GROUPED))


def _grouped_strided_gradient() -> jax.Array:
    def loss(x, kernel):
        return jnp.sum(_grouped(x, kernel) ** 2) / 2

    return jax.jit(jax.grad(loss))(*to_device(GROUPED))


def _patches(image: np.ndarray) -> list[tuple[slice, slice]]:
    """Where the taps of a 3x3 kernel lie, with stride two and no padding."""
    last = [n - 2 for n in image.shape[1:3]]
    return [
        (slice(i, last[0] + i, 2), slice(j, last[1] + j, 2))
        for i in range(3)
        for j in range(3)
    ]


def _numpy_grouped(gradient: bool = False) -> np.ndarray:
    image, kernel = (array.astype(np.float64) for array in GROUPED)
    taps = kernel.reshape(9, 2, 4)
    places = _patches(image)
    y = np.zeros((1, 2, 2, 4))
    back = np.zeros_like(image)
    for group in range(2):
        inputs, outputs = (slice(2 * group, 2 * group + 2),) * 2
        for (rows, columns), tap in zip(places, taps, strict=True):
            seen = image[:, rows, columns, inputs]
            y[..., outputs] += seen @ tap[:, outputs]
        for (rows, columns), tap in zip(places, taps, strict=True):
            back[:, rows, columns, inputs] += y[..., outputs] @ tap[:, outputs].T
    return back if gradient else y


def _product() -> jax.Array:
    left, right = to_device((_random(64, 512), _random(512, 64)))
    return jax.jit(partial(jnp.matmul, precision="highest"))(left, right)


def _numpy_product() -> np.ndarray:
    return _random(64, 512).astype(np.float64) @ _random(512, 64).astype(np.float64)


def _round_trip() -> jax.Array:
    kept = [tuple(range(-8, 9)), tuple(range(9))]

    def there_and_back(x):
        return dft.inverse(dft.forward(x, kept), kept, (24, 24))

    return jax.jit(there_and_back)(to_device(_random(1, 24, 24, 2)))


def _numpy_round_trip() -> np.ndarray:
    """Onto wavenumbers -8 .. 8 of each axis, by the sum of their cosines."""
    points = np.arange(24)
    angles = 2 * np.pi / 24 * (points[:, None] - points)
    kept = (1 + 2 * sum(np.cos(k * angles) for k in range(1, 9))) / 24
    return np.einsum("xX,yY,bXYc->bxyc", kept, kept, _random(1, 24, 24, 2))


VOLUME = (_random(1, 4, 5, 6, 2), _random(3, 3, 3, 2, 3))


def _volume() -> jax.Array:
    return jax.jit(conv3d)(*to_device(VOLUME))


def _numpy_volume() -> np.ndarray:
    x, kernel = (array.astype(np.float64) for array in VOLUME)
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (1, 1), (0, 0)])
    depth, height, width = x.shape[1:4]
    y = 0
    for i, j, k in np.ndindex(3, 3, 3):
        y = (
            y
            + padded[:, i : i + depth, j : j + height, k : k + width] @ kernel[i, j, k]
        )
    return y


def _gelu_twice() -> jax.Array:
    """Second derivatives, mapped: what a patched gelu refuses."""

    def curvature(x):
        return jax.grad(jax.grad(partial(jax.nn.gelu, approximate=True)))(x)

    return jax.jit(jax.vmap(curvature))(to_device(np.linspace(-2, 2, 9)))


def _numpy_gelu_twice() -> np.ndarray:
    """d^2/dx^2 of x (1 + tanh u) / 2, u = s (x + 0.044715 x^3)."""
    x, s = np.linspace(-2, 2, 9), math.sqrt(2 / math.pi)
    u, du = s * (x + 0.044715 * x**3), s * (1 + 3 * 0.044715 * x**2)
    ddu, t = s * 6 * 0.044715 * x, np.tanh(s * (x + 0.044715 * x**3))
    first, second = (1 - t**2) * du, (1 - t**2) * (ddu - 2 * np.tanh(u) * du**2)
    return first + x * second / 2


def _bits() -> jax.Array:
    def draw(key):
        return jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), (8,))

    return jax.jit(draw)(to_device(np.asarray([3, 5]), jnp.uint32))


def _numpy_bits() -> np.ndarray:
    """Threefry-2x32 in 20 rounds (Salmon et al. 2011) of the counters 0 .. 7."""
    keys = [3, 5, 3 ^ 5 ^ 0x1BD11BDA]
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    mask = 0xFFFFFFFF
    bits = []
    for counter in range(8):
        a, b = keys[0], (counter + keys[1]) & mask
        for block in range(5):
            for rotation in rotations[block % 2]:
                a = (a + b) & mask
                b = ((b << rotation | b >> (32 - rotation)) & mask) ^ a
            a = (a + keys[(block + 1) % 3]) & mask
            b = (b + keys[(block + 2) % 3] + block + 1) & mask
        bits.append(a ^ b)
    return np.asarray(bits, np.float64)


def _turned() -> jax.Array:
    return jax.jit(lambda x: x + 1)(jax.device_put(_random(6, 4)[::-1, ::-1]))


def _swapped() -> jax.Array:
    return to_device(_random(6, 4)[:, ::-1].astype(">f4"))


def _long_sum() -> jax.Array:
    return jax.jit(jnp.sum)(to_device(_random(1 << 18) + 1))


PROBES = (
    Probe(
        "dynamic_slice that starts beyond the end",
        _beyond_the_end,
        lambda: np.array([2.0, 3.0]),
        0.0,
        "jax-ml/jax issue 21393",
        "clip the starts of slices first",
    ),
    Probe(
        "dynamic_update_slice that starts beyond the end",
        _written_beyond_the_end,
        lambda: np.array([[1.0, 7.0, 8.0], [4.0, 9.0, 10.0]]),
        0.0,
        "jax-ml/jax issue 21392",
        "clip the starts of updates first",
    ),
    Probe(
        "product of float32 matrices",
        _product,
        _numpy_product,
        1e-5,  # float32 is off by 1e-6, TF32 by 5e-4
        "MLX on an M5 with macOS 26.2",
        "set MLX_ENABLE_TF32=0 (metaljax: METALJAX_MATMUL_PRECISION=highest) before "
        "Python starts",
    ),
    Probe(
        "truncated Fourier transform and back",
        _round_trip,
        _numpy_round_trip,
        1e-5,
        "MLX on an M5 with macOS 26.2",
        "as for products of matrices",
    ),
    Probe(
        "grouped, strided 2D convolution",
        _grouped_strided,
        _numpy_grouped,
        1e-5,
        "grouped convolutions by other Metal compilers",
        "use dense convolutions; no model here has a grouped one",
    ),
    Probe(
        "its gradient with respect to the image",
        _grouped_strided_gradient,
        partial(_numpy_grouped, gradient=True),
        1e-5,
        "ml-explore/mlx pull request 3800",
        "use dense or unstrided convolutions; no model here has such a one",
    ),
    Probe(
        "3D convolution out of 2D ones",
        _volume,
        _numpy_volume,
        1e-5,
        "needed by every volume model",
        "do not use the volume models on this device, and report it",
    ),
    Probe(
        "second derivative of jax.nn.gelu, mapped",
        _gelu_twice,
        _numpy_gelu_twice,
        1e-4,
        "jax-mps patches the approximate form",
        'use jaxops.pointwise.gelu or approximate=False; models here do ("gelu")',
    ),
    Probe(
        "random bits of threefry",
        _bits,
        _numpy_bits,
        0.0,
        "not known of any plugin",
        "make weights on the CPU: one seed gives others here",
    ),
    Probe(
        "an array with negative strides, sent as it is",
        _turned,
        lambda: _random(6, 4)[::-1, ::-1] + 1,
        1e-6,
        "MLX-based plugins",
        "send arrays with jaxops.to_device",
    ),
    Probe(
        "a big-endian array through jaxops.to_device",
        _swapped,
        lambda: _random(6, 4)[:, ::-1],
        0.0,
        "MLX-based plugins",
        "report it",
    ),
    Probe(
        "sum of 262144 numbers",
        _long_sum,
        lambda: np.sum(_random(1 << 18).astype(np.float64) + 1),
        1e-5,
        "not known of any plugin",
        "report it",
    ),
)
NOT_RUN = (
    "arrays of 2^31 elements and more come out wrong or zero with MLX (ml-explore/mlx "
    "issues 3248, 3138, 3979); not tried here, since they take 8 GB: use tiles"
)
