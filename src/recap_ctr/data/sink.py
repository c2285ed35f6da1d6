"""Writing tables to files, block by block, in the format that the file name says."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from recap_ctr.data.input_files import FORMATS, JSON, PARQUET, TEXT
from recap_ctr.errors import InputError
from recap_ctr.storage import places
from recap_ctr.storage.claims import output_file
from recap_ctr.storage.files import make_directory, new_file, scratch_directory


class Sink:
    """Takes blocks of rows in order; the first block decides the columns and their order."""

    _schema: pl.Schema | None = None

    def write(self, frame: pl.DataFrame) -> None:
        """Append the rows of a block; refuse columns other than those of the first block."""
        is_first = self._schema is None
        schema = self._schema = self._schema or frame.schema
        if set(frame.columns) != set(schema):
            different = sorted(set(frame.columns) ^ set(schema))
            raise InputError(
                f"the files differ in their columns: {', '.join(map(repr, different))} not in all of them",
                fix="score them one by one",
            )
        # Select by position, since polars takes names such as ^x$ or * for patterns.
        ordered = frame[:, [frame.get_column_index(name) for name in schema]]
        self._append(ordered, schema, is_first)

    def _append(self, frame: pl.DataFrame, schema: pl.Schema, is_first: bool) -> None:
        raise NotImplementedError


class _TextSink(Sink):
    def __init__(self, file: BinaryIO, separator: str) -> None:
        self._file, self._separator = file, separator

    def _append(self, frame: pl.DataFrame, schema: pl.Schema, is_first: bool) -> None:
        for name, kind in frame.schema.items():
            if kind.is_nested() or kind in (pl.Binary, pl.Object, pl.Duration):
                raise InputError(
                    f"column {name!r} is of type {kind}, which text can't hold",
                    fix="give --out a name that ends in .parquet or .arrow",
                )
        frame.write_csv(self._file, separator=self._separator, include_header=is_first)


class _JsonSink(Sink):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def _append(self, frame: pl.DataFrame, schema: pl.Schema, is_first: bool) -> None:
        frame.write_ndjson(self._file)


class _TableSink(Sink):
    """Parquet and Arrow files end with a table of contents, so blocks go to parts first, then into one file."""

    def __init__(self, parts: Path) -> None:
        self._parts, self._count = parts, 0

    def _append(self, frame: pl.DataFrame, schema: pl.Schema, is_first: bool) -> None:
        for name, kind in frame.schema.items():
            if kind != schema[name]:
                raise InputError(
                    f"column {name!r} is of type {schema[name]} in one file and {kind} in another",
                    fix="score them one by one, or write .csv",
                )
        with new_file(self._parts / f"{self._count:08d}.arrow") as file:
            frame.write_ipc(file)
        self._count += 1

    def finish(self, file: BinaryIO, kind: str) -> None:
        """Write all parts to `file`, as Parquet or Arrow."""
        lazy = pl.scan_ipc(sorted(self._parts.iterdir()), glob=False)
        if kind is PARQUET:
            lazy.sink_parquet(file, maintain_order=True)
        else:
            lazy.sink_ipc(file, maintain_order=True)


@contextmanager
def open_sink(
    path: Path | None, inputs: dict[str, Any] | None = None, *, force: bool = True
) -> Iterator[Sink]:
    """Yield a sink for `path`, which appears only when complete; None writes CSV to standard output.

    `inputs` are what the rows are made from, which is recorded; an existing file is replaced only with `force`.
    """
    if path is None:
        yield _TextSink(sys.stdout.buffer, ",")
        return
    kind = FORMATS.get(path.suffix.lower())
    if kind is None or path.suffix.lower() == ".json":  # That would promise one value, not lines of them.
        fix = "end its name in .csv, .tsv, .jsonl, .parquet or .arrow"
        raise InputError(f"can't tell the format of {path}", fix=fix)
    with ExitStack() as stack:
        # In a store it becomes an object when the file is whole.
        path = stack.enter_context(places.output_file(path, force=force))
        make_directory(path.parent)
        file = stack.enter_context(output_file(path, inputs, force=force))
        if kind is TEXT:
            yield _TextSink(file, "\t" if path.suffix.lower() in (".tsv", ".tab") else ",")
        elif kind is JSON:
            yield _JsonSink(file)
        else:
            sink = _TableSink(stack.enter_context(scratch_directory(path)))
            yield sink
            sink.finish(file, kind)
