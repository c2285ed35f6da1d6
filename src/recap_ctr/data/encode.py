"""Raw columns to ids, and the fitted vocabularies that say how.

A field's ids: PAD 0, kept values 1..n by falling training count, OOV n+1. One table holds the vectors of all fields,
so what flows is the id plus the field's offset: the row of that table.
Shape suffixes: B rows, W id columns, N value columns.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
PAD = 0
MAX_STANDARDISED = 1e6  # of n training rows none is further than √n from the mean; 32 bits can hold this
NO_CATEGORIES = (pl.Binary, pl.Duration, pl.Object, pl.Struct, pl.List, pl.Array)  # column types
MAX_DAYS = 95_000_000  # from 1970, either way: 260,000 years, beyond which polars can't write a date
_PER_DAY = {"ms": 86_400 * 10**3, "us": 86_400 * 10**6, "ns": 86_400 * 10**9}
MISSING_CODE, PAD_CODE = -1, -2  # in code arrays, before codes become ids
# Whole numbers that passed through a float, which is exact to 15 digits, or a decimal on their way to a text file.
WHOLE = r"^(-?[0-9]{1,15})\.0$|^(-?[0-9]+)\.00+$"
MOMENT = (
    r"^([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:(\.[0-9]*[1-9])0*|\.0+)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?$"
)
SHORTEST_MOMENT = 19  # bytes


def column(block: Block, name: str, role: str) -> pl.Series:
    """The named column of a block, or an error that says what was there instead."""
    if name not in block.frame.columns:
        present = ", ".join(repr(other) for other in block.frame.columns[:12])
        more = f" and {block.frame.width - 12} more" if block.frame.width > 12 else ""
        raise InputError(
            f"{block.origin} has no column {name!r} ({role})\n  columns present: {present}{more}",
            fix="rename the column, or correct the schema",
        )
    return block.frame[name]


def as_text(series: pl.Series, missing: Sequence[str] = ()) -> pl.Series:
    """Values as canonical strings, null where missing: 7, 7.0 and "7" are one value, whatever the file format.

    So are a moment and its ISO 8601 spelling, with a T or without, and midnight and the date.
    """
    name, series = series.name, series.alias("")  # polars takes names such as ^x$ for patterns
    if series.dtype.is_float():
        series = series.fill_nan(None)
        whole = ((series == series.floor()) & (series.abs() < 2**53)).fill_null(False)
        integers = (
            series.zip_with(whole, pl.Series([None], dtype=series.dtype)).cast(pl.Int64).cast(pl.String)
        )
        series = integers.zip_with(whole, series.cast(pl.String))
    elif series.dtype in NO_CATEGORIES:
        raise InputError(f"column {name!r} is of type {series.dtype}, which holds no categories")
    elif series.dtype.is_integer():
        series = series.cast(pl.String)
    else:
        check_dates(series, name)
        series = _spelled(series.cast(pl.String))
    for value in ("", *_spelled_missing(tuple(missing))):
        same = series == value
        if same.any():
            series = series.set(same, None)
    return series.alias(name)


def _spelled(text: pl.Series) -> pl.Series:
    """Text in its one spelling; what can't be spelled otherwise is not looked at twice."""
    if (ends := text.str.ends_with("0")).any() and text.filter(ends).str.contains(".", literal=True).any():
        text = text.str.replace(WHOLE, "$1$2")
    if (python := (text == "True") | (text == "False")).any():
        text = text.zip_with(~python.fill_null(False), text.str.to_lowercase())
    if (longest := text.str.len_bytes().max()) is not None and longest >= SHORTEST_MOMENT:  # type: ignore[operator]
        moments = text.str.contains(MOMENT).fill_null(False)
        if moments.any():
            same = text.str.replace(MOMENT, "$1 $2$3$4").str.replace("Z$", "+00:00")
            same = same.str.replace("([+-][0-9]{2})([0-9]{2})$", "$1:$2").str.replace(" 00:00:00$", "")
            text = same.zip_with(moments, text)
    return text


@cache
def _spelled_missing(missing: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_spelled(pl.Series(missing, dtype=pl.String))) if missing else ()


def check_dates(series: pl.Series, name: str) -> None:
    """Refuse dates that can't be written; polars would not raise an exception but panic."""
    kind = series.dtype
    if kind != pl.Date and not isinstance(kind, pl.Datetime):
        return
    unit = kind.time_unit if isinstance(kind, pl.Datetime) else "days"
    most = min(MAX_DAYS * _PER_DAY.get(unit, 1), 2**63 - 1)
    since = series.to_physical()
    beyond = since.filter((since > most) | (since < -most))
    if len(beyond):
        raise InputError(
            f"column {name!r} holds a date that is none: {beyond[0]} {unit} since 1970",
            fix="repair the value, or leave it out",
        )


def as_numbers(block: Block, field: Field) -> pl.Series:
    """Values as float64, null where missing; what is neither a finite number nor missing is an error."""
    return pl.Series(field.name, _numbers(block, field), nan_to_null=True)


def _numbers(block: Block, field: Field) -> npt.NDArray[np.float64]:
    """The same for numpy, NaN where missing."""
    raw = column(block, field.name, "numeric field").alias("")
    if raw.dtype == pl.String:
        text = as_text(raw.str.strip_chars(), field.missing)
        cast = text.cast(pl.Float64, strict=False)
        bad = (cast.is_null() & text.is_not_null()).arg_true()
        if len(bad):
            raise InputError(
                f"{block.origin}: row {block.first_row + bad[0]}, field {field.name!r}:"
                f" {text[bad[0]]!r} is not a number",
                fix="repair the value, list it under missing = [...], or make the field categorical",
            )
    elif raw.dtype.is_numeric() or raw.dtype in (pl.Boolean, pl.Null):
        cast = raw.cast(pl.Float64)
    else:
        raise InputError(
            f"{block.origin}: field {field.name!r} is numeric, its column of type {raw.dtype} is not"
        )
    numbers = cast.to_numpy(writable=True)
    # Missing by value, too, so that "-1" means -1.0 in a text file as it does in Parquet.
    for value in _missing_numbers(field.missing):
        numbers[numbers == value] = np.nan
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise _infinity(block, field, int(infinite[0]))
    return numbers


def _infinity(block: Block, field: Field, row: int) -> InputError:
    return InputError(
        f"{block.origin}: row {block.first_row + row}, field {field.name!r}: infinity is not a value",
        fix="replace it by a number, or leave the cell empty (missing)",
    )


def _first_infinity(values: pl.Series, field: Field) -> int | None:
    """Where in a column of floats that are categories; in text it is a word like others."""
    if not values.dtype.is_float():
        return None
    values = values.alias("")
    infinite = values.is_infinite()
    if infinite.any():
        found = (infinite & ~values.cast(pl.String).is_in(field.missing)).arg_true()
        return int(found[0]) if len(found) else None
    return None


@cache
def _missing_numbers(missing: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(pl.Series(missing, dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls())


def log_square(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The bucket of Criteo_x4: ⌊ln² x⌋ above 2, the truncated value else.

    >>> log_square(np.array([-1.0, 0, 2, 3, 5, 100, 1e6])).tolist()
    [-1, 0, 2, 1, 2, 21, 190]
    """
    logs = np.log(np.maximum(numbers, 1.0))
    low = np.trunc(np.maximum(numbers, -(2.0**63)))
    return np.where(numbers > 2, np.floor(logs * logs), low).astype(np.int64)


def categories(block: Block, field: Field, edges: Sequence[float] = ()) -> pl.Series:
    """A one-value field's category per row as text, null where missing."""
    return as_text(raw_categories(block, field, edges), missing_categories(field))


def raw_categories(block: Block, field: Field, edges: Sequence[float] = ()) -> pl.Series:
    """The same before `as_text`."""
    if field.kind == "categorical":
        raw = column(block, field.name, "categorical field")
        if (row := _first_infinity(raw, field)) is not None:
            raise _infinity(block, field, row)
        return raw
    numbers = _numbers(block, field)
    absent = np.isnan(numbers)
    filled = np.where(absent, 0.0, numbers)
    buckets = (
        log_square(filled)
        if field.transform == "log-square"
        else np.searchsorted(edges, filled, side="right")
    )
    text = pl.Series(buckets).cast(pl.String)
    return text.set(pl.Series(absent), None) if absent.any() else text


def missing_categories(field: Field) -> tuple[str, ...]:
    """Log-square keeps small numbers as they are, so `missing = ["0"]` also means bucket 0: 0.4 is as good as absent
    where 0 is. The number of a quantile means nothing."""
    quantile = field.kind == "numeric" and field.transform == "quantiles"
    return () if quantile else field.missing


@dataclass(frozen=True)
class Pieces:
    """The values of a multi field, flattened, absent ones left out: each with its row and its position in that row."""

    values: pl.Series
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    height: int

    def matrix(self, codes: Ints, width: int) -> Ints:
        """Codes by row and position, padded to `width`."""
        out = np.full((self.height, width), PAD_CODE, np.int32)
        out[self.rows, self.positions] = codes
        return out


def pieces(block: Block, field: Field) -> Pieces:
    raw = column(block, field.name, "multi field").alias("")
    if isinstance(raw.dtype, (pl.List, pl.Array)):
        lists = raw.cast(pl.List(raw.dtype.inner))
    else:
        lists = as_text(raw.alias(field.name), field.missing).alias("").str.split(field.separator)
    lengths = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = lists.filter(pl.Series(lengths > 0)).explode()
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if (at := _first_infinity(flat, field)) is not None:
        raise _infinity(block, field, int(rows[at]))
    flat = as_text(flat.alias(field.name), field.missing).alias("")
    present = flat.is_not_null().to_numpy()
    rows = rows[present]
    positions = np.arange(len(rows)) - np.searchsorted(
        rows, rows
    )  # rows rise, so their first place is found so
    taken = positions < field.max_len
    values = flat.filter(pl.Series(present)).filter(pl.Series(taken))
    return Pieces(values, rows[taken], positions[taken], block.frame.height)


def hash_codes(values: pl.Series, buckets: int) -> Ints:
    """A bucket per value, the same on every machine and in every version; missing stays missing."""
    values = values.alias("")
    distinct = values.drop_nulls().unique()
    digests = (hashlib.blake2b(value.encode(), digest_size=8).digest() for value in distinct)
    codes = [int.from_bytes(digest, "little") % buckets for digest in digests]
    found = values.replace_strict(
        distinct, pl.Series(codes, dtype=pl.Int32), default=None, return_dtype=pl.Int32
    )
    return found.fill_null(MISSING_CODE).to_numpy()


class _Lookup:
    """Position of a value in a fixed list: binary search over 64-bit hashes, then the values themselves compared.

    It costs nothing per call beyond its rows, where a join or an Enum cast would hash the whole list each time.
    """

    def __init__(self, values: pl.Series) -> None:
        for seed in range(100):
            hashes = values.hash(seed).to_numpy()
            order = np.argsort(hashes, kind="stable")
            self._seed, self._order, self._hashes = seed, order.astype(np.int32), hashes[order]
            if not (self._hashes[1:] == self._hashes[:-1]).any():
                break
        self._values = values.gather(order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def values(self) -> pl.Series:
        """By rising hash."""
        return self._values

    def find(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Where in `values` each must be if it is there at all."""
        return np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1).astype(np.uint32)

    def codes(self, at: npt.NDArray[np.uint32], same: npt.NDArray[np.bool_]) -> Ints:
        return np.where(same, self._order[at], MISSING_CODE).astype(np.int32)

    def __call__(self, values: pl.Series) -> Ints:
        if len(self) == 0:
            return np.full(len(values), MISSING_CODE, np.int32)
        at = self.find(values.hash(self._seed).to_numpy())
        return self.codes(at, (self._values[at] == values).fill_null(False).to_numpy())


@dataclass(frozen=True, eq=False)
class FittedField:
    """A field and what was learnt about it from the training rows."""

    field: Field
    values: pl.Series
    """Kept values in id order; empty for hashed and value fields."""
    counts: npt.NDArray[np.int64]
    mean: float = 0.0
    scale: float = 1.0
    edges: tuple[float, ...] = ()

    @property
    def num_kept(self) -> int:
        if self.field.is_value:
            return 1
        return self.field.hash_buckets or len(self.values)

    @property
    def size(self) -> int:
        """Rows of the table: PAD, what is kept, OOV."""
        return self.num_kept + 2

    @property
    def oov(self) -> int:
        return self.num_kept + 1

    @cached_property
    def lookup(self) -> _Lookup:
        return _Lookup(self.values)

    def codes(self, values: pl.Series) -> Ints:
        """Codes 0..n-1 of text values, `MISSING_CODE` for what is missing or unseen."""
        return hash_codes(values, self.field.hash_buckets) if self.field.hash_buckets else self.lookup(values)

    def ids(self, codes: Ints) -> Ints:
        return np.where(codes >= 0, codes + 1, np.where(codes == PAD_CODE, PAD, self.oov)).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Encoded:
    ids_BW: Ints
    values_BN: Floats
    num_missing: npt.NDArray[np.int64]
    """Per field: rows without a value."""
    num_unseen: npt.NDArray[np.int64]
    """Per field: values that the training rows did not have, or too rarely."""


def random_rows(layout: Layout, count: int, seed: int = 0) -> Encoded:
    """Encoded rows of every kind that a layout allows: unseen and missing values, few and many pieces, odd numbers.

    >>> random_rows(Layout.of_sizes([3, 4]), 1_000).ids_BW.max(axis=0).tolist()
    [2, 6]
    """
    rng = np.random.default_rng(seed)
    ids_BW = np.empty((count, layout.num_columns), np.int32)
    values_BN = np.ones((count, layout.num_values), np.float32)
    for at in layout.fields:
        ids = rng.integers(1, at.size, (count, at.width))
        if at.pooling is not None:
            ids[np.arange(at.width) >= rng.integers(0, at.width + 1, (count, 1))] = PAD
        if at.value_column is not None:
            present = ids[:, 0] == 1
            values_BN[present, at.value_column] = rng.normal(0.0, 2.0, present.sum())
        ids_BW[:, at.start : at.start + at.width] = ids + at.offset
    return Encoded(ids_BW, values_BN, *np.zeros((2, layout.num_fields), np.int64))


class Encoder:
    """Fitted fields, in the schema's order: raw rows to table rows."""

    def __init__(self, schema: Schema, fields: Sequence[FittedField]) -> None:
        self.schema, self.fields = schema, tuple(fields)
        placed: list[FieldLayout] = []
        offset = start = value_column = 0
        for fitted in self.fields:
            field = fitted.field
            pooling = field.pooling if field.kind == "multi" else None
            at = value_column if field.is_value else None
            placed.append(FieldLayout(field.name, offset, fitted.size, start, field.width, pooling, at))
            offset, start, value_column = (
                offset + fitted.size,
                start + field.width,
                value_column + field.is_value,
            )
        if offset >= 2**31:
            raise InputError(
                f"the vocabularies hold {offset:,} values together; ids are 32-bit",
                fix="raise min_count, or lower hash_buckets, of the largest fields",
            )
        self.layout = Layout(tuple(placed))

    def encode(self, block: Block) -> Encoded:
        height = block.frame.height
        ids_BW = np.empty((height, self.layout.num_columns), np.int32)
        values_BN = np.ones((height, self.layout.num_values), np.float32)
        missing, unseen = np.zeros((2, len(self.fields)), np.int64)
        flat = {
            i: pieces(block, fitted.field)
            for i, fitted in enumerate(self.fields)
            if fitted.field.kind == "multi"
        }
        texts = {
            i: flat[i].values if i in flat else raw_categories(block, fitted.field, fitted.edges)
            for i, fitted in enumerate(self.fields)
            if not fitted.field.is_value
        }
        texts = self._as_text(texts)
        codes = self._codes(texts)
        for i, (fitted, at) in enumerate(zip(self.fields, self.layout.fields, strict=True)):
            if at.value_column is not None:
                numbers = _numbers(block, fitted.field)
                absent = np.isnan(numbers)
                filled = np.where(absent, 0.0, numbers)
                ids = standardise(filled, absent, fitted, values_BN[:, at.value_column])[:, None]
                missing[i] = np.count_nonzero(absent)
            elif i in flat:
                nulls = texts[i].null_count()
                unseen[i] = np.count_nonzero(codes[i] == MISSING_CODE) - nulls
                ids = fitted.ids(flat[i].matrix(codes[i], at.width))
                missing[i] = np.count_nonzero((ids == PAD).all(axis=1))
            else:
                missing[i] = texts[i].null_count()
                unseen[i] = np.count_nonzero(codes[i] == MISSING_CODE) - missing[i]
                ids = fitted.ids(codes[i])[:, None]
            ids_BW[:, at.start : at.start + at.width] = ids + at.offset
        return Encoded(ids_BW, values_BN, missing, unseen)

    # A call into polars costs more than its work on a few rows. So those of all fields go through it together.

    def _as_text(self, raw: dict[int, pl.Series]) -> dict[int, pl.Series]:
        """`as_text` of all fields: it changes nothing that it made, so what isn't text yet may meet it twice."""
        groups: dict[tuple[str, ...], dict[int, pl.Series]] = {}
        for i, series in raw.items():
            absent = missing_categories(self.fields[i].field)
            text = series if series.dtype == pl.String else as_text(series, absent)
            groups.setdefault(absent, {})[i] = text
        found: dict[int, pl.Series] = {}
        for absent, group in groups.items():
            found |= _split(as_text(_joined(group.values()), absent), group)
        return {i: found[i] for i in raw}

    def _codes(self, texts: dict[int, pl.Series]) -> dict[int, Ints]:
        """`FittedField.codes` of all fields."""
        joint = {i: text for i, text in texts.items() if i in self._joint_offsets}
        found = {i: self.fields[i].codes(text) for i, text in texts.items() if i not in joint}
        if not joint:
            return found
        text = _joined(joint.values())
        ends = np.cumsum([len(part) for part in joint.values()])
        hashes = np.split(text.hash(0).to_numpy(), ends[:-1])
        places = [self.fields[i].lookup.find(own) for i, own in zip(joint, hashes, strict=True)]
        offsets = [self._joint_offsets[i] for i in joint]
        at = np.concatenate([place + offset for place, offset in zip(places, offsets, strict=True)])
        same = np.split((self._joint_values[at] == text).fill_null(False).to_numpy(), ends[:-1])
        for i, place, equal in zip(joint, places, same, strict=True):
            found[i] = self.fields[i].lookup.codes(place, equal)
        return found

    @cached_property
    def _joint_offsets(self) -> dict[int, np.uint32]:
        """Where the vocabulary of a field begins in `_joint_values`; of those alone that are hashed by seed 0."""
        offsets: dict[int, np.uint32] = {}
        end = 0
        for i, fitted in enumerate(self.fields):
            if (
                fitted.field.is_value
                or fitted.field.hash_buckets
                or not len(fitted.values)
                or fitted.lookup.seed
            ):
                continue
            offsets[i] = np.uint32(end)
            end += len(fitted.values)
        return offsets

    @cached_property
    def _joint_values(self) -> pl.Series:
        return _joined(self.fields[i].lookup.values for i in self._joint_offsets)

    def save(self, directory: Path) -> list[dict[str, Any]]:
        """Write the vocabularies below `directory`; return the rest as plain JSON values."""
        (directory / "vocabulary").mkdir()
        described = []
        for i, fitted in enumerate(self.fields):
            entry: dict[str, Any] = {"name": fitted.field.name, "size": fitted.size}
            if fitted.field.is_value:
                entry |= {"mean": fitted.mean, "scale": fitted.scale}
            elif not fitted.field.hash_buckets:
                frame = pl.DataFrame({"value": fitted.values, "count": fitted.counts})
                frame.write_parquet(directory / vocabulary_file(i), statistics=False)
            if fitted.edges:
                entry["edges"] = list(fitted.edges)
            described.append(entry)
        return described

    @classmethod
    def load(cls, directory: Path, schema: Schema, described: Sequence[dict[str, Any]]) -> "Encoder":
        fields = []
        for i, (field, entry) in enumerate(zip(schema.fields, described, strict=True)):
            values, counts = pl.Series([], dtype=pl.String), np.zeros(0, np.int64)
            if not field.is_value and not field.hash_buckets:
                frame = pl.read_parquet(directory / vocabulary_file(i), glob=False)
                values, counts = frame["value"], frame["count"].to_numpy()
            edges = tuple(entry.get("edges", ()))
            fitted = FittedField(
                field, values, counts, entry.get("mean", 0.0), entry.get("scale", 1.0), edges
            )
            if fitted.size != entry["size"] or entry["name"] != field.name:
                raise InputError(
                    f"{directory}: the vocabulary of field {field.name!r} does not fit its manifest"
                )
            fields.append(fitted)
        return cls(schema, fields)


def _joined(parts: Iterable[pl.Series]) -> pl.Series:
    return pl.concat([part.alias("") for part in parts], rechunk=True)


def _split(joined: pl.Series, like: dict[int, pl.Series]) -> dict[int, pl.Series]:
    found, start = {}, 0
    for i, part in like.items():
        found[i], start = joined[start : start + len(part)], start + len(part)
    return found


def vocabulary_file(index: int) -> str:
    return f"vocabulary/{index:04d}.parquet"


def standardise(
    numbers: npt.NDArray[np.float64], absent: npt.NDArray[np.bool_], fitted: FittedField, out: Floats
) -> Ints:
    """Write (x - mean) / scale to `out`, 1 where absent; return ids: the value's vector, or OOV's where absent."""
    with np.errstate(over="ignore"):
        scaled = (numbers - fitted.mean) / fitted.scale
    out[:] = np.where(absent, 1.0, np.clip(scaled, -MAX_STANDARDISED, MAX_STANDARDISED))
    return np.where(absent, fitted.oov, 1).astype(np.int32)
