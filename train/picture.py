"""One picture of a predictor's work: input, truth, prediction and error, row by row."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.atomic import replace_file

INK = "#222222"


class Row(NamedTuple):
    """A sample to draw.

    Attributes:
        label: its name.
        input: (*grid, in_channels).
        prediction: (*grid, out_channels).
        target: of the same shape, or None where the truth is not known.
        error: relative L2 error, as a fraction, or None.
    """

    label: str
    input: np.ndarray
    prediction: np.ndarray
    target: np.ndarray | None = None
    error: float | None = None


def draw(path: Path, rows: Sequence[Row], title: str = "") -> None:
    """Write a PNG with a row a sample; whole, or not at all.

    Two grid axes are drawn as images (x to the right, y upwards), one as lines, three
    as the slice half way along the last axis. Truth and prediction of a row share their
    scale. The first channel is drawn. Rows may differ in resolution.

    Args:
        path: of the picture.
        rows: at least one; all with the same number of grid axes, all with or all
            without a target.
        title: above all.
    """
    # Imported here, so that training alone does not need matplotlib; its objects rather
    # than pyplot, so that no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_line = rows[0].prediction.ndim == 2
    has_target = rows[0].target is not None
    columns = 1 + (1 if is_line else 2) * has_target + 1
    width, height = (4.0, 2.5) if is_line else (2.9, 2.6)
    size = (width * columns, height * len(rows) + 0.6)
    figure = Figure(
        figsize=size, dpi=120, layout="constrained" if is_line else "compressed"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        (_draw_lines if is_line else _draw_images)(figure, line, row)
    if title:
        # A file's name: no formula, and perhaps not text at all.
        shown = title.encode("utf-8", "replace").decode()
        figure.suptitle(shown, fontsize=12, color=INK, parse_math=False)
    with replace_file(path) as temporary:
        figure.savefig(temporary, format="png", bbox_inches="tight")


def _draw_images(figure, axes, row):
    source, prediction = _plane(row.input), _plane(row.prediction)
    slice_note = ""
    if row.prediction.ndim == 4:
        middle = row.prediction.shape[2] // 2
        slice_note = f", z = {middle} of {row.prediction.shape[2]}"
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel(f"{row.label}\n{_size(row)}{slice_note}", color=INK)
    image = axes[0].imshow(source.T, origin="lower", cmap="cividis")
    axes[0].set_title("input", fontsize=10, color=INK)
    _add_scale(figure, axes[0], image)
    if row.target is None:
        image = axes[1].imshow(prediction.T, origin="lower", cmap="viridis")
        axes[1].set_title("prediction", fontsize=10, color=INK)
        _add_scale(figure, axes[1], image)
        return

    truth = _plane(row.target)
    low = min(truth.min(), prediction.min())
    high = max(truth.max(), prediction.max())
    for axis, field, name in ((axes[1], truth, "truth"), (axes[2], prediction, None)):
        image = axis.imshow(
            field.T, origin="lower", cmap="viridis", vmin=low, vmax=high
        )
        axis.set_title(name or _title("prediction", row), fontsize=10, color=INK)
        _add_scale(figure, axis, image)
    error = prediction - truth
    limit = np.abs(error).max() or 1.0
    image = axes[3].imshow(
        error.T, origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit
    )
    axes[3].set_title("prediction - truth", fontsize=10, color=INK)
    _add_scale(figure, axes[3], image)


def _add_scale(figure, axis, image):
    bar = figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
    bar.ax.locator_params(nbins=5)
    bar.formatter.set_powerlimits((-2, 3))
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.get_offset_text().set_fontsize(8)
    bar.update_ticks()


def _draw_lines(figure, axes, row):
    del figure
    points = np.arange(len(row.prediction)) / len(row.prediction)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel(f"{row.label}\n{_size(row)} points", color=INK)
    source = np.arange(len(row.input)) / len(row.input)
    axes[0].plot(source, row.input[:, 0], color=INK, linewidth=1.2)
    axes[0].set_title("input", fontsize=10, color=INK)
    if row.target is not None:
        style = {"color": "#9aa5b1", "linewidth": 3.5, "label": "truth"}
        axes[1].plot(points, row.target[:, 0], **style)
        error = row.prediction[:, 0] - row.target[:, 0]
        axes[2].plot(points, error, color="#b2182b", linewidth=1.2)
        axes[2].axhline(0, color=INK, linewidth=0.6)
        axes[2].set_title("prediction - truth", fontsize=10, color=INK)
    style = {"color": "#2166ac", "linewidth": 1.2, "label": "prediction"}
    axes[1].plot(points, row.prediction[:, 0], **style)
    axes[1].set_title(_title("prediction", row), fontsize=10, color=INK)
    axes[1].legend(fontsize=8, frameon=False)


def _title(name, row):
    return name if row.error is None else f"{name}, relative L2 {row.error:.2%}"


def _size(row):
    return " x ".join(str(size) for size in row.prediction.shape[:-1])


def _plane(field):
    """(x, y) of a (x, y[, z], channels) field: first channel, half way along z."""
    field = field[..., 0]
    return field[:, :, field.shape[2] // 2] if field.ndim == 3 else field
