"""DCN, number by number."""

import pytest
import torch
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build, parse_model
from tests.support.tiny import INPUTS, LAYOUT, affine, dot, flat, hidden, tiny, vectors

DEEP = {"units": [3, 4], "batch_norm": True}


def vector_cross(model: nn.Module, x0: list[float]) -> list[float]:
    weight, bias = (model.get_parameter(f"cross.{name}").tolist() for name in ("weight", "bias"))
    x = x0
    for w, b in zip(weight, bias, strict=True):
        scale = dot(w, x)
        x = [x[k] + scale * x0[k] + b[k] for k in range(len(x))]
    return x


def test_dcn_matches_a_naive_loop() -> None:
    model = tiny("dcn", num_layers=3, **DEEP)
    for row, logit in enumerate(model(INPUTS).logit_B):
        x0 = flat(vectors(model.get_submodule("embedding"), row))
        both = vector_cross(model, x0) + hidden(model.get_submodule("deep"), x0)
        assert float(logit) == pytest.approx(affine(model.get_submodule("head"), both)[0])


def test_dcn_starts_as_linear_maps_do() -> None:
    torch.manual_seed(0)
    model = build("dcn", parse_model("dcn", {"dim": 64}), LAYOUT)

    assert float(model.get_parameter("cross.weight").detach().std()) == pytest.approx(
        (2 / 193) ** 0.5, rel=0.1
    )
    assert model.get_parameter("cross.bias").abs().sum() == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"units": []}, "units"),
        ({"structure": "stacked"}, "structure"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_model("dcn", settings)
