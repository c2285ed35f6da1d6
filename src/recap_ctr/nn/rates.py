"""The packed table of click rates as a layer (`data/rates.py` fills it).

Shapes: B batch, W id columns, P crosses (fields or pairs of fields), S slots of a bucket.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import COUNT_STEPS, LEVELS, NEUTRAL, ODDS_STEPS, SLOTS, Cross, fields_of, place


class RateTable(nn.Module):
    """From a row's ids to the two codes of each cross: of its log odds, and of its number of rows."""

    weight: Tensor
    left_P: Tensor
    right_P: Tensor
    left_offset_P: Tensor
    right_offset_P: Tensor
    is_pair_P: Tensor
    cross_P: Tensor

    def __init__(self, crosses: Sequence[Cross], buckets: int, layout: Layout) -> None:
        super().__init__()
        self._buckets = buckets
        self.register_buffer("weight", torch.zeros(buckets, SLOTS, dtype=torch.int32))
        fields = fields_of(crosses, layout)
        constants = {
            "left_P": [left.start for left, _ in fields],
            "left_offset_P": [left.offset for left, _ in fields],
            "right_P": [(right or left).start for left, right in fields],
            "right_offset_P": [(right or left).offset for left, right in fields],
            "is_pair_P": [int(right is not None) for _, right in fields],
            "cross_P": list(range(len(fields))),
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(self, ids_BW: Tensor) -> Tensor:
        """Return the codes of each cross, (B, P, 2); 0 and 0 where there is no entry."""
        ids = ids_BW.long()
        left_BP = ids[:, self.left_P] - self.left_offset_P
        right_BP = (ids[:, self.right_P] - self.right_offset_P) * self.is_pair_P
        bucket_BP, mark_BP = place(left_BP, right_BP, self.cross_P, self._buckets)
        entries_BPS = self.weight[bucket_BP].long()
        is_it_BPS = torch.div(entries_BPS, LEVELS**2, rounding_mode="trunc") == mark_BP.unsqueeze(-1)
        codes_BP = (entries_BPS * is_it_BPS).sum(-1) % LEVELS**2
        return torch.stack([torch.div(codes_BP, LEVELS, rounding_mode="trunc"), codes_BP % LEVELS], dim=-1)


def decode(codes_BP2: Tensor) -> Tensor:
    """Return log odds and a quarter of the counts' logarithms, (B, 2 P); both 0 without an entry."""
    codes = codes_BP2.float()
    counts_BP = codes[..., 1] / (4 * COUNT_STEPS)
    odds_BP = (codes[..., 0] - NEUTRAL) / ODDS_STEPS * (counts_BP > 0).float()
    return torch.stack([odds_BP, counts_BP], dim=-1).flatten(1)
