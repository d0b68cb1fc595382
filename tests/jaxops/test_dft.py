"""The truncated transforms against numpy's FFT in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import dft
from jaxops.device import trace_for

GRIDS = [(1,), (2,), (7,), (8,), (6, 5), (5, 6), (1, 4), (4, 3, 6), (3, 4, 5)]
# A sum of N products in float32 errs by about sqrt(N) 6e-8; the results here are of
# order one and N is at most 60.
TOLERANCE = 1e-6


def complex_of(z):
    """(batch, 2, ..) real to (batch, ..) complex, in float64."""
    z = np.asarray(z, np.float64)
    return z[:, 0] + 1j * z[:, 1]


def rfftn(x):
    axes = tuple(range(1, x.ndim - 1))
    return np.fft.rfftn(np.asarray(x, np.float64), axes=axes, norm="forward")


def pick(spectrum, wavenumbers, grid):
    """The entries of a full spectrum at these wavenumbers."""
    index = [np.asarray(ks) % n for ks, n in zip(wavenumbers, grid, strict=True)]
    batch, channels = np.arange(spectrum.shape[0]), np.arange(spectrum.shape[-1])
    return spectrum[np.ix_(batch, *index, channels)]


def field(grid, seed=0, batch=2, channels=3):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, *grid, channels)).astype(np.float32)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("n_modes", [1, 2, 3, 4, 100])
def test_forward_is_rfftn_at_the_kept_wavenumbers(grid, n_modes):
    x = field(grid)
    kept = dft.kept_wavenumbers((n_modes,) * len(grid), grid)
    z = dft.forward(jnp.asarray(x), kept)
    expected = pick(rfftn(x), kept, grid)
    assert z.shape == (2, 2, *expected.shape[1:])
    np.testing.assert_allclose(complex_of(z), expected, atol=TOLERANCE)


@pytest.mark.parametrize("grid", GRIDS)
def test_inverse_of_any_spectrum_is_irfftn(grid):
    """Also of one that is not Hermitian: random numbers at all wavenumbers."""
    rng = np.random.default_rng(1)
    kept = dft.kept_wavenumbers((100,) * len(grid), grid)
    z = rng.standard_normal((2, 2, *(len(k) for k in kept), 3)).astype(np.float32)
    full = np.zeros((2, *grid[:-1], grid[-1] // 2 + 1, 3), complex)
    index = [np.asarray(ks) % n for ks, n in zip(kept, grid, strict=True)]
    full[np.ix_(range(2), *index, range(3))] = complex_of(z)
    axes = tuple(range(1, len(grid) + 1))
    expected = np.fft.irfftn(full, s=grid, axes=axes, norm="forward")
    x = dft.inverse(jnp.asarray(z), kept, grid)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(x, expected, atol=TOLERANCE * scale)


@pytest.mark.parametrize("n_modes", [1, 3, 100])
@pytest.mark.parametrize("grid", GRIDS)
def test_waves_of_zeros_change_nothing(grid, n_modes):
    """On GPUs the rows of an axis are filled up to 16 bytes; here with zeros, exactly:
    products of the same numbers in another order."""
    x = jnp.asarray(field(grid))
    kept = dft.kept_wavenumbers((n_modes,) * len(grid), grid)
    z = dft.forward(x, kept)
    back = dft.inverse(z, kept, grid)
    with trace_for("gpu"):
        filled = jax.jit(lambda x: dft.forward(x, kept))(x)
        filled_back = jax.jit(lambda z: dft.inverse(z, kept, grid))(z)
    np.testing.assert_allclose(filled, z, atol=TOLERANCE)
    scale = np.abs(back).max()
    np.testing.assert_allclose(filled_back, back, atol=TOLERANCE * scale)


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.float32, 12), (jnp.bfloat16, 16)])
def test_rows_of_waves_are_multiples_of_16_bytes_on_gpus(dtype, rows):
    """Cosines and sines of wavenumbers 0 to 4: 10 rows."""
    x, kept = jnp.zeros((2, 12, 10, 3), dtype), dft.kept_wavenumbers((8, 8), (12, 10))
    with trace_for("gpu"):
        text = jax.jit(lambda x: dft.forward(x, kept)).lower(x).as_text()
    name = {jnp.float32: "f32", jnp.bfloat16: "bf16"}[dtype]
    assert f"tensor<2x{rows}x30x{name}>" in text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize(
    "wavenumbers",
    [
        (0,),
        (-2, -1, 0, 1),
        (-4, -3, -2, -1, 0, 1, 2, 3),
        (0, 3, 1, -1),
        (5, 5, -6),
        (2, 1, 0),
    ],
)
def test_signs_by_sums_are_the_product_with_the_matrix(size, wavenumbers):
    """Of wavenumbers that neighbour each other in any order, repeat, pass size/2."""
    matrix = dft._unfold(size, wavenumbers, 4)
    waves = field((3, matrix.shape[1], 5), channels=2)
    kept = field((3, 2, len(wavenumbers), 5), channels=2)
    shape = 2, 3, matrix.shape[1] // 2, 2, 5, 2
    with trace_for("gpu"):
        signed = dft._to_signed(
            jnp.asarray(waves).reshape(shape), 2, size, wavenumbers, 4
        )
        folded = dft._to_folded(jnp.asarray(kept), 2, size, wavenumbers, 4)
    expected = np.einsum("sw,bxwyc->bxsyc", matrix, waves)
    np.testing.assert_allclose(signed, expected, atol=1e-6)  # of up to two numbers
    expected = np.einsum("sw,bxsyc->bxwyc", matrix, kept.reshape(2, 3, -1, 5, 2))
    np.testing.assert_allclose(folded, expected, atol=2e-6)  # of up to four


@pytest.mark.parametrize("grid", [(7,), (8,), (6, 5), (5, 6), (4, 3, 6)])
def test_round_trip_with_all_wavenumbers_is_the_identity(grid):
    x = field(grid)
    kept = dft.kept_wavenumbers(grid, grid)
    back = dft.inverse(dft.forward(jnp.asarray(x), kept), kept, grid)
    np.testing.assert_allclose(back, x, atol=4 * TOLERANCE)


def test_gradients_are_the_adjoints():
    """<F x, z> = <x, F* z>: autodiff against numpy's matrices of both transforms."""
    grid, kept = (5, 6), dft.kept_wavenumbers((3, 4), (5, 6))
    x, z = (
        field(grid, channels=1),
        np.random.default_rng(2).standard_normal((2, 2, 3, 3, 1)).astype(np.float32),
    )
    value, pull = jax.vjp(lambda v: dft.forward(v, kept), jnp.asarray(x))
    (pulled,) = pull(jnp.asarray(z))
    np.testing.assert_allclose(
        np.vdot(np.asarray(value, np.float64), z),
        np.vdot(x, np.asarray(pulled, np.float64)),
        rtol=1e-5,
    )
    direction = field(grid, seed=3, channels=1)
    step = 1e-2  # forward is linear: any step is exact
    moved = dft.forward(jnp.asarray(x + step * direction), kept)
    np.testing.assert_allclose(
        np.vdot(pulled, direction), np.vdot((moved - value) / step, z), rtol=1e-3
    )


def test_large_prime_size_keeps_its_digits():
    """k n reaches 10^7 here; reduced as an integer it costs no accuracy."""
    size = 9973
    k = [0, 1, 4986]
    x = np.cos(2 * np.pi * (np.arange(size) * 4986 % size) / size)
    z = dft.forward(jnp.asarray(x[None, :, None], jnp.float32), [k])
    np.testing.assert_allclose(complex_of(z)[0, :, 0], [0, 0, 0.5], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_stays_half(dtype):
    x = jnp.asarray(field((8, 6)), dtype)
    kept = dft.kept_wavenumbers((4, 4), (8, 6))
    z = dft.forward(x, kept)
    y = dft.inverse(z, kept, (8, 6))
    assert z.dtype == y.dtype == dtype
    expected = pick(rfftn(x), kept, (8, 6))
    # Rounding of the result and of the matrices: a few times the type's epsilon.
    np.testing.assert_allclose(
        complex_of(z), expected, atol=4 * float(jnp.finfo(dtype).eps)
    )


def test_kept_wavenumbers_count_as_an_fno_does():
    assert dft.kept_wavenumbers((4, 4), (8, 8)) == ((-2, -1, 0, 1), (0, 1, 2))
    assert dft.kept_wavenumbers((9, 9), (16, 16))[0] == tuple(range(-4, 5))
    assert dft.kept_wavenumbers((9, 9), (16, 16))[1] == tuple(range(5))
    assert dft.kept_wavenumbers((99, 99), (3, 5)) == ((-1, 0, 1), (0, 1, 2))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: dft.forward(x, [(0, 1)]), "each spatial axis"),
        (lambda x: dft.inverse(x, [(0,), (0,)], (4, 4)), "real part first"),
        (
            lambda x: dft.inverse(x[:, :2, :, None], [(0,) * 4, (-1,)], (4, 4)),
            "from 0 to size // 2",
        ),
    ],
)
def test_mistakes_are_told(call, text):
    with pytest.raises(ValueError, match=text):
        call(jnp.zeros((2, 4, 4, 2)))
