"""Which of a fit's finished runs is shipped: the student, unless another run is better on validation rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.evaluation.halves import halves
from recap_ctr.training.parallel import Runs, teacher_tables
from recap_ctr.training.report import read_report

LEAD = 1.0
"""A run must be ahead of a simpler one by so many standard errors: the one-standard-error rule. Where both are equally
good, which one ships costs nothing but size; to ask for more would refuse leads that are mostly real."""


@dataclass(frozen=True)
class Choice:
    """The run to ship, and why, if others were considered."""

    path: Path
    reason: str | None


def choose_shipped(data: PreparedData, students: Runs, others: Runs) -> Choice:
    """Return the student that is best on validation rows, or another run if that is better there, or if there is none.

    One half of the validation rows chooses among the other runs, and the other half must confirm that the chosen one is
    better than the student: the best of many is partly the luckiest. A student whose towers add nothing to the parts
    beside them is not considered.
    """
    num_students = len(students)
    if others:
        students = {
            path: run for path, run in students.items() if run.beside is None or run.beside.has_towers
        }
    if not students:
        best = max(others, key=lambda path: others[path].metrics.valid.raw.auc)
        why = "the student's towers add nothing to it" if num_students else "there was no time for a student"
        return Choice(best, f"{why}; this is the best run on validation rows")
    student = max(students, key=lambda path: students[path].metrics.valid.raw.auc)
    if not others:
        return Choice(student, None)
    first, second = halves(data.valid.labels)
    rival = max(others, key=lambda path: _auc(path, data.valid, first))
    leads = [_auc(rival, data.valid, half) - _auc(student, data.valid, half) for half in (first, second)]
    name = f"{others[rival].model.name} ({rival.name})"
    if leads[0] <= 0:
        return Choice(student, f"no other run is better on validation rows; {name} comes next")
    if leads[1] <= 0:
        return Choice(
            student,
            f"{name} is {100 * leads[0]:.3f} points of AUC ahead on one half of the validation rows, which the other"
            f" half does not confirm ({100 * leads[1]:+.3f})",
        )
    return Choice(
        rival,
        f"{name} is better on validation rows than the student: {100 * leads[0]:+.3f} points of AUC on the half that"
        f" chose it, {100 * leads[1]:+.3f} on the half that confirmed it",
    )


def prefer_simple(choice: Choice, simpler: Sequence[Path], data: PreparedData) -> Choice:
    """Return the simplest run that no less simple run is ahead of by more than one standard error.

    `simpler` are runs that are simpler than the chosen one, the simplest first. The best of many on few clicks is often
    the luckiest: rows that chose it flatter it, and later ones do not. Runs are compared by calibrated logloss, because
    on few clicks a lead in AUC is luck far more often.
    """
    for at, path in enumerate(simpler):
        leads = [_lead(rival, path, data) for rival in (*simpler[at + 1 :], choice.path)]
        if not any(lead.is_clear for lead in leads):
            return Choice(path, f"{leads[-1].sentence(choice.path, path)}, so the simpler model is shipped")
    return choice


@dataclass(frozen=True)
class _Lead:
    """How far a run is ahead of a simpler one on validation rows."""

    auc: metrics.Difference
    logloss: metrics.Difference

    @property
    def is_clear(self) -> bool:
        """Return whether the logloss is lower by more than its standard error."""
        return self.logloss.difference > LEAD * self.logloss.standard_error

    def sentence(self, path: Path, simple: Path) -> str:
        """Return in words how far the run `path` is ahead of the simpler one, or behind it."""
        return (
            f"compared with {simple.name}, {path.name} gains {100 * self.auc.difference:+.3f} points of AUC and"
            f" {self.logloss.difference:+.5f} of logloss on validation rows, with a standard error of"
            f" {self.logloss.standard_error:.5f}"
        )


def _lead(run: Path, simple: Path, data: PreparedData) -> _Lead:
    """Compare two runs, each calibrated on the validation rows as it would be shipped.

    Proportions of parts were fitted on the same rows, which flatters a run by as much as cross-validation has shown.
    """
    labels, weights = data.valid.labels, data.valid.weights
    ahead, behind = (
        fit_affine(labels, logits, weights).apply(logits) for logits in (_logits(run), _logits(simple))
    )
    logloss = metrics.logloss_difference(labels, behind, ahead, weights)
    flattery = _optimism(run) - _optimism(simple)
    return _Lead(
        metrics.auc_difference(labels, ahead, behind, weights),
        replace(logloss, difference=logloss.difference - flattery),
    )


def _optimism(run: Path) -> float:
    """Return how much lower a run's validation logloss is than on rows that did not fit its proportions."""
    report = read_report(run)
    return 0.0 if report.beside is None else report.beside.optimism


def _auc(run: Path, shard: Shard, rows: npt.NDArray[np.intp]) -> float:
    weights = None if shard.weights is None else shard.weights[rows]
    return metrics.auc(np.asarray(shard.labels)[rows], _logits(run)[rows], weights)


def _logits(run: Path) -> npt.NDArray[np.float32]:
    """Return a run's logits of the validation rows."""
    return np.asarray(LogitTable(teacher_tables([run], "valid")[0]).logits_NM[:, 0])
