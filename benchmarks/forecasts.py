"""How good the planner's forecasts are: from every two of some teachers, and every three, against the mean of all.

    python -m benchmarks.forecasts DATA TEACHERS

DATA is prepared data, TEACHERS the directory teachers-... of a recipe. Nothing is trained.
"""

import sys
from itertools import combinations
from pathlib import Path
from statistics import mean, pstdev

from recap_ctr.axes.logits import LogitTable, mean_logit
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.recipe.forecast import of_runs


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
            found = []
            for some in combinations(tables, count):
                lines = of_runs(some, getattr(data, split))
                found.append((lines[0].loss, lines[len(runs) - 1].loss, lines[len(runs) - 1].auc))
            gains = [one.value - all_of_them.value for one, all_of_them, _ in found]
            varies = pstdev(gains) / mean(gains)
            losses = [(one.runs_low or 0.0) <= loss <= (one.runs_high or 0.0) for _, one, _ in found]
            aucs = [
                (one.runs_low or 0.0) <= auc <= (one.runs_high or 0.0)
                for _, _, one in found
                if one is not None
            ]
            width = mean((one.runs_high or 0.0) - (one.runs_low or 0.0) for _, one, _ in found)
            print(
                f"  from {count}, {len(found)} choices: gain {mean(gains):.5f} (varies by {varies:.1%}),"
                f" logloss {mean(one.value for _, one, _ in found):.5f},"
                f" inside its interval {sum(losses)} of {len(losses)} (mean width {width:.5f});"
                f" AUC inside {sum(aucs)} of {len(aucs)}"
            )


if __name__ == "__main__":
    main()
