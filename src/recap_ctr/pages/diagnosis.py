"""The page of a diagnosis: where the variance sits, and what averaging more estimators would bring."""

from collections.abc import Callable, Sequence
from typing import Any

from recap_ctr.diagnose import Decomposition, Diagnosis, Estimate, Family
from recap_ctr.pages.charts import Chart, Kind, Series
from recap_ctr.pages.page import Page, Section, Table

AXIS_NAMES = {"run": "runs", "trajectory": "checkpoints", "route": "routes"}


def page(diagnosis: Diagnosis, findings: Sequence[str], data: dict[str, Any], command: str = "") -> Page:
    """`data` says which data these were: name and fingerprint."""
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
                _about(diagnosis, data, command),
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
    """Estimates with their intervals over rows."""
    y, low, high = (tuple(scale * getattr(one, end) for one in estimates) for end in ("value", "low", "high"))
    return Series(name, tuple(x), y, low, high, kind, tuple(labels), dashed)


def _name(family: Family) -> str:
    means = " and ".join(AXIS_NAMES[axis] for axis in family.averaged)
    return f"{AXIS_NAMES[family.axis]}, {f'means over {means}' if means else 'nothing averaged'}"


def _text(one: Estimate, digits: int, scale: float = 1.0) -> str:
    return f"{scale * one.value:.{digits}f} [{scale * one.low:.{digits}f}, {scale * one.high:.{digits}f}]"


def _gains(diagnosis: Diagnosis) -> Section:
    """Figure 1b: what the mean of M estimators gains along each axis, others held."""
    own = [curve for curve in diagnosis.curves if not curve.averaged]
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
            for curve in own
        )
        charts.append(
            Chart(name, f"What averaging brings: {label}", "estimators in the mean", label, series, digits=5)
        )
    return Section(
        "Gains",
        "Each point is the mean over the ways to choose so many estimators; bands are 95 % intervals over rows.",
        charts=tuple(charts),
    )


def _by_axis(
    diagnosis: Diagnosis,
    x: Callable[[Family], Estimate],
    y: Callable[[Family], Estimate],
    scale: float = 1.0,
) -> tuple[Series, ...]:
    """A point for each family: one figure against another, the axes apart."""
    families = [one for combination in diagnosis.combinations for one in combination.families]
    own = {axis: [one for one in families if one.axis == axis] for axis in AXIS_NAMES}
    return tuple(
        _series(
            AXIS_NAMES[axis], [x(one).value for one in found], [y(one) for one in found], scale=scale, kind="points",
            labels=[_name(one) for one in found],
        )
        for axis, found in own.items()
        if found
    )  # fmt: skip


def _theory(diagnosis: Diagnosis) -> Section:
    """Figure 1c: the gain that Eq. 6 predicts against the one that was measured, over all families."""
    series = _by_axis(diagnosis, lambda one: one.predicted, lambda one: one.gain)
    chart = Chart(
        "theory", "Measured gain against the theory's", "predicted gain in logloss (Eq. 6)", "measured gain in logloss",
        series, diagonal=True, digits=6,
        note="On the dotted line the second-order prediction from the estimators' disagreement is exact.",
    )  # fmt: skip
    return Section("Theory", charts=(chart,))


def _residual(diagnosis: Diagnosis) -> Section:
    """Figure 3: the gain of adding an axis against the variance that those before it left for it."""
    series = _by_axis(diagnosis, lambda one: one.removed, lambda one: one.auc_gain, scale=100)
    chart = Chart(
        "residual", "Marginal gain against the variance that is left", "non-shared variance left on the axis",
        "gain in AUC (points)", series, digits=4,
    )  # fmt: skip
    header = (
        "averaged already",
        "axis",
        "estimators",
        "variance left (V_ns)",
        "gain in logloss",
        "gain in AUC",
    )
    rows = tuple(
        (
            " and ".join(AXIS_NAMES[axis] for axis in one.averaged) or "nothing",
            AXIS_NAMES[one.axis],
            str(one.count),
            _text(one.removed, 5),
            _text(one.gain, 6),
            _text(one.auc_gain, 3, 100),
        )
        for combination in diagnosis.combinations
        for one in combination.families
    )
    return Section(
        "Residual variance",
        "What an axis still brings depends on what was averaged before it.",
        tables=(Table(header, rows, note="With 95 % intervals over rows; AUC in points."),),
        charts=(chart,),
    )


def decompositions_of(record: dict[str, Any]) -> list[Decomposition]:
    """Those of a diagnosis, from its file."""
    return [
        Decomposition(
            tuple(one["order"]), tuple(Estimate(**share) for share in one["shares"]), Estimate(**one["total"])
        )
        for one in record["decompositions"]
    ]


def decomposition_section(decompositions: Sequence[Decomposition]) -> Section | None:
    """Shares of the axes in each order of averaging."""
    whole = max((len(one.order) for one in decompositions), default=0)
    orders = [one for one in decompositions if len(one.order) == whole and one.total.value > 0]
    if not orders:
        return None
    names = tuple(" → ".join(AXIS_NAMES[axis] for axis in one.order) for one in orders)
    places = tuple(float(i) for i in range(len(orders)))
    series = tuple(
        Series(
            AXIS_NAMES[axis],
            places,
            tuple(one.shares[one.order.index(axis)].value / one.total.value for one in orders),
            kind="bars",
            labels=names,
        )
        for axis in orders[0].order
    )
    chart = Chart(
        "decomposition", "Shares of the variance, by the order of averaging", "order", "share of the variance", series,
        note="An axis that comes later is left with what those before it could not remove.",
    )  # fmt: skip
    return Section("Decomposition", charts=(chart,))


def _churn(diagnosis: Diagnosis) -> Section | None:
    if not diagnosis.churn:
        return None
    header = (
        "scores from",
        "mean change of a score",
        "change of a logit (rms)",
        "rows that change their decile",
    )
    rows = tuple(
        (
            "means over " + " and ".join(AXIS_NAMES[axis] for axis in one.averaged)
            if one.averaged
            else "one checkpoint, one route",
            _text(one.probability_mean, 4),
            _text(one.logit_rms, 4),
            _text(one.decile_changes, 3),
        )
        for one in diagnosis.churn
    )
    text = "How far scores move when nothing changes but the seed of a retraining."
    return Section("Churn", text, tables=(Table(header, rows),))


def _about(diagnosis: Diagnosis, data: dict[str, Any], command: str) -> Section:
    rows = (
        ("data", f"{data['name']}, fingerprint {data['fingerprint']}"),
        ("rows", f"{diagnosis.num_rows:,}"),
        ("runs", str(len(diagnosis.runs))),
        ("checkpoints of each", str(len(diagnosis.steps))),
        ("routes of each", str(len(diagnosis.routes))),
        *(("to be careful with", warning) for warning in diagnosis.warnings),
    )
    return Section("Settings", tables=(Table(("what", "value"), rows),), code=command)
