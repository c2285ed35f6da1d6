"""Conversion of bodies to tables and of scores to bodies, for the fields of one artifact.

JSON is checked while it is decoded, by types generated from the schema, so that nothing is built that does not fit. A
table keeps its columns as plain lists until requests are joined, because a data frame per request would cost more than
scoring it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import UNSET, Meta, UnsetType

from recap_ctr.data.encode import Encoder
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Floats, Scores
from recap_ctr.inference.explain import Contribution, largest
from recap_ctr.schema import Field
from recap_ctr.serve import arrow
from recap_ctr.serve.columns import (
    ORIGIN,
    Table,
    Values,
    as_list,
    as_lists,
    cells,
    common_cell,
    cut_long,
    holds_lists,
    length_of,
    plain,
    repeat,
    spelled,
    text_length,
    uniform,
)
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem

JSON = "application/json"
MAX_COUNT = 1_000_000  # of routes, of steps, and of explained fields
CONTRIBUTIONS = "contributions"
MAX_KEPT = 16  # columns
_PATH = re.compile(r" - at `(\$.*)`$")
_ROW = re.compile(r"^\$\.rows\[(\d+)\]\.?(.*)$")
_ODD_QUOTES = (b'\\"', b'" ', b'"\t', b'"\r', b'"\n')
_COLUMN = re.compile(r"^\$\.columns\.(.*?)(?:\[(\d+)\])?$")


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """The decoded body of a request."""

    table: Table
    by_rows: bool
    """Whether the body holds one object per row, as the answer then does; JSON only."""
    routes: int | None = None
    depth: int | None = None
    deadline_ms: float | None = None
    explain: int | None = None
    """How many of the largest contributions of fields to answer for each row."""
    keep: Mapping[str, Values] | None = None
    """Columns that are answered as they came, such as the id of an impression; they are no fields."""


@dataclass(frozen=True)
class Provenance:
    """The version and setting that made an answer."""

    model: str
    routes: int
    depth: int | None
    lowered: bool
    """Whether the dial chose a cheaper setting than the best one."""


class _RowScores(msgspec.Struct, gc=False):
    probability: float
    logit: float
    raw_logit: float
    disagreement: float


class _ExplainedScores(_RowScores):
    contributions: list[dict[str, Any]]


SCORES = _RowScores.__struct_fields__


class Codec:
    """Decoder of bodies for the fields of one artifact."""

    def __init__(self, encoder: Encoder, limits: Limits) -> None:
        self._limits, self._encoder = limits, encoder
        self.fields = [fitted.field.name for fitted in encoder.fields]
        self.columns: dict[str, Field] = encoder.schema.input_columns
        """What a request may hold: a column of moments, for one, rather than the fields derived from it."""
        self.request_type = _request_type(list(self.columns.values()), limits)
        self._decode = msgspec.json.Decoder(self.request_type).decode

    def from_json(self, body: bytes) -> ScoreRequest:
        """Decode a JSON body; raise Problem 400 or 413 with field and row if it does not fit."""
        try:
            decoded: Any = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._explain(error) from None
        return self._read_request(decoded, body)

    def from_columns(self, columns: dict[str, list[Any]]) -> ScoreRequest:
        """Check columns that another protocol has decoded, as those of a JSON body are."""
        try:
            return self._read_request(msgspec.convert({"columns": columns}, self.request_type))
        except msgspec.ValidationError as error:
            raise self._explain(error) from None

    def _read_request(self, decoded: Any, body: bytes | None = None) -> ScoreRequest:
        """Return what was decoded, from `body` if there is one, as a table and its options."""
        top = msgspec.structs.astuple(decoded)
        rows, in_columns, context, routes, depth, deadline_ms, explain, keep = _without_unset(top)
        row_values = [msgspec.structs.astuple(row) for row in rows or ()]
        others = [msgspec.structs.astuple(item) for item in (in_columns, context) if item is not None]
        if body is not None:
            refuse_duplicates(body, [top, *row_values, *others, *([tuple(keep)] if keep is not None else ())])
        if (rows is None) == (in_columns is None):
            raise Problem(400, "the body must hold either rows or columns", fix='send {"rows": [{...}, ...]}')
        if rows is not None:
            height = len(rows)
            values_by_field: Iterable[Any] = zip(*row_values, strict=True)
        else:
            values_by_field = _without_unset(others[0])
            height = self._common_length(values_by_field)
        columns: dict[str, Values] = {}
        for (name, field), values in zip(self.columns.items(), values_by_field, strict=False):
            if values is not None and (column := uniform(field, _without_unset(values))) is not None:
                columns[name] = column
        if context is not None:
            self._add_context(_without_unset(others[-1]), columns, height)
        _check_kept(keep or {}, height)
        return ScoreRequest(
            Table(height, columns), rows is not None, routes, depth, deadline_ms, explain, keep
        )

    def from_arrow(self, body: bytes, content_type: str, keep: Sequence[str] = ()) -> ScoreRequest:
        """Decode an Arrow stream or file; its routes, depth, deadline, explain and keep are in the URL."""
        frame = arrow.read(body, content_type, self._limits)
        absent = [name for name in keep if name not in frame.columns]
        if absent:
            raise Problem(400, f"the body has no column {absent[0][:200]!r}, which keep names")
        height, kept = frame.height, {name: frame[name] for name in keep}
        _check_kept(kept, height)
        rows = frame
        frame = frame.drop([name for name in keep if name not in self.columns])
        unknown = [name for name in frame.columns if name not in self.columns]
        if unknown:
            raise self._unknown_field(unknown[0])
        try:
            self._check_text(rows, len(body))
            plain = pl.DataFrame([self._read(series) for series in frame])
            self._check(plain)
            columns: dict[str, Values] = {
                series.name: spelled(series) if self.columns[series.name].kind != "numeric" else series
                for series in plain
            }
        except InputError as error:
            raise Problem(400, error.message, fix=error.fix) from None
        return ScoreRequest(Table(height, columns), False, keep=kept or None)

    def _check_text(self, frame: pl.DataFrame, body_bytes: int) -> None:
        """Refuse columns that share so much text among their rows that reading it row by row would take long."""
        has_lists = any(isinstance(kind, pl.List) for kind in frame.dtypes)
        if not has_lists and frame.height * frame.width * body_bytes <= self._limits.text_bytes:
            return  # No value is longer than the body.
        # polars takes names such as ^x$ for patterns.
        plain = pl.DataFrame([series.alias(str(number)) for number, series in enumerate(frame)])
        lengths = [
            length for name, kind in plain.schema.items() if (length := length_of(name, kind)) is not None
        ]
        if not lengths:
            return
        try:
            size = plain.select(pl.sum_horizontal(lengths)).item()
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a panic is not an Exception
            raise InputError("the body holds text that can't be read", fix="send it in UTF-8") from None
        if size > self._limits.text_bytes:
            raise Problem(
                413,
                f"the text of all rows takes more than {self._limits.text_bytes:,} bytes",
                fix="send the rows in several requests",
            )

    def _read(self, series: pl.Series) -> pl.Series:
        try:
            return plain(self.columns[series.name], series)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # a panic is not an Exception
            raise InputError(
                f"column {series.name!r}, of type {series.dtype}, holds values that can't be read",
                fix="send it as text or as numbers",
            ) from None

    def join(self, tables: Sequence[Table]) -> pl.DataFrame:
        """Return one data frame with every field and the rows of all tables, in order."""
        return pl.DataFrame([self._join_column(field, tables) for field in self.columns.values()])

    def join_lists(self, tables: Sequence[Table]) -> dict[str, list[Any]]:
        """Return the rows of all tables as plain columns, without those that are missing everywhere."""
        names = {name for table in tables for name in table.columns}
        return {
            name: [*chain.from_iterable(cells(table, self.columns[name]) for table in tables)]
            for name in names
        }

    def largest(self, table: Table, contributions_BF: Floats, count: int) -> list[list[Contribution]]:
        """Return the `count` largest contributions to each row of a table, with the values that were sent."""
        return largest(Block(self.join([table]), 1, ORIGIN), self._encoder, contributions_BF, count)

    def _join_column(self, field: Field, tables: Sequence[Table]) -> pl.Series:
        parts = [table.columns.get(field.name) for table in tables]
        kind = pl.Float64() if field.kind == "numeric" else pl.String()
        if len(parts) == 1 and (cell := common_cell(parts[0])) is not None:
            return repeat(field.name, cell, tables[0].height, kind)
        if field.kind == "multi":
            parts = [part if part is None else cut_long(field, part) for part in parts]
        if field.kind == "multi" and any(holds_lists(part) for part in parts):
            series = [as_lists(field, part, table.height) for part, table in zip(parts, tables, strict=True)]
            return pl.concat(series)
        if any(isinstance(part, pl.Series) for part in parts):
            series = [
                part
                if isinstance(part, pl.Series)
                else pl.Series(field.name, [None] * table.height if part is None else part, dtype=kind)
                for part, table in zip(parts, tables, strict=True)
            ]
            return pl.concat(series) if len(series) > 1 else series[0]
        lists = (
            [None] * table.height if part is None else part for part, table in zip(parts, tables, strict=True)
        )
        return pl.Series(field.name, list(chain.from_iterable(lists)), dtype=kind)

    def _add_context(self, context: Sequence[Any], columns: dict[str, Values], height: int) -> None:
        """Give every row the values that were sent once for all of them."""
        spread: dict[str, Values] = {}
        for (name, field), value in zip(self.columns.items(), context, strict=True):
            column = uniform(field, [value])
            if field.kind == "multi" and column is not None:
                column = [as_list(field, column[0])]
            if column is None:
                continue
            if name in columns:
                raise Problem(
                    400,
                    f"field {name!r} is in both the context and the rows",
                    fix="send it in one of the two",
                )
            spread[name] = column
        if height * sum(text_length(column[0]) for column in spread.values()) > self._limits.text_bytes:
            limit = f"more than {self._limits.text_bytes:,} bytes of text"
            raise Problem(
                413,
                f"the context, given to {height:,} rows, is {limit}",
                fix="shorten the context, or send the rows in several requests",
            )
        columns |= {
            name: column.new_from_index(0, height) if isinstance(column, pl.Series) else [*column] * height
            for name, column in spread.items()
        }

    def _common_length(self, columns: Sequence[Any]) -> int:
        """Return the length of all columns; refuse columns that differ in length."""
        lengths = {
            name: len(values)
            for name, values in zip(self.columns, columns, strict=True)
            if values is not None
        }
        if len(set(lengths.values())) > 1:
            first, height = next(iter(lengths.items()))
            other = next(name for name, length in lengths.items() if length != height)
            raise Problem(
                400,
                f"the columns differ in length: {first!r} has {height} values, {other!r} has {lengths[other]}",
                fix="send one value per row in each column, null where it is missing",
            )
        return next(iter(lengths.values()), 0)

    def _check(self, frame: pl.DataFrame) -> None:
        """Refuse values that are too long, too many or infinite; all columns are checked in one query."""
        flaws = {series.name: self._flaw(series) for series in frame}
        has_flaw = frame.select(flaw.any().alias(name) for name, flaw in flaws.items())
        for name, is_wrong in zip(flaws, has_flaw.row(0) if has_flaw.width else (), strict=True):
            if is_wrong:
                row = frame.select(flaws[name].fill_null(False).arg_true().first()).item() + 1
                if frame.schema[name].is_float():
                    fix = "replace it by a number, or send null (missing)"
                    raise Problem(400, f"row {row}, field {name!r}: infinity is not a value", fix=fix)
                length = f"{self._limits.value_length:,} characters"
                is_list = frame.schema[name] == pl.List
                limit = f"{self._limits.values:,} values of {length}" if is_list else length
                raise Problem(
                    400,
                    f"row {row}, field {name!r}: more than {limit}",
                    fix="shorten the value, or leave it out",
                )

    def _flaw(self, series: pl.Series) -> pl.Expr:
        column = pl.col(series.name)
        if series.dtype.is_float():
            return column.is_infinite()
        if series.dtype == pl.String:
            return column.str.len_chars() > self._limits.value_length
        longest = column.list.eval(pl.element().str.len_chars()).list.max()
        return (column.list.len() > self._limits.values) | (longest > self._limits.value_length)

    def _explain(self, error: Exception) -> Problem:
        """Return msgspec's error as a problem that names field and row."""
        message = str(error)
        if not isinstance(error, msgspec.ValidationError):
            return Problem(400, f"the body is not valid JSON: {message}", fix="send UTF-8 JSON")
        match = _PATH.search(message)
        path = match[1] if match else "$"
        complaint = message[: match.start()] if match else message
        unknown = re.match(r"Object contains unknown field `(.*)`$", complaint, re.DOTALL)
        if unknown and (_ROW.match(path) or path in ("$.columns", "$.context")):
            row = _ROW.match(path)
            return self._unknown_field(unknown[1], int(row[1]) + 1 if row else None)
        fix = "see /openapi.json for what a body may hold"
        if unknown:
            fix = "a body may hold rows, columns, context, routes, depth, deadline_ms, explain and keep"
        column = _COLUMN.match(path)
        if "`array` of length <=" in complaint and (path == "$.rows" or (column and not column[2])):
            return Problem(413, f"more than {self._limits.rows:,} rows", fix="send them in several requests")
        return Problem(400, f"{_place(path)}: {complaint}", fix=fix)

    def _unknown_field(self, name: str, row: int | None = None) -> Problem:
        where = f"row {row}: " if row else ""
        names = ", ".join(list(self.columns)[:40]) + (", ..." if len(self.columns) > 40 else "")
        return Problem(400, f"{where}the model has no field {name[:200]!r}", fix=f"fields are {names}")


def refuse_duplicates(body: bytes, objects: Sequence[tuple[Any, ...]]) -> None:
    """Refuse a body in which an object has a key twice, of which the decoder keeps the last.

    `objects` are the values of all objects that were decoded; those without a key are UNSET. Keys in the body are
    counted by the colon after their quote, unless quotes are escaped or stand before a space. If the counts differ,
    which a text that begins with a colon explains too, a slower decoder looks at each object.
    """
    num_keys = sum(len(values) - values.count(UNSET) for values in objects)
    if body.count(b'":') == num_keys and not any(quote in body for quote in _ODD_QUOTES):
        return
    json.loads(body, object_pairs_hook=_unique_keys)


def _check_kept(keep: Mapping[str, Values], height: int) -> None:
    """Refuse columns to keep that have not one value a row, or the name of a score."""
    for name, values in keep.items():
        if name in (*SCORES, CONTRIBUTIONS):
            raise Problem(400, f"{name!r} can't be kept: a score has that name", fix="rename it")
        if len(values) != height:
            raise Problem(400, f"{name[:200]!r}, to be kept, has {len(values):,} values for {height:,} rows")


def _without_unset(values: Sequence[Any]) -> Sequence[Any]:
    """Return values with None for those that were not sent."""
    return [None if value is UNSET else value for value in values] if UNSET in values else values


def _unique_keys(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Problem(400, f"the body holds the key {twice[:200]!r} twice in one object", fix="send it once")


def to_json(
    scores: dict[str, Floats],
    provenance: Provenance,
    *,
    by_rows: bool,
    contributions: list[list[Contribution]] | None = None,
    keep: Mapping[str, Values] | None = None,
) -> bytes:
    """Return the JSON answer, with one object per row or one list per score, and what is to be kept before them."""
    columns: Any = {name: array.tolist() for name, array in scores.items()}
    if contributions is not None:
        columns[CONTRIBUTIONS] = [[entry._asdict() for entry in row] for row in contributions]
    if keep:
        columns = {**keep, **columns}
    if by_rows and keep:
        columns = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    elif by_rows:
        row_type = _RowScores if contributions is None else _ExplainedScores
        columns = [row_type(*row) for row in zip(*columns.values(), strict=True)]
    answer = {
        "rows" if by_rows else "columns": columns,
        "model": provenance.model,
        "routes": provenance.routes,
        "depth": provenance.depth,
        "lowered": provenance.lowered,
    }
    return msgspec.json.encode(answer)


def contributions_column(contributions: list[list[Contribution]]) -> pl.Series:
    """Return the contributions as a column of an Arrow answer: a list of field, value and contribution per row."""
    kind = pl.List(pl.Struct({"field": pl.String, "value": pl.String, "contribution": pl.Float64}))
    return pl.Series(CONTRIBUTIONS, [[entry._asdict() for entry in row] for row in contributions], dtype=kind)


def slice_scores(scores: Scores, start: int, stop: int) -> dict[str, Floats]:
    """Return the scores of rows `start` to `stop`, by their names in the answer."""
    arrays = (scores.probability_B, scores.logit_B, scores.raw_logit_B, scores.disagreement_B)
    return {name: array[start:stop] for name, array in zip(SCORES, arrays, strict=True)}


def _request_type(fields: Sequence[Field], limits: Limits) -> type[msgspec.Struct]:
    """Return a struct that holds just what may be sent; attribute f0 is the schema's first field, and so on."""
    text = Annotated[str, Meta(max_length=limits.value_length)]
    scalar = text | int | float | bool | None
    scalars = Annotated[list[scalar], Meta(max_length=limits.values)] | text | int | float | bool | None
    kinds: dict[str, Any] = {"categorical": scalar, "numeric": float | text | None, "multi": scalars}
    names = {f"f{number}": field.name for number, field in enumerate(fields)}
    options: dict[str, Any] = {"rename": names, "forbid_unknown_fields": True, "gc": False}
    values = [(attribute, kinds[field.kind]) for attribute, field in zip(names, fields, strict=True)]
    lists = [(attribute, Annotated[list[kind], Meta(max_length=limits.rows)]) for attribute, kind in values]  # type: ignore[valid-type]
    absent: Any = UnsetType | None
    row = msgspec.defstruct(
        "Row", [(attribute, kind | absent, UNSET) for attribute, kind in values], **options
    )
    columns = msgspec.defstruct(
        "Columns", [(attribute, kind | absent, UNSET) for attribute, kind in lists], **options
    )
    kept = Annotated[
        dict[text, Annotated[list[scalar], Meta(max_length=limits.rows)]],
        Meta(max_length=MAX_KEPT),
    ]
    count = Annotated[int, Meta(ge=1, le=MAX_COUNT)] | absent
    return msgspec.defstruct(
        "ScoreRequest",
        [
            ("rows", Annotated[list[row], Meta(max_length=limits.rows)] | absent, UNSET),  # type: ignore[valid-type]
            ("columns", columns | absent, UNSET),
            ("context", row | absent, UNSET),
            ("routes", count, UNSET),
            ("depth", count, UNSET),
            ("deadline_ms", Annotated[float, Meta(gt=0, le=limits.deadline_ms)] | absent, UNSET),
            ("explain", count, UNSET),
            ("keep", kept | absent, UNSET),
        ],
        forbid_unknown_fields=True,
        gc=False,
    )


def _place(path: str) -> str:
    """Return msgspec's path in the words of a user.

    >>> _place("$.rows[1].site"), _place("$.columns.site[0]"), _place("$")
    ("row 2, field 'site'", "row 1, field 'site'", 'the body')
    """
    if row := _ROW.match(path):
        return f"row {int(row[1]) + 1}" + (f", field {row[2]!r}" if row[2] else "")
    if column := _COLUMN.match(path):
        row_number = f"row {int(column[2]) + 1}, " if column[2] else ""
        return f"{row_number}field {column[1]!r}"
    if path.startswith("$.context"):
        field = path.removeprefix("$.context").removeprefix(".")
        return f"the context, field {field!r}" if field else "the context"
    return path.removeprefix("$.") if path != "$" else "the body"
