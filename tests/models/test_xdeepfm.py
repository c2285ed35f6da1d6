"""xDeepFM's compressed interaction network, product by product."""

import pytest
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.xdeepfm import CIN
from tests.support.tiny import INPUTS, affine, deep, flat, tiny, vectors, wide


def cin(part: nn.Module, e: list[list[float]]) -> float:
    """Return CIN's logit; channel i * H + j of a layer is the product of field i and vector j of the last layer."""
    assert isinstance(part, CIN)
    dim, x = len(e[0]), e
    pooled: list[float] = []
    for layer in (*part.layers, part.last):
        # First the layer's outputs by coordinate, then transposed to one list per vector.
        columns = [affine(layer, [e_i[k] * x_j[k] for e_i in e for x_j in x]) for k in range(dim)]
        x = [list(vector) for vector in zip(*columns, strict=True)]
        pooled += [sum(vector) for vector in x]
    return affine(part.head, pooled)[0]


@pytest.mark.parametrize("sizes", [[4], [4, 2], [2, 3, 4]])
def test_matches_a_naive_loop(sizes: list[int]) -> None:
    model = tiny("xdeepfm", cin_sizes=sizes, units=[3, 4])
    for row, logit in enumerate(model(INPUTS).logit_B):
        e = vectors(model.get_submodule("embedding"), row)
        expected = wide(model.get_submodule("wide"), row) + cin(model.get_submodule("cin"), e)
        assert float(logit) == pytest.approx(expected + deep(model.get_submodule("deep"), flat(e)))


@pytest.mark.parametrize("settings", [{"cin_sizes": []}, {"cin_sizes": [16, 0]}, {"units": []}])
def test_wrong_settings_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        parse_model("xdeepfm", settings)
