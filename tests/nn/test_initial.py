"""Initial weights."""

import pytest
import torch

from recap_ctr.nn.initial import linear


def test_linear_maps_start_as_xavier_normal_without_bias() -> None:
    torch.manual_seed(0)
    made = linear(300, 500)
    assert float(made.weight.detach().std()) == pytest.approx((2 / (300 + 500)) ** 0.5, rel=0.01)
    assert float(made.weight.detach().abs().max()) > 3 * (2 / 800) ** 0.5, "normal, not uniform"
    assert not made.bias.any()
