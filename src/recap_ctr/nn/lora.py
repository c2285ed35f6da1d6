"""A tower's bank of low-rank residuals (Eq. 9). Shapes: C, D of the weight, R rank, A adapters, B batch, H heads."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recap_ctr.nn.initial import normal_


class AdapterBank(nn.Module):
    """A_r B_r^T for r = 1..A: `a` starts near zero, so that routes begin close together."""

    def __init__(self, num_adapters: int, c: int, d: int, rank: int, *, std: float = 1e-2) -> None:
        super().__init__()
        self.a_ACR = nn.Parameter(torch.empty(num_adapters, c, rank))
        self.b_ADR = nn.Parameter(torch.empty(num_adapters, d, rank))
        normal_(self.a_ACR, std)
        normal_(self.b_ADR, d**-0.5)

    def delta(self, h_BHD: Tensor, adapter: int) -> Tensor:
        """A B^T h by two thin products; the matrix itself is never built."""
        return h_BHD @ self.b_ADR[adapter] @ self.a_ACR[adapter].T

    def delta_by_row(self, h_BHD: Tensor, adapter_B: Tensor) -> Tensor:
        """The same with an adapter of its own for each row: rows are grouped by adapter."""
        order_B = torch.argsort(adapter_B, stable=True)
        counts = torch.bincount(adapter_B, minlength=len(self.a_ACR)).tolist()
        parts = torch.split(h_BHD.index_select(0, order_B), counts)
        sorted_BHC = torch.cat([self.delta(part, adapter) for adapter, part in enumerate(parts)])
        return sorted_BHC.index_select(0, torch.argsort(order_B))

    @torch.no_grad()
    def copy(self, adapter: int, to: Sequence[int]) -> None:
        for other in to:
            self.a_ACR[other] = self.a_ACR[adapter]
            self.b_ADR[other] = self.b_ADR[adapter]

    def matrix(self, adapter: int) -> Tensor:
        """A B^T itself, C × D."""
        return self.a_ACR[adapter] @ self.b_ADR[adapter].T
