"""Real Darcy data: our accuracy and time against neuraloperator's own training.

    python benchmarks/darcy.py [--seeds 0 1 2] [--json FILE]

The data are the 1000 pairs on 16x16 that the neuraloperator 0.3.0 wheel ships, with
their test sets on 16x16 and 32x32; the wheel is fetched with pip. Both sides train the
same architecture for the same epochs at the same batch size, each in a process of its
own, one after the other, seed by seed. Times are whole processes: imports, compilation,
tests and files included. ``training`` is what neuraloperator's trainer took inside.

The peer needs ``torch`` and ``neuraloperator`` (extra ``parity``); ``--ours-only`` does
without.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

EPOCHS, BATCH, HIDDEN, MODES = 20, 16, 32, 8


def run_ours(files: dict[str, Path], seed: int, folder: Path) -> dict[str, float]:
    """One run of ``python -m train.fno``; its last errors and its whole time."""
    command = [
        sys.executable, "-m", "train.fno", "--backend", "cpu",
        "--data", files["train16"], "--test", files["test16"], files["test32"],
        "--epochs", EPOCHS, "--batch-size", BATCH, "--hidden-channels", HIDDEN,
        "--n-modes", MODES, "--learning-rate", 5e-3, "--loss", "h1", "--seed", seed,
        "--out", folder,
    ]  # fmt: skip
    start = time.perf_counter()
    _run([str(word) for word in command])
    seconds = time.perf_counter() - start
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    tests = [line for line in map(json.loads, lines) if line["event"] == "test"]
    return {
        "error_16": tests[0]["relative_l2"],
        "error_32": tests[1]["relative_l2"],
        "seconds": seconds,
    }


def run_peer(seed: int) -> dict[str, float]:
    """The same by neuraloperator, in a fresh process; see :func:`peer`."""
    start = time.perf_counter()
    output = _run([sys.executable, __file__, "--peer", str(seed)])
    result = json.loads(output.splitlines()[-1])
    return {**result, "seconds": time.perf_counter() - start}


def peer(files: dict[str, Path], seed: int) -> dict[str, float]:
    """neuraloperator's example of training on Darcy flow, with our sizes.

    Its Trainer, AdamW, cosine schedule, H1 loss and normalisers of input and output.
    """
    import torch
    from neuralop import H1Loss, LpLoss, Trainer
    from neuralop.data.datasets.pt_dataset import PTDataset
    from neuralop.models import FNO
    from neuralop.training import AdamW

    torch.manual_seed(seed)
    data = PTDataset(
        files["train16"].parent,
        "darcy",
        n_train=1000,
        n_tests=[50, 50],
        batch_size=BATCH,
        test_batch_sizes=[BATCH, BATCH],
        train_resolution=16,
        test_resolutions=[16, 32],
        encode_input=True,
        encode_output=True,
    )
    loader = torch.utils.data.DataLoader(
        data.train_db, batch_size=BATCH, shuffle=True, num_workers=0
    )
    tests = {
        size: torch.utils.data.DataLoader(db, batch_size=BATCH, shuffle=False)
        for size, db in data.test_dbs.items()
    }
    model = FNO((MODES, MODES), 1, 1, hidden_channels=HIDDEN)
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    h1, l2 = H1Loss(d=2), LpLoss(d=2, p=2)
    trainer = Trainer(
        model=model,
        n_epochs=EPOCHS,
        device="cpu",
        data_processor=data.data_processor,
        eval_interval=1,
    )
    start = time.perf_counter()
    errors = trainer.train(
        loader,
        tests,
        optimizer,
        scheduler,
        training_loss=h1,
        eval_losses={"h1": h1, "l2": l2},
    )
    return {
        "error_16": float(errors["16_l2"]),
        "error_32": float(errors["32_l2"]),
        "training": time.perf_counter() - start,
    }


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("jax", "flax", "torch", "neuraloperator"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def main() -> None:
    from realdata import darcy_files

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = darcy_files()
    if options.peer is not None:
        print(json.dumps(peer(files, options.peer)))
        return
    rows = []
    print(f"{'':16}{'seed':>5}{'16x16':>9}{'32x32':>9}{'seconds':>9}{'training':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            runs = {"jaxops": run_ours(files, seed, Path(folder) / str(seed))}
            if not options.ours_only:
                runs["neuraloperator"] = run_peer(seed)
            for name, result in runs.items():
                rows.append({"name": name, "seed": seed, **result})
                training = result.get("training")
                print(
                    f"{name:16}{seed:5}{result['error_16']:9.4f}"
                    f"{result['error_32']:9.4f}{result['seconds']:9.1f}"
                    + (f"{training:10.1f}" if training else ""),
                    flush=True,
                )
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        means = [
            statistics.mean(row[key] for row in mine)
            for key in ("error_16", "error_32", "seconds")
        ]
        print(f"{name:16} mean{means[0]:9.4f}{means[1]:9.4f}{means[2]:9.1f}")
    if options.json:
        record = {"date": date.today().isoformat(), "versions": _versions()}
        record |= {"epochs": EPOCHS, "batch": BATCH, "hidden": HIDDEN, "modes": MODES}
        options.json.write_text(json.dumps({**record, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
