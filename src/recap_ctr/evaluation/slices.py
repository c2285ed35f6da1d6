"""Where predictions are good: figures by slices of the rows, gains by score, thresholds, and the spread of scores.

All scores are calibrated logits. Shape suffixes: N rows, T runs of tied scores, V values, P periods, K bins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recap_ctr.config import Record
from recap_ctr.evaluation.metrics import Floats, auc, auc_error, check_rows, logloss, sigmoid

TOP_VALUES = 8
NUM_PERIODS = 10
NUM_BINS = 30
DECILES = tuple(tenth / 10 for tenth in range(1, 11))
THRESHOLD_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
MAX_NAME = 60  # characters of a value


class Slice(Record):
    """The figures of some of the rows, under the name of what they have in common."""

    name: str
    rows: int
    base_rate: float
    mean_prediction: float
    logloss: float
    auc: float | None = None
    """None where all rows have the same label."""
    auc_error: float | None = None
    """Standard error of the AUC over rows (DeLong)."""

    @property
    def calibration_ratio(self) -> float | None:
        """Return the mean prediction over the share of clicks: above 1, scores are too high. None without clicks."""
        return self.mean_prediction / self.base_rate if self.base_rate else None


class FieldSlices(Record):
    """Slices by the most frequent values of one field, and all other rows."""

    field: str
    slices: list[Slice]


class Gain(Record):
    """How many of the clicks are among the rows with the highest scores."""

    rows: float
    """The share of the rows, from the highest score down."""
    clicks: float
    """The share of all clicks that are in them."""

    @property
    def lift(self) -> float:
        """Return how many times more clicks these rows have than as many rows at random."""
        return self.clicks / self.rows


class Threshold(Record):
    """What a rule "act where the score is at least `score`" would select."""

    score: float
    rows: float
    """The share of the rows that it selects."""
    precision: float
    """The share of clicks among them."""
    recall: float
    """The share of all clicks that are among them."""


class ScoreBin(Record):
    """The share of the rows, and of the clicks, with scores in one range."""

    low: float
    high: float
    rows: float
    clicks: float


class Breakdown(Record):
    """Where, on held-out rows, the calibrated scores are good, and what they are good for."""

    split: str
    rows: int
    fields: list[FieldSlices]
    periods: list[Slice]
    """Equally long periods of time; none if the data have no times."""
    gains: list[Gain]
    """By deciles of the rows."""
    thresholds: list[Threshold]
    histogram: list[ScoreBin]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Labels and calibrated logits of rows, with weights where they have any."""

    labels: NDArray[Any]
    logits: Floats
    weights: NDArray[Any] | None = None

    def take(self, at: NDArray[np.bool_]) -> "ScoredRows":
        """Return some of the rows."""
        return ScoredRows(
            self.labels[at], self.logits[at], None if self.weights is None else self.weights[at]
        )


@dataclass(frozen=True, eq=False)
class FieldValues:
    """The values of a field as whole numbers, one per row, and what to call each of them."""

    codes_N: NDArray[np.integer[Any]]
    name: Callable[[int], str]


def break_down(
    split: str,
    rows: ScoredRows,
    fields: Mapping[str, FieldValues],
    times: NDArray[np.float64] | None = None,
    time_name: Callable[[float], str] = str,
) -> Breakdown:
    """Return all figures of a breakdown; `time_name` says how a time reads."""
    return Breakdown(
        split=split,
        rows=len(rows.labels),
        fields=[
            FieldSlices(field=name, slices=value_slices(rows, values)) for name, values in fields.items()
        ],
        periods=[] if times is None else period_slices(rows, times, time_name),
        gains=gains(rows),
        thresholds=thresholds(rows),
        histogram=histogram(rows),
    )


def value_slices(rows: ScoredRows, values: FieldValues, count: int = TOP_VALUES) -> list[Slice]:
    """Return the slices of the `count` most frequent values, and one of all other rows."""
    codes_V, counts_V = np.unique(values.codes_N, return_counts=True)
    top = codes_V[np.argsort(-counts_V, kind="stable")[:count]]
    slices = [
        measure_slice(_short(values.name(int(code))), rows.take(values.codes_N == code)) for code in top
    ]
    rest = ~np.isin(values.codes_N, top)
    if rest.any():
        slices.append(measure_slice(f"{len(codes_V) - len(top):,} other values", rows.take(rest)))
    return slices


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def period_slices(
    rows: ScoredRows,
    times: NDArray[np.float64],
    time_name: Callable[[float], str] = str,
    count: int = NUM_PERIODS,
) -> list[Slice]:
    """Return slices of equally long periods, named by their beginning; periods without rows are left out."""
    first, last = float(times.min()), float(times.max())
    if first == last:
        return []
    starts_P = np.linspace(first, last, count + 1)[:-1]
    period_N = np.searchsorted(starts_P, times, side="right") - 1
    return [
        measure_slice(f"from {time_name(float(start))}", rows.take(period_N == period))
        for period, start in enumerate(starts_P)
        if (period_N == period).any()
    ]


def measure_slice(name: str, rows: ScoredRows) -> Slice:
    """Return the figures of some rows."""
    checked = check_rows(rows.labels, rows.logits, rows.weights)
    base_rate = checked.mean(checked.positive)
    ranking = {}
    if 0 < base_rate < 1:
        ranking = {
            "auc": auc(rows.labels, rows.logits, rows.weights),
            "auc_error": auc_error(rows.labels, rows.logits, rows.weights),
        }
    return Slice(
        name=name,
        rows=len(rows.labels),
        base_rate=base_rate,
        mean_prediction=checked.mean(sigmoid(checked.scores)),
        logloss=logloss(rows.labels, rows.logits, rows.weights),
        **ranking,
    )


@dataclass(frozen=True, eq=False)
class _Ranking:
    """Runs of tied scores from the highest down, with the mass of rows and clicks from the top to each run's end."""

    scores_T: Floats
    rows_T: Floats
    clicks_T: Floats

    @classmethod
    def of(cls, rows: ScoredRows) -> "_Ranking":
        checked = check_rows(rows.labels, rows.logits, rows.weights)
        order_N = np.argsort(-checked.scores, kind="stable")
        scores_N, masses_N = checked.scores[order_N], checked.masses[order_N]
        ends_T = np.flatnonzero(np.append(scores_N[1:] != scores_N[:-1], True))
        clicks_N = np.cumsum(masses_N * checked.positive[order_N])
        return cls(scores_N[ends_T].astype(np.float64), np.cumsum(masses_N)[ends_T], clicks_N[ends_T])


def gains(rows: ScoredRows, shares: Sequence[float] = DECILES) -> list[Gain]:
    """Return the gain at each share of the rows; rows with tied scores count as if they were mixed evenly."""
    ranking = _Ranking.of(rows)
    if not ranking.clicks_T[-1]:
        return []
    rows_T, clicks_T = ranking.rows_T / ranking.rows_T[-1], ranking.clicks_T / ranking.clicks_T[-1]
    clicks = np.interp(shares, np.append(0.0, rows_T), np.append(0.0, clicks_T))
    return [Gain(rows=share, clicks=float(part)) for share, part in zip(shares, clicks, strict=True)]


def thresholds(rows: ScoredRows, shares: Sequence[float] = THRESHOLD_SHARES) -> list[Threshold]:
    """Return, for each share, the highest score that at least this share of the rows reaches, and what it selects."""
    ranking = _Ranking.of(rows)
    total_rows, total_clicks = ranking.rows_T[-1], ranking.clicks_T[-1]
    if not total_clicks:
        return []
    # Rounding must not push a share beyond the rows that reach it exactly.
    wanted = np.array(shares) * total_rows * (1 - 1e-12)
    runs = np.unique(np.searchsorted(ranking.rows_T, wanted))
    return [
        Threshold(
            score=float(sigmoid(ranking.scores_T[run])),
            rows=float(ranking.rows_T[run] / total_rows),
            precision=float(ranking.clicks_T[run] / ranking.rows_T[run]),
            recall=float(ranking.clicks_T[run] / total_clicks),
        )
        for run in runs
    ]


def histogram(rows: ScoredRows, count: int = NUM_BINS) -> list[ScoreBin]:
    """Return the shares of rows and clicks in equally wide ranges of the score; none if all scores are the same."""
    checked = check_rows(rows.labels, rows.logits, rows.weights)
    scores_N, masses_N = sigmoid(checked.scores), checked.masses
    if scores_N.min() == scores_N.max():
        return []
    rows_K, edges = np.histogram(scores_N, count, weights=masses_N)
    clicks_K, _ = np.histogram(scores_N, edges, weights=masses_N * checked.positive)
    num_clicks = max(float(clicks_K.sum()), 1e-300)
    return [
        ScoreBin(
            low=float(edges[k]),
            high=float(edges[k + 1]),
            rows=float(rows_K[k] / rows_K.sum()),
            clicks=float(clicks_K[k] / num_clicks),
        )
        for k in range(count)
    ]
