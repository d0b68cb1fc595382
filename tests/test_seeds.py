"""One seed gives one set of weights, on every jax from 0.4.34 on.

`python tests/test_seeds.py` writes the golden file anew; jax 0.10.2 wrote the present
one. Bits agreed bitwise on jax 0.4.34, 0.10.2 and 0.12.0 and on an NVIDIA GPU, and so
did uniform numbers. On the CPU normal numbers were equal or one unit in the last place
apart, where XLA folds constants in another order; on the GPU up to 59 units (4e-6).
"""

import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxops

GOLDEN = Path(__file__).parent / "golden" / "seeds.npz"
BITWISE = ("bits", "fold", "permutation", "split", "uniform")
# Twice the largest difference seen, for a CPU that fuses multiply and add otherwise.
MAX_ULP = 2


class SmallNet(nn.Module):
    """A dense layer, a convolution and a bare parameter, each with its initialiser."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(5, (3, 3))(nn.Dense(7)(x))
        return x * self.param("scale", nn.initializers.normal(0.3), (1, 4, 4, 5))


def draw() -> dict[str, np.ndarray]:
    """What one seed gives: generators, distributions and a module's weights."""
    key = jax.random.key(0)
    drawn = {
        "bits": jax.random.bits(key, (64,), jnp.uint32),
        "fold": jax.random.key_data(jax.random.fold_in(key, 3)),
        "permutation": jax.random.permutation(key, 50),
        "split": jax.random.key_data(jax.random.split(key, 3)),
        "uniform": jax.random.uniform(key, (64,)),
        "normal": jax.random.normal(key, (256,)),
        "truncated": jax.random.truncated_normal(key, -2.0, 2.0, (256,)),
    }
    variables = SmallNet().init(jax.random.key(1), jnp.zeros((1, 4, 4, 3)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        drawn[jax.tree_util.keystr(path)] = leaf
    return {name: np.asarray(array) for name, array in drawn.items()}


def assert_same_draws(drawn: dict[str, np.ndarray], golden: dict[str, np.ndarray]):
    assert drawn.keys() == golden.keys()
    for name, expected in golden.items():
        if name in BITWISE:
            np.testing.assert_array_equal(drawn[name], expected, err_msg=name)
        else:
            np.testing.assert_array_max_ulp(drawn[name], expected, MAX_ULP)


def test_one_seed_gives_one_set_of_weights():
    with np.load(GOLDEN) as golden:
        assert_same_draws(draw(), dict(golden))


def test_settings_of_the_environment_do_not_change_the_seeds(tmp_path):
    """jaxops sets the generator, also where the environment asks for another one."""
    other = {"JAX_THREEFRY_PARTITIONABLE": "0", "JAX_DEFAULT_PRNG_IMPL": "rbg"}
    written = tmp_path / "drawn.npz"
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, __file__, written],
        env={**os.environ, **other, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)},
        check=True,
    )
    with np.load(GOLDEN) as golden, np.load(written) as drawn:
        assert_same_draws(dict(drawn), dict(golden))


if __name__ == "__main__":
    assert jaxops.select_backend("cpu")
    np.savez_compressed(sys.argv[1] if len(sys.argv) > 1 else GOLDEN, **draw())
