"""The results of a diagnosis: families, decompositions, gain curves with forecasts, and churn."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from recap_ctr.diagnose.figures import share_removed
from recap_ctr.diagnose.measure import Estimate

TOLERANCE = 0.05  # relative error of the second order, against the exact gain, that needs no warning
ROUNDING = 1e-12  # rounding error of losses and logits; that of variances is its square


@dataclass(frozen=True)
class Family:
    """Estimators that vary along `axis`, each the mean over the `averaged` axes; figures are means over the other axes.

    Two estimators' logits of the same row differ only by their noise, so any two estimators give `variance`. The noise
    that all of them share can't be told from the signal, unless the family was drawn several times: several runs, each
    with its checkpoints or routes. Then `tau2` is the variance of one such estimator over runs and members, and `rho`
    the share of it that members of a run have in common (the intraclass correlation), so that
    tau2 (1 - rho) = `variance`. Otherwise both are None. For runs they always are: runs share their training data, and
    their logits don't show what other data would have changed.
    """

    axis: str
    averaged: tuple[str, ...]
    count: int
    removed: Estimate
    """V_ns: the variance that averaging these estimators removes (Eq. 5), in squared logits."""
    variance: Estimate
    """tau² (1 - rho), an unbiased estimate for any number of estimators."""
    tau2: Estimate | None
    rho: Estimate | None
    predicted: Estimate
    """The loss that their mean logit saves, to second order (Eq. 6)."""
    gain: Estimate
    """The loss that it does save. The exact gap equals the measured one, because labels cancel (Appendix B.3)."""
    loss_alone: Estimate
    loss_together: Estimate
    auc_alone: Estimate
    auc_together: Estimate
    auc_gain: Estimate
    over_last: Estimate | None
    """For a trajectory: the loss that its mean saves over the last checkpoint; negative if early ones are bad."""
    auc_over_last: Estimate | None
    """For a trajectory: the AUC that its mean gains over the last checkpoint."""

    @property
    def warning(self) -> str | None:
        """Return a warning if Eq. 6 does not hold for this family; None if it does."""
        return second_order_warning(self.axis, self.averaged, self.predicted, self.gain)

    @property
    def saving(self) -> Estimate:
        """Return the loss that the mean saves over using one estimator: the last checkpoint, or one run or route."""
        return self.gain if self.over_last is None else self.over_last

    def more(self, count: int) -> Estimate:
        """Return the loss that the mean of `count` such estimators would save over the mean of these (Eq. 6)."""
        return self.predicted.scaled((1 / self.count - 1 / count) / share_removed(self.count))


def second_order_warning(
    axis: str, averaged: tuple[str, ...], predicted: Estimate, gain: Estimate
) -> str | None:
    """Return a warning if the estimators disagree so much that Eq. 6 misses the measured gain, else None."""
    if not abs(predicted.value - gain.value) > max(TOLERANCE * gain.value, ROUNDING):
        return None
    means = f" of means over {' and '.join(averaged)}" if averaged else ""
    return (
        f"The axis {axis}{means}: Eq. 6 predicts a gain of {predicted.value:.3g}, but the measured gain is"
        f" {gain.value:.3g}. The estimators disagree too much for Eq. 6 and for forecasts; use the measured gains."
    )


@dataclass(frozen=True)
class Combination:
    """The estimators that remain when some axes are averaged, and the effect of averaging one more (Figure 3)."""

    averaged: tuple[str, ...]
    loss: Estimate
    auc: Estimate
    families: tuple[Family, ...]


@dataclass(frozen=True)
class Decomposition:
    """The variance over the axes of `order`, split among them (Eq. 7, Appendix C.2); a mean over any other axis."""

    order: tuple[str, ...]
    shares: tuple[Estimate, ...]
    """The variance that averaging each axis removes after the axes before it."""
    total: Estimate


@dataclass(frozen=True)
class CurvePoint:
    """The mean of `count` estimators, averaged over the ways to choose them."""

    count: int
    loss: Estimate
    auc: Estimate
    predicted: Estimate
    gain: Estimate
    auc_gain: Estimate


@dataclass(frozen=True)
class ForecastPoint:
    """The expected mean of `count` estimators of the same kind; most of them may not exist yet."""

    count: int
    loss: Estimate
    gain: Estimate
    auc: Estimate | None


@dataclass(frozen=True)
class Curve:
    """The gain from averaging more estimators along `axis`: measured, and forecast beyond their number."""

    axis: str
    averaged: tuple[str, ...]
    held: dict[str, int]
    points: tuple[CurvePoint, ...]
    forecast: tuple[ForecastPoint, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Churn:
    """How much the scores of a row change when a model is trained again: a mean over pairs of runs."""

    averaged: tuple[str, ...]
    held: dict[str, int]
    logit_mean: Estimate
    logit_rms: Estimate
    probability_mean: Estimate
    probability_rms: Estimate
    decile_changes: Estimate
    """The share of rows that move to another tenth of the ranking."""


@dataclass(frozen=True)
class Diagnosis:
    """All figures of a grid of estimators."""

    num_rows: int
    num_auc_rows: int
    """The number of evenly spaced rows that AUC and deciles are computed on."""
    runs: tuple[str, ...]
    steps: tuple[int | None, ...]
    routes: tuple[str | None, ...]
    combinations: tuple[Combination, ...]
    decompositions: tuple[Decomposition, ...]
    curves: tuple[Curve, ...]
    churn: tuple[Churn, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the content of a diagnosis file."""
        return {"kind": "diagnosis", "format": 1, **asdict(self)}

    def family(self, axis: str, averaged: Collection[str] = ()) -> Family | None:
        """Return the family along `axis` with the axes `averaged`; None if the axis has only one point."""
        for combination in self.combinations:
            if set(combination.averaged) == set(averaged):
                return next((family for family in combination.families if family.axis == axis), None)
        return None


MIN_TEACHER_GAIN = 1e-4
"""Logloss that one more teacher must save for a forecast to recommend it."""


@dataclass(frozen=True)
class Worth:
    """How good the mean of `count` estimators is on validation rows."""

    count: int
    loss: Estimate
    auc: Estimate | None
    """None where the gain in AUC can't be told from the noise of the rows."""
    gain: Estimate
    """Logloss saved over one teacher, one route of the averaged student, or the best arm of the probe."""


@dataclass(frozen=True)
class AxisChoice(Worth):
    """One choice on an axis, such as a number of teachers or routes, with its costs."""

    minutes: float
    """Training time from the beginning, on this machine."""
    parameters: int
    """Number of stored parameters."""
    microseconds: float
    """Time to score one row."""


@dataclass(frozen=True)
class ProbeArms:
    """The better half of the probe's arms, best first, as estimators that exist before any teacher does."""

    names: tuple[str, ...]
    rows: int
    """Training rows of each arm; arms that see only a sample of the rows disagree more than teachers do."""
    means: tuple[Worth, ...]
    """Measured: the mean of the best 1, 2, .. arms."""
    forecast: tuple[Worth, ...]
    """Predicted from the arms' disagreement: the mean of 1, 2, .. runs that are like the average arm."""


@dataclass(frozen=True)
class Forecast:
    """What each choice of teachers, routes and averaging is worth and costs, and the recommended choice."""

    runs: int
    """Number of teachers that the forecast was made from."""
    rows: int
    """Number of validation rows."""
    teachers: tuple[AxisChoice, ...]
    """The ensembles of 1, 2, .. teachers; those of more than `runs` teachers are predicted."""
    routes: tuple[AxisChoice, ...]
    """One student, trained on labels alone, on one and on more routes; measured."""
    averaging: tuple[AxisChoice, ...]
    """The same student on one route: with its last weights, and with their average."""
    arms: ProbeArms | None
    """None where nothing was probed."""
    choice: dict[str, Any]
    """The recommended numbers of teachers and routes, and the training minutes that they take."""
    notes: tuple[str, ...]
