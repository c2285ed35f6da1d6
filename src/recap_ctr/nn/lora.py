"""A tower's bank of adapters (Eq. 9). Shapes: C × D the weight, R rank, A adapters, B batch, H heads."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recap_ctr.nn.device import is_host
from recap_ctr.nn.group import current_group
from recap_ctr.nn.initial import normal_


class AdapterBank(nn.Module):
    """Low-rank residuals A_r B_r^T for r = 1..A; `a` starts near zero, so that routes start close together."""

    def __init__(self, num_adapters: int, c: int, d: int, rank: int, *, std: float = 1e-2) -> None:
        super().__init__()
        self.a_ACR = nn.Parameter(torch.empty(num_adapters, c, rank))
        self.b_ADR = nn.Parameter(torch.empty(num_adapters, d, rank))
        normal_(self.a_ACR, std)
        normal_(self.b_ADR, d**-0.5)

    @property
    def rank(self) -> int:
        """Return the rank of the adapters."""
        return self.a_ACR.shape[-1]

    def delta(self, h_BHD: Tensor, adapter: int) -> Tensor:
        """Return A B^T h by two thin products, without building the matrix A B^T."""
        return h_BHD @ self.b_ADR[adapter] @ self.a_ACR[adapter].T

    def delta_by_row(self, h_BHD: Tensor, adapter_B: Tensor) -> Tensor:
        """Return A B^T h with a separate adapter for each row; rows are grouped by adapter.

        A GPU would have to be waited for to learn how large the groups are. There, all rows are multiplied by all
        adapters, which are thin, and each row keeps its own.
        """
        if not is_host(h_BHD.device):
            is_own_BA = adapter_B.unsqueeze(1) == torch.arange(len(self.a_ACR), device=adapter_B.device)
            thin_BHAR = torch.einsum("bhd,adr->bhar", h_BHD, self.b_ADR)
            thin_BHAR = thin_BHAR * is_own_BA[:, None, :, None]
            return torch.einsum("bhar,acr->bhc", thin_BHAR, self.a_ACR)
        order_B = torch.argsort(adapter_B, stable=True)
        counts = torch.bincount(adapter_B, minlength=len(self.a_ACR)).tolist()
        parts = torch.split(h_BHD.index_select(0, order_B), counts)
        sorted_BHC = torch.cat([self.delta(part, adapter) for adapter, part in enumerate(parts)])
        return sorted_BHC.index_select(0, torch.argsort(order_B))

    @torch.no_grad()
    def copy(self, adapter: int, targets: Sequence[int]) -> None:
        """Overwrite each of the adapters `targets` with `adapter`."""
        for target in targets:
            self.a_ACR[target] = self.a_ACR[adapter]
            self.b_ADR[target] = self.b_ADR[adapter]

    def matrix(self, adapter: int) -> Tensor:
        """Return the matrix A B^T, C × D."""
        return self.a_ACR[adapter] @ self.b_ADR[adapter].T


class SignBank(nn.Module):
    """Adapters that scale the weight's rows and columns; they start at random signs, so that routes start far apart."""

    def __init__(self, num_adapters: int, c: int, d: int) -> None:
        super().__init__()
        self.rows_AC = nn.Parameter(torch.randint(2, (num_adapters, c)) * 2.0 - 1.0)
        self.columns_AD = nn.Parameter(torch.randint(2, (num_adapters, d)) * 2.0 - 1.0)

    @property
    def rank(self) -> int:
        """Return the rank of what the weight is multiplied by."""
        return 1

    def matrix(self, adapter: int) -> Tensor:
        """Return what the weight is multiplied by, minus 1, C × D."""
        return torch.outer(self.rows_AC[adapter], self.columns_AD[adapter]) - 1.0


def draw_for_rows(count: int, rows_B: Tensor) -> Tensor:
    """Return a random number below `count` for each row; a worker of a group gets those of its rows."""
    group = current_group()
    return torch.randint(count, (group.rows_of_all(len(rows_B)),), device=rows_B.device)[group.place]
