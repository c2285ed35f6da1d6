"""What a diagnosis holds: families, decompositions, gain curves with forecasts, churn."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from recap_ctr.diagnose.figures import share_removed
from recap_ctr.diagnose.measure import Estimate

TOLERANCE = 0.05  # by which the second order may miss the exact gain before it is called wrong
ROUNDING = 1e-12  # of losses and logits; variances are its square


@dataclass(frozen=True)
class Family:
    """Estimators that differ along `axis`, each the mean over the `averaged` axes; figures are means over the rest.

    Between one logit and the next of the same row there is nothing but the estimators' disagreement, so `variance` is
    known from any two. What they have in common can't be told from the signal in one draw of the family. It shows only
    where the family was drawn several times: several runs, each with its checkpoints or routes. Then `tau2` is the
    variance of one such estimator over runs and members, and `rho` the share that members of a run have in common
    (the intraclass correlation), so that tau2 (1 - rho) = `variance`. Elsewhere they are None; in particular for runs,
    which share their training data, and no logit tells what other data would have changed.
    """

    axis: str
    averaged: tuple[str, ...]
    count: int
    removed: Estimate
    """V_ns: what averaging just these removes (Eq. 5), squared logits."""
    variance: Estimate
    """tau² (1 - rho): unbiased, whatever their number."""
    tau2: Estimate | None
    rho: Estimate | None
    predicted: Estimate
    """Loss that their mean saves, to second order (Eq. 6)."""
    gain: Estimate
    """Loss that it does save; the exact gap, which is the measured one, as labels cancel (Appendix B.3)."""
    loss_alone: Estimate
    loss_together: Estimate
    auc_alone: Estimate
    auc_together: Estimate
    auc_gain: Estimate
    over_last: Estimate | None
    """Of a trajectory: loss that its mean saves over the last checkpoint alone; negative, where early ones are bad."""
    auc_over_last: Estimate | None

    @property
    def warning(self) -> str | None:
        """Why the second order is not to be trusted here; None if it is."""
        return mistrust(self.axis, self.averaged, self.predicted, self.gain)

    @property
    def saving(self) -> Estimate:
        """Over what one would use instead: the last checkpoint, or any one run or route."""
        return self.gain if self.over_last is None else self.over_last

    def more(self, count: int) -> Estimate:
        """Loss that the mean of `count` such estimators would save over that of these (Eq. 6)."""
        return self.predicted.scaled((1 / self.count - 1 / count) / share_removed(self.count))


def mistrust(axis: str, averaged: tuple[str, ...], predicted: Estimate, gain: Estimate) -> str | None:
    """A warning, where estimators disagree so much that Eq. 6 misses what their mean saves."""
    if not abs(predicted.value - gain.value) > max(TOLERANCE * gain.value, ROUNDING):
        return None
    means = f" of means over {' and '.join(averaged)}" if averaged else ""
    return (
        f"The axis {axis}{means}: the second order predicts a gain of {predicted.value:.3g}, but it is"
        f" {gain.value:.3g}; the estimators disagree too much for Eq. 6 and for forecasts, so go by measured gains."
    )


@dataclass(frozen=True)
class Combination:
    """The estimators that are left when some axes are averaged, and what averaging one more would do (Figure 3)."""

    averaged: tuple[str, ...]
    loss: Estimate
    auc: Estimate
    families: tuple[Family, ...]


@dataclass(frozen=True)
class Decomposition:
    """Variance over all axes of `order`, split among them in it (Eq. 7, Appendix C.2); mean over any other axis."""

    order: tuple[str, ...]
    shares: tuple[Estimate, ...]
    """What averaging each axis removes after those before it."""
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
    """The mean of `count` estimators of the same kind, most of which don't exist yet."""

    count: int
    loss: Estimate
    gain: Estimate
    auc: Estimate | None


@dataclass(frozen=True)
class Curve:
    """What more estimators along `axis` bring, and would bring."""

    axis: str
    averaged: tuple[str, ...]
    held: dict[str, int]
    points: tuple[CurvePoint, ...]
    forecast: tuple[ForecastPoint, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Churn:
    """How far the scores of a row move when a model is trained again; mean over pairs of runs."""

    averaged: tuple[str, ...]
    held: dict[str, int]
    logit_mean: Estimate
    logit_rms: Estimate
    probability_mean: Estimate
    probability_rms: Estimate
    decile_changes: Estimate
    """Share of rows that change their tenth of the ranking."""


@dataclass(frozen=True)
class Diagnosis:
    """All figures; `to_json` is what a file of it holds."""

    num_rows: int
    num_auc_rows: int
    """Evenly spaced ones, which AUC and deciles are taken from."""
    runs: tuple[str, ...]
    steps: tuple[int | None, ...]
    routes: tuple[str | None, ...]
    combinations: tuple[Combination, ...]
    decompositions: tuple[Decomposition, ...]
    curves: tuple[Curve, ...]
    churn: tuple[Churn, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "diagnosis", "format": 1, **asdict(self)}

    def family(self, axis: str, averaged: Collection[str] = ()) -> Family | None:
        """That of an axis which has several points, after others were averaged."""
        for combination in self.combinations:
            if set(combination.averaged) == set(averaged):
                return next((one for one in combination.families if one.axis == axis), None)
        return None
