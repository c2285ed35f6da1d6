"""EulerNet against loops that follow its formulas."""

import math

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.eulernet import EulerLayer, EulerNet, EulerNetConfig, first_orders
from tests.support.naive import INPUTS, LAYOUT, Vector, affine, dropped_shapes, layer_norm, lively, relu

Complex = tuple[list[Vector], list[Vector]]


def naive_layer(layer: EulerLayer, parts: Complex) -> Complex:
    r, q = parts
    inputs, d = len(r), len(r[0])
    implicit_r, implicit_q = (
        relu(affine(layer.implicit, [x for row in part for x in row])) for part in parts
    )
    real, imaginary = [], []
    for n in range(layer.orders_IN.shape[1]):
        real_n, imaginary_n = [], []
        for k in range(d):
            log, phase = float(layer.log_modulus_bias_Nd[n, k]), float(layer.phase_bias_Nd[n, k])
            for i in range(inputs):
                order = float(layer.orders_IN[i, n])
                log += order * 0.5 * math.log(r[i][k] ** 2 + q[i][k] ** 2 + 1e-8)
                phase += order * math.atan2(q[i][k], r[i][k])
            real_n.append(implicit_r[n * d + k] + math.exp(log) * math.cos(phase))
            imaginary_n.append(implicit_q[n * d + k] + math.exp(log) * math.sin(phase))
        if layer.layer_norm:
            real_n = layer_norm(layer.real_norm.weight, layer.real_norm.bias, real_n)
            imaginary_n = layer_norm(layer.imaginary_norm.weight, layer.imaginary_norm.bias, imaginary_n)
        real.append(real_n)
        imaginary.append(imaginary_n)
    return real, imaginary


@pytest.mark.parametrize(("norm", "shrink"), [(True, 1.0), (False, 1.0), (False, 4.0)])
def test_forward_is_the_formula(norm: bool, shrink: float) -> None:
    model = lively(EulerNet(EulerNetConfig(dim=2, neurons=(4, 3), layer_norm=norm, shrink=shrink), LAYOUT))
    assert isinstance(model, EulerNet)

    logit_B = model(INPUTS).logit_B

    modulus = [mu / shrink for mu in model.modulus_F1[:, 0].tolist()]
    weight, bias = model.head.weight[0].tolist(), float(model.head.bias)
    for row, e in enumerate(model.embedding(INPUTS).tolist()):
        parts: Complex = (
            [[mu * math.cos(x) for x in vector] for mu, vector in zip(modulus, e, strict=True)],
            [[mu * math.sin(x) for x in vector] for mu, vector in zip(modulus, e, strict=True)],
        )
        for layer in model.layers:
            assert isinstance(layer, EulerLayer)
            parts = naive_layer(layer, parts)
        expected = 2 * bias  # once for each part
        for part in parts:
            expected += sum(w * x for w, x in zip(weight, [x for v in part for x in v], strict=True))
        assert float(logit_B[row]) == pytest.approx(expected, rel=1e-8)


def test_the_bias_of_the_head_counts_twice() -> None:
    model = lively(EulerNet(EulerNetConfig(dim=2, neurons=(2,)), LAYOUT))
    assert isinstance(model, EulerNet)
    before = model(INPUTS).logit_B
    model.head.bias.add_(1.0)

    torch.testing.assert_close(model(INPUTS).logit_B, before + 2.0)


def test_orders_start_as_the_identity_or_near_one_field_each() -> None:
    torch.manual_seed(0)
    assert torch.equal(first_orders(4, 4), torch.eye(4))
    orders = first_orders(6, 200)
    torch.testing.assert_close(orders.sum(dim=0), torch.ones(200))
    assert (orders.max(dim=0).values > 0.99).float().mean() > 0.9


def test_implicit_maps_start_as_xavier_or_by_a_deviation() -> None:
    torch.manual_seed(0)
    layer = EulerLayer(EulerNetConfig(dim=16, neurons=(20,)), 20, 20)
    bound = math.sqrt(6 / (320 + 320))
    assert 0.99 * bound < float(layer.implicit.weight.detach().abs().max()) <= bound
    assert float(layer.implicit.bias.detach().abs().max()) > 0, "torch's default, not zero"
    wider = EulerLayer(EulerNetConfig(dim=16, neurons=(20,), implicit_std=0.1), 20, 20)
    assert float(wider.implicit.weight.detach().std()) == pytest.approx(0.1, rel=0.02)


def test_dropout_acts_on_log_modulus_phase_and_both_parts() -> None:
    model = EulerNet(EulerNetConfig(dim=2, neurons=(4, 5)), LAYOUT)
    assert dropped_shapes(model) == [(3, 3, 2)] * 4 + [(3, 4, 2)] * 4


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="neurons"):
        parse_model("eulernet", {"neurons": []})
    with pytest.raises(InputError, match="dim"):  # LayerNorm of one number is always 0, which has no phase
        parse_model("eulernet", {"dim": 1})
