import errno
import gzip
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data import csv as csv_module
from recap_ctr.data import source as source_module
from recap_ctr.data import spool as spool_module
from recap_ctr.data.encode import PAD
from recap_ctr.data.infer import infer
from recap_ctr.data.moments import write_moments
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData, read_manifest
from recap_ctr.data.source import Block, FileSource, FrameSource, Source
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema, TimeUnit
from recap_ctr.storage.arrays import NpyFile
from recap_ctr.storage.files import atomic_directory
from recap_ctr.storage.hashes import sha256
from tests.support.preparing import EVERY_KIND, PLAIN, arrays, contents, every_kind, prepared, shards, simple

# One table, many shapes


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


@pytest.mark.slow
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
    monkeypatch.setattr(csv_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(source_module, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(spool_module, "SPOOL_ROWS", spool_rows)
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
    assert train.ids.shape == (400, 8 + 3 + 2)
    assert train.values.shape == (400, 2)
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
        num_oov = [
            int((shard.ids[:, f.start : f.start + f.width] == id_).sum())
            for f, id_ in zip(reference.layout.fields, oov, strict=True)
        ]
        assert list(reference.manifest["splits"][split]["oov"].values()) == num_oov
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
        Field(name="e", kind="numeric", transform="linear", num_buckets=5, missing=("0", "1", "2")),
        Field(name="e2", kind="numeric", transform="linear"),
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
    for name in ("v", "v2", "l", "q", "q2", "e", "e2", "float"):
        columns[name] = pl.Series(some(NUMBERS), dtype=pl.Float64)
    return pl.DataFrame(columns)


@pytest.mark.parametrize("unit", get_args(TimeUnit))
@pytest.mark.parametrize("text", [False, True], ids=["typed", "text"])
def test_one_row_has_the_hour_and_weekday_that_preparing_saw(
    unit: TimeUnit, text: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    seconds = rng.integers(1_600_000_000, 1_700_000_000, 200)
    written = write_moments(seconds, unit)
    typed = pl.from_epoch(pl.Series(seconds), "s") if unit == "iso" else written.cast(pl.Int64)
    moments = (written if text else typed).set(pl.Series(np.arange(200) % 50 == 0), None)
    fields = [
        Field.model_validate(
            {"name": derive, "kind": "categorical", "derive": derive, "source": "t", "unit": unit}
        )
        for derive in ("hour", "weekday")
    ]
    schema = Schema(label="y", fields=tuple(fields))
    table = pl.DataFrame({"y": [i % 2 for i in range(200)], "t": moments})
    data = prepared(table, tmp_path / "out", schema)
    num_hours = 1 if unit == "yyyymmdd" else 24
    assert [len(fitted.values) for fitted in data.encoder.fields] == [num_hours, 7]
    shard = data.valid
    assert len(shard) == 20
    for position, row in enumerate(shard.rows):
        one_row = Block(table.slice(int(row), 1).drop("y"), 1, "one row")
        spelled = Block(pl.DataFrame({"t": written.set(moments.is_null(), None).slice(int(row), 1)}), 1, "")
        for block in (one_row, spelled):
            np.testing.assert_array_equal(
                data.encoder.encode(block).ids_BW, shard.ids[position : position + 1]
            )


@pytest.mark.slow
@settings(derandomize=True, max_examples=20, deadline=None)
@given(table=tables())
def test_scoring_encodes_what_training_saw(
    table: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Labels alternate, so that each split, made of neighbours, has both.
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


@pytest.mark.parametrize("kind", [int, str, float, Decimal, lambda value: Decimal(value) * Decimal("1.00")])
def test_ids_encode_the_same_in_every_type(kind: Callable[[int], Any], tmp_path: Path) -> None:
    data = prepared(simple(40, c=[i % 5 for i in range(40)]), tmp_path / "out")
    rows = pl.DataFrame({"c": [kind(3), kind(7), None]}, strict=False)
    seven_is_new = data.encoder.encode(Block(rows, 1, "")).ids_BW[:, 0].tolist()
    assert seven_is_new == [data.encoder.fields[0].values.to_list().index("3") + 1, 6, 6]


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    plain = ("y", "c", "tags", "n", "cut", "w", "t", "g", "h", "of")
    odd = ("^y$", "*", "^t.*$", "^n$", "^(n|c)$", "^w$", "^.*$", "^g$", "^h.?$", "^of$")

    def build(names: Sequence[str], out: str) -> PreparedData:
        y, c, tags, n, cut, w, t, g, h, of = names
        columns: dict[str, list[Any]] = {
            y: [0.0, 1.0] * 20,
            c: ["True", "2.0"] * 20,
            tags: ["a b", "", "c", "a"] * 10,
            n: ["1", "x"] * 20,
            cut: [3, 4, None, 5] * 10,
            w: [1.0, 2.0] * 20,
            t: ["2026-01-01", "2026-01-02"] * 20,
            g: [1.0, 2.0] * 20,
            h: [7, 8, 9, None] * 10,
            of: ["train", "train", "valid", "valid"] * 10,
        }
        schema = Schema(
            label=y,
            weight=w,
            time=t,
            group=g,
            fields=(
                Field(name=c, kind="categorical"),
                Field(name=tags, kind="multi"),
                Field(name=h, kind="categorical", hash_buckets=4),
                Field(name=n, kind="numeric", missing=("x",)),
                Field(name=cut, kind="numeric", transform="log-square"),
            ),
        )
        rows = tmp_path / f"{out}.parquet"
        pl.DataFrame(columns).write_parquet(rows)
        inferred = infer(FileSource([rows]), y)
        assert {finding.column for finding in inferred.findings} == set(names)
        return prepared(FileSource([rows]), tmp_path / out, schema, Split(kind="column", column=of))

    plain_arrays, odd_arrays = arrays(build(plain, "plain").path), arrays(build(odd, "odd").path)
    for named in ("schema.toml", "profile.json"):
        del plain_arrays[named], odd_arrays[named]
    assert plain_arrays == odd_arrays


def test_long_ids_stay_distinct(tmp_path: Path) -> None:
    ids = [2**60 + i % 4 for i in range(40)]
    data = prepared(simple(40, c=ids), tmp_path / "out")
    assert sorted(data.encoder.fields[0].values) == [str(2**60 + i) for i in range(4)]


@pytest.mark.parametrize(
    ("split", "fingerprint"),
    [
        (Split(), "aa9e729c1f1eda23143a8beee3dd7d86"),
        (Split(seed=2024), "7facbe431db369785a290a33ed52824e"),  # that of ml-1m
        (Split(kind="files"), "cfd73487d14de6ef7ab817994ae8f98f"),
    ],
)
def test_the_fingerprint_never_changes(split: Split, fingerprint: str, tmp_path: Path) -> None:
    """A new option must not change the fingerprint of preparations that do without it."""
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
    assert Preparation(schema, sources, split, dataset="ml-1m").fingerprint == fingerprint


# Bad input


NUMERIC = Schema(label="y", fields=(Field(name="c", kind="numeric"),))


@pytest.mark.parametrize(
    ("table", "schema", "message"),
    [
        (simple(40).drop("c"), PLAIN, "no column 'c' (categorical field)\n  columns present: 'y'\n  fix:"),
        (simple(40).drop("y"), PLAIN, "no column 'y' (label)"),
        (
            simple(40).with_columns(y=pl.Series([0] * 39 + [2])),
            PLAIN,
            "row 40: the label 'y' is '2', neither 0 nor 1",
        ),
        (
            simple(40).with_columns(y=pl.Series([0.0] * 39 + [0.5])),
            PLAIN,
            "row 40: the label 'y' is '0.5', neither",
        ),
        (
            simple(40).with_columns(y=pl.Series([0, None] * 20)),
            PLAIN,
            "row 2: the label 'y' is missing\n  fix:",
        ),
        (simple(40).with_columns(y=0), PLAIN, "all 32 train rows have label 0: one class only"),
        (simple(40).with_columns(y=0), PLAIN, "every split; check the label column"),
        (
            simple(40).with_columns(y=pl.Series([0] * 39 + [1])),
            PLAIN,
            "rows have label 0: one class only\n  fix: a model needs clicked and unclicked rows in every split;"
            " give more rows, or another --ratio or --seed to recap prepare",
        ),
        (simple(5), PLAIN, "no row is left for valid"),
        (simple(40).clear(), PLAIN, "the source holds no rows"),
        (simple(40, c=["1"] * 20 + ["inf"] * 20), NUMERIC, "row 21, field 'c': infinity is not a value"),
        (simple(40, c=[1.0] * 20 + [math.inf] * 20), NUMERIC, "row 21, field 'c': infinity is not a value"),
        (simple(40, c=["1"] * 20 + ["x"] * 20), NUMERIC, "row 21, field 'c': 'x' is not a number"),
        (simple(40, c=[[1]] * 40), PLAIN, "column 'c' is of type List(Int64), which holds no categories"),
    ],
)
def test_bad_rows(table: pl.DataFrame, schema: Schema, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(table, tmp_path / "out", schema)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


# Never twice, never stale, never half


class TestExistingData:
    def preparation(self, path: Path, **changes: Any) -> Preparation:
        return replace(Preparation(PLAIN, {"all": FileSource([path])}), **changes)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        simple(40).write_csv(tmp_path / "t.csv")
        write_prepared_data(self.preparation(tmp_path / "t.csv"), tmp_path / "out", quiet=True)
        return tmp_path / "t.csv"

    def test_the_same_inputs_are_not_prepared_again(self, source: Path) -> None:
        out = source.with_name("out")
        stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        _, done = write_prepared_data(self.preparation(source), out, quiet=True)
        os.utime(source, (1, 1))
        moved = source.rename(source.with_name("moved.csv"))
        data, again = write_prepared_data(self.preparation(moved), out, quiet=True)
        assert done and again
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps
        assert len(data.train) == 32

    @pytest.mark.parametrize("change", ["content", "schema", "split", "rows in memory"])
    def test_a_change_is_detected(self, change: str, source: Path) -> None:
        out = source.with_name("out")
        before = contents(out)
        preparation, changed = self.preparation(source), "sources"
        if change == "content":
            size = source.stat().st_size
            source.write_text(source.read_text().replace("v1", "v9"))
            assert source.stat().st_size == size
        elif change == "schema":
            field = Field(name="c", kind="categorical", min_count=2)
            preparation, changed = (
                self.preparation(source, schema=Schema(label="y", fields=(field,))),
                "schema",
            )
        elif change == "split":
            preparation, changed = self.preparation(source, split=Split(seed=2)), "split"
        else:
            write_prepared_data(
                Preparation(PLAIN, {"all": FrameSource(simple(40))}), out, force=True, quiet=True
            )
            before = contents(out)
            preparation = Preparation(PLAIN, {"all": FrameSource(simple(40).with_columns(c=pl.lit("z")))})
        with pytest.raises(
            InputError, match=rf"\(changed: {changed}\)\n  fix: choose another --out, or replace it"
        ):
            write_prepared_data(preparation, out, quiet=True)
        assert contents(out) == before
        _, done = write_prepared_data(preparation, out, force=True, quiet=True)
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
                write_prepared_data(self.preparation(source), path, force=force, quiet=True)
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

    @pytest.mark.slow
    def test_a_flipped_bit_of_the_manifest_is_found(self, source: Path) -> None:
        """The manifest holds means and scales, which decide what a row is to a model."""
        manifest = source.with_name("out") / "manifest.json"
        whole = manifest.read_bytes()
        rng = np.random.default_rng(0)
        for at, bit in zip(rng.integers(0, len(whole), 400), rng.integers(0, 8, 400), strict=True):
            manifest.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(bit)]) + whole[at + 1 :])
            with pytest.raises(InputError):
                read_manifest(manifest.parent)

    def test_data_of_earlier_versions_are_read(self, source: Path) -> None:
        """Their manifests have no checksum, but say what each file must be."""
        out = source.with_name("out")
        manifest = json.loads((out / "manifest.json").read_text())
        del manifest["checksum"]
        (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        data = PreparedData(out)
        assert data.manifest == manifest
        data.mark(checked=True)
        assert PreparedData(out).manifest == manifest | {"checked": True}
        assert "checksum" in json.loads((out / "manifest.json").read_text())
        changes: list[dict[str, Any]] = [
            {"fingerprint": "0" * 32},
            {"files": {}},
            {"files": [1]},
            {"splits": None},
        ]
        for change in changes:
            changed = {key: value for key, value in (manifest | change).items() if value is not None}
            (out / "manifest.json").write_text(json.dumps(changed))
            with pytest.raises(InputError, match="is damaged"):
                read_manifest(out)

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ("{", "is not valid JSON"),
            ("[]", "holds no prepared data"),
            ('{"kind": "artifact"}', "holds no prepared data"),
            ('{"kind": "prepared data", "format": 2}', "is of format 2; this version reads 1"),
        ],
    )
    def test_other_manifests_are_refused(self, manifest: str, message: str, source: Path) -> None:
        (source.with_name("out") / "manifest.json").write_text(manifest)
        with pytest.raises(InputError, match=message):
            PreparedData(source.with_name("out"))

    @pytest.mark.parametrize("old", [False, True], ids=["first", "over an old one"])
    @pytest.mark.parametrize(
        ("owner", "name", "writes"),
        [
            (spool_module.Spool, "append", 0),
            (spool_module.Spool, "append", 2),
            (NpyFile, "write_bytes", 1),
            (NpyFile, "write_bytes", 12),
        ],
    )
    def test_a_full_disk_leaves_no_trace(
        self,
        owner: type,
        name: str,
        writes: int,
        old: bool,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        out = source.with_name("out" if old else "new")
        before = contents(source.parent)
        write, left = getattr(owner, name), writes

        def full(self: object, data: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(self, data)

        monkeypatch.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space left"):
            write_prepared_data(self.preparation(source, split=Split(seed=2)), out, force=True, quiet=True)
        assert contents(source.parent) == before

    def test_a_second_writer_is_refused(self, source: Path) -> None:
        out = source.with_name("new")
        with (
            atomic_directory(out),
            pytest.raises(InputError, match="another process is writing"),
        ):
            write_prepared_data(self.preparation(source), out, quiet=True)


CHILD = """
import os
import signal
import sys
from pathlib import Path
from recap_ctr.data import spool
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.storage.arrays import NpyFile
from recap_ctr.data.source import FileSource
from recap_ctr.data.split import Split
from recap_ctr.schema import read_schema

directory, out, seed, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
spool.SPOOL_ROWS = 50  # many small writes: many moments to die at
moments = 0

def count():
    global moments
    moments += 1
    if moments == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(write):
    def write_and_count(self, data):
        count()
        write(self, data)
    return write_and_count

spool.Spool.append = counted(spool.Spool.append)
NpyFile.write_bytes = counted(NpyFile.write_bytes)
source = FileSource([directory / "t.csv"])
preparation = Preparation(read_schema(directory / "schema.toml"), {"all": source}, Split(seed=seed))
sys.addaudithook(lambda event, _: event.startswith(("open", "os.", "shutil.", "ctypes.")) and count())
write_prepared_data(preparation, out, force=True, quiet=True)
print(moments)
"""


def prepare_in_child(
    directory: Path, out: Path, seed: int, kill_at: int = 0
) -> subprocess.CompletedProcess[str]:
    """Prepare `directory` in another process, which kills itself at one of its writes or calls to the file system."""
    arguments = [str(value) for value in (directory, out, seed, kill_at)]
    return subprocess.run([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_at_any_moment_it_is_whole_or_absent(tmp_path: Path) -> None:
    every_kind(3_000).write_csv(tmp_path / "t.csv")
    (tmp_path / "schema.toml").write_text(EVERY_KIND.to_toml())
    whole, moments = {}, {}
    for seed in (1, 2):  # the second one replaces the first
        done = prepare_in_child(tmp_path, tmp_path / "whole", seed)
        moments[seed], whole[seed] = int(done.stdout), contents(tmp_path / "whole")
    out = tmp_path / "out"
    rng = np.random.default_rng()  # any moment must do, so each time others are tried
    for seed in (1, 2):
        if seed == 2:  # now there is an old preparation to lose
            assert prepare_in_child(tmp_path, out, 1).returncode == 0
        for third in range(3):
            kill_at = 1 + int((third + rng.random()) / 3 * moments[seed])
            killed = prepare_in_child(tmp_path, out, seed, kill_at)
            assert killed.returncode == -signal.SIGKILL
            if out.exists():
                assert contents(out) in (whole[1], whole[seed])
                PreparedData(out)
            else:
                assert seed == 1
                with pytest.raises(InputError, match="holds no prepared data"):
                    PreparedData(out)
    assert prepare_in_child(tmp_path, out, 2).returncode == 0
    assert contents(out) == whole[2]
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "schema.toml", "whole", "out"}


class TestChangingSources:
    def test_a_pipe_can_not_be_compared_with_existing_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = b"y,c\n" + b"".join(b"%d,%d\n" % (i % 2, i % 5) for i in range(60))
        schema = Schema(label="y", fields=(Field(name="c", kind="categorical"),))
        for attempt in range(2):
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
            preparation = Preparation(schema, {"all": FileSource(["-"])})
            if attempt == 0:
                write_prepared_data(preparation, tmp_path / "out", quiet=True)
            else:
                with pytest.raises(InputError, match="come through a pipe"):
                    write_prepared_data(preparation, tmp_path / "out", quiet=True)

    def test_dates_and_numbers_in_one_time_column_are_refused(self, tmp_path: Path) -> None:
        lines = "".join(f"{i % 2},{i % 3},2026-03-01 00:00:{i % 60:02d}\n" for i in range(60))
        (tmp_path / "a.csv").write_text("y,c,t\n" + lines)
        (tmp_path / "b.csv").write_text(
            "y,c,t\n" + "".join(f"{i % 2},{i % 3},{1.8e9 + i}\n" for i in range(60))
        )
        schema = Schema(label="y", time="t", fields=(Field(name="c", kind="categorical"),))
        source = FileSource([tmp_path / "a.csv", tmp_path / "b.csv"])
        with pytest.raises(InputError, match="holds numbers, before that dates"):
            write_prepared_data(
                Preparation(schema, {"all": source}, Split(kind="time")), tmp_path / "out", quiet=True
            )

    def test_a_file_that_changes_while_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.csv").write_text("y,c\n" + "".join(f"{i % 2},{i % 3}\n" for i in range(60)))
        source = FileSource([tmp_path / "a.csv"])
        stamps = iter([[(1, 1)], [(2, 2)]])
        monkeypatch.setattr(source, "stamps", lambda: next(stamps))
        schema = Schema(label="y", fields=(Field(name="c", kind="categorical"),))
        with pytest.raises(InputError, match="changed while it was read"):
            write_prepared_data(Preparation(schema, {"all": source}), tmp_path / "out", quiet=True)
        assert not (tmp_path / "out").exists()

    def test_a_file_that_changes_while_it_is_hashed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        simple(60).write_csv(path := tmp_path / "a.csv")

        def grow(file: Path) -> str:
            digest = sha256(file)
            with file.open("a") as appended:
                appended.write("1,late\n")
            return digest

        monkeypatch.setattr(source_module, "sha256", grow)
        with pytest.raises(InputError, match="changed while it was read"):
            write_prepared_data(Preparation(PLAIN, {"all": FileSource([path])}), tmp_path / "out", quiet=True)
        assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
