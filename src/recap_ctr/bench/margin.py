"""How far students are ahead of an ensemble, and how much other rows, seeds and members would change that."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student_t

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData, Shard, held_out_shards
from recap_ctr.evaluation import metrics
from recap_ctr.training.parallel import teacher_tables

Floats = npt.NDArray[np.float64]
NOTE = (
    "Errors of these differences are over rows (paired), the students' seeds and the ensemble's members, with degrees"
    " of freedom by Welch and Satterthwaite. All students have the same teachers; what others would make of them is not"
    " in the error."
)


@dataclass(frozen=True)
class Margin:
    """A mean difference in AUC between students and an ensemble, and its standard errors; None where it takes two."""

    mean: float
    rows: float
    """Over rows: DeLong's, of the mean over students of their difference, which is paired row by row."""
    seeds: float | None
    """Over the students' seeds, of which there are `num_seeds`."""
    members: float | None
    """Over the ensemble's members, by the jackknife: one of `num_members` left out at a time."""
    num_seeds: int
    num_members: int

    @property
    def error(self) -> float:
        """Return the standard error over all three, which are independent."""
        return math.hypot(self.rows, self.seeds or 0.0, self.members or 0.0)

    @property
    def freedom(self) -> float:
        """Return the degrees of freedom of the error, by Welch and Satterthwaite; the number of rows is taken to be
        infinite."""
        parts = [
            error**4 / (count - 1)
            for error, count in ((self.seeds, self.num_seeds), (self.members, self.num_members))
            if error
        ]
        return self.error**4 / sum(parts) if parts else math.inf

    @property
    def p(self) -> float:
        """Return the two-tailed p of no difference, by Student's t."""
        if not self.error:
            return 1.0
        return float(2 * student_t.sf(abs(self.mean) / self.error, self.freedom))

    def __str__(self) -> str:
        errors = {
            "rows": self.rows,
            f"{self.num_seeds} seeds": self.seeds,
            f"{self.num_members} members": self.members,
        }
        parts = [f"{100 * error:.3f} over {name}" for name, error in errors.items() if error is not None]
        freedom = "many" if math.isinf(self.freedom) else f"{self.freedom:.1f}"
        return (
            f"{100 * self.mean:+.3f} ± {100 * self.error:.3f} points of AUC (standard errors: {', '.join(parts)};"
            f" t-test with {freedom} degrees of freedom, p {self.p:.3f})"
        )


def margin(data: PreparedData, students: Sequence[Path], members: Sequence[Path], split: str) -> Margin:
    """Return how far the runs `students` are ahead of the mean logit of the runs `members` on one split."""
    shard = held_out_shards(data)[split]

    def logits(runs: Sequence[Path]) -> Floats:
        tables = [LogitTable(path) for path in teacher_tables(runs, split)]
        return np.stack([np.asarray(table.logits_NM, np.float64).mean(axis=1) for table in tables])

    def auc(logits_N: Floats) -> float:
        return metrics.auc(shard.labels, logits_N, shard.weights)

    students_SN, members_MN = logits(students), logits(members)
    ensemble_N = members_MN.mean(axis=0)
    aucs = [auc(student_N) for student_N in students_SN]
    count = len(members_MN)
    over_members = None
    if count > 1:
        without = [auc(np.delete(members_MN, at, axis=0).mean(axis=0)) for at in range(count)]
        over_members = math.sqrt((count - 1) * statistics.pvariance(without))
    return Margin(
        mean=statistics.mean(aucs) - auc(ensemble_N),
        rows=_error_over_rows(shard, students_SN, ensemble_N),
        seeds=statistics.stdev(aucs) / math.sqrt(len(aucs)) if len(aucs) > 1 else None,
        members=over_members,
        num_seeds=len(aucs),
        num_members=count,
    )


def _error_over_rows(shard: Shard, students_SN: Floats, ensemble_N: Floats) -> float:
    """Return DeLong's error of the mean difference in AUC between the students and the ensemble."""
    won_N = np.mean([pairs_won(shard, student_N) for student_N in students_SN], axis=0)
    return error_of_lead(shard, won_N - pairs_won(shard, ensemble_N))


def pairs_won(shard: Shard, logits_N: npt.NDArray[np.floating]) -> Floats:
    """Return, for each row that has a weight, against what share of the rows of the other label it is ranked right."""
    rows = metrics.check_rows(shard.labels, logits_N, shard.weights)
    return metrics.pairs_won(rows.positive, rows.scores, rows.masses)


def error_of_lead(shard: Shard, lead_N: Floats) -> float:
    """Return DeLong's standard error, over rows, of the mean of a difference in pairs won."""
    rows = metrics.check_rows(shard.labels, np.zeros(len(shard)), shard.weights)
    return metrics.delong(rows.positive, lead_N, rows.masses)[1]
