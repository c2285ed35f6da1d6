"""EDCN against loops that follow its formulas."""

import math

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.edcn import EDCN, EDCNConfig, EDCNLayer, Regulation
from tests.support.naive import INPUTS, LAYOUT, Vector, affine, batch_norm, dot, lively, mlp


def regulated(side: Regulation, x: Vector, config: EDCNConfig) -> Vector:
    if side.gate_F is not None:
        raised = [math.exp(gate / config.temperature) for gate in side.gate_F.tolist()]
        x = [raised[j // config.dim] / sum(raised) * value for j, value in enumerate(x)]
    return batch_norm(side.norm, x) if config.batch_norm else x


def naive_logit(model: EDCN, x: Vector) -> float:
    config = model.config
    bridge, anchor = x, None
    for layer in model.layers:
        assert isinstance(layer, EDCNLayer)
        c, h = regulated(layer.to_cross, bridge, config), regulated(layer.to_deep, bridge, config)
        anchor = c if anchor is None else anchor
        along = dot(layer.cross.weight[0].tolist(), c)
        bias = layer.bias_D.tolist()
        c = [config.residual * c[j] + along * anchor[j] + bias[j] for j in range(len(c))]
        h = mlp(layer.deep, h)
        pairs = zip(c, h, strict=True)
        bridge = [a * b if config.bridge == "hadamard" else a + b for a, b in pairs]
    return affine(model.head, c + h + bridge)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"residual": False},
        {"regulation": False},
        {"batch_norm": False, "temperature": 5.0},
        {"bridge": "sum", "num_layers": 1},
    ],
)
def test_forward_is_the_formula(settings: dict[str, object]) -> None:
    config = EDCNConfig.model_validate({"dim": 2, **settings})
    model = lively(EDCN(config, LAYOUT))
    assert isinstance(model, EDCN)

    logit_B = model(INPUTS).logit_B

    for row, x in enumerate(model.embedding(INPUTS).flatten(1).tolist()):
        assert float(logit_B[row]) == pytest.approx(naive_logit(model, x), rel=1e-9)


def test_gates_start_equal_and_a_high_temperature_makes_them_more_even() -> None:
    side = Regulation(EDCNConfig(dim=2, batch_norm=False), 4)
    torch.testing.assert_close(side(torch.ones(1, 8)), torch.full((1, 8), 0.25))
    with torch.no_grad():
        side.get_parameter("gate_F")[0] = 3.0
    cold = side(torch.ones(1, 8))[0, 0].item()
    side.temperature = 100.0

    assert 0.25 < side(torch.ones(1, 8))[0, 0].item() < 0.26 < cold


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="bridge"):
        parse_model("edcn", {"bridge": "attention"})
    with pytest.raises(InputError, match="temperature"):
        parse_model("edcn", {"temperature": 0})
