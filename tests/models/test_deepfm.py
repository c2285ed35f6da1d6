"""DeepFM, number by number."""

import pytest

from tests.support.tiny import INPUTS, deep, flat, inner_products, tiny, vectors, wide

DEEP = {"units": [3, 4], "batch_norm": True}


def test_deepfm_is_fm_and_an_mlp() -> None:
    model = tiny("deepfm", **DEEP)
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + float(model.get_parameter("wide.bias"))
        expected += sum(inner_products(e)) + deep(model.get_submodule("deep"), flat(e))
        assert float(logit) == pytest.approx(expected)
