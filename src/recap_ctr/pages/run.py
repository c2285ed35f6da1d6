"""The page of one run, or of a whole fit, from its report."""

from dataclasses import replace
from statistics import mean
from typing import Any

from recap_ctr.data.quality import FieldQuality, describe_repeated
from recap_ctr.evaluation.evaluate import Figures, SplitFigures
from recap_ctr.evaluation.metrics import ReliabilityBin
from recap_ctr.pages.breakdown import breakdown_sections
from recap_ctr.pages.charts import Chart, Kind, Series, share_intervals
from recap_ctr.pages.diagnosis import decomposition_section, decompositions_of
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.pages.race import race_section, run_names, without_fingerprints
from recap_ctr.pages.references import (
    calibrated_text,
    lead_text,
    logloss_gain_text,
    reference_name,
    reference_sentence,
)
from recap_ctr.training.report import FitReport, Reference, RunReport

HEADER = ("model", "parameters", "AUC", "logloss", "calibrated logloss", "calibration error")
FRONTIER_NOTE = (
    "Up and to the left is better: more accurate and smaller. Bands and whiskers are 95 % intervals over rows; all"
    " models are measured on the same rows, so their differences are surer than that."
)
Z = 1.96  # Half the width of a 95 % interval, in standard errors.


def page(report: RunReport | FitReport, command: str = "", diagnosis: dict[str, Any] | None = None) -> Page:
    """Return the page of a run or a fit.

    `command` is the one that would make the report again; `diagnosis` the content of the diagnosis file on the
    same data, if there is one. What supports the answer is folded below it.
    """
    answer = [_results(report), _frontier(report), _reliability(report)]
    details = [
        race_section(report) if isinstance(report, FitReport) else None,
        *_breakdown(report),
        _theory(report),
        decomposition_section(decompositions_of(diagnosis)) if diagnosis else None,
        _training(report),
        _fields(report, report.fields) if report.fields else None,
        _groups(report),
        _configuration(report, command),
    ]
    return Page(
        f"{model_name(report)} on {report.data.name}",
        lead(report),
        (
            *(section for section in answer if section is not None),
            *(replace(section, folded=True) for section in details if section is not None),
        ),
    )


def model_name(report: RunReport | FitReport) -> str:
    """Return the name of the model as pages show it."""
    return report.model.name.upper()


def lead(report: RunReport | FitReport) -> str:
    """Return the answer with its numbers; first what the model is not ahead of, last what to know of the split."""
    interrupted = (
        "The fit was interrupted, and this is the best model so far."
        if isinstance(report, FitReport) and report.interrupted
        else ""
    )
    sentences = (
        reference_sentence(report),
        _answer(report),
        interrupted,
        _after_that(report),
        report.data.split_note,
    )
    return " ".join(filter(None, sentences))


def _after_that(report: RunReport | FitReport) -> str:
    """Return what has happened to the model since it was measured, if anything has."""
    refit = report.refit if isinstance(report, FitReport) else None
    if refit is None:
        return ""
    values = sum(refit.added.values())
    new_values = f", and {values:,} values that were new to it" if values else ""
    count = f"{refit.teachers} teachers" if refit.teachers > 1 else "teacher"
    teachers = f", after its {count}" if refit.teachers else ""
    return (
        f"The shipped model has learnt from all {refit.rows:,} rows since{teachers}{new_values}, with the settings that"
        " these figures stand for; no rows are left to measure it on."
    )


def _answer(report: RunReport | FitReport) -> str:
    """Return the answer in one sentence, with its numbers."""
    figures = report.metrics.held_out
    auc = figures.raw.auc
    start = (
        f"{model_name(report)} ranks a clicked row above an unclicked one {100 * auc:.0f} times in 100"
        f" (AUC {auc_text(figures.raw)} on {figures.rows:,} {report.metrics.split} rows)"
    )
    if isinstance(report, FitReport) and report.recovered is not None:
        teacher_auc, ensemble_auc = _teacher_auc(report), _ensemble_auc(report)
        return (
            f"{start}: {100 * (auc - teacher_auc):+.2f} points compared with one of its teachers, where the ensemble of"
            f" all {len(report.teacher_runs)} gains {100 * (ensemble_auc - teacher_auc):+.2f}, with"
            f" {report.size_against_teacher:.2f} times the parameters of one teacher."
        )
    verb = "lowers" if figures.explained >= 0 else "RAISES"
    gain = f"{abs(100 * figures.explained):.1f} %"
    return f"{start}; calibrated, it {verb} logloss by {gain} compared with predicting the base rate for every row."


def auc_text(figures: Figures) -> str:
    """Return an AUC in points, with half of its 95 % interval where that is known."""
    error = "" if figures.auc_error is None else f" ± {100 * Z * figures.auc_error:.2f}"
    return f"{100 * figures.auc:.2f}{error}"


def _teacher_auc(report: FitReport) -> float:
    """Return the mean AUC of single teachers on the held-out rows."""
    return mean(teacher.metrics.held_out.raw.auc for teacher in report.teacher_runs.values())


def _ensemble_auc(report: FitReport) -> float:
    """Return the AUC of the ensemble of all teachers on the held-out rows."""
    return report.ensembles[-1].metrics.held_out.raw.auc


def figures_row(name: str, parameters: int, figures: SplitFigures) -> tuple[str, ...]:
    """Return a row of text under HEADER."""
    raw, calibrated = figures.raw, figures.calibrated
    error = "" if raw.auc_error is None else f" ± {100 * Z * raw.auc_error:.3f}"
    return (
        name,
        f"{parameters:,}",
        f"{100 * raw.auc:.3f}{error}",
        f"{raw.logloss:.5f}",
        f"{calibrated.logloss:.5f}",
        _decimals(calibrated.calibration_error),
    )


def _decimals(value: float | None) -> str:
    """Return a number with four decimals; nothing for a figure that an old report does not hold."""
    return "" if value is None else f"{value:.4f}"


def _results(report: RunReport | FitReport) -> Section:
    """Return the table of the base rate, reference models, teachers, their ensemble and the model itself."""
    figures, split = report.metrics.held_out, report.metrics.split
    rows: list[tuple[str, ...]] = [("base rate", "", "50.000", f"{figures.base_rate_logloss:.5f}", "", "")]
    for name, by_split in (report.reference or {}).items():
        reference = by_split[split]
        shown = reference_name(name, by_split)
        losses = f"{reference.logloss:.5f}", calibrated_text(reference)
        rows.append((shown, "", f"{100 * reference.auc:.3f}", *losses, ""))
    if isinstance(report, FitReport):
        teachers = report.teacher_runs
        for name, teacher in zip(run_names(teachers), teachers.values(), strict=True):
            rows.append(figures_row(name, teacher.parameters, teacher.metrics.held_out))
        if report.ensembles and report.ensembles[-1].teachers > 1:
            size = sum(teacher.parameters for teacher in teachers.values())
            ensemble = report.ensembles[-1]
            rows.append(figures_row(f"ensemble of {ensemble.teachers}", size, ensemble.metrics.held_out))
    rows.append(figures_row(model_name(report), report.parameters, figures))
    note = (
        f"Measured on {figures.rows:,} {split} rows. AUC is in points, ± half of its 95 % interval over rows (DeLong)."
        f" Calibrated: after {report.calibration} calibration, fitted on validation rows."
    )
    tables = [Table(HEADER, tuple(rows), len(rows) - 1, note)]
    if report.reference and any(by_split[split].lead is not None for by_split in report.reference.values()):
        tables.append(_against_references(report.reference, split))
    text = (
        f"Shipped: {without_fingerprints(report.chosen_because)}."
        if isinstance(report, FitReport) and report.chosen_because
        else ""
    )
    return Section("Results", text, tables=tuple(tables))


def _against_references(references: dict[str, dict[str, Reference]], split: str) -> Table:
    rows = tuple(
        (reference_name(name, by_split), lead_text(by_split[split]), logloss_gain_text(by_split[split]))
        for name, by_split in references.items()
    )
    note = (
        "Of the model over each reference, on the same rows, both before calibration, ± half of the 95 % interval of"
        " the paired difference."
    )
    return Table(("reference", "lead in AUC (points)", "gain in logloss"), rows, note=note)


def _frontier(report: RunReport | FitReport) -> Section | None:
    """Return the chart of AUC against size, of the model and of ensembles of its teachers."""
    if (
        not isinstance(report, FitReport)
        or len(report.teacher_runs) < 2
        or not report.ensembles
        or report.arms
    ):
        return None
    teacher_size = next(iter(report.teacher_runs.values())).parameters
    ensembles = auc_series(
        "ensembles of the first 1, 2, .. teachers",
        [(teacher_size * ensemble.teachers, ensemble.metrics.held_out.raw) for ensemble in report.ensembles],
        labels=tuple(f"{ensemble.teachers} teachers" for ensemble in report.ensembles),
    )
    student = auc_series(
        model_name(report), [(report.parameters, report.metrics.held_out.raw)], kind="points"
    )
    return Section("Frontier", charts=(frontier_chart(report.metrics.split, (ensembles, student)),))


def auc_series(
    name: str, sizes: list[tuple[int, Figures]], *, kind: Kind = "line", labels: tuple[str, ...] = ()
) -> Series:
    """Return AUC in points against stored parameters, with 95 % intervals over rows where all models have them."""
    aucs = tuple(100 * figures.auc for _, figures in sizes)
    errors = [100 * Z * figures.auc_error for _, figures in sizes if figures.auc_error is not None]
    has_errors = len(errors) == len(aucs)
    return Series(
        name,
        tuple(float(size) for size, _ in sizes),
        aucs,
        tuple(auc - error for auc, error in zip(aucs, errors, strict=True)) if has_errors else (),
        tuple(auc + error for auc, error in zip(aucs, errors, strict=True)) if has_errors else (),
        kind=kind,
        labels=labels,
    )


def frontier_chart(split: str, series: tuple[Series, ...]) -> Chart:
    """Return the chart of AUC in points on the rows of `split` against stored parameters."""
    return Chart(
        "frontier",
        "Accuracy against stored parameters",
        "stored parameters",
        f"{split} AUC (points)",
        series,
        note=FRONTIER_NOTE if any(line.low for line in series) else FRONTIER_NOTE.partition(" Bands")[0],
        log_x=True,
        digits=3,
    )


def reliability_series(
    name: str, bins: list[ReliabilityBin] | None, *, with_intervals: bool = False
) -> Series | None:
    """Return the share of clicks against the mean score, by bin; None if the report has no bins with rows.

    Intervals are for rows without weights.
    """
    filled = [part for part in bins or () if part.rows]
    if not filled:
        return None
    shares = tuple(part.mean_label for part in filled)
    low, high = share_intervals(shares, [part.rows for part in filled]) if with_intervals else ((), ())
    return Series(
        name,
        tuple(part.mean_prediction for part in filled),
        shares,
        low,
        high,
        labels=tuple(f"{name}, {part.rows:,.0f} rows" for part in filled),
    )


def _counts_rows(figures: SplitFigures) -> bool:
    """Return whether the rows have no weights, as far as the report tells: its bins hold the rows' total weight."""
    weight = sum(part.rows for part in figures.reliability or ())
    return abs(weight - figures.rows) < 0.5


def _breakdown(report: RunReport | FitReport) -> list[Section]:
    if report.breakdown is None:
        return []
    figures = report.metrics.on(report.breakdown.split)
    return breakdown_sections(report.breakdown, with_intervals=_counts_rows(figures))


def _reliability(report: RunReport | FitReport) -> Section | None:
    figures = report.metrics.held_out
    has_intervals = _counts_rows(figures)
    curves = (
        reliability_series("as trained", figures.reliability_raw),
        reliability_series("calibrated", figures.reliability, with_intervals=has_intervals),
    )
    series = tuple(curve for curve in curves if curve is not None)
    if not series:
        return None
    text = (
        "Of the rows with a score of 10 %, about 10 % should be clicks: the points of a calibrated model lie on the"
        f" dotted line. The mean gap is {_decimals(figures.raw.calibration_error)} as trained and"
        f" {_decimals(figures.calibrated.calibration_error)} after calibration."
    )
    title = "Reliability before and after calibration"
    note = "The band is the 95 % interval of the share of clicks, over rows." if has_intervals else ""
    chart = Chart("reliability", title, "mean score", "share of clicks", series, note=note, diagonal=True)
    return Section("Reliability", text, charts=(chart,))


def _theory(report: RunReport | FitReport) -> Section | None:
    """Return the measured gain of averaging teachers against the gain that follows from their disagreement."""
    if not isinstance(report, FitReport) or report.averaging is None:
        return None
    points = [point for point in report.averaging.points if point.count > 1]
    last = points[-1]
    text = (
        f"The mean of {last.count} teachers lowers logloss by {last.gain.value:.5f} compared with one of them. From"
        f" their disagreement alone, the paper's Eq. 6 predicts {last.predicted.value:.5f}."
    )
    series = Series(
        "means of teachers",
        tuple(point.predicted.value for point in points),
        tuple(point.gain.value for point in points),
        tuple(point.gain.low for point in points),
        tuple(point.gain.high for point in points),
        kind="points",
        labels=tuple(f"{point.count} teachers" for point in points),
    )
    chart = Chart(
        "theory",
        "Measured against predicted gain",
        "predicted gain in logloss (Eq. 6)",
        "measured gain in logloss",
        (series,),
        diagonal=True,
        digits=6,
    )
    return Section("Theory", text, charts=(chart,))


def training_series(name: str, report: RunReport | FitReport) -> Series:
    """Return the validation AUC in points after each epoch."""
    history = report.history
    return Series(
        name,
        tuple(float(row.epoch) for row in history),
        tuple(100 * row.valid_auc for row in history),
    )


def training_chart(series: tuple[Series, ...]) -> Chart:
    """Return the chart of validation AUC by epoch."""
    title = "Validation AUC during training"
    return Chart("training", title, "epoch", "validation AUC (points)", series, digits=3)


def _training(report: RunReport | FitReport) -> Section:
    history = report.history
    if len(history) == 1:
        auc = 100 * history[0].valid_auc
        return Section("Training", f"There was a single epoch. Its validation AUC is {auc:.3f}.")
    averaged = any(row.beta is not None for row in history)
    curves = [training_series("averaged weights" if averaged else "weights", report)]
    raw_aucs = [row.raw_auc for row in history if row.raw_auc is not None]
    if averaged and len(raw_aucs) == len(history):
        raw_points = tuple(100 * auc for auc in raw_aucs)
        curves.append(Series("weights without averaging", curves[0].x, raw_points, dashed=True))
    losses = Series("training loss", curves[0].x, tuple(row.train_loss for row in history))
    loss = Chart("loss", "Training loss", "epoch", "training loss", (losses,))
    text = (
        f"Epoch {report.best_epoch} of {len(history)} was the best on validation rows; its weights were kept."
    )
    return Section("Training", text, charts=(training_chart(tuple(curves)), loss))


def _fields(report: RunReport | FitReport, fields: list[FieldQuality]) -> Section:
    """Return what each field has of unknown values, how far its values drift from training, and which rows repeat."""
    drift_splits = list(fields[0].drift)
    names = tuple(field.name for field in fields)
    drift = Chart(
        "drift",
        "Drift of the fields' values from the training rows",
        "field",
        "total variation distance",
        tuple(
            Series(
                split,
                tuple(float(index) for index in range(len(fields))),
                tuple(field.drift[split] for field in fields),
                kind="bars",
                labels=names,
            )
            for split in drift_splits
        ),
        note="Fields with many rare values drift by chance too; look for fields that drift more on test than on valid.",
    )
    text = f"{_unknown_values(fields, drift_splits[-1])} {_repeated_rows(report)}".strip()
    return Section("Fields", text, tables=(_unknown_table(fields),), charts=(drift,))


def _unknown_values(fields: list[FieldQuality], split: str) -> str:
    """Return in a sentence which field has the most values without a vector of their own, and why."""
    worst = max(fields, key=lambda field: field.oov[split])
    if not worst.oov[split]:
        return f"Every value in {split} rows has an embedding vector of its own."
    reasons = "too rare in the training rows or absent from them"
    if worst.missing and worst.rare and worst.unseen:
        shares = {
            "unseen in the training rows": worst.unseen,
            "rare there": worst.rare,
            "missing": worst.missing,
        }
        reasons = ", ".join(
            f"{name} ({100 * share[split]:.2f} %)" for name, share in shares.items() if share[split]
        )
    return (
        f"The field {worst.name} has the most unknown values: {100 * worst.oov[split]:.2f} % of its values in {split}"
        f" rows are {reasons}, and share one embedding vector."
    )


def _repeated_rows(report: RunReport | FitReport) -> str:
    """Return in a sentence how many held-out rows repeat a training row; "" if none does or nobody counted."""
    rows = {split: count.rows for split, count in report.data.splits.items()}
    return describe_repeated(report.repeated or {}, rows)


def _unknown_table(fields: list[FieldQuality]) -> Table:
    """Return the shares of unknown values by field: in the last split by reason, or in each where none is on record."""
    first = fields[0]
    split = list(first.oov)[-1]
    if first.missing and first.rare and first.unseen:
        header = [f"{kind} in {split}" for kind in ("unseen", "rare", "missing")]
        shares = [[part[split] for part in (f.unseen, f.rare, f.missing) if part] for f in fields]
    else:
        header = [f"unknown in {name}" for name in first.oov]
        shares = [[field.oov[name] for name in first.oov] for field in fields]
    rows = tuple(
        (field.name, f"{field.values:,}", *(f"{share:.2%}" for share in row))
        for field, row in zip(fields, shares, strict=True)
    )
    return Table(("field", "values kept", *header), rows)


def _groups(report: RunReport | FitReport) -> Section | None:
    group_auc = report.metrics.held_out.raw.group_auc
    if group_auc is None:
        return None
    rows = (
        ("AUC (points)", f"{100 * group_auc.auc:.3f}"),
        ("groups in the mean", f"{group_auc.num_groups:,}"),
        ("groups left out, with clicks or non-clicks only", f"{group_auc.num_one_class:,}"),
    )
    text = "The mean of the AUCs within each group, weighted by the groups' rows."
    return Section("Groups", text, tables=(Table(("figure", "value"), rows),))


def _training_settings(report: RunReport | FitReport) -> dict[str, Any]:
    """Return the settings that the training of this model looks at: a converged regression, or trees, take no steps."""
    settings = report.train.model_dump(mode="json")
    if report.train.update == "convex":
        return {key: settings[key] for key in ("update", "seed")}
    if report.model.name == "boosted":
        return {"seed": settings["seed"]}
    return settings


def _configuration(report: RunReport | FitReport, command: str) -> Section:
    rows = (
        ("data", f"{report.data.name}, fingerprint {report.data.fingerprint}"),
        *((f"rows of {split}", f"{count.rows:,}") for split, count in report.data.splits.items()),
        *((("split", report.data.split),) if report.data.split else ()),
        *((f"model: {key}", str(value)) for key, value in report.model.config.items()),
        *((f"training: {key}", str(value)) for key, value in _training_settings(report).items()),
        *(
            []
            if report.strength is None
            else [("strength of the regulariser, l2 · rows", f"{report.strength:g}")]
        ),
        *((f"version of {key}", str(value)) for key, value in report.versions.items()),
        *((f"machine: {key}", str(value)) for key, value in report.machine.items()),
        *([] if report.route_gain is None else [("routes", report.route_gain.sentence)]),
        *([] if report.pool is None else [("recombined rows", report.pool.sentence)]),
        ("date", report.date),
    )
    text = (
        "Everything that the result depends on. The same command on the same data gives the same bits on the same"
        " machine with the same number of threads."
    )
    return Section(
        "Configuration", text, tables=(Table(("key", "value"), rows),), code=command or report.command or ""
    )
