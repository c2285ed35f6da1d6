"""Click rates: against counting by hand, without a row's own click, and the same from the packed table."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import (
    COUNT_STEPS,
    MARKS,
    NEUTRAL,
    ODDS_STEPS,
    PRIOR,
    SLOTS,
    Rates,
    choose_crosses,
    encode_rates,
    pack_table,
    place,
)
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.nn.rates import RateTable, decode


def shard(ids: Any, labels: Any, weights: Any = None) -> Shard:
    ids = np.asarray(ids, np.int32)
    return Shard(
        ids=ids,
        values=np.empty((len(ids), 0), np.float32),
        labels=np.asarray(labels, np.uint8),
        rows=np.arange(len(ids)),
        weights=None if weights is None else np.asarray(weights, np.float32),
        groups=None,
        times=None,
    )


LAYOUT = Layout.of_sizes([30, 12, 8])


def random_shard(rows: int, seed: int = 0) -> Shard:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(f.offset + 1, f.offset + f.size, rows) for f in LAYOUT.fields], axis=1)
    return shard(ids, rng.random(rows) < 0.3)


def test_codes_say_log_odds_and_counts() -> None:
    codes = encode_rates(np.array([8.0, 0.0, 0.0]), np.array([10.0, 5.0, 0.0]), 0.4)
    expected = np.log((8 + PRIOR * 0.4) / (2 + PRIOR * 0.6)) - np.log(0.4 / 0.6)
    assert (codes[0, 0] - NEUTRAL) / ODDS_STEPS == pytest.approx(expected, abs=0.5 / ODDS_STEPS)
    assert codes[0, 1] / COUNT_STEPS == pytest.approx(np.log(11), abs=0.5 / COUNT_STEPS)
    assert codes[1, 0] < NEUTRAL and codes[2].tolist() == [0, 0]
    features = decode(torch.from_numpy(codes[:, None].astype(np.int64)))
    assert features[0].tolist() == pytest.approx([expected, np.log(11) / 4], abs=0.02)
    assert features[2].tolist() == [0.0, 0.0]


def test_a_row_sees_the_clicks_of_other_folds_and_the_number_of_all_other_rows() -> None:
    rows = random_shard(400)
    rates = Rates(rows, LAYOUT)
    codes = rates.training_codes([("f0",), ("f0", "f1")])
    measured = rates.measure([("f0",), ("f0", "f1")], rows).training
    assert codes.tolist() == measured.tolist()
    for row in range(0, 400, 37):
        for column, fields in ((0, [0]), (2, [0, 1])):
            same = (rows.ids[:, fields] == rows.ids[row, fields]).all(axis=1)
            others = same & (rates._fold_N != rates._fold_N[row])
            expected = encode_rates(
                np.array([float(rows.labels[others].sum())]),
                np.array([float(others.sum())]),
                rates.rate,
                np.array([float(same.sum() - 1)]),
            )
            assert codes[row, column : column + 2].tolist() == expected[0].tolist()


def test_folds_by_time_are_stretches_that_hide_all_clicks_of_their_rows() -> None:
    times = np.random.default_rng(3).permutation(400).astype(np.float64)
    rows = replace(random_shard(400), times=times)
    rates = Rates(rows, LAYOUT, by_time=True)
    order = np.argsort(times)
    folds = rates._fold_N[order]
    assert (np.diff(folds) >= 0).all() and np.bincount(folds).tolist() == [80] * 5
    flipped = rows.labels.astype(np.uint8)
    flipped[order[:80]] ^= 1
    changed = Rates(replace(rows, labels=flipped), LAYOUT, by_time=True)
    changed.rate = rates.rate
    codes, others = rates.training_codes([("f0",)]), changed.training_codes([("f0",)])
    assert codes[order[:80]].tolist() == others[order[:80]].tolist()
    assert codes[order[80:]].tolist() != others[order[80:]].tolist()


def test_its_own_click_changes_nothing_that_a_row_sees() -> None:
    rows = random_shard(300)
    flipped = rows.labels.astype(np.uint8)
    flipped[7] ^= 1
    crosses = [("f0",), ("f1", "f2")]
    rates, changed = Rates(rows, LAYOUT), Rates(replace(rows, labels=flipped), LAYOUT)
    changed.rate = rates.rate
    assert rates.training_codes(crosses)[7].tolist() == changed.training_codes(crosses)[7].tolist()


def test_weights_count_as_rows() -> None:
    rows = random_shard(60)
    twice = shard(np.repeat(rows.ids, 2, axis=0), np.repeat(rows.labels, 2))
    weighted = replace(rows, weights=np.full(60, 2.0, np.float32))
    crosses = [("f1",), ("f1", "f2")]
    later = random_shard(50, seed=1)
    codes = [Rates(rows, LAYOUT).measure(crosses, later).later for rows in (weighted, twice)]
    assert codes[0].tolist() == codes[1].tolist()


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 500), seed=st.integers(0, 1000))
def test_the_table_says_what_counting_says(rows: int, seed: int) -> None:
    """All but the few entries that find their bucket full, which read as unseen."""
    crosses = [("f0",), ("f1", "f2"), ("f0", "f2")]
    later = random_shard(300, seed + 1)
    measured = Rates(random_shard(rows, seed), LAYOUT).measure(crosses, later)
    table = RateTable(crosses, len(measured.table), LAYOUT)
    table.weight.copy_(torch.from_numpy(measured.table))
    read = table(torch.from_numpy(later.ids)).flatten(1).numpy()
    is_same = (read == measured.later).reshape(300, -1, 2).all(-1)
    is_unseen = (read == 0).reshape(300, -1, 2).all(-1)
    assert (is_same | is_unseen).all()
    assert is_same.mean() > 0.85


def test_nearly_all_entries_find_a_slot_and_none_is_taken_for_another() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 2**31, (2, 200_000))
    cross = rng.integers(0, 20, 200_000)
    codes = np.full((200_000, 2), 200)
    table = pack_table(left, right, cross, codes)
    assert table.min() >= 0 and table.shape[1] == SLOTS
    assert (table > 0).sum() > 0.97 * 200_000
    bucket, mark = place(left + 1, right, cross, len(table))
    assert mark.min() >= 1 and mark.max() <= MARKS
    hits = (table[bucket] // 2**16 == mark[:, None]).any(axis=1)
    assert hits.mean() < 1e-3, "pairs that were never seen"


def test_numpy_and_torch_place_alike() -> None:
    rng = np.random.default_rng(1)
    columns = rng.integers(0, 2**31 - 1, (3, 1000))
    left, right, cross = columns
    in_numpy = place(left, right, cross, 12_345)
    tensors = [torch.from_numpy(column) for column in columns]
    in_torch = place(tensors[0], tensors[1], tensors[2], 12_345)
    for expected, got in zip(in_numpy, in_torch, strict=True):
        assert got.tolist() == expected.tolist()


def test_the_pair_that_decides_is_chosen() -> None:
    rng = np.random.default_rng(0)
    rows = random_shard(20_000)
    effects = rng.normal(size=(200, 200))
    odds = 2 * effects[rows.ids[:, 0], rows.ids[:, 2]]
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-odds))).astype(np.uint8)
    chosen = choose_crosses(replace(rows, labels=labels), LAYOUT)
    assert chosen[:3] == [("f0",), ("f1",), ("f2",)]
    assert chosen[3] == ("f0", "f2")


def test_pairs_without_effect_are_not_chosen() -> None:
    rng = np.random.default_rng(0)
    rows = random_shard(20_000)
    odds = rng.normal(size=60)[rows.ids[:, 0]] - 1
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-odds))).astype(np.uint8)
    assert all(len(cross) == 1 for cross in choose_crosses(replace(rows, labels=labels), LAYOUT))


def test_a_field_with_several_values_has_no_rates(prepared: PreparedData) -> None:
    with pytest.raises(InputError, match="no click rates of 'tags'"):
        RateTable([("site", "tags")], 1, prepared.layout)
    crosses = choose_crosses(prepared.train, prepared.layout)
    assert not {"tags", "price"} & {name for cross in crosses for name in cross}
