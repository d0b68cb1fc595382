"""How far an enlargement is, for people."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.report import clock
from train.tiles import Tiling


class TileReport:
    """A bar of tiles with the time left; lines, a tenth of the work each, where piped.

    Use as a context manager.
    """

    def __init__(self, num_volumes: int, console: Console):
        self.num_volumes, self.console = num_volumes, console
        self.began = None
        self.bar = Progress(
            TextColumn("tiles"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=1.0, text="")
        self.told = 0

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def tile(self, tiling: Tiling, state) -> None:
        """A tile is done."""
        part = (state.volume + _part_of_volume(tiling, state)) / self.num_volumes
        now = time.monotonic()
        if self.began is None:  # what was done before tells nothing of the speed
            self.began = (now, part)
        text = f"{part:.0%}"
        start, first = self.began
        if part > first:
            text += f"  {clock((now - start) / (part - first) * (1 - part))} left"
        self.bar.update(self.task, completed=part, text=text)
        if not self.console.is_terminal and int(10 * part) > self.told:
            self.told = int(10 * part)
            self.console.print(f"tiles    {text}")

    def statistics(self, tiling: Tiling, state) -> None:
        """A tile of a pass over a volume is done."""
        collected = state.statistics
        text = f"statistics of volume {state.volume + 1}, pass {collected.passes + 1}"
        self.bar.update(
            self.task, text=f"{text}: {collected.tiles} of {tiling.count} tiles"
        )


def _part_of_volume(tiling: Tiling, state) -> float:
    """The part of the volume that runs which is done."""
    slabs = tiling.slabs
    done = sum(len(slab) for slab in slabs if slab[0].spans[0].stop <= state.slices)
    return (done + state.tiles) / tiling.count
