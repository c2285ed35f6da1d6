"""Figures: valid files, the same bytes each time, no trace of the machine; and the files beside them."""

import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from benchmarks import summary
from recap_ctr.bench import figures
from recap_ctr.bench.figures import Name, publish, render, write_names
from tests.support.bench_files import check_figure_files


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    figures.band(axes, 2.0, 0.5)
    figures.series(axes, 0, [1e5, 2e5, 1e6], [1.0, 2.0, 3.0], "a line")
    figures.parameter_axis(axes, log=True)
    figures.legend(figure, axes, columns=2)
    write_names(figure, axes, [Name("a point", 2e5, 2.0, 0)])


@pytest.mark.slow
def test_same_numbers_same_bytes_whatever_the_machines_own_settings() -> None:
    first = render(draw, 3.0)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False}):
        assert render(draw, 3.0) == first
    assert matplotlib.rcParams["svg.hashsalt"] != "recap", "nothing is left behind"


@pytest.mark.slow
def test_text_of_an_svg_is_text() -> None:
    svg = render(draw, 3.0)["svg"].decode()
    for text in ("a line", "a point", "stored parameters", "200k", "± seed standard deviation"):
        assert text in svg


@pytest.mark.slow
def test_names_with_dollars_are_no_mathematics() -> None:
    def drawn(figure: Figure) -> None:
        axes = figure.subplots()
        figures.series(axes, 0, [1.0, 2.0], [1.0, 2.0], "a$_$b")
        figures.legend(figure, axes, columns=1)
        write_names(figure, axes, [Name("$_per_$", 1.5, 1.5, 0)])

    svg = render(drawn, 3.0)["svg"].decode()
    assert "a$_$b" in svg and "$_per_$" in svg


def test_names_hide_neither_points_nor_each_other() -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    spots = [(0.5 + 0.01 * number, 0.5) for number in range(40)]
    axes.plot(*zip(*spots, strict=True), marker="o", linestyle="")
    axes.set_xlim(0, 1)
    write_names(figure, axes, [Name(f"point {number}", x, y, 0) for number, (x, y) in enumerate(spots)])
    figure.draw_without_rendering()

    boxes = [text.get_window_extent() for text in axes.texts]
    assert 2 <= len(boxes) < len(spots), "some are written, and where there is no room none"
    assert axes.texts[0].get_text() == "point 0", "the first chooses first"
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert not any(box.contains(*axes.transData.transform(spot)) for spot in spots)


@pytest.mark.slow
def test_publish_writes_all_numbers(tmp_path: Path) -> None:
    points = [{"name": "a", "auc": (0.5, 0.7)}, {"name": "b", "auc": (0.4,)}]
    for _ in range(2):
        publish(tmp_path / "toy", "text\n", {"split": "test"}, points, draw, height=3.0)
        check_figure_files(tmp_path / "toy")
    assert (tmp_path / "toy" / "toy.md").read_text() == "text\n"
    stored = json.loads((tmp_path / "toy" / "toy.json").read_text())
    assert stored["points"] == [{"name": "a", "auc": [0.5, 0.7]}, {"name": "b", "auc": [0.4]}]


def test_summary_shows_the_figure_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "HERE", tmp_path / "benchmarks")
    assert summary.tables_of("ml-1m") == []
    for name in ("capacity", "variance"):
        directory = tmp_path / "benchmarks" / "ml-1m" / name
        directory.mkdir(parents=True)
        (directory / f"{name}.md").write_text("| a |\n")
    (tmp_path / "benchmarks" / "ml-1m" / "capacity" / "capacity.png").touch()
    assert summary.tables_of("ml-1m") == [
        "### `recap bench variance`",
        "",
        "| a |",
        "",
        "### `recap bench capacity`",
        "",
        "| a |",
        "",
        "![capacity, ml-1m](../benchmarks/ml-1m/capacity/capacity.png)",
        "",
    ]
