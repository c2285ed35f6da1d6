"""The table of vectors, and the layer that looks them up."""

import pytest
import torch

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.table import Table
from tests.support.checks import LAYOUT, rows


@pytest.mark.parametrize("sum_pooling", [False, True])
def test_fields_are_looked_up_pooled_and_multiplied(sum_pooling: bool) -> None:
    torch.manual_seed(0)
    embedding = Embedding(LAYOUT, 3, std=1.0, sum_pooling=sum_pooling).eval()
    inputs = rows(400)
    weight = embedding.table.weight.tolist()
    vectors = embedding(inputs).tolist()
    counts = set()
    for row, ids in enumerate(inputs.ids_BW.tolist()):
        for place, field in enumerate(LAYOUT.fields):
            field_ids = ids[field.start : field.start + field.width]
            total = [sum(weight[value_id][k] for value_id in field_ids) for k in range(3)]
            if field.pooling is not None:
                present = sum(value_id != field.offset for value_id in field_ids)
                counts.add((field.pooling, present))
                if field.pooling == "mean" and not sum_pooling:
                    total = [number / max(present, 1) for number in total]
            if field.value_column is not None:
                total = [number * float(inputs.values_BN[row, field.value_column]) for number in total]
            assert vectors[row][place] == pytest.approx(total, rel=1e-5, abs=1e-7), (row, field.name)
    assert counts == {*(("mean", n) for n in range(4)), *(("sum", n) for n in range(3))}, (
        "from none to all present"
    )


def test_numbers_start_small_but_for_vectors_that_values_multiply() -> None:
    torch.manual_seed(0)
    dim = 2000
    layout = Layout((FieldLayout("ad", 0, 50, 0, 1, None, None), FieldLayout("price", 50, 3, 1, 1, None, 0)))
    weight = Table(layout, dim).weight.detach()
    assert not weight[0].any() and not weight[50].any(), "padding"
    assert float(weight[1:50].std()) == pytest.approx(1e-4, rel=0.02)
    assert float(weight[51].std()) == pytest.approx((2 / (1 + dim)) ** 0.5, rel=0.1)
