"""What a diagnosis says, in plain sentences."""

from collections.abc import Iterator

from recap_ctr.diagnose.measure import Estimate
from recap_ctr.diagnose.results import Diagnosis, Family

PLURAL = {"run": "runs", "trajectory": "checkpoints", "route": "routes"}
WHERE = {"run": "between runs", "trajectory": "along the trajectory", "route": "between routes"}
HOW = {
    "run": "runs (or distil their mean into one model)",
    "trajectory": "the trajectory (EMA; no further training)",
    "route": "routes (when scoring; no further training)",
}


def findings(diagnosis: Diagnosis) -> list[str]:
    """Where the variance sits, what more estimators would bring, what to do next, and what not to trust."""
    varied = [family.axis for family in diagnosis.combinations[0].families]
    said = [_opening(diagnosis)]
    if varied:
        said.append(_where(diagnosis, varied))
        for axis in varied:
            said += _axis(diagnosis, axis)
        said += _churn(diagnosis)
        said.append(_next(diagnosis, varied))
    return [*said, *diagnosis.warnings]


def _opening(diagnosis: Diagnosis) -> str:
    first, last = diagnosis.combinations[0], diagnosis.combinations[-1]
    counts = zip((diagnosis.runs, diagnosis.steps, diagnosis.routes), PLURAL.values(), strict=True)
    grid = " × ".join(f"{len(points)} {name if len(points) > 1 else name[:-1]}" for points, name in counts)
    one = f"One estimator: logloss {first.loss.value:.5f}, AUC {first.auc.value:.5f}."
    rest = f"The mean of all: logloss {last.loss.value:.5f}, AUC {last.auc.value:.5f}."
    told = rest if last is not first else "There is nothing to compare it with."
    return f"{diagnosis.num_rows:,} rows, {grid}. {one} {told}"


def _where(diagnosis: Diagnosis, varied: list[str]) -> str:
    """The paper's order: routes first, runs last."""
    split = next(one for one in diagnosis.decompositions if one.order == ("route", "trajectory", "run"))
    parts = [
        f"{share.value / split.total.value:.1%} {WHERE[axis]}"
        for axis, share in zip(split.order, split.shares, strict=True)
        if axis in varied and split.total.value > 0
    ]
    return (
        f"Variance between estimators: {_number(split.total.value)} squared logits; of it {', '.join(parts)}."
    )


def _axis(diagnosis: Diagnosis, axis: str) -> Iterator[str]:
    found, others = (
        diagnosis.combinations[0].families,
        {one.axis for one in diagnosis.combinations[0].families},
    )
    alone = next(one for one in found if one.axis == axis)
    after = diagnosis.family(axis, others - {axis})
    rest = (
        ""
        if after is alone or after is None
        else f", and {_number(after.gain.value)} where all else is averaged"
    )
    yield (
        f"The mean of {alone.count} {PLURAL[axis]} saves {_interval(alone.gain)} of logloss"
        f" (Eq. 6: {_number(alone.predicted.value)}){rest}; AUC gains {_interval(alone.auc_gain)}."
    )
    if alone.over_last is not None and alone.auc_over_last is not None:
        yield (
            f"Over the last checkpoint alone that mean saves {_interval(alone.over_last)};"
            f" AUC gains {_interval(alone.auc_over_last)}."
        )
    last: Family = after or alone
    count = last.count + 1 if axis == "run" else 2 * last.count
    more = "One more run" if axis == "run" else f"{count} {PLURAL[axis]} instead of {last.count}"
    where = " on top of all that is averaged" if last is not alone else ""
    yield f"{more} would save a further {_interval(last.more(count))}{where}."


def _churn(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.churn:
        return
    single, settled = diagnosis.churn[0], diagnosis.churn[-1]
    told = (
        f"Trained again, a model moves the probability of a row by {_number(single.probability_mean.value)} on average,"
        f" and {single.decile_changes.value:.1%} of rows change their decile"
    )
    if settled is not single:
        told += (
            f"; with means over {' and '.join(settled.averaged)} it is {_number(settled.probability_mean.value)}"
            f" and {settled.decile_changes.value:.1%}"
        )
    yield f"{told}."


def _next(diagnosis: Diagnosis, varied: list[str]) -> str:
    """The axes in the order of what they add to those before them."""
    averaged: list[str] = []
    steps = []
    while len(averaged) < len(varied):
        left = [diagnosis.family(axis, averaged) for axis in varied if axis not in averaged]
        best = max((family for family in left if family is not None), key=lambda family: family.saving.value)
        further = "a further " if averaged else ""
        noise = "" if best.saving.low > 0 else " (within the noise of these rows)"
        steps.append(f"{HOW[best.axis]}, {further}{_number(best.saving.value)}{noise}")
        averaged.append(best.axis)
    return f"Average in this order, for the logloss it saves: {'; '.join(steps)}."


def _interval(estimate: Estimate) -> str:
    runs = ""
    if estimate.runs_low is not None and estimate.runs_high is not None:
        runs = f", other runs {_number(estimate.runs_low)} to {_number(estimate.runs_high)}"
    rows = f"{_number(estimate.low)} to {_number(estimate.high)}"
    return f"{_number(estimate.value)} (other rows {rows}{runs})"


def _number(value: float) -> str:
    return f"{value:.3g}"
