"""The page of the dial: what each setting of an artifact costs, and how good it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from recap_ctr.inference.dial import BATCH_SIZES, Position
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.machine import machine
from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.storage.files import write_json

FILE = "dial.json"
HEADER = ("setting", "AUC", "logloss", *(f"µs/row, batch of {size}" for size in BATCH_SIZES), "rows/ms")


def cells(position: Position) -> list[str]:
    """Return the row of the table for one setting, under `HEADER`."""
    quality = ["" if value is None else f"{value:.5f}" for value in (position.auc, position.logloss)]
    costs = [f"{cost:.1f}" for cost in position.microseconds]
    return [str(position.setting), *quality, *costs, f"{position.rows_per_millisecond:.1f}"]


def in_words(dial: Sequence[Position], poor: Mapping[Setting, str] | None = None) -> str:
    """Return sentences about both ends of the dial, and about settings that are too `poor`, with the reasons.

    They say how many rows a millisecond scores, and what that costs.
    """
    refusals = [f"{setting} is not offered: {reason}." for setting, reason in (poor or {}).items()]
    return " ".join([_about_ends(dial, is_all=not refusals), *refusals])


def _about_ends(dial: Sequence[Position], *, is_all: bool) -> str:
    top, bottom = dial[0], dial[-1]
    text = f"A millisecond scores {top.rows_per_millisecond:.1f} rows with {top.setting}"
    if len(dial) == 1:
        return f"{text}; {'the model has no other setting' if is_all else 'no other setting is offered'}."
    text += f", and {bottom.rows_per_millisecond:.1f} with {bottom.setting}"
    if top.auc is None or top.logloss is None or bottom.auc is None or bottom.logloss is None:
        return (
            f"{text}; the artifact does not say how good they are."
            " To measure it: recap export ARTIFACT --data PREPARED."
        )
    return (
        f"{text}, which on validation rows changes AUC by {100 * (bottom.auc - top.auc):+.3f} points"
        f" and logloss by {bottom.logloss - top.logloss:+.5f}."
    )


def dial_page(
    name: str, dial: Sequence[Position], threads: int, poor: Mapping[Setting, str] | None = None
) -> Page:
    """Return the page of the model `name`: quality against cost as charts and as a table."""
    conditions = (
        f"{threads} thread{'s' * (threads > 1)} on {machine()['processor']}, {BATCH_SIZES[-1]} rows at a time"
    )
    measured = [position for position in dial if position.auc is not None and position.logloss is not None]
    charts = tuple(
        _chart(figure, label, measured, conditions)
        for figure, label in (("auc", "AUC"), ("logloss", "logloss"))
        if measured
    )
    rows = tuple(tuple(cells(position)) for position in dial)
    table = Table(HEADER, rows, ours=0, note=f"Cost with {conditions}.")
    section = Section("Settings", tables=(table,), charts=charts)
    return Page(f"The dial of {name}", in_words(dial, poor), (section,))


def _chart(figure: str, label: str, measured: Sequence[Position], conditions: str) -> Chart:
    series = Series(
        "dial",
        tuple(position.microseconds[-1] for position in measured),
        tuple(float(getattr(position, figure)) for position in measured),
        labels=tuple(str(position.setting) for position in measured),
    )
    return Chart(
        f"dial-{figure}",
        f"{label} on validation rows against cost",
        "µs per row",
        label,
        (series,),
        note=f"Each step to the left is a cheaper setting. Measured with {conditions}.",
        log_x=True,
        digits=5,
    )


def write_dial(
    directory: Path,
    name: str,
    dial: Sequence[Position],
    threads: int,
    poor: Mapping[Setting, str] | None = None,
) -> Path:
    """Write the page, its charts and all numbers into `directory`; return the path of the page."""
    page = dial_page(name, dial, threads, poor).write(directory)
    conditions = {"kind": "dial", "threads": threads, "machine": machine()}
    write_json(directory / FILE, {**conditions, "settings": [position.to_dict() for position in dial]})
    return page
