"""Slices, gains, thresholds and the histogram on the page of a run; pages of older reports do without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recap_ctr.evaluation.slices import Breakdown, FieldValues, ScoredRows, break_down
from recap_ctr.pages.breakdown import breakdown_sections
from recap_ctr.pages.charts import to_csv
from recap_ctr.pages.run import page
from recap_ctr.training.report import parse_report
from tests.support.browser import Browser, browser_needed
from tests.support.example_reports import fit_values

LONG = "a value that is rather long, and has no/place/to/break/it/except/between/letters"


@pytest.fixture
def breakdown() -> Breakdown:
    rng = np.random.default_rng(0)
    logits = rng.normal(-1.5, 1.0, 2_000)
    labels = (rng.random(2_000) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    values = FieldValues(rng.integers(0, 3, 2_000), lambda code: ("phone", "desktop", LONG)[code])
    times = np.sort(rng.random(2_000))
    return break_down("test", ScoredRows(labels, logits), {"device": values}, times, "2026-01-0{:.0f}".format)


def report_values(breakdown: Breakdown) -> dict[str, Any]:
    values = fit_values()
    values["data"]["split"] = "by time; train until 2026-01-01, valid until 2026-01-02, test until 2026-01-03"
    return {**values, "breakdown": breakdown.to_json(), "command": f"recap fit clicks.csv --label {'x' * 90}"}


def test_every_figure_of_the_breakdown_is_on_the_page(breakdown: Breakdown) -> None:
    shown = page(parse_report(report_values(breakdown)))
    sections = {section.title: section for section in shown.sections}
    device, periods = sections["Slices"].tables
    assert device.header[0] == "device" and len(device.rows) == 3 and len(periods.rows) == 10
    first = breakdown.fields[0].slices[0]
    assert first.auc is not None and first.calibration_ratio is not None
    assert device.rows[0][3].startswith(f"{100 * first.auc:.2f} ± ")
    assert device.rows[0][5] == f"{first.calibration_ratio:.3f}"
    gain, lift = sections["Ranking"].charts
    assert gain.series[0].y[1] == pytest.approx(100 * breakdown.gains[0].clicks)
    assert lift.series[0].y[-1] == pytest.approx(1.0)
    assert len(sections["Ranking"].tables[0].rows) == len(breakdown.thresholds)
    histogram = sections["Scores"].charts[0]
    assert sum(histogram.series[0].y) == pytest.approx(100.0)
    assert to_csv(histogram).count("\n") == 1 + 2 * len(breakdown.histogram)
    html = shown.to_html()
    assert "recap fit clicks.csv" in html and "by time; train until 2026-01-01" in html


def test_slices_with_few_clicks_show_no_figure_that_is_noise() -> None:
    labels = np.zeros(400, np.uint8)
    labels[[0, 1, 2, *range(200, 220)]] = 1
    rows = ScoredRows(labels, np.random.default_rng(0).normal(-2.0, 1.0, 400))
    values = FieldValues(np.arange(400) // 200, lambda code: ("few", "enough")[code])
    section = breakdown_sections(break_down("test", rows, {"site": values}))[0]
    shown = {row[0]: row for row in section.tables[0].rows}
    assert shown["few"][3] == shown["few"][5] == "" and shown["few"][4] != ""
    assert " ± " in shown["enough"][3] and shown["enough"][5] != ""
    assert "fewer than 10 clicks" in section.text


def test_a_breakdown_without_fields_times_or_clicks_shows_what_it_has() -> None:
    rows = ScoredRows(np.zeros(20, np.uint8), np.linspace(-2, 0, 20))
    titles = [section.title for section in breakdown_sections(break_down("valid", rows, {}))]
    assert titles == ["Scores"]


def test_the_frontier_has_intervals_where_the_report_has_errors() -> None:
    values = fit_values()
    frontier = next(chart for chart in page(parse_report(values)).charts if chart.name == "frontier")
    for series in frontier.series:
        half = 100 * 1.96 * 0.001
        assert series.low == pytest.approx([y - half for y in series.y])
        assert series.high == pytest.approx([y + half for y in series.y])
    assert "95 % intervals" in frontier.note
    for ensemble in values["ensembles"]:
        del ensemble["metrics"]["test"]["raw"]["auc_error"]
    del values["metrics"]["test"]["raw"]["auc_error"]
    older = next(chart for chart in page(parse_report(values)).charts if chart.name == "frontier")
    assert not any(series.low for series in older.series) and "95 %" not in older.note


def test_click_rates_have_intervals_where_rows_have_no_weights(breakdown: Breakdown) -> None:
    values = report_values(breakdown)
    for weight, has_intervals in ((1.0, True), (3.0, False)):
        for part in values["metrics"]["test"]["reliability"]:
            part["rows"] *= weight
        charts = {chart.name: chart for chart in page(parse_report(values)).charts}
        for name, place in (("reliability", 1), ("periods", 0)):
            series = charts[name].series[place]
            assert ("95 % interval" in charts[name].note) == bool(series.low) == has_intervals
            assert all(
                low < y < high for low, y, high in zip(series.low, series.y, series.high, strict=False)
            )
        assert charts["periods"].note.startswith("The first period is from 2026-01-0")


OFF_SCREEN = """[...document.querySelectorAll('td, th, text, pre, p, li, figcaption')].filter((node) => {
  const box = node.getBoundingClientRect();
  const frame = node.closest('svg')?.getBoundingClientRect() ?? { left: 0, right: innerWidth };
  return box.width && (box.right > frame.right + 1 || box.left < frame.left - 1);
}).map((node) => node.textContent)"""
AXES = """[...document.querySelectorAll('figure > svg')].map((svg) => [
  [...svg.querySelectorAll('.tick')].filter((tick) => tick.getAttribute('text-anchor') === 'middle').length,
  [...svg.querySelectorAll('.tick')].filter((tick) => tick.getAttribute('text-anchor') === 'end').length])"""
OVERLAPS = """[...document.querySelectorAll('figure > svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([name, a], at) => boxes.slice(at + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
    .map(([other]) => `${svg.getAttribute('aria-label')}: ${name} | ${other}`));
})"""

BESIDE = """[...document.querySelectorAll('figure > strong')].filter((title) =>
  title.getBoundingClientRect().bottom > title.nextElementSibling.getBoundingClientRect().top + 1
).map((title) => title.textContent)"""  # Titles that are not above their charts.
SCROLLED = """[...document.querySelectorAll('.scroll, pre')].filter(
  (box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.textContent)"""  # Boxes that cut what they hold.
UNFOLD = "document.querySelectorAll('details').forEach((part) => { part.open = true; })"


@pytest.mark.slow
@browser_needed
@pytest.mark.parametrize("width", [390, 1280])
def test_no_value_is_off_screen_and_every_axis_has_ticks(
    breakdown: Breakdown, tmp_path: Path, width: int
) -> None:
    shown = page(parse_report(report_values(breakdown)))
    path = shown.write(tmp_path)
    browser = Browser(tmp_path / "profile", width, 900)
    try:
        browser.open(path.as_uri())
        browser.wait("document.readyState === 'complete' && document.querySelector('table.cards') !== null")
        browser.evaluate(UNFOLD)
        assert browser.evaluate(OFF_SCREEN) == []
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ticks = browser.evaluate(AXES)
        assert len(ticks) == len(shown.charts)
        assert all(across >= 2 and up >= 2 for across, up in ticks), ticks
        assert browser.evaluate(OVERLAPS) == []
        assert browser.evaluate(BESIDE) == []
        assert browser.evaluate(SCROLLED) == []
    finally:
        browser.close()
