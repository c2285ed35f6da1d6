"""FM, number by number."""

import pytest

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from tests.support.tiny import INPUTS, inner_products, tiny, vectors, wide


def test_fm_is_lr_and_all_pairs() -> None:
    model = tiny("fm")
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + float(model.get_parameter("wide.bias"))
        assert float(logit) == pytest.approx(expected + sum(inner_products(e)))


def test_fm_has_no_mlp_to_set() -> None:
    with pytest.raises(InputError, match="units: unknown setting"):
        parse_model("fm", {"units": [400]})
