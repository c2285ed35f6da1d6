"""The margin of students over an ensemble: against brute force, and what its errors are of."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.axes.logits import Estimator, LogitWriter
from recap_ctr.bench.margin import Margin, margin
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics


def write_run(directory: Path, data: PreparedData, signal: float, seed: int) -> np.ndarray:
    """Write the logits of a run that knows `signal` of the label, and return them."""
    rng = np.random.default_rng(seed)
    logits = (signal * np.asarray(data.test.labels) + rng.normal(size=len(data.test))).astype(np.float32)
    with LogitWriter(directory / "logits" / "test", data, "test", [Estimator(f"run-{seed}")]) as writer:
        writer.write(logits[:, None])
    return logits


def test_margin_is_that_of_brute_force(prepared: PreparedData, tmp_path: Path) -> None:
    students = [write_run(tmp_path / f"s{seed}", prepared, 1.5, seed) for seed in range(3)]
    members = [write_run(tmp_path / f"m{seed}", prepared, 1.0, 10 + seed) for seed in range(4)]
    ahead = margin(
        prepared,
        [tmp_path / f"s{seed}" for seed in range(3)],
        [tmp_path / f"m{seed}" for seed in range(4)],
        "test",
    )
    labels = prepared.test.labels
    aucs = [metrics.auc(labels, logits) for logits in students]
    together = metrics.auc(labels, np.mean(members, axis=0, dtype=np.float64))
    assert ahead.mean == pytest.approx(statistics.mean(aucs) - together)
    assert ahead.seeds == pytest.approx(statistics.stdev(aucs) / 3**0.5)
    without = [
        metrics.auc(labels, np.mean(members[:at] + members[at + 1 :], axis=0, dtype=np.float64))
        for at in range(4)
    ]
    centre = statistics.mean(without)
    assert ahead.members == pytest.approx(math.sqrt(3 / 4 * sum((value - centre) ** 2 for value in without)))
    assert ahead.seeds and ahead.members
    assert ahead.error == pytest.approx(math.sqrt(ahead.rows**2 + ahead.seeds**2 + ahead.members**2))


def test_one_of_each_has_an_error_over_rows_alone(prepared: PreparedData, tmp_path: Path) -> None:
    write_run(tmp_path / "s", prepared, 1.0, 1)
    write_run(tmp_path / "m", prepared, 1.0, 2)
    ahead = margin(prepared, [tmp_path / "s"], [tmp_path / "m"], "test")
    assert ahead.seeds is None and ahead.members is None and ahead.error == ahead.rows > 0
    assert "over rows;" in str(ahead)


def test_p_is_two_tailed() -> None:
    ahead = Margin(mean=0.00196, rows=0.0006, seeds=0.0008, members=0.0)
    assert ahead.p == pytest.approx(0.05, abs=1e-3)
    assert Margin(-0.00196, 0.0006, 0.0008, 0.0).p == pytest.approx(ahead.p)
    assert str(ahead) == (
        "+0.196 ± 0.100 points of AUC (standard errors: 0.060 over rows, 0.080 over seeds, 0.000 over members; p 0.050)"
    )
