"""3D convolution: ours in each form, against XLA's own and PyTorch's, in one run.

    python benchmarks/conv3d.py [--backend gpu] [--repeats 15] [--json FILE]

Every contender computes the same convolution, SAME padding, of the same numbers: the
forward pass, and forward with the gradients by input and kernel. Each repeat runs them
all, in one order and the next time in the other. Given are medians, the quartiles
around them, and the median of the ratios to ours ("auto") in the same repeat; 2 means
that ours takes half the time. Before that, all are compared: the largest difference to
XLA's own, in units of the largest value.

On a GPU the same again in TF32 and bfloat16, where a measurement is the mean of fifty
calls in a row, for which it waits once. PyTorch is left out where it is not installed,
or has no such device.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxops  # noqa: E402
from benchmarks.measuring import Call, alternate, summary, versions  # noqa: E402
from jaxops.conv3d_forms import FORMS, KERNEL_FORMS, Forms  # noqa: E402
from jaxops.conv3d_table import chosen_forms  # noqa: E402

# Channels in and out, taps, (depth, height, width), batch.
SHAPES = {
    "32-32": (32, 32, (3, 3, 3), (32, 128, 128), 1),
    "64-64": (64, 64, (3, 3, 3), (16, 64, 64), 2),
    "1-32": (1, 32, (3, 3, 3), (32, 128, 128), 1),
    "32-1": (32, 1, (3, 3, 3), (32, 128, 128), 1),
    "32-256": (32, 256, (3, 3, 3), (16, 32, 32), 1),
    "32-32-flat": (32, 32, (1, 3, 3), (32, 128, 128), 1),
    "32-32-deep": (32, 32, (3, 1, 1), (32, 128, 128), 1),
    "32-32-five": (32, 32, (5, 5, 5), (32, 64, 64), 1),
    "tiny": (4, 6, (3, 3, 3), (9, 8, 8), 1),
}
DEFAULT_SHAPES = ("32-32", "64-64", "1-32")
PASSES = ("forward", "forward+backward")
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": None}


def xla_native(x, kernel):
    axes = ("NDHWC", "DHWIO", "NDHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1, 1), "SAME", dimension_numbers=axes
    )


def jax_contenders(forms: list[str], x, kernel) -> dict[str, Callable]:
    """Functions of (x, kernel); ours first."""
    found = {"auto": jaxops.conv3d}
    for form in forms:
        if form in FORMS:
            found[form] = functools.partial(jaxops.conv3d, form=form)
        elif form in KERNEL_FORMS:
            inputs, outputs = kernel.shape[3:]
            chosen = chosen_forms("auto", inputs, outputs, x.dtype)
            chosen = chosen._replace(kernel_gradient=form)
            found[f"kernel {form}"] = functools.partial(jaxops.conv3d, form=chosen)
        else:
            chosen = Forms(*form.split(","))
            found[form] = functools.partial(jaxops.conv3d, form=chosen)
    found["XLA conv3d"] = xla_native
    return found


def jax_calls(
    contenders: dict[str, Callable], x, kernel, y, name: str
) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for contender, function in contenders.items():

        def program(x, kernel, y, function=function):
            if name == "forward":
                return function(x, kernel)
            output, pull = jax.vjp(function, x, kernel)
            return output, *pull(y)

        start = time.perf_counter()
        compiled = jax.jit(program).lower(x, kernel, y).compile()
        seconds = time.perf_counter() - start
        run = functools.partial(compiled, x, kernel, y)
        calls[contender] = run, jax.block_until_ready
        print(f"  compiled {contender} in {seconds:.1f} s", file=sys.stderr)
    return calls


def torch_calls(x, kernel, y, name: str, precision: str) -> dict[str, Call]:
    """PyTorch's conv3d in its two layouts, or nothing where there is no such device."""
    try:
        import torch
    except ImportError:
        return {}
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}
    device = "cuda" if on_gpu else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    padding = [k // 2 for k in kernel.shape[:3]]

    def tensor(array, axes):
        array = np.array(jnp.asarray(array, jnp.float32)).transpose(axes).copy()
        return torch.from_numpy(array).to(device, dtype)

    calls = {}
    layouts = {"torch": torch.contiguous_format, "torch last": torch.channels_last_3d}
    for contender, layout in layouts.items():
        tensors = [
            tensor(array, axes).contiguous(memory_format=layout)
            for array, axes in zip(
                (x, kernel, y),
                ((0, 4, 1, 2, 3), (4, 3, 0, 1, 2), (0, 4, 1, 2, 3)),
                strict=True,
            )
        ]

        def run(tensors=tensors):
            volume, weight, weights = tensors
            if name == "forward":
                with torch.no_grad():
                    found = torch.nn.functional.conv3d(volume, weight, padding=padding)
            else:
                leaves = [volume.requires_grad_(), weight.requires_grad_()]
                found = torch.nn.functional.conv3d(*leaves, padding=padding)
                found = (found, *torch.autograd.grad(found, leaves, weights))
            return found

        calls[contender] = run, lambda _: torch.cuda.synchronize() if on_gpu else None
    return calls


def difference(found: Any, expected: Any) -> float:
    """The largest, in units of the largest value; PyTorch's axes are turned to ours."""
    worst = 0.0
    found = found if isinstance(found, tuple) else (found,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, theirs in zip(found, expected, strict=True):
        if not isinstance(mine, jax.Array):
            mine = mine.detach().float().cpu().numpy()
            is_kernel = mine.ndim == 5 and theirs is expected[-1] and len(expected) == 3
            axes = (2, 3, 4, 1, 0) if is_kernel else (0, 2, 3, 4, 1)
            mine = mine.transpose(axes)
        mine, theirs = (np.asarray(a, np.float64) for a in (mine, theirs))
        worst = max(worst, float(np.abs(mine - theirs).max() / np.abs(theirs).max()))
    return worst


def measure(shape: str, name: str, precision: str, options) -> dict[str, Any]:
    """One row: all contenders in one pass at one precision, printed and returned."""
    inputs, outputs, taps, sizes, batch = SHAPES[shape]
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    rng = np.random.default_rng(0)
    x, kernel, y = (
        jnp.asarray(rng.standard_normal(dims, np.float32), dtype)
        for dims in (
            (batch, *sizes, inputs),
            (*taps, inputs, outputs),
            (batch, *sizes, outputs),
        )
    )
    setting = PRECISIONS[precision]
    user = (
        jax.default_matmul_precision(setting) if setting else contextlib.nullcontext()
    )
    forms = options.forms
    if precision == "bfloat16":
        forms = [form for form in forms if "winograd" not in form]
    with user:
        calls = jax_calls(jax_contenders(forms, x, kernel), x, kernel, y, name)
    calls |= torch_calls(x, kernel, y, name, precision)
    expected = calls["XLA conv3d"][0]()
    errors = {key: difference(run(), expected) for key, (run, _) in calls.items()}
    in_a_row = 50 if jax.default_backend() == "gpu" else 1
    times = alternate(calls, options.repeats, in_a_row)
    flop = 2 * np.prod(taps) * inputs * outputs * batch * np.prod(sizes)
    flop *= 3 if name != "forward" else 1
    results = summary(times, "auto")
    print(f"\n{shape} {SHAPES[shape]}, {name}, {precision}, {flop / 1e9:.1f} GFLOP")
    print(f"{'':20}{'median ms':>10}{'quartiles':>18}{'/ auto':>8}{'differs':>10}")
    for key, result in results.items():
        result["difference"] = errors[key]
        spread = "{:.2f} - {:.2f}".format(*result["quartiles_ms"])
        print(
            f"{key:20}{result['median_ms']:10.2f}{spread:>18}{result['ratio']:8.2f}"
            f"{errors[key]:10.1e}"
        )
    sys.stdout.flush()
    row = {"shape": shape, "sizes": SHAPES[shape], "pass": name, "precision": precision}
    return {**row, "flop": float(flop), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=jaxops.backend.NAMES)
    parser.add_argument("--repeats", type=int, default=15, help="at least 2")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=DEFAULT_SHAPES, metavar="SHAPE"
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument(
        "--forms",
        nargs="*",
        default=FORMS,
        help="beside auto: forms; ways to kernel gradients; or forward,input,kernel",
    )
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args()
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # PyTorch needs some
    backend = jaxops.select_backend(options.backend)
    precisions = options.precisions
    if not precisions:
        precisions = PRECISIONS if backend.name == "gpu" else ["float32"]
    record: dict[str, Any] = {"date": date.today().isoformat(), "backend": str(backend)}
    record |= {
        "versions": versions("jax", "jaxlib", "torch"),
        "repeats": options.repeats,
        "rows": [],
    }
    print(record["backend"])
    print(", ".join(f"{key} {value}" for key, value in record["versions"].items()))
    for shape in options.shapes:
        for precision in precisions:
            for name in options.passes:
                record["rows"].append(measure(shape, name, precision, options))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
