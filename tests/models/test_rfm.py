"""RFM against loops that follow its formulas."""

import math

import pytest
import torch

from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.rfm import RFM, Amplification, RFMConfig, RotationLayer
from recap_ctr.nn.losses import LOSSES
from recap_ctr.training.optimizer import Update
from tests.support.naive import (
    INPUTS,
    LAYOUT,
    Vector,
    affine,
    dropped_shapes,
    layer_norm,
    lively,
    relu,
    sigmoid,
)

SMALL = {"dim": 3, "width": 4, "num_heads": 2, "units": (6, 4), "group": 2}


def naive_rotation(layer: RotationLayer, angles: list[Vector]) -> list[Vector]:
    F, C, W = layer.query_FCW.shape
    K = W // layer.num_heads
    q, k, v = (
        [[sum(angles[f][c] * float(m[f, c, w]) for c in range(C)) for w in range(W)] for f in range(F)]
        for m in (layer.query_FCW, layer.key_FCW, layer.value_FCW)
    )
    out = []
    for i in range(F):
        rotated = [0.0] * W
        for head in range(layer.num_heads):
            for j in range(F):
                score = 0.0
                for at in range(K):
                    w = head * K + at
                    score += float(layer.agreement_1K[0, at]) * math.cos(q[i][w] - k[j][w])
                for at in range(K):
                    rotated[head * K + at] += sigmoid(score) * v[j][head * K + at]
        direct = affine(layer.direct, angles[i])
        summed = [a + b for a, b in zip(rotated, direct, strict=True)]
        out.append(layer_norm(layer.norm.weight, layer.norm.bias, summed))
    return out


def naive_logit(model: RFM, e: list[Vector]) -> float:
    angles = e
    for layer in model.rotations:
        assert isinstance(layer, RotationLayer)
        angles = naive_rotation(layer, angles)
    parts = []
    for turn, norm in ((math.cos, model.real_norm), (math.sin, model.imaginary_norm)):
        part: Vector = []
        for f, vector in enumerate(angles):
            turned = [turn(value) for value in vector]
            if model.config.residual:
                projected = affine(model.project, e[f])
                turned = [a + turn(b) for a, b in zip(turned, projected, strict=True)]
                turned = layer_norm(norm.weight, norm.bias, turned)
            part += turned
        parts.append(part)
    for amplify in model.amplify:
        assert isinstance(amplify, Amplification)
        for at, norm in enumerate((amplify.real_norm, amplify.imaginary_norm)):
            mapped = relu(affine(amplify.map, parts[at]))
            groups = [mapped[i : i + amplify.group] for i in range(0, len(mapped), amplify.group)]
            parts[at] = [value for group in groups for value in layer_norm(norm.weight, norm.bias, group)]
    return affine(model.head, parts[0])[0] + affine(model.head, parts[1])[0]


@pytest.mark.parametrize(
    "settings", [{}, {"residual": False}, {"units": ()}, {"num_heads": 1, "num_layers": 1}]
)
def test_forward_is_the_formula(settings: dict[str, object]) -> None:
    model = lively(RFM(RFMConfig.model_validate({**SMALL, **settings}), LAYOUT))
    assert isinstance(model, RFM)

    logit_B = model(INPUTS).logit_B

    for row, e in enumerate(model.embedding(INPUTS).tolist()):
        assert float(logit_B[row]) == pytest.approx(naive_logit(model, e), rel=1e-8)


def test_the_bias_of_the_head_counts_twice() -> None:
    model = lively(RFM(RFMConfig.model_validate(SMALL), LAYOUT))
    assert isinstance(model, RFM)
    before = model(INPUTS).logit_B
    model.head.bias.add_(1.0)

    torch.testing.assert_close(model(INPUTS).logit_B, before + 2.0)


def test_weights_start_by_their_fans() -> None:
    torch.manual_seed(0)
    layout = Layout.of_sizes([2_000] * 20)
    model = RFM(RFMConfig(width=64, num_layers=1, embedding_init="xavier"), layout)
    layer = model.rotations[0]
    assert isinstance(layer, RotationLayer)
    for weight, std in (
        (layer.query_FCW, 1.414 * math.sqrt(2 / (16 * 64 + 20 * 64))),
        (layer.direct.weight, 1.414 * math.sqrt(2 / (16 + 64))),
        (model.project.weight, 0.01),
        (model.embedding.table.weight, math.sqrt(2 / (40_000 + 16))),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)
    small = RFM(RFMConfig(), layout).embedding.table.weight
    assert float(small.detach().std()) == pytest.approx(1e-4, rel=0.1)


def test_dropout_acts_on_values_inputs_and_both_parts() -> None:
    """It doesn't act on scores, queries and keys."""
    model = RFM(RFMConfig.model_validate({**SMALL, "num_layers": 2}), LAYOUT)
    rotations = [(3, 2, 3, 2), (3, 3, 3), (3, 2, 3, 2), (3, 3, 4)]
    assert dropped_shapes(model) == [*rotations, (3, 12), (3, 12), (3, 6), (3, 6)]


def test_without_residual_its_weights_exist_but_do_not_change() -> None:
    with_residual, without = (
        RFM(RFMConfig.model_validate({**SMALL, "residual": residual}), LAYOUT) for residual in (True, False)
    )
    assert sum(p.numel() for p in with_residual.parameters()) == sum(p.numel() for p in without.parameters())
    steps = Update(without.train(), TrainConfig())
    before = without.project.weight.detach().clone()
    LOSSES["bce"](without(INPUTS), torch.tensor([1.0, 0.0, 1.0]), None).backward()  # type: ignore[no-untyped-call]
    steps.step(1e-2)

    assert torch.equal(without.project.weight, before)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_heads": 3}, "num_heads 3 must divide width, which is 32"),
        ({"units": (48, 20)}, "group 8 must divide each of units, but 20"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_model("rfm", settings)
