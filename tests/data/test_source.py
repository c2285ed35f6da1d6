import bz2
import gzip
import io
import lzma
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import polars as pl
import pytest
import zstandard

from recap_ctr.data import csv as csv_module
from recap_ctr.data import source as source_module
from recap_ctr.data.frames import as_frame
from recap_ctr.data.source import FileSource, FrameSource, Source
from recap_ctr.errors import InputError

FRAME = pl.DataFrame({"a": ["1", "2", None, "4"], "b": ["x", "y, z", 'say "so"', "line\nend"]})


def read(source: Source) -> pl.DataFrame:
    return pl.concat([block.frame for block, _ in source.blocks()])


def write(path: Path, data: bytes) -> FileSource:
    path.write_bytes(data)
    return FileSource([path])


def message(source: Source) -> str:
    with pytest.raises(InputError) as error:
        read(source)
    return str(error.value)


WRITERS: dict[str, Callable[[Path], object]] = {
    "t.csv": FRAME.write_csv,
    "t.tsv": lambda path: FRAME.write_csv(path, separator="\t"),
    "t.txt": FRAME.write_csv,
    "tabs.txt": lambda path: FRAME.write_csv(path, separator="\t"),
    "t.CSV.GZ": lambda path: path.write_bytes(gzip.compress(FRAME.write_csv().encode())),
    "t.csv.zst": lambda path: path.write_bytes(zstandard.compress(FRAME.write_csv().encode())),
    "t.parquet": FRAME.write_parquet,
    "t.arrow": FRAME.write_ipc,
    "stream.arrow": FRAME.write_ipc_stream,
    "lz4.ipc": lambda path: FRAME.write_ipc_stream(path, compression="lz4"),
    "lz4.feather": lambda path: FRAME.write_ipc(path, compression="lz4"),
    "t.jsonl": FRAME.write_ndjson,
    "t.jsonl.gz": lambda path: path.write_bytes(gzip.compress(FRAME.write_ndjson().encode())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    source = FileSource([tmp_path / name])
    assert read(source).equals(FRAME)
    assert [(file.name, file.size) for file in source.files()] == [(name, source.total_bytes)]


def test_several_compressed_frames_are_one_file(tmp_path: Path) -> None:
    text = FRAME.write_csv().encode()
    for name, pack in (("t.csv.gz", gzip.compress), ("t.csv.zst", zstandard.compress)):
        assert read(write(tmp_path / name, pack(text[:9]) + pack(text[9:]))).equals(FRAME)


def test_rows_are_numbered_within_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BLOCK_ROWS", 3)
    monkeypatch.setattr(csv_module, "BLOCK_BYTES", 8)
    wide = pl.DataFrame({"a": range(10), "b": range(10)})
    wide.write_csv(tmp_path / "1.csv")
    wide.write_parquet(tmp_path / "2.parquet", row_group_size=4)
    for source in (FileSource([tmp_path / "*.*"]), FrameSource(wide)):
        expected = {"1.csv": 1, "2.parquet": 1, "the data frame": 1}
        total = 0
        for block, size in source.blocks():
            assert block.first_row == expected[block.origin]
            expected[block.origin] += block.frame.height
            total += size
        assert 0.8 * source.total_bytes <= total <= source.total_bytes
        assert set(expected.values()) <= {1, 11}


def test_frames_are_identified_by_their_rows() -> None:
    def digest(frame: pl.DataFrame) -> str:
        return FrameSource(frame).files()[0].sha256

    frame = pl.DataFrame({"a": ["x", "y", None], "l": [[1], None, []]})
    assert digest(frame) == digest(pl.concat([frame[:1], frame[1:]], rechunk=False))
    assert digest(frame) != digest(frame.reverse())
    assert digest(frame) != digest(frame.rename({"a": "b"}))
    p, q = (pl.DataFrame({"a": pl.Series([v], dtype=pl.Categorical)}) for v in ("p", "q"))
    assert digest(p) != digest(q)


class _Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    "name", ["t.csv", "tabs.txt", "t.parquet", "t.arrow", "stream.arrow", "t.jsonl", "t.jsonl.gz"]
)
def test_standard_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[name](tmp_path / name)
    monkeypatch.setattr(sys, "stdin", _Stdin((tmp_path / name).read_bytes()))
    source = FileSource(["-"])
    assert read(source).equals(FRAME)
    assert source.files() == []


class TestPaths:
    def test_globs_are_sorted(self, tmp_path: Path) -> None:
        for name in ("p-2.csv", "p-1.csv", "p-10.csv"):
            (tmp_path / name).write_text("a,b\n1,2\n")
        names = [path.name for path in FileSource([tmp_path / "p-*.csv"]).paths]
        assert names == ["p-1.csv", "p-10.csv", "p-2.csv"]

    def test_a_name_with_brackets_is_a_name(self, tmp_path: Path) -> None:
        for name, writer in (
            ("t[1].csv", "t.csv"),
            ("t[1].parquet", "t.parquet"),
            ("t[1].arrow", "stream.arrow"),
        ):
            WRITERS[writer](tmp_path / name)
            assert read(FileSource([tmp_path / name])).equals(FRAME)

    @pytest.mark.parametrize(
        ("patterns", "text"),
        [
            (["gone.csv"], "no file .*gone.csv"),
            (["*.gone"], "no file matches .*gone"),
            (["."], r"is a directory without rows: no file in it ends in \.csv"),
        ],
    )
    def test_missing_files_are_named(self, patterns: list[str], text: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=text):
            FileSource([tmp_path / pattern for pattern in patterns])

    def test_nothing_given(self) -> None:
        with pytest.raises(InputError, match="no source file"):
            FileSource([])


class TestDirectories:
    def write(self, directory: Path, *names: str) -> None:
        for i, name in enumerate(names):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(f"a,b\n{i},x\n")

    def test_all_files_below_are_read_in_order(self, tmp_path: Path) -> None:
        self.write(
            tmp_path, "b.csv", "a/2.csv", "a/1.csv.txt", "_SUCCESS", ".hidden.csv", "_x/1.csv", "notes.md"
        )
        source = FileSource([tmp_path])
        assert [block.origin for block, _ in source.blocks()] == ["a/1.csv.txt", "a/2.csv", "b.csv"]
        assert [file.name for file in source.files()] == ["1.csv.txt", "2.csv", "b.csv"]

    def test_partitions_are_text_columns(self, tmp_path: Path) -> None:
        day = "day=2026-01-0{}/hour={}/part.csv"
        names = day.format(1, "00%3A30"), day.format(2, "__HIVE_DEFAULT_PARTITION__")
        self.write(tmp_path / "logs", *names)
        expected = [("0", "x", "2026-01-01", "00:30"), ("1", "x", "2026-01-02", None)]
        for pattern in ("logs", "logs/day=*", "logs/*/*/*.csv", "logs/**/*.csv"):
            frame = read(FileSource([tmp_path / pattern]))
            assert frame.columns == ["a", "b", "day", "hour"]
            assert frame.rows() == expected
        assert read(FileSource([tmp_path / "logs" / "day=2026-01-02"])).rows() == expected[1:]
        assert read(FileSource([tmp_path / "logs" / names[0]])).rows() == expected[:1]

    def test_partitions_are_part_of_the_identity(self, tmp_path: Path) -> None:
        self.write(tmp_path, "day=1/t.csv", "t.csv")
        (tmp_path / "t.csv").write_bytes((tmp_path / "day=1" / "t.csv").read_bytes())
        plain, first = (FileSource([tmp_path / name]).files()[0].sha256 for name in ("t.csv", "day=1/t.csv"))
        (tmp_path / "day=1").rename(tmp_path / "day=2")
        second = FileSource([tmp_path / "day=2"]).files()[0].sha256
        assert len({plain, first, second}) == 3

    def test_a_column_of_the_file_wins_over_its_directory(self, tmp_path: Path) -> None:
        self.write(tmp_path, "a=9/t.csv")
        assert read(FileSource([tmp_path])).rows() == [("0", "x")]

    def test_formats_are_not_mixed(self, tmp_path: Path) -> None:
        self.write(tmp_path, "1.csv")
        FRAME.write_parquet(tmp_path / "2.parquet")
        with pytest.raises(InputError, match=r"different formats, such as 1\.csv and 2\.parquet") as error:
            FileSource([tmp_path])
        assert f"fix: name those that hold rows, such as '{tmp_path}/*.csv'" in str(error.value)

    def test_what_recap_wrote_is_not_raw(self, tmp_path: Path) -> None:
        self.write(tmp_path, "1.csv", "manifest.json")
        with pytest.raises(InputError, match="was written by recap, and holds no raw rows"):
            FileSource([tmp_path])


class TestStructs:
    NESTED = pl.DataFrame({"a": [{"b": 1, "c": {"d": "x"}}, None], "e": [[1], [2, 3]]})
    FLAT: ClassVar = {"a.b": [1, None], "a.c.d": ["x", None], "e": [[1], [2, 3]]}

    def test_they_are_flattened(self, tmp_path: Path) -> None:
        self.NESTED.write_parquet(tmp_path / "t.parquet")
        self.NESTED.write_ipc(tmp_path / "t.arrow")
        for name in ("t.parquet", "t.arrow"):
            assert read(FileSource([tmp_path / name])).to_dict(as_series=False) == self.FLAT
        assert as_frame(self.NESTED).to_dict(as_series=False) == self.FLAT

    def test_a_name_that_is_taken(self, tmp_path: Path) -> None:
        self.NESTED.with_columns(pl.lit(1).alias("a.b")).write_parquet(tmp_path / "t.parquet")
        text = message(FileSource([tmp_path / "t.parquet"]))
        assert text.startswith(
            "t.parquet: column 'a.b' is there twice once structs are flattened\n  fix: rename"
        )


class TestDamagedFiles:
    @pytest.mark.parametrize("name", ["t.CSV.GZ", "t.csv.zst", "t.parquet", "t.arrow", "stream.arrow"])
    def test_cut_short_anywhere(self, name: str, tmp_path: Path) -> None:
        WRITERS[name](tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for size in [*range(1, len(whole) - 1, max(len(whole) // 25, 1)), len(whole) - 1]:
            text = message(write(tmp_path / name, whole[:size]))
            assert name in text or "holds no rows" in text

    @pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.zst", "t.parquet", "t.arrow"])
    def test_something_else_inside(self, name: str, tmp_path: Path) -> None:
        assert f"{name} can't be read" in message(write(tmp_path / name, b"a,b\n1,2\n" * 50))

    @pytest.mark.parametrize(
        ("name", "kind", "fix"),
        [
            ("t.CSV.GZ", "gzip", "end its name in .gz"),
            ("t.csv.zst", "zstd", "end its name in .zst"),
            ("t.parquet", "Parquet", "end its name in .parquet"),
            ("t.arrow", "Arrow", "end its name in .arrow"),
            ("stream.arrow", "an Arrow stream", "end its name in .arrow"),
            ("t.bz2", "bzip2", "unpack it first"),
            ("t.zip", "zip", "unpack it first"),
            ("t.xz", "xz", "unpack it first"),
            ("t.avro", "Avro", "save it as Parquet, Arrow or CSV"),
        ],
    )
    def test_other_formats_are_named(self, name: str, kind: str, fix: str, tmp_path: Path) -> None:
        def archive(path: Path) -> None:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("t.csv", FRAME.write_csv())

        writers: dict[str, Callable[[Path], object]] = {
            "t.bz2": lambda path: path.write_bytes(bz2.compress(FRAME.write_csv().encode())),
            "t.xz": lambda path: path.write_bytes(lzma.compress(FRAME.write_csv().encode())),
            "t.zip": archive,
            "t.avro": FRAME.write_avro,
        }
        (WRITERS | writers)[name](tmp_path / "t.csv")
        assert message(FileSource([tmp_path / "t.csv"])).startswith(
            f"t.csv is {kind}, not text\n  fix: {fix}"
        )
        data = (tmp_path / "t.csv").read_bytes()
        inside = write(tmp_path / "t.csv.gz", gzip.compress(data))
        assert message(inside).startswith(f"t.csv.gz is {kind}, not text")

    @pytest.mark.slow
    def test_large_streams_are_checked_to_their_end(self, tmp_path: Path) -> None:
        text = b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(100_000))
        for name, pack in (("t.csv.gz", gzip.compress), ("t.csv.zst", zstandard.compress)):
            packed = pack(text)
            assert read(write(tmp_path / name, packed)).height == 100_000
            assert "check that the file is complete" in message(
                write(tmp_path / name, packed[: len(packed) // 2])
            )

    def test_a_giant_value_is_refused(self, tmp_path: Path) -> None:
        data = b"a,b\n1,2\n3," + b"x" * 10_000_000 + b"\n"
        text = message(write(tmp_path / "t.csv", data))
        assert "t.csv: row 2, column 'b': a value of 10,000,000 bytes (at most 1,048,576 are allowed)" in text
        pl.DataFrame({"b": ["1", "x" * 10_000_000]}).write_parquet(tmp_path / "t.parquet")
        assert "t.parquet: row 2, column 'b'" in message(FileSource([tmp_path / "t.parquet"]))

    def test_compressed_tables_are_refused(self, tmp_path: Path) -> None:
        assert "unpack it first" in message(write(tmp_path / "t.parquet.gz", b""))

    def test_tables_without_rows(self, tmp_path: Path) -> None:
        FRAME.clear().write_parquet(tmp_path / "t.parquet")
        assert "holds no rows" in message(FileSource([tmp_path / "t.parquet"]))


class TestStreams:
    def test_a_pipe_may_be_compressed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = b"a,b\n1,2\n3,4\n"
        for packed in (plain, gzip.compress(plain), zstandard.compress(plain)):
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
            frames = [block.frame for block, _ in FileSource(["-"]).blocks()]
            assert pl.concat(frames).rows() == [("1", "2"), ("3", "4")]

    def test_a_named_pipe_is_read_once(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda: pipe.write_bytes(b"a,b\n1,2\n"))
        writer.start()
        source = FileSource([pipe])
        assert source.is_stream
        assert source.files() == []
        assert [block.frame.rows() for block, _ in source.blocks()] == [[("1", "2")]]
        writer.join()


def test_a_large_row_group_is_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pl.DataFrame({"a": range(1000), "b": [str(number % 7) for number in range(1000)]})
    frame.write_parquet(tmp_path / "t.parquet", row_group_size=1000)
    monkeypatch.setattr(source_module, "BLOCK_ROWS", 64)
    monkeypatch.setattr(source_module, "MAX_SLICE_ROWS", 150)
    blocks = [block for block, _ in FileSource([tmp_path / "t.parquet"]).blocks()]
    assert max(block.frame.height for block in blocks) == 64
    assert [block.first_row for block in blocks[:4]] == [1, 65, 129, 151]
    assert pl.concat(block.frame for block in blocks).equals(frame)
