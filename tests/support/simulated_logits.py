"""Logits of a grid of estimators with known disagreement on each axis.

Shape suffixes: N rows, S runs, T points of the trajectory, R routes, M estimators.
"""

from typing import Any

import numpy as np

from recap_ctr.diagnose import (
    Diagnosis,
    Floats,
)
from recap_ctr.evaluation import metrics

N, S, T, R = 400, 3, 2, 4


def simulated(seed: int = 0, shape: tuple[int, int, int] = (S, T, R), rows: int = N) -> tuple[Floats, Floats]:
    """Return logits with disagreement on each axis, and labels."""
    rng = np.random.default_rng(seed)
    runs, steps, routes = shape
    mean_N111 = rng.normal(-1.0, 1.0, (rows, 1, 1, 1))
    logits_NSTR = (
        mean_N111
        + rng.normal(0, 0.3, (rows, runs, 1, 1))
        + rng.normal(0, 0.2, (rows, 1, steps, 1))
        + rng.normal(0, 0.1, (rows, runs, steps, routes))
    )
    labels_N = (rng.random(rows) < metrics.sigmoid(mean_N111[:, 0, 0, 0])).astype(np.float64)
    return logits_NSTR, labels_N


def estimates(diagnosis: Diagnosis) -> list[dict[str, float]]:
    """Return all estimates of a diagnosis, as its JSON has them."""
    records: list[dict[str, float]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and "runs_low" in value:
            records.append(value)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)

    walk(diagnosis.to_json())
    return records
