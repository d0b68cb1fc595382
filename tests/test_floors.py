"""The house rules that a reader of one file cannot see broken.

Three floors, each a package that imports from the ones below it only. On the lower two
nothing that an Apple GPU lacks: no FFT, no complex number.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("jaxops", "models", "train")
# What each floor may import from other projects, beside all that the floor below may.
LIBRARIES = {
    "jaxops": {"jax", "jaxlib", "jaxtyping", "numpy", "packaging"},
    "models": {"flax", "iree", "ml_dtypes", "optax", "safetensors"},
    "train": {"h5py", "imagecodecs", "matplotlib", "rich", "scipy"}
    | {"threadpoolctl", "tifffile", "tyro"},
}
# Not installed with every copy, or slow to import: inside the function that needs it.
ONLY_IN_FUNCTIONS = {"h5py", "iree", "matplotlib"}
# jaxops gets arrays and gives arrays.
FILE_MODULES = {"fileinput", "glob", "io", "mmap", "pathlib", "pickle", "shutil"} | {
    *("sqlite3", "tarfile", "tempfile", "zipfile"),
}
FILE_FUNCTIONS = {
    "open",
    "fromfile",
    "load",
    "loadtxt",
    "memmap",
    "save",
    "savetxt",
} | {
    *("savez", "savez_compressed", "tofile"),
}
COMPLEX = {"complex64", "complex128", "complex256", "complex_", "csingle", "cdouble"}
# These speak of the numbers that PyTorch's files hold, in host memory. Without JAX they
# have one way to a device, to_device, which refuses complex numbers.
SPEAKS_TORCH = "models/torch_"


def sources(*folders: str) -> list[Path]:
    return [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]


def parameters(*folders: str) -> list:
    return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in sources(*folders)]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full name) of each module that is imported, names out of it included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{a.name}") for a in node.names)


def dotted(node: ast.AST) -> str:
    """`jax.numpy.fft` of the attribute access that reads so, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def refused_imports(tree: ast.AST, floor: str) -> list[str]:
    below = FLOORS[: FLOORS.index(floor) + 1]
    allowed = set(sys.stdlib_module_names).union(below, *(LIBRARIES[f] for f in below))
    return [
        f"line {line}: {name}"
        for line, name in imported(tree)
        if name.split(".")[0] not in allowed
    ]


def file_access(tree: ast.AST) -> list[str]:
    found = [
        f"line {line}: {name}"
        for line, name in imported(tree)
        if name.split(".")[0] in FILE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            owner, _, function = name.rpartition(".")
            if function in FILE_FUNCTIONS and owner in ("", "np", "numpy", "jnp"):
                found.append(f"line {node.lineno}: {name}()")
    return found


def complex_or_fft(tree: ast.AST) -> list[str]:
    found = [
        f"line {line}: {name}"
        for line, name in imported(tree)
        if {"fft", *COMPLEX} & set(name.split("."))
    ]
    for node in ast.walk(tree):
        name = dotted(node)
        last = name.rpartition(".")[2]
        is_fft = isinstance(node, ast.Attribute) and node.attr == "fft"
        is_call = isinstance(node, ast.Call) and dotted(node.func) in (
            *("complex", "lax.complex", "jax.lax.complex"),
        )
        is_value = isinstance(node, ast.Constant) and (
            isinstance(node.value, complex)
            or (isinstance(node.value, str) and node.value in COMPLEX)
        )
        if is_fft or is_call or is_value or last in COMPLEX:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", parameters(*FLOORS))
def test_imports_come_from_the_floors_below(path):
    floor = path.relative_to(ROOT).parts[0]
    assert not refused_imports(parse(path), floor), (
        f"{floor} may import {FLOORS[: FLOORS.index(floor) + 1]} and LIBRARIES above"
    )


@pytest.mark.parametrize("path", parameters("jaxops"))
def test_jaxops_touches_no_files(path):
    assert not file_access(parse(path))


@pytest.mark.parametrize("path", parameters("jaxops", "models"))
def test_no_fft_and_no_complex_number(path):
    name = path.relative_to(ROOT).as_posix()
    if name.startswith(SPEAKS_TORCH):
        modules = {name.split(".")[0] for _, name in imported(parse(path))}
        assert not modules & {"flax", "jax", "jaxlib"}
    else:
        assert not complex_or_fft(parse(path))


@pytest.mark.parametrize("path", parameters(*FLOORS))
def test_optional_and_slow_imports_are_inside_functions(path):
    tree = parse(path)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        found
        for node in ast.walk(tree)
        if isinstance(node, functions)
        for found in imported(node)
    }
    outside = [found for found in imported(tree) if found not in inside]
    assert not [f for f in outside if f[1].split(".")[0] in ONLY_IN_FUNCTIONS]


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        (
            lambda tree: refused_imports(tree, "models"),
            ["import train.loop", "from train import x", "import torch", "import scipy"]
            + ["def f():\n from tifffile import imread"],
            ["import jaxops", "from models.fno import FNO", "import json, flax.linen"],
        ),
        (
            file_access,
            ["import pathlib", "from zipfile import ZipFile", "open('a')"]
            + ["np.load('a')", "jnp.save(a, b)"],
            ["x.load()", "opened = 1", "import os"],
        ),
        (
            complex_or_fft,
            ["jnp.fft.rfft(x)", "from numpy import fft", "import jax.numpy.fft"]
            + ["jax.lax.fft(x)", "x = 1j", "np.complex64", "f('complex128')"]
            + ["jax.lax.complex(a, b)", "complex(a, b)", "from numpy import complex64"],
            ["np.iscomplexobj(x)", "'a complex64 leaf'", "_forward_complex(x)"]
            + ["np.complexfloating"],
        ),
    ],
)
def test_the_rules_see_what_they_forbid(rule, broken, kept):
    assert all(rule(ast.parse(text)) for text in broken)
    assert not any(rule(ast.parse(text)) for text in kept)


# A real home folder, or a folder that machines keep work in, with what is below it. The
# brackets keep this line from finding itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.~])(?:[/](?:home|Users)/(?!(?:me|you|user|name)\b)\w"
    r"|[/](?:root|tmp|work|farm|scratch)/[a-zA-Z.]|[A-Z]:\\\w)"
)


@pytest.mark.parametrize("folder", ["/".join(("", "tmp", "x")), "C:" + "\\data"])
def test_a_path_of_a_machine_is_seen(folder):
    assert MACHINE_PATH.search(f'open("{folder}")')
    assert not MACHINE_PATH.search(f"https://example.org{folder} ~{folder} a{folder}")


def test_no_path_of_a_machine():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" in content:
            continue
        for number, line in enumerate(
            content.decode("utf-8", "replace").splitlines(), start=1
        ):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found
