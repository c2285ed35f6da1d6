"""FINAL against loops that follow its formulas."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.final import FINAL, Block, FactorizedInteraction, FieldGates, FINALConfig
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.losses import LOSSES
from recap_ctr.nn.norms import BatchNorm
from tests.support.naive import INPUTS, LAYOUT, Vector, affine, batch_norm, lively, relu

SMALL = {"dim": 2, "units1": (6, 4), "units2": (2,)}


def naive_block(block: Block, x: Vector, config: FINALConfig) -> float:
    """Return a block's logit in the order of the formula, whatever the order of the modules."""
    interactions = [layer for layer in block.layers if isinstance(layer, FactorizedInteraction)]
    norms = iter([layer for layer in block.layers if isinstance(layer, BatchNorm)])
    for layer in interactions:
        t = affine(layer.maps, x)
        half = len(t) // 2
        kept, product = t[:half], [t[i] * t[half + i] for i in range(half)]
        x = kept + product if layer.concat else [a + b for a, b in zip(kept, product, strict=True)]
        if config.batch_norm:
            x = batch_norm(next(norms), x)
        if config.activation == "relu":
            x = relu(x)
    return affine(block.head, x)[0]


def test_dropout_comes_last_in_a_layer() -> None:
    model = FINAL(FINALConfig.model_validate(SMALL), LAYOUT)
    for block in (model.block1, model.block2):
        assert block is not None
        kinds = [type(layer) for layer in block.layers]
        assert kinds == [FactorizedInteraction, BatchNorm, nn.ReLU, Dropout] * (len(kinds) // 4)


def gated(gates: FieldGates, e: list[Vector]) -> Vector:
    weight, bias = gates.gate.weight.tolist(), gates.gate.bias.tolist()
    out = [value for vector in e for value in vector]
    for f, vector in enumerate(e):
        for k, value in enumerate(vector):
            gate = bias[f] + sum(weight[f][other] * e[other][k] for other in range(len(e)))
            out.append(value * gate)
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"residual": "sum", "units1": (5, 3)},
        {"gating": False, "activation": "none"},
        {"batch_norm": False},
        {"units2": (), "loss": "bce"},
    ],
)
def test_forward_is_the_formula(settings: dict[str, object]) -> None:
    config = FINALConfig.model_validate({**SMALL, **settings})
    model = lively(FINAL(config, LAYOUT))
    assert isinstance(model, FINAL)

    output = model(INPUTS)

    for row, e in enumerate(model.embedding(INPUTS).tolist()):
        x = [value for vector in e for value in vector]
        first_input = gated(model.gates, e) if isinstance(model.gates, FieldGates) else x
        first = naive_block(model.block1, first_input, config)
        if model.block2 is None:
            assert output.aux == {}
            assert float(output.logit_B[row]) == pytest.approx(first, rel=1e-9)
            continue
        second = naive_block(model.block2, x, config)
        assert output.aux["members_KB"][:, row].tolist() == pytest.approx([first, second], rel=1e-9)
        assert float(output.logit_B[row]) == pytest.approx((first + second) / 2, rel=1e-9)


def test_gates_start_at_exactly_one() -> None:
    e_BFd = torch.randn(4, 3, 2)
    assert torch.equal(FieldGates(3)(e_BFd), torch.cat([e_BFd, e_BFd], dim=1))


def test_loss_is_the_published_one_on_probabilities() -> None:
    model = lively(FINAL(FINALConfig.model_validate(SMALL), LAYOUT)).requires_grad_(True)
    assert isinstance(model, FINAL)
    labels_B = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    output = model(INPUTS)
    loss = LOSSES[model.config.loss](output, labels_B, None)
    mean: Tensor = output.logit_B.sigmoid()
    expected = functional.binary_cross_entropy(mean, labels_B)
    for member in output.aux["members_KB"].sigmoid():
        expected = expected + functional.binary_cross_entropy(member, mean.detach())

    torch.testing.assert_close(loss, expected)
    weights = [weight for name, weight in model.named_parameters() if "embedding" not in name]
    torch.testing.assert_close(
        torch.autograd.grad(loss, weights, retain_graph=True), torch.autograd.grad(expected, weights)
    )


def test_blocks_have_separate_dropout() -> None:
    model = FINAL(FINALConfig.model_validate({**SMALL, "dropout1": 0.4, "dropout2": 0.1}), LAYOUT)
    assert model.block2 is not None
    rates = [
        [layer.p for layer in block.layers if hasattr(layer, "p")] for block in (model.block1, model.block2)
    ]
    assert rates == [[0.4, 0.4], [0.1]]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"units1": (400, 25)}, "25 is odd"),
        ({"units2": (7,)}, "7 is odd"),
        ({"units2": ()}, "nothing to distil"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_model("final", settings)
