"""From a raw table to prepared data in one call: read or infer the schema, split the rows, encode them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from recap_ctr.data.frames import as_frame
from recap_ctr.data.grow import Base
from recap_ctr.data.infer import infer
from recap_ctr.data.inferred import Inferred, Untimed
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FileSource, FrameSource, Source
from recap_ctr.data.split import Split, parse_rule
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import LOCAL, workers_for
from recap_ctr.jobs.executor import Executor
from recap_ctr.schema import Schema, read_schema
from recap_ctr.storage.places import output_directory


class PandasFrame(Protocol):
    """A data frame of pandas, which this package does without."""

    @property
    def columns(self) -> Any:
        """Return the names of the columns."""
        ...

    @property
    def iloc(self) -> Any:
        """Return the cells by position."""
        ...


RawTable = (
    str
    | Path
    | Sequence[str | Path]
    | pl.DataFrame
    | pl.LazyFrame
    | PandasFrame
    | Mapping[str, Sequence[Any]]
)
"""Files by name or pattern, a data frame of polars or pandas, or columns by name."""


@dataclass(frozen=True)
class Table:
    """A raw table with the schema that says what its columns are."""

    source: Source
    schema: Schema
    inferred: Inferred | None = None
    """The reasons for the schema, where it was inferred."""
    drop_unlabelled: bool = False
    """Leave out rows without a label, which are refused otherwise."""

    @property
    def untimed(self) -> Untimed | None:
        """Return why no column can order the rows, though one holds moments; None if that is not so."""
        return self.inferred.untimed if self.inferred else None

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of how the rows were read."""
        return [*(self.inferred.notes if self.inferred else ()), *self.source.notes]

    def split_rule(
        self, split: str | None = None, ratio: tuple[int, int, int] = (8, 1, 1), seed: int = 1
    ) -> Split:
        """Return the rule that divides the rows: random, time or hash:COLUMN.

        By default it is time if the schema has a time column, else random.
        """
        kind, column = parse_rule(split or ("time" if self.schema.time else "random"))
        if kind == "time" and self.untimed:
            raise InputError(f"the rows can't be split by time: {self.untimed.reason}", fix=self.untimed.fix)
        return Split(kind=kind, ratio=ratio, seed=seed, column=column)

    def preparation(self, split: Split) -> Preparation:
        """Return how the table is to be prepared as a whole, under a rule for the split."""
        note = None
        if split.kind == "random" and self.untimed:
            note = (
                f"The rows were split at random, NOT by time: {self.untimed.reason}. A random split flatters a model"
                f" that will score later rows: {self.untimed.fix}."
            )
        return Preparation(
            self.schema, {"all": self.source}, split, drop_unlabelled=self.drop_unlabelled, split_note=note
        )

    def prepared(self, out: Path, split: Split, *, quiet: bool = False) -> tuple[PreparedData, bool]:
        """Prepare the table in `out`; return the data, and whether they were up to date already."""
        return write_prepared_data(self.preparation(split), out, quiet=quiet)

    def prepared_with(self, base: Base, out: Path, split: Split) -> PreparedData:
        """Prepare the table in `out` with vocabularies that are there, which grow."""
        return write_prepared_data(replace(self.preparation(split), base=base), out, quiet=True)[0]


def open_table(
    rows: RawTable,
    *,
    label: str | None = None,
    schema: Schema | str | Path | None = None,
    positive: str | None = None,
    weight: str | None = None,
    group: str | None = None,
    separator: str | None = None,
    drop_unlabelled: bool = False,
    scores: str | None = None,
    ignore: Sequence[str] = (),
) -> Table:
    """Return a raw table with its schema: a `schema` or its TOML file, or one inferred for the column `label`.

    For an inferred schema, `positive` is the label's value that means a click, `weight` and `group` are columns with
    these roles, and `separator` separates the columns of text files. They are part of the schema from then on. `scores`
    is a column with the scores of another model, which is no field. `ignore` names columns that must teach nothing.
    """
    if isinstance(schema, str | Path):
        schema = read_schema(Path(schema))
    if schema is not None:
        options = {"positive": positive, "weight": weight, "group": group, "separator": separator}
        for key, value in options.items():
            if value is not None:
                raise InputError(
                    f"--{key} is for a schema that is inferred, and there is one",
                    fix=f'write {key} = "{value}" into the schema',
                )
        if ignore:
            raise InputError(
                "--ignore is for a schema that is inferred, and there is one",
                fix=f"remove the [[fields]] table of {ignore[0]!r} from the schema",
            )
        if any(field.name == scores for field in schema.fields):
            raise InputError(
                f"{scores!r} is a field of the schema", fix="remove its [[fields]] table: it holds scores"
            )
        source = open_source(rows, schema.columns, schema.separator)
        return Table(source, schema, drop_unlabelled=drop_unlabelled)
    source = open_source(rows, separator=separator)
    if label is None:
        raise InputError("raw rows need a label or a schema", fix="--label COLUMN, or --schema schema.toml")
    if isinstance(source, FileSource) and source.is_stream:
        raise InputError(
            "a pipe can be read only once, and a schema is inferred from the rows before they are prepared",
            fix="save the rows to a file first, or name a --schema",
        )
    inferred = infer(
        source,
        label,
        positive=positive,
        weight=weight,
        group=group,
        drop_unlabelled=drop_unlabelled,
        scores=scores,
        ignore=ignore,
    )
    return Table(source, inferred.schema, inferred, drop_unlabelled)


def open_source(rows: RawTable, columns: Sequence[str] | None = None, separator: str | None = None) -> Source:
    """Return files or a data frame as a source; `columns` names those of files without a header line."""
    if isinstance(rows, str | Path):
        return FileSource([rows], columns, separator)
    if isinstance(rows, Sequence):
        return FileSource(rows, columns, separator)
    return FrameSource(as_frame(rows))


def prepare(
    rows: RawTable,
    *,
    out: str | Path,
    label: str | None = None,
    schema: Schema | str | Path | None = None,
    positive: str | None = None,
    separator: str | None = None,
    drop_unlabelled: bool = False,
    ignore: Sequence[str] = (),
    split: str | None = None,
    ratio: tuple[int, int, int] = (8, 1, 1),
    valid: RawTable | None = None,
    test: RawTable | None = None,
    split_column: str | None = None,
    seed: int = 1,
    workers: int | None = None,
    executor: Executor | str = LOCAL,
    force: bool = False,
    quiet: bool = True,
) -> PreparedData:
    """Encode a raw table into memory-mapped shards in the directory `out`, and return them.

    `rows` are files (names, patterns or directories of CSV, TSV, JSON lines, Parquet or Arrow) or a data frame.
    Without a `schema`, it is inferred, with `label` as the label, `positive` as its value that means a click,
    `separator` between the columns of text, and without the columns that `ignore` names. Rows without a label are an
    error unless `drop_unlabelled` leaves them out. `split` divides the rows in the `ratio` of train, valid and test:
    `time`, `random`, or `hash:COLUMN`, which keeps rows with the same value of a column together; by default by time
    if the schema has a time column. Or a column says train, valid or test, or they come as tables of their own,
    `valid` and `test`.

    `workers` processes of this machine read, count and encode side by side, or those of the engine that `executor`
    names: `ray` or `ray://HOST:PORT`. The result is the same to the last byte.

    Prepared data in `out` from the same inputs are returned as they are; those from others are replaced only with
    `force`.
    """
    table = open_table(
        rows,
        label=label,
        schema=schema,
        positive=positive,
        separator=separator,
        drop_unlabelled=drop_unlabelled,
        ignore=ignore,
    )
    preparation = split_table(
        table, split=split, ratio=ratio, valid=valid, test=test, split_column=split_column, seed=seed
    )
    with output_directory(out) as directory:
        return write_prepared_data(
            preparation, directory, force=force, quiet=quiet, executor=workers_for(executor, workers)
        )[0]


def split_table(
    table: Table,
    *,
    split: str | None = None,
    ratio: tuple[int, int, int] | None = None,
    valid: RawTable | None = None,
    test: RawTable | None = None,
    split_column: str | None = None,
    seed: int = 1,
) -> Preparation:
    """Return how a table is to be prepared: split by one of the ways that `prepare` offers."""
    if valid is not None or test is not None:
        if valid is None:
            raise InputError(
                "--test without --valid", fix="add validation files, or let --ratio split the rows"
            )
        schema = table.schema
        sources = {"train": table.source, "valid": open_source(valid, schema.columns, schema.separator)}
        if test is not None:
            sources["test"] = open_source(test, schema.columns, schema.separator)
        rule = Split(kind="files")
        return Preparation(schema, sources, rule, drop_unlabelled=table.drop_unlabelled)
    rule = table.split_rule(split, ratio or (8, 1, 1), seed)
    if split_column is not None:
        rule = Split(kind="column", column=split_column)
    return table.preparation(rule)
