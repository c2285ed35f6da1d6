"""Where the rows of a table stand, and which worker has them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.nn.partition import Partition


@given(st.integers(1, 400), st.integers(1, 9))
def test_every_row_has_one_place_and_every_place_one_worker(num_rows: int, size: int) -> None:
    partition = Partition(num_rows, size)
    rows = torch.arange(num_rows)
    places = partition.places(rows)
    assert sorted(places.tolist()) == rows.tolist()
    assert partition.rows_at(places).tolist() == rows.tolist()
    blocks = [partition.block(rank) for rank in range(size)]
    assert [place for block in blocks for place in block] == rows.tolist()
    assert partition.cuts(places.sort().values) == [len(block) for block in blocks]


def test_places_depend_on_the_number_of_rows_alone() -> None:
    assert Partition(1_000, 2).has_order_of(Partition(1_000, 7))
    assert not Partition(1_000, 2).has_order_of(Partition(1_001, 2))
    one = Partition(1_000, 1)
    assert one.places(torch.arange(1_000)).tolist() == list(range(1_000)), (
        "one worker keeps the rows in order"
    )


def test_frequent_rows_are_spread_evenly() -> None:
    """The most frequent values of 39 fields, 100 of each, among four workers."""
    partition = Partition(2_000_000, 4)
    frequent = torch.cat([torch.arange(start, start + 100) for start in range(0, 2_000_000, 2_000_000 // 39)])
    counts = partition.cuts(partition.places(frequent).sort().values)
    np.testing.assert_allclose(counts, np.mean(counts), rtol=0.05)


def test_products_of_large_tables_do_not_overflow() -> None:
    partition = Partition(2_900_000_000, 64)
    row = torch.tensor([2_899_999_999])
    assert partition.rows_at(partition.places(row)).tolist() == row.tolist()
