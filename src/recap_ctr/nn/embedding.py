"""The layer that turns a row's ids into its vectors.

Shapes: B batch, W id columns, F fields, N value columns, d vector size.
"""

import torch
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.group import current_group
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.sharded import ShardedTable
from recap_ctr.nn.table import Table


class Embedding(nn.Module):
    """One vector per field: looked up, pooled over the values of a multi field, times a numeric field's number."""

    def __init__(self, layout: Layout, dim: int, *, std: float = 1e-4, sum_pooling: bool = False) -> None:
        super().__init__()
        self.table = (Table if current_group().size == 1 else ShardedTable)(layout, dim, std=std)
        self._fields = layout.fields
        self._plain = layout.num_columns == layout.num_fields
        self._value_columns = [field.start for field in layout.fields if field.value_column is not None]
        self._sum_pooling = sum_pooling

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the vectors of all fields, (B, F, d)."""
        e_BWd: Tensor = self.table(inputs.ids_BW)
        if self._value_columns:
            factor_BW = torch.ones_like(inputs.ids_BW, dtype=e_BWd.dtype)
            factor_BW[:, self._value_columns] = inputs.values_BN
            e_BWd = e_BWd * factor_BW.unsqueeze(-1)
        if self._plain:
            return e_BWd
        parts: list[Tensor] = []
        start = 0  # the first single column that is not in `parts` yet
        for field in self._fields:
            if field.pooling is None:
                continue
            parts.append(e_BWd[:, start : field.start])
            start = field.start + field.width
            sum_Bd = e_BWd[:, field.start : start].sum(1)
            if field.pooling == "mean" and not self._sum_pooling:
                present_BW = inputs.ids_BW[:, field.start : start] != field.offset
                sum_Bd = sum_Bd / present_BW.sum(1, keepdim=True).clamp(min=1)
            parts.append(sum_Bd.unsqueeze(1))
        parts.append(e_BWd[:, start:])
        return torch.cat(parts, dim=1)
