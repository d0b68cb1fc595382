"""How much memory there is, how much a program takes, and whether that fits."""

import ctypes
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxops import plugins

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
MOST_BYTES = 2**80  # that are told apart
LARGEST_ARRAY = 2**31  # elements: some convolution libraries count in 32 bits
SHARE = 0.5  # of the free memory, where no budget is given
# Beside what the compiler plans: what the libraries that it calls take for themselves,
# and what the allocator leaves between blocks.
WORKSPACE, OVERHEAD = 1.1, 64 * 2**20
# Limits of containers: the limit, what is used, and what of that can be read again.
CGROUPS = (
    (
        Path("/sys/fs/cgroup"),
        "memory.max",
        "memory.current",
        r"(?m)^inactive_file (\d+)",
    ),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        r"(?m)^total_inactive_file (\d+)",
    ),
)
MMAP_THRESHOLD = -3  # a parameter of mallopt, from malloc.h


def parse_bytes(text: str) -> int:
    """Bytes from ``2GB`` (10^9), ``1.5GiB`` (2^30), ``800M`` or ``64B``.

    Raises:
        ValueError: for anything else, and for nothing or less.
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp]i?)b?|b)\s*", text.lower()
    )
    amount = float(match[1]) * UNITS[match[2] or ""] if match else 0
    count = int(min(amount, MOST_BYTES))
    if count < 1:
        raise ValueError(
            "--memory must be a size with a unit, such as 2GB or 800MB, above 0; got "
            f"{text!r}."
        )
    return count


def bytes_text(count: float) -> str:
    """Bytes as people write them, in the units that `parse_bytes` takes: 1.21 GB."""
    for unit in ("TB", "GB", "MB", "kB"):
        amount = count / UNITS[unit[0].lower()]
        if amount >= 1 or unit == "kB":
            break
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def free_memory() -> int:
    """Bytes that processes may take without swapping, a container's limit included."""
    if platform.system() == "Darwin":
        return _free_on_macos(subprocess.check_output(["vm_stat"], text=True))
    found = [machine_memory()]
    information = Path("/proc/meminfo")
    if information.exists():
        kilobytes = re.search(r"MemAvailable:\s*(\d+)", information.read_text())
        found += [int(kilobytes[1]) * 2**10] if kilobytes else []
    for folder, *names in CGROUPS:
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            cached = re.search(names[2], (folder / "memory.stat").read_text())
        except (OSError, ValueError):  # not this version of cgroups, or no limit
            continue
        found.append(limit - used + (int(cached[1]) if cached else 0))
    return max(0, min(found))


def machine_memory() -> int:
    """Bytes of memory in this machine, taken or not."""
    if platform.system() == "Darwin":
        return int(subprocess.check_output(["sysctl", "-n", "hw.memsize"]))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_on_macos(text: str) -> int:
    """Of vm_stat's report: pages that are free, or hold what can be read again."""
    size = int(re.search(r"page size of (\d+) bytes", text)[1])
    names = ("free", "inactive", "speculative", "purgeable")
    counts = (re.search(rf"Pages {name}:\s*(\d+)", text) for name in names)
    return size * sum(int(count[1]) for count in counts if count)


def device_memory() -> int | None:
    """Free bytes of a device with memory of its own; None where it has the host's."""
    device = jax.devices()[0]
    if device.platform in ("cpu", *plugins.APPLE_PLATFORMS):
        return None
    try:
        stats = device.memory_stats()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # a plugin that does not tell
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def give_back_freed_memory() -> None:
    """Tell glibc, where it is, to give freed blocks of a megabyte and more back.

    By itself it learns to keep those of up to 32 MB, and what lies between them: 70 MB
    and more of the resident size. Nothing changes where `jaxops.host_memory` keeps all.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**20)


def resident_memory() -> int:
    """Bytes of this process that lie in memory (its peak, where only that is told)."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # which Windows has not

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 2**10


@dataclass(frozen=True)
class Need:
    """What a window takes while it is computed.

    Attributes:
        device: bytes of arguments, temporaries and results.
        host: bytes of the copies on this side, and of what is there anyway.
        largest: elements of the largest array.
    """

    device: int
    host: int = 0
    largest: int = 0


def program_need(program, function: Callable, *arguments) -> Need:
    """What running a function takes.

    - program: compiled, which tells on most platforms; or None.
    - arguments: as `jax.ShapeDtypeStruct`; what the program doesn't tell is found by
      walking through the function as traced.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    walked, largest = walk(traced.jaxpr)
    outside = [*traced.in_avals, *traced.out_avals]
    analysis = None if program is None else _analysis(program)
    temporary = walked
    if analysis is not None:  # results are no temporaries there
        temporary = analysis + sum(map(_bytes, traced.out_avals))
    held = sum(map(_bytes, traced.in_avals))
    largest = max([largest, *map(_elements, outside)])
    return Need(int((held + temporary) * WORKSPACE), 0, largest)


def _analysis(program) -> int | None:
    """Bytes of temporaries, as the compiler has planned them."""
    try:
        analysis = program.memory_analysis()
    except (RuntimeError, NotImplementedError):
        return None  # Apple's plugins
    return getattr(analysis, "temp_size_in_bytes", 0) or None


def walk(jaxpr: Any) -> tuple[int, int]:
    """Of a traced function that is run step by step: the bytes of the arrays that it
    makes and needs at one time, its results included, and the elements of the largest.

    An array is made where its step begins and goes after the last step that reads it.
    Compilers fuse steps and need less.
    """
    last = {}
    for i, step in enumerate(jaxpr.eqns):
        last |= {v: i for v in step.invars if _is_variable(v)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if _is_variable(v)}
    made, live, peak, largest = set(), 0, 0, 0
    for i, step in enumerate(jaxpr.eqns):
        inside = [walk(part) for part in _parts(step)]
        results = sum(_bytes(v.aval) for v in step.outvars)
        peak = max([peak, live + results, *(live + inner for inner, _ in inside)])
        largest = max(
            [
                largest,
                *(_elements(v.aval) for v in step.outvars),
                *(n for _, n in inside),
            ]
        )
        kept = {v for v in step.outvars if last.get(v, i) > i}
        gone = {v for v in step.invars if _is_variable(v) and last[v] == i} & made
        made = (made | kept) - gone
        live += sum(_bytes(v.aval) for v in kept) - sum(_bytes(v.aval) for v in gone)
    return peak, largest


def _is_variable(value) -> bool:
    return not hasattr(value, "val")  # else a literal, which can't be hashed


def _parts(step):
    """The functions that a step calls."""
    for value in step.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def _elements(aval) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _bytes(aval) -> int:
    return _elements(aval) * np.dtype(aval.dtype).itemsize


@dataclass(frozen=True)
class Budget:
    """What may be taken.

    Attributes:
        total: bytes of the host's memory, in which most devices have theirs.
        device: bytes of the device's own; None where it has the host's.
    """

    total: int
    device: int | None = None

    def share(self, need: Need) -> float:
        """The part of the budget that a need takes; it fits up to 1."""
        elements = need.largest / (LARGEST_ARRAY - 1)
        if self.device is None:
            return max(elements, (need.host + need.device) / self.total)
        return max(elements, need.host / self.total, need.device / self.device)

    def least(self, need: Need) -> int:
        """The total that a need would fit in."""
        if self.device is None:
            return need.host + need.device
        return max(need.host, need.device)


def budget(text: str | None) -> Budget:
    """From what the user gave, or half of what is free.

    Raises:
        ValueError: for what is no size, or more than there is in this machine.
    """
    own = device_memory()
    if text is None:
        total = int(SHARE * free_memory()) + resident_memory()
        return Budget(total, None if own is None else int(0.8 * own))
    total = parse_bytes(text)
    most = max(machine_memory(), own or 0)
    if total > most:
        raise ValueError(
            f"--memory must be at most what this machine has, {bytes_text(most)}; got "
            f"{text!r}."
        )
    return Budget(total, None if own is None else min(total, int(0.9 * own)))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a program failed for lack of memory, here or on the device."""
    if isinstance(error, MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in said
        for words in ("resource_exhausted", "out of memory", "insufficient memory")
    )
