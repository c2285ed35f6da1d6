"""How good the planner's forecasts are: from every two of some teachers, and every three, against the mean of all.

    python -m benchmarks.forecasts DATA TEACHERS

DATA is prepared data, TEACHERS the directory teachers-... of a recipe. Nothing is trained.
"""

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, pstdev

from recap_ctr.axes.logits import LogitTable, mean_logit
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Estimate
from recap_ctr.evaluation import metrics
from recap_ctr.recipe.forecast import worth_of_runs


def num_holding(forecasts: Sequence[Estimate], value: float) -> int:
    """Return how many of the forecasts' intervals over runs hold the value."""
    return sum((forecast.runs_low or 0.0) <= value <= (forecast.runs_high or 0.0) for forecast in forecasts)


def main() -> None:
    data, root = PreparedData(Path(sys.argv[1])), Path(sys.argv[2])
    runs = sorted(root.glob("teacher-*"))
    for split in ("valid", "test"):
        labels = getattr(data, split).labels
        tables = [LogitTable(run / "logits" / split) for run in runs]
        together = mean_logit(tables)
        loss, auc = metrics.logloss(labels, together), metrics.auc(labels, together)
        print(f"{data.name}, {split}: the mean of {len(runs)} has logloss {loss:.5f}, AUC {100 * auc:.3f}")
        for count in (2, 3):
            forecasts = []
            for some in combinations(tables, count):
                lines = worth_of_runs(some, getattr(data, split))
                forecasts.append((lines[0].loss, lines[len(runs) - 1].loss, lines[len(runs) - 1].auc))
            gains = [alone.value - all_runs.value for alone, all_runs, _ in forecasts]
            varies = pstdev(gains) / mean(gains)
            losses = [forecast for _, forecast, _ in forecasts]
            aucs = [forecast for _, _, forecast in forecasts if forecast is not None]
            width = mean((forecast.runs_high or 0.0) - (forecast.runs_low or 0.0) for forecast in losses)
            print(
                f"  from {count}, {len(forecasts)} choices: gain {mean(gains):.5f} (varies by {varies:.1%}),"
                f" logloss {mean(forecast.value for forecast in losses):.5f},"
                f" inside its interval {num_holding(losses, loss)} of {len(losses)} (mean width {width:.5f});"
                f" AUC inside {num_holding(aucs, auc)} of {len(aucs)}"
            )


if __name__ == "__main__":
    main()
