"""Bodies to tables and scores to bodies: one codec per content type, made for the fields of one artifact.

JSON is checked while it is decoded, by types that are made of the schema: nothing that doesn't fit is ever built. A
table keeps its columns as plain lists until requests are joined, since a data frame for each would cost more than
its scores.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import Meta

from recap_ctr.data.encode import NO_CATEGORIES, Encoder, as_numbers, as_text, check_dates
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field
from recap_ctr.serve import arrow
from recap_ctr.serve.config import Limits
from recap_ctr.serve.engine import Floats, Scores
from recap_ctr.serve.problem import Problem

JSON = "application/json"
ORIGIN = "the request"
MAX_COUNT = 1_000_000  # of routes, or steps
_PLACE = re.compile(r" - at `(\$.*)`$")
_ROW = re.compile(r"^\$\.rows\[(\d+)\]\.?(.*)$")
_COLUMN = re.compile(r"^\$\.columns\.(.*?)(?:\[(\d+)\])?$")
Values = Sequence[Any] | pl.Series


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one request. A column is text (str), numbers (float), or, of a multi field, lists of text; None is
    missing, and so is a field without a column."""

    height: int
    columns: dict[str, Values]


@dataclass(frozen=True, eq=False)
class Request:
    """What a body asks for."""

    table: Table
    by_rows: bool
    """Whether rows were sent, and are answered, as one object each: JSON only."""
    routes: int | None = None
    depth: int | None = None
    deadline_ms: float | None = None


@dataclass(frozen=True)
class Used:
    """What an answer was made with."""

    model: str
    routes: int
    depth: int | None
    lowered: bool
    """Whether the dial took a cheaper setting than the best one."""


class _RowScores(msgspec.Struct, gc=False):
    probability: float
    logit: float
    raw_logit: float
    disagreement: float


SCORES = _RowScores.__struct_fields__


class Codec:
    """Decodes bodies for one artifact."""

    def __init__(self, encoder: Encoder, limits: Limits) -> None:
        self._limits = limits
        self.fields: dict[str, Field] = {fitted.field.name: fitted.field for fitted in encoder.fields}
        self.request_type = _request_type(list(self.fields.values()), limits)
        self._decode = msgspec.json.Decoder(self.request_type).decode

    def from_json(self, body: bytes) -> Request:
        try:
            asked: Any = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._explain(error) from None
        if (asked.rows is None) == (asked.columns is None):
            raise Problem(400, "the body must hold either rows or columns", fix='send {"rows": [{...}, ...]}')
        if asked.rows is not None:
            height = len(asked.rows)
            given: Iterable[Any] = zip(*map(msgspec.structs.astuple, asked.rows), strict=True)
        else:
            given, height = self._same_length(msgspec.structs.astuple(asked.columns))
        columns: dict[str, Values] = {}
        for (name, field), values in zip(self.fields.items(), given, strict=False):
            if values is not None and (found := _normal(field, values)) is not None:
                columns[name] = found
        if asked.context is not None:
            self._spread(msgspec.structs.astuple(asked.context), columns, height)
        return Request(
            Table(height, columns), asked.rows is not None, asked.routes, asked.depth, asked.deadline_ms
        )

    def from_arrow(self, body: bytes, content_type: str) -> Request:
        """The rows of an Arrow stream or file; settings stand in the address."""
        frame = arrow.read(body, content_type, self._limits)
        unknown = [name for name in frame.columns if name not in self.fields]
        if unknown:
            raise self._unknown(unknown[0])
        try:
            plain = pl.DataFrame([self._read(series) for series in frame])
            self._check(plain)
            columns: dict[str, Values] = {
                series.name: _spelled(series) if self.fields[series.name].kind != "numeric" else series
                for series in plain
            }
        except InputError as error:
            raise Problem(400, error.message, fix=error.fix) from None
        return Request(Table(frame.height, columns), False)

    def _read(self, series: pl.Series) -> pl.Series:
        try:
            return _plain(self.fields[series.name], series)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):  # the latter is no Exception
            raise InputError(
                f"column {series.name!r}, of type {series.dtype}, holds values that can't be read",
                fix="send it as text or as numbers",
            ) from None

    def join(self, tables: Sequence[Table]) -> pl.DataFrame:
        """One data frame with every field, of the rows of several requests."""
        return pl.DataFrame([self._joined(field, tables) for field in self.fields.values()])

    def _joined(self, field: Field, tables: Sequence[Table]) -> pl.Series:
        parts = [table.columns.get(field.name) for table in tables]
        kind = pl.Float64() if field.kind == "numeric" else pl.String()
        if field.kind == "multi" and any(_holds_lists(part) for part in parts):
            series = [_as_lists(field, part, table.height) for part, table in zip(parts, tables, strict=True)]
            return pl.concat(series)
        if any(isinstance(part, pl.Series) for part in parts):
            whole = [
                part
                if isinstance(part, pl.Series)
                else pl.Series(field.name, [None] * table.height if part is None else part, dtype=kind)
                for part, table in zip(parts, tables, strict=True)
            ]
            return pl.concat(whole) if len(whole) > 1 else whole[0]
        lists = (
            [None] * table.height if part is None else part for part, table in zip(parts, tables, strict=True)
        )
        return pl.Series(field.name, list(chain.from_iterable(lists)), dtype=kind)

    def _spread(self, context: Sequence[Any], columns: dict[str, Values], height: int) -> None:
        """Give every row what was sent once for all of them."""
        size = height * sum(map(_weight, context))
        if size > self._limits.held_bytes:
            raise Problem(
                413,
                f"the context, given to {height:,} rows, takes more than {self._limits.held_bytes:,} bytes",
                fix="shorten the context, or send the rows in several requests",
            )
        for (name, field), value in zip(self.fields.items(), context, strict=True):
            one = _normal(field, [value])
            if one is None:
                continue
            if name in columns:
                raise Problem(
                    400,
                    f"field {name!r} stands both in the context and in the rows",
                    fix="send it in one of the two",
                )
            columns[name] = one.new_from_index(0, height) if isinstance(one, pl.Series) else [*one] * height

    def _same_length(self, given: Sequence[Any]) -> tuple[Sequence[Any], int]:
        lengths = {
            name: len(values) for name, values in zip(self.fields, given, strict=True) if values is not None
        }
        if len(set(lengths.values())) > 1:
            first, height = next(iter(lengths.items()))
            other = next(name for name, length in lengths.items() if length != height)
            raise Problem(
                400,
                f"the columns differ in length: {first!r} has {height} values, {other!r} {lengths[other]}",
                fix="send one value a row in each column, null where it is missing",
            )
        return given, next(iter(lengths.values()), 0)

    def _check(self, frame: pl.DataFrame) -> None:
        """All columns in one go: values that are too long or too many, and infinities."""
        flaws = {series.name: self._flaw(series) for series in frame}
        found = frame.select(flaw.any().alias(name) for name, flaw in flaws.items())
        for name, wrong in zip(flaws, found.row(0) if found.width else (), strict=True):
            if wrong:
                row = frame.select(flaws[name].fill_null(False).arg_true().first()).item() + 1
                if frame.schema[name].is_float():
                    fix = "replace it by a value, or send null (missing)"
                    raise Problem(400, f"row {row}, field {name!r}: infinity is not a value", fix=fix)
                few, short = f"{self._limits.values:,} values", f"{self._limits.value_length:,} characters"
                most = f"{few} of {short}" if frame.schema[name] == pl.List else short
                raise Problem(
                    400,
                    f"row {row}, field {name!r}: more than {most}",
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
        """What msgspec found, with field and row by name."""
        message = str(error)
        place = _PLACE.search(message)
        if not isinstance(error, msgspec.ValidationError):
            return Problem(400, f"the body is not valid JSON: {message}", fix="send UTF-8 JSON")
        said = message[: place.start()] if place else message
        unknown = re.match(r"Object contains unknown field `(.*)`$", said, re.DOTALL)
        at = place[1] if place else "$"
        if unknown and (_ROW.match(at) or at in ("$.columns", "$.context")):
            row = _ROW.match(at)
            return self._unknown(unknown[1], int(row[1]) + 1 if row else None)
        fix = "see /openapi.json for what fits"
        if unknown:
            fix = "known are rows, columns, context, routes, depth and deadline_ms"
        column = _COLUMN.match(at)
        if "`array` of length <=" in said and (at == "$.rows" or (column and not column[2])):
            return Problem(413, f"more than {self._limits.rows:,} rows", fix="send them in several requests")
        return Problem(400, f"{_where(at)}: {said}", fix=fix)

    def _unknown(self, name: str, row: int | None = None) -> Problem:
        where = f"row {row}: " if row else ""
        names = ", ".join(list(self.fields)[:40]) + (", ..." if len(self.fields) > 40 else "")
        return Problem(400, f"{where}the model has no field {name[:200]!r}", fix=f"fields are {names}")


def to_json(scores: dict[str, Floats], used: Used, *, by_rows: bool) -> bytes:
    columns: Any = {name: array.tolist() for name, array in scores.items()}
    if by_rows:
        columns = [_RowScores(*row) for row in zip(*columns.values(), strict=True)]
    about = {"model": used.model, "routes": used.routes, "depth": used.depth, "lowered": used.lowered}
    return msgspec.json.encode({"rows" if by_rows else "columns": columns, **about})


def columns_of(scores: Scores, start: int, stop: int) -> dict[str, Floats]:
    """The scores of some rows, by the names they are answered under."""
    arrays = (scores.probability_B, scores.logit_B, scores.raw_logit_B, scores.disagreement_B)
    return {name: array[start:stop] for name, array in zip(SCORES, arrays, strict=True)}


def _request_type(fields: Sequence[Field], limits: Limits) -> type[msgspec.Struct]:
    """A struct that holds just what may be sent: attribute f0 is the schema's first field, and so on."""
    text = Annotated[str, Meta(max_length=limits.value_length)]
    one = text | int | float | bool | None
    several = Annotated[list[one], Meta(max_length=limits.values)] | text | int | float | bool | None
    kinds: dict[str, Any] = {"categorical": one, "numeric": float | text | None, "multi": several}
    names = {f"f{number}": field.name for number, field in enumerate(fields)}
    options: dict[str, Any] = {"rename": names, "forbid_unknown_fields": True, "gc": False}
    values = [(at, kinds[field.kind]) for at, field in zip(names, fields, strict=True)]
    lists = [(at, Annotated[list[kind], Meta(max_length=limits.rows)]) for at, kind in values]  # type: ignore[valid-type]
    row = msgspec.defstruct("Row", [(at, kind, None) for at, kind in values], **options)
    columns = msgspec.defstruct("Columns", [(at, kind | None, None) for at, kind in lists], **options)
    count = Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None
    return msgspec.defstruct(
        "ScoreRequest",
        [
            ("rows", Annotated[list[row], Meta(max_length=limits.rows)] | None, None),  # type: ignore[valid-type]
            ("columns", columns | None, None),
            ("context", row | None, None),
            ("routes", count, None),
            ("depth", count, None),
            ("deadline_ms", Annotated[float, Meta(gt=0, le=limits.deadline_ms)] | None, None),
        ],
        forbid_unknown_fields=True,
        gc=False,
    )


def _normal(field: Field, values: Sequence[Any]) -> Values | None:
    """The values in the one type that their column has; None if all are missing."""
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if not kinds:
        return None
    if field.kind == "numeric":
        if kinds == {float}:
            return values
        text = [repr(value) if type(value) is float else value for value in values]
        block = Block(pl.DataFrame([pl.Series(field.name, text, dtype=pl.String)]), 1, ORIGIN)
        try:
            return as_numbers(block, field)
        except InputError as error:
            raise Problem(400, error.message, fix=error.fix) from None
    if list not in kinds:
        return values if kinds == {str} else _texts(values)
    parts = [value if type(value) is list else [value] for value in values]
    texts = iter(_texts([*chain.from_iterable(parts)]))
    split = [list(islice(texts, len(part))) for part in parts]
    # A row that holds no list holds text that its separator splits, or nothing.
    whole = [part[0] for value, part in zip(values, split, strict=True) if type(value) is not list]
    found = iter(
        as_text(pl.Series(whole, dtype=pl.String), field.missing).str.split(field.separator).to_list()
    )
    return [part if type(value) is list else next(found) for value, part in zip(values, split, strict=True)]


def _plain(field: Field, series: pl.Series) -> pl.Series:
    """A column of Arrow as text, floats, or lists of text."""
    kind = series.dtype
    if field.kind == "numeric":
        if kind.is_numeric() or kind in (pl.Boolean, pl.Null):
            return series.cast(pl.Float64)
        return as_numbers(Block(series.to_frame(), 1, ORIGIN), field).alias(field.name)
    if field.kind == "multi" and isinstance(kind, pl.List):
        if kind.inner == pl.String:
            return series
        check_dates(series.explode(), series.name)
        return series.list.eval(pl.element().map_batches(as_text, return_dtype=pl.String))
    if kind.is_float() or kind == pl.String:
        return series
    return as_text(series) if kind in NO_CATEGORIES or kind.is_temporal() else series.cast(pl.String)


def _spelled(series: pl.Series) -> pl.Series:
    return as_text(series) if series.dtype.is_float() else series


def _texts(values: Sequence[Any]) -> list[str | None]:
    """Values as the encoder would write them; floats all in one go, since a call into polars costs more than one."""
    floats = pl.Series([value for value in values if type(value) is float], dtype=pl.Float64)
    spelled = iter(as_text(floats).to_list() if len(floats) else ())
    return [next(spelled) if type(value) is float else _text(value) for value in values]


def _text(value: str | int | None) -> str | None:
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _weight(value: object) -> int:
    """About the bytes that a value takes in a column."""
    if type(value) is list:
        return sum(map(_weight, value))
    return 16 + (len(value) if type(value) is str else 0)


def _holds_lists(part: Values | None) -> bool:
    if isinstance(part, pl.Series):
        return part.dtype == pl.List
    return part is not None and any(type(value) is list for value in part)


def _as_lists(field: Field, part: Values | None, height: int) -> pl.Series:
    if part is not None and _holds_lists(part):
        return pl.Series(field.name, part, dtype=pl.List(pl.String))
    text = pl.Series(field.name, [None] * height if part is None else part, dtype=pl.String)
    return as_text(text, field.missing).str.split(field.separator)


def _where(at: str) -> str:
    if row := _ROW.match(at):
        return f"row {int(row[1]) + 1}" + (f", field {row[2]!r}" if row[2] else "")
    if column := _COLUMN.match(at):
        row_number = f"row {int(column[2]) + 1}, " if column[2] else ""
        return f"{row_number}field {column[1]!r}"
    if at.startswith("$.context"):
        return (
            f"the context, field {at[len('$.context.') :]!r}"
            if len(at) > len("$.context.")
            else "the context"
        )
    return at.removeprefix("$.") if at != "$" else "the body"
