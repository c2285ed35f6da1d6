"""How far students are ahead of an ensemble, with what other rows, other seeds and other members would change."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.evaluation import metrics
from recap_ctr.training.parallel import teacher_tables

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Margin:
    """A mean difference in AUC between students and an ensemble, and its standard errors; None where it takes two."""

    mean: float
    rows: float
    """Over rows: DeLong's, of the students' mean logit against the ensemble's."""
    seeds: float | None
    """Over the students' seeds."""
    members: float | None
    """Over the ensemble's members, by the jackknife: one left out at a time."""

    @property
    def error(self) -> float:
        """Return the standard error over all three, which are independent."""
        return math.hypot(self.rows, self.seeds or 0.0, self.members or 0.0)

    @property
    def p(self) -> float:
        """Return the two-tailed p of no difference, by the normal distribution."""
        return float(2 * ndtr(-abs(self.mean) / self.error)) if self.error else 1.0

    def __str__(self) -> str:
        errors = {"rows": self.rows, "seeds": self.seeds, "members": self.members}
        parts = [f"{100 * error:.3f} over {name}" for name, error in errors.items() if error is not None]
        return (
            f"{100 * self.mean:+.3f} ± {100 * self.error:.3f} points of AUC (standard errors: {', '.join(parts)};"
            f" p {self.p:.3f})"
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
    rows = metrics.auc_difference(shard.labels, students_SN.mean(axis=0), ensemble_N, shard.weights)
    count = len(members_MN)
    over_members = None
    if count > 1:
        without = [auc(np.delete(members_MN, at, axis=0).mean(axis=0)) for at in range(count)]
        over_members = math.sqrt((count - 1) * statistics.pvariance(without))
    return Margin(
        mean=statistics.mean(aucs) - auc(ensemble_N),
        rows=rows.standard_error,
        seeds=statistics.stdev(aucs) / math.sqrt(len(aucs)) if len(aucs) > 1 else None,
        members=over_members,
    )
