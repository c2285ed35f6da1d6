"""Which of a fit's finished runs is shipped: the student, unless another run is better on validation rows."""

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.halves import halves
from recap_ctr.training.parallel import Runs, teacher_tables

CHANCE = 0.05  # How often the best of equal runs may be taken for better than the simplest.


@dataclass(frozen=True)
class Choice:
    """The run to ship, and why, if others were considered."""

    path: Path
    reason: str | None


def choose_shipped(data: PreparedData, students: Runs, others: Runs) -> Choice:
    """Return the student that is best on validation rows, or another run if that is better there, or if there is none.

    One half of the validation rows chooses among the other runs, and the other half must confirm that the chosen one
    is better than the student: the best of many is partly the luckiest. A student is out whose towers add nothing to
    the parts beside them.
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


def prefer_simple(choice: Choice, simplest: Path, data: PreparedData, num_runs: int) -> Choice:
    """Return the simplest run if the chosen one of `num_runs` others is not ahead of it beyond chance.

    The best of many on few clicks is mostly the luckiest: rows that chose it flatter it, and later ones do not.
    """
    if choice.path == simplest:
        return choice
    labels, weights = data.valid.labels, data.valid.weights
    best, simple = (_logits(path) for path in (choice.path, simplest))
    lead = metrics.auc_difference(labels, best, simple, weights)
    reach = NormalDist().inv_cdf(1 - CHANCE / num_runs) * lead.standard_error
    if lead.difference > reach:
        return choice
    return Choice(
        simplest,
        f"{choice.path.name} is {100 * lead.difference:.3f} points of AUC ahead of it on validation rows, and the best"
        f" of {num_runs} runs would be up to {100 * reach:.3f} ahead by chance, so the simplest is shipped",
    )


def _auc(run: Path, shard: Shard, rows: npt.NDArray[np.intp]) -> float:
    weights = None if shard.weights is None else shard.weights[rows]
    return metrics.auc(np.asarray(shard.labels)[rows], _logits(run)[rows], weights)


def _logits(run: Path) -> npt.NDArray[np.float32]:
    """Return a run's logits of the validation rows."""
    return np.asarray(LogitTable(teacher_tables([run], "valid")[0]).logits_NM[:, 0])
