"""DCNv2, number by number."""

import math

import pytest
import torch
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from tests.support.tiny import INPUTS, LAYOUT, affine, dot, flat, hidden, tiny, vectors

DEEP = {"units": [3, 4], "batch_norm": True}


def matrix_cross(model: nn.Module, x0: list[float]) -> list[float]:
    x = x0
    for layer in model.get_submodule("cross.layers").children():
        t = affine(layer, x)
        x = [x[k] + x0[k] * t[k] for k in range(len(x))]
    return x


def mixture_cross(model: nn.Module, x0: list[float]) -> list[float]:
    v, c, u, bias, gate = (
        model.get_parameter(f"cross.{name}").tolist() for name in ("v", "c", "u", "bias", "gate")
    )
    x = x0
    for layer in range(len(bias)):
        scores = [math.exp(dot(w, x)) for w in gate]
        out = list(x)
        for e, score in enumerate(scores):
            low = [math.tanh(dot(column, x)) for column in zip(*v[layer][e], strict=True)]
            low = [math.tanh(dot(row, low)) for row in c[layer][e]]
            for k in range(len(x)):
                mapped = x0[k] * (dot(u[layer][e][k], low) + bias[layer][k])
                out[k] += score / sum(scores) * mapped
        x = out
    return x


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_dcnv2_matches_a_naive_loop(structure: str, rank: int | None) -> None:
    model = tiny("dcnv2", num_layers=2, structure=structure, rank=rank, num_experts=2, **DEEP)
    cross = matrix_cross if rank is None else mixture_cross
    for row, logit in enumerate(model(INPUTS).logit_B):
        x0 = flat(vectors(model.get_submodule("embedding"), row))
        crossed = cross(model, x0)
        mlp = model.get_submodule("deep")
        top = crossed + hidden(mlp, x0) if structure == "parallel" else hidden(mlp, crossed)
        assert float(logit) == pytest.approx(affine(model.get_submodule("head"), top)[0])


def test_low_rank_saves_weights_and_starts_as_published() -> None:
    settings = {"dim": 16, "num_layers": 1, "rank": 4}
    torch.manual_seed(0)
    model = build("dcnv2", parse_model("dcnv2", settings), LAYOUT)
    count, width, rank = 4, 48, 4

    cross = sum(parameter.numel() for parameter in model.get_submodule("cross").parameters())

    assert cross == count * (2 * width * rank + rank * rank) + width + count * width
    for name, fan in (("v", rank * (width + count)), ("c", rank * (rank + count)), ("gate", width + 1)):
        deviation = float(model.get_parameter(f"cross.{name}").detach().std())
        assert deviation == pytest.approx((2 / fan) ** 0.5, rel=0.2)
    assert model.get_parameter("cross.bias").abs().sum() == 0


def test_a_stacked_head_reads_only_the_mlp() -> None:
    parallel, stacked = (
        count_parameters("dcnv2", parse_model("dcnv2", {"structure": structure}), LAYOUT)
        for structure in ("parallel", "stacked")
    )
    assert parallel - stacked == LAYOUT.num_fields * 16


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"structure": "sideways"}, "structure"),
        ({"units": []}, "units"),
        ({"rank": 0}, "rank"),
        ({"rank": 8, "num_experts": 0}, "num_experts"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_model("dcnv2", settings)
