"""Pieces of raw files that several processes can read: some files each, or some rows of a large one.

Parquet files and text without compression are cut. JSON lines are not: to learn their columns takes as long as to read
them. Nor are Arrow files and compressed text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl

from recap_ctr.config import Frozen
from recap_ctr.data.compression import UNREADABLE
from recap_ctr.data.csv import ColumnNames, TextSpan, cut_text, read_span
from recap_ctr.data.input_files import JSON, PARQUET, SEPARATORS, TEXT, InputFile
from recap_ctr.data.source import BLOCK_ROWS, MAX_SLICE_ROWS, SLICE_CELLS, Block, FileSource, Source
from recap_ctr.storage.files import new_file

PIECES_PER_WORKER = 3  # So that a worker that is done early finds more to do.


class Piece(Frozen):
    """Some of the files of a source, or some rows of one of them, for another process to read."""

    split: str
    """The name of the source: `all`, or a split's."""
    files: tuple[tuple[str, str], ...]
    """Path of each, and what errors call it."""
    rows: tuple[int, int] | None = None
    """The first row of a Parquet file and the one after the last, counted from 0; by default all rows."""
    span: TextSpan | None = None
    """Some rows of a text file."""
    names: dict[str, Any] | None = None
    separator: str | None = None
    json_columns: str | None = None
    """A file with the columns of all JSON lines of the source, also of those in other pieces."""


class FilePiece(FileSource):
    """The rows of a piece; they have the numbers and the names in errors that they have in the whole source."""

    def __init__(self, piece: Piece) -> None:
        """Open a piece that `divide` returned, in this or in another process."""
        names = None
        if piece.names is not None:
            names = ColumnNames(**{**piece.names, "fields": frozenset(piece.names["fields"])})
        super().__init__([path for path, _ in piece.files], names, piece.separator)
        origins = (origin for _, origin in piece.files)
        self._files = [
            replace(file, origin=origin) for file, origin in zip(self._files, origins, strict=True)
        ]
        self._piece = piece
        if piece.json_columns is not None:
            self._json_columns = pl.Schema(pl.read_ipc_schema(piece.json_columns))

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the rows of the piece in blocks."""
        rows, span = self._piece.rows, self._piece.span
        first_row = rows[0] if rows else span.first_row - 1 if span else 0
        for block, size in super().blocks():
            yield replace(block, first_row=block.first_row + first_row), size

    def _read_file(self, file: InputFile) -> Iterator[tuple[pl.DataFrame, int]]:
        if self._piece.span is not None:
            yield from read_span(file.path, file.origin, self._piece.span)
            return
        if self._piece.rows is None:
            yield from super()._read_file(file)
            return
        lazy = pl.scan_parquet(file.path, glob=False)
        width, size = max(len(lazy.collect_schema()), 1), file.path.stat().st_size
        num_rows = lazy.select(pl.len()).collect().item()
        step = max(BLOCK_ROWS, min(MAX_SLICE_ROWS, SLICE_CELLS // width))
        start, stop = self._piece.rows
        for first in range(start, stop, step):
            for frame in lazy.slice(first, min(step, stop - first)).collect().iter_slices(BLOCK_ROWS):
                yield frame, size * frame.height // num_rows

    @staticmethod
    def cut(source: FileSource, split: str, target: int, directory: Path) -> Iterator[Piece]:
        """Yield pieces of about `target` bytes, in the order of the rows; `directory` is for what they share."""
        names = None if source.text_options.names is None else asdict(source.text_options.names)
        if names is not None:
            names |= {"columns": list(names["columns"]), "fields": sorted(names["fields"])}
        json_columns = None
        if any(file.kind is JSON for file in source._files):
            path = directory / f"{split}.columns"
            with new_file(path) as target_file:
                pl.DataFrame(schema=source._json_columns).write_ipc(target_file)
            json_columns = str(path)
        shared = {"split": split, "names": names, "separator": source.separator, "json_columns": json_columns}
        waiting: list[tuple[str, str]] = []
        num_bytes = 0
        for file in source._files:
            size = file.path.stat().st_size
            entry = str(file.path.absolute()), file.origin
            cuts = _cut(source, file, target) if size > target else []
            if waiting and (cuts or num_bytes + size > target):
                yield Piece(files=tuple(waiting), **shared)
                waiting, num_bytes = [], 0
            for place in cuts:
                yield Piece(files=(entry,), **place, **shared)
            if not cuts:
                waiting, num_bytes = [*waiting, entry], num_bytes + size
        if waiting:
            yield Piece(files=tuple(waiting), **shared)


def _cut(source: FileSource, file: InputFile, target: int) -> list[dict[str, Any]]:
    """Return places of about `target` bytes in a large file, as settings of pieces; nothing if it stays whole."""
    if file.kind is PARQUET:
        return [{"rows": rows} for rows in _cut_rows(file.path, -(-file.path.stat().st_size // target))]
    if file.kind is TEXT and not file.compression:
        expected = SEPARATORS.get(file.suffix)
        return [
            {"span": span} for span in cut_text(file.path, file.origin, expected, source.text_options, target)
        ]
    return []


def _cut_rows(path: Path, count: int) -> list[tuple[int, int]]:
    """Return where to cut a Parquet file into `count` pieces; nothing if it can't be read, which its reader tells."""
    try:
        num_rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
    except UNREADABLE:
        return []
    step = -(-num_rows // count)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)] if num_rows else []


def divide(sources: Mapping[str, Source], num_workers: int, directory: Path) -> list[Piece] | None:
    """Return the sources in pieces for the workers.

    None is returned if one of them can be read by this process only: a table in memory, a pipe, or rows that a
    function changes.
    """
    total = sum(source.total_bytes for source in sources.values())
    target = max(total // (PIECES_PER_WORKER * num_workers), 1)
    pieces: list[Piece] = []
    for name, source in sources.items():
        if type(source) is not FileSource or source.is_stream:
            return None
        pieces += FilePiece.cut(source, name, target, directory)
    return pieces
