"""What the gate compares: shares of unknown values, of hash buckets without rows, and of rows without a value."""

import numpy as np
import polars as pl

from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.shards import Shard
from recap_ctr.data.source import Block
from recap_ctr.recipe.state import count_rows, empty_bucket_shares, empty_row_shares, unknown_shares
from recap_ctr.schema import Field, Schema

FIELDS = (
    FittedField(Field(name="ad", kind="categorical"), pl.Series(["a", "b"]), np.array([3, 2])),
    FittedField(Field(name="tags", kind="multi", max_len=2), pl.Series(["x"]), np.array([4])),
    FittedField(
        Field(name="site", kind="categorical", hash_buckets=1_000),
        pl.Series([], dtype=pl.String),
        np.zeros(0, np.int64),
    ),
)
ENCODER = Encoder(Schema(label="click", fields=tuple(fitted.field for fitted in FIELDS)), FIELDS)


def ids_of(ads: list[str | None], tags: list[str | None], sites: list[str | None]) -> np.ndarray:
    frame = pl.DataFrame({"ad": ads, "tags": tags, "site": sites}, schema_overrides={"tags": pl.String})
    return ENCODER.encode(Block(frame, 1, "rows")).ids_BW


def test_values_without_a_vector_are_unknown() -> None:
    ids = ids_of(["a", "new", None, "b"], ["x", "x y", None, "x"], ["s"] * 4)
    assert unknown_shares(ids, ENCODER.layout) == {"ad": 0.5, "tags": 0.25, "site": 0.0}


def test_values_in_buckets_without_rows_are_unknown() -> None:
    seen = ids_of(["a"] * 3, ["x"] * 3, ["s1", "s2", "s2"])
    seen_V = np.bincount(seen.ravel(), minlength=ENCODER.layout.num_rows).astype(np.float64)
    ids = ids_of(["a"] * 4, ["x"] * 4, ["s1", "s2", "S1", None])
    assert empty_bucket_shares(ids, ENCODER, seen_V) == {"site": 0.5}
    assert empty_bucket_shares(seen, ENCODER, seen_V) == {"site": 0.0}


def test_rows_without_a_value_of_several() -> None:
    ids = ids_of(["a"] * 4, ["x", None, "y y", ""], ["s"] * 4)
    assert empty_row_shares(ids, ENCODER.layout) == {"tags": 0.5}


def test_a_number_counts_for_both_edges_beside_it() -> None:
    layout = Layout(
        (
            FieldLayout("site", 0, 4, 0, 1, None, None),
            FieldLayout("price", 4, 5, 1, 1, None, 0, is_linear=True),
        )
    )
    ids = np.array([[1, 5], [1, 5], [2, 6], [3, 8]], np.int32)  # The last has no price.
    shares = np.array([[0.25], [0.0], [1.0], [0.0]], np.float32)
    labels = np.zeros(4, np.uint8)
    shard = Shard(ids, shares, labels, np.arange(4), None, None, None)
    assert count_rows(shard, layout).tolist() == [0, 2, 1, 1, 0, 1.75, 0.25, 1, 1]
