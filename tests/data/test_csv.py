import io
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data import csv
from recap_ctr.data.csv import ColumnNames, TextOptions, cut_text, read_span, read_text_blocks
from recap_ctr.data.source import FileSource, Source
from recap_ctr.errors import InputError


def read(source: Source) -> pl.DataFrame:
    return pl.concat([block.frame for block, _ in source.blocks()])


def write(path: Path, data: bytes) -> FileSource:
    path.write_bytes(data)
    return FileSource([path])


def message(source: Source) -> str:
    with pytest.raises(InputError) as error:
        read(source)
    return str(error.value)


class _Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n\r\t') else cell


@pytest.mark.slow
@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.text(alphabet='ab,"\n\r\té\u2028€😀 ', max_size=5), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    ),
    line_end=st.sampled_from(["\n", "\r\n"]),
    separator=st.sampled_from([",", "\t"]),
    bom=st.booleans(),
    ending=st.sampled_from(["", "\n", "\n\n\r\n"]),
    block_bytes=st.sampled_from([1, 2, 3, 7, 20, 1 << 20]),
)
def test_text_survives_blocks_of_any_size(
    rows: list[list[str]],
    line_end: str,
    separator: str,
    bom: bool,
    ending: str,
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    table = [["one", "two", "a\nname"], *rows]
    data = line_end.join(separator.join(map(quoted, row)) for row in table) + ending
    path = tmp_path_factory.mktemp("csv") / ("t.csv" if separator == "," else "t.tsv")
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + data.encode())
    with patch.object(csv, "BLOCK_BYTES", block_bytes):
        frame = read(FileSource([path]))
    assert frame.columns == ["one", "two", "a\nname"]
    empty_as_none = frame.with_columns(pl.all().replace("", None)).rows()
    assert empty_as_none == [tuple(cell or None for cell in row) for row in rows]


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
def test_a_single_column_may_have_empty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(csv, "BLOCK_BYTES", block_bytes)
    assert read(write(tmp_path / "t.csv", b"a\n1\n\n3\n\n"))["a"].to_list() == ["1", None, "3", None]


def test_names_can_be_given_for_files_without_header(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"1\tx\n2\t\n")
    source = FileSource([tmp_path / "t.txt"], ["a", "b"])
    assert read(source).rows() == [("1", "x"), ("2", None)]
    assert source.columns == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "columns", "rows"),
    [
        (b"1\tx\ty\n", ["click", "a", "b"], [("1", "x", "y")]),
        (b"x\ty\n", ["a", "b"], [("x", "y")]),
        (b'b\tnote\t"a"\r\ny\tn\tx\r\n', ["b", "note", "a"], [("y", "n", "x")]),
        (b"\xef\xbb\xbfa\tb\nx\ty\n", ["a", "b"], [("x", "y")]),
        (b"a\tx\n", ["a", "b"], [("a", "x")]),
    ],
)
def test_the_first_line_tells_a_header_or_a_missing_label(
    text: bytes,
    columns: list[str],
    rows: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ColumnNames(["click", "a", "b"], frozenset("ab"), "click")
    (tmp_path / "t.txt").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", _Stdin(text))
    for source in (FileSource([tmp_path / "t.txt"], names), FileSource(["-"], names)):
        frame = read(source)
        assert (frame.columns, frame.rows()) == (columns, rows)
    (tmp_path / "t.txt").write_bytes(b"x\n")
    assert "row 1 has 1 fields, expected 3" in message(FileSource([tmp_path / "t.txt"], names))


class TestBadText:
    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (b"", "t.csv is empty\n  fix: the first line must name the columns"),
            (b"\n\n", "t.csv is empty"),
            (b"a,b\n", "t.csv holds no rows"),
            (b"a,b", "t.csv holds no rows"),
            (b"a,b\n\r\n\n", "t.csv holds no rows"),
            (b"a,b\n1,2\n3\n5,6\n", "t.csv: row 2 has 1 fields, expected 2"),
            (b"a,b\n1\n", "t.csv: row 1 has 1 fields, expected 2"),
            (b"a,b\n1,2\n3,4,5\n", "t.csv: row 2 has 3 fields, expected 2\n  fix: quote values that hold"),
            (b"a,b\n1,2\n\n3,4\n", "t.csv: row 2 has 0 fields, expected 2"),
            (b'a,b\n1,"x\ny"\n3,4,5\n', "t.csv: row 2 has 3 fields"),
            (b"a,b\n1,2\n3,\xff\xfe\n", "t.csv: row 2 is not valid UTF-8 (bytes b'\\xff\\xfe"),
            (b"a,\xff\n1,2\n", "t.csv: the header line can't be read"),
            (b'a,b\n1,2\n3,"x\n5,6\n', "t.csv: row 2 opens a quote that is never closed"),
            (b'a,b\n1,2\n3,"x\n5,"y"\n7,"z"\n9,0\n', "t.csv: row 2 opens a quote that is never closed"),
            (b'a,b\n"1\n1",2\n3,"x\n5,"y"\n', "t.csv: row 2 opens a quote that is never closed"),
            (b'a,b\n1,"x""y"\n3,"x""\n5,6\n7,"y"\n', "t.csv: row 2 opens a quote that is never closed"),
            (b'a,b\n"1\n1",2\n3,\xff\n', "t.csv: row 2 is not valid UTF-8"),
            (b'a,"b\n1,2\n', "t.csv: a quote in the header line is not closed"),
            (b"a,b,a\n1,2,3\n", "t.csv: column 'a' appears twice in the header\n  fix: rename one of them"),
        ],
    )
    @pytest.mark.parametrize("block_bytes", [5, 1 << 20])
    def test_the_row_is_named(
        self, data: bytes, text: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(csv, "BLOCK_BYTES", block_bytes)
        assert text in message(write(tmp_path / "t.csv", data))

    def test_stray_quotes(self, tmp_path: Path) -> None:
        text = message(write(tmp_path / "t.csv", b'a,b\n1,5" x\n3,4" y\n5,6\n'))
        assert "t.csv: rows from 1 on can't be parsed" in text
        assert "fix: quote values that hold quotes" in text

    def test_a_row_that_never_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv, "BLOCK_BYTES", 100)
        monkeypatch.setattr(csv, "MAX_ROW_BYTES", 2_000)
        text = message(write(tmp_path / "t.csv", b'a,b\n1,2\n3,"' + b"x\n" * 5_000))
        assert "t.csv: row 2 does not end within" in text


class TestSeparators:
    def test_an_unusual_one_has_to_be_named(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("y~site\n1~a\n")
        (block, _), *_ = FileSource([path]).blocks()
        with pytest.raises(InputError, match="say with --separator what separates the columns"):
            block.column("y", "label")
        with pytest.raises(InputError, match="rename the column"):
            block.column("z", "label")

    @pytest.mark.parametrize(
        ("name", "separator", "called"),
        [
            ("t.csv", ";", "semicolons"),
            ("t.csv", "\t", "tabs"),
            ("t.txt", "|", "bars"),
            ("t.tsv", ",", "commas"),
        ],
    )
    def test_another_separator_is_noticed_and_said(
        self, name: str, separator: str, called: str, tmp_path: Path
    ) -> None:
        source = write(tmp_path / name, f"a{separator}b\n1{separator}2\n".encode())
        assert read(source).rows() == [("1", "2")]
        assert source.notes == [f"{name}: the columns are separated by {called}, and are read that way"]

    def test_nothing_is_said_of_what_the_name_says(self, tmp_path: Path) -> None:
        for data, columns in ((b"a;x,b\n1,2\n", ["a;x", "b"]), (b"a\n1\n", ["a"])):
            source = write(tmp_path / "t.csv", data)
            assert (read(source).columns, source.notes) == (columns, [])

    def test_files_without_a_header_line(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("1;x\n2;y\n")
        assert read(FileSource([tmp_path / "t.csv"], ["a", "b"])).rows() == [("1", "x"), ("2", "y")]
        assert read(FileSource([tmp_path / "t.csv"], ["a"])).rows() == [("1;x",), ("2;y",)]

    def test_the_users_separator(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a:b,c\n1:2,3\n")
        assert read(FileSource([tmp_path / "t.csv"], separator=":")).rows() == [("1", "2,3")]
        (tmp_path / "tabs.csv").write_text("a\tb\n1\t2\n")
        for spelled in ("tab", "\\t", "\t", ":"):  # A file without it is read by what its first line shows.
            assert read(FileSource([tmp_path / "tabs.csv"], separator=spelled)).rows() == [("1", "2")]
        for odd in ("", "::", "é", '"', "\n"):
            with pytest.raises(InputError, match="can't separate columns\n  fix: give one character"):
                FileSource([tmp_path / "t.csv"], separator=odd)

    def test_many_files_get_one_note(self, tmp_path: Path) -> None:
        for name in ("1.csv", "2.csv"):
            (tmp_path / name).write_text("a;b\n1;2\n")
        source = FileSource([tmp_path])
        assert read(source).height == 2
        assert len(source.notes) == 1


def brute_row_ends(text: bytes) -> list[int]:
    """Return the positions of line ends outside quotes, byte by byte."""
    ends, in_quotes = [], False
    for at, byte in enumerate(text):
        in_quotes ^= byte == ord('"')
        if byte == ord("\n") and not in_quotes:
            ends.append(at)
    return ends


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_rows_end_outside_quotes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut where a reader of single bytes would cut them."""
    monkeypatch.setattr(csv, "SCANNED_BYTES", size)
    monkeypatch.setattr(csv, "BLOCK_BYTES", 7)
    rng = np.random.default_rng(size)
    for _ in range(60):
        numbers = rng.integers(0, 99, rng.integers(1, 9))
        cells = [f"c{number}" if number % 3 else f'"{number}\n""x{number}"' for number in numbers]
        text = ("a\n" + "\n".join(cells) + "\n").encode()
        frames = [frame for frame, _ in read_text_blocks(io.BytesIO(text), None, "t", b",", TextOptions())]
        assert pl.concat(frames)["a"].len() == len(brute_row_ends(text)) - 1 == len(cells)


class TestBombs:
    """What costs little to send costs little to refuse."""

    def refuse(self, text: bytes, message: str) -> None:
        started = time.process_time()
        with pytest.raises(InputError, match=message):
            list(read_text_blocks(io.BytesIO(text), None, "t.csv", b",", TextOptions()))
        assert time.process_time() - started < 5

    def test_an_open_quote(self) -> None:
        self.refuse(b'a,b\n1,"' + b"\n" * (20 << 20), "row 1 opens a quote that is not closed within 1 MiB")

    def test_many_quotes_in_an_open_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv, "BLOCK_BYTES", 1 << 20)
        monkeypatch.setattr(csv, "MAX_ROW_BYTES", 4 << 20)
        self.refuse(b'a,b\n1,"' + b'\n""' * (2 << 20), "row 1 does not end within 4 MiB")

    def test_an_endless_header(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv, "BLOCK_BYTES", 1 << 20)
        monkeypatch.setattr(csv, "MAX_HEADER_BYTES", 2 << 20)
        self.refuse(b"column," * (1 << 20), "the header line does not end within 2 MiB")

    def test_a_header_of_40000_columns(self) -> None:
        names = [f"column_{number}" for number in range(40_000)]
        self.refuse(",".join([*names, names[-1]]).encode() + b"\n", "column 'column_39999' appears twice")


def spans(path: Path, size: int, names: ColumnNames | None = None) -> list[csv.TextSpan]:
    return cut_text(path, path.name, b",", TextOptions(names), size)


class TestSpans:
    @pytest.mark.parametrize("block_bytes", [3, 8, 50, 1 << 20])
    @pytest.mark.parametrize("line_end", ["\n", "\r\n"])
    @pytest.mark.parametrize("has_header", [True, False])
    def test_together_they_are_the_table(
        self, block_bytes: int, line_end: str, has_header: bool, tmp_path: Path
    ) -> None:
        """Whatever their size, also with line ends and quotes in values, and blank lines at the end of the file."""
        cells = ["a", 'b"c', "d\ne", "f,\n\n", "é", ""]
        table = [[cells[i % 6], cells[i // 6 % 6]] for i in range(40)]
        lines = [",".join(map(quoted, row)) for row in ([["x", "y"]] if has_header else []) + table]
        names = None if has_header else ColumnNames(["x", "y"])
        path = tmp_path / "t.csv"
        path.write_bytes(b"\xef\xbb\xbf" + (line_end.join(lines) + line_end * 3).encode())
        whole = read(FileSource([path], names))
        with patch.object(csv, "BLOCK_BYTES", block_bytes):
            for size in (1, 20, 100, 10**6):
                first_row, end, frames = 1, None, []
                cuts = spans(path, size, names)
                assert len(cuts) == 1 or size < 10**6
                for span in cuts:
                    assert span.first_row == first_row
                    assert end in (None, span.start)
                    frame = pl.concat([frame for frame, _ in read_span(path, "t.csv", span)])
                    first_row, end = first_row + frame.height, span.stop
                    frames.append(frame)
                assert pl.concat(frames).equals(whole)
                assert end == path.stat().st_size
        assert len(spans(path, 20, names)) > 5

    def test_a_blank_line_between_rows_is_refused_in_spans_too(self, tmp_path: Path) -> None:
        (path := tmp_path / "t.csv").write_bytes(b"x,y\n" + b"1,2\n" * 5 + b"\r\n\n" + b"3,4\n" * 5)
        with pytest.raises(InputError, match="row 6 has 0 fields"):
            read(FileSource([path]))
        with pytest.raises(InputError, match="row 6 has 0 fields"):
            for span in spans(path, 1):
                list(read_span(path, "t.csv", span))

    def test_one_column_is_not_cut(self, tmp_path: Path) -> None:
        """There a blank line is a row."""
        (path := tmp_path / "t.csv").write_bytes(b"x\n" + b"1\n\n" * 5)
        assert spans(path, 1) == []
