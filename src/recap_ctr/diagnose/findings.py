"""A diagnosis in plain sentences."""

from collections.abc import Iterator

from recap_ctr.diagnose.measure import Estimate
from recap_ctr.diagnose.results import Diagnosis, Family

PLURAL = {"run": "runs", "trajectory": "checkpoints", "route": "routes"}
SOURCE = {"run": "between runs", "trajectory": "along the trajectory", "route": "between routes"}
ACTION = {
    "run": "runs (or distil their mean into one model)",
    "trajectory": "the trajectory (EMA; no further training)",
    "route": "routes (when scoring; no further training)",
}


def findings(diagnosis: Diagnosis) -> list[str]:
    """Return where the variance comes from, what more estimators would gain, what to do next, and warnings."""
    varied = [family.axis for family in diagnosis.combinations[0].families]
    sentences = [_summary(diagnosis)]
    if varied:
        sentences.append(_variance(diagnosis, varied))
        for axis in varied:
            sentences += _axis(diagnosis, axis)
        sentences += _churn(diagnosis)
        sentences.append(_next_steps(diagnosis, varied))
    return [*sentences, *diagnosis.warnings]


def _summary(diagnosis: Diagnosis) -> str:
    single, mean = diagnosis.combinations[0], diagnosis.combinations[-1]
    counts = zip((diagnosis.runs, diagnosis.steps, diagnosis.routes), PLURAL.values(), strict=True)
    grid = " × ".join(f"{len(points)} {name if len(points) > 1 else name[:-1]}" for points, name in counts)
    scores = f"One estimator: logloss {single.loss.value:.5f}, AUC {single.auc.value:.5f}."
    comparison = "There is nothing to compare it with."
    if mean is not single:
        comparison = f"The mean of all: logloss {mean.loss.value:.5f}, AUC {mean.auc.value:.5f}."
    return f"{diagnosis.num_rows:,} rows, {grid}. {scores} {comparison}"


def _variance(diagnosis: Diagnosis, varied: list[str]) -> str:
    """Return how the variance splits over the axes, in the paper's order: routes first, runs last."""
    order = ("route", "trajectory", "run")
    split = next(candidate for candidate in diagnosis.decompositions if candidate.order == order)
    parts = [
        f"{share.value / split.total.value:.1%} {SOURCE[axis]}"
        for axis, share in zip(split.order, split.shares, strict=True)
        if axis in varied and split.total.value > 0
    ]
    return (
        f"Variance between estimators: {_number(split.total.value)} squared logits; of it {', '.join(parts)}."
    )


def _axis(diagnosis: Diagnosis, axis: str) -> Iterator[str]:
    """Yield the measured gain along an axis, and the gain of more estimators on it."""
    families = {family.axis: family for family in diagnosis.combinations[0].families}
    alone = families[axis]
    after = diagnosis.family(axis, families.keys() - {axis})
    when_averaged = ""
    if after is not alone and after is not None:
        when_averaged = f", and {_number(after.gain.value)} if all other axes are averaged"
    yield (
        f"The mean of {alone.count} {PLURAL[axis]} saves {_interval(alone.gain)} of logloss"
        f" (Eq. 6: {_number(alone.predicted.value)}){when_averaged}; AUC gains {_interval(alone.auc_gain)}."
    )
    if alone.over_last is not None and alone.auc_over_last is not None:
        yield (
            f"Compared with the last checkpoint alone, that mean saves {_interval(alone.over_last)};"
            f" AUC gains {_interval(alone.auc_over_last)}."
        )
    last: Family = after or alone
    count = last.count + 1 if axis == "run" else 2 * last.count
    more = "One more run" if axis == "run" else f"{count} {PLURAL[axis]} instead of {last.count}"
    condition = " with all other axes averaged" if last is not alone else ""
    yield f"{more} would save a further {_interval(_further(diagnosis, last, count))}{condition}."


def _further(diagnosis: Diagnosis, family: Family, count: int) -> Estimate:
    """Return what the mean of `count` would save over the family's; routes share leaves, as their curve knows."""
    for curve in diagnosis.curves:
        if family.axis == "route" and curve.axis == "route" and set(curve.averaged) == set(family.averaged):
            gains = {point.count: point.gain.value for point in curve.forecast}
            if count in gains and gains.get(family.count):
                return family.predicted.scaled(gains[count] / gains[family.count] - 1)
    return family.more(count)


def _churn(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.churn:
        return
    single, averaged = diagnosis.churn[0], diagnosis.churn[-1]
    sentence = (
        "If a model is trained again, the probability of a row changes by"
        f" {_number(single.probability_mean.value)} on average,"
        f" and {single.decile_changes.value:.1%} of rows change their decile"
    )
    if averaged is not single:
        sentence += (
            f"; with means over {' and '.join(averaged.averaged)}, by {_number(averaged.probability_mean.value)}"
            f" and {averaged.decile_changes.value:.1%}"
        )
    yield f"{sentence}."


def _next_steps(diagnosis: Diagnosis, varied: list[str]) -> str:
    """Return the axes in the order of the loss that each saves after those before it."""
    averaged: list[str] = []
    steps = []
    while len(averaged) < len(varied):
        candidates = [diagnosis.family(axis, averaged) for axis in varied if axis not in averaged]
        best = max(
            (family for family in candidates if family is not None), key=lambda family: family.saving.value
        )
        further = "a further " if averaged else ""
        noise = "" if best.saving.low > 0 else " (within the noise of these rows)"
        steps.append(f"{ACTION[best.axis]}, {further}{_number(best.saving.value)}{noise}")
        averaged.append(best.axis)
    return f"Average in this order, by the logloss it saves: {'; '.join(steps)}."


def _interval(estimate: Estimate) -> str:
    runs = ""
    if estimate.runs_low is not None and estimate.runs_high is not None:
        runs = f", other runs {_number(estimate.runs_low)} to {_number(estimate.runs_high)}"
    rows = f"{_number(estimate.low)} to {_number(estimate.high)}"
    return f"{_number(estimate.value)} (other rows {rows}{runs})"


def _number(value: float) -> str:
    return f"{value:.3g}"
