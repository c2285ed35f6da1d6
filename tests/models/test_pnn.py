"""PNN, number by number."""

import pytest

from tests.support.tiny import INPUTS, deep, flat, inner_products, tiny, vectors

DEEP = {"units": [3, 4], "batch_norm": True}


def test_pnn_shows_its_mlp_the_vectors_and_then_the_pairs() -> None:
    model = tiny("pnn", **DEEP)
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = deep(model.get_submodule("deep"), flat(e) + inner_products(e))
        assert float(logit) == pytest.approx(expected)
