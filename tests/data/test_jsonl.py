"""JSON lines: every key of every row is a column, nested objects are flattened, and an error names row and key."""

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard

from recap_ctr.data import jsonl
from recap_ctr.data.source import FileSource
from recap_ctr.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"click": 1, "ad": "a7", "user": {"id": 5, "geo": {"city": "Ulm"}}, "tags": ["x", "y"]},
    {"click": 0, "ad": None, "price": 2.5},
    {"click": 0, "ad": 9, "price": 3, "user": None, "tags": []},
]
FLAT = {
    "click": [1, 0, 0],
    "ad": ["a7", None, "9"],
    "user.id": [5, None, None],
    "user.geo.city": ["Ulm", None, None],
    "tags": [["x", "y"], None, []],
    "price": [None, 2.5, 3.0],
}


def lines(rows: list[Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def read(*paths: Path) -> pl.DataFrame:
    return pl.concat([block.frame for block, _ in FileSource(paths).blocks()])


def message(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read(path)
    return str(error.value)


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_all_rows_have_the_keys_of_any(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\n\n"))
    assert read(path).to_dict(as_series=False) == FLAT
    source = FileSource([path])
    blocks = list(source.blocks())
    if block_bytes == 1:
        assert [block.first_row for block, _ in blocks] == [1, 2, 3]
    assert (
        0 <= source.total_bytes - sum(size for _, size in blocks) < 10
    )  # The mark and blank lines are no rows.


@pytest.mark.parametrize("name", ["t.ndjson", "t.json", "t.jsonl.gz", "t.JSONL.zst"])
def test_names_and_compressions(name: str, tmp_path: Path) -> None:
    text = lines(ROWS)
    packed = {"gz": gzip.compress(text), "zst": zstandard.compress(text)}
    (tmp_path / name).write_bytes(packed.get(name.rpartition(".")[2], text))
    assert read(tmp_path / name).to_dict(as_series=False) == FLAT


def test_keys_of_another_file_are_columns_too(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(lines([{"a": 1}]))
    (tmp_path / "2.jsonl").write_bytes(lines([{"b": "x"}]))
    assert read(tmp_path / "1.jsonl", tmp_path / "2.jsonl").rows() == [(1, None), (None, "x")]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"a": 1}\n\n{"a": \n', "t.jsonl: row 2 is not JSON: "),
        (b'{"a": 1}\n[2]\n', "t.jsonl: row 2 is a list, not an object\n  fix: write one JSON object a line"),
        (b'[{"a": 1}]\n', "t.jsonl is a JSON array"),
        (b'{"a": 1}\n{"a": 2} {"a": 3}\n', "t.jsonl: row 2 is not JSON: "),
    ],
)
def test_the_row_is_named(
    data: bytes, text: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not data.startswith(b"["):
        monkeypatch.setattr(jsonl, "BLOCK_BYTES", block_bytes)
    assert text in message(tmp_path / "t.jsonl", data)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"u": {"id": 1}}, {"u": 3}], "row 2, column 'u' holds a number, but an object before it"),
        ([{"u": 1}, {"u": None}, {"u": [1]}], "row 3, column 'u' holds a list, but a number before it"),
        (
            [{"u": {"x": 1}}, {"u": {"x": True}}],
            "row 2, column 'u.x' holds true or false, but a number before",
        ),
    ],
)
def test_values_of_different_kinds_are_refused_by_name(values: list[Any], text: str, tmp_path: Path) -> None:
    told = message(tmp_path / "t.jsonl", lines(values))
    assert text in told and "fix: write the same kind of value in every row" in told


def test_a_line_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 100)
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 1_000)
    assert "line 2 does not end within" in message(tmp_path / "t.jsonl", b'{"a": 1}\n{"a": "' + b"x" * 5_000)
