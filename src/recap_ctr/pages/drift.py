"""The page of drift: the series of each figure, and what is beyond its limit."""

from datetime import UTC, datetime
from pathlib import Path

from recap_ctr.inference.drift import DriftReport
from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.storage.files import write_json

FILE = "drift.json"
MAX_SERIES = 8


def period_name(start: int | None, place: int) -> str:
    """Return the name of a period: when it begins, in UTC, or its number."""
    if start is None:
        return f"rows {place + 1}"
    return datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%d %H:%M").removesuffix(" 00:00")


def lead(report: DriftReport) -> str:
    """Return the answer in one sentence."""
    names = dict.fromkeys(finding.field or "calibration" for finding in report.findings)
    periods = f"{len(report.periods)} period{'s' * (len(report.periods) != 1)}"
    if not names:
        return f"{report.rows:,} rows in {periods}: everything is within its limits."
    return f"{report.rows:,} rows in {periods}: beyond their limits are {', '.join(names)}."


def drift_page(report: DriftReport) -> Page:
    """Return the page: findings, series over the periods, and the last period in numbers."""
    names = [period_name(period.start, place) for place, period in enumerate(report.periods)]
    points = tuple(f"{names[finding.period]}: {finding.sentence}" for finding in report.findings)
    series = Section("Series", text=f"Periods from {names[0]} to {names[-1]}.", charts=tuple(_charts(report)))
    last = report.periods[-1]
    rows = tuple(
        (
            field.name,
            f"{field.missing:.2%}",
            f"{field.unseen:.2%}",
            f"{field.unseen_limit:.2%}",
            f"{field.rare:.2%}",
            f"{field.psi:.3f}",
            f"{field.psi_limit:.3f}",
        )
        for field in last.fields
    )
    header = ("field", "missing", "unseen", "limit", "rare", "stability index", "limit")
    table = Table(header, rows, note=f"{last.rows:,} rows of {names[-1]}.")
    sections = (Section("Findings", points=points),) if points else ()
    return Page("Drift", lead(report), (*sections, series, Section("The last period", tables=(table,))))


def _charts(report: DriftReport) -> list[Chart]:
    places = tuple(float(place + 1) for place in range(len(report.periods)))
    charts = []
    figures = (
        ("psi", "population stability index"),
        ("unseen", "share of unseen values"),
        ("rare", "share of rare values"),
    )
    for figure, label in figures:
        largest = {
            field.name: max(getattr(period.fields[i], figure) for period in report.periods)
            for i, field in enumerate(report.periods[0].fields)
        }
        shown = sorted(largest, key=lambda name: -largest[name])[:MAX_SERIES]
        order = [field.name for field in report.periods[0].fields]
        series = tuple(
            Series(
                name,
                places,
                tuple(float(getattr(period.fields[order.index(name)], figure)) for period in report.periods),
            )
            for name in shown
        )
        note = "The fields with the largest values." if len(largest) > MAX_SERIES else ""
        charts.append(Chart(f"drift-{figure}", f"{label} by period", "period", label, series, note=note))
    labelled = [
        (place, period.calibration_ratio, 1.96 * (period.calibration_error or 0.0))
        for place, period in zip(places, report.periods, strict=True)
        if period.calibration_ratio is not None
    ]
    if labelled:
        ratio = Series(
            "calibration ratio",
            tuple(place for place, _, _ in labelled),
            tuple(ratio for _, ratio, _ in labelled),
            tuple(ratio - error for _, ratio, error in labelled),
            tuple(ratio + error for _, ratio, error in labelled),
        )
        title, note = (
            "mean prediction over click rate by period",
            "Intervals of 95 %; 1 if probabilities hold.",
        )
        charts.append(Chart("drift-calibration", title, "period", "calibration ratio", (ratio,), note=note))
    return charts


def write_drift(directory: Path, report: DriftReport) -> Path:
    """Write the page, its charts and all numbers into `directory`; return the path of the page."""
    page = drift_page(report).write(directory)
    write_json(directory / FILE, report.to_json())
    return page
