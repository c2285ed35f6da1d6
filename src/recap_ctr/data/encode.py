"""Raw columns to ids, and the fitted vocabularies that say how.

A field's ids: PAD 0, kept values 1..n by falling training count, OOV n+1, then values that updates added, so that no
id ever moves. One table holds the vectors of all fields, so what flows is the id plus the field's offset: the row of
that table.
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
from recap_ctr.data.moments import derived_categories
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import make_directory, new_file

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
PAD = 0
MAX_STANDARDISED = 1e6  # no row of n training rows is further than √n from the mean; 32 bits can hold this
MISSING_CODE, PAD_CODE = -1, -2  # in code arrays, before codes become ids


def as_numbers(block: Block, field: Field) -> pl.Series:
    """Return the column of a numeric field as float64, null where missing.

    A value that is neither a finite number nor missing is an error that names its row.
    """
    return pl.Series(field.name, _numbers(block, field), nan_to_null=True)


def _numbers(block: Block, field: Field) -> npt.NDArray[np.float64]:
    """Return the column of a numeric field as an array, NaN where missing."""
    raw = block.column(field.name, "numeric field").alias("")
    if raw.dtype == pl.String:
        text = as_text(raw.str.strip_chars(), field.missing)
        cast = text.cast(pl.Float64, strict=False)
        bad = (cast.is_null() & text.is_not_null()).arg_true()
        if len(bad):
            raise InputError(
                f"{block.origin}: row {block.row(bad[0])}, field {field.name!r}:"
                f" {text[bad[0]]!r} is not a number",
                fix="repair the value, list it under missing = [...], or make the field categorical",
            )
    elif raw.dtype.is_numeric() or raw.dtype in (pl.Boolean, pl.Null):
        cast = raw.cast(pl.Float64)
    else:
        raise InputError(
            f"{block.origin}: field {field.name!r} is numeric, but its column is of type {raw.dtype}",
            fix="make the field categorical or multi, or save the column as numbers",
        )
    numbers = cast.to_numpy(writable=True)
    # Compare as numbers too, so that "-1" under `missing` means -1.0 in a text file as it does in Parquet.
    for value in missing_numbers(field.missing):
        numbers[numbers == value] = np.nan
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise _infinity_error(block, field, int(infinite[0]))
    return numbers


def _infinity_error(block: Block, field: Field, index: int) -> InputError:
    return InputError(
        f"{block.origin}: row {block.row(index)}, field {field.name!r}: infinity is not a value",
        fix="replace it by a number, or leave the cell empty (missing)",
    )


def _first_infinity(values: pl.Series, field: Field) -> int | None:
    """Return the index of the first infinite float; in a text column "inf" is a value like any other."""
    if not values.dtype.is_float():
        return None
    values = values.alias("")
    infinite = values.is_infinite()
    if infinite.any():
        indices = (infinite & ~values.cast(pl.String).is_in(field.missing)).arg_true()
        return int(indices[0]) if len(indices) else None
    return None


@cache
def missing_numbers(missing: tuple[str, ...]) -> tuple[float, ...]:
    """Return the numbers among the texts that mean a missing value."""
    return tuple(pl.Series(missing, dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls())


def log_square(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the buckets of Criteo_x4: ⌊ln² x⌋ above 2, otherwise the truncated number.

    >>> log_square(np.array([-1.0, 0, 2, 3, 5, 100, 1e6])).tolist()
    [-1, 0, 2, 1, 2, 21, 190]
    """
    logs = np.log(np.maximum(numbers, 1.0))
    low = np.trunc(np.maximum(numbers, -(2.0**63)))
    return np.where(numbers > 2, np.floor(logs * logs), low).astype(np.int64)


def categories(block: Block, field: Field, edges: Sequence[float] = ()) -> pl.Series:
    """Return the category of each row as text, null where missing, for a field with one value a row."""
    return as_text(raw_categories(block, field, edges), missing_categories(field))


def raw_categories(block: Block, field: Field, edges: Sequence[float] = ()) -> pl.Series:
    """Return what `categories` passes to `as_text`; `edges` are those of a field cut into quantiles."""
    if field.derive is not None:
        return derived_categories(
            block.column(field.column, f"{field.derive} of field {field.name!r}"), field
        )
    if field.kind == "categorical":
        raw = block.column(field.name, "categorical field")
        if (index := _first_infinity(raw, field)) is not None:
            raise _infinity_error(block, field, index)
        return raw
    numbers = _numbers(block, field)
    missing = np.isnan(numbers)
    filled = np.where(missing, 0.0, numbers)
    is_log_square = field.transform == "log-square"
    buckets = log_square(filled) if is_log_square else np.searchsorted(edges, filled, side="right")
    text = pl.Series(buckets).cast(pl.String)
    return text.set(pl.Series(missing), None) if missing.any() else text


def missing_categories(field: Field) -> tuple[str, ...]:
    """Return the categories of a field that mean a missing value.

    Log-square keeps small numbers as they are, so `missing = ["0"]` also means bucket 0: there 0.4 counts as missing
    like 0. The bucket numbers of quantiles have no such meaning, nor have the hours of moments.
    """
    is_quantiles = field.kind == "numeric" and field.transform != "log-square"
    return () if is_quantiles or field.derive is not None else field.missing


@dataclass(frozen=True)
class Pieces:
    """The values of a multi field as one flat series, each with its row and its position in that row."""

    values: pl.Series
    """The values that are not missing."""
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    height: int

    def matrix(self, codes: Ints, width: int) -> Ints:
        """Return the codes by row and position, padded to `width` columns."""
        padded = np.full((self.height, width), PAD_CODE, np.int32)
        padded[self.rows, self.positions] = codes
        return padded


def pieces(block: Block, field: Field) -> Pieces:
    """Return the values of a multi field, at most `max_len` of each row."""
    raw = block.column(field.name, "multi field").alias("")
    if isinstance(raw.dtype, (pl.List, pl.Array)):
        lists = raw.cast(pl.List(raw.dtype.inner))
    else:
        lists = as_text(raw.alias(field.name), field.missing).alias("").str.split(field.separator)
    lengths = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = lists.filter(pl.Series(lengths > 0)).explode()
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if (index := _first_infinity(flat, field)) is not None:
        raise _infinity_error(block, field, int(rows[index]))
    flat = as_text(flat.alias(field.name), field.missing).alias("")
    present = flat.is_not_null().to_numpy()
    rows = rows[present]
    # Row numbers rise, so a binary search finds where each row begins.
    positions = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = positions < field.max_len
    values = flat.filter(pl.Series(present)).filter(pl.Series(kept))
    return Pieces(values, rows[kept], positions[kept], block.frame.height)


def hash_codes(values: pl.Series, buckets: int) -> Ints:
    """Return a bucket per value, the same on every machine and in every version; missing stays missing."""
    values = values.alias("")
    distinct = values.drop_nulls().unique()
    buckets_of_distinct = [hash_bucket(value, buckets) for value in distinct]
    codes = values.replace_strict(
        distinct, pl.Series(buckets_of_distinct, dtype=pl.Int32), default=None, return_dtype=pl.Int32
    )
    return codes.fill_null(MISSING_CODE).to_numpy()


def hash_bucket(value: str, buckets: int) -> int:
    """Return the bucket of one value."""
    digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % buckets


class _Lookup:
    """Positions of values in a fixed list, by binary search over 64-bit hashes; hits are compared as values.

    A call costs nothing beyond its rows, where a join or an Enum cast would hash the whole list each time.
    """

    def __init__(self, values: pl.Series) -> None:
        living = values.is_not_null().arg_true().to_numpy()  # A forgotten value leaves a gap.
        values = values.drop_nulls()
        for seed in range(100):
            hashes = values.hash(seed).to_numpy()
            order = np.argsort(hashes, kind="stable")
            self._seed, self._order, self._hashes = seed, living[order].astype(np.int32), hashes[order]
            if not (self._hashes[1:] == self._hashes[:-1]).any():
                break
        self._values = values.gather(order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def seed(self) -> int:
        """Return the first seed under which no two values share a hash."""
        return self._seed

    @property
    def values(self) -> pl.Series:
        """Return the values by rising hash."""
        return self._values

    def candidates(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return the only place in `values` where a value with each hash can be."""
        return np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1).astype(np.uint32)

    def codes(self, candidates: npt.NDArray[np.uint32], is_equal: npt.NDArray[np.bool_]) -> Ints:
        """Return the code of each candidate, `MISSING_CODE` where it is not equal to the value in question."""
        return np.where(is_equal, self._order[candidates], MISSING_CODE).astype(np.int32)

    def __call__(self, values: pl.Series) -> Ints:
        if len(self) == 0:
            return np.full(len(values), MISSING_CODE, np.int32)
        candidates = self.candidates(values.hash(self._seed).to_numpy())
        return self.codes(candidates, (self._values[candidates] == values).fill_null(False).to_numpy())


@dataclass(frozen=True, eq=False)
class FittedField:
    """A field and what was learnt about it from the training rows."""

    field: Field
    values: pl.Series
    """Kept values in id order, null where one was forgotten; empty for hashed and value fields. Of a linear field, the
    numbers of the edges."""
    counts: npt.NDArray[np.int64]
    mean: float = 0.0
    scale: float = 1.0
    edges: tuple[float, ...] = ()
    """Where quantiles end; of a linear field, also where the first begins and the last ends. Its last edge is there
    twice if many rows are there, so that they have an id of their own."""
    num_added: int = 0
    """How many of the last values an update added; their ids come after OOV's."""

    @property
    def num_kept(self) -> int:
        """Return the number of ids other than PAD and OOV: kept values, hash buckets, or 1 for a number."""
        if self.field.is_value:
            return 1
        return self.field.hash_buckets or len(self.values)

    @property
    def size(self) -> int:
        """Return the field's rows of the table: PAD, kept values, OOV, added values."""
        return self.num_kept + 2

    @property
    def oov(self) -> int:
        """Return the id of missing values and of those that the vocabulary lacks."""
        return self.num_kept - self.num_added + 1

    @property
    def num_quantiles(self) -> int:
        """Return how many quantiles the edges separate."""
        return max(len(self.edges) - 1, 0) if self.field.transform == "linear" else len(self.edges) + 1

    @property
    def grows(self) -> bool:
        """Return whether an update adds values: not to numbers, quantiles (whose bounds stay) or hash buckets."""
        field = self.field
        is_number = field.kind == "numeric" and field.transform != "log-square"
        return not is_number and not field.hash_buckets

    @cached_property
    def lookup(self) -> _Lookup:
        """Return the positions of the kept values."""
        return _Lookup(self.values)

    def codes(self, values: pl.Series) -> Ints:
        """Return codes 0..n-1 of text values, `MISSING_CODE` for what is missing or unseen."""
        return hash_codes(values, self.field.hash_buckets) if self.field.hash_buckets else self.lookup(values)

    def ids(self, codes: Ints) -> Ints:
        """Return the ids of codes: PAD for padding, OOV for missing or unseen values."""
        kept = codes + 1 + (codes + 1 >= self.oov)
        return np.where(codes >= 0, kept, np.where(codes == PAD_CODE, PAD, self.oov)).astype(np.int32)

    def value_of(self, number: int) -> str | None:
        """Return the kept value with an id; None for PAD and OOV.

        >>> field = FittedField(Field(name="ad", kind="categorical"), pl.Series(["a", "b"]), np.ones(2), num_added=1)
        >>> [field.value_of(number) for number in range(field.size)]
        [None, 'a', None, 'b']
        """
        if number in (PAD, self.oov):
            return None
        value: str | None = self.values[number - 1 - (number > self.oov)]
        return value


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows as a model takes them."""

    ids_BW: Ints
    values_BN: Floats
    num_missing: npt.NDArray[np.int64]
    """Per field: rows without a value."""
    num_unseen: npt.NDArray[np.int64]
    """Per field: values that the training rows did not have, or too rarely."""


def random_rows(layout: Layout, count: int, seed: int = 0) -> Encoded:
    """Return encoded rows of every kind that a layout allows, for tests and measurements.

    They hold unseen and missing values, few and many values of multi fields, and extreme numbers.

    >>> random_rows(Layout.of_sizes([3, 4]), 1_000).ids_BW.max(axis=0).tolist()
    [2, 6]
    """
    rng = np.random.default_rng(seed)
    ids_BW = np.empty((count, layout.num_columns), np.int32)
    values_BN = np.ones((count, layout.num_values), np.float32)
    for field in layout.fields:
        ids = rng.integers(1, field.size, (count, field.width))
        if field.pooling is not None:
            ids[np.arange(field.width) >= rng.integers(0, field.width + 1, (count, 1))] = PAD
        if field.is_linear:
            values_BN[:, field.number_column] = np.where(ids[:, 0] == field.oov, 0.0, rng.random(count))
        elif field.is_factor:
            present = ids[:, 0] == 1
            values_BN[present, field.number_column] = rng.normal(0.0, 2.0, present.sum())
        ids_BW[:, field.start : field.start + field.width] = ids + field.offset
    return Encoded(ids_BW, values_BN, *np.zeros((2, layout.num_fields), np.int64))


class Encoder:
    """Fitted fields, in the schema's order: raw rows to table rows."""

    def __init__(self, schema: Schema, fields: Sequence[FittedField]) -> None:
        self.schema, self.fields = schema, tuple(fields)
        self.layout = lay_out(
            schema.fields, [fitted.size for fitted in fields], [fitted.num_added for fitted in fields]
        )

    def encode(self, block: Block) -> Encoded:
        """Return the ids and numbers of raw rows; columns other than the fields are ignored."""
        height = block.frame.height
        ids_BW = np.empty((height, self.layout.num_columns), np.int32)
        values_BN = np.ones((height, self.layout.num_values), np.float32)
        missing, unseen = np.zeros((2, len(self.fields)), np.int64)
        multi = {
            i: pieces(block, fitted.field)
            for i, fitted in enumerate(self.fields)
            if fitted.field.kind == "multi"
        }
        texts = {
            i: multi[i].values if i in multi else raw_categories(block, fitted.field, fitted.edges)
            for i, fitted in enumerate(self.fields)
            if not fitted.field.has_number
        }
        texts = self._as_text(texts)
        codes = self._codes(texts)
        for i, (fitted, place) in enumerate(zip(self.fields, self.layout.fields, strict=True)):
            if place.value_column is not None:
                numbers = _numbers(block, fitted.field)
                is_missing = np.isnan(numbers)
                filled = np.where(is_missing, 0.0, numbers)
                read = interpolate if place.is_linear else standardise
                ids = read(filled, is_missing, fitted, values_BN[:, place.value_column])[:, None]
                missing[i] = np.count_nonzero(is_missing)
                unseen[i] = height - missing[i] if place.is_linear and not fitted.edges else 0
            elif i in multi:
                unseen[i] = np.count_nonzero(codes[i] == MISSING_CODE) - texts[i].null_count()
                ids = fitted.ids(multi[i].matrix(codes[i], place.width))
                missing[i] = np.count_nonzero((ids == PAD).all(axis=1))
            else:
                missing[i] = texts[i].null_count()
                unseen[i] = np.count_nonzero(codes[i] == MISSING_CODE) - missing[i]
                ids = fitted.ids(codes[i])[:, None]
            ids_BW[:, place.start : place.start + place.width] = ids + place.offset
        return Encoded(ids_BW, values_BN, missing, unseen)

    # A call into polars costs more than its work on a few rows, so the values of all fields go through it together.

    def _as_text(self, raw: dict[int, pl.Series]) -> dict[int, pl.Series]:
        """Return `as_text` of all fields. Text that passes through it twice stays as it is."""
        groups: dict[tuple[str, ...], dict[int, pl.Series]] = {}
        for i, series in raw.items():
            missing = missing_categories(self.fields[i].field)
            text = series if series.dtype == pl.String else as_text(series, missing)
            groups.setdefault(missing, {})[i] = text
        texts: dict[int, pl.Series] = {}
        for missing, group in groups.items():
            texts |= _split(as_text(_joined(group.values()), missing), group)
        return {i: texts[i] for i in raw}

    def _codes(self, texts: dict[int, pl.Series]) -> dict[int, Ints]:
        """Return `FittedField.codes` of all fields."""
        joint = {i: text for i, text in texts.items() if i in self._joint_offsets}
        codes = {i: self.fields[i].codes(text) for i, text in texts.items() if i not in joint}
        if not joint:
            return codes
        text = _joined(joint.values())
        ends = np.cumsum([len(part) for part in joint.values()])
        hashes = np.split(text.hash(0).to_numpy(), ends[:-1])
        candidates = [self.fields[i].lookup.candidates(part) for i, part in zip(joint, hashes, strict=True)]
        offsets = [self._joint_offsets[i] for i in joint]
        joint_candidates = np.concatenate(
            [part + offset for part, offset in zip(candidates, offsets, strict=True)]
        )
        is_equal = (self._joint_values[joint_candidates] == text).fill_null(False).to_numpy()
        for i, part, equal in zip(joint, candidates, np.split(is_equal, ends[:-1]), strict=True):
            codes[i] = self.fields[i].lookup.codes(part, equal)
        return codes

    @cached_property
    def _joint_offsets(self) -> dict[int, np.uint32]:
        """Return where each field's vocabulary begins in `_joint_values`, which has only fields hashed with seed 0."""
        offsets: dict[int, np.uint32] = {}
        end = 0
        for i, fitted in enumerate(self.fields):
            if has_vocabulary(fitted.field) and len(fitted.lookup) and fitted.lookup.seed == 0:
                offsets[i] = np.uint32(end)
                end += len(fitted.lookup)
        return offsets

    @cached_property
    def _joint_values(self) -> pl.Series:
        return _joined(self.fields[i].lookup.values for i in self._joint_offsets)

    def save(self, directory: Path) -> list[dict[str, Any]]:
        """Write the vocabularies below `directory`; return the rest as plain JSON values, one entry a field."""
        make_directory(directory / "vocabulary")
        entries = []
        for i, fitted in enumerate(self.fields):
            entry: dict[str, Any] = {"name": fitted.field.name, "size": fitted.size}
            if fitted.field.is_value:
                entry |= {"mean": fitted.mean, "scale": fitted.scale}
            write_vocabulary(fitted, i, directory)
            if fitted.edges:
                entry["edges"] = list(fitted.edges)
            if fitted.num_added:
                entry["added"] = fitted.num_added
            entries.append(entry)
        return entries

    @classmethod
    def load(cls, directory: Path, schema: Schema, entries: Sequence[dict[str, Any]]) -> "Encoder":
        """Read an encoder back from what `save` wrote and returned."""
        fields = [load_field(directory, schema, entries, number) for number in range(len(schema.fields))]
        return cls(schema, fields)


def load_field(
    directory: Path, schema: Schema, entries: Sequence[dict[str, Any]], number: int
) -> FittedField:
    """Read one field back, by its number in the schema, from what `Encoder.save` wrote and returned."""
    field, entry = schema.fields[number], entries[number]
    values, counts = pl.Series([], dtype=pl.String), np.zeros(0, np.int64)
    if has_vocabulary(field):
        frame = pl.read_parquet(directory / vocabulary_file(number), glob=False)
        values, counts = frame["value"], frame["count"].to_numpy()
    edges = tuple(entry.get("edges", ()))
    mean, scale = entry.get("mean", 0.0), entry.get("scale", 1.0)
    fitted = FittedField(field, values, counts, mean, scale, edges, entry.get("added", 0))
    if fitted.size != entry["size"] or entry["name"] != field.name:
        raise InputError(f"{directory}: the vocabulary of field {field.name!r} does not match the manifest")
    return fitted


def lay_out(fields: Sequence[Field], sizes: Sequence[int], added: Sequence[int]) -> Layout:
    """Return where each field stands in the table and in the id matrix: one after the other.

    `sizes` are the fields' rows of the table, `added` how many of them belong to values that updates added.
    """
    layouts: list[FieldLayout] = []
    offset = start = num_values = 0
    for field, size, num_added in zip(fields, sizes, added, strict=True):
        pooling = field.pooling if field.kind == "multi" else None
        value_column = num_values if field.has_number else None
        is_linear = field.transform == "linear"
        layouts.append(
            FieldLayout(
                field.name, offset, size, start, field.width, pooling, value_column, num_added, is_linear
            )
        )
        offset += size
        start += field.width
        num_values += field.has_number
    if offset >= 2**31:
        raise InputError(
            f"the vocabularies hold {offset:,} values together; ids are 32-bit",
            fix="raise min_count, or lower hash_buckets, of the largest fields",
        )
    return Layout(tuple(layouts))


def _joined(parts: Iterable[pl.Series]) -> pl.Series:
    return pl.concat([part.alias("") for part in parts], rechunk=True)


def _split(joined: pl.Series, parts: dict[int, pl.Series]) -> dict[int, pl.Series]:
    """Cut a joined series into pieces as long as `parts`."""
    cut, start = {}, 0
    for i, part in parts.items():
        cut[i], start = joined[start : start + len(part)], start + len(part)
    return cut


def vocabulary_file(index: int) -> str:
    """Return where the vocabulary of the schema's field number `index` is stored, from 0."""
    return f"vocabulary/{index:04d}.parquet"


def has_vocabulary(field: Field) -> bool:
    """Return whether a field has values with names of their own, which are stored."""
    return not field.is_value and not field.hash_buckets


def write_vocabulary(fitted: FittedField, index: int, directory: Path) -> None:
    """Write the vocabulary of the schema's field number `index` below `directory`, if it has one."""
    if has_vocabulary(fitted.field):
        frame = pl.DataFrame({"value": fitted.values, "count": fitted.counts}).rechunk()
        with new_file(directory / vocabulary_file(index)) as file:
            frame.write_parquet(file, statistics=False)


def standardise(
    numbers: npt.NDArray[np.float64], missing: npt.NDArray[np.bool_], fitted: FittedField, out: Floats
) -> Ints:
    """Write (x - mean) / scale to `out`, 1 where missing; return ids: the number's vector, or OOV where missing."""
    with np.errstate(over="ignore"):
        scaled = (numbers - fitted.mean) / fitted.scale
    out[:] = np.where(missing, 1.0, np.clip(scaled, -MAX_STANDARDISED, MAX_STANDARDISED))
    return np.where(missing, fitted.oov, 1).astype(np.int32)


def interpolate(
    numbers: npt.NDArray[np.float64], missing: npt.NDArray[np.bool_], fitted: FittedField, out: Floats
) -> Ints:
    """Write how far each number is from the edge below to the next, 0 where missing; return the id of the edge below,
    or OOV where missing.

    Numbers beyond the outermost edges count as these. Without any edge all are OOV.
    """
    edges = np.asarray(fitted.edges, np.float64)
    if not len(edges):
        out[:] = 0.0
        return np.full(len(numbers), fitted.oov, np.int32)
    below = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
    halves = edges / 2
    inside = np.clip(numbers / 2, halves[0], halves[-1])
    out[:] = np.where(missing, 0.0, shares_of_way(inside, halves[below], halves[below + 1]))
    return np.where(missing, fitted.oov, below + 1).astype(np.int32)


def shares_of_way(
    numbers: npt.NDArray[np.float64], starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return how far each number is from its start to its end, as a share of the way; 0 if there is no way.

    All are halves of what they stand for, because the difference of two large numbers may be too large.

    >>> shares_of_way(np.array([1.0, 3.0, 5.0]), np.array([1.0, 1.0, 5.0]), np.array([5.0, 5.0, 5.0])).tolist()
    [0.0, 0.5, 0.0]
    """
    ways = ends - starts
    return np.divide(numbers - starts, ways, out=np.zeros_like(ways), where=ways > 0)
