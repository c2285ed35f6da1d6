"""The contract between a raw table and everything after it: the role of each column."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field as Constraint
from pydantic import PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from recap_ctr.config import Frozen, parse, read_toml

MAX_NAME = 200
MAX_WIDTH = 65_536
"""Ids of a row, of all its fields together: a multi field has `max_len`, any other one."""
TimeUnit = Literal[
    "iso",
    "s",
    "ms",
    "us",
    "ns",
    "yyyymmdd",
    "yymmddhh",
    "yyyymmddhh",
    "yyyymmddhhmm",
    "yyyymmddhhmmss",
]
"""How a moment is written: as an ISO 8601 date, as a number of seconds or parts of them since 1970, or as digits."""


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before, in time that grows with the number of names alone.

    >>> first_repeated(["a", "b", "a"]), first_repeated(["a", "b"])
    ('a', None)
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class Field(Frozen):
    """One input of the model, read from one column.

    - `categorical`: one value a row, looked up in the field's vocabulary.
    - `multi`: several values a row, joined by `separator` (or a list column), pooled by mean or sum.
    - `numeric`: `value` (standardised, times a learnt vector), `linear` (between the vectors of the two nearest
      quantiles of the training rows, in proportion), or cut into categories: `log-square` (⌊ln² x⌋ above 2, as in
      Criteo_x4) or `quantiles` of the training rows.

    A categorical field may be derived from a column of moments: `derive` is `hour` ("0" to "23") or `weekday` ("0" for
    Monday to "6"), both in UTC. A moment with an offset is converted to UTC, one without is taken to be in UTC already.

    A value is missing if it is null, the empty string, NaN, or listed in `missing`; so is a moment that can't be read.
    """

    name: str = Constraint(min_length=1, max_length=MAX_NAME)
    """The name of the field, and of its column unless `source` names another."""
    kind: Literal["categorical", "multi", "numeric"]
    """What the column holds; see above."""
    min_count: PositiveInt = 1
    """Keep a value that occurs at least this often in the training rows; rarer ones share one vector."""
    hash_buckets: int | None = Constraint(None, ge=2, lt=2**31 - 2)
    """Hash values into this many buckets and keep no raw values."""
    separator: str = Constraint(" ", min_length=1)
    """What joins the values of a multi field in a text cell."""
    max_len: int = Constraint(5, ge=1, le=MAX_WIDTH)
    """How many values of a multi field are kept in a row, from the first."""
    pooling: Literal["mean", "sum"] = "mean"
    """How the vectors of a multi field are pooled."""
    transform: Literal["value", "log-square", "quantiles", "linear"] = "value"
    """How a number enters the model."""
    num_buckets: int = Constraint(64, ge=2, le=65_536)
    """How many quantiles of equally many rows there are."""
    missing: tuple[str, ...] = ()
    """Values that mean a missing value, such as "NA" or "-1"."""
    derive: Literal["hour", "weekday"] | None = None
    """What a categorical field takes from the moments in its column."""
    source: str | None = Constraint(None, min_length=1, max_length=MAX_NAME)
    """The column of moments that `derive` reads."""
    unit: TimeUnit = "iso"
    """How that column writes moments: `iso` also stands for columns of dates; the digits of `yyyymmdd` and so on are
    numbers or text; `s` to `ns` count from 1970, and mean a missing value before 1989 and after 2103."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        numeric, multi = self.kind == "numeric", self.kind == "multi"
        derived = self.derive is not None
        for option, applies, where in (
            ("separator", multi, "multi fields"),
            ("max_len", multi, "multi fields"),
            ("pooling", multi, "multi fields"),
            ("transform", numeric, "numeric fields"),
            (
                "num_buckets",
                numeric and self.transform in ("quantiles", "linear"),
                "numeric fields with transform = 'quantiles' or 'linear'",
            ),
            ("hash_buckets", not numeric, "categorical and multi fields"),
            ("min_count", not (numeric and self.has_number), "fields with a vocabulary"),
            ("derive", self.kind == "categorical", "categorical fields"),
            ("source", derived, "derived fields"),
            ("unit", derived, "derived fields"),
        ):
            if option in self.model_fields_set and getattr(self, option) is not None and not applies:
                raise ValueError(f"field {self.name!r}: {option} applies to {where} only")
        if self.hash_buckets is not None and self.min_count > 1:
            raise ValueError(f"field {self.name!r}: hashed values are not counted, so min_count can't apply")
        return self

    @model_serializer(mode="wrap")
    def _without_time(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop the settings of derived fields from others, so that fingerprints of older schemas stay as they were."""
        later = () if self.derive else ("derive", "source", "unit")
        return {key: value for key, value in dump(self).items() if key not in later}

    @property
    def column(self) -> str:
        """Return the name of the column that the field is read from."""
        return self.source or self.name

    @property
    def is_value(self) -> bool:
        """Return whether the field enters as a number times a vector rather than through a vocabulary."""
        return self.kind == "numeric" and self.transform == "value"

    @property
    def has_number(self) -> bool:
        """Return whether a row brings a number along besides its id."""
        return self.kind == "numeric" and self.transform in ("value", "linear")

    @property
    def width(self) -> int:
        """Return how many id columns the field takes."""
        return self.max_len if self.kind == "multi" else 1


class Schema(Frozen):
    """All columns that matter: the label, the fields in order, and the columns with another role."""

    format: Literal[1] = 1
    """The version of this format."""
    label: str = Constraint(min_length=1, max_length=MAX_NAME)
    """The column that says whether there was a click: 0 or 1, unless `positive` says otherwise."""
    positive: str | None = Constraint(None, min_length=1)
    """The value of the label that means a click, such as "yes"; case does not matter."""
    negative: str | None = Constraint(None, min_length=1)
    """The value that means no click. Any third value is then an error; without it, all but `positive` mean none."""
    row_id: str | None = None
    """The column that identifies a row; it is copied to outputs and never a feature."""
    group: str | None = None
    """The column to average AUC over, such as the user or the query."""
    time: str | None = None
    """The column for splits in time order; not a feature unless it is also listed as a field."""
    weight: str | None = None
    """The column of row weights, which multiply loss and metrics."""
    columns: tuple[str, ...] | None = None
    """The names of all columns, for files without a header line."""
    separator: str | None = Constraint(None, pattern=r"^[\t\x20-\x21\x23-\x7e]$")
    """What separates the columns of text files, if the first line does not show it."""
    fields: tuple[Field, ...] = Constraint(min_length=1)
    """The inputs of the model, in order; one table each."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [field.name for field in self.fields]
        if (name := first_repeated(names)) is not None:
            raise ValueError(f"field {name!r} is listed twice")
        columns = {field.column: field for field in self.fields if field.derive is None}
        for field in self.fields:
            other = columns.setdefault(field.column, field)
            if other.kind == "multi" and field.derive is not None:
                raise ValueError(f"field {field.name!r}: column {field.column!r} holds several values a row")
        if (width := sum(field.width for field in self.fields)) > MAX_WIDTH:
            raise ValueError(f"a row has {width:,} ids, at most {MAX_WIDTH:,} are allowed: lower max_len")
        for role in ("label", "row_id", "weight"):
            if getattr(self, role) in {*names, *columns}:
                raise ValueError(f"column {getattr(self, role)!r} can't be both the {role} and a field")
        if self.negative is not None and self.positive is None:
            raise ValueError("negative needs positive: the value of the label that means a click")
        if self.columns is not None:
            present = set(self.columns)
            if len(present) < len(self.columns):
                raise ValueError("columns holds a name twice")
            for name in (*self.roles.values(), *columns):
                if name not in present:
                    raise ValueError(f"column {name!r} is not among columns")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop unset keys that older versions did not have, so that fingerprints of older schemas stay the same."""
        later = ("positive", "negative", "separator")
        return {key: value for key, value in dump(self).items() if value is not None or key not in later}

    @property
    def roles(self) -> dict[str, str]:
        """Return the column of each role that has one."""
        pairs = ((role, getattr(self, role)) for role in ("label", "row_id", "group", "time", "weight"))
        return {role: name for role, name in pairs if name is not None}

    @property
    def input_columns(self) -> dict[str, Field]:
        """Return the columns that rows to score have, in the fields' order, each with the plain field it is read as.

        Several fields may be derived from one column, which is read as categories unless it is a field itself.
        """
        plain = {field.name: field for field in self.fields if field.derive is None}
        columns = dict.fromkeys(field.column for field in self.fields)
        return {name: plain.get(name) or Field(name=name, kind="categorical") for name in columns}

    def to_toml(self) -> str:
        """Return the schema as TOML, without settings that have their default value."""
        return f"format = {self.format}\n" + super().to_toml()


def read_schema(path: Path) -> Schema:
    """Read and check a schema.toml."""
    return parse(Schema, read_toml(path), str(path))
