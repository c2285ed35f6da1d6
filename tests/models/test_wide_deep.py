"""Wide & Deep, number by number."""

import pytest

from tests.support.tiny import INPUTS, deep, flat, tiny, vectors, wide

DEEP = {"units": [3, 4], "batch_norm": True}


def test_wide_and_deep_adds_a_linear_part_without_bias() -> None:
    model = tiny("wide-deep", **DEEP)
    assert not any(name == "wide.bias" for name, _ in model.named_parameters())
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + deep(model.get_submodule("deep"), flat(e))
        assert float(logit) == pytest.approx(expected)
