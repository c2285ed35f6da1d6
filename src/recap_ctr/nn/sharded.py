"""A table whose rows are divided among the workers of a group: each keeps, and updates, a block of them.

A worker asks the others for the distinct rows of its share of a batch, and sends the gradients of these rows back to
those who have them. What a message holds grows with the batch, not with the table.

Shapes: B batch, W id columns, d vector size, V table rows, U distinct rows that this worker asks for, A rows that it is
asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr.data.layout import Layout
from recap_ctr.nn.group import Group, current_group
from recap_ctr.nn.initial import normal_
from recap_ctr.nn.partition import Partition
from recap_ctr.nn.table import Table
from recap_ctr.nn.weights import to_arrays
from recap_ctr.storage.arrays import Array, ArrayInParts

CHUNK_ROWS = 1 << 16
"""Rows that are drawn, read or written at a time. Their numbers fill whole groups of 16, as `_draw` needs."""


class ShardedTable(Table):
    """This worker's block of a V × d table. A look-up is a call of all workers at once."""

    def _num_rows(self, layout: Layout) -> int:
        group = current_group()
        self.partition = Partition(layout.num_rows, group.size)
        self.block = self.partition.block(group.rank)
        return len(self.block)

    def _places_of(self, rows: list[int]) -> Tensor:
        places = self.partition.places(torch.tensor(rows, dtype=torch.int64))
        return (places[self._is_here(places)] - self.block.start).int()

    def _is_here(self, places: Tensor) -> Tensor:
        return (places >= self.block.start) & (places < self.block.stop)

    def _draw(self, std: float) -> None:
        """Draw all rows as one worker does, a chunk at a time, and keep those of this block.

        torch draws normal numbers in groups of 16; the last group is drawn again if it is not whole, so the last chunk
        must hold all of it. The same numbers come out as if the table were drawn at once.
        """
        rows, dim = self.partition.num_rows, self.weight.shape[1]
        start = 0
        while start < rows and not self.weight.is_meta:
            stop = start + CHUNK_ROWS
            if (rows - stop) * dim < 16:
                stop = rows
            chunk = torch.empty(stop - start, dim)
            normal_(chunk, std)
            places = self.partition.places(torch.arange(start, stop))
            here = self._is_here(places)
            self.weight[places[here] - self.block.start] = chunk[here]
            start = stop

    def _set(self, row: int, vector: Tensor) -> None:
        self.weight[self._places_of([row]).long()] = vector

    def forward(self, ids_BW: Tensor) -> Tensor:
        """Return the table's row for each id, from whoever has it."""
        request = ask(self.partition, ids_BW, self.block.start)
        if self.training and torch.is_grad_enabled():
            out_BWd = _LookUp.apply(self.weight, request, self)  # type: ignore[no-untyped-call]
            assert isinstance(out_BWd, Tensor)
            return out_BWd
        return request.fetch(self.weight)


@dataclass(frozen=True, eq=False)
class Request:
    """Which rows this worker needs for some ids, and which rows the others need from it."""

    group: Group
    position_BW: Tensor
    """Each id's place among the rows that this worker asks for."""
    wanted: list[int]
    """How many rows it asks each worker for."""
    asked: list[int]
    """How many rows each worker asks it for."""
    rows_A: Tensor
    """The rows of this worker's block that it is asked for."""

    def fetch(self, weight_Vd: Tensor) -> Tensor:
        """Return the row of each id, and give the others theirs."""
        rows_Ud = self.group.exchange(weight_Vd.index_select(0, self.rows_A), self.asked, self.wanted)
        return F.embedding(self.position_BW, rows_Ud)

    def give_back(self, grad_BWd: Tensor) -> Tensor:
        """Send the gradients of the looked-up rows to those who have them; return those of this block, A × d."""
        d = grad_BWd.shape[-1]
        grad_Ud = grad_BWd.new_zeros(sum(self.wanted), d)
        grad_Ud.index_add_(0, self.position_BW.reshape(-1), grad_BWd.reshape(-1, d))
        return self.group.exchange(grad_Ud, self.wanted, self.asked)


def ask(partition: Partition, ids_BW: Tensor, block_start: int) -> Request:
    """Tell all workers which of their rows this one needs, and learn which of its own they need."""
    group = current_group()
    places = partition.places(ids_BW.reshape(-1))
    if partition.num_rows < 2**31:
        places = places.int()  # Half of the bytes.
    places_U, position = torch.unique(places, return_inverse=True)
    wanted = partition.cuts(places_U)
    ones = [1] * group.size
    asked = group.exchange(torch.tensor(wanted, device=ids_BW.device), ones, ones).tolist()
    places_A = group.exchange(places_U, wanted, asked)
    return Request(group, position.view(ids_BW.shape), wanted, asked, places_A - block_start)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_Vd: Tensor, request: Request, table: ShardedTable) -> Tensor:
        ctx.request, ctx.table = request, table
        return request.fetch(weight_Vd)

    @staticmethod
    def backward(ctx: Any, grad_BWd: Tensor) -> tuple[None, None, None]:
        ctx.table.accumulate(ctx.request.rows_A, ctx.request.give_back(grad_BWd))
        return None, None, None


class WholeTable:
    """All rows of a sharded table in their own order, for a file: the first worker gets them, chunk by chunk.

    It has what `storage.arrays` needs to write an array, and all workers must go through its chunks together.
    """

    def __init__(self, table: ShardedTable) -> None:
        self._table = table
        self.shape = (table.partition.num_rows, table.weight.shape[1])
        self.dtype: np.dtype[Any] = to_arrays({"": table.weight[:0]})[""].dtype
        self.size = self.shape[0] * self.shape[1]
        self.nbytes = self.size * self.dtype.itemsize

    @torch.no_grad()
    def __iter__(self) -> Iterator[Array]:
        table, group = self._table, current_group()
        for start in range(0, self.shape[0], CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, self.shape[0]) if group.is_first else start
            ids = torch.arange(start, stop, device=table.weight.device)
            request = ask(table.partition, ids, table.block.start)
            yield request.fetch(table.weight).cpu().numpy()


def whole_weights(model: nn.Module) -> dict[str, Array | ArrayInParts]:
    """Return a model's weights and statistics under their names, its sharded tables in parts."""
    weights: dict[str, Array | ArrayInParts] = {**to_arrays(model.state_dict())}
    for name, module in model.named_modules():
        if isinstance(module, ShardedTable):
            weights[f"{name}.weight"] = WholeTable(module)
    return weights


def give_rows(weights: Mapping[str, Array | ArrayInParts]) -> None:
    """Take part in what the first worker does with all the weights: give it this worker's rows."""
    for whole in weights.values():
        if isinstance(whole, WholeTable):
            for _ in whole:
                pass
