"""Several runs on one page."""

from collections.abc import Mapping

from recap_ctr.errors import InputError
from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.pages.run import Report, figures_line, held_out, reliability_series, title

HEADER = ("run", "model", "parameters", "AUC", "logloss", "calibrated logloss", "calibration error")


def page(reports: Mapping[str, Report]) -> Page:
    """By name; all must have been measured on the same rows."""
    prints = {report["data"]["fingerprint"] for report in reports.values()}
    if len(prints) > 1:
        raise InputError(
            f"these runs saw {len(prints)} different data sets, so their figures can't be compared",
            fix="give runs on the same prepared data",
        )
    splits = {held_out(report) for report in reports.values()}
    split = splits.pop() if len(splits) == 1 else "valid"
    order = sorted(reports, key=lambda name: -reports[name]["metrics"][split]["raw"]["auc"])
    best = reports[order[0]]["metrics"][split]["raw"]["auc"]
    lead = f"{order[0]} ranks best of {len(order)} runs on the {split} rows, with an AUC of {100 * best:.2f}"
    if len(order) > 1:
        gap = best - reports[order[1]]["metrics"][split]["raw"]["auc"]
        lead += f", {100 * gap:.2f} points before {order[1]}"
    rows = []
    for name in order:
        report = reports[name]
        line = figures_line(title(report), report["parameters"], report["metrics"][split])
        rows.append((name, *line))
    table = Table(HEADER, tuple(rows), 0, "AUC in points, ± half a 95 % interval over rows (DeLong).")
    sizes = Chart(
        "frontier", "Accuracy against stored parameters", "stored parameters", f"{split} AUC (points)",
        tuple(
            Series(
                name, (float(reports[name]["parameters"]),), (100 * reports[name]["metrics"][split]["raw"]["auc"],),
                kind="points",
            )
            for name in order
        ),
        note="Up and to the left is better.", log_x=True, digits=3,
    )  # fmt: skip
    curves = Chart(
        "training", "Validation AUC while training", "epoch", "validation AUC (points)",
        tuple(
            Series(
                name,
                tuple(float(line["epoch"]) for line in reports[name]["history"]),
                tuple(100 * line["valid_auc"] for line in reports[name]["history"]),
            )
            for name in order
        ),
        digits=3,
    )  # fmt: skip
    reliable = [
        reliability_series(name, reports[name]["metrics"][split].get("reliability")) for name in order
    ]
    known = tuple(series for series in reliable if series is not None)
    sections = [Section("Figures", tables=(table,)), Section("Frontier", charts=(sizes,))]
    if known:
        chart = Chart(
            "reliability", "Reliability, calibrated", "mean score", "share that clicked", known, diagonal=True
        )  # fmt: skip
        sections.append(Section("Reliability", charts=(chart,)))
    sections.append(Section("Training", charts=(curves,)))
    name = next(iter(reports.values()))["data"]["name"]
    return Page(f"{len(reports)} runs on {name}", lead + ".", tuple(sections))
