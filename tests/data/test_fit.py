"""Vocabularies, scales and quantiles are those of the training rows."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data import fit as fit_module
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from tests.support.preparing import by_column, contents, prepared, shards, simple


@pytest.mark.slow
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    train=st.lists(st.none() | st.sampled_from("abcdefg"), min_size=4, max_size=40),
    later=st.lists(st.sampled_from("abcxyz"), max_size=10),
    min_count=st.integers(1, 4),
)
def test_vocabulary_equals_a_plain_count_of_the_training_rows(
    train: list[str | None], later: list[str], min_count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table, split = by_column("r" * len(train) + "v" * len(later), c=[*train, *later])
    schema = Schema(label="y", fields=(Field(name="c", kind="categorical", min_count=min_count),))
    data = prepared(table, tmp_path_factory.mktemp("vocabulary") / "out", schema, split)
    counts = Counter(value for value in train if value is not None)
    kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda v: (-counts[v], v))
    fitted = data.encoder.fields[0]
    assert fitted.values.to_list() == kept
    assert fitted.counts.tolist() == [counts[value] for value in kept]
    expected = [kept.index(value) + 1 if value in kept else len(kept) + 1 for value in table["c"]]
    for shard in shards(data):
        assert shard.ids[:, 0].tolist() == [expected[row] for row in shard.rows]


class TestVocabulary:
    def test_exactly_min_count_is_kept(self, tmp_path: Path) -> None:
        table, split = by_column("r" * 10 + "v" * 3, c=list("aaabbbccddcce"))
        field = Field(name="c", kind="categorical", min_count=3)
        data = prepared(table, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        assert data.encoder.fields[0].values.to_list() == ["a", "b"]
        assert data.train.ids[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
        assert data.valid.ids[:, 0].tolist() == [3, 3, 3, 3, 3]

    def test_ties_are_ordered_by_value(self, tmp_path: Path) -> None:
        table, split = by_column("r" * 7, c=["é", "b", "10", "9", "Z", "b", "é"])
        data = prepared(table, tmp_path / "out", split=split)
        assert data.encoder.fields[0].values.to_list() == ["b", "é", "10", "9", "Z"]

    def test_multi_fields_count_each_value_they_keep(self, tmp_path: Path) -> None:
        table, split = by_column("rrrr", m=["a|b|c", "a|b", "b", "c||b"])
        field = Field(name="m", kind="multi", separator="|", max_len=2)
        data = prepared(table, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        assert dict(zip(data.encoder.fields[0].values, data.encoder.fields[0].counts, strict=True)) == {
            "b": 4,
            "a": 2,
            "c": 1,
        }
        assert data.train.ids.tolist() == [[2, 1], [2, 1], [1, 0], [3, 1]]

    def test_hashed_fields_keep_no_values(self, tmp_path: Path) -> None:
        field = Field(name="c", kind="categorical", hash_buckets=100)
        data = prepared(simple(40, c=["secret"] * 40), tmp_path / "out", Schema(label="y", fields=(field,)))
        assert not any(b"secret" in content for content in contents(data.path).values())
        assert data.layout.fields[0].size == 102
        assert not list((data.path / "vocabulary").iterdir())

    def test_a_field_may_have_the_name_of_a_role(self, tmp_path: Path) -> None:
        names = ("group", "group:", "label", "split", "field:group")
        schema = Schema(
            label="y", group="c", fields=tuple(Field(name=name, kind="categorical") for name in names)
        )
        table = simple(40, **{name: [f"{name}{i % 3}" for i in range(40)] for name in names})
        data = prepared(table, tmp_path / "out", schema)
        assert [fitted.values.to_list() for fitted in data.encoder.fields] == [
            sorted(fitted.values, key=lambda v: (-Counter(table[f.name][data.train.rows])[v], v))
            for f, fitted in zip(schema.fields, data.encoder.fields, strict=True)
        ]

    def test_buckets_beyond_32_bits(self, tmp_path: Path) -> None:
        fields = tuple(Field(name=name, kind="categorical", hash_buckets=2**30) for name in ("c", "d"))
        with pytest.raises(InputError, match="ids are 32-bit"):
            prepared(simple(40, d=["x"] * 40), tmp_path / "out", Schema(label="y", fields=fields))
        assert list(tmp_path.iterdir()) == []

    def test_many_buckets_cost_nothing(self, tmp_path: Path) -> None:
        fields = (Field(name="c", kind="categorical", hash_buckets=2**31 - 100),)
        data = prepared(simple(40), tmp_path / "out", Schema(label="y", fields=fields))
        assert data.train.ids.max() > 2**28


class TestNumbers:
    def fit(
        self, numbers: Sequence[float | None], tmp_path: Path, **options: Any
    ) -> tuple[PreparedData, Any]:
        table, split = by_column("r" * len(numbers), n=numbers)
        field = Field.model_validate({"name": "n", "kind": "numeric"} | options)
        data = prepared(table, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        return data, data.encoder.fields[0]

    def test_standardised_by_the_training_rows(self, tmp_path: Path) -> None:
        data, fitted = self.fit([1.0, 3.0, None, 5.0, 7.0], tmp_path)
        assert (fitted.mean, fitted.scale) == (4.0, math.sqrt(5))
        np.testing.assert_allclose(
            data.train.values[:, 0], np.array([-3, -1, 0, 1, 3]) / math.sqrt(5) + [0, 0, 1, 0, 0]
        )
        # A missing number is OOV's vector times one.
        assert data.train.ids[:, 0].tolist() == [1, 1, 2, 1, 1]

    def test_a_constant_has_scale_one(self, tmp_path: Path) -> None:
        data, fitted = self.fit([0.1] * 7, tmp_path)
        assert (fitted.mean, fitted.scale) == (0.1, 1.0)
        assert data.train.values[:, 0].tolist() == [0.0] * 7

    def test_no_numbers(self, tmp_path: Path) -> None:
        data, fitted = self.fit([None] * 5, tmp_path)
        assert (fitted.mean, fitted.scale) == (0.0, 1.0)
        assert data.train.ids[:, 0].tolist() == [2] * 5

    @pytest.mark.parametrize("offset", [0.0, 1e9, -1.7e12])
    def test_a_large_offset_costs_no_precision(self, offset: float, tmp_path: Path) -> None:
        noise = np.round(np.random.default_rng(0).normal(size=2_000) * 8) / 8
        data, fitted = self.fit((noise + offset).tolist(), tmp_path)
        exact = (noise - noise.mean()) / noise.std()
        assert fitted.scale == pytest.approx(noise.std(), rel=1e-9)
        # The mean is one number of 64 bits, so it is exact to its last bit only.
        np.testing.assert_allclose(data.train.values[:, 0], exact, atol=1e-6 + float(np.spacing(abs(offset))))

    def test_too_large_to_standardise(self, tmp_path: Path) -> None:
        with pytest.raises(
            InputError, match=r"field 'n': .* too large to standardise\n  fix: set transform = \"linear\""
        ):
            self.fit([1e200, -1e200, 3.0], tmp_path)

    def test_quantiles_hold_equal_shares(self, tmp_path: Path) -> None:
        numbers = np.random.default_rng(0).permutation(400) * 1.0
        data, fitted = self.fit(numbers.tolist(), tmp_path, transform="quantiles", num_buckets=4)
        assert fitted.edges == (99.75, 199.5, 299.25)
        assert fitted.counts.tolist() == [100] * 4
        ids = {str(bucket): i + 1 for i, bucket in enumerate(fitted.values)}
        assert data.train.ids[:, 0].tolist() == [ids[str(int(n // 100))] for n in numbers]

    def test_few_values_have_few_quantiles(self, tmp_path: Path) -> None:
        data, fitted = self.fit([0.0] * 90 + [5.0] * 10, tmp_path, transform="quantiles", num_buckets=64)
        assert len(fitted.edges) < 63
        assert len(set(data.train.ids[:90, 0])) == len(set(data.train.ids[90:, 0])) == 1
        assert data.train.ids[0, 0] != data.train.ids[99, 0]

    def test_quantiles_without_numbers(self, tmp_path: Path) -> None:
        data, fitted = self.fit([None] * 5, tmp_path, transform="quantiles")
        assert data.train.ids[:, 0].tolist() == [fitted.oov] * 5 == [1] * 5
        assert data.encoder.encode(Block(pl.DataFrame({"n": [3.0]}), 1, "")).ids_BW.tolist() == [[1]]

    def test_quantiles_from_evenly_spaced_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fit_module, "QUANTILE_ROWS", 100)
        numbers = np.random.default_rng(0).permutation(4_000) * 1.0
        _, fitted = self.fit(numbers.tolist(), tmp_path, transform="quantiles", num_buckets=2)
        assert fitted.edges[0] == pytest.approx(2_000, rel=0.15)

    def test_edges_are_between_equal_shares(self, tmp_path: Path) -> None:
        numbers = np.random.default_rng(0).permutation(401) * 1.0
        data, fitted = self.fit(numbers.tolist(), tmp_path, transform="linear", num_buckets=4)
        assert fitted.edges == (0.0, 100.0, 200.0, 300.0, 400.0)
        assert fitted.values.to_list() == ["0", "1", "2", "3", "4"] and fitted.oov == 6
        assert fitted.counts.tolist() == [100, 100, 100, 101, 0], "rows from each edge to the next"
        assert data.train.ids[:, 0].tolist() == (1 + np.minimum(numbers // 100, 3)).tolist()
        np.testing.assert_allclose(
            data.train.ids[:, 0] - 1 + data.train.values[:, 0], numbers / 100, rtol=1e-6
        )

    def test_rows_at_the_top_have_their_own_id_if_they_are_as_many_as_a_quantile(
        self, tmp_path: Path
    ) -> None:
        data, fitted = self.fit([0.0] * 60 + [1.0] * 40, tmp_path, transform="linear")
        assert fitted.edges == (0.0, 1.0, 1.0) and fitted.counts.tolist() == [60, 40, 0]
        assert data.train.ids[:, 0].tolist() == [1] * 60 + [2] * 40
        assert not data.train.values.any()

    def test_each_of_few_numbers_is_an_edge(self, tmp_path: Path) -> None:
        """A number that few rows have would fall between two quantiles."""
        numbers = [1.0] * 90 + [2.0] * 6 + [5.0] * 3 + [9.0]
        data, fitted = self.fit(numbers, tmp_path, transform="linear", num_buckets=4)
        assert fitted.edges == (1.0, 2.0, 5.0, 9.0, 9.0) and fitted.counts.tolist() == [90, 6, 3, 1, 0]
        assert data.train.ids[:, 0].tolist() == [1] * 90 + [2] * 6 + [3] * 3 + [4]
        assert not data.train.values.any()

    def test_edges_of_a_constant(self, tmp_path: Path) -> None:
        data, fitted = self.fit([0.1, 0.1, None, 0.1], tmp_path, transform="linear")
        assert fitted.edges == (0.1, 0.1) and fitted.counts.tolist() == [3, 0]
        assert data.train.ids[:, 0].tolist() == [1, 1, 3, 1]
        later = data.encoder.encode(Block(pl.DataFrame({"n": [-5.0, 0.1, 7.0]}), 1, ""))
        assert later.ids_BW.tolist() == [[1]] * 3 and later.values_BN.tolist() == [[0.0]] * 3

    def test_edges_without_numbers(self, tmp_path: Path) -> None:
        data, fitted = self.fit([None] * 5, tmp_path, transform="linear")
        assert fitted.edges == () and data.train.ids[:, 0].tolist() == [fitted.oov] * 5 == [1] * 5
        assert data.manifest["splits"]["train"]["missing"] == {"n": 5}
        later = data.encoder.encode(Block(pl.DataFrame({"n": [3.0]}), 1, ""))
        assert later.ids_BW.tolist() == [[1]] and later.num_unseen.tolist() == [1]

    def test_edges_of_missing_and_huge_numbers(self, tmp_path: Path) -> None:
        numbers = [1e308, None, -1e308, 0.0, 1.7e308, -1.7e308, None]
        data, fitted = self.fit(numbers, tmp_path, transform="linear", num_buckets=4)
        assert fitted.edges == (-1.7e308, -1e308, 0.0, 1e308, 1.7e308)
        places = data.train.ids[:, 0] - 1 + data.train.values[:, 0]
        assert places.tolist() == [3, 5, 1, 2, 4, 0, 5], "the fifth edge is the last; OOV comes after it"
        data, fitted = self.fit(numbers, tmp_path / "cut", transform="quantiles", num_buckets=2)
        assert fitted.edges == (0.0,)

    def test_numbers_that_held_out_rows_alone_have_are_unseen(self, tmp_path: Path) -> None:
        table, split = by_column("rrvvv", n=[None, None, 3.0, None, 4.0])
        field = Field(name="n", kind="numeric", transform="linear")
        data = prepared(table, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        kinds = {kind: data.manifest["splits"]["valid"][kind]["n"] for kind in ("oov", "missing", "rare")}
        assert kinds == {"oov": 5, "missing": 3, "rare": 0}

    def test_log_square(self, tmp_path: Path) -> None:
        data, fitted = self.fit([3, 4, 1, 100, 0, None], tmp_path, transform="log-square", missing=("0",))
        assert fitted.values.to_list() == ["1", "21"]
        assert data.train.ids[:, 0].tolist() == [1, 1, 1, 2, 3, 3]
