"""A table with the vectors of all fields' values, whose gradient is kept by rows.

Shapes: B batch, W id columns, d vector size, V table rows, U distinct rows of a batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr.data.layout import Layout
from recap_ctr.nn.device import is_host
from recap_ctr.nn.initial import normal_


class RowGradient(NamedTuple):
    """The gradient of a table where it isn't zero: the distinct rows of a batch and their summed gradients."""

    rows_U: Tensor
    grad_Ud: Tensor
    is_real_U: Tensor | None = None
    """On a GPU there is an entry for each look-up, as counting the distinct rows would wait for it. This says which
    entries count; the others name the first row, and their gradient is zero."""

    def repeated(self) -> Tensor:
        """Return the gradients with that of the first row for entries that don't count.

        So all entries of a row lead to the same new weights, and it doesn't matter which of them is written last.
        """
        if self.is_real_U is None:
            return self.grad_Ud
        return torch.where(self.is_real_U.unsqueeze(1), self.grad_Ud, self.grad_Ud[:1])


class Table(nn.Module):
    """A V × d table whose gradient is kept by rows, so that a step doesn't touch the other rows.

    In training, the backward pass sets `row_gradient` instead of `weight.grad`, and the optimizer reads it.
    PAD rows are zero and stay zero because their gradient is dropped.
    """

    pad_rows_P: Tensor

    def __init__(self, layout: Layout, dim: int, *, std: float = 1e-4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self._num_rows(layout), dim))
        self.row_gradient: RowGradient | None = None
        # Only multi fields ever look up their PAD row.
        pads = [field.offset for field in layout.fields if field.pooling is not None]
        self.register_buffer("pad_rows_P", self._places_of(pads), persistent=False)
        self._last_position_V: Tensor | None = None
        with torch.no_grad():
            self._draw(std)
            for field in layout.fields:
                self._set(field.offset, torch.zeros(dim))
                if field.is_factor:
                    # A number multiplies this vector, so it starts at Xavier's scale like any other weight.
                    vector = torch.empty(dim)
                    normal_(vector, (2 / (1 + dim)) ** 0.5)
                    self._set(field.offset + 1, vector)

    def _num_rows(self, layout: Layout) -> int:
        """Return how many rows are kept here."""
        return layout.num_rows

    def _places_of(self, rows: list[int]) -> Tensor:
        """Return where in `weight` those of the rows stand that are kept here."""
        return torch.tensor(rows, dtype=torch.int32)

    def _draw(self, std: float) -> None:
        """Fill the table at random."""
        normal_(self.weight, std)

    def _set(self, row: int, vector: Tensor) -> None:
        """Replace one row, if it is kept here."""
        self.weight[row] = vector

    def forward(self, ids_BW: Tensor) -> Tensor:
        """Return the table's row for each id."""
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            out_BWd = _LookUp.apply(self.weight, ids_BW, self)  # type: ignore[no-untyped-call]
            assert isinstance(out_BWd, Tensor)
            return out_BWd
        return F.embedding(ids_BW, self.weight)

    def distinct(self, ids_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids of a batch, and each id's place among them, on the CPU and without sorting."""
        flat = ids_BW.reshape(-1)
        if self._last_position_V is None:
            self._last_position_V = torch.empty(self.weight.shape[0], dtype=torch.int32)
        # For each table row, store its last position in the batch (numpy assigns in order); the occurrence at
        # that position represents the row.
        last_V, ids = self._last_position_V.numpy(), flat.numpy()
        last_V[ids] = torch.arange(len(ids), dtype=torch.int32).numpy()
        positions = torch.from_numpy(last_V[ids])
        represents = positions == torch.arange(len(ids), dtype=torch.int32)
        rank = represents.cumsum(0, dtype=torch.int32).sub_(1)
        return flat[represents].long(), rank[positions]

    def accumulate(self, ids_BW: Tensor, grad_BWd: Tensor) -> None:
        """Set `row_gradient` to the sum, per table row, of the gradients of its look-ups."""
        assert self.row_gradient is None, "a table may be looked up only once per step"
        is_real_U = None
        if is_host(ids_BW.device):
            rows_U, places = self.distinct(ids_BW)
        else:
            rows_U, places, is_real_U = distinct_padded(ids_BW.reshape(-1))
        d = grad_BWd.shape[-1]
        grad_Ud = grad_BWd.new_zeros(len(rows_U), d).index_add_(0, places, grad_BWd.reshape(-1, d))
        if len(self.pad_rows_P):
            is_pad_U = (rows_U.unsqueeze(1) == self.pad_rows_P).any(1)
            grad_Ud.masked_fill_(is_pad_U.unsqueeze(1), 0.0)
        self.row_gradient = RowGradient(rows_U, grad_Ud, is_real_U)


def distinct_padded(ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids, each id's place among them, and which of the first result are distinct ids.

    It has as many entries as there are ids, and repeats the smallest one, so that its size is known beforehand.

    >>> distinct_padded(torch.tensor([7, 2, 7]))
    (tensor([2, 7, 2]), tensor([1, 0, 1]), tensor([ True,  True, False]))
    """
    sorted_N, order_N = torch.sort(ids_N.long())
    is_new_N = torch.cat([torch.zeros_like(sorted_N[:1]), (sorted_N[1:] != sorted_N[:-1]).long()])
    rank_N = is_new_N.cumsum(0)
    rows_N = sorted_N[:1].repeat(len(ids_N)) if len(ids_N) else sorted_N.clone()
    rows_N.scatter_(0, rank_N, sorted_N)
    places_N = torch.empty_like(rank_N).scatter_(0, order_N, rank_N)
    return rows_N, places_N, torch.arange(len(ids_N), device=ids_N.device) <= rank_N[-1:]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_Vd: Tensor, ids_BW: Tensor, table: Table) -> Tensor:
        ctx.ids_BW, ctx.table = ids_BW, table
        return F.embedding(ids_BW, weight_Vd)

    @staticmethod
    def backward(ctx: Any, grad_BWd: Tensor) -> tuple[None, None, None]:
        ctx.table.accumulate(ctx.ids_BW, grad_BWd)
        return None, None, None
