"""A picture of an enlarged volume: slices in three planes, and how well scales agree.

Rows are the planes xy, xz and yz through the part of the test volume where most is to
be seen; columns the input, cubic interpolation, the network and the truth; below them,
the Fourier shell correlation of both with the truth.
"""

from pathlib import Path

import numpy as np

from models.atomic import replace_file
from train.volume_metrics import ShellCorrelation

INK = "#222222"
COLOURS = {"cubic": "#c2571a", "ours": "#1f5fa8"}
PLANES = (("xy", 0), ("xz", 1), ("yz", 2))
SHOWN = 96  # high-resolution voxels an axis: larger volumes are cut, to show voxels


def draw(
    path: Path,
    volumes: dict[str, np.ndarray],
    correlations: dict[str, ShellCorrelation],
    title: str,
    unit: str = "voxel",
    voxel_size: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> None:
    """Write a PNG; whole, or not at all.

    Args:
        path: of the picture.
        volumes: "input" (z, y, x) at low resolution, then "cubic", "ours" and "truth"
            at high resolution, all in the same unit of intensity.
        correlations: of "cubic" and "ours" with the truth.
        title: above all.
        unit: of the voxel size.
        voxel_size: (z, y, x) of the high-resolution volumes, for shapes that are true.
    """
    # Imported here, so that training alone does not need matplotlib; its objects rather
    # than pyplot, so that no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    truth = volumes["truth"]
    low, high = np.nanpercentile(truth, (0.5, 99.8))
    point = most_to_see(truth)
    figure = Figure(figsize=(11.0, 11.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        shown = title.encode("utf-8", "replace").decode()
        figure.suptitle(shown, fontsize=12, color=INK, parse_math=False)
    grid = figure.add_gridspec(4, 4, height_ratios=(3, 3, 3, 2.2))
    for row, (plane, axis) in enumerate(PLANES):
        for column, (name, volume) in enumerate(volumes.items()):
            axes = figure.add_subplot(grid[row, column])
            scale = [t // n for t, n in zip(truth.shape, volume.shape, strict=True)]
            down, right = (
                size * s
                for i, (size, s) in enumerate(zip(voxel_size, scale, strict=True))
                if i != axis
            )
            axes.imshow(
                _plane(volume, axis, point, scale),
                cmap="gray",
                vmin=low,
                vmax=max(high, low + 1e-6),
                aspect=down / right,
            )
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                size = " x ".join(map(str, volume.shape))
                axes.set_title(f"{name}\n{size}", fontsize=10, color=INK)
            if column == 0:
                at = f"{'zyx'[axis]} = {point[axis]}"
                axes.set_ylabel(f"{plane}, {at}", color=INK)
    axes = figure.add_subplot(grid[3, :])
    for name, curve in correlations.items():
        label = f"{name}: {curve} {unit}"
        axes.plot(
            curve.frequency, curve.correlation, color=COLOURS[name], lw=2, label=label
        )
    axes.axhline(0.143, color="#999999", lw=1)
    axes.set_ylim(-0.1, 1.05)
    axes.set_xlabel(f"spatial frequency (1/{unit})", color=INK)
    axes.set_ylabel("correlation with the truth", color=INK)
    axes.set_title(
        "Fourier shell correlation; the legend tells the length where it falls below "
        "0.143, <= where it never does",
        fontsize=10,
        color=INK,
    )
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with replace_file(path) as temporary:
        figure.savefig(temporary, format="png", bbox_inches="tight")


def most_to_see(volume: np.ndarray) -> tuple[int, int, int]:
    """The planes (z, y, x) whose voxels vary most."""
    point = []
    for axis in range(3):
        others = tuple(other for other in range(3) if other != axis)
        point.append(int(np.argmax(np.nan_to_num(np.nanvar(volume, axis=others)))))
    return tuple(point)


def _plane(volume, axis, point, scale):
    """The plane through a point of the truth, cut to what is shown around it."""
    box = []
    for i, (at, size, s) in enumerate(zip(point, volume.shape, scale, strict=True)):
        if i == axis:
            box.append(at // s)
            continue
        length = min(size, SHOWN // s)
        start = min(max(at // s - length // 2, 0), size - length)
        box.append(slice(start, start + length))
    return volume[tuple(box)]
