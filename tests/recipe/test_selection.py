"""Which estimators teach together: greedy selection against brute force, and when it stops."""

from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt
import pytest

from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.halves import halves
from recap_ctr.recipe.selection import select_members

Floats = npt.NDArray[np.float64]


def noisy_estimators(
    noise: tuple[float, ...], rows: int = 4_000
) -> tuple[npt.NDArray[np.float64], list[Floats]]:
    """Return labels, and the true logits with independent noise of several sizes."""
    rng = np.random.default_rng(3)
    truth = rng.normal(-0.5, 1.0, rows)
    labels = (rng.random(rows) < metrics.sigmoid(truth)).astype(np.float64)
    return labels, [truth + size * rng.normal(size=rows) for size in noise]


def test_the_first_is_the_best_and_the_mean_beats_it() -> None:
    labels, logits = noisy_estimators((1.0, 0.8, 1.2))
    selection = select_members(labels, logits)
    losses = [metrics.logloss(labels, column) for column in logits]
    assert selection.members[0] == int(np.argmin(losses)) == 1
    assert set(selection.members) == {0, 1, 2}
    mean = np.mean([logits[member] for member in selection.members], axis=0)
    assert metrics.logloss(labels, mean) < min(losses)


def test_it_is_close_to_the_best_of_all_multisets() -> None:
    labels, logits = noisy_estimators((1.0, 0.5, 2.0))
    selection = select_members(labels, logits, max_members=4)
    chosen = metrics.logloss(labels, np.mean([logits[m] for m in selection.members], axis=0))
    best = min(
        metrics.logloss(labels, np.mean([logits[m] for m in members], axis=0))
        for count in range(1, 5)
        for members in combinations_with_replacement(range(3), count)
    )
    assert chosen - best < 0.002


def test_a_copy_adds_nothing_and_is_named_as_refused() -> None:
    labels, logits = noisy_estimators((0.5,))
    selection = select_members(labels, [logits[0], logits[0]])
    assert selection.members == [0]
    assert selection.refused is not None
    assert selection.refused.logloss == pytest.approx(selection.steps[0].logloss)


def test_a_harmful_estimator_is_left_out() -> None:
    labels, logits = noisy_estimators((0.3, 0.3))
    selection = select_members(labels, [*logits, -logits[0]])
    assert 2 not in selection.members


def test_weights_decide() -> None:
    """Rows without weight do not choose: an estimator that is right only on them is not taken."""
    labels, logits = noisy_estimators((0.2,), rows=2_000)
    counts = np.arange(2_000) < 1_000
    right_where_it_counts = np.where(counts, logits[0], -logits[0])
    right_elsewhere = np.where(counts, -logits[0], logits[0])
    columns = [right_elsewhere, right_where_it_counts]
    assert select_members(labels, columns, counts.astype(np.float64)).members[0] == 1
    assert select_members(labels, columns, (~counts).astype(np.float64)).members[0] == 0


def test_halves_are_halves_and_the_same_each_time() -> None:
    labels = np.arange(2_001) % 2
    first, second = halves(labels)
    assert sorted([*first, *second]) == list(range(2_001))
    assert np.array_equal(first, halves(labels)[0])


def test_few_rows_choose_and_confirm_together() -> None:
    first, second = halves(np.arange(700) % 2)
    assert np.array_equal(first, second) and len(first) == 700
