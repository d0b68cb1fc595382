"""metrics.jsonl, progress on a terminal and in a pipe, and the picture."""

import io

import numpy as np
import pytest
from rich.console import Console

from train.picture import Row, draw
from train.report import (
    MetricsWriter,
    ProgressReport,
    clock,
    error_table,
    read_metrics,
)

ERRORS = {"relative_l2": 0.0123, "relative_l2_max": 0.2, "relative_h1": 0.05}


class TestMetrics:
    def test_lines_come_back(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        writer = MetricsWriter(path)
        writer.write(event="epoch", epoch=1, loss=0.1 + 0.2)
        writer.write(event="test", grid=(3, 4))
        assert read_metrics(path) == [
            {"event": "epoch", "epoch": 1, "loss": 0.1 + 0.2},
            {"event": "test", "grid": [3, 4]},
        ]
        assert writer.length == path.stat().st_size

    def test_lines_after_a_checkpoint_are_dropped(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        writer = MetricsWriter(path)
        writer.write(epoch=1)
        length = writer.length
        writer.write(epoch=2)
        with open(path, "a") as file:
            file.write('{"epoch": 3, "lo')  # killed in the middle of a line
        MetricsWriter(path, length).write(epoch=2, again=True)
        assert read_metrics(path) == [{"epoch": 1}, {"epoch": 2, "again": True}]
        MetricsWriter(path)
        assert read_metrics(path) == []

    def test_a_file_that_lost_lines_is_refused(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text("{}\n")
        with pytest.raises(ValueError, match="the 50 bytes .* it has 3"):
            MetricsWriter(path, 50)
        assert path.read_text() == "{}\n"

    def test_numbers_that_json_lacks_are_refused(self, tmp_path):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        with pytest.raises(ValueError, match="JSON"):
            writer.write(loss=float("nan"))
        assert writer.length == 0


def tell(is_terminal):
    """What a run of two epochs of three batches writes."""
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=is_terminal, width=100, highlight=False
    )
    with ProgressReport(2, 3, batch_size=4, start=0, console=console) as report:
        for epoch in (1, 2):
            for batch in (1, 2, 3):
                report.step(epoch, batch, 0.5 / epoch if batch == 3 else None)
            report.epoch(epoch, "test 0.01230")
            if is_terminal:
                report.bar.refresh()
    return stream.getvalue()


def test_a_pipe_gets_a_line_an_epoch():
    lines = tell(is_terminal=False).splitlines()
    assert len(lines) == 2
    for part in ("epoch 1/2", "loss 0.50000", "test 0.01230", "samples/s", "left"):
        assert part in lines[0]
    assert "epoch 2/2  loss 0.25000" in lines[1]
    assert lines[1].endswith("0:00 left")


def test_a_terminal_gets_a_bar():
    text = tell(is_terminal=True)
    for part in ("1/2", "2/2", "loss 0.25000", "test 0.01230", "samples/s", "left"):
        assert part in text
    assert "━" in text


def test_a_table_of_errors():
    table = error_table(
        {
            "16 x 16": {"samples": 100, **ERRORS},
            "32 x 32 (zero-shot)": {"samples": 50, **ERRORS},
        }
    ).splitlines()
    assert len(table) == 3
    assert "1.23%" in table[1] and "20.00%" in table[1] and "5.00%" in table[1]
    assert len({len(line) for line in table}) == 1


def test_times_as_people_write_them():
    assert [clock(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def row(grid, seed, has_target=True):
    field, error = np.random.default_rng(seed).normal(size=(2, *grid, 1))
    if has_target:
        return Row(f"test {seed}", field, field + 0.1 * error, field, 0.0123)
    return Row(f"test {seed}", field, field)


@pytest.mark.parametrize("has_target", [True, False])
@pytest.mark.parametrize("grids", [[(16,)], [(8, 8), (16, 16)], [(4, 5, 6)]])
def test_a_picture_is_drawn_for_each_kind_of_grid(grids, has_target, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "new" / "picture.png"
    rows = [row(grid, seed, has_target) for seed, grid in enumerate(grids)]
    draw(path, rows, "title")
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[1] > 500
    # Something is drawn in every quarter.
    for half in np.array_split(pixels, 2):
        for quarter in np.array_split(half, 2, axis=1):
            assert quarter.std() > 0.05
    assert [p.name for p in path.parent.iterdir()] == ["picture.png"]


def test_truth_and_prediction_share_their_scale(tmp_path, monkeypatch):
    figures = []
    figure = pytest.importorskip("matplotlib.figure")
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *args, **options: (
            figures.append(self),
            save(self, *args, **options),
        ),
    )
    field = np.arange(12.0).reshape(3, 4, 1)
    draw(tmp_path / "p.png", [Row("a", 0 * field, field - 2, field, 0.5)])
    panels = figures[0].axes[:4]
    source, truth, prediction, error = (panel.images[0] for panel in panels)
    assert truth.get_clim() == prediction.get_clim() == (-2.0, 11.0)
    assert error.get_clim() == (-2.0, 2.0)  # zero is the middle of the colours
    np.testing.assert_array_equal(truth.get_array(), field[..., 0].T)
    assert "relative L2 50.00%" in panels[2].get_title()


def test_a_constant_and_exact_prediction_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    zeros = np.zeros((4, 4, 1))
    draw(tmp_path / "p.png", [Row("zero", zeros, zeros, zeros, 0.0)])
