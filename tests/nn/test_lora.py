"""Banks of adapters: each row with an adapter of its own, on the CPU and on a device that is not waited for."""

import pytest
import torch
from torch import Tensor

from recap_ctr.nn import device
from recap_ctr.nn.lora import AdapterBank

# Shapes: B batch, H heads, D width, C = D // 2.


@pytest.fixture
def bank() -> AdapterBank:
    torch.manual_seed(1)
    return AdapterBank(4, 3, 6, 2, std=0.5).double()


def results(bank: AdapterBank, h_BHD: Tensor, adapter_B: Tensor) -> list[Tensor]:
    """Return the output of `delta_by_row`, and the gradients of its input and its weights."""
    h_BHD = h_BHD.clone().requires_grad_()
    out_BHC = bank.delta_by_row(h_BHD, adapter_B)
    slopes_BHC = torch.linspace(-1, 2, out_BHC.numel(), dtype=out_BHC.dtype).view_as(out_BHC)
    gradients = torch.autograd.grad((out_BHC * slopes_BHC).sum(), [h_BHD, bank.a_ACR, bank.b_ADR])
    return [out_BHC.detach(), *gradients]


@pytest.mark.parametrize("rows", [5, 0])
def test_a_row_takes_its_own_adapter(bank: AdapterBank, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row takes the last adapter, whose gradient is zero."""
    h_BHD, adapter_B = torch.randn(rows, 2, 6, dtype=torch.float64), torch.tensor([2, 0, 2, 1, 0])[:rows]
    on_host = results(bank, h_BHD, adapter_B)
    for row in range(rows):
        torch.testing.assert_close(on_host[0][row], bank.delta(h_BHD[row], int(adapter_B[row])).detach())
    assert not on_host[2][3].any()

    monkeypatch.setattr(device, "HOST", set())
    for ours, theirs in zip(results(bank, h_BHD, adapter_B), on_host, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_is_read_from_a_device(bank: AdapterBank) -> None:
    """The `meta` device has no numbers that could be read."""
    h_BHD, adapter_B = torch.empty(5, 2, 6, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    assert bank.float().to("meta").delta_by_row(h_BHD, adapter_B).shape == (5, 2, 3)
