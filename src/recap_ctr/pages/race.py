"""The part of a fit's page that says what raced, who taught, and what there was no time for."""

import re
from collections.abc import Iterable

from recap_ctr.pages.page import Section, Table
from recap_ctr.training.report import ArmSummary, FitReport, TeachingStep


def race_section(report: FitReport) -> Section | None:
    """Return the section about the race of a portfolio and what there was no time for; None if there is nothing."""
    sentences = race_sentences(report)
    if not report.arms and not sentences:
        return None
    tables = [_arms_table(report.arms)] if report.arms else []
    if report.teaching:
        tables.append(_teaching_table(report.teaching))
    return Section("What was tried", " ".join(sentences), tables=tuple(tables))


def without_fingerprints(text: str) -> str:
    """Return `text` with the names of stages as readers know them, without the ends that tell settings apart.

    >>> without_fingerprints("blend-10-3c0624c704 is ahead of it")
    'blend-10 is ahead of it'
    """
    return re.sub(r"-[0-9a-f]{10}\b", "", text)


def run_names(directories: Iterable[str]) -> list[str]:
    """Return a short name for each directory of a run, numbered where several have the same.

    >>> run_names(["fcn-0e1ffef52e", "fcn-8c73201544", "qnn-11163be4a7"])
    ['fcn 1', 'fcn 2', 'qnn']
    """
    names = [without_fingerprints(directory.rpartition("/")[2]) for directory in directories]
    return [
        name if names.count(name) == 1 else f"{name} {names[: at + 1].count(name)}"
        for at, name in enumerate(names)
    ]


def race_sentences(report: FitReport) -> list[str]:
    """Return how long the fit took, what stands beside the towers, and what was given up."""
    beside = [] if report.beside is None else [_capitalised(report.beside.sentence) + "."]
    return [*beside, *time_sentences(report)]


def time_sentences(report: FitReport) -> list[str]:
    """Return how long the fit took, and what was given up."""
    taken, budget = report.plan.get("taken"), report.plan.get("budget")
    sentences = []
    if taken is not None:
        asked = "" if budget is None else f" of {budget:g} asked"
        sentences.append(f"The fit took {taken / 60:.1f} minutes{asked}.")
    given_up = report.plan.get("given_up") or []
    if given_up:
        sentences.append(f"There was no time for {'; '.join(given_up)}.")
    return sentences


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _arms_table(arms: list[ArmSummary]) -> Table:
    rows = tuple(
        (
            arm.name,
            f"{100 * arm.auc:.3f}",
            f"{arm.logloss:.5f}",
            f"{arm.epochs:.1f}" + ("" if arm.finished else " (cut)"),
            f"{arm.seconds:.0f}",
            str(arm.weight) if arm.weight else "",
        )
        for arm in arms
    )
    note = (
        "On validation rows, all trained on all training rows; cut: it still gained when its time was over. Weight: how"
        " often the model counts in the mean that taught the student."
    )
    return Table(("model", "AUC", "logloss", "epochs", "seconds", "weight"), rows, note=note)


def _teaching_table(steps: list[TeachingStep]) -> Table:
    rows = tuple(
        (
            step.member if step.taken else f"{step.member}: not worth adding",
            f"{step.logloss:.5f}",
            f"{step.confirmed:.5f}",
        )
        for step in steps
    )
    note = (
        "Logloss of the mean logit with each further member, on the half of the validation rows that chooses and on the"
        " half that confirms."
    )
    return Table(("member", "logloss, choosing", "logloss, confirming"), rows, note=note)
