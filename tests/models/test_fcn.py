"""FCN against loops that follow its formulas."""

import math

import pytest
import torch
from torch import Tensor

from recap_ctr.data.layout import Layout
from recap_ctr.models.fcn import FCN, FCNConfig, halved
from recap_ctr.nn.cross import Cross
from recap_ctr.nn.interface import Inputs


def test_halved_layout_takes_first_halves_of_all_fields_first() -> None:
    # Coordinate k of field f is 10 f + k; two heads of size 4.
    e_BFd = torch.tensor([[[10.0 * f + k for k in range(8)] for f in range(3)]])

    x_BHD = halved(e_BFd, 2)

    assert x_BHD[0, 0].tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    assert x_BHD[0, 1].tolist() == [4, 5, 14, 15, 24, 25, 6, 7, 16, 17, 26, 27]


def naive_layer(x: list[float], anchor: list[float], layer: Cross, head: int) -> list[float]:
    """Return the output of one cross layer for one row in evaluation mode, number by number."""
    C = len(x) // 2
    c = [sum(float(layer.weight[i, j]) * x[j] for j in range(len(x))) for i in range(C)]
    if layer.scale_norm is not None:
        norm = layer.scale_norm
        mean, var = float(norm.running_mean[head]), float(norm.running_var[head])
        gain, shift = float(norm.weight[head]), float(norm.bias[head])
        c = [(value - mean) / math.sqrt(var + 1e-5) * gain + shift for value in c]
    centre = sum(c) / C
    spread = math.sqrt(sum((value - centre) ** 2 for value in c) / C + 1e-5)
    assert layer.layer_norm is not None
    gate = [
        max(
            0.0,
            (value - centre) / spread * float(layer.layer_norm.weight[i]) + float(layer.layer_norm.bias[i]),
        )
        for i, value in enumerate(c)
    ]
    g = c + [value * open_ for value, open_ in zip(c, gate, strict=True)]
    return [anchor[j] * (g[j] + float(layer.bias[j])) + x[j] for j in range(len(x))]


@pytest.mark.parametrize("num_heads", [1, 2])
def test_forward_matches_a_naive_loop(num_heads: int) -> None:
    torch.manual_seed(3)
    config = FCNConfig(dim=4, num_exponential_layers=2, num_linear_layers=3, num_heads=num_heads)
    model = FCN(config, Layout.of_sizes([5, 4, 6]))
    with torch.no_grad():
        model.embedding.table.weight.normal_()  # large enough for every term to matter
    inputs = Inputs(torch.tensor([[1, 6, 10], [3, 7, 12]], dtype=torch.int32), torch.empty(2, 0))
    model.train()
    for _ in range(3):
        model(inputs)  # so that running statistics are no longer 0 and 1
    model.eval().requires_grad_(False)

    output = model(inputs)

    for row in range(2):
        x0_HD = halved(model.embedding(inputs), num_heads)[row].tolist()
        towers: list[float] = []
        for tower in (model.exponential, model.linear):
            logits = []
            for head, x0 in enumerate(x0_HD):
                x = x0
                for layer in tower.layers:
                    assert isinstance(layer, Cross)
                    x = naive_layer(x, x if tower.exponential else x0, layer, head)
                weight: Tensor = tower.head.weight[0]
                logits.append(sum(float(weight[j]) * x[j] for j in range(len(x))) + float(tower.head.bias))
            towers.append(sum(logits) / num_heads)
        assert float(output.aux["exponential"][row]) == pytest.approx(towers[0], rel=1e-4, abs=1e-5)
        assert float(output.aux["linear"][row]) == pytest.approx(towers[1], rel=1e-4, abs=1e-5)
        assert float(output.logit_B[row]) == pytest.approx(sum(towers) / 2, rel=1e-4, abs=1e-5)


def test_branches_are_averaged_and_share_their_vectors() -> None:
    layout = Layout.of_sizes([5, 7])
    torch.manual_seed(0)
    model = FCN(FCNConfig(dim=4, num_branches=3), layout).eval()
    inputs = Inputs(torch.tensor([[0, 6], [4, 9]], dtype=torch.int32), torch.empty(2, 0))
    x0_BHD = halved(model.embedding(inputs), 1)
    exponential = [model.exponential, *model.further_exponential]
    linear = [model.linear, *model.further_linear]
    assert len(exponential) == len(linear) == 3
    output = model(inputs)
    expected_B = sum((tower(x0_BHD) for tower in exponential), torch.zeros(2)) / 3
    torch.testing.assert_close(output.aux["exponential"], expected_B)
    logits = [tower(x0_BHD) for tower in (*exponential, *linear)]
    torch.testing.assert_close(output.logit_B, torch.stack(logits).mean(0))


def test_one_branch_leaves_no_trace_in_the_config() -> None:
    assert "num_branches" not in FCNConfig().model_dump()
    assert FCNConfig(num_branches=2).model_dump()["num_branches"] == 2
