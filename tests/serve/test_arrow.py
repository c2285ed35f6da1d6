"""Arrow bodies: what is damaged, compressed or claims too much is refused before it costs anything."""

import io
import struct
from typing import Any, ClassVar

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.source import Block
from recap_ctr.serve import arrow
from recap_ctr.serve.codec import Codec
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem
from tests.support.fake_engine import fake_encoder

ENCODER = fake_encoder()
LIMITS = Limits(rows=20, value_length=50, values=6)
CODEC = Codec(ENCODER, LIMITS)


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_compressed_arrow_and_other_formats_are_refused(kind: str) -> None:
    frame = pl.DataFrame({"site": ["a"] * 20})
    compressed = io.BytesIO()
    (frame.write_ipc if kind == arrow.FILE else frame.write_ipc_stream)(compressed, compression="zstd")
    with pytest.raises(Problem, match="compressed"):
        CODEC.from_arrow(compressed.getvalue(), kind)
    other = arrow.FILE if kind == arrow.STREAM else arrow.STREAM
    for body in (b"", b"PAR1", b"\xff" * 40, arrow.write(frame, other)):
        with pytest.raises(Problem) as error:
            CODEC.from_arrow(body, kind)
        assert error.value.status == 400


class SlicedBytes(bytes):
    """Bytes that record the size of every slice taken of them."""

    sizes: ClassVar[list[int]] = []

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        self.sizes.append(len(part) if isinstance(key, slice) else 1)
        return part


def one_row_batches(count: int, kind: str) -> bytes:
    """Return a body of `count` batches, with one row each."""
    if kind == arrow.FILE:
        out = io.BytesIO()
        pl.DataFrame({"site": ["a"] * count}).write_ipc(out, record_batch_size=1)
        return out.getvalue()
    start = b"\xff\xff\xff\xff"  # of each message
    empty, schema, batch, end = arrow.write(pl.DataFrame({"site": ["a"]}), kind).split(start)
    return start.join([empty, schema, *[batch] * count, end])


def with_repeated_batch(body: bytes, times: int) -> bytes:
    """Return a file of one batch with a footer that names the batch `times` times."""
    size = struct.unpack_from("<I", body, len(body) - 10)[0]
    footer = bytearray(body[-10 - size : -10])
    # The vector of record batches is field 3 of the footer's table.
    table = struct.unpack_from("<I", footer, 0)[0]
    vtable = table - struct.unpack_from("<i", footer, table)[0]
    vector = table + struct.unpack_from("<H", footer, vtable + 4 + 2 * 3)[0]
    entry = vector + struct.unpack_from("<I", footer, vector)[0] + 4
    block = bytes(footer[entry : entry + 24])
    footer += bytes(-(len(footer) + 4) % 8)
    struct.pack_into("<I", footer, vector, len(footer) - vector)
    footer += struct.pack("<I", times) + block * times
    return body[: -10 - size] + bytes(footer) + struct.pack("<I", len(footer)) + arrow.MAGIC


@pytest.mark.parametrize("kind", [arrow.STREAM, arrow.FILE])
def test_checking_arrow_copies_no_more_than_its_bytes(kind: str) -> None:
    limits = Limits(rows=10_000)
    body = SlicedBytes(one_row_batches(500, kind))
    SlicedBytes.sizes.clear()
    assert arrow.read(body, kind, limits).height == 500
    parsed = 1 if kind == arrow.STREAM else 0  # one more copy for the parser of streams
    assert len(SlicedBytes.sizes) >= 500 and sum(SlicedBytes.sizes) <= (1 + parsed) * len(body)
    with pytest.raises(Problem, match="more than 4,096 batches"):
        arrow.read(one_row_batches(4097, kind), kind, limits)


def test_a_footer_may_name_a_batch_only_once() -> None:
    limits, body = Limits(rows=10_000), one_row_batches(1, arrow.FILE)
    assert arrow.read(with_repeated_batch(body, 1), arrow.FILE, limits).height == 1
    for times, reason in ((4096, "twice"), (20_000, "more than 4,096")):
        SlicedBytes.sizes.clear()
        with pytest.raises(Problem, match=reason):
            arrow.read(SlicedBytes(with_repeated_batch(body, times)), arrow.FILE, limits)
        assert len(SlicedBytes.sizes) < 20, "it is refused before the work is done"


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


@pytest.mark.slow
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
        encoded = ENCODER.encode(Block(CODEC.join([table]), 1, "table"))
        assert len(encoded.ids_BW) == table.height <= LIMITS.rows
