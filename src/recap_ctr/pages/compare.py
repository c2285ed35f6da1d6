"""The page that compares several runs on the same data."""

from collections.abc import Mapping

from recap_ctr.errors import InputError
from recap_ctr.evaluation.evaluate import Figures
from recap_ctr.pages import run
from recap_ctr.pages.charts import Chart
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.training.report import FitReport, RunReport


def page(reports: Mapping[str, RunReport | FitReport]) -> Page:
    """Return the page of several runs, given by name; refuse runs on different data."""
    fingerprints = {report.data.fingerprint for report in reports.values()}
    if len(fingerprints) > 1:
        raise InputError(
            f"these runs used {len(fingerprints)} different data sets, so their figures can't be compared",
            fix="name runs on the same prepared data",
        )
    splits = {report.metrics.split for report in reports.values()}
    split = splits.pop() if len(splits) == 1 else "valid"
    aucs = {name: report.metrics.on(split).raw.auc for name, report in reports.items()}
    ranked = {name: reports[name] for name in sorted(reports, key=lambda name: -aucs[name])}
    sections = (
        _results(ranked, split),
        _frontier(ranked, split),
        _reliability(ranked, split),
        Section(
            "Training",
            charts=(
                run.training_chart(
                    tuple(run.training_series(name, report) for name, report in ranked.items())
                ),
            ),
        ),
        _configuration(ranked),
    )
    data = next(iter(reports.values())).data
    return Page(
        f"{len(reports)} runs on {data.name}",
        _lead({name: report.metrics.on(split).raw for name, report in ranked.items()}, split),
        tuple(section for section in sections if section is not None),
    )


def _lead(figures: Mapping[str, Figures], split: str) -> str:
    """Return one sentence about the best run; `figures` are in order, best first."""
    names = list(figures)
    best = figures[names[0]]
    lead = f"{names[0]} has the highest AUC of {len(names)} runs on the {split} rows: {run.auc_text(best)} points"
    if len(names) > 1:
        difference = best.auc - figures[names[1]].auc
        lead += f", {100 * difference:.2f} more than {names[1]}"
        if best.auc_error is not None and difference < run.Z * best.auc_error:
            lead += ", which may be chance"
    return f"{lead}."


def _configuration(reports: Mapping[str, RunReport | FitReport]) -> Section:
    """Return what the runs have in common, and the command of each."""
    data = next(iter(reports.values())).data
    rows = (
        ("data", f"{data.name}, fingerprint {data.fingerprint}"),
        *((f"rows of {split}", f"{count.rows:,}") for split, count in data.splits.items()),
        *((("split", data.split),) if data.split else ()),
        *((f"command of {name}", report.command) for name, report in reports.items() if report.command),
    )
    return Section("Configuration", tables=(Table(("key", "value"), rows),), folded=True)


def _results(reports: Mapping[str, RunReport | FitReport], split: str) -> Section:
    rows = tuple(
        (name, *run.figures_row(run.model_name(report), report.parameters, report.metrics.on(split)))
        for name, report in reports.items()
    )
    note = "AUC is in points, ± half of its 95 % interval over rows (DeLong)."
    return Section("Results", tables=(Table(("run", *run.HEADER), rows, 0, note),))


def _frontier(reports: Mapping[str, RunReport | FitReport], split: str) -> Section:
    series = tuple(
        run.auc_series(name, [(report.parameters, report.metrics.on(split).raw)], kind="points")
        for name, report in reports.items()
    )
    return Section("Frontier", charts=(run.frontier_chart(split, series),))


def _reliability(reports: Mapping[str, RunReport | FitReport], split: str) -> Section | None:
    curves = (
        run.reliability_series(name, report.metrics.on(split).reliability) for name, report in reports.items()
    )
    series = tuple(curve for curve in curves if curve is not None)
    if not series:
        return None
    title = "Reliability after calibration"
    chart = Chart("reliability", title, "mean score", "share of clicks", series, diagonal=True)
    return Section("Reliability", charts=(chart,))
