"""What people see of a run while it goes: progress in the terminal, metrics.jsonl."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class MetricsWriter:
    """Append-only ``metrics.jsonl``: one JSON object a line, on the disk when written.

    A run that goes on from a checkpoint cuts the file back to the length that it had
    then, so the lines are those of a run that never stopped. For the same reason they
    hold no times and no dates.
    """

    def __init__(self, path: Path, length: int = 0):
        """Cut the file to its first ``length`` bytes, or start it.

        Raises:
            ValueError: if the file is shorter than that: it is another run's, or lines
                were taken out.
        """
        self.path = Path(path)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < length:
            raise ValueError(
                f"{self.path} must have the {length} bytes that it had when the "
                f"checkpoint was written; it has {size}. Put it back, or start anew "
                "with --overwrite."
            )
        with open(self.path, "ab") as file:
            file.truncate(length)

    @property
    def length(self) -> int:
        """Bytes so far, for the checkpoint."""
        return self.path.stat().st_size

    def write(self, **values: str | float | Sequence[float] | None) -> None:
        """Add a line.

        Raises:
            ValueError: if a number is NaN or infinite, which JSON has not.
        """
        line = json.dumps(values, allow_nan=False) + "\n"
        with open(self.path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


class ProgressReport:
    """A bar with loss, epoch, samples a second and time left; lines where piped.

    Use as a context manager. In a terminal one bar is kept up to date; elsewhere each
    epoch is one line.
    """

    def __init__(
        self,
        epochs: int,
        batches: int,
        batch_size: int,
        start: int = 0,
        console: Console | None = None,
    ):
        """Set the run's extent; ``start`` batches are done already."""
        self.console = console or Console(highlight=False)
        self.epochs, self.batches, self.batch_size = epochs, batches, batch_size
        self.start = self.done = start
        self.loss = ""
        self.errors = ""
        self.began = None
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(
            "",
            total=epochs * batches,
            completed=start,
            epoch=f"{start // batches + 1}/{epochs}",
            text="compiling",
        )

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def step(self, epoch: int, batch: int, loss: float | None) -> None:
        """Note a step; the bar moves when a loss was fetched."""
        self.done = (epoch - 1) * self.batches + batch
        if self.began is None:  # the first step compiles: the speed is that of the rest
            self.began, self.start = time.monotonic(), self.done
        if loss is None:
            return
        self.loss = f"loss {loss:.5f}"
        self.bar.update(
            self.task,
            completed=self.done,
            epoch=f"{epoch}/{self.epochs}",
            text=self._text(),
        )

    def epoch(self, epoch: int, errors: str) -> None:
        """Note an epoch's end, and the test errors in a few words, if any."""
        self.errors = errors or self.errors
        if self.console.is_terminal:
            self.bar.update(self.task, text=self._text())
        else:
            self.console.print(f"epoch {epoch}/{self.epochs}  {self._text()}")

    def _text(self):
        parts = [self.loss, self.errors]
        if self.done > self.start:
            pace = (time.monotonic() - self.began) / (self.done - self.start)
            left = (self.epochs * self.batches - self.done) * pace
            speed = self.batch_size / pace
            speed = f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
            parts += [f"{speed} samples/s", f"{clock(left)} left"]
        return "  ".join(part for part in parts if part)


def error_table(tests: Mapping[str, Mapping[str, float]]) -> str:
    """Test errors, a line a set: {name: its `train.metrics.summary` and samples}."""
    width = max(len(name) for name in tests)
    lines = [f"{'test error':{width + 2}}  samples  relative L2  (worst)  relative H1"]
    for name, errors in tests.items():
        lines.append(
            f"  {name:{width}}  {errors['samples']:7}  {errors['relative_l2']:11.2%}"
            f"  {errors['relative_l2_max']:7.2%}  {errors['relative_h1']:11.2%}"
        )
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds as people write them: 1:02:03, 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
