"""What all benchmarks share: contenders in turns, and what machine it was."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Call = tuple[Callable[[], Any], Callable[[Any], Any]]  # run, and wait for the result


def alternate(
    calls: dict[str, Call], repeats: int, in_a_row: int
) -> dict[str, list[float]]:
    """Milliseconds of each call in each repeat, after one that does not count.

    Each repeat runs all of them, in one order and the next time in the other.

    Args:
        calls: the contenders by name.
        repeats: measurements of each.
        in_a_row: calls a measurement, for which it waits once.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        names = list(calls)[:: 1 if repeat % 2 else -1]
        for name in names:
            time.sleep(0.01)  # threads of the one before come to rest
            run, wait = calls[name]
            start = time.perf_counter()
            for _ in range(in_a_row):
                found = run()
            wait(found)
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start) / in_a_row)
    return times


def summary(times: dict[str, list[float]], ours: str) -> dict[str, dict[str, Any]]:
    """Median and quartiles of each, and the median of the ratios to ours in the same
    repeat: 2 means that ours takes half the time."""
    results = {}
    for name, own in times.items():
        low, median, high = statistics.quantiles(own, n=4, method="inclusive")
        pairs = zip(own, times[ours], strict=True)
        ratio = statistics.median(theirs / our for theirs, our in pairs)
        results[name] = {
            "median_ms": median,
            "quartiles_ms": [low, high],
            "ratio": ratio,
            "ms": own,
        }
    return results


def versions(*packages: str) -> dict[str, str]:
    """Of Python, these packages, and the machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return {**found, "cpus": str(os.cpu_count()), "cpu": _cpu_name()}


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor()
    lines = listing.read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()
