"""Conversion of bodies to tables and of scores to bodies, for the fields of one artifact.

JSON is checked while it is decoded, by types generated from the schema, so that nothing is built that does not fit. A
table keeps its columns as plain lists until requests are joined, because a data frame per request would cost more than
scoring it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
import numpy as np
import polars as pl
from msgspec import UNSET, Meta, UnsetType

from recap_ctr.data.encode import Encoder, as_numbers
from recap_ctr.data.source import Block
from recap_ctr.data.text import NO_CATEGORIES, as_text, canonical, check_dates, missing_texts
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Floats, Scores
from recap_ctr.inference.explain import Contribution, largest
from recap_ctr.schema import Field
from recap_ctr.serve import arrow
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem

JSON = "application/json"
ORIGIN = "the request"
MAX_COUNT = 1_000_000  # of routes, of steps, and of explained fields
CONTRIBUTIONS = "contributions"
MAX_KEPT = 16  # columns
# Characters of a multi field's column, and of it for each value that the encoder takes, beyond which it is cut.
_LONG_COLUMN, _LONG_VALUE = 1 << 20, 64
_PATH = re.compile(r" - at `(\$.*)`$")
_ROW = re.compile(r"^\$\.rows\[(\d+)\]\.?(.*)$")
_ODD_QUOTES = (b'\\"', b'" ', b'"\t', b'"\r', b'"\n')
_COLUMN = re.compile(r"^\$\.columns\.(.*?)(?:\[(\d+)\])?$")
Values = Sequence[Any] | pl.Series


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one request.

    A column holds text (str), numbers (float) or, for a multi field, lists of text. None is a missing value; a field
    without a column is missing in all rows.
    """

    height: int
    columns: dict[str, Values]


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
            if values is not None and (column := _uniform(field, _without_unset(values))) is not None:
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
                series.name: _spelled(series) if self.columns[series.name].kind != "numeric" else series
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
            length for name, kind in plain.schema.items() if (length := _length_of(name, kind)) is not None
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
            return _plain(self.columns[series.name], series)
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
            name: [*chain.from_iterable(_cells(table, self.columns[name]) for table in tables)]
            for name in names
        }

    def largest(self, table: Table, contributions_BF: Floats, count: int) -> list[list[Contribution]]:
        """Return the `count` largest contributions to each row of a table, with the values that were sent."""
        return largest(Block(self.join([table]), 1, ORIGIN), self._encoder, contributions_BF, count)

    def _join_column(self, field: Field, tables: Sequence[Table]) -> pl.Series:
        parts = [table.columns.get(field.name) for table in tables]
        kind = pl.Float64() if field.kind == "numeric" else pl.String()
        if len(parts) == 1 and (cell := _common_cell(parts[0])) is not None:
            return _repeat(field.name, cell, tables[0].height, kind)
        if field.kind == "multi":
            parts = [part if part is None else _cut_long(field, part) for part in parts]
        if field.kind == "multi" and any(_holds_lists(part) for part in parts):
            series = [_as_lists(field, part, table.height) for part, table in zip(parts, tables, strict=True)]
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
            column = _uniform(field, [value])
            if field.kind == "multi" and column is not None:
                column = [_as_list(field, column[0])]
            if column is None:
                continue
            if name in columns:
                raise Problem(
                    400,
                    f"field {name!r} is in both the context and the rows",
                    fix="send it in one of the two",
                )
            spread[name] = column
        if height * sum(_text_length(column[0]) for column in spread.values()) > self._limits.text_bytes:
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


def _uniform(field: Field, values: Sequence[Any]) -> Values | None:
    """Return JSON values in the one type that a column has; None if all are missing."""
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
    parts = [_cut(field, value) if type(value) is list else [value] for value in values]
    texts = iter(_texts([*chain.from_iterable(parts)]))
    text_parts = [list(islice(texts, len(part))) for part in parts]
    # A value that is not a list is text joined by the field's separator, or missing.
    joined = [part[0] for value, part in zip(values, text_parts, strict=True) if type(value) is not list]
    split = iter(
        as_text(pl.Series(joined, dtype=pl.String), field.missing).str.split(field.separator).to_list()
    )
    return [
        part if type(value) is list else next(split) for value, part in zip(values, text_parts, strict=True)
    ]


def _cut(field: Field, values: list[Any]) -> list[Any]:
    """Return the first `max_len` values of a list that are not missing: what the encoder takes of it.

    A request may hold a thousand values for each of ten thousand rows, or once for all of them.
    """
    missing, numbers = missing_texts(field.missing), _missing_floats(field.missing)
    kept: list[Any] = []
    for value in values:
        # Most missing values are spelled as usual, and a body may hold millions of them.
        if value is None or value in (numbers if type(value) is float else missing):
            continue
        if type(value) is float or canonical(_text(value) or "") not in missing:
            kept.append(value)
            if len(kept) == field.max_len:
                break
    return kept


@cache
def _missing_floats(missing: tuple[str, ...]) -> frozenset[float]:
    """Return the floats whose text means a missing value."""
    texts = missing_texts(missing)
    floats = pl.Series(sorted(texts), dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls()
    spelled = zip(floats, as_text(floats), strict=True)
    return frozenset(number for number, text in spelled if text in texts)


def _cut_long(field: Field, part: Values) -> Values:
    """Return a column of a multi field without the values that the encoder would not take, if it holds many."""
    if _count_characters(part) <= min(_LONG_COLUMN, _LONG_VALUE * field.max_len * len(part)):
        return part
    cells = part.to_list() if isinstance(part, pl.Series) else part
    return [_as_list(field, cell) for cell in cells]


def _count_characters(part: Values) -> int:
    """Return about how much text a column holds; a value in a list has a separator, too."""
    if not isinstance(part, pl.Series):
        return sum(map(_text_length, part))
    flat = part.explode() if part.dtype == pl.List else part
    return len(flat) + int(flat.str.len_bytes().sum())


def _as_list(field: Field, value: str | list[Any] | None) -> list[Any] | None:
    """Return the values of one cell of a multi field, as many as the encoder takes; None if it is missing."""
    if type(value) is str:
        text = canonical(value)
        value = None if text in missing_texts(field.missing) else text.split(field.separator)
    return _cut(field, value) if type(value) is list else None


def _plain(field: Field, series: pl.Series) -> pl.Series:
    """Return an Arrow column as text, floats, or lists of text."""
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
    """Return values as the encoder spells them; all floats in one call, since calls into polars are slow."""
    floats = pl.Series([value for value in values if type(value) is float], dtype=pl.Float64)
    spelled = iter(as_text(floats).to_list() if len(floats) else ())
    return [next(spelled) if type(value) is float else _text(value) for value in values]


def _text(value: str | int | None) -> str | None:
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _text_length(value: object) -> int:
    """Return the characters of a value, or of all values in a list."""
    if type(value) is list:
        return sum(map(_text_length, value))
    return len(value) if type(value) is str else 0


def _cells(table: Table, field: Field) -> Sequence[Any]:
    """Return the values of one column as a plain sequence."""
    values = table.columns.get(field.name)
    if values is None:
        return [None] * table.height
    if field.kind == "multi":
        values = _cut_long(field, values)
    return values.to_list() if isinstance(values, pl.Series) else values


def _holds_lists(part: Values | None) -> bool:
    if isinstance(part, pl.Series):
        return part.dtype == pl.List
    return part is not None and any(type(value) is list for value in part)


def _length_of(name: str, kind: pl.DataType) -> pl.Expr | None:
    """Return the bytes of all text in a column; None if it holds none."""
    column = pl.col(name)
    if isinstance(kind, pl.List):
        column, kind = column.explode(), kind.inner  # type: ignore[assignment]
    if kind not in (pl.String, pl.Categorical, pl.Enum):
        return None
    return column.cast(pl.String).str.len_bytes().sum()


def _common_cell(part: Values | None) -> Any:
    """Return what every row of a column holds, if it is one object: the value of a context; otherwise None."""
    if part is None or isinstance(part, pl.Series) or len(part) < 2:
        return None
    return part[0] if all(cell is part[0] for cell in part) else None


def _repeat(name: str, cell: Any, height: int, kind: pl.DataType) -> pl.Series:
    """Return a column with one value in all rows, whose text is in memory only once."""
    if type(cell) is not list:
        return pl.Series(name, [cell], dtype=kind).new_from_index(0, height)
    if not cell:
        return pl.Series(name, [cell], dtype=pl.List(kind)).new_from_index(0, height)
    # A list that is repeated by `new_from_index` copies the text of its values.
    places = np.tile(np.arange(len(cell), dtype=np.uint32), height)
    flat = pl.Series(name, cell, dtype=kind).gather(places)
    return flat.reshape((height, len(cell))).cast(pl.List(kind))


def _as_lists(field: Field, part: Values | None, height: int) -> pl.Series:
    if part is not None and _holds_lists(part):
        return pl.Series(field.name, part, dtype=pl.List(pl.String))
    text = pl.Series(field.name, [None] * height if part is None else part, dtype=pl.String)
    return as_text(text, field.missing).str.split(field.separator)


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
