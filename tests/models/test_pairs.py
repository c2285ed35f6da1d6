"""FM, DeepFM, PNN and Wide & Deep: one term for each pair of fields, or none."""

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.nn.norms import BatchNorm
from tests.support.tiny import INPUTS, LAYOUT, deep, dot, flat, tiny, vectors, wide

DEEP = {"units": [3, 4], "batch_norm": True}


def inner_products(e: list[list[float]]) -> list[float]:
    """Pairs of fields in reading order: (0, 1), (0, 2), (1, 2)."""
    return [dot(e[i], e[j]) for i in range(len(e)) for j in range(i + 1, len(e))]


def test_fm_is_lr_and_all_pairs() -> None:
    model = tiny("fm")
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + float(model.get_parameter("wide.bias"))
        assert float(logit) == pytest.approx(expected + sum(inner_products(e)))


def test_deepfm_is_fm_and_an_mlp() -> None:
    model = tiny("deepfm", **DEEP)
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + float(model.get_parameter("wide.bias"))
        expected += sum(inner_products(e)) + deep(model.get_submodule("deep"), flat(e))
        assert float(logit) == pytest.approx(expected)


def test_pnn_shows_its_mlp_the_vectors_and_then_the_pairs() -> None:
    model = tiny("pnn", **DEEP)
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = deep(model.get_submodule("deep"), flat(e) + inner_products(e))
        assert float(logit) == pytest.approx(expected)


def test_wide_and_deep_adds_a_linear_part_without_bias() -> None:
    model = tiny("wide-deep", **DEEP)
    assert not any(name == "wide.bias" for name, _ in model.named_parameters())
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + deep(model.get_submodule("deep"), flat(e))
        assert float(logit) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fm", "deepfm"])
def test_linear_parts_start_with_a_zero_bias(name: str) -> None:
    assert build(name, parse_model(name, {}), LAYOUT).get_parameter("wide.bias").item() == 0.0


@pytest.mark.parametrize("name", ["pnn", "wide-deep", "deepfm"])
def test_mlp_settings_reach_the_mlp(name: str) -> None:
    model = tiny(name, units=[3], batch_norm=False, dropout=0.5)
    assert not any(isinstance(module, BatchNorm) for module in model.modules())

    model.train()

    assert not torch.equal(model(INPUTS).logit_B, model(INPUTS).logit_B)


@pytest.mark.parametrize("name", ["pnn", "wide-deep", "deepfm"])
def test_an_mlp_needs_a_layer(name: str) -> None:
    with pytest.raises(InputError, match="units"):
        parse_model(name, {"units": []})


def test_fm_has_no_mlp_to_set() -> None:
    with pytest.raises(InputError, match="units: unknown setting"):
        parse_model("fm", {"units": [400]})
