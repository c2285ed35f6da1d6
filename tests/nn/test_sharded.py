"""A table divided among workers, who answer each other in this process."""

import pytest
import torch
from torch import Tensor

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.nn import sharded
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.group import Group, joined
from recap_ctr.nn.table import Table

LAYOUT = Layout(
    (
        FieldLayout("a", 0, 100, 0, 1, None, None),
        FieldLayout("price", 100, 3, 1, 1, None, 0),
        FieldLayout("tags", 103, 50, 2, 2, "mean", None),
        FieldLayout("age", 153, 8, 4, 1, None, 1, is_linear=True),
    )
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "CHUNK_ROWS", 16)


def blocks(size: int, dim: int) -> tuple[list[sharded.ShardedTable], list[Tensor]]:
    """Return the tables of all workers, each from the same seed, and what each draws next."""
    tables, next_draws = [], []
    for rank in range(size):
        with joined(Group(rank, size)):
            torch.manual_seed(5)
            table = Embedding(LAYOUT, dim).table
            assert isinstance(table, sharded.ShardedTable)
            tables.append(table)
            next_draws.append(torch.rand(3))
    return tables, next_draws


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("size", [2, 5])
def test_rows_start_as_those_of_one_worker(size: int, dim: int) -> None:
    """A chunk of 16 rows is a small part of the table, and 161 rows don't fill whole groups of 16 numbers."""
    torch.manual_seed(5)
    whole = Table(LAYOUT, dim).weight
    next_draw = torch.rand(3)

    tables, next_draws = blocks(size, dim)

    rows = tables[0].partition.rows_at(torch.arange(LAYOUT.num_rows))
    assert torch.equal(torch.cat([table.weight for table in tables]), whole[rows])
    assert all(torch.equal(draw, next_draw) for draw in next_draws)
    assert max(table.weight.shape[0] for table in tables) == -(-LAYOUT.num_rows // size)
    pads = [table.block.start + int(place) for table in tables for place in table.pad_rows_P]
    assert tables[0].partition.rows_at(torch.tensor(pads)).tolist() == [103]
