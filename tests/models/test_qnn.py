"""QNN against loops that follow its formulas, and its loss against probabilities."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.qnn import QNN, QNNConfig, QuadraticLayer, logit_of_mean
from recap_ctr.nn.losses import LOSSES
from recap_ctr.nn.norms import BatchNorm
from tests.support.naive import INPUTS, LAYOUT, Vector, affine, batch_norm, dropped_shapes, lively, relu

LABELS = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


def naive_layer(layer: QuadraticLayer, x: Vector, dim: int) -> Vector:
    F, H, R = layer.num_fields, layer.num_heads, layer.num_products
    share, D = dim // H, F * dim
    u = affine(layer.maps, x)
    u = relu(batch_norm(layer.norm, u) if isinstance(layer.norm, BatchNorm) else u)
    y = []
    for head in range(H):
        for j in range(D // H):
            field, at = divmod(j, share)
            factor = sum(u[head * R * (D // H) + r * (D // H) + j] for r in range(R))
            y.append(x[field * dim + head * share + at] * factor)
    return [a + b for a, b in zip(y, x, strict=True)]


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("norm", [True, False])
def test_forward_is_the_formula(num_heads: int, norm: bool) -> None:
    config = QNNConfig(dim=4, num_layers=2, num_products=3, num_heads=num_heads, batch_norm=norm)
    model = lively(QNN(config, LAYOUT))
    assert isinstance(model, QNN)

    output = model(INPUTS)

    assert output.aux == {}
    for row, x in enumerate(model.embedding(INPUTS).flatten(1).tolist()):
        for layer in list(model.network)[:-2]:
            assert isinstance(layer, QuadraticLayer)
            x = naive_layer(layer, x, 4)
        assert float(output.logit_B[row]) == pytest.approx(affine(model.network[-2], x)[0], rel=1e-9)


def test_products_are_ordered_by_heads_and_the_residual_by_fields() -> None:
    """With two fields, two heads and all factors 1, the products are (a1, b1, a2, b2) for x = (a1, a2, b1, b2)."""
    layer = QuadraticLayer(QNNConfig(dim=2, num_products=1, num_heads=2, batch_norm=False), 2).eval()
    torch.nn.init.zeros_(layer.maps.weight)
    torch.nn.init.ones_(layer.maps.bias)

    out = layer(torch.tensor([[1.0, 2.0, 30.0, 40.0]]))

    assert out.tolist() == [[1 + 1, 30 + 2, 2 + 30, 40 + 40]]


def trained(**settings: object) -> QNN:
    model = QNN(QNNConfig.model_validate({"dim": 4, "num_heads": 2, **settings}), LAYOUT)
    lively(model).requires_grad_(True)
    for parameter in model.parameters():
        parameter.data *= 0.3  # logits in a range where probabilities keep their digits
    return model.train()


def published_loss(members_KB: Tensor) -> Tensor:
    mean = members_KB.sigmoid().mean(dim=0)
    loss = functional.binary_cross_entropy(mean, LABELS)
    for member in members_KB.sigmoid():
        loss = loss + functional.binary_cross_entropy(member, mean.detach())
    return loss


def test_training_runs_twice_with_separate_dropout_and_the_published_loss() -> None:
    torch.manual_seed(1)
    model = trained(dropout=0.4)
    output = model(INPUTS)
    members_KB = output.aux["members_KB"]
    loss = LOSSES[model.config.loss](output, LABELS, None)
    expected = published_loss(members_KB)

    assert members_KB.shape == (2, 3)
    assert not torch.allclose(members_KB[0], members_KB[1])
    torch.testing.assert_close(output.logit_B.sigmoid(), members_KB.sigmoid().mean(dim=0))
    torch.testing.assert_close(loss, expected)
    weights = list(model.network.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, weights, retain_graph=True), torch.autograd.grad(expected, weights)
    )


def test_without_dropout_the_members_add_no_gradient() -> None:
    model = trained(dropout=0.0)
    output = model(INPUTS)
    weights = list(model.network.parameters())
    distilled, plain = (
        torch.autograd.grad(LOSSES[loss](output, LABELS, None), weights, retain_graph=True)
        for loss in ("self-distillation", "bce")
    )

    torch.testing.assert_close(distilled, plain)


def test_norms_count_both_passes_and_the_table_is_looked_up_once() -> None:
    model = trained()
    norm = next(module for module in model.modules() if isinstance(module, BatchNorm))
    assert norm.num_batches_tracked is not None
    before = int(norm.num_batches_tracked)
    LOSSES["self-distillation"](model(INPUTS), LABELS, None).backward()  # type: ignore[no-untyped-call]

    assert int(norm.num_batches_tracked) == before + 2
    assert model.embedding.table.row_gradient is not None


def test_each_layer_has_two_dropouts() -> None:
    model = QNN(QNNConfig(dim=4, num_layers=2, num_products=3), LAYOUT)
    assert dropped_shapes(model) == [(3, 36), (3, 12)] * 2 * 2


def test_logit_of_mean_is_exact_for_large_logits() -> None:
    members_KB = torch.tensor([[-90.0, 90.0, 0.5], [-90.0, 91.0, -2.0]], requires_grad=True)
    logit_B = logit_of_mean(members_KB)

    mean = torch.sigmoid(torch.tensor([0.5, -2.0], dtype=torch.float64)).mean()
    assert logit_B[2].item() == pytest.approx(torch.logit(mean).item(), rel=1e-6)
    assert logit_B[0].item() == pytest.approx(-90.0)
    assert 90.0 < logit_B[1].item() < 91.0
    assert torch.isfinite(torch.autograd.grad(logit_B.sum(), members_KB)[0]).all()


def test_heads_must_divide_dim() -> None:
    with pytest.raises(InputError, match="num_heads 3 must divide dim, which is 16"):
        parse_model("qnn", {"num_heads": 3})
