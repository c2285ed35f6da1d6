"""Bodies to tables: in whatever format rows are sent, they are encoded as the encoder itself would."""

import json
import math
import resource
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import Encoded, Encoder, FittedField
from recap_ctr.data.few_rows import FewRows
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.schema import Field, Schema
from recap_ctr.serve import arrow, columns
from recap_ctr.serve.codec import JSON, Codec
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem
from tests.support.fake_engine import FIELDS, fake_encoder

ENCODER = fake_encoder()
LIMITS = Limits(rows=20, value_length=50, values=6)
CODEC = Codec(ENCODER, LIMITS)
FEW_ROWS = FewRows(ENCODER)
SPACE = st.sampled_from(["", " ", "\n", "  "])
text = st.sampled_from(
    ["a", "b", "c.com", "7", "7.0", "true", "True", "", "new", "ünïcode", str(10**17), "x|y", "-1"]
)
scalar = st.one_of(
    text, st.integers(-(10**20), 10**20), st.booleans(), st.sampled_from([7.0, 0.5, 1e-7, 3.0])
)
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["5", " 7.5 ", "1e3", ""])
)
tags = st.one_of(
    st.lists(st.one_of(st.none(), st.sampled_from(["x", "y", "new", "", 1, 1.0])), max_size=6),
    st.sampled_from(["x", "x|y|z|x", "", "|", "new|x"]),
)
values = {"categorical": scalar, "numeric": numbers, "multi": tags}
rows_of = st.lists(
    st.fixed_dictionaries({}, optional={field.name: st.none() | values[field.kind] for field in FIELDS}),
    min_size=1,
    max_size=8,
)


def spell(value: Any) -> str | None:
    """Return a value as the encoder spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if value == 1e-7:
        return "1e-7"  # polars spells it so
    return None if value is None else str(value)


def reference(rows: list[dict[str, Any]]) -> Encoded:
    """Encode the rows as if they came from a text file, with lists joined by their separator."""

    def cell(value: Any) -> str | None:
        if not isinstance(value, list):
            return spell(value)
        return "|".join(spell(part) or "" for part in value)

    columns = [
        pl.Series(field.name, [cell(row.get(field.name)) for row in rows], dtype=pl.String)
        for field in FIELDS
    ]
    return ENCODER.encode(Block(pl.DataFrame(columns), 1, "reference"))


def encode(*tables: Any) -> Encoded:
    encoded = ENCODER.encode(Block(CODEC.join(tables), 1, "tables"))
    few = FEW_ROWS.encode(CODEC.join_lists(tables), sum(table.height for table in tables))
    assert few is not None
    np.testing.assert_array_equal(few.ids_BW, encoded.ids_BW)
    np.testing.assert_array_equal(few.values_BN, encoded.values_BN)
    return encoded


def assert_same(actual: Encoded, expected: Encoded) -> None:
    assert np.array_equal(actual.ids_BW, expected.ids_BW)
    assert np.array_equal(actual.values_BN, expected.values_BN)


def by_columns(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(
        {"columns": {field.name: [row.get(field.name) for row in rows] for field in FIELDS}}
    ).encode()


def to_arrow(rows: list[dict[str, Any]], kind: str) -> bytes:
    """Return columns of their own type if all values share one, else of text."""
    columns = []
    for field in FIELDS:
        cells = [row.get(field.name) for row in rows]
        kinds = {type(cell) for cell in cells} - {type(None)}
        if field.kind == "multi":
            lists = [cell.split("|") if isinstance(cell, str) else cell for cell in cells]
            texts = [None if values is None else [spell(value) for value in values] for values in lists]
            columns.append(pl.Series(field.name, texts, dtype=pl.List(pl.String)))
        elif kinds in ({float}, {str}, {bool}):
            columns.append(pl.Series(field.name, cells))
        else:
            columns.append(pl.Series(field.name, [spell(cell) for cell in cells], dtype=pl.String))
    return arrow.write(pl.DataFrame(columns), kind)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows_of)
def test_all_formats_mean_the_same(rows: list[dict[str, Any]]) -> None:
    expected = reference(rows)
    assert_same(encode(CODEC.from_json(json.dumps({"rows": rows}).encode()).table), expected)
    assert_same(encode(CODEC.from_json(by_columns(rows)).table), expected)
    for kind in (arrow.STREAM, arrow.FILE):
        assert_same(encode(CODEC.from_arrow(to_arrow(rows, kind), kind).table), expected)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(rows_of, min_size=2, max_size=4), st.randoms())
def test_joined_requests_are_their_rows_in_order(requests: list[list[dict[str, Any]]], rng: Any) -> None:
    tables = []
    for rows in requests:
        form = rng.randrange(3)
        if form == 2:
            tables.append(CODEC.from_arrow(to_arrow(rows, arrow.STREAM), arrow.STREAM).table)
        else:
            body = by_columns(rows) if form else json.dumps({"rows": rows}).encode()
            tables.append(CODEC.from_json(body).table)
    assert_same(encode(*tables), reference([row for rows in requests for row in rows]))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows_of, st.sampled_from(FIELDS), st.data())
def test_a_context_equals_the_same_value_in_every_row(
    rows: list[dict[str, Any]], field: Any, data: Any
) -> None:
    value = data.draw(values[field.kind])
    bare = [{name: cell for name, cell in row.items() if name != field.name} for row in rows]
    sent = CODEC.from_json(json.dumps({"rows": bare, "context": {field.name: value}}).encode())
    assert_same(encode(sent.table), reference([{**row, field.name: value} for row in bare]))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            '{"rows": [{"site": "a"}, {"sight": "a"}]}',
            ["row 2", "no field 'sight'", "fields are site, user id"],
        ),
        ('{"columns": {"sight": ["a"]}}', ["no field 'sight'"]),
        ('{"context": {"sight": "a"}, "rows": []}', ["no field 'sight'"]),
        ('{"rows": [{}, {"site": {"a": 1}}]}', ["row 2", "field 'site'", "object"]),
        ('{"rows": [{}, {}, {"price": true}]}', ["row 3", "field 'price'", "bool"]),
        ('{"rows": [{"price": "cheap"}]}', ["row 1", "'price'", "'cheap' is not a number"]),
        ('{"columns": {"price": [1, "cheap"]}}', ["row 2", "'price'", "'cheap'"]),
        ('{"columns": {"price": [1, []]}}', ["row 2", "'price'"]),
        ('{"rows": [{"price": 1e999}]}', ["row 1", "'price'", "out of range"]),
        ('{"rows": [{"price": "inf"}]}', ["row 1", "'price'", "infinity"]),
        ('{"rows": [{"price": NaN}]}', ["not valid JSON"]),
        ('{"rows": [{"tags": [["x"]]}]}', ["row 1", "tags"]),
        ('{"rows": [{"site": "a"}], "context": {"site": "b"}}', ["'site'", "both"]),
        ('{"columns": {"site": ["a"], "price": [1, 2]}}', ["'site' has 1", "'price' has 2"]),
        ('{"rows": [], "columns": {}}', ["either rows or columns"]),
        ("{}", ["either rows or columns"]),
        ('{"rows": [], "route": 3}', ["unknown field `route`", "routes"]),
        ('{"rows": [], "routes": 0}', ["routes"]),
        ('{"rows": [], "deadline_ms": "soon"}', ["deadline_ms"]),
        ('{"rows": "x"}', ["rows"]),
        ("[]", ["the body"]),
        ("", ["not valid JSON"]),
        ('{"rows": [{"site": "\\ud800"}]}', ["not valid JSON"]),
        ('{"rows":' + "[" * 200_000, ["row 1"]),
    ],
)
def test_errors_name_field_row_and_fix(body: str, words: list[str]) -> None:
    with pytest.raises(Problem) as error:
        CODEC.from_json(body.encode())
    text = f"{error.value.message} {error.value.fix}"
    assert error.value.status == 400 and error.value.fix
    for word in words:
        assert word in text


@pytest.mark.parametrize("by_rows", [True, False])
def test_the_number_of_rows_is_limited(by_rows: bool) -> None:
    def body(count: int) -> bytes:
        rows = [{"site": "a"}] * count
        return json.dumps({"rows": rows}).encode() if by_rows else by_columns(rows)

    for count in (LIMITS.rows - 1, LIMITS.rows):
        assert CODEC.from_json(body(count)).table.height == count
    with pytest.raises(Problem) as error:
        CODEC.from_json(body(LIMITS.rows + 1))
    assert error.value.status == 413


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_the_number_of_arrow_rows_is_limited(kind: str) -> None:
    frame = pl.DataFrame({"site": ["a"] * (LIMITS.rows + 1)})
    for count in (LIMITS.rows - 1, LIMITS.rows):
        assert CODEC.from_arrow(arrow.write(frame.head(count), kind), kind).table.height == count
    with pytest.raises(Problem) as error:
        CODEC.from_arrow(arrow.write(frame, kind), kind)
    assert error.value.status == 413


LENGTH, COUNT = LIMITS.value_length, LIMITS.values


@pytest.mark.parametrize(
    ("field", "fits", "long"),
    [
        ("site", "s" * LENGTH, "s" * (LENGTH + 1)),
        ("tags", ["t"] * COUNT, ["t"] * (COUNT + 1)),
        ("tags", ["t" * LENGTH], ["t" * (LENGTH + 1)]),
    ],
)
def test_length_and_number_of_values_are_limited(field: str, fits: Any, long: Any) -> None:
    def as_json(value: Any) -> int:
        return CODEC.from_json(json.dumps({"rows": [{}, {field: value}]}).encode()).table.height

    def as_arrow(value: Any) -> int:
        body = arrow.write(pl.DataFrame({field: [None, value]}), arrow.STREAM)
        return CODEC.from_arrow(body, arrow.STREAM).table.height

    for decode in (as_json, as_arrow):
        assert decode(fits) == 2
        with pytest.raises(Problem, match=f"row 2, field '{field}"):
            decode(long)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pl.Series("sight", ["a"]), ["no field 'sight'"]),
        (pl.Series("site", [b"a"]), ["neither"]),
        (pl.Series("site", [{"a": 1}]), ["neither"]),
        (pl.Series("tags", [[["x"]]]), ["neither"]),
        (pl.Series("site", ["a"]).implode(), ["'site'"]),
        (pl.Series("price", ["1", "cheap"]), ["row 2", "'price'", "'cheap'"]),
        (pl.Series("price", [1.0, math.inf]), ["row 2", "'price'", "infinity"]),
        (pl.Series("site", [1.0, -math.inf]), ["row 2", "'site'", "infinity"]),
        (pl.Series("price", [["1"]]), ["'price'"]),
    ],
)
def test_arrow_errors_name_field_and_row(column: pl.Series, words: list[str]) -> None:
    with pytest.raises(Problem) as error:
        CODEC.from_arrow(arrow.write(column.to_frame(), arrow.STREAM), arrow.STREAM)
    assert error.value.status == 400
    for word in words:
        assert word in f"{error.value.message} {error.value.fix}"


def test_arrow_types_with_the_same_meaning() -> None:
    texts = pl.Series("site", ["7", "a", None])
    for column in (texts, texts.cast(pl.Categorical), texts.cast(pl.Enum(["7", "a"]))):
        table = CODEC.from_arrow(arrow.write(column.to_frame(), arrow.STREAM), arrow.STREAM).table
        assert_same(encode(table), reference([{"site": "7"}, {"site": "a"}, {}]))
    for kind in (pl.Int8, pl.UInt64, pl.Float32, pl.Float64, pl.Int64):
        column = pl.Series("site", [7, None], dtype=kind)
        table = CODEC.from_arrow(arrow.write(column.to_frame(), arrow.STREAM), arrow.STREAM).table
        assert_same(encode(table), reference([{"site": "7"}, {}]))


def test_a_context_times_its_rows_is_limited() -> None:
    limits = Limits(rows=1000, body_bytes=10_000)
    body = {"context": {"site": "a" * 50, "tags": ["x"] * 6}, "rows": [{}] * 20}
    assert Codec(ENCODER, limits).from_json(json.dumps(body).encode()).table.height == 20
    body["rows"] = [{}] * 1000
    with pytest.raises(Problem, match="the context, given to 1,000 rows, is more than 20,000") as error:
        Codec(ENCODER, limits).from_json(json.dumps(body).encode())
    assert error.value.status == 413


def test_calls_into_polars_do_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are decoded on the event loop, where a call for each value would halt all other requests."""
    calls = []

    def counted(series: pl.Series, missing: Sequence[str] = ()) -> pl.Series:
        calls.append(len(series))
        return as_text(series, missing)

    monkeypatch.setattr(columns, "as_text", counted)
    lists: list[list[Any]] = [[0.5] * 2, [[0.5], 0.5], [[0.5, 7.0, 1.5], [1e-7]]]
    num_calls = []
    for times in (1, 5):
        calls.clear()
        for tags in lists:
            CODEC.from_json(
                json.dumps({"columns": {"site": [0.5] * 2 * times, "tags": tags * times}}).encode()
            )
        num_calls.append(len(calls))
    assert num_calls[0] == num_calls[1]


@pytest.mark.parametrize(
    "column",
    [
        pl.Series("site", [2**31 - 1], dtype=pl.Int32).cast(pl.Date),
        pl.Series("site", [0, 1 - 2**63], dtype=pl.Int64).cast(pl.Datetime("us")),
        pl.Series("tags", [[0], [2**31 - 1]], dtype=pl.List(pl.Int32)).cast(pl.List(pl.Date)),
        pl.Series("price", [2**31 - 1], dtype=pl.Int32).cast(pl.Date),
    ],
    ids=["date", "time", "dates", "numeric"],
)
def test_dates_that_make_polars_panic_are_refused(column: pl.Series) -> None:
    for kind in (arrow.STREAM, arrow.FILE):
        with pytest.raises(Problem, match=f"'{column.name}'") as error:
            CODEC.from_arrow(arrow.write(column.to_frame(), kind), kind)
        assert error.value.status == 400 and error.value.message


def test_a_panic_while_a_column_is_read_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise pl.exceptions.PanicException("index out of bounds")

    monkeypatch.setattr(columns, "as_text", panic)
    body = arrow.write(pl.DataFrame({"site": [date(2026, 1, 1)]}), arrow.STREAM)
    with pytest.raises(Problem, match="column 'site', of type Date, holds values") as error:
        CODEC.from_arrow(body, arrow.STREAM)
    assert error.value.status == 400


@pytest.mark.parametrize(
    "moment", [1_700_000_000_123, 1.700000000123e12, "1700000000123", " 1700000000123.0 "], ids=repr
)
def test_derived_fields_take_their_raw_column(moment: Any) -> None:
    encoder = fake_encoder(time_column="at")
    timed = Codec(encoder, LIMITS)
    bodies = ({"rows": [{"at": moment}, {}]}, {"columns": {"at": [moment, None]}})
    requests = [timed.from_json(json.dumps(body).encode()) for body in bodies]
    arrow_body = arrow.write(pl.DataFrame({"at": [moment, None]}), arrow.STREAM)
    requests.append(timed.from_arrow(arrow_body, arrow.STREAM))
    for request in requests:
        encoded = encoder.encode(Block(timed.join([request.table]), 1, "tables"))
        hour, weekday = encoder.layout.fields[-2:]
        assert encoded.ids_BW[0, -2:].tolist() == [hour.offset + 1 + 22, weekday.offset + 1 + 1]
        assert encoded.num_missing[-2:].tolist() == [1, 1]
    with pytest.raises(Problem, match="the model has no field 'hour'"):
        timed.from_json(b'{"rows": [{"hour": 22}]}')


def write_json(value: Any, space: str) -> str:
    """Write JSON in which a tuple of pairs is an object, whose keys may be there twice."""
    if type(value) is tuple:
        pairs = (f"{json.dumps(key)}{space}:{space}{write_json(item, space)}" for key, item in value)
        return "{" + ",".join(pairs) + "}"
    if type(value) is list:
        return "[" + ",".join(write_json(item, space) for item in value) + "]"
    return json.dumps(value)


def has_duplicates(value: Any) -> bool:
    if type(value) is tuple:
        names = [name for name, _ in value]
        return len(set(names)) < len(names) or any(has_duplicates(item) for _, item in value)
    return type(value) is list and any(map(has_duplicates, value))


class TestDuplicateKeys:
    ROW = st.lists(
        st.tuples(
            st.sampled_from(["site", "user id", "device"]),
            st.none() | st.sampled_from(["a", ":", ":null", ": null", 'x"y', "null", "b:c"]),
        ),
        max_size=4,
    ).map(tuple)

    @pytest.mark.slow
    @given(rows=st.lists(ROW, max_size=3), context=st.none() | ROW, space=SPACE, twice=st.booleans())
    def test_they_are_refused_wherever_they_are(
        self, rows: list[Any], context: Any, space: str, twice: bool
    ) -> None:
        body = (("rows", rows), *((("context", context),) if context else ()), ("routes", None))
        body += (("routes", 8),) if twice else ()
        taken = {name for row in rows for name, value in row if value is not None}
        if context and taken & {name for name, value in context if value is not None}:
            return
        text = write_json(body, space).encode()
        if has_duplicates(body):
            with pytest.raises(Problem, match="twice in one object") as error:
                CODEC.from_json(text)
            assert error.value.status == 400
        else:
            assert CODEC.from_json(text).table.height == len(rows)


class TestLongLists:
    """Of a list the encoder takes `max_len` values; the codec keeps no more, so that a context costs what it gives."""

    @pytest.mark.parametrize(
        "tags", [["x", None, "", "y", "z", "1"], "x||y|z|1|x", [1, 1.0, 2.5, "y"], [], "", ["new"] * 6]
    )
    def test_the_context_is_cut_before_it_is_spread(self, tags: Any) -> None:
        body = {"context": {"tags": tags}, "rows": [{"site": "a"}, {"site": "b"}]}
        table = CODEC.from_json(json.dumps(body).encode()).table
        assert all(len(cell or ()) <= 3 for cell in table.columns.get("tags", ()))
        rows = [{"site": site, "tags": tags} for site in ("a", "b")]
        np.testing.assert_array_equal(encode(table).ids_BW, reference(rows).ids_BW)

    @pytest.mark.parametrize("missing", [("-1",), ("0.5", "n.a."), ("1", "true")])
    @pytest.mark.parametrize(
        "tags",
        [
            [-1.0, -1.0, "-1", -1, "x"],
            [0.5] * 4 + ["n.a.", 7.0, "x"],
            [1.0, 1, "1.0", True, "True", 0.5, "y"],
        ],
    )
    def test_missing_values_are_not_among_those_kept(self, missing: tuple[str, ...], tags: list[Any]) -> None:
        field = Field(name="tags", kind="multi", max_len=2, missing=missing)
        values = pl.Series(["x", "y", "7", "0.5", "-1", "1", "true"])
        encoder = Encoder(
            Schema(label="click", fields=(field,)), [FittedField(field, values, np.arange(7, 0, -1))]
        )
        table = Codec(encoder, Limits()).from_json(json.dumps({"rows": [{"tags": tags}]}).encode()).table
        assert len(table.columns["tags"][0]) <= 2
        texts = pl.Series("tags", [[spell(tag) for tag in tags]])
        expected = encoder.encode(Block(texts.to_frame(), 1, "reference"))
        actual = encoder.encode(Block(Codec(encoder, LIMITS).join([table]), 1, "table"))
        assert_same(actual, expected)

    def test_a_long_context_for_many_rows_takes_little(self) -> None:
        codec = Codec(ENCODER, Limits())
        body = {"context": {"tags": ["x" * 40] * 1_000}, "rows": [{}] * 10_000}
        table = codec.from_json(json.dumps(body).encode()).table
        assert sum(len(cell) for cell in table.columns["tags"]) == 30_000

    @pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
    @pytest.mark.parametrize(
        "dtype", [pl.String, pl.Categorical, pl.List(pl.String), pl.List(pl.Categorical)]
    )
    def test_text_that_arrow_rows_share_is_limited(self, dtype: pl.DataType, kind: str) -> None:
        value = ["x" * 40] if isinstance(dtype, pl.List) else "x" * 40
        codec = Codec(ENCODER, Limits(body_bytes=10_000))
        for rows in (500, 501):
            frame = pl.DataFrame({"tags": pl.Series([value], dtype=dtype).new_from_index(0, rows)})
            if rows == 500:
                assert codec.from_arrow(arrow.write(frame, kind), kind).table.height == rows
                continue
            with pytest.raises(Problem, match="the text of all rows takes more than 20,000 bytes") as error:
                codec.from_arrow(arrow.write(frame, kind), kind)
            assert error.value.status == 413

    @pytest.mark.parametrize("kind", [arrow.STREAM, JSON])
    @pytest.mark.parametrize(
        "value", ["x|" * 9, "|" * 18, "|||z|7.0|y||new|x", ["x", None, "", "y", "z", "1"]]
    )
    def test_much_text_is_cut_before_it_is_divided(
        self, value: Any, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = [{"site": "a", "tags": value}, {"tags": None}, {"tags": value}]
        expected = reference(rows)
        monkeypatch.setattr(columns, "_LONG_COLUMN", 10)
        whole = Codec(ENCODER, Limits())
        if kind == JSON:
            table = whole.from_json(json.dumps({"rows": rows}).encode()).table
        else:
            table = whole.from_arrow(to_arrow(rows, kind), kind).table
        joined = whole.join([table])
        assert max(len(cell or ()) for cell in joined["tags"].to_list()) <= 3
        assert_same(ENCODER.encode(Block(joined, 1, "table")), expected)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    @pytest.mark.parametrize("context", [{"tags": ["x" * 800, None, "y" * 800]}, {"site": "x" * 1_600}])
    def test_the_text_of_a_context_is_in_memory_once(self, context: dict[str, Any]) -> None:
        body = {"context": context, "rows": [{}] * 10_000}
        codec = Codec(ENCODER, Limits())
        table = codec.from_json(json.dumps(body).encode()).table
        before = resident_mib()
        frame = codec.join([table])
        assert resident_mib() - before < 4
        expected_BW = np.repeat(reference([context]).ids_BW, 10_000, axis=0)
        np.testing.assert_array_equal(ENCODER.encode(Block(frame, 1, "rows")).ids_BW, expected_BW)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
