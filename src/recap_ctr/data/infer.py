"""A first schema for a table that nobody has described: every choice with its reason, to be read and corrected.

Text files hold everything as text, so what a column is follows from its values, not from its type. Memory holds the
distinct values of each column, up to a limit.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
import tomli_w

from recap_ctr.config import parse
from recap_ctr.data.encode import NO_CATEGORIES, as_text, column
from recap_ctr.data.prepare import labels, times
from recap_ctr.data.source import Block, Source
from recap_ctr.errors import InputError
from recap_ctr.schema import MAX_NAME, Field, Schema

MAX_VALUES = 2_000_000
PIECE_VALUES = 100_000
FEW = 20
CODES = 1_000
MAX_PIECES = 20
ROW_ID_ROWS, ROW_ID_SHARE = 100, 0.995
CHANCE = 1e-9
NO_VALUE = {
    *("na", "n/a", "#n/a", "null", "nil", "none", "undefined", "unknown", "missing"),
    *("\\n", "?", "-", "--"),
}
ID_WORDS = {
    *("id", "ids", "uid", "gid", "pid", "uuid", "guid", "hash", "md5", "code", "key", "token", "ip", "url"),
    *("zip", "zipcode", "postcode", "postal", "isbn", "sku", "asin"),
}
ID_ENDINGS = re.compile(
    r"(?:user|item|movie|song|ad|app|site|device|product|session|campaign|query|page|shop)id"
)
WEIGHT_NAMES = {"weight", "weights", "sample_weight", "sampleweight", "row_weight"}
WEIGHT = "left out: weight"
TIME_WORDS = {"time", "timestamp", "ts", "date", "datetime"}
TIME_HINTS = {"dt", "hour", "day", "created", "at", "stamp", "when"}  # these need values that look like dates
ISO_DATE = (
    r"^\d{4}[-/](?:0\d|1[0-2])[-/](?:[0-2]\d|3[01])"
    r"(?:[ T](?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?$"
)
_DAY = r"(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_HOUR = r"(?:[01]\d|2[0-3])"
COMPACT_DATE = rf"^(?:(?:19|20)\d\d{_DAY}(?:{_HOUR}(?:[0-5]\d){{0,2}})?|\d\d{_DAY}{_HOUR})$"
EPOCH = (6.0e8, 4.2e9)  # seconds: 1989 to 2103


@dataclass(frozen=True)
class Finding:
    """What a column was taken for, and why."""

    column: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Inferred:
    """A schema and the findings it follows from, one for each column in the table's order."""

    schema: Schema
    findings: tuple[Finding, ...]
    origin: str
    rows: int

    def to_toml(self) -> str:
        """The schema as a file to read: above each setting stands its reason."""
        found = {finding.column: finding for finding in self.findings}
        lines = [
            f"# Inferred from {self.rows:,} rows of {_comment(self.origin)}.",
            "# Check each reason: what you know of the columns counts for more.",
            f"format = {self.schema.format}",
        ]
        for role, name in self.schema.roles.items():
            lines += ["", f"# {_comment(found[name].reason)}", _setting(role, name)]
        for finding in self.findings:
            if finding.verdict == WEIGHT:
                lines += ["", f"# {_comment(finding.reason)}", f"# {_setting('weight', finding.column)}"]
        if self.schema.columns is not None:
            lines += ["", "# The files have no header line.", _setting("columns", self.schema.columns)]
        left = [finding for finding in self.findings if finding.verdict.startswith("left out")]
        if left:
            lines += ["", "# Columns left out:"]
            lines += [f"#   {name.column!r}: {_comment(_why(name))}" for name in left]
        for field in self.schema.fields:
            values = field.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
            lines += [
                "",
                f"# {_comment(found[field.name].reason)}",
                "[[fields]]",
                tomli_w.dumps(values).rstrip(),
            ]
        return "\n".join(lines) + "\n"


def _setting(name: str, value: str | Sequence[str]) -> str:
    return tomli_w.dumps({name: value}).rstrip()


def _comment(text: str) -> str:
    """One line: a column's name or value may hold anything, a comment no line end."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _why(finding: Finding) -> str:
    return f"{finding.verdict.removeprefix('left out: ')} ({finding.reason})"


def infer(source: Source, label: str, *, max_rows: int = 1_000_000) -> Inferred:
    """Propose a schema from the first `max_rows` rows."""
    columns: list[_Column] = []
    rows = clicks = taken = 0
    origin, whole = "the source", True
    for block, size in source.blocks():
        part = Block(block.frame.head(max_rows - rows), block.first_row, block.origin)
        clicked = pl.Series(labels(part, label))
        if not columns:
            columns = [_Column(name) for name in part.frame.columns]
            origin = part.origin
        for gathered in columns:
            series = column(part, gathered.name, "a column of the rows before")
            gathered.add(series.alias(""), clicked)
        rows, clicks = rows + part.frame.height, clicks + int(clicked.sum())
        taken += size * part.frame.height // block.frame.height
        if rows >= max_rows:
            whole = False
            break
    if rows == 0:
        raise InputError("the source holds no rows")
    total = rows if whole else max(rows, round(rows * source.total_bytes / max(taken, 1)))
    judge = _Judge(label, rows, clicks, total)
    schema, findings = judge.schema(columns, source.columns)
    return Inferred(schema, findings, origin, rows)


class _Column:
    """What the rows say of one column, gathered block by block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.type: pl.DataType = pl.Null()
        self.missing = self.missing_clicks = 0
        self.capped = False
        self.lengths: Counter[int] = Counter()
        self.rises = self.falls = 0
        self._last: pl.Series | None = None
        self._counts = pl.DataFrame(schema={"value": pl.String, "count": pl.Int64, "clicks": pl.Int64})

    def add(self, series: pl.Series, clicked: pl.Series) -> None:
        if self.type == pl.Null:
            self.type = series.dtype
        if not self.is_readable:
            return
        if isinstance(series.dtype, (pl.List, pl.Array)):
            lists = series.cast(pl.List(series.dtype.inner))
            sizes = lists.list.len().fill_null(0)
            self.lengths.update(dict(sizes.value_counts().iter_rows()))
            self._miss(sizes == 0, clicked)
            filled = sizes > 0
            clicked = pl.Series(np.repeat(clicked.to_numpy(), sizes.to_numpy()))
            text = as_text(lists.filter(filled).explode())
        else:
            text = as_text(series)
            self._miss(text.is_null(), clicked)
            self._follow(text)
        counted = (
            pl.DataFrame({"value": text, "clicks": clicked})
            .drop_nulls()
            .group_by("value")
            .agg(count=pl.len().cast(pl.Int64), clicks=pl.col("clicks").cast(pl.Int64).sum())
        )
        merged = pl.concat([self._counts, counted.select(self._counts.columns)])
        self._counts = merged.group_by("value").agg(pl.col("count", "clicks").sum())
        if self._counts.height > MAX_VALUES:
            self.capped = True
            self._counts = self._sorted().head(MAX_VALUES)

    def _miss(self, absent: pl.Series, clicked: pl.Series) -> None:
        self.missing += int(absent.sum())
        self.missing_clicks += int(clicked.filter(absent).sum())

    def _follow(self, text: pl.Series) -> None:
        """Count steps up and down: ids given in order and times rise with the rows."""
        numbers = text.cast(pl.Float64, strict=False)
        steps = (numbers if numbers.count() else text).drop_nulls()
        if self._last is not None and self._last.dtype == steps.dtype:
            steps = pl.concat([self._last, steps])
        self.rises += int((steps > steps.shift()).sum())
        self.falls += int((steps < steps.shift()).sum())
        self._last = steps.tail(1)

    def _sorted(self) -> pl.DataFrame:
        return self._counts.sort(["count", "value"], descending=[True, False])

    # What follows is asked once all rows are in.

    @cached_property
    def counts(self) -> pl.DataFrame:
        return self._sorted()

    @property
    def distinct(self) -> int:
        return self._counts.height

    @cached_property
    def singletons(self) -> int:
        return int((self.counts["count"] == 1).sum())

    @property
    def is_readable(self) -> bool:
        inner = self.type.inner if isinstance(self.type, (pl.List, pl.Array)) else self.type
        return inner not in NO_CATEGORIES

    @property
    def is_list(self) -> bool:
        return bool(self.lengths)

    @cached_property
    def _parsed(self) -> tuple[pl.Series | None, tuple[str, ...]]:
        text = self.counts["value"].str.strip_chars()
        numbers = text.cast(pl.Float64, strict=False)
        words = text.filter(numbers.is_null()).unique().to_list() if self.type != pl.Boolean else []
        present = numbers.drop_nulls().drop_nans()
        coded = text.str.contains(r"^[+-]?0\d").any()  # 00501 is a code, however much it looks like a number
        if self.is_list or coded or not len(present) or not {word.lower() for word in words} <= NO_VALUE:
            return None, ()
        return present, tuple(sorted(words))

    @property
    def numbers(self) -> pl.Series | None:
        """The distinct values as numbers, if that is what they are."""
        return self._parsed[0]

    @property
    def no_value(self) -> tuple[str, ...]:
        """Words among the numbers that say there is none."""
        return self._parsed[1]

    @cached_property
    def is_integer(self) -> bool:
        return self.numbers is not None and bool((self.numbers == self.numbers.floor()).all())

    @property
    def is_ordered(self) -> bool:
        steps = self.rises + self.falls
        return steps > 0 and min(self.rises, self.falls) <= 0.05 * steps

    @property
    def words(self) -> set[str]:
        """The parts of the name: user_id, UserID and user-id are `user` and `id`."""
        return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*", self.name)}

    @property
    def is_id(self) -> bool:
        name = ID_ENDINGS.search(self.name.lower()) or self.words & ID_WORDS
        # Beyond 2^53 numbers lose their last digits: what is that exact is a name, no measurement.
        return bool(name) or (self.numbers is not None and bool((self.numbers.abs() > 2.0**53).any()))

    @property
    def kind(self) -> str:
        if self.is_list:
            return "list"
        if self.type.is_temporal():
            return "date or time"
        if self.type == pl.Boolean:
            return "true/false"
        return "text" if self.numbers is None else "integer" if self.is_integer else "number"


@dataclass(frozen=True)
class _Pieces:
    separator: str
    max_len: int
    distinct: int
    singletons: int

    @property
    def why(self) -> str:
        return "the most that is proposed" if self.max_len == MAX_PIECES else "enough for 95% of the rows"


@dataclass(frozen=True)
class _Judge:
    """The rules, in the order in which they are asked; the first that applies decides."""

    label: str
    rows: int
    clicks: int
    total: int

    def schema(
        self, columns: Sequence[_Column], names: Sequence[str] | None
    ) -> tuple[Schema, tuple[Finding, ...]]:
        dated = [gathered for gathered in columns if gathered.name != self.label and self._is_time(gathered)]
        usable = [gathered for gathered in dated if self._orders(gathered) and not self._leak(gathered)]
        time = max(usable, key=lambda gathered: (gathered.is_ordered, gathered.distinct), default=None)
        findings: list[Finding] = []
        fields: list[Field] = []
        row_id: str | None = None
        for gathered in columns:
            verdict, reason, field = self._column(gathered, gathered in dated, time)
            if verdict == "row_id" and row_id is not None:
                verdict = "left out: identifies rows"
            elif verdict == "row_id":
                row_id = gathered.name
            findings.append(Finding(gathered.name, verdict, f"{self._describe(gathered)}; {reason}"))
            if field is not None:
                fields.append(field)
        if not fields:
            reasons = "".join(f"\n  {found.column!r}: {found.verdict}, {found.reason}" for found in findings)
            raise InputError(f"no column can serve as a field{reasons}", fix="write the schema by hand")
        values = {
            "label": self.label,
            "row_id": row_id,
            "time": None if time is None else time.name,
            "columns": None if names is None else tuple(names),
            "fields": fields,
        }
        return parse(Schema, values, "the inferred schema"), tuple(findings)

    def _describe(self, gathered: _Column) -> str:
        values = "1 value" if gathered.distinct == 1 else f"{gathered.distinct:,} values"
        values = f"over {values}" if gathered.capped else values
        missing = f"{gathered.missing / self.rows:.2%} missing" if gathered.missing else "none missing"
        return f"{gathered.kind}, {values}, {missing}"

    def _column(self, gathered: _Column, dated: bool, time: _Column | None) -> tuple[str, str, Field | None]:
        name = gathered.name
        if name == self.label:
            share = f"{self.clicks / self.rows:.2%} of the rows are clicks"
            return "label", share if self._two_classes else f"{share}: ONE CLASS ONLY", None
        if not name or len(name) > MAX_NAME:
            return "left out: its name", f"a field's name has 1 to {MAX_NAME} characters", None
        if not gathered.is_readable:
            return "left out: its type", f"{gathered.type} holds no categories", None
        if gathered.distinct == 0:
            return "left out: no values", "it tells nothing", None
        if leak := self._leak(gathered):
            return (
                "left out: COPIES THE LABEL",
                f"{leak}; it must be known before the click to be of use",
                None,
            )
        if name.lower() in WEIGHT_NAMES and self._is_weight(gathered):
            return WEIGHT, "it may hold row weights; if so, name it as the weight", None
        if dated:
            return self._time(gathered, time)
        if gathered.distinct == 1 and not gathered.missing and not gathered.is_list:
            return "left out: constant", f"{gathered.counts['value'][0]!r} in every row tells nothing", None
        if (pieces := self._pieces(gathered)) is not None:
            return self._multi(gathered, pieces)
        if self._identifies_rows(gathered):
            if gathered.missing:
                return (
                    "left out: identifies rows",
                    "nearly every row has its own value: nothing to learn",
                    None,
                )
            return "row_id", "nearly every row has its own value: it names the row and predicts nothing", None
        return self._value(gathered)

    @property
    def _two_classes(self) -> bool:
        return 0 < self.clicks < self.rows

    def _leak(self, gathered: _Column) -> str | None:
        """How the column gives the label away, if it does."""
        absent = (gathered.missing, gathered.missing_clicks)
        present = (self.rows - absent[0], self.clicks - absent[1])
        if self._decides([absent, present]):
            return f"missing exactly where the label is {int(absent[1] > 0)}"
        if gathered.is_list or gathered.distinct == 0:
            return None
        pairs = gathered.counts.select("count", "clicks").head(FEW).rows()
        if gathered.distinct <= FEW and self._decides([absent, *pairs]):
            return "each of its values has one label"
        value, count, clicks = gathered.counts.row(0)
        if self._decides([(count, clicks), (self.rows - count, self.clicks - clicks)]):
            return f"{value!r} exactly where the label is {int(clicks > 0)}"
        return None

    def _decides(self, groups: Iterable[tuple[int, int]]) -> bool:
        """Whether each group of (rows, clicks) has one label, and that is no accident."""
        if not self._two_classes:
            return False
        rate = self.clicks / self.rows
        chance = 0.0
        for count, clicks in groups:
            if 0 < clicks < count:
                return False
            chance += float(np.logaddexp(count * np.log(rate), count * np.log1p(-rate))) if count else 0.0
        return chance < math.log(CHANCE)

    def _is_weight(self, gathered: _Column) -> bool:
        numbers = gathered.numbers
        return numbers is not None and not gathered.missing and bool((numbers >= 0).all())

    def _is_time(self, gathered: _Column) -> bool:
        if gathered.is_list or gathered.distinct == 0:
            return False
        if gathered.type in (pl.Date, pl.Datetime):
            return True
        text = gathered.counts["value"]
        if gathered.numbers is None:
            return bool(text.str.contains(ISO_DATE).all())
        ends = any(word.endswith(("time", "date", "timestamp")) for word in gathered.words)
        if not ends and not gathered.words & (TIME_WORDS | TIME_HINTS):
            return False
        units = (
            gathered.numbers.is_between(EPOCH[0] * unit, EPOCH[1] * unit).all() for unit in (1, 1e3, 1e6, 1e9)
        )
        named = ends or bool(gathered.words & TIME_WORDS)
        return (
            any(units)
            or bool(text.str.contains(COMPACT_DATE).all())
            or (named and gathered.distinct > FEW and gathered.is_ordered)
        )

    def _orders(self, gathered: _Column) -> bool:
        """Whether a split in time order could use the column: each row has a time, in a form that is read."""
        if gathered.type not in (pl.Date, pl.Datetime):
            try:
                times(Block(gathered.counts, 1, ""), "value")
            except InputError:
                return False
        return not gathered.missing

    def _time(self, gathered: _Column, time: _Column | None) -> tuple[str, str, Field | None]:
        if gathered is time:
            return "time", "for splits in time order and drift; no feature, its values don't come again", None
        if time is None or not self._orders(gathered):
            return "left out: time", "with gaps, or dates in another form, it can't order the rows", None
        return "left out: time", f"{time.name!r} has more moments, or follows the rows better", None

    def _identifies_rows(self, gathered: _Column) -> bool:
        counted = int(gathered.counts["count"].sum())
        if self.rows - gathered.missing < ROW_ID_ROWS or gathered.distinct < ROW_ID_SHARE * counted:
            return False
        if gathered.numbers is None:
            return True
        # A measurement has distinct values too, once it is fine enough; an id has the name, or comes in order.
        return gathered.is_integer and (gathered.is_id or gathered.is_ordered)

    def _pieces(self, gathered: _Column) -> _Pieces | None:
        """How several values share a cell, if they do."""
        if gathered.is_list:
            filled = {length: count for length, count in gathered.lengths.items() if length}
            max_len = _percentile(list(filled), list(filled.values()))
            return _Pieces("", max_len, gathered.distinct, gathered.singletons)
        if gathered.numbers is not None or gathered.kind != "text":
            return None
        table = gathered.counts.head(PIECE_VALUES)
        rows = int(table["count"].sum())
        best, found = 0.0, None
        for separator in "|^; ,":
            has = table["value"].str.contains(separator, literal=True)
            share = int(table.filter(has)["count"].sum()) / rows
            prose = separator in " ,"  # also stands inside plain values
            if share < (0.05 if prose else 0.01):
                continue
            split = table.select(pl.col("value").str.split(separator), "count")
            flat = split.explode("value").filter(pl.col("value") != "")
            pieces = flat.group_by("value").agg(pl.col("count").sum())
            repeats = flat.height / max(pieces.height, 1)
            if repeats < (5 if prose else 1.5) or (prose and 2 * pieces.height > table.height):
                continue
            if found is None or (share > best and not prose):
                max_len = _percentile(split["value"].list.len().to_list(), table["count"].to_list())
                once = int((pieces["count"] == 1).sum())
                best, found = share, _Pieces(separator, max_len, pieces.height, once)
        return found

    def _multi(self, gathered: _Column, pieces: _Pieces) -> tuple[str, str, Field]:
        min_count, why = self._min_count(pieces.distinct, pieces.singletons)
        values = {"name": gathered.name, "kind": "multi", "max_len": pieces.max_len, "min_count": min_count}
        how = "lists"
        if pieces.separator:
            values["separator"] = pieces.separator
            how = f"values joined by {pieces.separator!r}"
        reason = f"{how}, {pieces.distinct:,} different ones; max_len {pieces.max_len}, {pieces.why}; {why}"
        return "multi", reason, Field.model_validate(values)

    def _value(self, gathered: _Column) -> tuple[str, str, Field]:
        # A value of its own needs rows to learn from: on average five, where the rows are few.
        few = min(CODES, max(FEW, self.rows // 5))
        if gathered.numbers is not None and not (gathered.is_integer and gathered.is_id):
            if not gathered.is_integer and gathered.distinct > FEW:
                return self._numeric(gathered, f"more than {FEW} values, some not whole")
            if gathered.distinct > few:
                return self._numeric(gathered, f"more than {few:,} whole numbers, and the name is no id's")
        min_count, why = self._min_count(gathered.distinct, gathered.singletons)
        if gathered.numbers is None:
            reason = "no numbers"
        elif gathered.distinct > few:
            reason = "ids, by the name or by their length"
        else:
            reason = "few enough to learn each by itself"
        field = Field.model_validate({"name": gathered.name, "kind": "categorical", "min_count": min_count})
        return "categorical", f"{reason}; {why}", field

    def _numeric(self, gathered: _Column, reason: str) -> tuple[str, str, Field]:
        numbers = gathered.numbers
        assert numbers is not None
        if numbers.is_infinite().any():
            reason += "; HOLDS INFINITY, which is refused: repair it, or list it under missing"
        if gathered.no_value:
            reason += f"; {', '.join(map(repr, gathered.no_value))} taken for missing"
        values = {
            "name": gathered.name, "kind": "numeric", "transform": "quantiles", "missing": gathered.no_value
        }  # fmt: skip
        return "numeric", reason, Field.model_validate(values)

    def _min_count(self, distinct: int, singletons: int) -> tuple[int, str]:
        about = f"{self.total:,}" if self.total == self.rows else f"about {float(f'{self.total:.2g}'):,.0f}"
        if self.total > 5_000_000:
            return 10, f"min_count 10 at {about} rows"
        if self.total >= 100_000:
            return 2, f"min_count 2 at {about} rows"
        if 2 * singletons > distinct:
            return 2, f"min_count 2: {singletons:,} of {distinct:,} occur once"
        return 1, f"min_count 1 at {about} rows"


def _percentile(lengths: Sequence[int], counts: Sequence[int]) -> int:
    """The length that 95% of the rows stay within, of at least two and at most `MAX_PIECES` pieces."""
    order = np.argsort(lengths)
    reached = np.cumsum(np.asarray(counts)[order])
    at = int(np.searchsorted(reached, 0.95 * reached[-1]))
    return int(min(max(np.asarray(lengths)[order][at], 2), MAX_PIECES))
