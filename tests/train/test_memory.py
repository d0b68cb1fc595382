"""Amounts of memory: read, found, estimated, and never planned beyond the budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train import memory
from train.memory import (
    LARGEST_ARRAY,
    WORKSPACE,
    Budget,
    Need,
    bytes_text,
    is_out_of_memory,
    parse_bytes,
    program_need,
    walk,
)
from train.tile_plan import choose_tiling, smallest_window


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GB", 2 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        (" 800 m ", 8 * 10**8),
        ("64kib", 2**16),
        (".5t", 5 * 10**11),
        ("64 B", 64),
        ("10PB", 10**16),
    ],
)
def test_amounts_are_read_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "-2GB", "0", "0GB", "1", "2 GX", "1e9", "nan", "2GBB", "0.1B"]
)
def test_other_amounts_are_refused(text):
    with pytest.raises(
        ValueError, match="a size with a unit, such as 2GB.*above 0; got"
    ):
        parse_bytes(text)


@given(st.integers(1, 10**13))
def test_amounts_that_are_told_can_be_given_back(count):
    assert parse_bytes(bytes_text(count)) == pytest.approx(count, rel=6e-3, abs=6)


def test_free_memory_of_macos_is_read_from_its_report():
    report = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               100.\n"
        "Pages active:                             500.\n"
        "Pages inactive:                            30.\n"
        "Pages speculative:                          7.\n"
        "Pages wired down:                         900.\n"
        "Pages purgeable:                            3.\n"
    )
    assert memory._free_on_macos(report) == 16384 * 140


@pytest.mark.parametrize("version", [0, 1])
def test_a_container_may_take_less_than_the_machine_has(tmp_path, monkeypatch, version):
    _, limit, used, _ = memory.CGROUPS[version]
    groups = [(tmp_path, *names) for _, *names in memory.CGROUPS]
    monkeypatch.setattr(memory, "CGROUPS", groups)
    free = memory.free_memory()
    (tmp_path / limit).write_text("60000\n")
    (tmp_path / used).write_text("50000\n")
    prefix = "total_" if version else ""
    (tmp_path / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file 4000\n")
    assert memory.free_memory() == 14000 < free
    (tmp_path / limit).write_text("max\n")
    assert memory.free_memory() > 14000


def test_this_machine_has_free_memory_and_this_process_takes_some():
    assert 2**26 < memory.resident_memory() < 2**40
    assert 2**26 < memory.free_memory() < 2**46
    assert memory.budget(None).total > memory.resident_memory()
    assert memory.free_memory() <= memory.machine_memory()
    assert memory.budget("300MB").total == 3 * 10**8


def test_no_more_is_taken_than_the_machine_has(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * 10**9)
    assert memory.budget("16GB").total == 16 * 10**9
    with pytest.raises(ValueError, match="at most what this machine has, 16 GB; got"):
        memory.budget("10PB")
    with pytest.raises(ValueError, match="at most what this machine has"):
        memory.budget("9" * 400 + "GB")
    monkeypatch.setattr(memory, "device_memory", lambda: 80 * 10**9)
    assert memory.budget("40GB").device == 40 * 10**9


def test_walking_finds_the_arrays_that_are_there_at_one_time():
    def function(x):  # x is the caller's; the second step needs two arrays of its own
        y = jnp.concatenate([x, x, x])  # 3 n, until the step after
        z = y + y  # and 3 n more
        return z[:10]

    n = 1000
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    traced = jax.make_jaxpr(function)(shape)
    assert walk(traced.jaxpr) == (4 * 6 * n, 3 * n)
    inside = jax.make_jaxpr(jax.jit(function))(shape)
    assert walk(inside.jaxpr) == (4 * 6 * n, 3 * n)


def test_a_result_that_nothing_reads_and_one_that_is_kept():
    def function(x):
        unused = jnp.concatenate([x, x])
        kept = x * x
        del unused
        return kept, jnp.concatenate([x, x, x])

    shape = jax.ShapeDtypeStruct((100,), jnp.float32)
    traced = jax.make_jaxpr(function)(shape)
    assert walk(traced.jaxpr) == (4 * 400, 300)


class Silent:
    """A program of a plugin that tells nothing of its memory."""

    def memory_analysis(self):
        return None


class Refusing:
    def memory_analysis(self):
        raise NotImplementedError


class Telling:
    class Analysis:
        temp_size_in_bytes = 5_000_000

    def memory_analysis(self):
        return self.Analysis


def test_the_compiler_is_believed_and_else_the_walk():
    def function(x):
        return (x + x)[:1]

    n = 10**6
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    walked = 4 * n + 4 * (n + 1)  # the argument; the sum with the result
    for program in (None, Silent(), Refusing()):
        need = program_need(program, function, shape)
        assert need == Need(int(WORKSPACE * walked), 0, n)
    told = 4 * n + 5_000_000 + 4
    assert program_need(Telling(), function, shape).device == int(WORKSPACE * told)


def test_estimates_with_and_without_the_compiler_are_of_one_size():
    def function(x, kernel):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
        return jnp.maximum(y, 0.0).sum(1)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, 4, 200, 200), (8, 4, 3, 3))
    ]
    program = jax.jit(function).lower(*shapes).compile()
    told = program_need(program, function, *shapes).device
    walked = program_need(None, function, *shapes).device
    assert told <= 1.5 * walked
    assert walked <= 4 * told


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(*[st.integers(1, 400)] * 3),
    st.tuples(*[st.integers(0, 12)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.floats(1e4, 1e9),
    st.floats(0, 0.9),
    st.floats(0.3, 3),
)
@example((1, 29, 232), (0, 0, 1), (1, 1, 1), 1e4, 0.0, 2.0)  # a slice of it misleads
def test_a_plan_never_exceeds_its_budget(size, radius, stride, points, fixed, wrong):
    """Whatever the guess is worth, and though small windows take more a point."""

    def measure(window):
        n = float(np.prod(window))
        return fixed + (n + 3 * n ** (2 / 3)) / points

    tiling = choose_tiling(
        size, radius, stride, measure, lambda window: wrong * measure(window), fixed
    )
    if tiling is None:
        assert measure(smallest_window(size, radius, stride)) > 1
        return
    assert measure(tiling.window) <= 1
    assert tiling.count >= 1
    if measure(size) <= 0.9:
        assert tiling.count == 1


def test_what_fits_in_one_piece_is_one_and_larger_budgets_compute_less():
    def plan(points):
        def measure(window):
            return float(np.prod(window)) / points

        return choose_tiling((60, 500, 400), (6, 8, 8), (1, 1, 1), measure, measure)

    found = [plan(points).recomputed for points in (2e4, 1e5, 1e6, 4e6, 1.2e7)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1
    assert found[2] < 1.25
    assert plan(1000) is None


def test_shares_of_budgets():
    assert Budget(100).share(Need(30, 20)) == 0.5
    assert Budget(100, device=60).share(Need(30, 20)) == 0.5
    assert Budget(100, device=60).share(Need(30, 80)) == 0.8
    assert Budget(10**15).share(Need(1, 1, LARGEST_ARRAY)) > 1
    assert Budget(10**15).share(Need(1, 1, LARGEST_ARRAY - 1)) <= 1
    assert Budget(100).least(Need(30, 20)) == 50


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), True),
        (RuntimeError("INTERNAL: [METAL] Insufficient Memory (00000008)"), True),
        (RuntimeError("INVALID_ARGUMENT: shapes"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected
