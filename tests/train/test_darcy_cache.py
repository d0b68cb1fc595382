"""The cache of data sets: read again, never half written, never trusted blindly."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from train.data import cache
from train.data.darcy import DarcySettings, cache_name, darcy_dataset

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = DarcySettings(
    kind="lognormal",
    log_std=1.0,
    fine_resolution=17,
    train_resolution=4,
    test_resolutions=(4, 8),
    num_train=3,
    num_test=2,
    num_modes=8,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, which does not exist yet."""
    monkeypatch.setenv("JAXOPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_same(first, second):
    np.testing.assert_array_equal(first["train"].inputs, second["train"].inputs)
    np.testing.assert_array_equal(first["train"].targets, second["train"].targets)
    for n in first["test"]:
        np.testing.assert_array_equal(
            first["test"][n].targets, second["test"][n].targets
        )


def test_second_call_reads_the_cache(folder, caplog):
    calls = []
    first = darcy_dataset(SMALL, lambda done, total: calls.append((done, total)))
    assert calls == [(i, 5) for i in range(1, 6)]
    assert [p.name for p in folder.iterdir()] == [cache_name(SMALL)]
    second = darcy_dataset(SMALL, lambda *_: pytest.fail("made anew"))
    assert_same(first, second)
    assert not caplog.records


def test_each_setting_has_a_file_of_its_own():
    changes = [
        {},
        {"kind": "piecewise"},
        {"log_std": 0.3},
        {"high": 10.0},
        {"low": 4.0},
        {"seed": 1},
        {"num_modes": 7},
        {"test_resolutions": (4,)},
        {"num_train": 4},
        {"num_test": 4},
        {"train_resolution": 8},
        {"fine_resolution": 33},
        {"grid": "nodes", "train_resolution": 5, "test_resolutions": (5,)},
    ]
    assert {name for change in changes for name in change} == {
        field.name for field in dataclasses.fields(DarcySettings)
    }
    names = {cache_name(dataclasses.replace(SMALL, **change)) for change in changes}
    assert len(names) == len(changes)


def damage_flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [damage_flip, lambda c: c[:-100], lambda c: b"", lambda c: b"something else" * 99],
    ids=["bit", "truncated", "empty", "foreign"],
)
def test_damaged_cache_is_made_anew_and_says_so(folder, caplog, damage):
    first = darcy_dataset(SMALL)
    path = folder / cache_name(SMALL)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert_same(first, darcy_dataset(SMALL))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "is damaged" in caplog.text and "making it anew" in caplog.text
    assert path.read_bytes() == content


def test_cache_of_other_settings_under_this_name_is_not_used(folder, caplog):
    other = dataclasses.replace(SMALL, seed=1)
    darcy_dataset(other)
    os.rename(folder / cache_name(other), folder / cache_name(SMALL))
    mixed = darcy_dataset(SMALL)
    assert "other settings" in caplog.text
    assert_same(mixed, darcy_dataset(SMALL))


def test_cache_that_cannot_be_written_is_done_without(folder, caplog):
    folder.write_text("a file where the folder should be")
    sets = darcy_dataset(SMALL)
    assert len(sets["train"]) == 3
    assert "is not cached" in caplog.text


def test_interrupted_making_leaves_nothing(folder):
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        darcy_dataset(SMALL, interrupt)
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_killed_writing_leaves_no_file_that_counts(folder, caplog):
    path = folder / "set.npz"
    code = (
        "import os, pathlib, signal, numpy as np\n"
        "from train.data import cache\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache.write_arrays(pathlib.Path({str(path)!r}), dict(a=np.ones(1000)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = folder.iterdir()  # whole, but without the name that counts
    assert leftover.name != path.name
    with pytest.raises(FileNotFoundError):
        cache.read_arrays(path)
    cache.write_arrays(path, {"a": np.zeros(3)})
    assert set(folder.iterdir()) == {leftover, path}  # it may belong to a live process
    old = time.time() - 2 * cache.STALE_SECONDS
    os.utime(leftover, (old, old))
    cache.write_arrays(path, {"a": np.zeros(4)})
    assert list(folder.iterdir()) == [path]
    assert cache.read_arrays(path)["a"].shape == (4,)


def test_several_at_once_do_not_harm_each_other(folder, caplog):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(darcy_dataset(SMALL)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and not caplog.records
    for result in results[1:]:
        assert_same(results[0], result)
    assert [p.name for p in folder.iterdir()] == [cache_name(SMALL)]


@pytest.mark.parametrize(
    "platform, variables, expected",
    [
        ("linux", {"JAXOPS_CACHE": "/chosen"}, "/chosen"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/jaxops"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/jaxops"),
        ("linux", {}, "/home/me/.cache/jaxops"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/me/Library/Caches/jaxops"),
    ],
)
def test_cache_folder(monkeypatch, platform, variables, expected):
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("JAXOPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(expected)
