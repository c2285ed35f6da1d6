"""Propose a schema for a table without one: every choice comes with its reason, to be read and corrected.

Text files hold everything as text, so a column's role follows from its values, not from its type. Memory holds the
distinct values of each column, up to a limit.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.config import parse
from recap_ctr.data.clock import clock_fields
from recap_ctr.data.inferred import LEFT_OUT, WEIGHT, Finding, Inferred, Untimed
from recap_ctr.data.moments import EPOCH_UNITS, find_unit, read_seconds
from recap_ctr.data.roles import (
    NO_LABELS,
    drop_unlabelled,
    label_text,
    read_labels,
    read_times,
    recognise_labels,
    spell_label,
)
from recap_ctr.data.source import Block, Source
from recap_ctr.data.summary import ColumnSummary
from recap_ctr.errors import InputError
from recap_ctr.schema import MAX_NAME, Field, Schema

PIECE_VALUES = 100_000
FEW_VALUES = 20
MAX_CODES = 1_000
MAX_PIECES = 20
ROW_ID_ROWS, ROW_ID_SHARE = 100, 0.995
COINCIDENCE = 1e-9  # a column that gives the label away by chance is less probable than this
WEIGHT_NAMES = {"weight", "weights", "sample_weight", "sampleweight", "row_weight"}
IDS_BY_VALUES = "ids: spread evenly, and each predicts clicks where its neighbours do not"
LISTS_OF_NUMBERS = (
    "fractions, such as those of an embedding, are no categories; if some of them matter, write each as a numeric"
    " column"
)
NUMBERS_WITH_COMMAS = (
    "write it with a point for decimals and nothing for thousands; if it is a list, make it a multi field with"
    " separator ','"
)
NUMBERS_WITH_SIGNS = (
    "write plain numbers, such as 12.30; if there are several currencies, name them in another column"
)
LISTS_AS_TEXT = "write the values as a|b for a multi field, or save real lists (Parquet, Arrow or JSON lines)"
UNREAD_DATES = f"{LEFT_OUT}dates that can't be read"
WRITE_DATES = "write it like 2026-01-31 23:59:00"
THEN_SPLIT = "then use --split time, which will be the default"
FILL_TIMES = f"drop those rows or fill in their times, {THEN_SPLIT}"
TIME_WORDS = {"time", "timestamp", "ts", "date", "datetime"}
TIME_HINTS = {  # These need values that look like dates.
    *("dt", "hour", "day", "created", "at", "stamp", "when"),
    *("epoch", "unix", "utc", "moment", "seen", "logged", "started"),
}
SAMPLE_ROWS = 1_000  # of a block, to compare columns row by row


@dataclass(frozen=True)
class Named:
    """The columns that a user names, and how the label is read."""

    label: str
    positive: str | None = None
    """The value of the label that means a click."""
    negative: str | None = None
    """The value that means none; if it is None, all values but `positive` do."""
    weight: str | None = None
    group: str | None = None
    drop_unlabelled: bool = False
    scores: str | None = None
    """A column with the scores of another model, which is no field."""
    ignore: tuple[str, ...] = ()
    """Columns that must teach nothing."""

    def roles(self) -> list[tuple[str, str]]:
        """Return the columns that the user has named beside the label, each after what it is named as."""
        roles = [("weight", self.weight), ("group", self.group), ("scores", self.scores)]
        return [(role, name) for role, name in roles if name is not None] + [
            ("ignored", name) for name in self.ignore
        ]


def infer(
    source: Source,
    label: str,
    *,
    positive: str | None = None,
    weight: str | None = None,
    group: str | None = None,
    drop_unlabelled: bool = False,
    scores: str | None = None,
    ignore: Sequence[str] = (),
    max_rows: int = 1_000_000,
) -> Inferred:
    """Propose a schema from the first `max_rows` rows of a table, in files or in memory.

    `positive` is the value of the label that means a click; without it, 0/1, true/false and words such as yes/no or
    click/skip are recognised. `weight` and `group` are columns for these roles. `drop_unlabelled` leaves out rows
    without a label, which are refused otherwise. `scores` is a column with the scores of another model. `ignore` names
    columns that must teach nothing, such as those that are known only after the click.
    """
    named = Named(label, positive, None, weight, group, drop_unlabelled, scores, tuple(ignore))
    _refuse_ignored_roles(named)
    blocks, named = _recognise(_labelled_blocks(source, named, max_rows), named)
    columns: list[ColumnSummary] = []
    samples: list[pl.DataFrame] = []
    rows = clicks = bytes_read = 0
    origin = "the source"
    for part, size in blocks:
        clicked = pl.Series(read_labels(part, label, named.positive, named.negative))
        if not columns:
            columns = [ColumnSummary(name) for name in part.frame.columns]
            origin = part.origin
            for role, name in named.roles():
                part.column(name, role)
        for column in columns:
            series = part.column(column.name, "a column of the earlier rows")
            column.add(series.alias(""), clicked)
        samples.append(part.frame.gather_every(max(part.frame.height // SAMPLE_ROWS, 1)))
        rows, clicks = rows + part.frame.height, clicks + int(clicked.sum())
        bytes_read += size
    if rows == 0:
        raise InputError("the source holds no rows" + (" with a label" if drop_unlabelled else ""))
    is_whole = rows < max_rows
    total = rows if is_whole else max(rows, round(rows * source.total_bytes / max(bytes_read, 1)))
    rules = _Rules(named, rows, clicks, total)
    if is_whole and positive is not None and clicks == 0:
        rules.refuse_positive(next(column for column in columns if column.name == label))
    schema, findings = rules.schema(columns, source, samples)
    notes = []
    if positive is None and named.positive is not None:
        notes = [f"label {label!r}: {named.positive!r} counts as a click; pass --positive to choose"]
    untimed = None if schema.time else rules.untimed(columns, findings, is_whole=is_whole)
    return Inferred(schema, findings, origin, rows, tuple(notes), untimed)


def _refuse_ignored_roles(named: Named) -> None:
    """Refuse to ignore a column that is needed."""
    for role, name in [("label", named.label), *named.roles()]:
        if role != "ignored" and name in named.ignore:
            raise InputError(
                f"column {name!r} is named as the {role} and as a column to ignore",
                fix="remove one of the two",
            )


def _labelled_blocks(source: Source, named: Named, max_rows: int) -> Iterator[tuple[Block, int]]:
    """Yield the first rows of a source, each block with its bytes; leave out rows without a label on request."""
    rows = 0
    for block, size in source.blocks():
        part = replace(block, frame=block.frame.head(max_rows - rows))
        size = size * part.frame.height // block.frame.height
        if named.drop_unlabelled:
            part = drop_unlabelled(part, named.label)
        rows += part.frame.height
        if part.frame.height:
            yield part, size
        if rows >= max_rows:
            return


def _recognise(
    blocks: Iterator[tuple[Block, int]], named: Named
) -> tuple[Iterable[tuple[Block, int]], Named]:
    """Return the same blocks, and the names with the values of the label that stand for a click and for none.

    Blocks are read ahead until the label has two values, since a log may be sorted by it.
    """
    if named.positive is not None:
        return blocks, replace(named, positive=spell_label(named.positive))
    read_ahead: list[tuple[Block, int]] = []
    values: set[str] = set()
    for part, size in blocks:
        read_ahead.append((part, size))
        values |= set(label_text(part, named.label).drop_nulls().unique()) - set(NO_LABELS)
        if len(values) > 1:
            break
    meaning = recognise_labels(values, named.label)
    if meaning is not None:
        named = replace(named, positive=meaning[0], negative=meaning[1])
    return chain(read_ahead, blocks), named


@dataclass(frozen=True)
class _Choice:
    """What a column is to be, why, and its field if it becomes one."""

    verdict: str
    reason: str
    field: Field | None = None


@dataclass(frozen=True)
class _Pieces:
    """How several values share a cell."""

    separator: str  # empty for lists
    max_len: int
    num_distinct: int
    num_singletons: int


@dataclass(frozen=True)
class _Rules:
    """The rules that turn summaries of the columns into a schema; the first rule that applies decides."""

    named: Named
    rows: int
    clicks: int
    total: int
    """Rows of the whole source, estimated if only its first rows were read."""

    def refuse_positive(self, label: ColumnSummary) -> None:
        """Raise the error that no row has the user's value for a click."""
        listed = ", ".join(map(repr, label.counts["value"].head(5)))
        raise InputError(
            f"the label {label.name!r} is never {self.named.positive!r}; its values are {listed}",
            fix="correct --positive",
        )

    def schema(
        self, columns: Sequence[ColumnSummary], source: Source, samples: Sequence[pl.DataFrame]
    ) -> tuple[Schema, tuple[Finding, ...]]:
        """Return the schema and the findings for the columns of a source; `samples` are some of its rows."""
        times = self._times(columns)
        usable = [column for column in times if self._can_order(column) and not self._leak(column)]
        time = max(usable, key=lambda column: (column.is_ordered, column.num_distinct), default=None)
        findings: list[Finding] = []
        fields: list[Field] = []
        row_id: str | None = None
        for column in columns:
            choice = self._choose(column, column in times, time)
            if choice.verdict == "row_id" and row_id is not None:
                choice = replace(choice, verdict=f"{LEFT_OUT}identifies rows")
            elif choice.verdict == "row_id":
                row_id = column.name
            reason = f"{self._describe(column)}; {choice.reason}"
            findings.append(Finding(column.name, choice.verdict, reason))
            if choice.field is not None:
                fields.append(choice.field)
        clocks = [column for column in times if not self._refuse(column) and not self._leak(column)]
        clocks.sort(key=lambda column: (column is not time, -column.num_distinct))
        for field, reason in clock_fields(clocks, samples, tuple(fields), [c.name for c in columns]):
            findings.append(Finding(field.name, "categorical", reason))
            fields.append(field)
        if not fields:
            reasons = "".join(f"\n  {item.column!r}: {item.verdict}, {item.reason}" for item in findings)
            raise InputError(f"no column can serve as a field{reasons}", fix="write the schema by hand")
        values = {
            "label": self.named.label,
            "positive": self.named.positive,
            "negative": self.named.negative,
            "row_id": row_id,
            "group": self.named.group,
            "time": None if time is None else time.name,
            "weight": self.named.weight,
            "columns": None if source.columns is None else tuple(source.columns),
            "separator": source.separator,
            "fields": fields,
        }
        return parse(Schema, values, "the inferred schema"), tuple(findings)

    def _times(self, columns: Sequence[ColumnSummary]) -> list[ColumnSummary]:
        """Return the columns of moments."""
        roles = (self.named.label, self.named.weight, self.named.scores, *self.named.ignore)
        return [column for column in columns if column.name not in roles and self._is_time(column)]

    def untimed(
        self, columns: Sequence[ColumnSummary], findings: Sequence[Finding], *, is_whole: bool
    ) -> Untimed | None:
        """Return why the column with the most moments can't order the rows; None if no column holds any."""
        times = [
            column for column in self._times(columns) if not self._refuse(column) and not self._leak(column)
        ]
        if times:
            column = max(times, key=lambda column: column.num_distinct)
            scope = "" if is_whole else ", of those read first"
            return Untimed(f"{column.name!r} {self._why_unordered(column)}{scope}", FILL_TIMES)
        unread = {finding.column for finding in findings if finding.verdict == UNREAD_DATES}
        dates = [column for column in columns if column.name in unread]
        if not dates:
            return None
        column = max(dates, key=lambda column: column.num_distinct)
        return Untimed(
            f"{column.name!r} holds dates such as {column.date_text!r}, which can't be read",
            f"{WRITE_DATES}, {THEN_SPLIT}",
        )

    def _why_unordered(self, column: ColumnSummary) -> str:
        """Return why a column of moments can't order the rows: how many rows lack a time that can be read."""
        values = column.counts["value"]
        unit = find_unit(values)
        unreadable = 0
        if unit is not None:
            unreadable = int(column.counts["count"].filter(read_seconds(values, unit).is_null()).sum())
        count = column.num_missing + unreadable
        if not count:
            return "has moments in a form that can't order the rows"
        return f"has no time in {count:,} of {self.rows:,} rows ({count / self.rows:.1%})"

    def _describe(self, column: ColumnSummary) -> str:
        values = "1 value" if column.num_distinct == 1 else f"{column.num_distinct:,} values"
        values = f"over {values}" if column.is_capped else values
        missing = f"{column.num_missing / self.rows:.2%} missing" if column.num_missing else "none missing"
        return f"{column.kind}, {values}, {missing}"

    def _choose(self, column: ColumnSummary, is_time: bool, time: ColumnSummary | None) -> _Choice:
        """Decide on one column; `time` is the column chosen as the time, if any."""
        name = column.name
        if name == self.named.label:
            return _Choice("label", self._describe_label())
        if name == self.named.weight:
            return _Choice("weight", "named as the weight of the rows")
        if name == self.named.scores:
            return _Choice(f"{LEFT_OUT}scores", "named as the scores of another model")
        if name in self.named.ignore:
            return _Choice(f"{LEFT_OUT}ignored", "named as a column to ignore")
        if (refusal := self._refuse(column)) is not None:
            return refusal
        if leak := self._leak(column):
            return _Choice(f"{LEFT_OUT}COPIES THE LABEL", f"{leak}; a field must be known before the click")
        if name.lower() in WEIGHT_NAMES and self._could_be_weight(column):
            return _Choice(WEIGHT, "it may hold row weights; if so, name it as the weight")
        if is_time:
            return self._choose_time(column, time)
        if (date := column.date_text) is not None:
            return _Choice(
                UNREAD_DATES,
                f"such as {date!r}; {WRITE_DATES}, to split by it and to learn from hour and weekday",
            )
        if column.num_distinct == 1 and not column.num_missing and not column.is_list:
            value = column.counts["value"][0]
            return _Choice(f"{LEFT_OUT}constant", f"every row has {value!r}, so there is nothing to learn")
        if (pieces := self._find_pieces(column)) is not None:
            return self._choose_multi(column, pieces)
        if self._identifies_rows(column):
            reason = "nearly every row has its own value, so there is nothing to learn from it"
            return _Choice(f"{LEFT_OUT}identifies rows" if column.num_missing else "row_id", reason)
        return self._choose_single(column)

    def _describe_label(self) -> str:
        share = f"{self.clicks / self.rows:.2%} of the rows are clicks"
        if self.named.positive is not None:
            other = "any other value" if self.named.negative is None else repr(self.named.negative)
            share = f"{self.named.positive!r} counts as a click, {other} as none; {share}"
        return share if self._has_both_classes else f"{share}: ONE CLASS ONLY"

    def _refuse(self, column: ColumnSummary) -> _Choice | None:
        """Return why a column can't be a field whatever its values mean, if so; else None."""
        if not column.name or len(column.name) > MAX_NAME:
            return _Choice(f"{LEFT_OUT}its name", f"a field's name has 1 to {MAX_NAME} characters")
        if not column.is_readable:
            return _Choice(f"{LEFT_OUT}its type", _explain_type(column.type))
        if column.has_lists_of_fractions:
            return _Choice(f"{LEFT_OUT}lists of numbers", LISTS_OF_NUMBERS)
        if column.num_distinct == 0:
            return _Choice(f"{LEFT_OUT}no values", "there is nothing to learn")
        if (value := column.comma_number) is not None:
            return _Choice(f"{LEFT_OUT}numbers with commas", f"such as {value!r}; {NUMBERS_WITH_COMMAS}")
        if column.num_distinct > FEW_VALUES and (value := column.signed_number) is not None:
            return _Choice(f"{LEFT_OUT}numbers with signs", f"such as {value!r}; {NUMBERS_WITH_SIGNS}")
        if (value := column.list_text) is not None:
            return _Choice(f"{LEFT_OUT}lists as text", f"such as {_shorten(value)!r}; {LISTS_AS_TEXT}")
        return None

    @property
    def _has_both_classes(self) -> bool:
        return 0 < self.clicks < self.rows

    def _leak(self, column: ColumnSummary) -> str | None:
        """Return how the column gives the label away, if it does."""
        missing = (column.num_missing, column.missing_clicks)
        present = (self.rows - missing[0], self.clicks - missing[1])
        if self._separates([missing, present]):
            return f"missing exactly where the label is {int(missing[1] > 0)}"
        if column.is_list or column.num_distinct == 0:
            return None
        groups = column.counts.select("count", "clicks").head(FEW_VALUES).rows()
        if column.num_distinct <= FEW_VALUES and self._separates([missing, *groups]):
            return "each of its values has one label"
        value, count, clicks = column.counts.row(0)
        if self._separates([(count, clicks), (self.rows - count, self.clicks - clicks)]):
            return f"{value!r} exactly where the label is {int(clicks > 0)}"
        return None

    def _separates(self, groups: Iterable[tuple[int, int]]) -> bool:
        """Return whether each group of (rows, clicks) has one label, and that is not a coincidence."""
        if not self._has_both_classes:
            return False
        rate = self.clicks / self.rows
        log_probability = 0.0
        for count, clicks in groups:
            if 0 < clicks < count:
                return False
            if count:
                log_probability += float(np.logaddexp(count * np.log(rate), count * np.log1p(-rate)))
        return log_probability < math.log(COINCIDENCE)

    def _could_be_weight(self, column: ColumnSummary) -> bool:
        numbers = column.numbers
        return numbers is not None and not column.num_missing and bool((numbers >= 0).all())

    def _is_time(self, column: ColumnSummary) -> bool:
        """Return whether the column holds moments: by its type or values, or by its name and its values."""
        if column.is_list or column.num_distinct == 0:
            return False
        if column.type in (pl.Date, pl.Datetime):
            return True
        text = column.counts["value"]
        if column.numbers is None:
            return find_unit(text) == "iso"
        words = column.name_words
        is_named_time = any(word.endswith(("time", "date", "timestamp")) for word in words)
        is_named_time = is_named_time or bool(words & TIME_WORDS)
        if not is_named_time and not words & TIME_HINTS:
            return self._is_clock(column)
        is_counter = is_named_time and column.num_distinct > FEW_VALUES and column.is_ordered
        return is_counter or find_unit(text) is not None

    def _is_clock(self, column: ColumnSummary) -> bool:
        """Return whether a column without the name of a time holds seconds, or parts of them, that rise with the rows.

        An id that counts the rows does so, too, but leaves no gaps.
        """
        numbers = column.numbers
        if numbers is None or column.is_id or column.num_distinct <= FEW_VALUES or not column.is_ordered:
            return False
        span = float(np.ptp(numbers.to_numpy()))
        counts_rows = column.num_distinct == self.rows and span < 2 * self.rows
        return not counts_rows and find_unit(column.counts["value"]) in EPOCH_UNITS

    def _can_order(self, column: ColumnSummary) -> bool:
        """Return whether a split in time order could use the column: every row has a time that can be read."""
        if column.type not in (pl.Date, pl.Datetime):
            try:
                read_times(Block(column.counts, 1, ""), "value")
            except InputError:
                return False
        return not column.num_missing

    def _choose_time(self, column: ColumnSummary, time: ColumnSummary | None) -> _Choice:
        if column is time:
            return _Choice(
                "time", "for splits in time order and drift; not a feature, for its values don't come again"
            )
        left_out = f"{LEFT_OUT}time"
        if time is None or not self._can_order(column):
            return _Choice(left_out, f"it {self._why_unordered(column)}, and so can't order them")
        return _Choice(left_out, f"{time.name!r} has more moments, or follows the rows better")

    def _identifies_rows(self, column: ColumnSummary) -> bool:
        num_counted = int(column.counts["count"].sum())
        if self.rows - column.num_missing < ROW_ID_ROWS or column.num_distinct < ROW_ID_SHARE * num_counted:
            return False
        if column.numbers is None:
            return True
        # Fine measurements have distinct values too; an id has an id's name, or rises with the rows.
        return column.is_integer and (column.is_id or column.is_ordered)

    def _find_pieces(self, column: ColumnSummary) -> _Pieces | None:
        """Return how several values share a cell, if they do."""
        if column.is_list:
            filled = {length: count for length, count in column.lengths.items() if length}
            max_len = _cover_most(list(filled), list(filled.values()))
            return _Pieces("", max_len, column.num_distinct, column.num_singletons)
        if column.numbers is not None or column.kind != "text":
            return None
        table = column.counts.head(PIECE_VALUES)
        best_share, best = 0.0, None
        for separator in "|^; ,":
            share, pieces = _split_values(table, separator)
            may_replace = share > best_share and separator not in " ,"
            if pieces is not None and (best is None or may_replace):
                best_share, best = share, pieces
        return best

    def _choose_multi(self, column: ColumnSummary, pieces: _Pieces) -> _Choice:
        min_count, why_count = self._min_count(pieces.num_distinct, pieces.num_singletons)
        values: dict[str, Any] = {"max_len": pieces.max_len, "min_count": min_count}
        how = "lists"
        if pieces.separator:
            values["separator"] = pieces.separator
            how = f"values joined by {pieces.separator!r}"
        why_length = (
            "the most that is proposed" if pieces.max_len == MAX_PIECES else "enough for 95% of the rows"
        )
        reason = f"{how}, {pieces.num_distinct:,} different ones; max_len {pieces.max_len}, {why_length}; {why_count}"
        return _Choice("multi", reason, _field(column, "multi", **values))

    def _choose_single(self, column: ColumnSummary) -> _Choice:
        """Choose between categories and numbers for a column with one value a row."""
        # A category needs rows to learn from: five on average, if the rows are few.
        few = min(MAX_CODES, max(FEW_VALUES, self.rows // 5))
        is_id = column.is_integer and (column.is_id or (column.num_distinct > few and column.acts_like_id))
        if column.numbers is not None and not is_id:
            if not column.is_integer and column.num_distinct > FEW_VALUES:
                return self._choose_numeric(column, f"more than {FEW_VALUES} values, some not whole")
            if column.num_distinct > few:
                return self._choose_numeric(
                    column, f"more than {few:,} whole numbers, and the name is not that of an id"
                )
            if column.num_distinct > FEW_VALUES and column.has_order:
                return self._choose_numeric(
                    column, "whole numbers that are clicked as often as those next to them"
                )
        min_count, why_count = self._min_count(column.num_distinct, column.num_singletons)
        if column.numbers is None:
            reason = "not numbers"
        elif column.num_distinct > few:
            reason = "ids, by the name or by their length" if column.is_id else IDS_BY_VALUES
        else:
            reason = "few enough to learn each by itself"
        field = _field(column, "categorical", min_count=min_count)
        return _Choice("categorical", f"{reason}; {why_count}", field)

    def _choose_numeric(self, column: ColumnSummary, reason: str) -> _Choice:
        assert column.numbers is not None
        if column.numbers.is_infinite().any():
            reason += "; HOLDS INFINITY, which is refused: repair it, or list it under missing"
        if column.missing_words:
            reason += f"; {', '.join(map(repr, column.missing_words))} taken for missing"
        field = _field(column, "numeric", transform="linear", missing=column.missing_words)
        return _Choice("numeric", reason, field)

    def _min_count(self, num_distinct: int, num_singletons: int) -> tuple[int, str]:
        """Return the proposed min_count and its reason: it grows with the rows, or if most values occur once."""
        total = f"{self.total:,}" if self.total == self.rows else f"about {float(f'{self.total:.2g}'):,.0f}"
        if self.total > 5_000_000:
            return 10, f"min_count 10 at {total} rows"
        if self.total >= 100_000:
            return 2, f"min_count 2 at {total} rows"
        if 2 * num_singletons > num_distinct:
            return 2, f"min_count 2: {num_singletons:,} of {num_distinct:,} occur once"
        return 1, f"min_count 1 at {total} rows"


def _explain_type(kind: pl.DataType) -> str:
    """Return why a type can't be a field, and what to do about it."""
    reason = f"{kind} holds no categories"
    if isinstance(kind, pl.List | pl.Array) and isinstance(kind.inner, pl.Struct):
        return f"{reason}; write a list of plain values for each part of the structs that matters"
    return reason


def _shorten(text: str, length: int = 40) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _field(column: ColumnSummary, kind: str, **values: Any) -> Field:
    return Field.model_validate({"name": column.name, "kind": kind, **values})


def _split_values(table: pl.DataFrame, separator: str) -> tuple[float, _Pieces | None]:
    """Return the share of rows whose value holds the separator, and the pieces, if splitting there makes sense.

    It does if the pieces repeat. Blanks and commas also occur inside plain values, so they need more evidence.
    """
    is_prose = separator in " ,"
    has_separator = table["value"].str.contains(separator, literal=True)
    share = int(table.filter(has_separator)["count"].sum()) / int(table["count"].sum())
    if share < (0.05 if is_prose else 0.01):
        return share, None
    split = table.select(pl.col("value").str.split(separator), "count")
    flat = split.explode("value").filter(pl.col("value") != "")
    counts = flat.group_by("value").agg(pl.col("count").sum())
    repeats = flat.height / max(counts.height, 1)
    if repeats < (5 if is_prose else 1.5) or (is_prose and 2 * counts.height > table.height):
        return share, None
    max_len = _cover_most(split["value"].list.len().to_list(), table["count"].to_list())
    num_singletons = int((counts["count"] == 1).sum())
    return share, _Pieces(separator, max_len, counts.height, num_singletons)


def _cover_most(lengths: Sequence[int], counts: Sequence[int]) -> int:
    """Return the length that 95% of the rows stay within, at least 2 and at most `MAX_PIECES`."""
    order = np.argsort(lengths)
    reached = np.cumsum(np.asarray(counts)[order])
    index = int(np.searchsorted(reached, 0.95 * reached[-1]))
    return int(min(max(np.asarray(lengths)[order][index], 2), MAX_PIECES))
