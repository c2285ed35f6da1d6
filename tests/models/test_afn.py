"""AFN's logarithmic neurons, power by power."""

import math

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.models.afn import Logarithmic
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.norms import BatchNorm
from tests.support.tiny import INPUTS, affine, deep, flat, normed, tiny, vectors


def neurons(part: torch.nn.Module, e: list[list[float]]) -> list[float]:
    """Return all coordinates of all neurons in one list."""
    assert isinstance(part, Logarithmic)
    out: list[float] = []
    for n, exponents in enumerate(part.exponents.weight.tolist()):
        for k in range(len(e[0])):
            power = 0.0
            for f, exponent in enumerate(exponents):
                power += exponent * normed(part.norm_in, f, math.log(max(abs(e[f][k]), 1e-5)))
            out.append(normed(part.norm_out, n, math.exp(power)))
    return out


@pytest.mark.parametrize("units", [[3, 4], []])
def test_matches_a_naive_loop(units: list[int]) -> None:
    model = tiny("afn", num_neurons=4, log_units=[5, 3], units=units)
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = deep(model.get_submodule("log_deep"), neurons(model.get_submodule("logarithmic"), e))
        if units:
            plain = deep(
                model.get_submodule("deep"), flat(vectors(model.get_submodule("deep_embedding"), row))
            )
            expected = affine(model.get_submodule("head"), [expected, plain])[0]
        assert float(logit) == pytest.approx(expected)


def test_numbers_below_the_clamp_are_raised_to_it() -> None:
    part = Logarithmic(2, 3).double().eval()
    e_BFd = torch.tensor([[[0.0, 1e-9], [-1e-5, 2.0]], [[1e-5, -1e-5], [1e-5, -2.0]]], dtype=torch.float64)

    first, second = part(e_BFd)

    torch.testing.assert_close(first, second)
    assert torch.isfinite(first).all()


def test_no_gradient_flows_below_the_clamp() -> None:
    part = Logarithmic(2, 3).train()
    e_BFd = torch.tensor([[[0.0, 1e-9], [-1e-3, 2.0]], [[0.5, -0.1], [1e-2, -2.0]]], requires_grad=True)

    part(e_BFd).square().sum().backward()

    assert e_BFd.grad is not None
    assert torch.isfinite(e_BFd.grad).all()
    assert e_BFd.grad[0, 0].abs().sum() == 0
    assert (e_BFd.grad[1] != 0).all()


def test_batch_norm_setting_affects_only_the_mlps() -> None:
    model = tiny("afn", batch_norm=False)
    norms = [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
    assert norms == ["logarithmic.norm_in", "logarithmic.norm_out"]


def test_a_batch_of_one_row_with_dim_1_trains() -> None:
    model = tiny("afn", dim=1).train()
    inputs = Inputs(INPUTS.ids_BW[:1], INPUTS.values_BN[:1])
    assert torch.isfinite(model(inputs).logit_B).all()


@pytest.mark.parametrize("settings", [{"num_neurons": 0}, {"log_units": []}, {"log_dropout": 1.0}])
def test_wrong_settings_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        parse_model("afn", settings)
