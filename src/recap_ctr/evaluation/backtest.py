"""What a replayed log shows: figures of every period by strategy, and what updating keeps of what refitting gains."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field

from recap_ctr.config import Record

Strategy = Literal["never", "update", "refit"]
STRATEGIES: tuple[Strategy, ...] = ("never", "update", "refit")


class PeriodFigures(Record):
    """A strategy's model on the rows of one period, none of which it was trained on."""

    auc: float
    logloss: float
    calibration_error: float
    churn: float
    """The mean change of the scores against the strategy's model of the period before, relative to the mean score."""
    cpu_seconds: float
    """What making this model took since the period before."""
    shipped: bool = True
    """Whether there is a new model since the period before; the gate may have refused it."""
    reasons: list[str] = Field(default_factory=list)
    """Why the gate refused it."""


class Gap(Record):
    """The difference of two models' logloss on the same rows."""

    mean: float
    error: float
    """Its standard error."""

    def __str__(self) -> str:
        """Return the difference with its interval of 95 %."""
        return f"{self.mean:+.5f} ± {1.96 * self.error:.5f}"


class Period(Record):
    """One period of the log."""

    start: str
    rows: int
    figures: dict[Strategy, PeriodFigures]


class Backtest(Record):
    """A log replayed period by period."""

    every: str
    first_rows: int
    """Rows of the first fit."""
    first_cpu_seconds: float
    periods: list[Period]
    oldest: dict[Strategy, float]
    """Logloss of the last models on the rows of the first period of all."""
    forgotten: dict[Strategy, Gap] = Field(default_factory=dict)
    """By how much the updated model's logloss is above that of the other models there, if it has forgotten."""

    def mean(self, strategy: Strategy, figure: Callable[[PeriodFigures], float]) -> float:
        """Return the mean of a figure over the periods."""
        return float(np.mean([figure(period.figures[strategy]) for period in self.periods]))

    def kept(self, figure: Callable[[PeriodFigures], float]) -> float | None:
        """Return the share that updating has of what refitting gains over never updating; None if that is nothing."""
        never, update, refit = (self.mean(strategy, figure) for strategy in STRATEGIES)
        return (update - never) / (refit - never) if abs(refit - never) > 1e-9 else None

    @property
    def cpu_share(self) -> float:
        """Return the CPU time of the updates, relative to that of the refits."""
        update, refit = (self.mean(strategy, lambda day: day.cpu_seconds) for strategy in ("update", "refit"))
        return update / max(refit, 1e-9)
