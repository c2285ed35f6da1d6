"""The layer that turns a row's ids into its vectors.

Shapes: B batch, W id columns, F fields, M fields whose number multiplies, L linear fields, N value columns,
d vector size.
"""

import torch
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.group import current_group
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.sharded import ShardedTable
from recap_ctr.nn.table import Table


class Embedding(nn.Module):
    """One vector per field: looked up, pooled over the values of a multi field, times a numeric field's number.

    A linear field's vector is on the line from that of its id to the next one.
    """

    factor_columns_M: Tensor
    factor_numbers_M: Tensor
    linear_columns_L: Tensor
    linear_numbers_L: Tensor
    linear_last_L: Tensor

    def __init__(self, layout: Layout, dim: int, *, std: float = 1e-4, sum_pooling: bool = False) -> None:
        super().__init__()
        self.table = (Table if current_group().size == 1 else ShardedTable)(layout, dim, std=std)
        self._fields = layout.fields
        self._plain = layout.num_columns == layout.num_fields
        factors = [field for field in layout.fields if field.is_factor]
        linear = [field for field in layout.fields if field.is_linear]
        constants = {
            "factor_columns_M": [field.start for field in factors],
            "factor_numbers_M": [field.number_column for field in factors],
            "linear_columns_L": [field.start for field in linear],
            "linear_numbers_L": [field.number_column for field in linear],
            "linear_last_L": [field.last for field in linear],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)
        self._sum_pooling = sum_pooling

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the vectors of all fields, (B, F, d)."""
        e_BWd = self._look_up(inputs)
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

    def _look_up(self, inputs: Inputs) -> Tensor:
        """Return the vector of each id, times its factor or on the way to the next id's, (B, W, d)."""
        ids_BW, num_linear = inputs.ids_BW, len(self.linear_columns_L)
        if num_linear:
            ids_BL = ids_BW.index_select(1, self.linear_columns_L)
            next_BL = ids_BL + (ids_BL < self.linear_last_L).to(ids_BL.dtype)
            # The table is looked up once, so that its gradient is summed over both.
            ids_BW = torch.cat([ids_BW, next_BL], dim=1)
        e_BWd: Tensor = self.table(ids_BW)
        if num_linear:
            e_BWd, next_BLd = torch.split(e_BWd, [inputs.ids_BW.shape[1], num_linear], dim=1)
            share_BL1 = inputs.values_BN.index_select(1, self.linear_numbers_L).to(e_BWd.dtype).unsqueeze(-1)
            start_BLd = e_BWd.index_select(1, self.linear_columns_L)
            e_BWd = e_BWd.index_copy(
                1, self.linear_columns_L, start_BLd * (1 - share_BL1) + next_BLd * share_BL1
            )
        if len(self.factor_columns_M):
            factor_BM1 = inputs.values_BN.index_select(1, self.factor_numbers_M).to(e_BWd.dtype).unsqueeze(-1)
            e_BMd = e_BWd.index_select(1, self.factor_columns_M)
            e_BWd = e_BWd.index_copy(1, self.factor_columns_M, e_BMd * factor_BM1)
        return e_BWd
