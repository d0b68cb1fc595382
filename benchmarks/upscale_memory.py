"""A volume larger than memory through ``python -m train.upscale``, and killed at it.

Makes a smooth random uint16 volume and a tiny network, (1, 2, 2), enlarges the volume
with ``--memory 1GB`` in a process of its own, and reports its time and its peak
resident size. Then starts it again, kills it at random moments, looks that no file is
there that looks finished, starts it again until it is done, and compares the two
outputs by hash. Takes 9 times --gigabytes of disk.

    python benchmarks/upscale_memory.py --gigabytes 3 --out upscale_memory.json
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxops.backend import select_backend  # noqa: E402
from models import EDSR3D, save  # noqa: E402
from train.data.tiff import VolumeWriter  # noqa: E402

PLANE = (1024, 1024)
LIMIT = 1.6e9  # bytes of resident size that are promised for --memory 1GB
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Options:
    """Peak memory of an enlargement, and whether it survives being killed."""

    gigabytes: float = 3.0
    """Size of the input."""

    memory: str = "1GB"
    """What train.upscale is told."""

    kills: int = 6
    """How often it is killed."""

    seed: int = 0
    """Of the moments at which it is killed."""

    folder: Path | None = None
    """Where the files go; by default the system's folder for temporary files."""

    out: Path | None = None
    """JSON of the results."""


def make_volume(path: Path, num_slices: int) -> None:
    """Smooth noise: random waves that drift from slice to slice; in chunks."""
    rng = np.random.default_rng(0)
    y, x = (np.arange(n, dtype=np.float32) for n in PLANE)
    waves = [
        (rng.uniform(0.005, 0.08, 3), rng.uniform(0, 6.28, 2), rng.uniform(0.3, 1))
        for _ in range(5)
    ]
    voxel_size = (2.0, 0.5, 0.5)
    writer = VolumeWriter(path, (num_slices, *PLANE), "ZYX", "uint16", voxel_size, "um")
    with writer:
        for z in range(num_slices):
            plane = np.full(PLANE, 3.0, np.float32)
            for (kz, ky, kx), (phase_y, phase_x), weight in waves:
                column = np.sin(ky * y + phase_y + kz * z)[:, None]
                plane += weight * column * np.sin(kx * x + phase_x - kz * z)[None]
            plane = 4000 * plane + rng.normal(0, 30, PLANE).astype(np.float32)
            writer.append(plane.clip(0, 65535).astype(np.uint16)[None])


def make_model(path: Path) -> None:
    """A network of two channels that changes the interpolated volume a little."""
    model = EDSR3D(hidden_channels=2, n_blocks=1, scale=(1, 2, 2), input_skip="linear")
    x = jnp.zeros(model.example_shape())
    save(path, model, jax.jit(model.init)(jax.random.key(0), x))


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "train.upscale", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def resident(pid: int) -> int:
    """Peak resident bytes of a process that runs; 0 where /proc does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return 1024 * int(peaks[0]) if peaks else 0


def wait(process: subprocess.Popen, seconds: float = float("inf")) -> tuple[int, bool]:
    """The peak resident size until it ends, or until it is killed after some time."""
    peak, end = 0, time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        peak = max(peak, resident(process.pid))
        time.sleep(POLL_SECONDS)
    was_alive = process.poll() is None
    if was_alive:
        process.kill()
        process.wait()
    return peak, was_alive


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        result = hashlib.sha256()
        while block := file.read(2**22):
            result.update(block)
    return result.hexdigest()


def expect_success(process: subprocess.Popen, log: Path) -> None:
    if process.returncode:
        raise SystemExit(f"train.upscale failed:\n{log.read_text()[-2000:]}")


def measure(options: Options, folder: Path) -> dict:
    num_slices = max(8, round(options.gigabytes * 1e9 / (2 * PLANE[0] * PLANE[1])))
    volume, model, log = (folder / n for n in ("in.tif", "net.safetensors", "log.txt"))
    make_volume(volume, num_slices)
    make_model(model)
    print(f"volume {num_slices} x {PLANE[0]} x {PLANE[1]} uint16", flush=True)

    def arguments(out: Path) -> list[str]:
        return [str(model), str(volume), str(out), "--memory", options.memory]

    straight = folder / "straight.tif"
    began = time.monotonic()
    process = start([*arguments(straight), "--backend", "cpu"], log)
    peak, _ = wait(process)
    seconds = time.monotonic() - began
    expect_success(process, log)
    print(log.read_text(), flush=True)
    expected, size = digest(straight), straight.stat().st_size
    straight.unlink()
    print(f"{seconds:.1f} s, peak resident size {peak / 1e9:.3f} GB", flush=True)

    out, chance = folder / "killed.tif", random.Random(options.seed)
    num_killed = 0
    while not out.exists():
        process = start([*arguments(out), "--backend", "cpu"], log)
        limit = float("inf")
        if num_killed < options.kills:
            limit = chance.uniform(0.3, 1.2) * seconds / (1 + options.kills / 2)
        peak_here, was_killed = wait(process, limit)
        peak = max(peak, peak_here)
        if not was_killed:
            expect_success(process, log)
            break
        num_killed += 1
        shown = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
        state = "a finished file" if out.exists() else "no finished file"
        print(f"killed after {limit:.1f} s: {state} among {sorted(shown)}", flush=True)
    same = digest(out) == expected
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    return {
        "gigabytes": num_slices * PLANE[0] * PLANE[1] * 2 / 1e9,
        "output_gigabytes": size / 1e9,
        "memory": options.memory,
        "seconds": seconds,
        "peak_resident_gigabytes": peak / 1e9,
        "limit_gigabytes": LIMIT / 1e9,
        "kills": num_killed,
        "same_hash_after_kills": same,
        "left_behind": left,
        "jax": jax.__version__,
    }


def main() -> int:
    options = tyro.cli(Options)
    select_backend("cpu")
    folder = Path(tempfile.mkdtemp(prefix="upscale_", dir=options.folder))
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    good = (
        result["peak_resident_gigabytes"] <= result["limit_gigabytes"]
        and result["same_hash_after_kills"]
        and not result["left_behind"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
