# Shapes: B batch, I inputs, U units.

import torch

from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.mlp import MLP, DeepHead, Wide
from recap_ctr.nn.norms import BatchNorm
from tests.support.checks import LAYOUT, rows


def test_mlp_is_linear_norm_relu_for_each_size() -> None:
    torch.manual_seed(0)
    mlp = MLP(5, [4, 3], batch_norm=True, dropout=0.5)
    x_BI = torch.randn(6, 5)
    for _ in range(3):
        mlp(x_BI)  # move the statistics
    mlp.eval()
    expected_BU = x_BI
    for layer in mlp.layers:
        if isinstance(layer, torch.nn.Linear):
            expected_BU = expected_BU @ layer.weight.T + layer.bias
        elif isinstance(layer, BatchNorm):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            expected_BU = (expected_BU - layer.running_mean) / (layer.running_var + 1e-5).sqrt()
            expected_BU = (expected_BU * layer.weight + layer.bias).clamp(min=0)

    torch.testing.assert_close(mlp(x_BI), expected_BU)
    assert [type(layer) for layer in mlp.layers] == [torch.nn.Linear, BatchNorm, torch.nn.ReLU, Dropout] * 2
    assert [name for name, _ in mlp.named_parameters() if "bias" in name]


def test_deep_head_ends_in_one_plain_linear_map() -> None:
    torch.manual_seed(0)
    deep = DeepHead(5, [4], dropout=0.3).eval()
    x_BI = torch.randn(6, 5)

    torch.testing.assert_close(deep(x_BI), deep.hidden(x_BI) @ deep.head.weight[0] + deep.head.bias)


def test_wide_sums_one_weight_per_value() -> None:
    torch.manual_seed(0)
    wide = Wide(LAYOUT, bias=True).eval()
    inputs = rows(9)
    weight_V = wide.embedding.table.weight[:, 0]
    price = next(field for field in LAYOUT.fields if field.is_factor)
    age = next(field for field in LAYOUT.fields if field.is_linear)
    for i in range(9):
        expected = wide.get_parameter("bias").detach()
        for column, row in enumerate(inputs.ids_BW[i].tolist()):
            factor = inputs.values_BN[i, 0] if column == price.start else 1.0
            expected = expected + weight_V[row] * factor
            if column == age.start and row < age.last:
                expected = expected + inputs.values_BN[i, 1] * (weight_V[row + 1] - weight_V[row])
        torch.testing.assert_close(wide(inputs)[i], expected)


def test_batch_norm_takes_a_single_row() -> None:
    torch.manual_seed(0)
    ours, torchs = BatchNorm(3), torch.nn.BatchNorm1d(3)
    x_BI = torch.randn(8, 3)
    torch.testing.assert_close(ours(x_BI), torchs(x_BI), rtol=0, atol=0)
    before = ours.running_mean.clone() if ours.running_mean is not None else None

    torch.testing.assert_close(ours(x_BI[:1]), torchs.eval()(x_BI[:1]))
    torch.testing.assert_close(ours.running_mean, before, rtol=0, atol=0)
