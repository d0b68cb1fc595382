"""Training states on the disk: bit for bit, whole or not at all, and told apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import FNO, load, save
from train import loop
from train.checkpoint import restore_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilation")


def make_model(**options):
    arguments = {"hidden_channels": 3, "norm": "batch_norm", **options}
    return FNO(n_modes=(4,), in_channels=1, out_channels=1, n_layers=1, **arguments)


def make_state(model, seed=0, clip=1.0):
    """A state with no two leaves alike, without the time that making one takes."""
    optimizer = loop.make_optimizer(1e-3, 10, gradient_clip=clip)
    shapes = jax.eval_shape(lambda: loop.create_state(model, optimizer, (4, 8, 1), 0))
    random = np.random.default_rng(seed)

    def fill(leaf):
        values = np.asarray(random.uniform(0, 100, leaf.shape), leaf.dtype)
        return jnp.asarray(values)

    return jax.tree.map(fill, shapes)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def state(model):
    return make_state(model)


@pytest.fixture
def path(tmp_path, model, state):
    path = tmp_path / "checkpoints" / "last.safetensors"
    save_checkpoint(path, model, state, best=None, metrics_length=17)
    return path


def test_a_state_comes_back_bit_for_bit(path, model, state):
    target = make_state(model, seed=1)
    restored, extra = restore_checkpoint(path, target)
    assert extra == {"best": None, "metrics_length": 17}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for got, want in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert isinstance(got, jax.Array)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_a_checkpoint_is_a_model_too(path, model, state):
    loaded, variables, _ = load(path)
    assert loaded == model
    kernel = variables["params"]["lifting"]["fcs_0"]["kernel"]
    np.testing.assert_array_equal(kernel, state.params["lifting"]["fcs_0"]["kernel"])
    assert variables.keys() == {"params", "batch_stats"}


def test_another_model_or_optimiser_is_refused(path, model):
    with pytest.raises(ValueError, match=r"mean is float32\[3\] there.*\(and"):
        restore_checkpoint(path, make_state(make_model(hidden_channels=4)))
    with pytest.raises(ValueError, match="batch_stats.* is unknown"):
        restore_checkpoint(path, make_state(make_model(norm=None)))
    with pytest.raises(ValueError, match="opt_state/0/.* is missing"):
        restore_checkpoint(path, make_state(model, clip=None))


def test_a_model_without_a_state_is_refused(tmp_path, model, state):
    path = tmp_path / "model.safetensors"
    save(path, model, state.variables)
    with pytest.raises(ValueError, match="holds a model only"):
        restore_checkpoint(path, state)


def test_a_cut_file_is_refused(path, state):
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="last.safetensors can't be loaded"):
            restore_checkpoint(path, state)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        restore_checkpoint(path, state)


def test_a_failed_save_leaves_the_file_of_before(path, model, state):
    before = path.read_bytes()
    with pytest.raises(ValueError):
        save_checkpoint(path, model, state, what=object())
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_names_of_all_the_optimisers_trees(tmp_path, model, state):
    """Chains, named tuples and empty states nest without loss or clash."""
    optimizer = optax.chain(
        optax.clip(1.0), optax.adam(1e-3), optax.ema(0.9), optax.trace(0.9)
    )
    state = state.replace(opt_state=optimizer.init(state.params))
    path = tmp_path / "chain.safetensors"
    save_checkpoint(path, model, state)
    restored, _ = restore_checkpoint(path, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
