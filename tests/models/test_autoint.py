"""AutoInt's attention, score by score."""

import math

import pytest
import torch
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.models.autoint import Attention
from recap_ctr.models.catalogue import parse_model
from tests.support.tiny import INPUTS, affine, deep, dot, flat, tiny, vectors, wide


def layer_norm(norm: nn.LayerNorm, x: list[float]) -> list[float]:
    mean = sum(x) / len(x)
    spread = math.sqrt(sum((number - mean) ** 2 for number in x) / len(x) + 1e-5)
    return [
        (number - mean) / spread * gain + shift
        for number, gain, shift in zip(x, norm.weight.tolist(), norm.bias.tolist(), strict=True)
    ]


def attention(
    layer: nn.Module, x: list[list[float]], *, num_heads: int, scale: bool, residual: bool
) -> list[list[float]]:
    assert isinstance(layer, Attention)
    q, k, v = ([affine(part, x_f) for x_f in x] for part in (layer.query, layer.key, layer.value))
    size = len(q[0]) // num_heads
    out: list[list[float]] = []
    for i in range(len(x)):
        mixed: list[float] = []
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = [dot(q[i][part], k_j[part]) / (math.sqrt(size) if scale else 1.0) for k_j in k]
            weights = [math.exp(score) for score in scores]
            mixed += [
                dot(weights, column) / sum(weights) for column in zip(*(v_j[part] for v_j in v), strict=True)
            ]
        if residual:
            added = affine(layer.residual, x[i]) if isinstance(layer.residual, nn.Linear) else x[i]
            mixed = [a + b for a, b in zip(mixed, added, strict=True)]
        if layer.norm is not None:
            mixed = layer_norm(layer.norm, mixed)
        out.append([max(0.0, number) for number in mixed])
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_heads": 1, "scale": False},
        {"residual": False},
        {"layer_norm": False},
        {"attention_dim": 2},  # the size of the vectors, so that the residual is the input itself
        {"units": []},
        {"units": [], "wide": True, "residual": False, "layer_norm": False, "scale": False},
        {"wide": True},
    ],
)
def test_matches_a_naive_loop(settings: dict[str, object]) -> None:
    settings = {"attention_dim": 6, "num_heads": 2, "units": [3, 4], **settings}
    model = tiny("autoint", **settings)
    config = parse_model("autoint", settings).model_dump()
    kind = {name: config[name] for name in ("num_heads", "scale", "residual")}
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        x = e
        for layer in model.get_submodule("layers").children():
            x = attention(layer, x, **kind)
        expected = affine(model.get_submodule("head"), flat(x))[0]
        if config["units"]:
            expected += deep(model.get_submodule("deep"), flat(e))
        if config["wide"]:
            expected += wide(model.get_submodule("wide"), row)
        assert float(logit) == pytest.approx(expected)


def test_residuals_get_a_matrix_only_where_sizes_differ() -> None:
    for residual, matrices in ((True, 1), (False, 0)):
        model = tiny("autoint", attention_dim=4, num_layers=3, residual=residual)
        residuals = [name for name, _ in model.named_parameters() if "residual" in name]
        assert len(residuals) == matrices


def test_dropout_acts_on_the_attention_too() -> None:
    model = tiny("autoint", units=[], dropout=0.5).train()
    assert not torch.equal(model(INPUTS).logit_B, model(INPUTS).logit_B)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attention_dim": 6, "num_heads": 4}, "attention_dim 6 can't be split evenly among num_heads 4"),
        ({"num_layers": 0}, "num_layers"),
        ({"units": [0]}, "units"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_model("autoint", settings)
