"""What all benchmarks share: options, contenders in turns, records, tables.

A record is one JSON file: when, on what backend and chip, with what versions, and
``rows``. A row has a ``case``, its ``sizes``, a ``pass``, and ``results``: contender to
``median_ms`` with ``quartiles_ms`` and ``ratio`` to ours, or to one of ``seconds``,
``bytes`` and ``rate`` (with its ``unit``).
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jaxops  # noqa: E402
from models.atomic import replace_file  # noqa: E402
from train.loop import mean_of_parts  # noqa: E402

OURS = ("ours", "auto", "ours in tiles")  # what a row's results call our contender
Call = tuple[Callable[[], Any], Callable[[Any], Any]]  # run, and wait for the result
Results = dict[str, dict[str, Any]]


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


def summary(times: dict[str, list[float]], ours: str) -> Results:
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
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True)
        return found.stdout.strip() or platform.processor()
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor()
    lines = listing.read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def parser(description: str, repeats: int | None = 11) -> argparse.ArgumentParser:
    """The options of every benchmark; without ``--repeats`` where ``repeats`` is None.

    ``description`` is the script's docstring, whose first line is shown.
    """
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--backend", default="auto", choices=jaxops.backend.NAMES)
    if repeats is not None:
        made.add_argument("--repeats", type=int, default=repeats, help="at least 2")
    made.add_argument("--json", type=Path, help="write all numbers there")
    return made


def begin(options: argparse.Namespace, *packages: str) -> dict[str, Any]:
    """Select the backend, say what machine this is, and make the record to fill."""
    # PyTorch, in the same process, needs some of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    backend = jaxops.select_backend(options.backend)
    found = versions("jax", "jaxlib", *packages)
    record = {
        "date": date.today().isoformat(),
        "backend": str(backend),
        "platform": backend.name,
        "chip": found["cpu"] if backend.name == "cpu" else backend.device_kind,
        "versions": found,
    }
    if "repeats" in options:
        record["repeats"] = options.repeats
    print(record["backend"])
    print(", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return {**record, "rows": []}


def add_row(
    record: dict[str, Any], case: str, name: str, results: Results, **more: Any
) -> None:
    """Print a row's results as a table, and append it to the record.

    Args:
        record: of :func:`begin`.
        case: its key.
        name: the pass.
        results: contender to numbers; see above.
        more: what else the row holds; ``sizes`` is printed too.
    """
    sizes = more.get("sizes", {})
    listed = ", ".join(f"{key} {value}" for key, value in sizes.items())
    print(f"\n{case}, {name}" + (f" ({listed})" if listed else ""))
    for contender, result in results.items():
        spread = ratio = differs = ""
        if "quartiles_ms" in result:
            spread = "{:.2f} - {:.2f}".format(*result["quartiles_ms"])
        if "ratio" in result:
            ratio = f"{result['ratio']:.2f} x ours"
        if "difference" in result:
            differs = f"differs by {result['difference']:.0e}"
        line = f"{contender:28}{shown(result):>14}{spread:>20}{ratio:>15}  {differs}"
        print(line.rstrip())
    sys.stdout.flush()
    record["rows"].append({"case": case, **more, "pass": name, "results": results})


def shown(result: dict[str, Any]) -> str:
    """The number of one result, with its unit."""
    if "median_ms" in result:
        return f"{result['median_ms']:.2f} ms"
    if "seconds" in result:
        return f"{result['seconds']:.2f} s"
    if "bytes" in result:
        return f"{result['bytes'] / 1e6:.1f} MB"
    rate, unit = result["rate"], result["unit"]
    return f"{rate:,.0f} {unit}" if rate >= 1000 else f"{rate:.3g} {unit}"


def write(record: dict[str, Any], path: Path | None) -> None:
    """The record as a JSON file, whole or not at all; nothing where path is None."""
    if path is not None:
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A record in the form that is described above, older files' too.

    Adds what :func:`begin` writes now, and names the contender ``peer``.
    """
    record = json.loads(path.read_text())
    platform_name, _, rest = record["backend"].partition(" ")
    record.setdefault("platform", platform_name)
    device = rest.partition(" (")[0]
    is_cpu = record["platform"] == "cpu"
    record.setdefault("chip", record["versions"]["cpu"] if is_cpu else device)
    for row in record["rows"]:
        row.setdefault("case", row.get("shape"))
        if "peer" in row:
            peer = row["results"].pop("peer")
            row["results"][row["peer"]] = peer
    return record


def our_name(results: Results) -> str | None:
    """Which of a row's contenders is ours; None where it has no contenders."""
    return next((name for name in OURS if name in results), None)


def slug(record: dict[str, Any]) -> str:
    """The record's machine as part of a file name, like ``gpu-nvidia-h200``."""
    name = re.sub(r"\((r|tm)\)", "", f"{record['platform']} {record['chip']}".lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def in_own_process(
    script: str, *arguments: object, **environment: str
) -> dict[str, Any] | None:
    """What a script prints as JSON in its last line, run in a fresh process with these
    variables added to its environment.

    None, with a line on stderr, where it fails.
    """
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    if done.returncode:
        print(f"left out, exit status {done.returncode}: {command}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def train_step(
    model: Any,
    optimizer: optax.GradientTransformation,
    micro_batch: int | None = None,
) -> Callable:
    """``step((variables, state), x, y) -> ((variables, state), loss)``.

    The mean squared error, its gradient, and the optimizer's change of the weights.
    ``micro_batch``: samples computed at a time, as in training; None: all.
    """

    def step(carry, x, y):
        variables, state = carry

        def loss(variables, x, y):
            error = (model.apply(variables, x) - y).astype(jnp.float32)
            return jnp.mean(jnp.square(error))

        def work(_, part, __):
            return jax.value_and_grad(loss)(variables, *part), None

        if micro_batch is None:
            (value, gradient), _ = work(None, (x, y), 0)
        else:
            (value, gradient), _ = mean_of_parts(work, None, (x, y), micro_batch)
        changes, state = optimizer.update(gradient, state, variables)
        return (optax.apply_updates(variables, changes), state), value

    return step
