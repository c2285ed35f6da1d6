from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data import quality as quality_module
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.quality import field_quality, quality_notes, repeated_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.schema import Field, Schema
from tests.support.preparing import by_column
from tests.support.preparing import prepared as prepare


def test_quality_is_what_counting_gives(prepared: PreparedData) -> None:
    qualities = {quality.name: quality for quality in field_quality(prepared)}
    assert list(qualities) == [field.name for field in prepared.layout.fields]
    for field in prepared.layout.fields:
        quality = qualities[field.name]
        columns = slice(field.start, field.start + field.width)
        shares = {}
        for split in ("train", "test"):
            ids = np.asarray(getattr(prepared, split).ids[:, columns]).ravel()
            ids = ids[ids != field.offset]
            values, counts = np.unique(ids, return_counts=True)
            shares[split] = dict(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))
        drift = sum(
            abs(shares["train"].get(value, 0.0) - shares["test"].get(value, 0.0))
            for value in set(shares["train"]) | set(shares["test"])
        )
        assert quality.drift["test"] == pytest.approx(drift / 2)
        assert quality.oov["test"] == pytest.approx(shares["test"].get(field.offset + field.size - 1, 0.0))
        assert 0 <= quality.drift["valid"] <= 1


def test_padding_does_not_count(tmp_path: Path) -> None:
    rows = pl.DataFrame(
        {
            "click": [0, 1] * 3,
            "tags": ["a", "b", "a c", "d", "", ""],
            "of": ["train", "train", "valid", "valid", "test", "test"],
        }
    )
    schema = Schema(label="click", fields=(Field(name="tags", kind="multi", max_len=5),))
    split = Split(kind="column", column="of")
    data, _ = write_prepared_data(
        Preparation(schema, {"all": FrameSource(rows)}, split), tmp_path / "out", quiet=True
    )
    (quality,) = field_quality(data)
    assert quality.oov == {"train": 0.0, "valid": pytest.approx(2 / 3), "test": 0.0}


class TestUnknownValues:
    def test_rare_unseen_and_missing_are_counted_apart(self, tmp_path: Path) -> None:
        """`a` is kept, `r` is in one training row only, `n` in none; two rows of valid and test are empty."""
        values = ["a", "a", "r", None, "a", "r", "n", "n"]
        frame, split = by_column("rrrrvvvv", c=values, m=[f"{value or ''} a" for value in values])
        fields = (
            Field(name="c", kind="categorical", min_count=2),
            Field(name="m", kind="multi", min_count=2),
        )
        data = prepare(frame, tmp_path / "out", Schema(label="y", fields=fields), split)
        entries = data.manifest["splits"]
        assert [entries["train"][kind] for kind in ("oov", "missing", "rare")] == [
            {"c": 2, "m": 1},
            {"c": 1, "m": 0},
            {"c": 1, "m": 1},
        ]
        assert [entries["valid"][kind] for kind in ("oov", "missing", "rare")] == [
            {"c": 5, "m": 3},
            {"c": 2, "m": 0},
            {"c": 1, "m": 1},
        ]
        single, multi = field_quality(data)
        assert single.missing is not None and single.rare is not None and single.unseen is not None
        assert single.missing["valid"] == pytest.approx(2 / 6)
        assert single.rare["valid"] == pytest.approx(1 / 6)
        assert single.unseen == {"train": 0.0, "valid": pytest.approx(2 / 6), "test": 0.0}
        assert multi.rare == {"train": pytest.approx(1 / 7), "valid": pytest.approx(1 / 8), "test": 0.0}
        assert multi.unseen is not None and multi.unseen["valid"] == pytest.approx(2 / 8)

    def test_without_min_count_nothing_is_rare(self, tmp_path: Path) -> None:
        frame, split = by_column("rrvv", c=["a", "b", "b", "n"], p=[1.0, 2.0, None, 7.0])
        fields = (
            Field(name="c", kind="categorical"),
            Field(name="p", kind="numeric", transform="quantiles"),
        )
        data = prepare(frame, tmp_path / "out", Schema(label="y", fields=fields), split)
        category, number = field_quality(data)
        assert category.rare == number.rare == {"train": 0.0, "valid": 0.0, "test": 0.0}
        assert category.unseen is not None and category.unseen["valid"] == pytest.approx(1 / 4)
        assert number.unseen == {"train": 0.0, "valid": 0.0, "test": 0.0}
        assert number.missing is not None and number.missing["valid"] == pytest.approx(3 / 4)

    def test_buckets_with_few_rows_are_rare(self, tmp_path: Path) -> None:
        frame, split = by_column("rrrrrvv", p=[1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 1.0])
        field = Field(name="p", kind="numeric", transform="quantiles", num_buckets=5, min_count=2)
        data = prepare(frame, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        (quality,) = field_quality(data)
        assert quality.rare is not None and quality.rare["train"] == pytest.approx(1 / 5)
        assert quality.rare["valid"] == pytest.approx(1 / 4)

    def test_data_of_before_have_the_sum_only(self, prepared: PreparedData) -> None:
        kept = ("rows", "positives", "oov")
        entries = prepared.manifest["splits"]
        before = {name: {key: entries[name][key] for key in kept} for name in entries}
        data = PreparedData(prepared.path)
        data.manifest["splits"] = before
        for old, new in zip(field_quality(data), field_quality(prepared), strict=True):
            assert (old.missing, old.rare, old.unseen) == (None, None, None)
            assert old.oov == new.oov
            assert "rare" not in old.to_json() and "rare" in new.to_json()


class TestRepeatedRows:
    def data(self, out: Path) -> PreparedData:
        """Of valid, one row is in train with the same label, one with the other label; numbers count, too."""
        frame, split = by_column(
            "rrrr" + "vvvv" + "tttt",
            c=["a", "b", "a", "b", "a", "a", "b", "x", "a", "b", "a", "b"],
            p=[1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 3.0, 2.0, 1.0, 2.0, 1.0, 2.5],
        )
        fields = (Field(name="c", kind="categorical"), Field(name="p", kind="numeric"))
        return prepare(frame, out, Schema(label="y", fields=fields), split)

    def test_they_are_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = self.data(tmp_path / "out")
        assert repeated_rows(data) == {"valid": 1, "test": 3}
        monkeypatch.setattr(quality_module, "HASHED_ROWS", 3)
        assert repeated_rows(data) == {"valid": 1, "test": 3}
        assert quality_notes(data) == [
            "1 of 6 valid rows (16.7%) and 3 of 6 test rows (50.0%) have the values and the label of a training row:"
            " copies flatter a model, but with few fields such rows also come by chance."
        ]

    def test_too_many_rows_are_not_compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quality_module, "MAX_COMPARED_ROWS", 3)
        data = self.data(tmp_path / "out")
        assert (repeated_rows(data), quality_notes(data)) == (None, [])
