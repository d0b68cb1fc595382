"""All benchmarks that this machine can run, and one table of what they found.

    python -m benchmarks [--full] [--backend metal] [--only fno conv3d] [--out FOLDER]
    python -m benchmarks --list
    python -m benchmarks --read FOLDER/*.json [--picture FOLDER]

Each script runs in a process of its own, on the Apple GPU, the NVIDIA GPU or the CPU,
whichever ``--backend`` takes. What a script compares, and what its ratios mean, stands
in its first lines; peers that are not installed are left out. The table at the end is
Markdown, made to be pasted into an issue: what ours took, and of others how many times
as long, or as much memory. ``--out`` keeps the records, as JSON, one file a script and
machine. ``--read`` measures nothing and takes such files. ``--picture`` draws training
steps (``fno.png``) and volumes (``volumes.png``).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from benchmarks import measuring  # noqa: E402
from jaxops.backend import NAMES  # noqa: E402


class Script(NamedTuple):
    """A file of this folder, by its name: options of the short and of the full set;
    None: it is not in the short one."""

    short: tuple[str, ...] | None
    full: tuple[str, ...] = ()


SCRIPTS = {
    "floors": Script(()),
    "fno": Script(("--cases", "2d-64", "--repeats", "5", "--no-compile")),
    "jax_peers": Script(("--cases", "2d-64", "--repeats", "5")),
    "spectral": Script(("--cases", "2d-64", "3d-32", "--repeats", "5")),
    "conv3d": Script(("--shapes", "64-64", "--forms", "--repeats", "5")),
    "sr": Script(("--repeats", "3")),
    "tiles": Script(("--size", "16", "128", "128", "--repeats", "3")),
    "compile": Script(("--models", "FNO2D", "EDSR3D")),
    "memory": Script(("--cases", "2d-64", "--volumes", "UNet3D")),
    "growth": Script(None),
}


def run(name: str, options: argparse.Namespace, path: Path) -> bool:
    """Run one script, which writes its record to ``path``; whether it did."""
    script = FOLDER / f"{name}.py"
    if not script.exists():
        print(f"{name} is left out: there is no {script.name}", file=sys.stderr)
        return False
    chosen = SCRIPTS[name].full if options.full else SCRIPTS[name].short or ()
    command = [sys.executable, str(script), "--backend", options.backend, *chosen]
    print(f"\n== {name} {' '.join(chosen)}", flush=True)
    status = subprocess.run([*command, "--json", str(path)]).returncode
    if status or not path.exists():
        print(f"{name} is left out: exit status {status}", file=sys.stderr)
    return not status and path.exists()


def markdown(records: dict[str, list[dict[str, Any]]]) -> str:
    """One table a machine, of all rows that compare, time or weigh something."""
    lines: list[str] = []
    machines: dict[str, list[tuple[str, dict]]] = {}
    for name, found in records.items():
        for record in found:
            machines.setdefault(measuring.slug(record), []).append((name, record))
    for listed in machines.values():
        versions = {k: v for _, r in listed for k, v in r["versions"].items()}
        first = listed[0][1]
        shown = ", ".join(
            f"{key} {value}" for key, value in versions.items() if value != "-"
        )
        lines += [
            "",
            f"**{first['platform']}, {first['chip']}**, {first['date']}: {shown}",
            "",
            "| benchmark | case | pass | ours | beside it |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {row['case']} | {_pass(row)} | {_cells(row['results'])} |"
            for name, record in listed
            for row in record["rows"]
            if set(row["results"]) != {"floor"}
        ]
    return "\n".join(lines)


def _pass(row: dict[str, Any]) -> str:
    precision = row.get("precision", "float32")
    shown = row["pass"] if precision in ("float32", row["pass"]) else ""
    return shown or f"{row['pass']}, {precision}"


def _cells(results: measuring.Results) -> str:
    ours = measuring.our_name(results)
    others = []
    for name, result in results.items():
        if name == ours:
            continue
        by = f"{result['ratio']:.2f}x" if "ratio" in result else measuring.shown(result)
        others.append(f"{name} {by}")
    own = measuring.shown(results[ours]) if ours else ""
    return f"{own} | {', '.join(others)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=NAMES)
    parser.add_argument("--full", action="store_true", help="all cases; hours on a CPU")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("--out", type=Path, help="folder for the records")
    parser.add_argument("--read", nargs="+", type=Path, help="records; measure nothing")
    parser.add_argument("--picture", type=Path, help="folder for two pictures")
    options = parser.parse_args()
    names = options.only or [
        name
        for name, script in SCRIPTS.items()
        if options.full or script.short is not None
    ]
    if options.list:
        for name, script in SCRIPTS.items():
            short = "" if script.short is None else " ".join((name, *script.short))
            print(f"{name:12}{short or 'only with --full'}")
        return
    records: dict[str, list[dict]] = {}
    for path in options.read or ():
        known = [name for name in SCRIPTS if path.name.startswith(f"{name}_")]
        if known:
            records.setdefault(known[0], []).append(measuring.read(path))
        else:
            print(f"{path} is left out: no script's record", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for name in () if options.read else names:
            path = Path(folder, f"{name}.json")
            if run(name, options, path):
                record = measuring.read(path)
                records.setdefault(name, []).append(record)
                if options.out:
                    file = f"{name}_{measuring.slug(record)}.json"
                    measuring.write(record, options.out / file)
    print(markdown(records))
    if options.picture:
        from benchmarks.pictures import draw_training, draw_volumes

        for draw, file in ((draw_training, "fno.png"), (draw_volumes, "volumes.png")):
            if not draw(records, options.picture / file):
                print(f"no record to draw {file} from", file=sys.stderr)


if __name__ == "__main__":
    main()
