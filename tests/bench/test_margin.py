"""The margin of students over an ensemble: against brute force, and what its errors are of."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from recap_ctr.axes.logits import Estimator, LogitWriter
from recap_ctr.bench.margin import Margin, margin
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics


def write_run(directory: Path, data: PreparedData, signal: float, seed: int) -> np.ndarray:
    """Write the logits of a run that knows `signal` of the label, and return them."""
    rng = np.random.default_rng(seed)
    logits = (signal * np.asarray(data.test.labels, np.float64) + rng.normal(size=len(data.test))).astype(
        np.float32
    )
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
    assert ahead.seeds and ahead.members and (ahead.num_seeds, ahead.num_members) == (3, 4)
    assert ahead.error == pytest.approx(math.sqrt(ahead.rows**2 + ahead.seeds**2 + ahead.members**2))


def test_one_of_each_has_an_error_over_rows_alone(prepared: PreparedData, tmp_path: Path) -> None:
    write_run(tmp_path / "s", prepared, 1.0, 1)
    write_run(tmp_path / "m", prepared, 1.0, 2)
    ahead = margin(prepared, [tmp_path / "s"], [tmp_path / "m"], "test")
    assert ahead.seeds is None and ahead.members is None and ahead.error == ahead.rows > 0
    assert "over rows;" in str(ahead)


def test_error_over_rows_is_that_of_the_mean_difference(prepared: PreparedData, tmp_path: Path) -> None:
    """Not that of the students' mean logit, which is another estimator than any of them."""
    students = [write_run(tmp_path / f"s{seed}", prepared, 1.5, seed) for seed in range(2)]
    ensemble = write_run(tmp_path / "m", prepared, 1.0, 10)
    ahead = margin(prepared, [tmp_path / "s0", tmp_path / "s1"], [tmp_path / "m"], "test")
    positive = np.asarray(prepared.test.labels) == 1

    def mean_ahead(rows: np.ndarray) -> float:
        labels = prepared.test.labels[rows]
        aucs = [metrics.auc(labels, logits[rows]) for logits in students]
        return statistics.mean(aucs) - metrics.auc(labels, ensemble[rows])

    rng, groups = np.random.default_rng(0), (np.flatnonzero(positive), np.flatnonzero(~positive))
    drawn = [
        mean_ahead(np.concatenate([rng.choice(group, group.size) for group in groups])) for _ in range(400)
    ]
    assert ahead.rows == pytest.approx(statistics.stdev(drawn), rel=0.15)


def test_p_is_two_tailed() -> None:
    ahead = Margin(mean=0.00196, rows=0.001, seeds=None, members=None, num_seeds=1, num_members=1)
    assert ahead.freedom == math.inf and ahead.p == pytest.approx(0.05, abs=1e-3)
    assert replace(ahead, mean=-ahead.mean).p == pytest.approx(ahead.p)
    assert "many degrees of freedom, p 0.050" in str(ahead)


def test_few_seeds_have_the_p_of_students_t() -> None:
    """With an error over three seeds alone it is that of a one-sample t-test; rows add degrees of freedom."""
    aucs = [0.801, 0.804, 0.8025]
    error = statistics.stdev(aucs) / 3**0.5
    alone = Margin(statistics.mean(aucs) - 0.8, 0.0, error, None, num_seeds=3, num_members=1)
    assert alone.p == pytest.approx(ttest_1samp(aucs, 0.8).pvalue)
    both = replace(alone, members=error, num_members=3)
    assert both.freedom == pytest.approx(4.0)
    assert replace(both, rows=error).freedom == pytest.approx(9.0)
    shown = Margin(0.00196, 0.0006, 0.0008, 0.0, num_seeds=3, num_members=5)
    assert str(shown) == (
        "+0.196 ± 0.100 points of AUC (standard errors: 0.060 over rows, 0.080 over 3 seeds, 0.000 over 5 members;"
        " t-test with 4.9 degrees of freedom, p 0.109)"
    )


def test_chance_is_taken_for_a_difference_one_time_in_twenty() -> None:
    """Simulated: errors of rows, of three seeds and of five members, all of one size."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(4_000):
        over_seeds, over_members = rng.normal(size=3), rng.normal(size=5)
        mean = rng.normal() / 2 + over_seeds.mean() + over_members.mean()
        seeds, members = over_seeds.std(ddof=1) / 3**0.5, over_members.std(ddof=1) / 5**0.5
        found += Margin(mean, 0.5, seeds, members, num_seeds=3, num_members=5).p < 0.05
    assert 0.03 < found / 4_000 < 0.06
