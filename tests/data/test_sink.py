"""Rows arrive in the file as they were given, block by block, whole or not at all."""

import errno
import os
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FileSource
from recap_ctr.errors import InputError


def read_text(path: Path) -> pl.DataFrame:
    return pl.concat(block.frame for block, _ in FileSource([path]).blocks())


READ: dict[str, Callable[[Path], pl.DataFrame]] = {
    ".csv": read_text,
    ".tsv": read_text,
    ".tab": read_text,
    ".jsonl": read_text,
    ".ndjson": read_text,
    ".parquet": pl.read_parquet,
    ".pq": pl.read_parquet,
    ".arrow": pl.read_ipc,
    ".feather": pl.read_ipc,
}
BINARY = [".parquet", ".pq", ".arrow", ".feather"]


def write(path: Path, *blocks: pl.DataFrame) -> None:
    with open_sink(path) as sink:
        for block in blocks:
            sink.write(block)


@pytest.mark.parametrize("suffix", READ)
def test_blocks_become_one_table(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"a": ["x", None, 'q"u,o\tte', "line\nend", "é"], "b": ["1", "2", "", "4", "5"]})
    path = tmp_path / "deeper" / f"out{suffix.upper()}"

    write(path, frame.head(2), frame.slice(2, 1), frame.tail(2))

    assert READ[suffix](path).equals(frame)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", BINARY)
def test_binary_formats_keep_every_type(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "integer": [2**62, None],
            "float": [0.1, float("nan")],
            "date": [date(2026, 1, 31), None],
            "time": [datetime(2026, 1, 31, 23, 59), None],
            "span": [timedelta(hours=1), None],
            "list": [["a", "b"], []],
            "bytes": [b"\xff", None],
            "category": pl.Series(["u", "v"], dtype=pl.Categorical),
            "nothing": pl.Series([None, None]),
        }
    )
    write(tmp_path / f"out{suffix}", frame, frame)
    assert READ[suffix](tmp_path / f"out{suffix}").equals(pl.concat([frame, frame]))


@pytest.mark.parametrize(
    ("name", "values"),
    [("list", [["a"]]), ("bytes", [b"\xff"]), ("span", [timedelta(hours=1)]), ("struct", [{"a": 1}])],
)
def test_text_refuses_what_it_cannot_hold(name: str, values: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"column '{name}' is of type .*\n  fix: .*parquet"):
        write(tmp_path / "out.csv", pl.DataFrame({name: values}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", READ)
def test_later_blocks_follow_the_first_ones_columns(suffix: str, tmp_path: Path) -> None:
    """Two files with their columns in another order must not be glued together side by side."""
    path = tmp_path / f"out{suffix}"
    write(path, pl.DataFrame({"a": ["1"], "b": ["2"]}), pl.DataFrame({"b": ["4"], "a": ["3"]}))
    assert READ[suffix](path).to_dict(as_series=False) == {"a": ["1", "3"], "b": ["2", "4"]}

    with pytest.raises(InputError, match="'b', 'c' not in all"):
        write(
            tmp_path / f"bad{suffix}", pl.DataFrame({"a": [1], "b": [2]}), pl.DataFrame({"a": [3], "c": [4]})
        )
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", READ)
def test_names_that_look_like_patterns(suffix: str, tmp_path: Path) -> None:
    blocks = (
        pl.DataFrame({"^b.*$": ["1"], "*": ["2"], "b": ["3"]}),
        pl.DataFrame({"b": ["6"], "*": ["5"], "^b.*$": ["4"]}),
    )
    write(tmp_path / f"out{suffix}", *blocks)
    columns = READ[suffix](tmp_path / f"out{suffix}").to_dict(as_series=False)
    assert columns == {"^b.*$": ["1", "4"], "*": ["2", "5"], "b": ["3", "6"]}


@pytest.mark.parametrize("suffix", BINARY)
def test_one_column_has_one_type(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'a' is of type Int64 in one file and String in another"):
        write(tmp_path / f"out{suffix}", pl.DataFrame({"a": [1]}), pl.DataFrame({"a": ["1"]}))
    write(tmp_path / "out.csv", pl.DataFrame({"a": [1]}), pl.DataFrame({"a": ["1"]}))
    assert (tmp_path / "out.csv").read_text() == "a\n1\n1\n"


@pytest.mark.parametrize("suffix", READ)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_keeps_the_old_file_and_leaves_no_litter(
    suffix: str, error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"old")
    with pytest.raises(error), open_sink(path) as sink:
        sink.write(pl.DataFrame({"a": [1]}))
        raise error
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["out", "out.xlsx", "out.csv.gz", "out.json"])
def test_an_unknown_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't tell the format"):
        write(tmp_path / name, pl.DataFrame({"a": [1]}))
    assert list(tmp_path.iterdir()) == []


def test_brackets_in_a_path_are_only_a_name(tmp_path: Path) -> None:
    path = tmp_path / "scores[1]*" / "out.parquet"
    write(path, pl.DataFrame({"a": [1]}))
    assert pl.read_parquet(path, glob=False).height == 1


def test_standard_output_is_csv(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with open_sink(None) as sink:
        sink.write(pl.DataFrame({"a": ["x"], "score": [0.5]}))
        sink.write(pl.DataFrame({"a": [None], "score": [0.25]}, schema={"a": pl.String, "score": pl.Float64}))
    assert capsysbinary.readouterr().out == b"a,score\nx,0.5\n,0.25\n"


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "out.csv", pl.DataFrame({"a": [1]}))
    assert list(tmp_path.iterdir()) == []


cells = st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=8))


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=8), cut=st.integers(0, 8))
def test_text_gives_back_what_it_was_given(
    rows: list[tuple[str | None, str | None]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    frame = pl.DataFrame(rows, schema={"a": pl.String, "b": pl.String}, orient="row")
    path = tmp_path_factory.mktemp("text") / "out.csv"
    write(path, *(part for part in (frame.head(cut), frame.slice(cut)) if part.height))
    assert READ[".csv"](path).equals(frame)


class TestTwoWriters:
    """`predict --out` is whole or nothing, whoever else writes there."""

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_the_second_is_refused(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"out{suffix}"
        with open_sink(path) as sink:
            sink.write(pl.DataFrame({"a": ["1"]}))
            with pytest.raises(InputError, match="another process is writing"):
                write(path, pl.DataFrame({"a": ["2"]}))
            sink.write(pl.DataFrame({"a": ["3"]}))
        assert READ[suffix](path)["a"].to_list() == ["1", "3"]
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize("suffix", [".csv", ".parquet"])
    def test_links_and_leftovers(self, suffix: str, tmp_path: Path) -> None:
        path, victim = tmp_path / f"out{suffix}", tmp_path / "victim"
        victim.write_bytes(b"precious")
        (tmp_path / f".out{suffix}.partial").symlink_to(victim)
        (tmp_path / f".out{suffix}.0123abcd.scratch").mkdir()
        (tmp_path / f".out{suffix}.0123abcd.scratch" / "00000000.arrow").write_bytes(b"half")
        write(path, pl.DataFrame({"a": ["1"]}))
        assert victim.read_bytes() == b"precious"
        assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "victim"}

    def test_a_file_that_came_meanwhile_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "out.csv").write_bytes(b"theirs")
        with (
            pytest.raises(InputError, match="exists"),
            open_sink(tmp_path / "out.csv", {"a": 1}, force=False),
        ):
            pass
        assert (tmp_path / "out.csv").read_bytes() == b"theirs"
