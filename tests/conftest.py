"""How all tests run: strict dtypes, strict ranks, checked shapes, on one backend."""

import gc
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Before the first import of jaxops, and for good, since its modules are imported one by
# one: their annotations are checked at each call.
install_import_hook("jaxops", "beartype.beartype")

import jax  # noqa: E402

import jaxops  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


METAL = ("tests/metal/test_iree", "tests/metal/test_mlx", "tests/metal/test_shaders")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="cpu",
        choices=("auto", "cpu", "gpu", "metal"),
        help="device that the tests run on (made for tests/parity)",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[BACKEND] = jaxops.select_backend(config.getoption("--backend"))
    except jaxops.BackendError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    return f"backend: {config.stash[BACKEND]}"


BACKEND = pytest.StashKey[jaxops.Backend]()


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> jaxops.Backend:
    """The device that this run tests."""
    return pytestconfig.stash[BACKEND]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A file to a process; the ways to Metal to one, for they share compilations."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "tests/metal" if file.startswith(METAL) else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


MAPS_FILE, MOST_MAPS = Path("/proc/self/maps"), 20_000


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of compiled programs before there are too many for one process.

    Each takes some twenty memory maps. Linux gives a process 65530 of them, beyond
    which LLVM ends it in the middle of a test.
    """
    if MAPS_FILE.exists() and MAPS_FILE.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
