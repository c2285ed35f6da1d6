# Shapes: B batch, H heads, C features of a head.

import pytest
import torch

from recap_ctr.nn.norms import ScaleNorm, centre_


@pytest.mark.parametrize("num_heads", [1, 3])
def test_scale_norm_is_batch_norm_over_heads(num_heads: int) -> None:
    torch.manual_seed(0)
    ours, torchs = ScaleNorm(num_heads).double(), torch.nn.BatchNorm1d(num_heads).double()
    with torch.no_grad():
        for parameter, twin in zip(ours.parameters(), torchs.parameters(), strict=True):
            parameter.copy_(torch.randn(num_heads))
            twin.copy_(parameter)
    assert sum(p.numel() for p in ours.parameters()) == 2 * num_heads

    for _ in range(3):
        c_BHC = torch.randn(6, num_heads, 5, dtype=torch.float64) * 3 + 1
        torch.testing.assert_close(ours(c_BHC), torchs(c_BHC), rtol=0, atol=0)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(ours.get_buffer(name), torchs.get_buffer(name), rtol=0, atol=0)
    ours.eval(), torchs.eval()
    torch.testing.assert_close(ours(c_BHC), torchs(c_BHC), rtol=0, atol=0)


def test_centre_and_track_do_what_batch_norm_does() -> None:
    torch.manual_seed(0)
    ours, torchs = ScaleNorm(2).double(), torch.nn.BatchNorm1d(2).double()
    for _ in range(3):
        c_BHC = torch.randn(4, 2, 3, dtype=torch.float64)
        expected_BHC = torchs(c_BHC)
        mean_H, var_H = centre_(c_BHC)
        ours.track(mean_H, var_H, count=12)
        torch.testing.assert_close(c_BHC / (var_H[:, None] + ours.eps).sqrt(), expected_BHC)

    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    torch.testing.assert_close(ours.running_var, torchs.running_var)
