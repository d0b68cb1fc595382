"""What the tests of whole programs share: a compilation cache and a small data set."""

import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A folder of compiled programs."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def quick_compilation(compiled):
    """Hasty compilation, once for all runs of a program, here and in other processes.

    Ends with the module: other tests want every optimisation. Yields the environment
    for a subprocess.
    """
    values = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    # The first of them cannot be read; it is off by default.
    before = {name: getattr(jax.config, name, False) for name in values}

    def set_all(new):
        for name, value in new.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # whether it is used is settled only once

    set_all(values)
    yield {**os.environ, **{k.upper(): str(v) for k, v in values.items()}}
    set_all(before)


@pytest.fixture(scope="session")
def smoothing_file(tmp_path_factory):
    """An .npz of 26 random fields on 8 x 8 points and their moving averages."""
    inputs = np.random.default_rng(0).normal(size=(26, 8, 8)).astype(np.float32)
    targets = 3 + inputs + np.roll(inputs, 1, 1) + np.roll(inputs, 1, 2)
    path = tmp_path_factory.mktemp("data") / "smoothing.npz"
    np.savez(path, x=inputs, y=targets.astype(np.float32))
    return path
