import math
import sys
from datetime import date
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import Encoded, Encoder, FittedField
from recap_ctr.data.few_rows import MAX_CACHED_LENGTH, FewRows
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text, canonical
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

KEPT = ["a", "b", "7", "0.5", "true", "2026-01-31", "2026-01-31 10:00:00+00:00", "é", "1000000"]


def fitted(field: Field, values: list[str] | None = None, **learnt: Any) -> FittedField:
    kept = pl.Series("value", values or [], dtype=pl.String)
    return FittedField(field, kept, np.ones(len(kept), np.int64), **learnt)


def line(name: str, *edges: float, missing: tuple[str, ...] = ()) -> FittedField:
    field = Field(name=name, kind="numeric", transform="linear", missing=missing)
    return fitted(field, [str(number) for number in range(len(edges))], edges=edges)


def make_encoder() -> Encoder:
    buckets = [str(bucket) for bucket in range(-2, 30)]
    hours = [str(hour) for hour in range(20)]
    kept = [
        fitted(Field(name="word", kind="categorical"), KEPT),
        fitted(Field(name="empty", kind="categorical")),
        fitted(Field(name="na", kind="categorical", missing=("NA", "7.0")), KEPT, num_added=3),
        fitted(Field(name="hashed", kind="categorical", hash_buckets=11)),
        fitted(
            Field(name="tags", kind="multi", separator="|", max_len=2, missing=("NA",)), KEPT, num_added=2
        ),
        fitted(Field(name="bag", kind="multi", max_len=3, hash_buckets=5)),
        fitted(Field(name="price", kind="numeric", missing=("-1",)), mean=2.0, scale=3.0),
        fitted(Field(name="count", kind="numeric", transform="log-square", missing=("0", "-1")), buckets),
        fitted(Field(name="total", kind="numeric", transform="log-square"), [*buckets, "-900", "1100"]),
        fitted(Field(name="rank", kind="numeric", transform="quantiles"), ["0", "1"], edges=(1.0, 5.0)),
        line("share", 0.0, 0.3, 1.0, 1.0),
        line("never"),
        line("debt", -1.7e308, -1.0, 0.0, 1e6, 1.7e308, missing=("-1", "NA")),
        fitted(Field(name="hour", kind="categorical", derive="hour", source="ts", unit="s"), hours),
        fitted(Field(name="day", kind="categorical", derive="weekday", source="ts", unit="s"), ["0", "3"]),
        fitted(
            Field(name="iso", kind="categorical", derive="hour", source="at", missing=("2026-01-31",)), hours
        ),
        fitted(Field(name="digits", kind="categorical", derive="hour", source="d", unit="yymmddhh"), hours),
    ]
    return Encoder(Schema(label="y", fields=tuple(entry.field for entry in kept)), kept)


ENCODER = make_encoder()
WORDS = st.sampled_from(
    [
        *KEPT,
        *("", "NA", "7.0", "7.00", "True", "False", "z", "a|b", "a|NA||b|z", "7.0|b", "-0.0", "1.0\n"),
        *("2026-01-31T00:00:00", "2026-01-31T10:00:00Z", "2026-01-31 10:00:00.500+0000", "nan", "inf"),
        "x" * (MAX_CACHED_LENGTH + 1),
    ]
) | st.text(max_size=4)
NUMBERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 0.5, 7.0, 1e6, 2.0**53, 1e300, -1e300, math.nan]
) | st.floats(allow_infinity=False)
MOMENTS = st.sampled_from(
    ["1700000000", "1700003600.0", "17", "x", "", "2026-01-31T10:11:12Z", "2026/01/31 07:00:00", "26013107"]
)
KINDS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "text": (WORDS, pl.String),
    "whole": (st.integers(-(2**40), 2**40) | st.sampled_from([7, 0, 1_700_000_000, 26013107]), pl.Int64),
    "floats": (NUMBERS, pl.Float64),
    "flags": (st.booleans(), pl.Boolean),
    "moments": (MOMENTS, pl.String),
    "words": (st.lists(WORDS | st.none(), max_size=4), pl.List(pl.String)),
    "nothing": (st.none(), pl.Null),
}
ALLOWED = {
    **dict.fromkeys(("word", "empty", "na", "hashed"), ("text", "whole", "floats", "flags", "nothing")),
    **dict.fromkeys(("tags", "bag"), ("text", "words", "whole", "nothing")),
    **dict.fromkeys(
        ("price", "count", "total", "rank", "share", "never", "debt"), ("floats", "whole", "flags", "nothing")
    ),
    **dict.fromkeys(("ts", "at", "d"), ("moments", "whole", "floats", "text", "nothing")),
}


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    height = draw(st.integers(1, 4))
    columns = []
    for name, kinds in ALLOWED.items():
        values, kind = KINDS[draw(st.sampled_from(kinds))]
        cells = draw(st.lists(values | st.none(), min_size=height, max_size=height))
        columns.append(pl.Series(name, cells, dtype=kind))
    return pl.DataFrame(columns)


def assert_same(few: Encoded, many: Encoded) -> None:
    for name in ("ids_BW", "values_BN", "num_missing", "num_unseen"):
        mine, theirs = getattr(few, name), getattr(many, name)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
        assert mine.dtype == theirs.dtype


class TestAgainstTheEncoder:
    @pytest.mark.slow
    @given(st.lists(frames(), min_size=1, max_size=3))
    @settings(max_examples=40, deadline=None)
    def test_same_ids_from_a_small_cache(self, blocks: list[pl.DataFrame]) -> None:
        few = FewRows(ENCODER, cached_values=6)
        for frame in [*blocks, *blocks]:
            encoded = few.encode_frame(frame)
            if encoded is not None:
                assert_same(encoded, ENCODER.encode(Block(frame, 1, "t")))

    def test_usual_rows_are_encoded_here(self) -> None:
        rows: dict[str, list[Any]] = {
            "word": ["a", None, "new"],
            "empty": ["a", "", None],
            "na": [7, 8, None],
            "hashed": ["a", "q", None],
            "tags": [["a", None, "b", "7"], [], None],
            "bag": ["a b c d", "", None],
            "price": [1, 2, None],
            "count": [0.0, -3.5, 1e4],
            "total": [1e300, -900.0, math.exp(math.sqrt(1100.5))],
            "rank": [0.0, 1.0, 99.0],
            "share": [1.0, 0.1, None],
            "never": [0.0, 7.0, None],
            "debt": [-1e308, -1.0, 3e5],
            "ts": ["1700000000", "1", None],
            "at": ["2026-01-31T10:11:12Z", "2026-01-31", "no"],
            "d": [26013107, 26013199, None],
        }
        frame = pl.DataFrame(rows)
        few = FewRows(ENCODER)
        for part in (frame, pl.concat([frame] * 20)):
            encoded = few.encode_frame(part)
            assert encoded is not None
            assert_same(encoded, ENCODER.encode(Block(part, 1, "t")))
        from_lists = few.encode(rows, 3)
        assert from_lists is not None
        assert_same(from_lists, ENCODER.encode(Block(frame, 1, "t")))

    def test_columns_that_are_left_out_are_missing(self) -> None:
        encoded = FewRows(ENCODER).encode({"word": ["a"]}, 1)
        assert encoded is not None
        nothing = {name: [None] for name in ENCODER.schema.input_columns} | {"word": ["a"]}
        assert_same(encoded, ENCODER.encode(Block(pl.DataFrame(nothing), 1, "t")))

    @pytest.mark.parametrize(
        ("column", "values"),
        [
            ("word", [1.5, math.inf]),
            ("price", ["1", "x"]),
            ("price", [1.0, math.inf]),
            ("rank", [-math.inf, 1.0]),
            ("share", [0.5, math.inf]),
            ("tags", [[1.0, math.inf], [2.0]]),
            ("word", [[1], [2]]),
        ],
    )
    def test_bad_values_are_left_to_the_encoder_and_its_errors(self, column: str, values: list[Any]) -> None:
        nothing = {name: [None, None] for name in ENCODER.schema.input_columns}
        frame = pl.DataFrame(nothing | {column: values})
        assert FewRows(ENCODER).encode_frame(frame) is None
        with pytest.raises(InputError):
            ENCODER.encode(Block(frame, 1, "t"))

    @pytest.mark.parametrize(
        "values", [[date(2026, 1, 31)], [b"a"], [{"a": 1}]], ids=["date", "bytes", "struct"]
    )
    def test_unusual_types_are_left_to_the_encoder(self, values: list[Any]) -> None:
        nothing = {name: [None] for name in ENCODER.schema.input_columns}
        few = FewRows(ENCODER)
        assert few.encode_frame(pl.DataFrame(nothing | {"word": values})) is None
        assert few.encode_frame(pl.DataFrame(nothing | {"word": pl.Series([0.1], dtype=pl.Float32)})) is None
        assert few.encode_frame(pl.DataFrame(nothing).drop("word")) is None
        assert few.encode_frame(pl.DataFrame(nothing | {"more": values})) is not None


class TestCache:
    def test_it_is_bounded_and_keeps_what_is_asked_for_often(self) -> None:
        few = FewRows(ENCODER, cached_values=100)
        for number in range(1_000):
            few.encode({"word": ["a", f"value {number}"]}, 2)
            assert len(few) <= 200

    def test_long_values_are_not_kept(self) -> None:
        few = FewRows(ENCODER)
        before = len(few)
        few.encode({"word": ["x" * (MAX_CACHED_LENGTH + 1)], "hashed": ["x" * 5_000]}, 1)
        assert len(few) == before

    def test_entries_take_less_than_the_stated_memory(self) -> None:
        """A text of the greatest length, its code, and its share of the dictionary: 250 bytes, 16 MB in all."""
        longest = "x" * MAX_CACHED_LENGTH
        table = {f"{number:064d}": number for number in range(1 << 15)}
        assert sys.getsizeof(longest) + sys.getsizeof(1 << 29) + sys.getsizeof(table) / len(table) <= 250


@given(WORDS | st.from_regex(r"-?[0-9]{1,17}\.0{1,3}\n?", fullmatch=True))
def test_one_value_is_spelled_like_a_column(text: str) -> None:
    spelled = as_text(pl.Series([text], dtype=pl.String)).to_list()[0]
    assert spelled == (canonical(text) or None)


def test_values_that_an_update_added_come_after_oov() -> None:
    columns = ENCODER.schema.input_columns
    height = len(KEPT) + 1
    frame = pl.DataFrame({name: pl.Series([None] * height, dtype=pl.Float64) for name in columns})
    words = {name: pl.Series([*KEPT, "zzz"], dtype=pl.String) for name in ("word", "na", "tags")}
    frame = frame.with_columns(**words)
    encoded = FewRows(ENCODER).encode_frame(frame)
    assert encoded is not None
    assert_same(encoded, ENCODER.encode(Block(frame, 1, "t")))
    ids = encoded.ids_BW[:, 2] - ENCODER.layout.fields[2].offset
    assert ids.max() == ENCODER.fields[2].oov + 3 and ids[-1] == ENCODER.fields[2].oov
