"""Charts: SVG, PNG and CSV show what the chart describes."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.pages.charts import Chart, Series, ticks, to_csv, to_png, to_svg

LINE = Series("a < b", (1.0, 2.0, 3.0), (0.5, 0.7, 0.6), (0.4, 0.6, 0.5), (0.6, 0.8, 0.7))
POINTS = Series("points", (1.5, 2.5), (0.55, 0.65), kind="points", labels=("one", 'two "quoted"'))
BARS = Series("bars", (0.0, 1.0), (0.3, -0.1), kind="bars", labels=("first", "second"))
CHART = Chart("name", "Title & all", "x", "y", (LINE, POINTS), digits=3)


def marks(svg: str) -> list[ElementTree.Element]:
    """Return the elements that hovering shows a text for."""
    root = ElementTree.fromstring(svg)
    return [element for element in root.iter() if element.get("data-tip")]


def test_every_point_of_the_svg_has_its_text() -> None:
    tips = [element.get("data-tip") for element in marks(to_svg(CHART))]
    assert len(tips) == 5
    assert tips[0] == "a < b: 1, 0.500 [0.400, 0.600]"
    assert tips[4] == 'two "quoted": 2.5, 0.650'


def test_higher_values_are_drawn_higher_and_within_the_frame() -> None:
    circles = [element for element in marks(to_svg(CHART)) if element.tag.endswith("circle")]
    places = [(float(element.get("cx", "")), float(element.get("cy", ""))) for element in circles]
    assert places[0][0] < places[1][0] < places[2][0]
    assert places[1][1] < places[2][1] < places[0][1]
    assert all(0 < x < 640 and 0 < y < 380 for x, y in places)


def test_bars_are_as_long_as_their_values() -> None:
    bars = marks(to_svg(Chart("bars", "t", "x", "y", (BARS,))))
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)


def test_csv_holds_all_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(CHART))))
    assert [float(row["y"]) for row in rows] == [*LINE.y, *POINTS.y]
    assert rows[0]["low"] == "0.4" and rows[3]["low"] == "" and rows[3]["label"] == "one"


@pytest.mark.slow
@pytest.mark.parametrize("chart", [CHART, Chart("bars", "t", "x", "y", (BARS,), log_x=False)])
def test_png_is_the_same_each_time(chart: Chart) -> None:
    first = to_png(chart)
    assert first.startswith(b"\x89PNG")
    assert first == to_png(chart)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a$_$b", "$x$", "rev_$_per_$", "cost $ and price $", r"a\$b", "$", r"\frac$$"]
)
def test_dollars_in_names_are_not_mathematics(name: str) -> None:
    lines = replace(LINE, name=name), replace(POINTS, name=name)
    bars = replace(BARS, labels=(name, "b"), name=name), replace(BARS, labels=(name, "b"), name="other")
    for series in (lines, bars):
        assert to_png(Chart("name", name, name, name, series, log_x=series == lines)).startswith(b"\x89PNG")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_cover_the_range(low: float, width: float) -> None:
    values = ticks(low, low + width)
    assert values == sorted(values)
    assert 1 <= len(values) <= 12


def test_logarithmic_axis_spaces_by_ratio() -> None:
    chart = Chart("n", "t", "x", "y", (Series("s", (10.0, 100.0, 1000.0), (1.0, 2.0, 3.0)),), log_x=True)
    xs = [float(element.get("cx", "")) for element in marks(to_svg(chart))]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def test_series_of_different_lengths_and_empty_charts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values of x, but 2 of y"):
        Series("s", (1.0, 2.0, 3.0), (1.0, 2.0))
    with pytest.raises(ValueError, match="no points"):
        to_svg(Chart("n", "t", "x", "y", ()))
