"""Choose greedily which estimators teach together, and with which weights, by the logloss of their mean on validation
rows.

An estimator may be taken more than once, which gives it more weight. Shapes: N rows, M estimators.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.halves import Rows, halves

Floats = npt.NDArray[np.float64]
MAX_MEMBERS = 8
MIN_SHARE = 0.05  # A member must add this share of the gain so far; less would be lost on a student.


@dataclass(frozen=True)
class Step:
    """One member taken, and the logloss of the mean with it: on the rows that chose it, and on those that confirm."""

    member: int
    logloss: float
    confirmed: float


@dataclass(frozen=True)
class Selection:
    """The members in the order in which they were taken, and the one that was not worth adding."""

    steps: tuple[Step, ...]
    refused: Step | None

    @property
    def members(self) -> list[int]:
        """Return the members, as often as they were taken."""
        return [step.member for step in self.steps]


def select_members(
    labels: npt.NDArray[np.generic],
    logits_MN: Sequence[npt.NDArray[np.generic]],
    weights: npt.NDArray[np.generic] | None = None,
    *,
    max_members: int = MAX_MEMBERS,
) -> Selection:
    """Start with the best estimator, and add the one that lowers the logloss of the mean most, as long as it pays.

    Half of the rows choose. A member must lower the logloss on the other half, too, and by a fair share of what the
    members before it have gained.
    """
    chooses, confirms = halves(labels)
    columns = [np.asarray(logits, np.float64) for logits in logits_MN]
    total: Floats = np.zeros(len(np.asarray(labels)))
    steps: list[Step] = []

    def loss(logits_N: Floats, rows: Rows) -> float:
        masses = None if weights is None else np.asarray(weights)[rows]
        return metrics.logloss(np.asarray(labels)[rows], logits_N[rows], masses)

    while len(steps) < max_members:
        means = [(total + column) / (len(steps) + 1) for column in columns]
        losses = [loss(mean_N, chooses) for mean_N in means]
        member = int(np.argmin(losses))
        step = Step(member, losses[member], loss(means[member], confirms))
        if steps and not _pays(step, steps):
            return Selection(tuple(steps), step)
        steps.append(step)
        total += columns[member]
    return Selection(tuple(steps), None)


def _pays(step: Step, before: Sequence[Step]) -> bool:
    """Return whether a member lowers both losses, and the first by a fair share of the gain so far."""
    gain = before[-1].logloss - step.logloss
    so_far = before[0].logloss - before[-1].logloss
    return gain > MIN_SHARE * so_far and gain > 0 and step.confirmed < before[-1].confirmed
