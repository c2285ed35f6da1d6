"""The page of a diagnosis: where the variance comes from, and what averaging more estimators would gain."""

from collections.abc import Callable, Sequence
from typing import Any

from recap_ctr.diagnose import Decomposition, Diagnosis, Estimate, Family
from recap_ctr.pages.charts import Chart, Kind, Series
from recap_ctr.pages.page import Page, Section, Table

AXIS_NAMES = {"run": "runs", "trajectory": "checkpoints", "route": "routes"}


def page(diagnosis: Diagnosis, findings: Sequence[str], data: dict[str, Any], command: str = "") -> Page:
    """Return the page of a diagnosis; `data` holds the name and the fingerprint of the data.

    The first of the `findings`, which are sentences, leads the page. `command` would make the diagnosis again.
    """
    return Page(
        f"Diagnosis of estimators on {data['name']}",
        findings[0],
        tuple(
            section
            for section in (
                Section("Findings", points=tuple(findings[1:])),
                _gains(diagnosis),
                _theory(diagnosis),
                _residual(diagnosis),
                decomposition_section(diagnosis.decompositions),
                _churn(diagnosis),
                _configuration(diagnosis, data, command),
            )
            if section is not None
        ),
    )


def _series(
    name: str,
    x: Sequence[float],
    estimates: Sequence[Estimate],
    *,
    scale: float = 1.0,
    kind: Kind = "line",
    labels: Sequence[str] = (),
    dashed: bool = False,
) -> Series:
    """Return estimates with their intervals over rows as a series; y is multiplied by `scale`."""
    y, low, high = (
        tuple(scale * getattr(estimate, end) for estimate in estimates) for end in ("value", "low", "high")
    )
    return Series(name, tuple(x), y, low, high, kind, tuple(labels), dashed)


def _names(axes: Sequence[str]) -> str:
    """Return the names of axes, joined by "and"."""
    return " and ".join(AXIS_NAMES[axis] for axis in axes)


def _name(family: Family) -> str:
    means = f"means over {_names(family.averaged)}" if family.averaged else "nothing averaged"
    return f"{AXIS_NAMES[family.axis]}, {means}"


def _text(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    """Return an estimate with its interval over rows as text."""
    value, low, high = (scale * number for number in (estimate.value, estimate.low, estimate.high))
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _gains(diagnosis: Diagnosis) -> Section:
    """Return Figure 1b: what the mean of M estimators along one axis gains, with the other axes held fixed."""
    curves = [curve for curve in diagnosis.curves if not curve.averaged]
    charts = []
    for name, figure, label, scale in (
        ("gain-auc", "auc_gain", "gain in AUC (points)", 100.0),
        ("gain-loss", "gain", "gain in logloss", 1.0),
    ):
        series = tuple(
            _series(
                AXIS_NAMES[curve.axis],
                [float(point.count) for point in curve.points],
                [getattr(point, figure) for point in curve.points],
                scale=scale,
            )
            for curve in curves
        )
        charts.append(
            Chart(name, f"What averaging gains: {label}", "estimators in the mean", label, series, digits=5)
        )
    text = (
        "Each point is the average over the ways to choose that number of estimators. Bands are 95 % intervals over"
        " rows."
    )
    return Section("Gains", text, charts=tuple(charts))


def _by_axis(
    diagnosis: Diagnosis,
    x: Callable[[Family], Estimate],
    y: Callable[[Family], Estimate],
    scale: float = 1.0,
) -> tuple[Series, ...]:
    """Return one figure of each family against another: a point per family, a series per axis."""
    families = [family for combination in diagnosis.combinations for family in combination.families]
    by_axis = {axis: [family for family in families if family.axis == axis] for axis in AXIS_NAMES}
    return tuple(
        _series(
            AXIS_NAMES[axis],
            [x(family).value for family in members],
            [y(family) for family in members],
            scale=scale,
            kind="points",
            labels=[_name(family) for family in members],
        )
        for axis, members in by_axis.items()
        if members
    )


def _theory(diagnosis: Diagnosis) -> Section:
    """Return Figure 1c: the measured gain of every family against the gain that Eq. 6 predicts."""
    chart = Chart(
        "theory",
        "Measured against predicted gain",
        "predicted gain in logloss (Eq. 6)",
        "measured gain in logloss",
        _by_axis(diagnosis, lambda family: family.predicted, lambda family: family.gain),
        note="On the dotted line, the second-order prediction from the estimators' disagreement is exact.",
        diagonal=True,
        digits=6,
    )
    return Section("Theory", charts=(chart,))


def _residual(diagnosis: Diagnosis) -> Section:
    """Return Figure 3: the gain of averaging one more axis against the variance that is left on it."""
    chart = Chart(
        "residual",
        "Marginal gain against the variance that is left",
        "non-shared variance left on the axis",
        "gain in AUC (points)",
        _by_axis(diagnosis, lambda family: family.removed, lambda family: family.auc_gain, scale=100),
        digits=4,
    )
    header = (
        "averaged before",
        "axis",
        "estimators",
        "variance left (V_ns)",
        "gain in logloss",
        "gain in AUC",
    )
    rows = tuple(
        (
            _names(family.averaged) or "nothing",
            AXIS_NAMES[family.axis],
            str(family.count),
            _text(family.removed, 5),
            _text(family.gain, 6),
            _text(family.auc_gain, 3, 100),
        )
        for combination in diagnosis.combinations
        for family in combination.families
    )
    return Section(
        "Residual variance",
        "What averaging over an axis gains depends on what was averaged before.",
        tables=(Table(header, rows, note="Intervals are 95 % intervals over rows; AUC is in points."),),
        charts=(chart,),
    )


def decompositions_of(diagnosis: dict[str, Any]) -> list[Decomposition]:
    """Return the decompositions in the content of a diagnosis file."""
    return [
        Decomposition(
            tuple(entry["order"]),
            tuple(Estimate(**share) for share in entry["shares"]),
            Estimate(**entry["total"]),
        )
        for entry in diagnosis["decompositions"]
    ]


def decomposition_section(decompositions: Sequence[Decomposition]) -> Section | None:
    """Return the chart of the axes' shares of the variance, by order of averaging; None without any variance."""
    num_axes = max((len(decomposition.order) for decomposition in decompositions), default=0)
    complete = [
        decomposition
        for decomposition in decompositions
        if len(decomposition.order) == num_axes and decomposition.total.value > 0
    ]
    if not complete:
        return None
    order_names = tuple(
        " → ".join(AXIS_NAMES[axis] for axis in decomposition.order) for decomposition in complete
    )
    series = tuple(
        Series(
            AXIS_NAMES[axis],
            tuple(float(index) for index in range(len(complete))),
            tuple(
                decomposition.shares[decomposition.order.index(axis)].value / decomposition.total.value
                for decomposition in complete
            ),
            kind="bars",
            labels=order_names,
        )
        for axis in complete[0].order
    )
    chart = Chart(
        "decomposition",
        "Shares of the variance, by the order of averaging",
        "order",
        "share of the variance",
        series,
        note="A later axis can remove only the variance that the axes before it have left.",
    )
    return Section("Decomposition", charts=(chart,))


def _churn(diagnosis: Diagnosis) -> Section | None:
    if not diagnosis.churn:
        return None
    header = (
        "scores from",
        "mean change of a score",
        "change of a logit (root mean square)",
        "rows that change their decile",
    )
    rows = tuple(
        (
            f"means over {_names(churn.averaged)}" if churn.averaged else "one checkpoint, one route",
            _text(churn.probability_mean, 4),
            _text(churn.logit_rms, 4),
            _text(churn.decile_changes, 3),
        )
        for churn in diagnosis.churn
    )
    text = "How far the scores of a row move when a model is trained again with another seed and nothing else changes."
    return Section("Churn", text, tables=(Table(header, rows),))


def _configuration(diagnosis: Diagnosis, data: dict[str, Any], command: str) -> Section:
    rows = (
        ("data", f"{data['name']}, fingerprint {data['fingerprint']}"),
        ("rows", f"{diagnosis.num_rows:,}"),
        ("runs", str(len(diagnosis.runs))),
        ("checkpoints of each run", str(len(diagnosis.steps))),
        ("routes of each checkpoint", str(len(diagnosis.routes))),
        *(("warning", warning) for warning in diagnosis.warnings),
    )
    return Section("Configuration", tables=(Table(("key", "value"), rows),), code=command)
