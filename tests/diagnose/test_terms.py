"""Terms are the same whatever the batches, and rows fall into groups and deciles as they should."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.diagnose import (
    Cube,
    Floats,
)
from recap_ctr.diagnose import (
    family as family_of,
)
from recap_ctr.diagnose.diagnosis import churn_figures, family_figures
from recap_ctr.diagnose.figures import Grid
from recap_ctr.diagnose.measure import EstimateFigure, measure
from recap_ctr.diagnose.terms import GROUPS, Rows, decile
from recap_ctr.evaluation import metrics
from tests.support.simulated_logits import N, simulated


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, (int, float)):
        yield float(value)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(block_rows=st.integers(1, 120), weighted=st.booleans())
def test_any_blocks_give_the_same_numbers(block_rows: int, weighted: bool) -> None:
    logits_NSTR, labels_N = simulated(1, (3, 2, 1), 100)
    weights_N = np.random.default_rng(2).integers(0, 4, 100).astype(np.float64) if weighted else None
    cube, grid = Cube.from_array(logits_NSTR), Grid((3, 2, 1))

    def build(estimate: EstimateFigure) -> list[Any]:
        family = family_figures(estimate, grid, grid.families(("run",)), "run")
        return [family, churn_figures(estimate, grid, ("trajectory",), {"trajectory": 1, "route": 0}, 0)]

    def numbers_in_blocks_of(rows: int) -> list[float]:
        made = measure(cube, labels_N, build, weights=weights_N, block_rows=rows)
        return list(numbers([asdict(record) for record in made]))

    np.testing.assert_allclose(
        numbers_in_blocks_of(block_rows), numbers_in_blocks_of(10_000), rtol=1e-12, atol=1e-15
    )


def test_auc_is_taken_from_evenly_spaced_rows(
    data: tuple[Floats, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_NSTR, labels_N = data
    monkeypatch.setattr("recap_ctr.diagnose.terms.RANKED_ROWS", 150)
    members = [(0, 0, 0), (1, 1, 1)]
    measured = family_of(Cube.from_array(logits_NSTR), labels_N, members)
    at = np.arange(150) * N // 150
    assert len(set(at.tolist())) == 150
    mean_N = (logits_NSTR[:, 0, 0, 0] + logits_NSTR[:, 1, 1, 1]) / 2
    assert measured.auc_together.value == pytest.approx(metrics.auc(labels_N[at], mean_N[at]))
    assert measured.loss_together.value == pytest.approx(metrics.logloss(labels_N, mean_N))


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.booleans(), st.integers(-3, 3), st.integers(0, 3)), min_size=2, max_size=30).filter(
        lambda rows: {positive for positive, _, mass in rows if mass} == {True, False}
    )
)
def test_pairs_won_and_deciles_by_counting(rows: list[tuple[bool, int, int]]) -> None:
    positive_N, scores_N, masses_N = (
        np.array([row[k] for row in rows], kind) for k, kind in enumerate((bool, float, float))
    )
    won_N = metrics.pairs_won(positive_N, scores_N, masses_N)
    for n, (positive, score, _) in enumerate(rows):
        against = [(other, mass) for label, other, mass in rows if label != positive]
        right = sum(
            mass * (0.5 + 0.5 * np.sign(score - other) * (1 if positive else -1)) for other, mass in against
        )
        assert won_N[n] == pytest.approx(right / sum(mass for _, mass in against))
        below = sum(mass for _, other, mass in rows if other < score)
        tied = sum(mass for _, other, mass in rows if other == score)
        assert decile(scores_N, masses_N)[n] == min(9, int(10 * (below + tied / 2) / masses_N.sum()))
    assert won_N[positive_N] @ masses_N[positive_N] / masses_N[positive_N].sum() == pytest.approx(
        metrics.auc(positive_N, scores_N, masses_N)
    )


def test_rows_fall_into_groups_by_their_number_alone() -> None:
    rows = Rows(np.zeros(100_000, bool), None, seed=3)
    groups_N = rows.groups(np.arange(100_000))
    assert np.array_equal(groups_N[500:600], rows.groups(np.arange(500, 600)))
    counts_G = np.bincount(groups_N, minlength=GROUPS)
    assert ((counts_G - 100_000 / GROUPS) ** 2 / (100_000 / GROUPS)).sum() < 350  # chi² of 255 degrees
    assert (groups_N != Rows(rows.positive_N, None, seed=4).groups(np.arange(100_000))).mean() > 0.98
