"""The encoder's path for few rows: a dictionary of recent values per field, one search for all values not in it.

`Encoder.encode` is made for large tables: each of its calls costs microseconds whatever the number of rows, and dozens
of fields make milliseconds of them. This path looks values up one by one, and gives the same ids. What it does not
know, such as bad values and unusual types, it leaves to the encoder, whose error then names field, row and fix.
Shapes: B rows, F fields with one value a row, N fields that enter as numbers, L linear fields, W id columns.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import (
    MISSING_CODE,
    Encoded,
    Encoder,
    FittedField,
    hash_bucket,
    log_square,
    missing_categories,
    missing_numbers,
    shares_of_way,
    standardise,
)
from recap_ctr.data.moments import derive_category
from recap_ctr.data.text import canonical, missing_texts, spell_missing

FEW_ROWS = 256
"""Up to this number of rows, this path is the faster one (docs/decisions/0025-few-rows.md)."""
CACHED_VALUES = 1 << 15
"""Values in one of the two generations of the cache, those of all fields together."""
MAX_CACHED_LENGTH = 64  # Characters of a value; longer ones are looked up each time.

Columns = Mapping[str, Sequence[Any]]
"""Raw values by column; a column that is left out is missing in all rows."""
Codes = dict[Any, int]
"""The row of the embedding table for each value; the complement of the row of OOV for a missing value."""
_SINGLE_KINDS = frozenset(
    (
        *(pl.String, pl.Boolean, pl.Null, pl.Float64),
        *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
    )
)
_LISTED_KINDS = _SINGLE_KINDS - {pl.Float64, pl.Boolean}
_LISTED_ROWS = 24  # With more rows, reading a data frame by columns takes less time than by rows.
_FIRST_BUCKET, _NUM_BUCKETS = -8, 1024
"""Those with a place in a table: the buckets of log-square up to 5e13, and 1,016 quantiles."""


class _UnusualError(Exception):
    """A value that this path leaves to the encoder."""


class _Recent:
    """The codes of recent values, by field, in two generations.

    A value that is not in the young generation enters it; when that is full, it becomes the old one, and the old one is
    forgotten. So what is asked for often stays, and the memory is bounded.
    """

    def __init__(self, missing_codes: Sequence[int], size: int) -> None:
        self._missing_codes, self._size = missing_codes, size
        self._lock = threading.Lock()
        self.young = self._generation()
        self.old = self._generation()
        self._num_young = 0

    def _generation(self) -> list[Codes]:
        return [{None: code} for code in self._missing_codes]

    def add(self, learnt: Mapping[int, Codes]) -> None:
        """Remember the codes of some values, by field."""
        size = sum(map(len, learnt.values()))
        if size > self._size:
            return
        with self._lock:
            if self._num_young + size > self._size:
                self.old, self.young, self._num_young = self.young, self._generation(), 0
            for field, codes in learnt.items():
                is_long = max(map(len, codes), default=0) > MAX_CACHED_LENGTH
                self.young[field].update(_short(codes) if is_long else codes)
            self._num_young += size

    def __len__(self) -> int:
        return sum(len(codes) - 1 for generation in (self.young, self.old) for codes in generation)


def _short(codes: Codes) -> Codes:
    return {text: code for text, code in codes.items() if len(text) <= MAX_CACHED_LENGTH}


class _Vocabulary:
    """The codes of a field's values one by one, without a call into polars' pool of threads, which may have to wait."""

    def __init__(self, fitted: FittedField) -> None:
        self._values, self._hash_buckets = fitted.values, fitted.field.hash_buckets
        # Python's hashes differ from process to process, so they are computed when the vocabulary is loaded.
        hashes = np.fromiter(map(hash, fitted.values.to_list()), np.int64, len(fitted.values))
        order = np.argsort(hashes, kind="stable")
        self._order, self._hashes = order.astype(np.int32), hashes[order]

    def codes(self, texts: Sequence[str]) -> list[int]:
        """Return the code of each canonical text, `MISSING_CODE` for what the vocabulary lacks."""
        if self._hash_buckets:
            return [hash_bucket(text, self._hash_buckets) for text in texts]
        hashes = [hash(text) for text in texts]
        places = self._hashes.searchsorted(hashes).tolist()
        return [self._code(*triple) for triple in zip(texts, hashes, places, strict=True)]

    def _code(self, text: str, text_hash: int, place: int) -> int:
        while place < len(self._hashes) and self._hashes[place] == text_hash:
            code = int(self._order[place])
            if self._values[code] == text:
                return code
            place += 1
        return MISSING_CODE


class _Edges:
    """The edges of linear fields, one field after the other: the numbers of all fields are found at once."""

    def __init__(self, edges_L: Sequence[Sequence[float]]) -> None:
        self.is_empty_L = np.array([not edges for edges in edges_L], np.bool_)
        # Without edges OOV is the first id, and two equal edges lead to that.
        self._edges_L = [edges or (0.0, 0.0) for edges in edges_L]
        sizes_L1 = np.array([len(edges) for edges in self._edges_L], np.int64)[:, None]
        self._halves = np.array([*chain.from_iterable(self._edges_L)]) / 2
        self._first_L1 = np.cumsum(sizes_L1, axis=0) - sizes_L1
        self._last_L1 = self._first_L1 + sizes_L1 - 1

    def find(
        self, numbers_LB: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the edge below each number, and how far the number is from it to the next, as `interpolate` does.

        For NaN it is any edge.
        """
        pairs = zip(self._edges_L, numbers_LB.tolist(), strict=True)
        after_LB = np.array([[bisect_right(edges, x) for x in numbers] for edges, numbers in pairs], np.int64)
        below_LB = np.clip(after_LB - 1 + self._first_L1, self._first_L1, self._last_L1 - 1)
        inside_LB = np.clip(numbers_LB / 2, self._halves[self._first_L1], self._halves[self._last_L1])
        shares_LB = shares_of_way(inside_LB, self._halves[below_LB], self._halves[below_LB + 1])
        return below_LB - self._first_L1, shares_LB


class FewRows:
    """Encodes few rows as `encoder` does, in a fraction of its time; any number of threads may call it at once."""

    def __init__(self, encoder: Encoder, *, cached_values: int = CACHED_VALUES) -> None:
        self._encoder, self._fields, self._places = encoder, encoder.fields, encoder.layout.fields
        self._num_columns, self._num_values = encoder.layout.num_columns, encoder.layout.num_values
        self._missing = [missing_texts(missing_categories(fitted.field)) for fitted in self._fields]
        self._missing_numbers = [missing_numbers(fitted.field.missing) for fitted in self._fields]
        pairs = zip(self._places, self._fields, strict=True)
        self._oov_rows = [place.offset + fitted.oov for place, fitted in pairs]
        self._vocabularies = [_Vocabulary(fitted) for fitted in self._fields]
        self._recent = _Recent([~row for row in self._oov_rows], cached_values)
        columns = encoder.schema.input_columns
        self._names = columns.keys()
        self._numeric = [name for name, field in columns.items() if field.kind == "numeric"]
        self._multi_names = {name for name, field in columns.items() if field.kind == "multi"}
        kinds = [_kind_of(fitted) for fitted in self._fields]
        (
            self._texts,
            self._derived,
            self._log_squares,
            self._quantiles,
            self._numbers,
            self._linear,
            self._multis,
        ) = (
            [index for index, kind in enumerate(kinds) if kind == wanted]
            for wanted in ("text", "derived", "log-square", "quantiles", "value", "linear", "multi")
        )
        self._spelled, self._bucketed = self._texts + self._derived, self._log_squares + self._quantiles
        singles = self._spelled + self._bucketed
        self._single_fields = np.array(singles, np.intp)
        self._single_columns = np.array([self._places[index].start for index in singles], np.intp)
        self._single_oov_F1 = np.array([[self._oov_rows[index]] for index in singles], np.int64)
        buckets = [str(bucket) for bucket in range(_FIRST_BUCKET, _FIRST_BUCKET + _NUM_BUCKETS)]
        bucket_codes = [*self._find(dict.fromkeys(self._bucketed, buckets)).values()]
        # The last column is for missing numbers.
        self._bucket_codes_FK = np.array(
            [
                [*map(codes.__getitem__, buckets), ~self._oov_rows[index]]
                for index, codes in zip(self._bucketed, bucket_codes, strict=True)
            ]
        )
        self._bucket_rows_F1 = np.arange(len(self._bucketed))[:, None]
        self._edges = _Edges([self._fields[index].edges for index in self._linear])
        linear = [self._places[index] for index in self._linear]
        self._linear_columns = [place.start for place in linear]
        self._linear_values = [place.number_column for place in linear]
        self._linear_offsets_L1 = np.array([place.offset for place in linear], np.int64)[:, None]
        self._linear_oov_L1 = np.array([place.oov for place in linear], np.int64)[:, None]

    def __len__(self) -> int:
        """Return the number of values in the cache."""
        return len(self._recent)

    def encode_frame(self, frame: pl.DataFrame) -> Encoded | None:
        """Encode a data frame; None if it holds something that this path leaves to the encoder."""
        names, dtypes = frame.columns, frame.dtypes
        kinds = dict(zip(names, map(type, dtypes), strict=True))
        if not kinds.keys() >= self._names or any(kinds[name] is pl.String for name in self._numeric):
            return None
        if not _SINGLE_KINDS.issuperset(kinds.values()):
            for name, kind in zip(names, dtypes, strict=True):
                is_list = isinstance(kind, pl.List) and type(kind.inner) in _LISTED_KINDS
                is_usual = type(kind) in _SINGLE_KINDS or (is_list and name in self._multi_names)
                if name in self._names and not is_usual:
                    return None
        if frame.height > _LISTED_ROWS:
            return self.encode(frame.to_dict(as_series=False), frame.height)
        return self.encode(dict(zip(names, zip(*frame.rows(), strict=True), strict=False)), frame.height)

    def encode(self, columns: Columns, height: int) -> Encoded | None:
        """Encode columns of text, numbers, lists of text and None; None if some value is left to the encoder.

        Numeric fields must come as numbers.
        """
        try:
            return self._encode(columns, height)
        except _UnusualError:
            return None

    def _encode(self, columns: Columns, height: int) -> Encoded:
        absent = [None] * height
        num_missing, num_unseen = np.zeros((2, len(self._fields)), np.int64)
        ids_BW = np.empty((height, self._num_columns), np.int32)
        values_BN = np.ones((height, self._num_values), np.float32)
        if len(self._single_fields):
            codes_FB = self._single_codes(columns, absent)
            is_missing_FB = codes_FB < 0
            rows_FB = np.where(is_missing_FB, ~codes_FB, codes_FB)
            ids_BW[:, self._single_columns] = rows_FB.T
            num_missing[self._single_fields] = missing_F = is_missing_FB.sum(axis=1)
            num_unseen[self._single_fields] = (rows_FB == self._single_oov_F1).sum(axis=1) - missing_F
        for index in self._multis:
            cells = columns.get(self._fields[index].field.name, absent)
            ids_BM, num_missing[index], num_unseen[index] = self._multi(index, cells)
            start = self._places[index].start
            ids_BW[:, start : start + ids_BM.shape[1]] = ids_BM
        encoded = Encoded(ids_BW, values_BN, num_missing, num_unseen)
        if self._numbers:
            self._add_numbers(columns, absent, encoded)
        if self._linear:
            self._interpolate(columns, absent, encoded)
        return encoded

    # Fields with one value a row

    def _single_codes(self, columns: Columns, absent: Sequence[None]) -> npt.NDArray[np.int64]:
        """Return the code of each value of the fields with one value a row, in the order of `_single_fields`."""
        fields = self._fields
        texts: list[Sequence[Any]] = [columns.get(fields[index].field.name, absent) for index in self._texts]
        for index in self._derived:
            field = fields[index].field
            missing = frozenset(spell_missing(field.missing))
            values = columns.get(field.column, absent)
            texts.append([derive_category(_text(value), field, missing) for value in values])
        codes = chain.from_iterable(self._codes(self._spelled, texts))
        codes_FB = np.fromiter(codes, np.int64, len(texts) * len(absent)).reshape(len(texts), len(absent))
        if not self._bucketed:
            return codes_FB
        return np.concatenate([codes_FB, self._bucketed_codes(columns, absent)])

    def _bucketed_codes(self, columns: Columns, absent: Sequence[None]) -> npt.NDArray[np.int64]:
        """Return the code of each number of the fields that are cut into buckets."""
        numbers_FB, is_missing_FB = self._read_numbers(self._bucketed, columns, absent)
        numbers_FB = np.where(is_missing_FB, 0.0, numbers_FB)
        split = len(self._log_squares)
        buckets_FB = np.empty(numbers_FB.shape, np.int64)
        if split:
            buckets_FB[:split] = log_square(numbers_FB[:split])
        for row, index in enumerate(self._quantiles, start=split):
            buckets_FB[row] = [bisect_right(self._fields[index].edges, x) for x in numbers_FB[row].tolist()]
        places_FB = buckets_FB - _FIRST_BUCKET
        # As unsigned numbers, places before the first bucket are very large.
        is_far_FB = places_FB.view(np.uint64) >= _NUM_BUCKETS
        places_FB[is_missing_FB | is_far_FB] = _NUM_BUCKETS
        codes_FB = self._bucket_codes_FK[self._bucket_rows_F1, places_FB]
        for row, column in np.argwhere(is_far_FB).tolist():
            texts = [[str(buckets_FB[row, column])]]
            codes_FB[row, column] = self._codes([self._bucketed[row]], texts)[0][0]
        return np.asarray(codes_FB)

    def _codes(self, fields: Sequence[int], texts: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Return the code of each raw category of some fields."""
        young = self._recent.young
        codes: list[list[Any]] = []
        missed: dict[int, tuple[list[Any], Sequence[Any], list[int]]] = {}
        for index, values in zip(fields, texts, strict=True):
            cached = list(map(young[index].get, values))
            if None in cached:
                missed[index] = cached, values, [at for at, code in enumerate(cached) if code is None]
            codes.append(cached)
        if missed:
            learnt = self._find(
                {index: {values[at] for at in places} for index, (_, values, places) in missed.items()}
            )
            self._recent.add(learnt)
            for index, (cached, values, places) in missed.items():
                new = learnt[index]
                for at in places:
                    cached[at] = new[_present_text(values[at])]
        return codes

    def _find(self, missed: Mapping[int, Iterable[Any]]) -> dict[int, Codes]:
        """Return the codes of the texts of values, by field."""
        learnt: dict[int, Codes] = {}
        unknown: dict[int, list[tuple[str, str]]] = {}  # The text of a value and its canonical spelling.
        for index, values in missed.items():
            codes, missing = {}, self._missing[index]
            young, old = self._recent.young[index], self._recent.old[index]
            for value in values:
                text = value if type(value) is str else _present_text(value)
                code = old.get(text)
                if code is None and text is not value:
                    code = young.get(text)
                if code is None:
                    spelled = canonical(text)
                    if spelled not in missing:
                        unknown.setdefault(index, []).append((text, spelled))
                        continue
                    code = ~self._oov_rows[index]
                codes[text] = code
            learnt[index] = codes
        for index, pairs in unknown.items():
            first, oov = self._places[index].offset + 1, self._oov_rows[index]
            numbers = self._vocabularies[index].codes([spelled for _, spelled in pairs])
            # Values that an update added come after OOV.
            learnt[index] |= {
                text: oov if code < 0 else first + code + (first + code >= oov)
                for (text, _), code in zip(pairs, numbers, strict=True)
            }
        return learnt

    # Fields with several values a row

    def _multi(self, index: int, cells: Sequence[Any]) -> tuple[npt.NDArray[np.int32], int, int]:
        """Return the ids of a multi field, the number of rows without a value, and that of unseen values."""
        field, oov = self._fields[index].field, self._oov_rows[index]
        parts = [self._parts(index, cell, field.separator) for cell in cells]
        codes = iter(self._codes([index], [[value for part in parts for value in part]])[0])
        ids_BM = np.full((len(cells), field.max_len), self._places[index].offset, np.int32)
        num_missing = num_unseen = 0
        for row, part in enumerate(parts):
            kept = [code for code in (next(codes) for _ in part) if code >= 0][: field.max_len]
            ids_BM[row, : len(kept)] = kept
            num_missing += not kept
            num_unseen += kept.count(oov)
        return ids_BM, num_missing, num_unseen

    def _parts(self, index: int, cell: Any, separator: str) -> Sequence[Any]:
        """Return the values in a cell of a multi field."""
        if cell is None or type(cell) is list:
            return cell or ()
        text = canonical(_present_text(cell))
        return () if text in self._missing[index] else text.split(separator)

    # Numbers

    def _read_numbers(
        self, fields: Sequence[int], columns: Columns, absent: Sequence[None]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return the numbers of some fields, fields × rows, and which are missing; refuse infinity."""
        raw = [columns.get(self._fields[index].field.name, absent) for index in fields]
        numbers_FB = np.array(raw, np.float64)  # None becomes NaN.
        if np.isinf(numbers_FB).any():
            raise _UnusualError
        for row, index in enumerate(fields):
            for value in self._missing_numbers[index]:
                numbers_FB[row, numbers_FB[row] == value] = np.nan
        return numbers_FB, np.isnan(numbers_FB)

    def _add_numbers(self, columns: Columns, absent: Sequence[None], encoded: Encoded) -> None:
        """Write ids and values of the fields that enter as numbers."""
        numbers_NB, is_missing_NB = self._read_numbers(self._numbers, columns, absent)
        filled_NB = np.where(is_missing_NB, 0.0, numbers_NB)
        encoded.num_missing[self._numbers] = is_missing_NB.sum(axis=1)
        for row, index in enumerate(self._numbers):
            place = self._places[index]
            out = encoded.values_BN[:, place.value_column]
            ids = standardise(filled_NB[row], is_missing_NB[row], self._fields[index], out)
            encoded.ids_BW[:, place.start] = ids + place.offset

    def _interpolate(self, columns: Columns, absent: Sequence[None], encoded: Encoded) -> None:
        """Write ids and values of the fields between whose vectors numbers are."""
        numbers_LB, is_missing_LB = self._read_numbers(self._linear, columns, absent)
        encoded.num_missing[self._linear] = missing_L = is_missing_LB.sum(axis=1)
        encoded.num_unseen[self._linear] = np.where(self._edges.is_empty_L, len(absent) - missing_L, 0)
        below_LB, shares_LB = self._edges.find(numbers_LB)
        ids_LB = np.where(is_missing_LB, self._linear_oov_L1, below_LB + 1) + self._linear_offsets_L1
        encoded.ids_BW[:, self._linear_columns] = ids_LB.T
        encoded.values_BN[:, self._linear_values] = np.where(is_missing_LB, 0.0, shares_LB).T


def _kind_of(fitted: FittedField) -> str:
    """Return which of the ways of this module a field takes."""
    field = fitted.field
    if field.derive is not None:
        return "derived"
    return {"categorical": "text", "multi": "multi", "numeric": field.transform}[field.kind]


def _text(value: Any) -> str | None:
    return None if value is None else _present_text(value)


def _present_text(value: Any) -> str:
    """Return a raw value as text, not yet canonical; leave numbers that are not whole to the encoder."""
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is float and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if kind is float and value != value:
        return ""
    raise _UnusualError
