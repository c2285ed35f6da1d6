import math
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal, localcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import (
    MAX_DAYS,
    MISSING_CODE,
    PAD,
    PAD_CODE,
    Encoded,
    Encoder,
    FittedField,
    as_numbers,
    as_text,
    categories,
    column,
    hash_codes,
    log_square,
    pieces,
    standardise,
)
from recap_ctr.data.layout import Layout
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

PATTERNS = ("^x$", "^.*$", "*", "^y$")  # to polars, where it takes names


def block(values: Any, dtype: Any = None, first_row: int = 1) -> Block:
    return Block(pl.DataFrame({"x": pl.Series("x", values, dtype=dtype)}), first_row, "t.csv")


def fitted(field: Field, values: list[str] | None = None, **learnt: Any) -> FittedField:
    kept = pl.Series("value", values or [], dtype=pl.String)
    return FittedField(field, kept, np.ones(len(kept), np.int64), **learnt)


def encode(field: FittedField, values: Any, dtype: Any = None) -> list[list[int]]:
    schema = Schema(label="y", fields=(field.field,))
    ids: list[list[int]] = Encoder(schema, [field]).encode(block(values, dtype)).ids_BW.tolist()
    return ids


class TestText:
    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(values=st.lists(st.none() | st.integers(1 - 2**53, 2**53 - 1), min_size=1))
    def test_a_number_is_one_value_in_every_type(self, values: list[int | None]) -> None:
        expected = [None if value is None else str(value) for value in values]
        floats = [math.nan if value is None else float(value) for value in values]
        for series in (
            pl.Series(values, dtype=pl.Int64),
            pl.Series(expected, dtype=pl.String),
            pl.Series(values, dtype=pl.Float64, strict=False),
            pl.Series(floats),
        ):
            assert as_text(series).to_list() == expected

    @pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 2**100])
    def test_long_ids_stay_exact(self, value: int) -> None:
        assert as_text(pl.Series([value, None])).to_list() == [str(value), None]
        assert as_text(pl.Series([str(value), None])).to_list() == [str(value), None]

    def test_missing_among_fractions_stays_missing(self) -> None:
        assert as_text(pl.Series([0.5, None, math.nan, 2.0, -0.0])).to_list() == ["0.5", None, None, "2", "0"]

    @pytest.mark.parametrize(
        ("series", "expected"),
        [
            (pl.Series([True, False, None]), ["true", "false", None]),
            (pl.Series(["a", ""], dtype=pl.Categorical), ["a", None]),
            (pl.Series([Decimal("7.50")]), ["7.50"]),
            (pl.Series([None, None]), [None, None]),
            (pl.Series([], dtype=pl.Float64), []),
        ],
    )
    def test_other_types(self, series: pl.Series, expected: list[str | None]) -> None:
        assert as_text(series).to_list() == expected

    def test_missing_is_what_the_field_says(self) -> None:
        assert as_text(pl.Series(["", "NA", "-1", "a"]), ["NA", "-1"]).to_list() == [None, None, None, "a"]
        assert as_text(pl.Series([-1, 2]), ["NA", "-1"]).to_list() == [None, "2"]

    def test_missing_is_found_in_any_spelling(self) -> None:
        missing = ["-1.00", "1970-01-01T00:00:00"]
        assert as_text(pl.Series([-1.0, 2.0]), missing).to_list() == [None, "2"]
        assert as_text(pl.Series(["-1", "1970-01-01", "1970"]), missing).to_list() == [None, None, "1970"]

    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(cents=st.lists(st.integers(1 - 10**17, 10**17 - 1), min_size=1))
    def test_decimals_read_as_their_text(self, cents: list[int]) -> None:
        decimals = pl.Series([Decimal(cent).scaleb(-2) for cent in cents], dtype=pl.Decimal(20, 2))
        text = pl.read_csv(decimals.to_frame("x").write_csv().encode(), infer_schema=False)["x"]
        found = as_text(decimals).to_list()
        assert found == as_text(text).to_list() == as_text(pl.Series(found)).to_list()
        whole = [i for i, cent in enumerate(cents) if cent % 100 == 0]
        assert [found[i] for i in whole] == [str(cents[i] // 100) for i in whole]

    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(
        moments=st.lists(
            st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1))
            | st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(
                lambda at: at.replace(microsecond=0)
            )
            | st.dates().map(lambda day: datetime(day.year, day.month, day.day)),
            min_size=1,
        ),
        unit=st.sampled_from(["us", "ns"]),
        zone=st.sampled_from([None, "UTC", "Asia/Tokyo"]),
    )
    def test_moments_read_as_their_text(
        self, moments: list[datetime], unit: Literal["us", "ns"], zone: str | None
    ) -> None:
        moments = [at for at in moments if 1900 <= at.year < 2100] or [datetime(2000, 1, 1)]
        series = pl.Series("x", moments, dtype=pl.Datetime(unit)).dt.replace_time_zone(zone)
        found = as_text(series).to_list()
        polars = pl.read_csv(series.to_frame().write_csv().encode(), infer_schema=False)["x"]
        frame = pd.DataFrame({"x": pd.to_datetime([at.isoformat() for at in series], format="ISO8601")})
        pandas = pl.read_csv(frame.to_csv(index=False).encode(), infer_schema=False)["x"]
        for text in (polars, pandas, pl.Series(found), pl.Series([at.isoformat() for at in series])):
            assert as_text(text).to_list() == found
        if zone is None:
            assert len(set(found)) == len(set(moments))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("2026-01-31T23:59:00.500", "2026-01-31 23:59:00.5"),
            ("2026-01-31T23:59:00Z", "2026-01-31 23:59:00+00:00"),
            ("2026-01-31 23:59:00-0130", "2026-01-31 23:59:00-01:30"),
            ("2026-01-31T00:00:00", "2026-01-31"),
            ("2026-01-31T00:00:00Z", "2026-01-31 00:00:00+00:00"),
            ("at 2026-01-31T23:59:00", "at 2026-01-31T23:59:00"),
            ("2026-01-31T23:59:00.0.0", "2026-01-31T23:59:00.0.0"),
            ("10.0.0.100", "10.0.0.100"),
            ("2.10", "2.10"),
        ],
    )
    def test_only_whole_numbers_and_moments_are_spelled_anew(self, text: str, expected: str) -> None:
        assert as_text(pl.Series([text])).to_list() == [expected]

    @pytest.mark.parametrize("name", PATTERNS)
    def test_a_name_is_no_pattern(self, name: str) -> None:
        values: list[list[Any]] = [
            [1.0, None],
            ["7.0", "True"],
            [7, 8],
            [datetime(2026, 1, 1)],
            [Decimal("1.00")],
        ]
        for items in values:
            series = pl.Series("x", items, strict=False)
            assert as_text(series.alias(name), ["8"]).to_list() == as_text(series, ["8"]).to_list()

    @pytest.mark.parametrize("values", [[b"\0"], [{"a": 1}], [[1]], [object()], [timedelta(1)]])
    def test_types_without_categories_are_refused(self, values: list[Any]) -> None:
        with pytest.raises(InputError, match=r"column 'x' is of type .* which holds no categories"):
            as_text(pl.Series("x", values))

    @pytest.mark.parametrize(
        ("kind", "most"),
        [
            (pl.Date(), 2**31 - 1),
            (pl.Datetime("ms"), 2**63 - 1),
            (pl.Datetime("us"), 2**63 - 1),
            (pl.Datetime("us", "Europe/Berlin"), 2**63 - 1),
        ],
    )
    def test_dates_that_are_none_are_named(self, kind: pl.DataType, most: int) -> None:
        """Where polars would panic, which is no exception."""
        whole = pl.Int32() if kind == pl.Date else pl.Int64()
        for wrong in (most, -most - 1):
            with pytest.raises(InputError, match=rf"column 'x' holds a date that is none: {wrong} "):
                as_text(pl.Series("x", [0, None, wrong], dtype=whole).cast(kind))
            with pytest.raises(InputError, match="column 'x'"):
                lists = pl.Series("x", [[0, wrong], None], dtype=pl.List(whole)).cast(pl.List(kind))
                pieces(Block(lists.to_frame(), 1, "t.parquet"), Field(name="x", kind="multi", separator="|"))
        per_day = {"ms": 86_400 * 10**3, "us": 86_400 * 10**6}.get(getattr(kind, "time_unit", ""), 1)
        edges = [-MAX_DAYS * per_day, 0, MAX_DAYS * per_day]
        written = as_text(pl.Series("x", edges, dtype=whole).cast(kind))
        assert [text[:5] for text in written] == ["-2581", "1970-", "+2620"]

    @pytest.mark.parametrize("most", [2**63 - 1, -(2**63) + 1])
    def test_all_dates_in_nanoseconds_are_some(self, most: int) -> None:
        written = as_text(pl.Series([most], dtype=pl.Int64).cast(pl.Datetime("ns")))
        assert written[0].startswith(("2262-", "1677-"))


class TestInfinity:
    """An error in every kind of field, as the design has it; a word in text."""

    def test_in_a_column_of_floats(self) -> None:
        field = fitted(Field(name="x", kind="categorical"), ["1"])
        with pytest.raises(InputError, match="row 3, field 'x': infinity is not a value"):
            encode(field, [1.0, math.nan, -math.inf])
        assert encode(field, ["1", "inf"]) == [[1], [2]]

    def test_in_a_list(self) -> None:
        field = fitted(Field(name="x", kind="multi", max_len=2), ["1"])
        with pytest.raises(InputError, match="row 3, field 'x': infinity is not a value"):
            encode(field, [[1.0, 2.0], None, [3.0, math.inf]])

    def test_unless_it_means_missing(self) -> None:
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
    def test_missing_alike_in_text_and_tables(self, values: list[Any], dtype: Any) -> None:
        assert as_numbers(block(values, dtype), self.FIELD).to_list() == [1.5, *[None] * 6, 2000.0]

    def test_whole_numbers_and_flags(self) -> None:
        assert as_numbers(block([3, None, -1]), self.FIELD).to_list() == [3.0, None, None]
        assert as_numbers(block([True, None]), self.FIELD).to_list() == [1.0, None]

    @pytest.mark.parametrize(
        ("values", "said"),
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
            ([[1.0], [2.0]], "t.csv: field 'x' is numeric, its column of type List(Float64) is not"),
        ],
    )
    def test_anything_else_names_its_row(self, values: list[Any], said: str) -> None:
        with pytest.raises(InputError) as error:
            as_numbers(block(values, first_row=11), self.FIELD)
        assert said in str(error.value)


def test_log_square_is_exact_on_whole_numbers() -> None:
    """x is in bucket k or above if x ≥ e^√k, which no whole number equals."""
    with localcontext() as context:
        context.prec = 40
        starts = [int(Decimal(k).sqrt().exp().to_integral_value(ROUND_CEILING)) for k in range(1, 192)]
    numbers = np.arange(3, 1_000_001)
    exact = np.searchsorted(np.array(starts), numbers, side="right")
    np.testing.assert_array_equal(log_square(numbers.astype(np.float64)), exact)


def test_log_square_is_the_published_table() -> None:
    table = {3: 1, 4: 1, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4, 10: 5, 12: 6, 15: 7, 20: 8, 30: 11, 50: 15} | {
        100: 21, 1000: 47, 10**4: 84, 10**5: 132, 10**6: 190
    }  # fmt: skip
    assert dict(zip(table, log_square(np.array(list(table), float)).tolist(), strict=True)) == table
    assert log_square(np.array([-2.9, -1, -0.5, 0, 0.9, 1, 2])).tolist() == [-2, -1, 0, 0, 0, 1, 2]
    assert log_square(np.array([-1e300, 1e300])).tolist() == [-(2**63), 477_170]


class TestCategories:
    def test_missing_zero_takes_its_log_square_bucket_along(self) -> None:
        field = Field(name="x", kind="numeric", transform="log-square", missing=("0",))
        assert categories(block([0.0, 0.4, 1.0, 3.0, None]), field).to_list() == [None, None, "1", "1", None]

    def test_the_number_of_a_quantile_means_nothing(self) -> None:
        field = Field(name="x", kind="numeric", transform="quantiles", missing=("1",))
        edges = (10.0, 20.0)
        found = categories(block([5.0, 10.0, 15.0, 20.0, 1.0, None]), field, edges).to_list()
        assert found == ["0", "1", "1", "2", None, None]


class TestPieces:
    FIELD = Field(name="x", kind="multi", separator="|", max_len=3, missing=("NA",))

    def matrix(self, values: Any, dtype: Any = None) -> list[list[int]]:
        known = fitted(self.FIELD, ["a", "b", "c"])
        found = pieces(block(values, dtype), self.FIELD)
        codes: list[list[int]] = found.matrix(known.codes(found.values), 3).tolist()
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
        expected = [
            [0, 1, pad], [2, pad, pad], [pad] * 3, [pad] * 3, [0, unseen, 1], [pad] * 3, [0, 1, pad], [1, 2, pad]
        ]  # fmt: skip
        assert self.matrix(text) == expected
        assert self.matrix(lists) == expected

    def test_lists_of_numbers_and_fixed_width(self) -> None:
        field = Field(name="x", kind="multi", max_len=2)
        known = fitted(field, ["1", "2"])
        assert encode(known, [[1, 2], [2, 9]]) == [[1, 2], [2, 3]]
        assert encode(known, [[1.0, None], [2.0, 1.5]]) == [[1, 0], [2, 3]]
        assert encode(known, [[1, 2], [2, 9]], pl.Array(pl.Int64, 2)) == [[1, 2], [2, 3]]

    def test_absent_pieces_take_no_place(self) -> None:
        assert self.matrix(["||a", "a|||b|NA|c|z"]) == [[0, PAD_CODE, PAD_CODE], [0, 1, 2]]

    def test_nothing_at_all(self) -> None:
        assert self.matrix([None, ""]) == [[PAD_CODE] * 3] * 2
        assert self.matrix([[], None], pl.List(pl.String)) == [[PAD_CODE] * 3] * 2
        assert self.matrix([], pl.String) == []


class TestHashing:
    def test_is_the_same_for_ever(self) -> None:
        values = pl.Series(["a", "b", None, "a", "é", "18446744073709551616"])
        assert hash_codes(values, 1_000).tolist() == [928, 668, -1, 928, 963, 463]
        assert hash_codes(values, 2**31 - 3).max() < 2**31 - 3

    def test_nothing_at_all(self) -> None:
        assert hash_codes(pl.Series([None, None], dtype=pl.String), 9).tolist() == [-1, -1]
        assert hash_codes(pl.Series([], dtype=pl.String), 9).tolist() == []


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    known=st.lists(st.text(min_size=1, max_size=4), unique=True),
    asked=st.lists(st.none() | st.text(max_size=4)),
)
def test_look_up_is_an_exact_dictionary(known: list[str], asked: list[str | None]) -> None:
    field = fitted(Field(name="x", kind="categorical"), known)
    values = pl.Series([*asked, *known], dtype=pl.String)
    codes = field.codes(values).tolist()
    assert codes == [known.index(value) if value in known else MISSING_CODE for value in values]


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
        assert [(f.offset, f.size, f.start, f.width) for f in layout.fields] == [
            (0, 4, 0, 1), (4, 3, 1, 2), (7, 3, 3, 1), (10, 6, 4, 1)
        ]  # fmt: skip
        assert [f.value_column for f in layout.fields] == [None, None, 0, None]
        assert [f.pooling for f in layout.fields] == [None, "mean", None, None]
        assert (layout.num_fields, layout.num_rows, layout.num_columns, layout.num_values) == (4, 16, 5, 1)
        frame = pl.DataFrame(
            {"c": ["b", "new", None], "m": ["p q", None, "p"], "n": [18.0, None, 10.0], "h": ["z", "", "z"]}
        )
        found = encoder.encode(Block(frame, 1, "t"))
        bucket = int(hash_codes(pl.Series(["z"]), 4)[0]) + 1 + 10
        assert found.ids_BW.tolist() == [
            [2, 4 + 1, 4 + 2, 7 + 1, bucket], [3, 4, 4, 7 + 2, 10 + 5], [3, 4 + 1, 4, 7 + 1, bucket]
        ]  # fmt: skip
        assert found.values_BN.tolist() == [[2.0], [1.0], [0.0]]
        assert found.num_missing.tolist() == [1, 1, 1, 1]
        assert found.num_unseen.tolist() == [1, 1, 0, 0]

    def test_no_rows(self) -> None:
        assert encode(fitted(Field(name="x", kind="categorical"), ["a"]), [], pl.String) == []

    def test_absurd_numbers_stay_finite(self) -> None:
        number = Field(name="x", kind="numeric")
        encoder = Encoder(Schema(label="y", fields=(number,)), [fitted(number, mean=1.0, scale=1e-300)])
        values = encoder.encode(block([1e308, -1e308, 1.0])).values_BN
        assert values[:, 0].tolist() == [1e6, -1e6, 0.0]

    def test_a_missing_column_is_named_with_those_present(self) -> None:
        with pytest.raises(InputError) as error:
            column(
                Block(pl.DataFrame({f"c{i}": [1] for i in range(14)}), 1, "t.csv"), "x", "categorical field"
            )
        said = str(error.value)
        assert said.startswith("t.csv has no column 'x' (categorical field)\n  columns present: 'c0', 'c1'")
        assert "'c11' and 2 more" in said
        assert said.endswith("fix: rename the column, or correct the schema")

    def test_ids_beyond_32_bits_are_refused(self) -> None:
        many = [Field(name=name, kind="categorical", hash_buckets=2**30) for name in "ab"]
        with pytest.raises(
            InputError, match="2,147,483,652 values together; ids are 32-bit\n  fix: raise min_count"
        ):
            Encoder(Schema(label="y", fields=tuple(many)), [fitted(field) for field in many])

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        cat, hashed = Field(name="c", kind="categorical"), Field(name="h", kind="multi", hash_buckets=7)
        number, cut = Field(name="n", kind="numeric"), Field(name="q", kind="numeric", transform="quantiles")
        schema = Schema(label="y", fields=(cat, hashed, number, cut))
        encoder = Encoder(
            schema,
            [
                fitted(cat, ["a", "é", "2" * 99]),
                fitted(hashed),
                fitted(number, mean=0.1, scale=1 / 3),
                fitted(cut, ["1", "0"], edges=(0.1 + 0.2,)),
            ],
        )
        described = encoder.save(tmp_path)
        again = Encoder.load(tmp_path, schema, described)
        frame = pl.DataFrame(
            {
                "c": ["é", "b", "2" * 99],
                "h": ["x y", None, "z"],
                "n": ["1", "2.5", ""],
                "q": ["0.3", "0.31", "-1"],
            }
        )
        one, two = (e.encode(Block(frame, 1, "t")) for e in (encoder, again))
        np.testing.assert_array_equal(one.ids_BW, two.ids_BW)
        np.testing.assert_array_equal(one.values_BN, two.values_BN)
        assert again.layout == encoder.layout
        described[0]["size"] += 1
        with pytest.raises(InputError, match="the vocabulary of field 'c' does not fit"):
            Encoder.load(tmp_path, schema, described)


def test_layout_of_sizes() -> None:
    layout = Layout.of_sizes([3, 5])
    assert (layout.num_rows, layout.num_columns, [f.offset for f in layout.fields]) == (8, 2, [0, 3])


def test_whole_numbers_that_passed_through_a_float_are_the_same_value() -> None:
    text = pl.Series(["7", "7.0", "-3.0", "1.50", "x.0", "v1.0", "12345678901234567.0", None])

    assert as_text(text).to_list() == ["7", "7", "-3", "1.50", "x.0", "v1.0", "12345678901234567.0", None]


def test_a_values_spelling_does_not_depend_on_its_neighbours() -> None:
    values = ["7.0", "True", "False", "x", "", "truth", None]
    alone = [as_text(pl.Series([value], dtype=pl.String))[0] for value in values]
    assert as_text(pl.Series(values)).to_list() == alone == ["7", "true", "false", "x", None, "truth", None]


def test_truth_values_are_the_same_however_they_are_spelled() -> None:
    assert as_text(pl.Series(["True", "False", None, "TRUE", "x"])).to_list() == [
        "true",
        "false",
        None,
        "TRUE",
        "x",
    ]
    assert as_text(pl.Series([True, False, None])).to_list() == ["true", "false", None]


def one_by_one(encoder: Encoder, block: Block) -> Encoded:
    """Field after field, as the fields' own functions say."""
    ids: list[np.ndarray[Any, Any]] = []
    values = np.ones((block.frame.height, encoder.layout.num_values), np.float32)
    missing, unseen = np.zeros((2, len(encoder.fields)), np.int64)
    for i, (fitted, at) in enumerate(zip(encoder.fields, encoder.layout.fields, strict=True)):
        if fitted.field.kind == "multi":
            flat = pieces(block, fitted.field)
            codes = fitted.codes(flat.values)
            unseen[i] = (codes == MISSING_CODE).sum() - flat.values.null_count()
            own = fitted.ids(flat.matrix(codes, at.width))
            missing[i] = (own == PAD).all(axis=1).sum()
        elif at.value_column is not None:
            numbers = as_numbers(block, fitted.field)
            absent = numbers.is_null().to_numpy()
            filled = numbers.fill_null(0.0).to_numpy()
            own = standardise(filled, absent, fitted, values[:, at.value_column])[:, None]
            missing[i] = absent.sum()
        else:
            text = categories(block, fitted.field, fitted.edges)
            codes = fitted.codes(text)
            missing[i], own = text.null_count(), fitted.ids(codes)[:, None]
            unseen[i] = (codes == MISSING_CODE).sum() - missing[i]
        ids.append(own + at.offset)
    return Encoded(np.concatenate(ids, axis=1).astype(np.int32), values, missing, unseen)


TEXTS = st.sampled_from(
    ["a", "b", "7", "7.0", "-1", "True", "true", "", "none", "ä", "x y", "y  z 7.0", "1e3", None]
)
NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.0, -1.0, 0.4, 7.0, float("nan")]))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data(), st.integers(0, 12))
def test_all_fields_at_once_equal_one_after_the_other(data: st.DataObject, height: int) -> None:
    """Texts of all fields go through polars together: whatever their types, vocabularies and missing values."""

    def drawn(name: str, of: Any, dtype: Any) -> pl.Series:
        return pl.Series(name, data.draw(st.lists(of, min_size=height, max_size=height)), dtype=dtype)

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
        ]
    )
    known = pl.Series(["7", "a", "true", "x", "z", "-1", "0", "1"])
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
    )
    own = {"empty": pl.Series([], dtype=pl.String), "hashed": pl.Series([], dtype=pl.String)}
    learnt = [
        FittedField(field, own.get(field.name, known), np.ones(len(known), np.int64), 0.5, 2.0, edges)
        for field in fields
        for edges in [(-1.0, 0.0, 3.0) if field.name == "cut" else ()]
    ]
    encoder = Encoder(Schema(label="click", fields=fields), learnt)
    rows = Block(frame, 1, "rows")
    found, expected = encoder.encode(rows), one_by_one(encoder, rows)
    for part in ("ids_BW", "values_BN", "num_missing", "num_unseen"):
        np.testing.assert_array_equal(getattr(found, part), getattr(expected, part), err_msg=part)


def test_a_value_reads_the_same_beside_any_other() -> None:
    values = ["7.0", "True", "False", "x.0", "", "-3.0", None, "true"]
    whole = as_text(pl.Series(values, dtype=pl.String)).to_list()
    assert whole == ["7", "true", "false", "x.0", None, "-3", None, "true"]
    assert [as_text(pl.Series([value], dtype=pl.String))[0] for value in values] == whole
