"""Bodies to tables: whatever way rows are sent, they are encoded as the encoder itself would."""

import io
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.encode import Encoded, as_text
from recap_ctr.data.source import Block
from recap_ctr.serve import arrow, codec
from recap_ctr.serve.codec import Codec
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem
from tests.support.fake_engine import FIELDS, fake_encoder

ENCODER = fake_encoder()
LIMITS = Limits(rows=20, value_length=50, values=6)
CODEC = Codec(ENCODER, LIMITS)

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


def written(value: Any) -> str | None:
    """A value as the encoder spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if value == 1e-7:
        return "1e-7"  # as polars writes it
    return None if value is None else str(value)


def reference(rows: list[dict[str, Any]]) -> Encoded:
    """Each value as text in a column of its own, as it would stand in a file; lists joined by their separator."""

    def cell(value: Any) -> str | None:
        if not isinstance(value, list):
            return written(value)
        return "|".join(written(one) or "" for one in value)

    columns = [
        pl.Series(field.name, [cell(row.get(field.name)) for row in rows], dtype=pl.String)
        for field in FIELDS
    ]
    return ENCODER.encode(Block(pl.DataFrame(columns), 1, "reference"))


def encoded(*tables: Any) -> Encoded:
    return ENCODER.encode(Block(CODEC.join(tables), 1, "tables"))


def assert_same(one: Encoded, other: Encoded) -> None:
    assert np.array_equal(one.ids_BW, other.ids_BW)
    assert np.array_equal(one.values_BN, other.values_BN)


def by_columns(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(
        {"columns": {field.name: [row.get(field.name) for row in rows] for field in FIELDS}}
    ).encode()


def to_arrow(rows: list[dict[str, Any]], kind: str) -> bytes:
    """Columns of their own type where all values share one, text else."""
    columns = []
    for field in FIELDS:
        cells = [row.get(field.name) for row in rows]
        kinds = {type(cell) for cell in cells} - {type(None)}
        if field.kind == "multi":
            lists = [cell.split("|") if isinstance(cell, str) else cell for cell in cells]
            texts = [None if one is None else [written(value) for value in one] for one in lists]
            columns.append(pl.Series(field.name, texts, dtype=pl.List(pl.String)))
        elif kinds in ({float}, {str}, {bool}):
            columns.append(pl.Series(field.name, cells))
        else:
            columns.append(pl.Series(field.name, [written(cell) for cell in cells], dtype=pl.String))
    return arrow.write(pl.DataFrame(columns), kind)


@settings(max_examples=60, deadline=None)
@given(rows_of)
def test_all_formats_mean_the_same(rows: list[dict[str, Any]]) -> None:
    want = reference(rows)
    assert_same(encoded(CODEC.from_json(json.dumps({"rows": rows}).encode()).table), want)
    assert_same(encoded(CODEC.from_json(by_columns(rows)).table), want)
    for kind in (arrow.STREAM, arrow.FILE):
        assert_same(encoded(CODEC.from_arrow(to_arrow(rows, kind), kind).table), want)


@settings(max_examples=40, deadline=None)
@given(st.lists(rows_of, min_size=2, max_size=4), st.randoms())
def test_joined_requests_are_their_rows_in_order(requests: list[list[dict[str, Any]]], rng: Any) -> None:
    tables = []
    for rows in requests:
        way = rng.randrange(3)
        if way == 2:
            tables.append(CODEC.from_arrow(to_arrow(rows, arrow.STREAM), arrow.STREAM).table)
        else:
            body = by_columns(rows) if way else json.dumps({"rows": rows}).encode()
            tables.append(CODEC.from_json(body).table)
    assert_same(encoded(*tables), reference([row for rows in requests for row in rows]))


@settings(max_examples=40, deadline=None)
@given(rows_of, st.sampled_from(FIELDS), st.data())
def test_a_context_is_the_same_as_its_value_in_every_row(
    rows: list[dict[str, Any]], field: Any, data: Any
) -> None:
    value = data.draw(values[field.kind])
    bare = [{name: cell for name, cell in row.items() if name != field.name} for row in rows]
    sent = CODEC.from_json(json.dumps({"rows": bare, "context": {field.name: value}}).encode())
    assert_same(encoded(sent.table), reference([{**row, field.name: value} for row in bare]))


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
        ('{"columns": {"site": ["a"], "price": [1, 2]}}', ["'site' has 1", "'price' 2"]),
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
    said = f"{error.value.message} {error.value.fix}"
    assert error.value.status == 400 and error.value.fix
    for word in words:
        assert word in said


@pytest.mark.parametrize("by_rows", [True, False])
def test_rows_end_at_their_limit(by_rows: bool) -> None:
    def body(count: int) -> bytes:
        rows = [{"site": "a"}] * count
        return json.dumps({"rows": rows}).encode() if by_rows else by_columns(rows)

    for count in (LIMITS.rows - 1, LIMITS.rows):
        assert CODEC.from_json(body(count)).table.height == count
    with pytest.raises(Problem) as error:
        CODEC.from_json(body(LIMITS.rows + 1))
    assert error.value.status == 413


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_arrow_rows_end_at_their_limit(kind: str) -> None:
    frame = pl.DataFrame({"site": ["a"] * (LIMITS.rows + 1)})
    for count in (LIMITS.rows - 1, LIMITS.rows):
        assert CODEC.from_arrow(arrow.write(frame.head(count), kind), kind).table.height == count
    with pytest.raises(Problem) as error:
        CODEC.from_arrow(arrow.write(frame, kind), kind)
    assert error.value.status == 413


MOST, SEVERAL = LIMITS.value_length, LIMITS.values


@pytest.mark.parametrize(
    ("field", "fits", "long"),
    [
        ("site", "s" * MOST, "s" * (MOST + 1)),
        ("tags", ["t"] * SEVERAL, ["t"] * (SEVERAL + 1)),
        ("tags", ["t" * MOST], ["t" * (MOST + 1)]),
    ],
)
def test_values_end_at_their_limits(field: str, fits: Any, long: Any) -> None:
    def as_json(value: Any) -> int:
        return CODEC.from_json(json.dumps({"rows": [{}, {field: value}]}).encode()).table.height

    def as_arrow(value: Any) -> int:
        body = arrow.write(pl.DataFrame({field: [None, value]}), arrow.STREAM)
        return CODEC.from_arrow(body, arrow.STREAM).table.height

    for way in (as_json, as_arrow):
        assert way(fits) == 2
        with pytest.raises(Problem, match=f"row 2, field '{field}"):
            way(long)


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


def test_arrow_types_that_mean_the_same() -> None:
    texts = pl.Series("site", ["7", "a", None])
    for column in (texts, texts.cast(pl.Categorical), texts.cast(pl.Enum(["7", "a"]))):
        table = CODEC.from_arrow(arrow.write(column.to_frame(), arrow.STREAM), arrow.STREAM).table
        assert_same(encoded(table), reference([{"site": "7"}, {"site": "a"}, {}]))
    for kind in (pl.Int8, pl.UInt64, pl.Float32, pl.Float64, pl.Int64):
        column = pl.Series("site", [7, None], dtype=kind)
        table = CODEC.from_arrow(arrow.write(column.to_frame(), arrow.STREAM), arrow.STREAM).table
        assert_same(encoded(table), reference([{"site": "7"}, {}]))


def test_a_context_may_not_grow_beyond_bounds_by_its_rows() -> None:
    limits = Limits(rows=1000, held_bytes=20_000)
    body = {"context": {"site": "a" * 50, "tags": ["x"] * 6}, "rows": [{}] * 20}
    assert Codec(ENCODER, limits).from_json(json.dumps(body).encode()).table.height == 20
    body["rows"] = [{}] * 1000
    with pytest.raises(Problem, match="the context, given to 1,000 rows, takes more than 20,000") as error:
        Codec(ENCODER, limits).from_json(json.dumps(body).encode())
    assert error.value.status == 413


def test_a_column_of_floats_takes_a_call_or_two_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are decoded on the event loop, where a call into polars for each value would halt all others."""
    calls = []

    def counted(series: pl.Series, missing: Sequence[str] = ()) -> pl.Series:
        calls.append(len(series))
        return as_text(series, missing)

    monkeypatch.setattr(codec, "as_text", counted)
    few: list[list[Any]] = [[0.5] * 2, [[0.5], 0.5], [[0.5, 7.0, 1.5], [1e-7]]]
    spent = []
    for times in (1, 5):
        calls.clear()
        for tags in few:
            CODEC.from_json(
                json.dumps({"columns": {"site": [0.5] * 2 * times, "tags": tags * times}}).encode()
            )
        spent.append(len(calls))
    assert spent[0] == spent[1]


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
def test_arrow_that_would_make_polars_panic_is_refused_by_column(column: pl.Series) -> None:
    for kind in (arrow.STREAM, arrow.FILE):
        with pytest.raises(Problem, match=f"'{column.name}'") as error:
            CODEC.from_arrow(arrow.write(column.to_frame(), kind), kind)
        assert error.value.status == 400 and error.value.message


def test_any_panic_while_a_column_is_read_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise pl.exceptions.PanicException("index out of bounds")

    monkeypatch.setattr(codec, "_plain", panic)
    with pytest.raises(Problem, match="column 'site', of type String, holds values") as error:
        CODEC.from_arrow(arrow.write(pl.DataFrame({"site": ["a"]}), arrow.STREAM), arrow.STREAM)
    assert error.value.status == 400


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_compressed_and_foreign_arrow_is_refused(kind: str) -> None:
    frame = pl.DataFrame({"site": ["a"] * 20})
    packed = io.BytesIO()
    (frame.write_ipc if kind == arrow.FILE else frame.write_ipc_stream)(packed, compression="zstd")
    with pytest.raises(Problem, match="compressed"):
        CODEC.from_arrow(packed.getvalue(), kind)
    other = arrow.FILE if kind == arrow.STREAM else arrow.STREAM
    for body in (b"", b"PAR1", b"\xff" * 40, arrow.write(frame, other)):
        with pytest.raises(Problem) as error:
            CODEC.from_arrow(body, kind)
        assert error.value.status == 400


class Copied(bytes):
    """It knows how much of it was copied."""

    sizes: ClassVar[list[int]] = []

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.sizes.append(len(found) if isinstance(at, slice) else 1)
        return found


def many(batches: int, kind: str) -> bytes:
    """One row in each."""
    if kind == arrow.FILE:
        out = io.BytesIO()
        pl.DataFrame({"site": ["a"] * batches}).write_ipc(out, record_batch_size=1)
        return out.getvalue()
    one = arrow.write(pl.DataFrame({"site": ["a"]}), kind)
    schema = arrow._message(one, 0, len(one))
    assert schema is not None
    batch = arrow._message(one, schema.end, len(one))
    assert batch is not None
    return one[: schema.end] + one[schema.end : batch.end] * batches + one[batch.end :]


def renamed(body: bytes, times: int) -> bytes:
    """A file of one batch, whose footer names it so often."""
    size = struct.unpack_from("<I", body, len(body) - 10)[0]
    whole = body[-10 - size : -10]
    at = arrow._field(whole, arrow._number("<I", whole, 0), 3)
    block = at + arrow._number("<I", whole, at) + 4
    named, footer = whole[block : block + 24], bytearray(whole)
    footer += bytes(-(len(footer) + 4) % 8)
    struct.pack_into("<I", footer, at, len(footer) - at)
    footer += struct.pack("<I", times) + named * times
    return body[: -10 - size] + bytes(footer) + struct.pack("<I", len(footer)) + arrow.MAGIC


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_walking_arrow_costs_no_more_than_its_bytes(kind: str) -> None:
    limits = Limits(rows=10_000)
    body = Copied(many(500, kind))
    Copied.sizes.clear()
    arrow._check_file(body, limits) if kind == arrow.FILE else arrow._check_stream(body, limits)
    assert len(Copied.sizes) >= 500 and sum(Copied.sizes) <= len(body)
    assert arrow.read(body, kind, limits).height == 500
    with pytest.raises(Problem, match="more than 4,096 batches"):
        arrow.read(many(4097, kind), kind, limits)


def test_a_footer_names_a_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, walked = Limits(rows=10_000), []
    whole, walk = many(1, arrow.FILE), arrow._check_batch

    def counted(*args: Any) -> int:
        walked.append(args)
        return walk(*args)

    monkeypatch.setattr(arrow, "_check_batch", counted)
    assert arrow.read(renamed(whole, 1), arrow.FILE, limits).height == 1
    for times, said in ((4096, "twice"), (20_000, "more than 4,096")):
        walked.clear()
        with pytest.raises(Problem, match=said):
            arrow.read(renamed(whole, times), arrow.FILE, limits)
        assert len(walked) < 5


WHOLE = {
    kind: arrow.write(
        pl.DataFrame(
            {
                "site": pl.Series(["a", None, "a longer value than fits a view"], dtype=pl.Categorical),
                "user id": ["1", "a longer value than fits a view", None],
                "price": [1.0, None, 2.0],
                "tags": [["x"], None, ["y", "z"]],
            }
        ),
        kind,
    )
    for kind in (arrow.STREAM, arrow.FILE)
}


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([arrow.STREAM, arrow.FILE]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.booleans(),
)
def test_damaged_arrow_is_refused_or_read(
    kind: str, changes: list[tuple[float, int]], end: float, cut: bool
) -> None:
    body = bytearray(WHOLE[kind])
    for place, value in changes:
        body[int(place * len(body))] = value
    if cut:
        body = body[: int(end * len(body))]
    try:
        table = CODEC.from_arrow(bytes(body), kind).table
    except Problem as problem:
        assert problem.status in (400, 413)
    else:
        assert len(encoded(table).ids_BW) == table.height <= LIMITS.rows
