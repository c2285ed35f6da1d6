import math
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import pieces
from recap_ctr.data.source import Block
from recap_ctr.data.text import MAX_DAYS, as_text
from recap_ctr.errors import InputError
from recap_ctr.schema import Field

PATTERNS = ("^x$", "^.*$", "*", "^y$")  # to polars, where it takes names


class TestText:
    @pytest.mark.slow
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

    def test_listed_values_are_missing(self) -> None:
        assert as_text(pl.Series(["", "NA", "-1", "a"]), ["NA", "-1"]).to_list() == [None, None, None, "a"]
        assert as_text(pl.Series([-1, 2]), ["NA", "-1"]).to_list() == [None, "2"]

    def test_listed_values_are_missing_in_any_spelling(self) -> None:
        missing = ["-1.00", "1970-01-01T00:00:00"]
        assert as_text(pl.Series([-1.0, 2.0]), missing).to_list() == [None, "2"]
        assert as_text(pl.Series(["-1", "1970-01-01", "1970"]), missing).to_list() == [None, None, "1970"]

    @pytest.mark.slow
    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(cents=st.lists(st.integers(1 - 10**17, 10**17 - 1), min_size=1))
    def test_decimals_read_as_their_text(self, cents: list[int]) -> None:
        decimals = pl.Series([Decimal(cent).scaleb(-2) for cent in cents], dtype=pl.Decimal(20, 2))
        text = pl.read_csv(decimals.to_frame("x").write_csv().encode(), infer_schema=False)["x"]
        spelled = as_text(decimals).to_list()
        assert spelled == as_text(text).to_list() == as_text(pl.Series(spelled)).to_list()
        whole = [i for i, cent in enumerate(cents) if cent % 100 == 0]
        assert [spelled[i] for i in whole] == [str(cents[i] // 100) for i in whole]

    @pytest.mark.slow
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
        spelled = as_text(series).to_list()
        polars = pl.read_csv(series.to_frame().write_csv().encode(), infer_schema=False)["x"]
        frame = pd.DataFrame({"x": pd.to_datetime([at.isoformat() for at in series], format="ISO8601")})
        pandas = pl.read_csv(frame.to_csv(index=False).encode(), infer_schema=False)["x"]
        for text in (polars, pandas, pl.Series(spelled), pl.Series([at.isoformat() for at in series])):
            assert as_text(text).to_list() == spelled
        if zone is None:
            assert len(set(spelled)) == len(set(moments))

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
    def test_only_whole_numbers_and_moments_change_their_spelling(self, text: str, expected: str) -> None:
        assert as_text(pl.Series([text])).to_list() == [expected]

    @pytest.mark.parametrize("name", PATTERNS)
    def test_column_names_are_not_patterns(self, name: str) -> None:
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
    def test_impossible_dates_are_named(self, kind: pl.DataType, most: int) -> None:
        """polars would panic on them, which is not an exception."""
        whole = pl.Int32() if kind == pl.Date else pl.Int64()
        for wrong in (most, -most - 1):
            with pytest.raises(InputError, match=rf"column 'x' holds an impossible date: {wrong} "):
                as_text(pl.Series("x", [0, None, wrong], dtype=whole).cast(kind))
            with pytest.raises(InputError, match="column 'x'"):
                lists = pl.Series("x", [[0, wrong], None], dtype=pl.List(whole)).cast(pl.List(kind))
                pieces(Block(lists.to_frame(), 1, "t.parquet"), Field(name="x", kind="multi", separator="|"))
        per_day = {"ms": 86_400 * 10**3, "us": 86_400 * 10**6}.get(getattr(kind, "time_unit", ""), 1)
        edges = [-MAX_DAYS * per_day, 0, MAX_DAYS * per_day]
        written = as_text(pl.Series("x", edges, dtype=whole).cast(kind))
        assert [text[:5] for text in written] == ["-2581", "1970-", "+2620"]

    @pytest.mark.parametrize("most", [2**63 - 1, -(2**63) + 1])
    def test_all_dates_in_nanoseconds_are_possible(self, most: int) -> None:
        written = as_text(pl.Series([most], dtype=pl.Int64).cast(pl.Datetime("ns")))
        assert written[0].startswith(("2262-", "1677-"))


def test_whole_numbers_that_passed_through_a_float_are_the_same_value() -> None:
    text = pl.Series(["7", "7.0", "-3.0", "1.50", "x.0", "v1.0", "12345678901234567.0", None])

    assert as_text(text).to_list() == ["7", "7", "-3", "1.50", "x.0", "v1.0", "12345678901234567.0", None]


def test_a_values_spelling_does_not_depend_on_its_neighbours() -> None:
    values = ["7.0", "True", "False", "x", "x.0", "", "-3.0", "truth", "true", None]
    expected = ["7", "true", "false", "x", "x.0", None, "-3", "truth", "true", None]
    assert as_text(pl.Series(values)).to_list() == expected
    assert [as_text(pl.Series([value], dtype=pl.String))[0] for value in values] == expected


def test_truth_values_are_the_same_however_they_are_spelled() -> None:
    assert as_text(pl.Series(["True", "False", None, "TRUE", "x"])).to_list() == [
        "true",
        "false",
        None,
        "TRUE",
        "x",
    ]
    assert as_text(pl.Series([True, False, None])).to_list() == ["true", "false", None]
