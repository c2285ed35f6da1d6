"""Every way to divide rows into train, valid and test."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.model_selection import KFold

from recap_ctr.data import spool as spool_module
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Block, FrameSource, Source
from recap_ctr.data.split import Split, folds, hash_splits, parse_ratio, parse_rule
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts
from tests.support.preparing import PLAIN, arrays, by_column, prepared, shards, simple


class TestSplits:
    @pytest.mark.parametrize("rows", [40, 41, 45, 49, 99, 739_012])
    def test_sizes_round_down_at_the_bounds(self, rows: int) -> None:
        first, second = int(0.8 * rows), int(0.9 * rows)
        assert Split().sizes(rows) == (first, second - first, rows - second)

    def test_published_sizes(self) -> None:
        assert Split().sizes(739_012) == (591_209, 73_901, 73_902)
        assert Split(ratio=(1, 1, 0)).sizes(5) == (2, 3, 0)

    def test_random_follows_the_seed(self, tmp_path: Path) -> None:
        table = simple(200)
        five, same, six = (
            prepared(table, tmp_path / str(i), split=Split(seed=seed)) for i, seed in enumerate((5, 5, 6))
        )
        assert arrays(five.path) == arrays(same.path)
        assert five.train.rows.tolist() != six.train.rows.tolist()
        assert (np.diff(five.train.rows) > 0).all()  # source order within a split

    @pytest.mark.slow
    @settings(derandomize=True, max_examples=20, deadline=None)
    @given(times=st.lists(st.integers(0, 30), min_size=20, max_size=60))
    def test_time_order_never_leaks(self, times: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
        table = pl.DataFrame(
            {"y": [0, 1] * len(times), "c": ["a"] * 2 * len(times), "t": np.repeat(times, 2)}
        )
        schema = PLAIN.model_copy(update={"time": "t"})
        data = prepared(table, tmp_path_factory.mktemp("time") / "out", schema, Split(kind="time"))
        moments = [shard.times for shard in shards(data)]
        assert all(times is not None for times in moments)
        train, valid, test = (np.asarray(times) for times in moments)
        assert train.max() <= valid.min() <= valid.max() <= test.min()
        num_train, num_valid, _ = Split().sizes(table.height)
        first, second = np.sort(table["t"].to_numpy())[[num_train - 1, num_train + num_valid - 1]]
        if first < second < max(times):  # a boundary moves to the end of its moment where that leaves enough
            assert len(train) == (table["t"] <= first).sum() >= int(0.8 * table.height)
        counts = np.unique(table["t"].to_numpy(), return_counts=True)[1]
        if len(counts) >= 3 and counts[:-2].sum() >= num_train / 2:  # then no moment is divided
            assert train.max() < valid.min() <= valid.max() < test.min()

    @pytest.mark.parametrize(
        ("counts", "ratio", "sizes"),
        [
            ([50, 20, 30], (8, 1, 1), [50, 20, 30]),  # train gives way, so that all have rows
            ([10, 20, 70], (8, 1, 1), [80, 10, 10]),  # but not by more than half
            ([90, 5, 5], (8, 1, 1), [90, 5, 5]),
            ([40, 40, 20], (8, 1, 1), [40, 40, 20]),
            ([50, 50], (8, 2, 0), [50, 50, 0]),
            ([50, 50], (8, 1, 1), [80, 10, 10]),  # two moments, three splits: the order of the rows decides
            ([100], (8, 1, 1), [80, 10, 10]),
        ],
    )
    def test_few_moments(
        self, counts: list[int], ratio: tuple[int, int, int], sizes: list[int], tmp_path: Path
    ) -> None:
        table = simple(100, t=np.repeat(np.arange(len(counts)), counts).tolist())
        schema = PLAIN.model_copy(update={"time": "t"})
        data = prepared(table, tmp_path / "out", schema, Split(kind="time", ratio=ratio))
        assert [len(shard) for shard in shards(data)] == sizes
        assert np.concatenate([shard.rows for shard in shards(data)]).tolist() == list(range(100))

    def test_time_bounds(self, tmp_path: Path) -> None:
        table = simple(20, t=[f"2026-01-{31 - i // 2:02d}" for i in range(20)])
        schema = PLAIN.model_copy(update={"time": "t"})
        data = prepared(table, tmp_path / "out", schema, Split(kind="time"))
        assert [len(shard) for shard in shards(data)] == [16, 2, 2]
        assert data.test.rows.tolist() == [0, 1]
        assert data.split == "by time; train until 2026-01-29, valid until 2026-01-30, test until 2026-01-31"

    def test_time_needs_a_column(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="needs a time column\n  fix: set time ="):
            prepared(simple(40), tmp_path / "out", split=Split(kind="time"))

    def test_column(self, tmp_path: Path) -> None:
        table, split = by_column("rrvrrt", c=list("abcdef"))
        data = prepared(table, tmp_path / "out", split=split)
        assert [shard.rows.tolist() for shard in shards(data)] == [[0, 1, 3, 4], [2, 6, 7], [5, 8, 9]]

    def test_an_unknown_split_is_named(self, tmp_path: Path) -> None:
        table = simple(40, s=["train"] * 39 + ["dev"])
        with pytest.raises(
            InputError, match="row 40, column 's': the split is 'dev'\n  fix: write train, valid or test"
        ):
            prepared(table, tmp_path / "out", split=Split(kind="column", column="s"))

    def test_files(self, tmp_path: Path) -> None:
        sources: dict[str, Source] = {
            name: FrameSource(simple(n)) for name, n in zip(SPLITS, (20, 8, 6), strict=True)
        }
        data, _ = write_prepared_data(
            Preparation(PLAIN, sources, Split(kind="files")), tmp_path / "out", quiet=True
        )
        expected = [list(range(20)), list(range(20, 28)), list(range(28, 34))]
        assert [shard.rows.tolist() for shard in shards(data)] == expected

    def test_folds_by_hand(self) -> None:
        """Seed 2018 shuffles seven places to 3 5 0 4 1 6 2 and four to 1 0 3 2, for each class again."""
        labels = np.array([0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0], np.uint8)
        # Class 0 is rows 0 2 3 5 7 8 10, so 5 8 0 | 7 2 | 10 3; class 1 is rows 1 4 6 9, so 4 1 | 9 | 6.
        assert folds(labels, 3, 2018).tolist() == [0, 0, 1, 2, 0, 0, 2, 1, 0, 1, 2]

    @pytest.mark.parametrize("rows", [23, 100, 1_237])
    @pytest.mark.parametrize("seed", [0, 2018])
    def test_folds_follow_the_old_rule(self, rows: int, seed: int) -> None:
        labels = (np.random.default_rng(rows).random(rows) < 0.3).astype(np.uint8)
        row_folds = folds(labels, 10, seed)
        assert row_folds.tolist() == layouts.deal(labels.tolist(), 10, seed)
        # scikit-learn still deals the rows of one class in this way.
        for label in (0, 1):
            members = np.flatnonzero(labels == label)
            if len(members) >= 10:
                dealt = KFold(10, shuffle=True, random_state=seed).split(members)
                for fold, (_, places) in enumerate(dealt):
                    chosen = np.flatnonzero((row_folds == fold) & (labels == label))
                    assert chosen.tolist() == members[places].tolist()

    @pytest.mark.slow
    @pytest.mark.parametrize("spool_rows", [13, 1 << 17])
    def test_folds(self, spool_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spool_module, "SPOOL_ROWS", spool_rows)
        labels = [int(i % 3 == 0) for i in range(205)]
        table = pl.DataFrame({"y": labels, "c": [f"v{i % 7}" for i in range(205)]})
        data = prepared(table, tmp_path / "out", split=Split(kind="folds", seed=2018))
        assert [shard.rows.tolist() for shard in shards(data)] == layouts.splits(labels)
        # 69 = 9 · 7 + 6 and 136 = 6 · 14 + 4 · 13 rows of the classes
        assert [int(shard.labels.sum()) for shard in shards(data)] == [69 - 14, 7, 7]
        assert [len(shard) for shard in shards(data)] == [205 - 42, 21, 21]
        # 14 14 14 14 13 and 28 27 27 27 27 rows of five folds; the first two are test
        five = prepared(table, tmp_path / "five", split=Split(kind="folds", ratio=(2, 1, 2)))
        assert [len(shard) for shard in shards(five)] == [81, 41, 83]

    def test_published_class_counts_follow_from_the_folds(self) -> None:
        """Positives and negatives of all rows; then of train, valid and test."""
        for name, counts in (
            ("criteo-x4", (11_745_438, 34_095_179)),
            ("avazu-x4", (6_865_066, 33_563_901)),
            ("kkbox-x1", (3_714_656, 3_662_762)),
        ):
            figures = find_protocol(name).figures
            pieces = [[n // 10 + (fold < n % 10) for fold in range(10)] for n in counts]
            positives, negatives = ((sum(piece[2:]), piece[1], piece[0]) for piece in pieces)
            assert figures.positives == positives
            assert figures.rows == tuple(p + n for p, n in zip(positives, negatives, strict=True))

    def test_without_test_rows(self, tmp_path: Path) -> None:
        data = prepared(simple(40), tmp_path / "out", split=Split(ratio=(8, 2, 0)))
        assert len(data.test) == 0
        assert data.test.ids.shape == (0, 1)
        assert list(data.test.batches(10)) == []

    @pytest.mark.parametrize(
        "values",
        [
            {"kind": "column"},
            {"column": "s"},
            {"kind": "hash"},
            {"ratio": (0, 1, 1)},
            {"seed": -1},
            {"ratio": (1, 1, -1)},
            {"kind": "folds", "ratio": (255, 1, 1)},
        ],
    )
    def test_impossible_rules_are_refused(self, values: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            Split.model_validate(values)

    def test_rule(self) -> None:
        assert parse_rule("hash:a:b") == ("hash", "a:b")
        for text in ("hash", "hash:", "odd", "time:t", ""):
            with pytest.raises(InputError, match=f"--split {text}: no such rule"):
                parse_rule(text)

    def test_ratio(self) -> None:
        assert parse_ratio("8:1:1") == (8, 1, 1)
        for text in ("8:1", "8:1:1:1", "a:b:c", "0:1:1", "1:0:1", "-1:1:1", "8.5:1:1", ""):
            with pytest.raises(InputError, match="--ratio"):
                parse_ratio(text)


def codes(keys: pl.Series, split: Split) -> list[int]:
    """Return the split codes of rows with these keys."""
    return [int(code) for code in hash_splits(Block(keys.to_frame("k"), 1, "log.csv"), split)]


GOLDEN_CODES = [0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]


class TestHash:
    RULE = Split(kind="hash", column="k", seed=3)

    def test_same_in_every_version(self) -> None:
        """Data that are prepared again, or tomorrow, must not move a key into another split."""
        assert codes(pl.Series([f"u{i}" for i in range(20)]), self.RULE) == GOLDEN_CODES
        assert codes(pl.Series([7, 8, 9]), self.RULE) == codes(pl.Series(["7", "8.0", "9"]), self.RULE)

    def test_follows_ratio_and_seed(self) -> None:
        keys = pl.Series([f"u{i}" for i in range(4_000)])
        shares = np.bincount(codes(keys, self.RULE)) / len(keys)
        assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
        without_test = self.RULE.model_copy(update={"ratio": (1, 1, 0)})
        assert np.bincount(codes(keys, without_test)) / len(keys) == pytest.approx([0.5, 0.5], abs=0.03)
        other = np.array(codes(keys, self.RULE.model_copy(update={"seed": 4})))
        both_train = ((other == 0) & (np.array(codes(keys, self.RULE)) == 0)).mean()
        assert both_train == pytest.approx(0.64, abs=0.03)

    def test_rows_of_a_key_stay_together(self, tmp_path: Path) -> None:
        """Whatever their order, and whichever other rows there are; the key needs no field."""
        table = simple(600, k=[f"u{i * 7 % 51}" for i in range(600)])
        whole = prepared(table, tmp_path / "whole", split=self.RULE)
        names = [{table["k"][int(row)] for row in shard.rows} for shard in shards(whole)]
        assert sum(map(len, names)) == len(set.union(*names)) == 51
        part = prepared(table.reverse().head(300), tmp_path / "part", split=self.RULE)
        for shard, keys in zip(shards(part), names, strict=True):
            assert {table["k"][599 - int(row)] for row in shard.rows} <= keys
        assert whole.split == "by the hash of 'k', about 8:1:1, seed 3"

    def test_a_row_without_a_key_is_refused(self, tmp_path: Path) -> None:
        table = simple(40, k=["a"] * 30 + [None] * 10)
        with pytest.raises(InputError, match=r"row 31, column 'k': the key of the split is missing\n  fix:"):
            prepared(table, tmp_path / "out", split=self.RULE)
        with pytest.raises(InputError, match=r"no column 'k' \(key of the split\)"):
            prepared(simple(40), tmp_path / "out", split=self.RULE)
