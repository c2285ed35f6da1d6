import math
from decimal import ROUND_CEILING, Decimal, localcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import (
    MISSING_CODE,
    PAD,
    PAD_CODE,
    Encoded,
    Encoder,
    FittedField,
    as_numbers,
    categories,
    hash_codes,
    interpolate,
    log_square,
    pieces,
    standardise,
)
from recap_ctr.data.layout import Layout
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema


def block(values: Any, dtype: Any = None, first_row: int = 1) -> Block:
    return Block(pl.DataFrame({"x": pl.Series("x", values, dtype=dtype)}), first_row, "t.csv")


def fitted(field: Field, values: list[str] | None = None, **learnt: Any) -> FittedField:
    kept = pl.Series("value", values or [], dtype=pl.String)
    return FittedField(field, kept, np.ones(len(kept), np.int64), **learnt)


def encode(field: FittedField, values: Any, dtype: Any = None) -> list[list[int]]:
    schema = Schema(label="y", fields=(field.field,))
    ids: list[list[int]] = Encoder(schema, [field]).encode(block(values, dtype)).ids_BW.tolist()
    return ids


class TestInfinity:
    """Infinity is an error in every kind of field; in a text column "inf" is a value."""

    def test_in_a_column_of_floats(self) -> None:
        field = fitted(Field(name="x", kind="categorical"), ["1"])
        with pytest.raises(InputError, match="row 3, field 'x': infinity is not a value"):
            encode(field, [1.0, math.nan, -math.inf])
        assert encode(field, ["1", "inf"]) == [[1], [2]]

    def test_in_a_list(self) -> None:
        field = fitted(Field(name="x", kind="multi", max_len=2), ["1"])
        with pytest.raises(InputError, match="row 3, field 'x': infinity is not a value"):
            encode(field, [[1.0, 2.0], None, [3.0, math.inf]])

    def test_listed_as_missing(self) -> None:
        field = fitted(Field(name="x", kind="categorical", missing=("inf",)), ["1"])
        assert encode(field, [1.0, math.inf]) == [[1], [2]]


class TestNumbers:
    FIELD = Field(name="x", kind="numeric", missing=("NA", "-1"))

    @pytest.mark.parametrize(
        ("values", "dtype"),
        [
            ([" 1.5", "NA", "-1", "-1.0", "", None, "nan", "2e3"], None),
            ([1.5, None, -1.0, -1.0, None, None, math.nan, 2e3], None),
        ],
        ids=["text", "floats"],
    )
    def test_missing_is_the_same_in_text_and_tables(self, values: list[Any], dtype: Any) -> None:
        assert as_numbers(block(values, dtype), self.FIELD).to_list() == [1.5, *[None] * 6, 2000.0]

    def test_whole_numbers_and_flags(self) -> None:
        assert as_numbers(block([3, None, -1]), self.FIELD).to_list() == [3.0, None, None]
        assert as_numbers(block([True, None]), self.FIELD).to_list() == [1.0, None]

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (["1", "inf"], "t.csv: row 12, field 'x': infinity is not a value\n  fix: replace it"),
            (["1", "-Infinity"], "t.csv: row 12, field 'x': infinity is not a value"),
            (["1", "1e999"], "t.csv: row 12, field 'x': infinity is not a value"),
            ([1.0, math.inf], "t.csv: row 12, field 'x': infinity is not a value"),
            (
                ["1", "abc"],
                "t.csv: row 12, field 'x': 'abc' is not a number\n  fix: repair the value, list it",
            ),
            (["1", "1,5"], "t.csv: row 12, field 'x': '1,5' is not a number"),
            ([[1.0], [2.0]], "t.csv: field 'x' is numeric, but its column is of type List(Float64)"),
        ],
    )
    def test_anything_else_names_its_row(self, values: list[Any], message: str) -> None:
        with pytest.raises(InputError) as error:
            as_numbers(block(values, first_row=11), self.FIELD)
        assert message in str(error.value)


def test_log_square_is_exact_on_whole_numbers() -> None:
    """x is in bucket k or above if x ≥ e^√k, which no whole number equals."""
    with localcontext() as context:
        context.prec = 40
        starts = [int(Decimal(k).sqrt().exp().to_integral_value(ROUND_CEILING)) for k in range(1, 192)]
    numbers = np.arange(3, 1_000_001)
    exact = np.searchsorted(np.array(starts), numbers, side="right")
    np.testing.assert_array_equal(log_square(numbers.astype(np.float64)), exact)


def test_log_square_is_the_published_table() -> None:
    table = {3: 1, 4: 1, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4, 10: 5, 12: 6, 15: 7, 20: 8, 30: 11, 50: 15}
    table |= {100: 21, 1000: 47, 10**4: 84, 10**5: 132, 10**6: 190}
    assert dict(zip(table, log_square(np.array(list(table), float)).tolist(), strict=True)) == table
    assert log_square(np.array([-2.9, -1, -0.5, 0, 0.9, 1, 2])).tolist() == [-2, -1, 0, 0, 0, 1, 2]
    assert log_square(np.array([-1e300, 1e300])).tolist() == [-(2**63), 477_170]


class TestInterpolate:
    """The place of a number among the edges is that of `np.interp`."""

    FIELD = Field(name="x", kind="numeric", transform="linear")

    def places(self, edges: list[float], numbers: list[float | None]) -> tuple[list[int], list[float]]:
        """Return the id of each number, and where it is among the edges: its id's number plus its share."""
        field = fitted(self.FIELD, [str(number) for number in range(len(edges))], edges=tuple(edges))
        encoder = Encoder(Schema(label="y", fields=(self.FIELD,)), [field])
        encoded = encoder.encode(block(numbers, pl.Float64))
        assert ((encoded.values_BN >= 0) & (encoded.values_BN <= 1)).all()
        is_missing = encoded.ids_BW[:, 0] == field.oov
        assert encoded.num_missing[0] == numbers.count(None) and not encoded.values_BN[is_missing].any()
        in_layout = encoder.layout.fields[0].numbers(encoded.ids_BW, encoded.values_BN)
        assert np.array_equal(np.isnan(in_layout), is_missing) and in_layout.dtype == np.float32
        places = encoded.ids_BW[:, 0] - 1 + encoded.values_BN[:, 0]
        np.testing.assert_allclose(in_layout[~is_missing], places[~is_missing])
        return encoded.ids_BW[:, 0].tolist(), places.tolist()

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=6, unique=True),
        st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6),
    )
    def test_any_numbers(self, edges: list[float], others: list[float]) -> None:
        edges = sorted(edges)
        numbers = [*others, *edges, *((low / 2 + high / 2) for low, high in pairwise(edges))]
        scale = max(abs(edges[0]), abs(edges[-1]), 2.0**-100)  # `np.interp` itself overflows.
        expected = np.interp(np.array(numbers) / scale, np.array(edges) / scale, np.arange(len(edges)))
        exact = np.diff(np.array(edges) / scale) > 1e-9  # Between closer edges it has no digits left.
        ids, places = self.places(edges, list(numbers))
        for number, value_id, place, right in zip(numbers, ids, places, expected, strict=True):
            assert 1 <= value_id < len(edges)
            if exact[value_id - 1]:
                assert place == pytest.approx(right, abs=1e-6), number

    def test_below_between_beyond_and_missing(self) -> None:
        ids, places = self.places([1.0, 2.0, 6.0], [0.0, 1.0, 1.25, 2.0, 5.0, 6.0, 7.0, None])
        assert ids == [1, 1, 1, 2, 2, 2, 2, 4]
        assert places[:-1] == [0.0, 0.0, 0.25, 1.0, 1.75, 2.0, 2.0]

    def test_a_last_edge_that_is_there_twice_has_an_id_of_its_own(self) -> None:
        ids, places = self.places([0.0, 1.0, 1.0], [0.0, 0.5, 1.0, 2.0, -1.0])
        assert (ids, places) == ([1, 1, 2, 2, 1], [0.0, 0.5, 1.0, 1.0, 0.0])
        assert self.places([3.0, 3.0], [3.0, 4.0, -1e308, None]) == ([1, 1, 1, 3], [0.0, 0.0, 0.0, 2.0])

    def test_huge_and_tiny_numbers(self) -> None:
        huge = 1.7e308
        ids, places = self.places([-huge, 0.0, huge], [-huge, -huge / 2, 0.0, huge / 4, huge])
        assert (ids, places) == ([1, 1, 2, 2, 2], [0.0, 0.5, 1.0, 1.25, 2.0])
        tiny = 5e-324
        assert self.places([0.0, tiny, 2 * tiny], [0.0, tiny, 2 * tiny])[0] == [1, 2, 2]

    def test_without_edges_all_is_unseen_or_missing(self) -> None:
        field = fitted(self.FIELD)
        encoded = Encoder(Schema(label="y", fields=(self.FIELD,)), [field]).encode(block([1.0, None, 3.0]))
        assert encoded.ids_BW.tolist() == [[1]] * 3 == [[field.oov]] * 3
        assert encoded.values_BN.tolist() == [[0.0]] * 3
        assert (encoded.num_missing.tolist(), encoded.num_unseen.tolist()) == ([1], [2])


class TestCategories:
    def test_missing_zero_makes_its_log_square_bucket_missing(self) -> None:
        field = Field(name="x", kind="numeric", transform="log-square", missing=("0",))
        assert categories(block([0.0, 0.4, 1.0, 3.0, None]), field).to_list() == [None, None, "1", "1", None]

    def test_missing_does_not_apply_to_bucket_numbers_of_quantiles(self) -> None:
        field = Field(name="x", kind="numeric", transform="quantiles", missing=("1",))
        edges = (10.0, 20.0)
        buckets = categories(block([5.0, 10.0, 15.0, 20.0, 1.0, None]), field, edges).to_list()
        assert buckets == ["0", "1", "1", "2", None, None]


class TestPieces:
    FIELD = Field(name="x", kind="multi", separator="|", max_len=3, missing=("NA",))

    def matrix(self, values: Any, dtype: Any = None) -> list[list[int]]:
        vocabulary = fitted(self.FIELD, ["a", "b", "c"])
        flat = pieces(block(values, dtype), self.FIELD)
        codes: list[list[int]] = flat.matrix(vocabulary.codes(flat.values), 3).tolist()
        return codes

    def test_text_and_lists_agree(self) -> None:
        text = ["a|b", "c", "", None, "a|z|b|c", "NA", "a||b", "b|NA|c"]
        lists = [
            ["a", "b"],
            ["c"],
            [],
            None,
            ["a", "z", "b", "c"],
            ["NA"],
            ["a", None, "b"],
            ["b", "NA", "c"],
        ]
        pad, unseen = PAD_CODE, MISSING_CODE
        expected = [[0, 1, pad], [2, pad, pad], [pad] * 3, [pad] * 3]
        expected += [[0, unseen, 1], [pad] * 3, [0, 1, pad], [1, 2, pad]]
        assert self.matrix(text) == expected
        assert self.matrix(lists) == expected

    def test_lists_of_numbers_and_fixed_width(self) -> None:
        field = Field(name="x", kind="multi", max_len=2)
        vocabulary = fitted(field, ["1", "2"])
        assert encode(vocabulary, [[1, 2], [2, 9]]) == [[1, 2], [2, 3]]
        assert encode(vocabulary, [[1.0, None], [2.0, 1.5]]) == [[1, 0], [2, 3]]
        assert encode(vocabulary, [[1, 2], [2, 9]], pl.Array(pl.Int64, 2)) == [[1, 2], [2, 3]]

    def test_missing_pieces_are_skipped(self) -> None:
        assert self.matrix(["||a", "a|||b|NA|c|z"]) == [[0, PAD_CODE, PAD_CODE], [0, 1, 2]]

    def test_no_values(self) -> None:
        assert self.matrix([None, ""]) == [[PAD_CODE] * 3] * 2
        assert self.matrix([[], None], pl.List(pl.String)) == [[PAD_CODE] * 3] * 2
        assert self.matrix([], pl.String) == []


class TestHashing:
    def test_codes_never_change(self) -> None:
        values = pl.Series(["a", "b", None, "a", "é", "18446744073709551616"])
        assert hash_codes(values, 1_000).tolist() == [928, 668, -1, 928, 963, 463]
        assert hash_codes(values, 2**31 - 3).max() < 2**31 - 3

    def test_no_values(self) -> None:
        assert hash_codes(pl.Series([None, None], dtype=pl.String), 9).tolist() == [-1, -1]
        assert hash_codes(pl.Series([], dtype=pl.String), 9).tolist() == []


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    vocabulary=st.lists(st.text(min_size=1, max_size=4), unique=True),
    others=st.lists(st.none() | st.text(max_size=4)),
)
def test_look_up_is_an_exact_dictionary(vocabulary: list[str], others: list[str | None]) -> None:
    field = fitted(Field(name="x", kind="categorical"), vocabulary)
    values = pl.Series([*others, *vocabulary], dtype=pl.String)
    codes = field.codes(values).tolist()
    assert codes == [vocabulary.index(value) if value in vocabulary else MISSING_CODE for value in values]


class TestEncoder:
    def test_ids_are_rows_of_one_table(self) -> None:
        cat, multi = Field(name="c", kind="categorical"), Field(name="m", kind="multi", max_len=2)
        number, hashed = Field(name="n", kind="numeric"), Field(name="h", kind="categorical", hash_buckets=4)
        schema = Schema(label="y", fields=(cat, multi, number, hashed))
        encoder = Encoder(
            schema,
            [
                fitted(cat, ["a", "b"]),
                fitted(multi, ["p"]),
                fitted(number, mean=10.0, scale=4.0),
                fitted(hashed),
            ],
        )
        layout = encoder.layout
        places = [(f.offset, f.size, f.start, f.width) for f in layout.fields]
        assert places == [(0, 4, 0, 1), (4, 3, 1, 2), (7, 3, 3, 1), (10, 6, 4, 1)]
        assert [f.value_column for f in layout.fields] == [None, None, 0, None]
        assert [f.pooling for f in layout.fields] == [None, "mean", None, None]
        assert (layout.num_fields, layout.num_rows, layout.num_columns, layout.num_values) == (4, 16, 5, 1)
        frame = pl.DataFrame(
            {"c": ["b", "new", None], "m": ["p q", None, "p"], "n": [18.0, None, 10.0], "h": ["z", "", "z"]}
        )
        encoded = encoder.encode(Block(frame, 1, "t"))
        bucket = int(hash_codes(pl.Series(["z"]), 4)[0]) + 1 + 10
        assert encoded.ids_BW.tolist() == [
            [2, 4 + 1, 4 + 2, 7 + 1, bucket],
            [3, 4, 4, 7 + 2, 10 + 5],
            [3, 4 + 1, 4, 7 + 1, bucket],
        ]
        assert encoded.values_BN.tolist() == [[2.0], [1.0], [0.0]]
        assert encoded.num_missing.tolist() == [1, 1, 1, 1]
        assert encoded.num_unseen.tolist() == [1, 1, 0, 0]

    def test_no_rows(self) -> None:
        assert encode(fitted(Field(name="x", kind="categorical"), ["a"]), [], pl.String) == []

    def test_absurd_numbers_stay_finite(self) -> None:
        number = Field(name="x", kind="numeric")
        encoder = Encoder(Schema(label="y", fields=(number,)), [fitted(number, mean=1.0, scale=1e-300)])
        values = encoder.encode(block([1e308, -1e308, 1.0])).values_BN
        assert values[:, 0].tolist() == [1e6, -1e6, 0.0]

    def test_a_missing_column_is_named_with_those_present(self) -> None:
        wide = Block(pl.DataFrame({f"c{i}": [1] for i in range(14)}), 1, "t.csv")
        with pytest.raises(InputError) as error:
            wide.column("x", "categorical field")
        message = str(error.value)
        assert message.startswith(
            "t.csv has no column 'x' (categorical field)\n  columns present: 'c0', 'c1'"
        )
        assert "'c11' and 2 more" in message
        assert message.endswith("fix: rename the column, or correct the schema or --label")

    def test_ids_beyond_32_bits_are_refused(self) -> None:
        many = [Field(name=name, kind="categorical", hash_buckets=2**30) for name in "ab"]
        with pytest.raises(
            InputError, match="2,147,483,652 values together; ids are 32-bit\n  fix: raise min_count"
        ):
            Encoder(Schema(label="y", fields=tuple(many)), [fitted(field) for field in many])

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        cat, hashed = Field(name="c", kind="categorical"), Field(name="h", kind="multi", hash_buckets=7)
        number, cut = Field(name="n", kind="numeric"), Field(name="q", kind="numeric", transform="quantiles")
        line = Field(name="e", kind="numeric", transform="linear", num_buckets=2)
        schema = Schema(label="y", fields=(cat, hashed, number, cut, line))
        encoder = Encoder(
            schema,
            [
                fitted(cat, ["a", "é", "2" * 99]),
                fitted(hashed),
                fitted(number, mean=0.1, scale=1 / 3),
                fitted(cut, ["1", "0"], edges=(0.1 + 0.2,)),
                fitted(line, ["0", "1", "2"], edges=(-1 / 3, 0.1 + 0.2, 1e308)),
            ],
        )
        entries = encoder.save(tmp_path)
        loaded = Encoder.load(tmp_path, schema, entries)
        frame = pl.DataFrame(
            {
                "c": ["é", "b", "2" * 99],
                "h": ["x y", None, "z"],
                "n": ["1", "2.5", ""],
                "q": ["0.3", "0.31", "-1"],
                "e": ["0.3", "", "1e300"],
            }
        )
        before, after = (e.encode(Block(frame, 1, "t")) for e in (encoder, loaded))
        np.testing.assert_array_equal(before.ids_BW, after.ids_BW)
        np.testing.assert_array_equal(before.values_BN, after.values_BN)
        assert loaded.layout == encoder.layout and loaded.layout.fields[4].is_linear
        assert loaded.fields[4].edges == encoder.fields[4].edges
        entries[0]["size"] += 1
        with pytest.raises(InputError, match="the vocabulary of field 'c' does not match the manifest"):
            Encoder.load(tmp_path, schema, entries)


def test_layout_of_sizes() -> None:
    layout = Layout.of_sizes([3, 5])
    assert (layout.num_rows, layout.num_columns, [f.offset for f in layout.fields]) == (8, 2, [0, 3])


def one_by_one(encoder: Encoder, block: Block) -> Encoded:
    """Encode field after field with the functions for one field."""
    ids: list[np.ndarray[Any, Any]] = []
    values = np.ones((block.frame.height, encoder.layout.num_values), np.float32)
    missing, unseen = np.zeros((2, len(encoder.fields)), np.int64)
    for i, (fitted, place) in enumerate(zip(encoder.fields, encoder.layout.fields, strict=True)):
        if fitted.field.kind == "multi":
            flat = pieces(block, fitted.field)
            codes = fitted.codes(flat.values)
            unseen[i] = (codes == MISSING_CODE).sum() - flat.values.null_count()
            field_ids = fitted.ids(flat.matrix(codes, place.width))
            missing[i] = (field_ids == PAD).all(axis=1).sum()
        elif place.value_column is not None:
            numbers = as_numbers(block, fitted.field)
            is_missing = numbers.is_null().to_numpy()
            filled = numbers.fill_null(0.0).to_numpy()
            read = interpolate if fitted.field.transform == "linear" else standardise
            field_ids = read(filled, is_missing, fitted, values[:, place.value_column])[:, None]
            missing[i] = is_missing.sum()
        else:
            text = categories(block, fitted.field, fitted.edges)
            codes = fitted.codes(text)
            missing[i], field_ids = text.null_count(), fitted.ids(codes)[:, None]
            unseen[i] = (codes == MISSING_CODE).sum() - missing[i]
        ids.append(field_ids + place.offset)
    return Encoded(np.concatenate(ids, axis=1).astype(np.int32), values, missing, unseen)


TEXTS = st.sampled_from(
    ["a", "b", "7", "7.0", "-1", "True", "true", "", "none", "ä", "x y", "y  z 7.0", "1e3", None]
)
NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.0, -1.0, 0.4, 7.0, float("nan")]))


@pytest.mark.slow
@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data(), st.integers(0, 12))
def test_fields_encode_together_as_one_by_one(data: st.DataObject, height: int) -> None:
    """The values of all fields go through polars together, whatever their types, vocabularies and missing values."""

    def drawn(name: str, values: Any, dtype: Any) -> pl.Series:
        return pl.Series(name, data.draw(st.lists(values, min_size=height, max_size=height)), dtype=dtype)

    frame = pl.DataFrame(
        [
            drawn("text", TEXTS, pl.String),
            drawn("other", TEXTS, pl.String),
            drawn("empty", TEXTS, pl.String),
            drawn("hashed", TEXTS, pl.String),
            drawn("whole", st.one_of(st.none(), st.integers(-9, 9)), pl.Int64),
            drawn("float", NUMBERS, pl.Float64),
            drawn("yes", st.one_of(st.none(), st.booleans()), pl.Boolean),
            drawn("tags", TEXTS, pl.String),
            drawn("value", NUMBERS, pl.Float64),
            drawn("square", NUMBERS, pl.Float64),
            drawn("cut", NUMBERS, pl.Float64),
            drawn("line", NUMBERS, pl.Float64),
        ]
    )
    kept = pl.Series(["7", "a", "true", "x", "z", "-1", "0", "1"])
    numeric: dict[str, Any] = {"kind": "numeric", "missing": ("-1", "0", "none")}
    fields = (
        Field(name="text", kind="categorical"),
        Field(name="other", kind="categorical", missing=("none", "7")),
        Field(name="empty", kind="categorical"),
        Field(name="hashed", kind="categorical", hash_buckets=5),
        Field(name="whole", kind="categorical", missing=("none", "7")),
        Field(name="float", kind="categorical"),
        Field(name="yes", kind="categorical"),
        Field(name="tags", kind="multi", max_len=2),
        Field(name="value", **numeric),
        Field(name="square", transform="log-square", **numeric),
        Field(name="cut", transform="quantiles", num_buckets=4, **numeric),
        Field(name="line", transform="linear", num_buckets=2, **numeric),
    )
    nothing = pl.Series([], dtype=pl.String)
    learnt = [
        FittedField(
            field,
            nothing if field.name in ("empty", "hashed") else kept,
            np.ones(len(kept), np.int64),
            mean=0.5,
            scale=2.0,
            edges=(-1.0, 0.0, 3.0) if field.name in ("cut", "line") else (),
        )
        for field in fields
    ]
    encoder = Encoder(Schema(label="click", fields=fields), learnt)
    rows = Block(frame, 1, "rows")
    encoded, expected = encoder.encode(rows), one_by_one(encoder, rows)
    for part in ("ids_BW", "values_BN", "num_missing", "num_unseen"):
        np.testing.assert_array_equal(getattr(encoded, part), getattr(expected, part), err_msg=part)
