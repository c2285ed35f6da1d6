"""Arms of a table: runs that differ only in their seed, with the figures that the table shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recap_ctr.errors import InputError
from recap_ctr.evaluation.evaluate import SplitFigures
from recap_ctr.training.report import RunReport

METRICS = {"auc": "raw auc", "logloss": "raw logloss", "calibrated_logloss": "calibrated logloss"}
"""The figures of an arm, each with its name in words."""


@dataclass(frozen=True)
class Arm:
    """One config and its figures, one for each seed."""

    name: str
    marks: dict[str, bool]
    """Ticks by column, such as {"EMA": True, "KD": False}; may be empty."""
    seeds: tuple[int, ...]
    figures: dict[str, tuple[float, ...]]
    """Values by metric, in the order of `seeds`; see METRICS."""
    parameters: int | None = None
    conditional: bool = False
    """Whether the runs share their teachers; the spread over seeds then doesn't show how lucky these were."""
    split: str = "test"

    def __post_init__(self) -> None:
        count = len(self.seeds)
        if count == 0 or len(set(self.seeds)) < count:
            raise InputError(
                f"arm {self.name!r} has the seeds {self.seeds}", fix="list each of its runs once"
            )
        for metric, values in self.figures.items():
            if metric not in METRICS:
                raise InputError(
                    f"arm {self.name!r}: no metric {metric!r}", fix=f"choose from {', '.join(METRICS)}"
                )
            if len(values) != count:
                raise InputError(
                    f"arm {self.name!r} has {count} seeds, but {len(values)} values of {metric!r}"
                )

    def by_seed(self, metric: str) -> dict[int, float]:
        """Return the values of one metric by seed."""
        if metric not in self.figures:
            measured = ", ".join(self.figures) or "nothing"
            raise InputError(f"arm {self.name!r} has no {metric!r}, only {measured}")
        return dict(zip(self.seeds, self.figures[metric], strict=True))


def metric_values(figures: SplitFigures) -> dict[str, float]:
    """Return the value of each of METRICS on one split."""
    return {
        "auc": figures.raw.auc,
        "logloss": figures.raw.logloss,
        "calibrated_logloss": figures.calibrated.logloss,
    }


def arm_of(name: str, reports: Sequence[RunReport], *, marks: Mapping[str, bool] | None = None) -> Arm:
    """Return the arm of some runs, from their reports.

    Figures are those of the test rows, or of the validation rows if a run has no test rows.
    """
    split = "test" if all(report.metrics.split == "test" for report in reports) else "valid"
    sizes = {report.parameters for report in reports}
    if len(sizes) > 1:
        raise InputError(f"arm {name!r} has runs of {sorted(sizes)} parameters", fix="use runs of one config")
    in_order = sorted(reports, key=lambda report: report.train.seed)
    figures = [metric_values(report.metrics.on(split)) for report in in_order]
    return Arm(
        name=name,
        marks=dict(marks or {}),
        seeds=tuple(report.train.seed for report in in_order),
        figures={metric: tuple(values[metric] for values in figures) for metric in METRICS},
        parameters=next(iter(sizes), None),
        conditional=_share_teachers(reports),
        split=split,
    )


def _share_teachers(reports: Sequence[RunReport]) -> bool:
    """Return whether runs have a teacher in common, or whether a single one has teachers."""
    tables = [table for report in reports for table in report.teachers]
    return bool(tables) and (len(reports) == 1 or len(set(tables)) < len(tables))
