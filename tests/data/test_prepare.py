import errno
import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn.model_selection import KFold

from recap_ctr.data import prepare as prepare_module
from recap_ctr.data import source as source_module
from recap_ctr.data.encode import PAD
from recap_ctr.data.infer import infer
from recap_ctr.data.prepare import Preparation, Split, folds, parse_ratio, prepare
from recap_ctr.data.shards import SPLITS, PreparedData, Shard
from recap_ctr.data.source import Block, FileSource, FrameSource, Source
from recap_ctr.datasets.catalogue import protocol
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import atomic_directory
from recap_ctr.storage.hashes import sha256
from tests.support import layouts

PLAIN = Schema(label="y", fields=(Field(name="c", kind="categorical"),))


@pytest.fixture(autouse=True, scope="module")
def no_power_cut() -> Iterator[None]:
    """Nothing here must outlive a power cut, and waiting for the disk is most of a small preparation's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def arrays(directory: Path) -> dict[str, bytes]:
    """All that is written but the manifest, which also records where the rows came from."""
    return {name: data for name, data in contents(directory).items() if name != "manifest.json"}


def prepared(
    table: pl.DataFrame | Source, out: Path, schema: Schema = PLAIN, split: Split | None = None
) -> PreparedData:
    source = FrameSource(table) if isinstance(table, pl.DataFrame) else table
    _, done = prepare(Preparation(schema, {"all": source}, split or Split()), out, quiet=True)
    assert not done
    return PreparedData(out)


def shards(data: PreparedData) -> list[Shard]:
    return [data.train, data.valid, data.test]


def simple(rows: int, **columns: Sequence[Any]) -> pl.DataFrame:
    return pl.DataFrame(
        {"y": [i % 2 for i in range(rows)], "c": [f"v{i % 7}" for i in range(rows)]} | columns
    )


def by_column(splits: str, **columns: Sequence[Any]) -> tuple[pl.DataFrame, Split]:
    """Rows whose splits are spelt out, one letter a row; four rows with both labels complete valid and test."""
    names = {"r": "train", "v": "valid", "t": "test"}
    filled = {name: [*values, *[None] * 4] for name, values in columns.items()}
    table = {
        "split": [names[letter] for letter in splits + "vvtt"],
        "y": [i % 2 for i in range(len(splits) + 4)],
    }
    return pl.DataFrame(table | filled, strict=False), Split(kind="column", column="split")


# ---------------------------------------------------------------------------------------------------------------------
# One table, many shapes

EVERY_KIND = Schema(
    label="y",
    weight="w",
    group="user",
    time="t",
    row_id="id",
    fields=(
        Field(name="user", kind="categorical"),
        Field(name="item", kind="categorical", min_count=2),
        Field(name="site", kind="categorical", hash_buckets=11),
        Field(name="tags", kind="multi", separator="|", max_len=3),
        Field(name="words", kind="multi", max_len=2, pooling="sum", hash_buckets=5),
        Field(name="price", kind="numeric"),
        Field(name="visits", kind="numeric", transform="log-square", missing=("0",)),
        Field(name="age", kind="numeric", transform="quantiles", num_buckets=4, missing=("-1", "3")),
        Field(name="t", kind="numeric", transform="quantiles", num_buckets=3),
    ),
)


def every_kind(rows: int, seed: int = 0) -> pl.DataFrame:
    """Sums of the prices are exact in any order, so that no block boundary can move a last bit."""
    rng = np.random.default_rng(seed)

    def gaps(values: Any, share: float = 0.1) -> pl.Series:
        return pl.Series(values).set(pl.Series(rng.random(rows) < share), None)

    return pl.DataFrame(
        {
            "id": np.arange(rows) + 2**60,
            "y": rng.integers(0, 2, rows),
            "w": rng.integers(0, 9, rows) / 4,
            "t": rng.integers(0, 50, rows),
            "user": gaps(rng.zipf(1.5, rows) % 20 + 2**60),
            "item": gaps([f'it"em,\n{i}' for i in rng.zipf(1.3, rows) % 40]),
            "site": gaps([f"site-{i}" for i in rng.integers(0, 30, rows)]),
            "tags": gaps(["|".join(rng.choice(["a", "b", "ü"], rng.integers(1, 5))) for _ in range(rows)]),
            "words": gaps([" ".join(rng.choice(["p", "q"], rng.integers(1, 4))) for _ in range(rows)]),
            "price": gaps(rng.integers(-100, 100, rows) / 4),
            "visits": gaps(rng.integers(-2, 500, rows)),
            "age": gaps(rng.integers(-1, 90, rows)),
        }
    )


def _parts(table: pl.DataFrame, directory: Path) -> list[Path]:
    for i, start in enumerate(range(0, table.height, 83)):
        part = table.slice(start, 83)
        if i % 2:
            part.select(reversed(part.columns)).write_parquet(directory / f"part-{i}.parquet")
        else:
            part.write_csv(directory / f"part-{i}.csv")
    return [directory / "part-*"]


def _file(name: str, write: Callable[[pl.DataFrame, Path], object]) -> Callable[[pl.DataFrame, Path], Source]:
    def make(table: pl.DataFrame, directory: Path) -> Source:
        write(table, directory / name)
        return FileSource([directory / name])

    return make


def _floats(table: pl.DataFrame) -> pl.DataFrame:
    """As pandas has it: whole numbers with gaps are floats."""
    return table.with_columns(pl.col("visits", "age", "t", "y").cast(pl.Float64).fill_null(math.nan))


SHAPES: dict[str, Callable[[pl.DataFrame, Path], Source]] = {
    "csv": _file("t.csv", lambda table, path: table.write_csv(path)),
    "tsv": _file("t.tsv", lambda table, path: table.write_csv(path, separator="\t")),
    "crlf": _file(
        "t.csv", lambda table, path: table.write_csv(path, line_terminator="\r\n", include_bom=True)
    ),
    "quoted": _file("t.csv", lambda table, path: table.write_csv(path, quote_style="always")),
    "no last line end": _file("t.csv", lambda table, path: path.write_text(table.write_csv().rstrip("\n"))),
    "gz": _file("t.csv.gz", lambda table, path: path.write_bytes(gzip.compress(table.write_csv().encode()))),
    "zst": _file(
        "t.csv.zst", lambda table, path: path.write_bytes(zstandard.compress(table.write_csv().encode()))
    ),
    "parquet": _file("t.parquet", lambda table, path: table.write_parquet(path, row_group_size=100)),
    "arrow": _file("t.arrow", lambda table, path: table.write_ipc(path)),
    "text in parquet": _file("t.parquet", lambda table, path: table.cast(pl.String).write_parquet(path)),
    "glob": lambda table, directory: FileSource(_parts(table, directory)),
    "frame": lambda table, directory: FrameSource(table),
    "float frame": lambda table, directory: FrameSource(_floats(table)),
    "lists": lambda table, directory: FrameSource(table.with_columns(pl.col("tags").str.split("|"))),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared(every_kind(500), tmp_path_factory.mktemp("reference") / "out", EVERY_KIND)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_rows_give_the_same_bytes(shape: str, reference: PreparedData, tmp_path: Path) -> None:
    data = prepared(SHAPES[shape](every_kind(500), tmp_path), tmp_path / "out", EVERY_KIND)
    assert arrays(data.path) == arrays(reference.path)
    assert data.fingerprint == reference.fingerprint
    assert data.manifest["fields"] == reference.manifest["fields"]


@pytest.mark.parametrize("shape", ["csv", "zst", "parquet", "frame"])
@pytest.mark.parametrize(("block_bytes", "block_rows", "spool_rows"), [(701, 7, 13), (4_096, 83, 499)])
def test_block_boundaries_do_not_matter(
    shape: str,
    block_bytes: int,
    block_rows: int,
    spool_rows: int,
    reference: PreparedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(source_module, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(prepare_module, "SPOOL_ROWS", spool_rows)
    data = prepared(SHAPES[shape](every_kind(500), tmp_path), tmp_path / "out", EVERY_KIND)
    assert arrays(data.path) == arrays(reference.path)
    assert data.manifest["fields"] == reference.manifest["fields"]


def test_what_is_written(reference: PreparedData) -> None:
    table = every_kind(500)
    train = reference.train
    assert [len(shard) for shard in shards(reference)] == [400, 50, 50]
    np.testing.assert_array_equal(
        np.sort(np.concatenate([s.rows for s in shards(reference)])), np.arange(500)
    )
    assert [str(array.dtype) for array in (train.ids, train.values, train.labels)] == [
        "int32",
        "float32",
        "uint8",
    ]
    assert train.ids.shape == (400, 7 + 3 + 2)
    assert train.values.shape == (400, 1)
    for shard, split in zip(shards(reference), SPLITS, strict=True):
        rows = table[shard.rows]
        assert shard.weights is not None and shard.groups is not None and shard.times is not None
        np.testing.assert_array_equal(shard.labels, rows["y"])
        np.testing.assert_array_equal(shard.weights, rows["w"].cast(pl.Float32))
        np.testing.assert_array_equal(shard.times, rows["t"].cast(pl.Float64))
        users = sorted(table["user"].drop_nulls().unique())
        assert shard.groups.tolist() == [-1 if user is None else users.index(user) for user in rows["user"]]
        assert reference.manifest["splits"][split]["positives"] == rows["y"].sum()
        oov = [f.offset + f.size - 1 for f in reference.layout.fields]
        found = [
            int((shard.ids[:, f.start : f.start + f.width] == o).sum())
            for f, o in zip(reference.layout.fields, oov, strict=True)
        ]
        assert list(reference.manifest["splits"][split]["oov"].values()) == found
    assert reference.name == "out"


def test_batches_are_gathered_copies(reference: PreparedData) -> None:
    shard = reference.train
    batches = list(shard.batches(150))
    assert [len(batch.labels_B) for batch in batches] == [150, 150, 100]
    np.testing.assert_array_equal(np.concatenate([batch.ids_BW for batch in batches]), shard.ids)
    chosen = shard.batch(np.array([5, 3, 3]))
    np.testing.assert_array_equal(chosen.values_BN, shard.values[[5, 3, 3]])
    assert chosen.labels_B.dtype == np.float32
    assert chosen.weights_B is not None
    chosen.ids_BW[:] = 0  # the shard is read-only; a batch is the caller's


# ---------------------------------------------------------------------------------------------------------------------
# Training and scoring see the same ids

CELLS = st.none() | st.sampled_from(["", "a", "b", "a|b", "b|a||a|c", "é", "7", "NA"]) | st.text(max_size=3)
NUMBERS = st.none() | st.integers(-3, 40).map(float) | st.floats(-1e9, 1e9) | st.just(math.nan)
MIXED = Schema(
    label="y",
    weight="w",
    group="g",
    fields=(
        Field(name="c", kind="categorical", missing=("NA",)),
        Field(name="rare", kind="categorical", min_count=2),
        Field(name="hashed", kind="categorical", hash_buckets=3),
        Field(name="m", kind="multi", separator="|", max_len=2, missing=("NA",)),
        Field(name="one", kind="multi", separator="|", max_len=1, min_count=2),
        Field(name="lists", kind="multi", max_len=3),
        Field(name="hashed_lists", kind="multi", max_len=2, hash_buckets=4),
        Field(name="v", kind="numeric", missing=("-1",)),
        Field(name="v2", kind="numeric"),
        Field(name="l", kind="numeric", transform="log-square", min_count=2, missing=("0", "NA")),
        Field(name="q", kind="numeric", transform="quantiles", num_buckets=5, missing=("0", "1", "2")),
        Field(name="q2", kind="numeric", transform="quantiles", num_buckets=64, min_count=2),
        Field(name="float", kind="categorical"),
    ),
)


@st.composite
def tables(draw: st.DrawFn) -> pl.DataFrame:
    rows = draw(st.integers(9, 14))

    def some(cells: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(cells, min_size=rows, max_size=rows))

    columns: dict[str, Any] = {"y": [0, 1] * (rows // 2) + [0] * (rows % 2)}
    columns["w"] = some(st.floats(0, 1e3, width=32))
    for name in ("g", "c", "rare", "hashed", "m", "one"):
        columns[name] = pl.Series(some(CELLS), dtype=pl.String)
    columns["lists"] = pl.Series(some(st.none() | st.lists(CELLS, max_size=4)), dtype=pl.List(pl.String))
    integers = some(st.none() | st.lists(st.none() | st.integers(-2, 3), max_size=3))
    columns["hashed_lists"] = pl.Series(integers, dtype=pl.List(pl.Int64))
    for name in ("v", "v2", "l", "q", "q2", "float"):
        columns[name] = pl.Series(some(NUMBERS), dtype=pl.Float64)
    return pl.DataFrame(columns)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(table=tables())
def test_scoring_encodes_what_training_saw(
    table: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Labels alternate, so of neighbours each split has both.
    third = table.height // 3
    split = ["train"] * (table.height - 2 * third) + ["valid"] * third + ["test"] * third
    out = tmp_path_factory.mktemp("mixed") / "out"
    rule = Split(kind="column", column="split")
    data = prepared(table.with_columns(split=pl.Series(split)), out, MIXED, rule)
    for shard in shards(data):
        rows = table[shard.rows]
        encoded = data.encoder.encode(Block(rows, 1, "rows"))
        np.testing.assert_array_equal(encoded.ids_BW, shard.ids)
        np.testing.assert_array_equal(encoded.values_BN, shard.values)
        np.testing.assert_array_equal(shard.weights, rows["w"].cast(pl.Float32))
        assert np.isfinite(shard.values).all()
        for field in data.layout.fields:
            ids = shard.ids[:, field.start : field.start + field.width] - field.offset
            assert ids.min() >= 0 and ids.max() < field.size
            assert field.pooling or ids.min() > PAD
        alone = data.encoder.encode(Block(rows[:1], 1, "row"))
        np.testing.assert_array_equal(alone.ids_BW, shard.ids[:1])
        np.testing.assert_array_equal(alone.values_BN, shard.values[:1])


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    train=st.lists(st.none() | st.sampled_from("abcdefg"), min_size=4, max_size=40),
    later=st.lists(st.sampled_from("abcxyz"), max_size=10),
    min_count=st.integers(1, 4),
)
def test_vocabulary_is_what_a_plain_count_of_the_training_rows_says(
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

    def test_multi_counts_each_piece_that_is_taken(self, tmp_path: Path) -> None:
        table, split = by_column("rrrr", m=["a|b|c", "a|b", "b", "c||b"])
        field = Field(name="m", kind="multi", separator="|", max_len=2)
        data = prepared(table, tmp_path / "out", Schema(label="y", fields=(field,)), split)
        assert dict(zip(data.encoder.fields[0].values, data.encoder.fields[0].counts, strict=True)) == {
            "b": 4, "a": 2, "c": 1
        }  # fmt: skip
        assert data.train.ids.tolist() == [[2, 1], [2, 1], [1, 0], [3, 1]]

    def test_hashed_fields_keep_no_values(self, tmp_path: Path) -> None:
        field = Field(name="c", kind="categorical", hash_buckets=100)
        data = prepared(simple(40, c=["secret"] * 40), tmp_path / "out", Schema(label="y", fields=(field,)))
        assert not any(b"secret" in content for content in contents(data.path).values())
        assert data.layout.fields[0].size == 102
        assert not list((data.path / "vocabulary").iterdir())

    def test_a_field_of_any_name_may_stand_beside_a_group(self, tmp_path: Path) -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


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
        assert data.train.ids[:, 0].tolist() == [
            1,
            1,
            2,
            1,
            1,
        ]  # OOV's vector times one where there is no number

    def test_a_constant_has_scale_one(self, tmp_path: Path) -> None:
        data, fitted = self.fit([0.1] * 7, tmp_path)
        assert (fitted.mean, fitted.scale) == (0.1, 1.0)
        assert data.train.values[:, 0].tolist() == [0.0] * 7

    def test_no_number_at_all(self, tmp_path: Path) -> None:
        data, fitted = self.fit([None] * 5, tmp_path)
        assert (fitted.mean, fitted.scale) == (0.0, 1.0)
        assert data.train.ids[:, 0].tolist() == [2] * 5

    @pytest.mark.parametrize("offset", [0.0, 1e9, -1.7e12])
    def test_a_large_offset_costs_no_precision(self, offset: float, tmp_path: Path) -> None:
        noise = np.round(np.random.default_rng(0).normal(size=2_000) * 8) / 8
        data, fitted = self.fit((noise + offset).tolist(), tmp_path)
        exact = (noise - noise.mean()) / noise.std()
        assert fitted.scale == pytest.approx(noise.std(), rel=1e-9)
        # The mean is one number of 64 bits, and so right to its last one.
        np.testing.assert_allclose(data.train.values[:, 0], exact, atol=1e-6 + float(np.spacing(abs(offset))))

    def test_too_large_to_standardise(self, tmp_path: Path) -> None:
        with pytest.raises(
            InputError, match=r"field 'n': .* too large to standardise\n  fix: set transform = \"quantiles\""
        ):
            self.fit([1e200, -1e200, 3.0], tmp_path)

    def test_quantiles_hold_equal_shares(self, tmp_path: Path) -> None:
        numbers = np.random.default_rng(0).permutation(400) * 1.0
        data, fitted = self.fit(numbers.tolist(), tmp_path, transform="quantiles", num_buckets=4)
        assert fitted.edges == (99.75, 199.5, 299.25)
        assert fitted.counts.tolist() == [100] * 4
        ids = {str(bucket): i + 1 for i, bucket in enumerate(fitted.values)}
        assert data.train.ids[:, 0].tolist() == [ids[str(int(n // 100))] for n in numbers]

    def test_quantiles_of_few_values_fall_together(self, tmp_path: Path) -> None:
        data, fitted = self.fit([0.0] * 90 + [5.0] * 10, tmp_path, transform="quantiles", num_buckets=64)
        assert len(fitted.edges) < 63
        assert len(set(data.train.ids[:90, 0])) == len(set(data.train.ids[90:, 0])) == 1
        assert data.train.ids[0, 0] != data.train.ids[99, 0]

    def test_quantiles_of_nothing(self, tmp_path: Path) -> None:
        data, fitted = self.fit([None] * 5, tmp_path, transform="quantiles")
        assert data.train.ids[:, 0].tolist() == [fitted.oov] * 5 == [1] * 5
        assert data.encoder.encode(Block(pl.DataFrame({"n": [3.0]}), 1, "")).ids_BW.tolist() == [[1]]

    def test_quantiles_from_evenly_spaced_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare_module, "QUANTILE_ROWS", 100)
        numbers = np.random.default_rng(0).permutation(4_000) * 1.0
        _, fitted = self.fit(numbers.tolist(), tmp_path, transform="quantiles", num_buckets=2)
        assert fitted.edges[0] == pytest.approx(2_000, rel=0.15)

    def test_log_square(self, tmp_path: Path) -> None:
        data, fitted = self.fit([3, 4, 1, 100, 0, None], tmp_path, transform="log-square", missing=("0",))
        assert fitted.values.to_list() == ["1", "21"]
        assert data.train.ids[:, 0].tolist() == [1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("kind", [int, str, float, Decimal, lambda value: Decimal(value) * Decimal("1.00")])
def test_ids_encode_alike_whatever_their_type(kind: Callable[[int], Any], tmp_path: Path) -> None:
    data = prepared(simple(40, c=[i % 5 for i in range(40)]), tmp_path / "out")
    rows = pl.DataFrame({"c": [kind(3), kind(7), None]}, strict=False)
    seven_is_new = data.encoder.encode(Block(rows, 1, "")).ids_BW[:, 0].tolist()
    assert seven_is_new == [data.encoder.fields[0].values.to_list().index("3") + 1, 6, 6]


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    plain = ("y", "c", "tags", "n", "cut", "w", "t", "g", "h", "of")
    odd = ("^y$", "*", "^t.*$", "^n$", "^(n|c)$", "^w$", "^.*$", "^g$", "^h.?$", "^of$")

    def build(names: Sequence[str], out: str) -> PreparedData:
        y, c, tags, n, cut, w, t, g, h, of = names
        columns = {
            y: [0.0, 1.0] * 20, c: ["True", "2.0"] * 20, tags: ["a b", "", "c", "a"] * 10, n: ["1", "x"] * 20,
            cut: [3, 4, None, 5] * 10, w: [1.0, 2.0] * 20, t: ["2026-01-01", "2026-01-02"] * 20, g: [1.0, 2.0] * 20,
            h: [7, 8, 9, None] * 10, of: ["train", "train", "valid", "valid"] * 10,
        }  # fmt: skip
        schema = Schema(
            label=y, weight=w, time=t, group=g,
            fields=(
                Field(name=c, kind="categorical"), Field(name=tags, kind="multi"),
                Field(name=h, kind="categorical", hash_buckets=4),
                Field(name=n, kind="numeric", missing=("x",)),
                Field(name=cut, kind="numeric", transform="log-square"),
            ),
        )  # fmt: skip
        rows = tmp_path / f"{out}.parquet"
        pl.DataFrame(columns).write_parquet(rows)
        inferred = infer(FileSource([rows]), y)
        assert {finding.column for finding in inferred.findings} == set(names)
        return prepared(FileSource([rows]), tmp_path / out, schema, Split(kind="column", column=of))

    one, other = build(plain, "plain"), build(odd, "odd")
    written = [
        {name: data for name, data in arrays(of.path).items() if name != "schema.toml"} for of in (one, other)
    ]
    assert written[0] == written[1]


def test_long_ids_are_told_apart(tmp_path: Path) -> None:
    ids = [2**60 + i % 4 for i in range(40)]
    data = prepared(simple(40, c=ids), tmp_path / "out")
    assert sorted(data.encoder.fields[0].values) == [str(2**60 + i) for i in range(4)]


# ---------------------------------------------------------------------------------------------------------------------
# Splits


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
        one, again, two = (
            prepared(table, tmp_path / str(i), split=Split(seed=seed)) for i, seed in enumerate((5, 5, 6))
        )
        assert arrays(one.path) == arrays(again.path)
        assert one.train.rows.tolist() != two.train.rows.tolist()
        assert (np.diff(one.train.rows) > 0).all()  # source order within a split

    @settings(derandomize=True, max_examples=20, deadline=None)
    @given(times=st.lists(st.integers(0, 30), min_size=20, max_size=60))
    def test_time_order_never_leaks(self, times: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
        table = pl.DataFrame(
            {"y": [0, 1] * len(times), "c": ["a"] * 2 * len(times), "t": np.repeat(times, 2)}
        )
        schema = PLAIN.model_copy(update={"time": "t"})
        try:
            data = prepared(table, tmp_path_factory.mktemp("time") / "out", schema, Split(kind="time"))
        except InputError as error:
            assert "no row is left for valid" in str(error)
            return
        found = [shard.times for shard in shards(data)]
        assert all(moments is not None for moments in found)
        train, valid, test = (np.asarray(moments) for moments in found)
        assert train.max() < valid.min()
        assert len(test) == 0 or valid.max() < test.min()
        assert len(train) >= int(0.8 * table.height)

    def test_time_bounds(self, tmp_path: Path) -> None:
        table = simple(20, t=[f"2026-01-{31 - i // 2:02d}" for i in range(20)])
        schema = PLAIN.model_copy(update={"time": "t"})
        data = prepared(table, tmp_path / "out", schema, Split(kind="time"))
        assert [len(shard) for shard in shards(data)] == [16, 2, 2]
        assert data.test.rows.tolist() == [0, 1]

    def test_time_needs_a_column(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="needs a time column\n  fix: set time ="):
            prepared(simple(40), tmp_path / "out", split=Split(kind="time"))

    def test_column(self, tmp_path: Path) -> None:
        table, split = by_column("rrvrrt", c=list("abcdef"))
        data = prepared(table, tmp_path / "out", split=split)
        assert [shard.rows.tolist() for shard in shards(data)] == [[0, 1, 3, 4], [2, 6, 7], [5, 8, 9]]

    def test_a_word_that_is_no_split(self, tmp_path: Path) -> None:
        table = simple(40, s=["train"] * 39 + ["dev"])
        with pytest.raises(InputError, match="row 40, column 's': 'dev' is none of train, valid, test"):
            prepared(table, tmp_path / "out", split=Split(kind="column", column="s"))

    def test_files(self, tmp_path: Path) -> None:
        sources: dict[str, Source] = {
            name: FrameSource(simple(n)) for name, n in zip(SPLITS, (20, 8, 6), strict=True)
        }
        data, _ = prepare(Preparation(PLAIN, sources, Split(kind="files")), tmp_path / "out", quiet=True)
        assert [shard.rows.tolist() for shard in shards(data)] == [
            list(range(20)), list(range(20, 28)), list(range(28, 34))
        ]  # fmt: skip

    def test_folds_by_hand(self) -> None:
        """Seed 2018 shuffles seven places to 3 5 0 4 1 6 2 and four to 1 0 3 2, anew for each class."""
        labels = np.array([0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0], np.uint8)
        # Class 0 is rows 0 2 3 5 7 8 10, so 5 8 0 | 7 2 | 10 3; class 1 is rows 1 4 6 9, so 4 1 | 9 | 6.
        assert folds(labels, 3, 2018).tolist() == [0, 0, 1, 2, 0, 0, 2, 1, 0, 1, 2]

    @pytest.mark.parametrize("rows", [23, 100, 1_237])
    @pytest.mark.parametrize("seed", [0, 2018])
    def test_folds_are_those_of_the_rule(self, rows: int, seed: int) -> None:
        labels = (np.random.default_rng(rows).random(rows) < 0.3).astype(np.uint8)
        found = folds(labels, 10, seed)
        assert found.tolist() == layouts.deal(labels.tolist(), 10, seed)
        # Of one class, scikit-learn still deals in this way.
        for label in (0, 1):
            members = np.flatnonzero(labels == label)
            if len(members) >= 10:
                dealt = KFold(10, shuffle=True, random_state=seed).split(members)
                for fold, (_, places) in enumerate(dealt):
                    assert (
                        np.flatnonzero((found == fold) & (labels == label)).tolist()
                        == members[places].tolist()
                    )

    @pytest.mark.parametrize("spool_rows", [13, 1 << 17])
    def test_folds(self, spool_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepare_module, "SPOOL_ROWS", spool_rows)
        labels = [int(i % 3 == 0) for i in range(205)]
        table = pl.DataFrame({"y": labels, "c": [f"v{i % 7}" for i in range(205)]})
        data = prepared(table, tmp_path / "out", split=Split(kind="folds", seed=2018))
        assert [shard.rows.tolist() for shard in shards(data)] == layouts.splits(labels)
        # 69 = 9 · 7 + 6 and 136 = 6 · 14 + 4 · 13 rows of the classes
        assert [int(shard.labels.sum()) for shard in shards(data)] == [69 - 14, 7, 7]
        assert [len(shard) for shard in shards(data)] == [205 - 42, 21, 21]
        # 14 14 14 14 13 and 28 27 27 27 27 rows of five folds; the first two are test
        two = prepared(table, tmp_path / "two", split=Split(kind="folds", ratio=(2, 1, 2)))
        assert [len(shard) for shard in shards(two)] == [81, 41, 83]

    def test_published_class_counts_follow_from_the_folds(self) -> None:
        """Positives and negatives of all rows; then of train, valid and test."""
        for name, counts in (
            ("criteo-x4", (11_745_438, 34_095_179)),
            ("avazu-x4", (6_865_066, 33_563_901)),
            ("kkbox-x1", (3_714_656, 3_662_762)),
        ):
            figures = protocol(name).figures
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
            {"ratio": (0, 1, 1)},
            {"seed": -1},
            {"ratio": (1, 1, -1)},
            {"kind": "folds", "ratio": (255, 1, 1)},
        ],
    )
    def test_rules_that_make_no_sense(self, values: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            Split.model_validate(values)

    def test_ratio(self) -> None:
        assert parse_ratio("8:1:1") == (8, 1, 1)
        for text in ("8:1", "8:1:1:1", "a:b:c", "0:1:1", "1:0:1", "-1:1:1", "8.5:1:1", ""):
            with pytest.raises(InputError, match="--ratio"):
                parse_ratio(text)


@pytest.mark.parametrize(
    ("split", "known"),
    [
        (Split(), "aa9e729c1f1eda23143a8beee3dd7d86"),
        (Split(seed=2024), "7facbe431db369785a290a33ed52824e"),  # as of ml-1m
        (Split(kind="files"), "cfd73487d14de6ef7ab817994ae8f98f"),
    ],
)
def test_what_was_prepared_before_is_still_known(split: Split, known: str, tmp_path: Path) -> None:
    """A new setting must not change the fingerprint of preparations that do without it."""
    schema = Schema(
        label="y",
        fields=(
            Field(name="c", kind="categorical", min_count=2),
            Field(name="m", kind="multi", separator="|", max_len=2),
            Field(name="n", kind="numeric", transform="log-square", missing=("0",)),
        ),
    )
    rows = "".join(f"{i % 2},v{i % 7},{i % 3}|{i % 5},{i}\n" for i in range(60))
    (tmp_path / "rows.csv").write_text(f"y,c,m,n\n{rows}")
    names = ("all",) if split.kind == "random" else ("train", "valid")
    sources: dict[str, Source] = {name: FileSource([tmp_path / "rows.csv"]) for name in names}
    assert Preparation(schema, sources, split, dataset="ml-1m").fingerprint == known


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


NUMERIC = Schema(label="y", fields=(Field(name="c", kind="numeric"),))


@pytest.mark.parametrize(
    ("table", "schema", "said"),
    [
        (simple(40).drop("c"), PLAIN, "no column 'c' (categorical field)\n  columns present: 'y'\n  fix:"),
        (simple(40).drop("y"), PLAIN, "no column 'y' (label)"),
        (simple(40).with_columns(y=pl.Series([0] * 39 + [2])), PLAIN, "row 40: the label 'y' is '2', neither 0 nor 1"),
        (simple(40).with_columns(y=pl.Series([0.0] * 39 + [0.5])), PLAIN, "row 40: the label 'y' is '0.5', neither"),
        (simple(40).with_columns(y=pl.Series([0, None] * 20)), PLAIN, "row 2: the label 'y' is missing\n  fix:"),
        (simple(40).with_columns(y=0), PLAIN, "all 32 train rows have label 0: one class only"),
        (simple(40).with_columns(y=0), PLAIN, "every split; check the label column"),
        (simple(40).with_columns(y=pl.Series([0] * 39 + [1])), PLAIN,
         "rows have label 0: one class only\n  fix: a model needs clicked and unclicked rows in every split; give more"
         " rows, or another --ratio or --seed to recap prepare"),
        (simple(5), PLAIN, "no row is left for valid"),
        (simple(40).clear(), PLAIN, "the source holds no rows"),
        (simple(40, c=["1"] * 20 + ["inf"] * 20), NUMERIC, "row 21, field 'c': infinity is not a value"),
        (simple(40, c=[1.0] * 20 + [math.inf] * 20), NUMERIC, "row 21, field 'c': infinity is not a value"),
        (simple(40, c=["1"] * 20 + ["x"] * 20), NUMERIC, "row 21, field 'c': 'x' is not a number"),
        (simple(40, c=[[1]] * 40), PLAIN, "column 'c' is of type List(Int64), which holds no categories"),
    ],
)  # fmt: skip
def test_bad_rows(table: pl.DataFrame, schema: Schema, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(table, tmp_path / "out", schema)
    assert said in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, -1.0], "row 2: the weight 'w' is -1.0; it must be 0 or more"),
        ([1.0, None], "row 2: the weight 'w' is missing"),
        ([1.0, 1e39], "row 2: the weight 'w' is 1e+39"),
        (["1", "x"], "row 2, field 'w': 'x' is not a number"),
    ],
)
def test_bad_weights(values: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(simple(40, w=values * 20), tmp_path / "out", PLAIN.model_copy(update={"weight": "w"}))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["5", None], "row 2: the time 't' is None\n  fix: use a number, or a date such as"),
        (["5", "soon"], "row 2: the time 't' is 'soon'"),
        (["2026-01-31", "2026-02-30"], "row 2: the time 't' is '2026-02-30'"),
        ([1.0, math.inf], "row 2: the time 't' is inf"),
        ([[1], [2]], "the time 't' is of type List(Int64)"),
    ],
)
def test_bad_times(values: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(simple(40, t=values * 20), tmp_path / "out", PLAIN.model_copy(update={"time": "t"}))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "labels",
    [
        *(["0", "1"], [0.0, 1.0], ["0.0", "1.0"], ["0.00", "1.00"], [Decimal("0.00"), Decimal("1.00")]),
        *([False, True], ["False", "True"]),
    ],
)
def test_labels_in_many_dresses(labels: list[Any], tmp_path: Path) -> None:
    data = prepared(simple(40).with_columns(y=pl.Series(labels * 20)), tmp_path / "out")
    np.testing.assert_array_equal(data.train.labels, data.train.rows % 2)


# ---------------------------------------------------------------------------------------------------------------------
# Never twice, never stale, never half


class TestStanding:
    def preparation(self, path: Path, **changes: Any) -> Preparation:
        return replace(Preparation(PLAIN, {"all": FileSource([path])}), **changes)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        simple(40).write_csv(tmp_path / "t.csv")
        prepare(self.preparation(tmp_path / "t.csv"), tmp_path / "out", quiet=True)
        return tmp_path / "t.csv"

    def test_the_same_inputs_are_not_prepared_again(self, source: Path) -> None:
        out = source.with_name("out")
        stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        _, done = prepare(self.preparation(source), out, quiet=True)
        os.utime(source, (1, 1))
        moved = source.rename(source.with_name("moved.csv"))
        data, again = prepare(self.preparation(moved), out, quiet=True)
        assert done and again
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps
        assert len(data.train) == 32

    @pytest.mark.parametrize("change", ["content", "schema", "split", "rows in memory"])
    def test_a_change_is_detected(self, change: str, source: Path) -> None:
        out = source.with_name("out")
        before = contents(out)
        preparation, what = self.preparation(source), "sources"
        if change == "content":
            size = source.stat().st_size
            source.write_text(source.read_text().replace("v1", "v9"))
            assert source.stat().st_size == size
        elif change == "schema":
            field = Field(name="c", kind="categorical", min_count=2)
            preparation, what = self.preparation(source, schema=Schema(label="y", fields=(field,))), "schema"
        elif change == "split":
            preparation, what = self.preparation(source, split=Split(seed=2)), "split"
        else:
            prepare(Preparation(PLAIN, {"all": FrameSource(simple(40))}), out, force=True, quiet=True)
            before = contents(out)
            preparation = Preparation(PLAIN, {"all": FrameSource(simple(40).with_columns(c=pl.lit("z")))})
        with pytest.raises(
            InputError, match=rf"\(changed: {what}\)\n  fix: choose another --out, or replace it"
        ):
            prepare(preparation, out, quiet=True)
        assert contents(out) == before
        _, done = prepare(preparation, out, force=True, quiet=True)
        assert not done
        assert contents(out) != before
        assert {path.name for path in out.parent.iterdir()} == {"out", "t.csv"}

    @pytest.mark.parametrize("force", [False, True])
    def test_other_directories_are_left_alone(self, force: bool, source: Path) -> None:
        directory, file = source.with_name("directory"), source.with_name("file")
        directory.mkdir()
        for path in (directory / "notes.txt", file):
            path.write_text("mine")
        before = contents(source.parent)
        for path in (directory, file):
            with pytest.raises(InputError, match="exists and is not prepared data"):
                prepare(self.preparation(source), path, force=force, quiet=True)
        assert contents(source.parent) == before

    def test_damage_is_found_when_opened(self, source: Path) -> None:
        out = source.with_name("out")
        for name in json.loads((out / "manifest.json").read_text())["files"]:
            good = (out / name).read_bytes()
            for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
                (out / name).write_bytes(bad)
                with pytest.raises(InputError, match=rf"{Path(name).name} (is missing|has changed)"):
                    PreparedData(out)
            (out / name).unlink()
            with pytest.raises(InputError, match="is missing"):
                PreparedData(out)
            (out / name).write_bytes(good)
        PreparedData(out)

    @pytest.mark.parametrize(
        ("manifest", "said"),
        [
            ("{", "is not valid JSON"),
            ("[]", "holds no prepared data"),
            ('{"kind": "artifact"}', "holds no prepared data"),
            ('{"kind": "prepared data", "format": 2}', "is of format 2; this version reads 1"),
        ],
    )
    def test_other_manifests(self, manifest: str, said: str, source: Path) -> None:
        (source.with_name("out") / "manifest.json").write_text(manifest)
        with pytest.raises(InputError, match=said):
            PreparedData(source.with_name("out"))

    @pytest.mark.parametrize("old", [False, True], ids=["first", "over an old one"])
    @pytest.mark.parametrize(
        ("where", "writes"),
        [
            ("_Spool.append", 0),
            ("_Spool.append", 2),
            ("_ShardFile.write_bytes", 1),
            ("_ShardFile.write_bytes", 12),
        ],
    )
    def test_a_full_disk_leaves_no_trace(
        self, where: str, writes: int, old: bool, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = source.with_name("out" if old else "new")
        before = contents(source.parent)
        owner, name = getattr(prepare_module, where.split(".")[0]), where.split(".")[1]
        genuine, left = getattr(owner, name), writes

        def full(self: object, data: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            genuine(self, data)

        monkeypatch.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space left"):
            prepare(self.preparation(source, split=Split(seed=2)), out, force=True, quiet=True)
        assert contents(source.parent) == before

    def test_a_second_writer_is_refused(self, source: Path) -> None:
        out = source.with_name("new")
        with (
            atomic_directory(out),
            pytest.raises(InputError, match="another process is writing"),
        ):
            prepare(self.preparation(source), out, quiet=True)


CHILD = """
import sys
from pathlib import Path
from recap_ctr.data import prepare as module
from recap_ctr.data.source import FileSource
from recap_ctr.schema import read_schema

module.SPOOL_ROWS = 50  # many small writes: many moments to die at
directory, out, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
source = FileSource([directory / "t.csv"])
preparation = module.Preparation(read_schema(directory / "schema.toml"), {"all": source}, module.Split(seed=seed))
print("ready", flush=True)
module.prepare(preparation, out, force=True, quiet=True)
"""


def test_killed_at_any_moment_it_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "SPOOL_ROWS", 50)
    every_kind(3_000).write_csv(tmp_path / "t.csv")
    (tmp_path / "schema.toml").write_text(EVERY_KIND.to_toml())
    whole, seconds = {}, 0.0
    for seed in (1, 2):
        start = time.perf_counter()
        source = FileSource([tmp_path / "t.csv"])
        prepare(
            Preparation(EVERY_KIND, {"all": source}, Split(seed=seed)), tmp_path / f"whole{seed}", quiet=True
        )
        seconds = time.perf_counter() - start
        whole[seed] = contents(tmp_path / f"whole{seed}")
    out = tmp_path / "out"
    rng = np.random.default_rng()  # any moment must do, so each time others are tried
    for attempt in range(6):
        if attempt == 3:  # from here on there is an old preparation to lose
            prepare(Preparation(EVERY_KIND, {"all": source}, Split(seed=1)), out, force=True, quiet=True)
        seed = 1 if attempt < 3 else 2
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path, out, str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child, child.stdout as stdout:
            assert stdout.readline() == "ready\n"
            time.sleep(float(rng.random()) * 1.2 * seconds)
            child.send_signal(signal.SIGKILL)
        if out.exists():
            assert contents(out) in (whole[1], whole[seed])
            PreparedData(out)
        else:
            assert attempt < 3
            with pytest.raises(InputError, match="holds no prepared data"):
                PreparedData(out)
    prepare(Preparation(EVERY_KIND, {"all": source}, Split(seed=2)), out, force=True, quiet=True)
    assert contents(out) == whole[2]
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "schema.toml", "whole1", "whole2", "out"}


class TestWhatCannotBeCompared:
    def test_a_pipe_is_never_taken_for_what_was_prepared_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = b"y,c\n" + b"".join(b"%d,%d\n" % (i % 2, i % 5) for i in range(60))
        schema = Schema(label="y", fields=(Field(name="c", kind="categorical"),))
        for attempt in range(2):
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
            preparation = Preparation(schema, {"all": FileSource(["-"])})
            if attempt == 0:
                prepare(preparation, tmp_path / "out", quiet=True)
            else:
                with pytest.raises(InputError, match="through a pipe"):
                    prepare(preparation, tmp_path / "out", quiet=True)

    def test_times_in_two_ways_are_refused(self, tmp_path: Path) -> None:
        lines = "".join(f"{i % 2},{i % 3},2026-03-01 00:00:{i % 60:02d}\n" for i in range(60))
        (tmp_path / "a.csv").write_text("y,c,t\n" + lines)
        (tmp_path / "b.csv").write_text(
            "y,c,t\n" + "".join(f"{i % 2},{i % 3},{1.8e9 + i}\n" for i in range(60))
        )
        schema = Schema(label="y", time="t", fields=(Field(name="c", kind="categorical"),))
        source = FileSource([tmp_path / "a.csv", tmp_path / "b.csv"])
        with pytest.raises(InputError, match="holds numbers, before that dates"):
            prepare(Preparation(schema, {"all": source}, Split(kind="time")), tmp_path / "out", quiet=True)

    def test_a_file_that_changes_while_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.csv").write_text("y,c\n" + "".join(f"{i % 2},{i % 3}\n" for i in range(60)))
        source = FileSource([tmp_path / "a.csv"])
        stamps = iter([[(1, 1)], [(2, 2)]])
        monkeypatch.setattr(source, "stamps", lambda: next(stamps))
        schema = Schema(label="y", fields=(Field(name="c", kind="categorical"),))
        with pytest.raises(InputError, match="changed while it was read"):
            prepare(Preparation(schema, {"all": source}), tmp_path / "out", quiet=True)
        assert not (tmp_path / "out").exists()

    def test_a_file_that_changes_while_it_is_hashed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        simple(60).write_csv(path := tmp_path / "a.csv")

        def grow(file: Path) -> str:
            found = sha256(file)
            with file.open("a") as more:
                more.write("1,late\n")
            return found

        monkeypatch.setattr(source_module, "sha256", grow)
        with pytest.raises(InputError, match="changed while it was read"):
            prepare(Preparation(PLAIN, {"all": FileSource([path])}), tmp_path / "out", quiet=True)
        assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
