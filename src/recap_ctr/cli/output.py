"""What commands print: results on standard output, hints and progress on standard error."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from recap_ctr.jobs.progress import say

if TYPE_CHECKING:  # Help and completion must not wait for polars.
    from recap_ctr.evaluation.evaluate import Metrics, SplitFigures
    from recap_ctr.inference.scorer import RowsEvaluation, Tally
    from recap_ctr.training.report import FitReport, Reference, RunReport

FEWEST_OF_A_CLASS = 10  # Rows that an AUC's error needs of each class to mean something.


def print_json(value: object) -> None:
    """Print one JSON object on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def tell(quiet: bool, text: str) -> None:
    """Show a hint on standard error, unless the command is quiet."""
    if not quiet:
        say(text)


def tell_up_to_date(out: Path, as_json: bool, quiet: bool) -> None:
    """Report that an output was made before from the same inputs."""
    if as_json:
        print_json({"out": str(out), "done_before": True})
    tell(quiet, f"{out} is up to date.")


def print_table(header: list[str], rows: Iterable[list[str]]) -> None:
    """Print columns under a header, aligned; plain text, so that it reads well in a file too."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo()


def print_figures(
    figures: "Iterable[tuple[str, SplitFigures]]", reference: "dict[str, dict[str, Reference]] | None" = None
) -> None:
    """Print the figures of each split: the base rate's, those of reference models, raw and calibrated ones."""
    from recap_ctr.pages.references import calibrated_text, lead_text, reference_name

    rows = []
    for split, measured in figures:
        rows.append([split, "base rate", "0.50000", f"{measured.base_rate_logloss:.5f}", "", "", ""])
        for name, by_split in (reference or {}).items():
            if (model := by_split.get(split)) is None:
                continue
            shown, auc = reference_name(name, by_split), f"{model.auc:.5f}"
            rows.append([split, shown, auc, f"{model.logloss:.5f}", "", "", lead_text(model)])
            if calibrated := calibrated_text(model):
                rows.append([split, f"{shown}, calibrated", auc, calibrated, "", "", ""])
        for name, each in (("raw", measured.raw), ("calibrated", measured.calibrated)):
            grouped = f"{each.group_auc.auc:.5f}" if each.group_auc else ""
            error = "" if each.calibration_error is None else f"{each.calibration_error:.5f}"
            rows.append([split, name, f"{each.auc:.5f}", f"{each.logloss:.5f}", error, grouped, ""])
    header = ["rows", "scores", "AUC", "logloss", "calibration error", "AUC per group"]
    if reference:
        header.append("the model's lead, points")
    print_table(header, [row[: len(header)] for row in rows])


def print_report(report: "RunReport") -> None:
    """Print the report of one run."""
    from recap_ctr.pages.references import reference_sentence

    if sentence := reference_sentence(report):
        typer.echo(sentence)
    typer.echo(f"{report.model.name}: {report.parameters:,} parameters, seed {report.train.seed}")
    print_figures(report.metrics.items(), report.reference)


def print_fit(report: "FitReport") -> None:
    """Print the base rate, the references, the teachers, their ensemble and the shipped model of a fit."""
    from recap_ctr.pages.race import run_names
    from recap_ctr.pages.references import calibrated_text, lead_text, reference_name

    split = report.metrics.split

    def cells(name: str, parameters: int, metrics: "Metrics") -> list[str]:
        figures = metrics.on(split)
        return [
            name,
            f"{parameters:,}",
            f"{100 * figures.raw.auc:.3f}",
            f"{figures.raw.logloss:.5f}",
            f"{figures.calibrated.logloss:.5f}",
            "" if figures.raw.group_auc is None else f"{100 * figures.raw.group_auc.auc:.3f}",
            "",
        ]

    base_rate = f"{report.metrics.on(split).base_rate_logloss:.5f}"
    rows = [["base rate", "", "50.000", base_rate, "", "", ""]]
    for name, by_split in (report.reference or {}).items():
        reference = by_split[split]
        figures = f"{100 * reference.auc:.3f}", f"{reference.logloss:.5f}", calibrated_text(reference)
        rows.append([reference_name(name, by_split), "", *figures, "", lead_text(reference)])
    teachers = [
        cells(name, teacher.parameters, teacher.metrics)
        for name, teacher in zip(run_names(report.teacher_runs), report.teacher_runs.values(), strict=True)
    ]
    rows += teachers
    if report.ensembles and report.ensembles[-1].teachers > 1:
        size = sum(teacher.parameters for teacher in report.teacher_runs.values())
        ensemble = report.ensembles[-1]
        rows.append(cells(f"ensemble of {ensemble.teachers}", size, ensemble.metrics))
    rows.append(cells(f"shipped: {report.model.name}", report.parameters, report.metrics))
    header = ["model", "parameters", f"{split} AUC", "logloss", "calibrated"]
    header += ["AUC per group", "the shipped model's lead"]
    if report.metrics.on(split).raw.group_auc is None:
        header, *rows = ([*row[:5], row[6]] for row in (header, *rows))
    print_table(header, rows)


def compare_with_training(evaluation: "RowsEvaluation", trained: "Metrics") -> list[str]:
    """Return sentences that set figures on fresh rows against those that the artifact came with."""
    before = trained.held_out
    change = evaluation.raw.auc - before.raw.auc
    errors = [_auc_error(evaluation), _auc_error(before)]
    noise = 1.96 * math.hypot(*errors) if all(errors) else 0.0  # Zero: nothing is said about chance.
    sentences = [
        f"Here it explains {evaluation.explained:.1%} of the base rate's logloss; AUC is"
        f" {100 * evaluation.raw.auc:.2f}, and was {100 * before.raw.auc:.2f} on held-out rows after training."
    ]
    if noise and abs(change) > noise:
        meaning = (
            "these rows are different; look at unseen values, and train again."
            if change < 0
            else "these rows are easier."
        )
        sentences.append(
            f"A change of {100 * change:+.2f} points is more than chance ({100 * noise:.2f}): {meaning}"
        )
    elif noise:
        sentences.append(f"The change of {100 * change:+.2f} points is within chance ({100 * noise:.2f}).")
    if evaluation.explained < 0:
        sentences.append("It is worse than the base rate: don't serve it; train again on recent rows.")
    return sentences


def _auc_error(figures: "SplitFigures") -> float:
    """Return the error of an AUC, or 0 if it is not known: weighted rows, few of a class, or classes fully apart."""
    rate = figures.base_rate or 0.0
    enough = figures.rows * min(rate, 1 - rate) >= FEWEST_OF_A_CLASS
    return float(figures.raw.auc_error or 0.0) if enough else 0.0


def tell_unlabelled(quiet: bool, rows: int) -> None:
    """Show how many rows were left out because they have no label, if any."""
    if rows:
        tell(quiet, f"{rows:,} rows without a label were dropped.")


def tell_values(quiet: bool, tally: "Tally") -> None:
    """Show how many rows were scored, and how many of their values were unseen or missing."""
    tell(quiet, f"{tally.rows:,} rows.")
    for counts, meaning in (
        (tally.unseen, "are not in the vocabulary (unseen in training, or rarer there than min_count)"),
        (tally.missing, "are missing"),
    ):
        present: dict[str, Any] = {name: count for name, count in counts.items() if count}
        if present:
            ranked = sorted(present.items(), key=lambda item: -item[1])
            listed = ", ".join(f"{name} {count:,}" for name, count in ranked)
            tell(quiet, f"Values that {meaning}: {listed}.")
