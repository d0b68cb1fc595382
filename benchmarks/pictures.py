"""Pictures of records: bars of times against ours, and lines of how they grow."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator  # noqa: E402

from benchmarks.measuring import our_name  # noqa: E402
from models.atomic import replace_file  # noqa: E402

DPI = 200
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
OUR_COLOR = "#c2410c"
COLORS = ("#1e3a5f", "#4f7cac", "#8fb3d9", "#6b7280", "#9ca3af", "#c4c9d1", "#a3b18a")
FNO_PEERS = ("neuraloperator", "neuraloperator compiled")
VOLUME_PEERS = ("torch", "pytorch", "monai", "xla")  # how their names begin


class Bar(NamedTuple):
    contender: str
    ratio: float  # to ours
    median_ms: float


Groups = dict[str, list[Bar]]  # by the label of a case, ours first


def draw_training(records: dict[str, list[dict]], path: Path) -> bool:
    """Training steps of FNOs, a panel a platform; False where there is none.

    Args:
        records: by the benchmark's name; those of fno and jax_peers are drawn. The JAX
            peers' ratios are to ours with their architecture.
        path: of a PNG file.
    """
    panels: dict[str, Groups] = {}
    for script in ("fno", "jax_peers"):
        for record in records.get(script, ()):
            for row in record["rows"]:
                if row["pass"] != "train step":
                    continue
                chosen = [row["peer"]] if "peer" in row else FNO_PEERS
                groups = panels.setdefault(_title(record), {})
                bars = _bars(row["results"], chosen)
                # Ours is there once: the peers of a case share its one bar.
                known = groups.setdefault(row["case"], bars[:1])
                known += bars[1:]
    return _draw_bars(panels, "training step, time of ours = 1", path)


def draw_volumes(records: dict[str, list[dict]], path: Path) -> bool:
    """Volumes and 3D convolutions with gradients, a panel a platform; as above."""
    panels: dict[str, Groups] = {}
    for script in ("tiles", "sr", "conv3d"):
        for record in records.get(script, ()):
            for row in record["rows"]:
                if row.get("precision", "float32") != "float32":
                    continue
                if script == "conv3d" and row["pass"] == "forward":
                    continue
                chosen = [
                    name
                    for name in row["results"]
                    if name.lower().startswith(VOLUME_PEERS)
                ]
                if chosen:
                    kind = {"conv3d": "conv3d ", "tiles": "enlarge "}.get(script, "")
                    label = f"{kind}{row['case']}\n{row['pass']}"
                    groups = panels.setdefault(_title(record), {})
                    groups[label] = _bars(row["results"], chosen)
    return _draw_bars(panels, "time of ours = 1", path)


def _title(record: dict[str, Any]) -> str:
    return f"{record['platform'].upper()}, {record['chip']}"


def _bars(results: dict[str, dict], chosen: Iterable[str]) -> list[Bar]:
    names = {our_name(results): "ours", **{name: name for name in chosen}}
    return [
        Bar(shown, results[name]["ratio"], results[name]["median_ms"])
        for name, shown in names.items()
        if name in results
    ]


def _draw_bars(panels: dict[str, Groups], axis_label: str, path: Path) -> bool:
    if not panels:
        return False
    contenders = dict.fromkeys(
        bar.contender
        for groups in panels.values()
        for bars in groups.values()
        for bar in bars
    )
    peers = [name for name in contenders if name != "ours"]
    colors = {"ours": OUR_COLOR}
    colors |= {name: COLORS[i % len(COLORS)] for i, name in enumerate(peers)}
    lines = max(
        sum(len(bars) + 1 for bars in groups.values()) for groups in panels.values()
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1,
            len(panels),
            figsize=(8.4, 0.9 + 0.17 * lines),
            squeeze=False,
            layout="constrained",
        )
        for axis, (title, groups) in zip(axes[0], panels.items(), strict=True):
            place, ticks = 0.0, []
            for bars in groups.values():
                for i, bar in enumerate(bars):
                    color = colors[bar.contender]
                    axis.barh(place + i, bar.ratio, color=color, height=0.86)
                    text = f"{bar.ratio:.1f}x, " if bar.contender != "ours" else ""
                    text = f" {text}{_time_text(bar.median_ms)}"
                    axis.text(bar.ratio, place + i, text, va="center", fontsize=6.5)
                ticks.append(place + (len(bars) - 1) / 2)
                place += len(bars) + 0.8
            axis.set_yticks(ticks, list(groups))
            axis.tick_params(axis="y", length=0)
            axis.margins(y=0.02)
            axis.invert_yaxis()
            longest = max(bar.ratio for bars in groups.values() for bar in bars)
            axis.set_xlim(0, 1.35 * longest)
            axis.axvline(1, color=OUR_COLOR, linewidth=0.7, zorder=0)
            axis.set_title(title)
            axis.set_xlabel(axis_label)
        handles = [plt.Rectangle((0, 0), 1, 1, color=colors[name]) for name in colors]
        figure.legend(
            handles, list(colors), loc="outside lower center", ncols=4, frameon=False
        )
        _save(figure, path)
    return True


def _time_text(milliseconds: float) -> str:
    """Two or three digits, in milliseconds or seconds."""
    value, unit = milliseconds, "ms"
    if milliseconds >= 1000:
        value, unit = milliseconds / 1000, "s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def draw_growth(
    chip: str, sweeps: dict[tuple[str, str], list[dict[str, Any]]], path: Path
) -> None:
    """Time with its floor, and temporaries below, a column a sweep.

    Args:
        chip: where it was measured.
        sweeps: rows of benchmarks/growth.py by (sweep, pass), the value growing.
        path: of a PNG file.
    """
    columns = list(dict.fromkeys(sweep for sweep, _ in sweeps))
    colors = {"train step": OUR_COLOR, "forward": COLORS[0]}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2,
            len(columns),
            figsize=(1 + 1.45 * len(columns), 3.8),
            sharex="col",
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        ends: dict[str, dict[str, tuple[float, str]]] = {"time": {}, "memory": {}}
        for (sweep, name), rows in sweeps.items():
            column, color = columns.index(sweep), colors[name]
            values = [row["value"] for row in rows]
            time, floor = (
                [row["results"][key]["median_ms"] for row in rows]
                for key in ("ours", "floor")
            )
            memory = [row["results"]["temporaries"]["bytes"] / 1e6 for row in rows]
            top, bottom = axes[:, column]
            top.loglog(values, time, "o-", color=color, markersize=3)
            top.loglog(values, floor, ":", color=color)
            bottom.loglog(values, memory, "o-", color=color, markersize=3)
            top.set_title(sweep)
            bottom.set_xticks(values, [str(value) for value in values])
            bottom.xaxis.set_minor_locator(NullLocator())
            if column == len(columns) - 1:
                ends["time"] |= {
                    name: (time[-1], color),
                    f"{name}, floor": (floor[-1], color),
                }
                ends["memory"][name] = memory[-1], color
        for axis, labels in zip(axes[:, -1], ends.values(), strict=True):
            _label_ends(axis, labels)
        axes[0, 0].set_ylabel(f"milliseconds\n{chip}")
        axes[1, 0].set_ylabel("temporaries, MB")
        for axis in axes.flat:
            axis.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(color="#e5e7eb", linewidth=0.5)
            axis.set_axisbelow(True)
        _save(figure, path)


def _label_ends(axis, labels: dict[str, tuple[float, str]]) -> None:
    """Names at the right end of lines, moved apart where they would touch.

    Args:
        axis: with a logarithmic y axis that has its limits.
        labels: the y at which a line ends, and its colour, by name.
    """
    low, high = (math.log(limit) for limit in axis.get_ylim())
    place, gap = -math.inf, 0.09
    for text, (y, color) in sorted(labels.items(), key=lambda item: item[1][0]):
        place = max((math.log(y) - low) / (high - low), place + gap)
        axis.annotate(
            text,
            (1.04, place),
            xycoords="axes fraction",
            va="center",
            color=color,
            fontsize=7,
        )


def _save(figure, path: Path) -> None:
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=DPI, format="png")
    plt.close(figure)
