"""How an FNO's time and memory grow with grid, modes, channels and layers.

    python benchmarks/growth.py [--backend gpu] [--sweeps ..] [--picture FILE]
    python benchmarks/growth.py --read FILE.json .. --picture FILE

One size at a time changes, around the 2D and the 3D case that benchmarks/fno.py starts
with. Measured are forward passes and training steps (mean squared error, AdamW): the
median time, XLA's temporaries, and the floor of benchmarks/floors.py. There is no peer.
``excess`` compares two neighbours of a sweep: the growth of the time by the growth of
the floor; above 1 the time grew by more than the counted work says.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import floors  # noqa: E402
from benchmarks.fno import CASES, LEARNING_RATE, Case, Stepper  # noqa: E402
from benchmarks.measuring import (  # noqa: E402
    add_row,
    alternate,
    begin,
    parser,
    summary,
    train_step,
    write,
)
from models import FNO  # noqa: E402
from train.loop import default_micro_batch  # noqa: E402

PASSES = ("forward", "train step")
LAYERS = 4
SWEEPS = {
    "2D grid": ("2d-64", (32, 64, 128, 256)),
    "2D modes": ("2d-64", (8, 16, 32, 64)),
    "2D channels": ("2d-64", (16, 32, 64, 128)),
    "2D layers": ("2d-64", (1, 2, 4, 8)),
    "3D grid": ("3d-32", (16, 24, 32, 48)),
    "3D modes": ("3d-32", (4, 8, 16)),
}


def varied(sweep: str, value: int) -> tuple[Case, int]:
    """The case of one point of a sweep, and its number of layers."""
    case, what = CASES[SWEEPS[sweep][0]], sweep.split()[1]
    size = (value,) * len(case.grid)
    if what == "layers":
        return case, value
    changed = {
        "grid": {"grid": size},
        "modes": {"modes": size},
        "channels": {"hidden": value},
    }
    return case._replace(**changed[what]), LAYERS


def measure(record, rates, sweep: str, value: int, name: str, repeats: int) -> None:
    """One row: a pass at one point of a sweep."""
    case, layers = varied(sweep, value)
    on_cpu = jax.default_backend() == "cpu"
    batch = case.batch if on_cpu else case.gpu_batch
    model = FNO(case.modes, 1, 1, case.hidden, layers)
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.standard_normal((batch, *case.grid, 1), dtype=np.float32))
        for _ in range(2)
    )
    variables = jax.jit(model.init)(jax.random.key(0), x[:1])
    if name == "forward":
        program = jax.jit(model.apply).lower(variables, x).compile()
        run = functools.partial(program, variables, x)
    else:
        optimizer = optax.adamw(LEARNING_RATE)
        carry = variables, jax.jit(optimizer.init)(variables)
        step = train_step(model, optimizer, default_micro_batch(model, x.shape))
        step = jax.jit(step, donate_argnums=0)
        program = step.lower(carry, x, y).compile()
        run = Stepper(program, carry, (x, y))
    calls = {"ours": (run, jax.block_until_ready)}
    results = summary(alternate(calls, repeats, 1 if on_cpu else 20), "ours")
    count = floors.fno(model, case.grid, batch, step=name != "forward")
    field = 4 * batch * math.prod(case.grid) * case.hidden
    floors.beside(results, floors.floor(count, rates, field), "ours")
    temporaries = program.memory_analysis().temp_size_in_bytes
    results["temporaries"] = {"bytes": temporaries}
    sizes = {**case._replace(batch=batch)._asdict(), "layers": layers}
    del sizes["gpu_batch"]
    more = {"sweep": sweep, "value": value, "sizes": sizes}
    add_row(record, f"{sweep} {value}", name, results, **more)


def sweeps(record: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows by (sweep, pass), the value growing."""
    found: dict[tuple[str, str], list] = {}
    for row in record["rows"]:
        found.setdefault((row["sweep"], row["pass"]), []).append(row)
    return {
        key: sorted(rows, key=lambda row: row["value"]) for key, rows in found.items()
    }


def print_excess(record: dict[str, Any]) -> None:
    """Where the time grows, and by how much more than the floor."""
    print(f"\n{'':26}{'sizes':>12}{'time':>9}{'floor':>9}{'excess':>9}")
    for (sweep, name), rows in sweeps(record).items():
        for one, two in zip(rows[:-1], rows[1:], strict=True):
            time, floor = (
                two["results"][key]["median_ms"] / one["results"][key]["median_ms"]
                for key in ("ours", "floor")
            )
            step = f"{one['value']} - {two['value']}"
            label = f"{sweep}, {name}"
            print(f"{label:26}{step:>12}{time:9.2f}{floor:9.2f}{time / floor:9.2f}")


def main() -> None:
    made = parser(__doc__, repeats=5)
    made.add_argument(
        "--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS), metavar="SWEEP"
    )
    made.add_argument("--read", nargs="+", type=Path, help="records; measure nothing")
    made.add_argument("--picture", type=Path, help="draw it there")
    options = made.parse_args()
    if options.read:
        records = [json.loads(path.read_text()) for path in options.read]
        record = {**records[0], "rows": [row for r in records for row in r["rows"]]}
    else:
        record = begin(options)
        rates = floors.measure_rates()
        for sweep in options.sweeps:
            for value in SWEEPS[sweep][1]:
                for name in PASSES:
                    measure(record, rates, sweep, value, name, options.repeats)
                    jax.clear_caches()
    print_excess(record)
    write(record, options.json)
    if options.picture:
        from benchmarks.pictures import draw_growth

        draw_growth(record["chip"], sweeps(record), options.picture)


if __name__ == "__main__":
    main()
