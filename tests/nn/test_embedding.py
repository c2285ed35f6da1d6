"""The table of vectors, and the layer that looks them up."""

import numpy as np
import polars as pl
import pytest
import torch

from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.source import Block
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.table import Table
from recap_ctr.schema import Field, Schema
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
                number = float(inputs.values_BN[row, field.value_column])
                if field.is_linear:
                    last = field.offset + 4  # After which there is no edge, but OOV.
                    following = weight[field_ids[0] + (field_ids[0] < last)]
                    total = [low + number * (high - low) for low, high in zip(total, following, strict=True)]
                else:
                    total = [number * each for each in total]
            assert vectors[row][place] == pytest.approx(total, rel=1e-5, abs=1e-7), (row, field.name)
    assert counts == {*(("mean", n) for n in range(4)), *(("sum", n) for n in range(3))}, (
        "from none to all present"
    )


def test_the_gradient_is_that_of_a_dense_table() -> None:
    """Rows of the table that several look-ups of a batch need, as an id and as the next one, get the sum of all."""
    torch.manual_seed(0)
    embedding, inputs = Embedding(LAYOUT, 3, std=1.0).train(), rows(300)
    out_BFd = embedding(inputs)
    grad_BFd = torch.randn_like(out_BFd)
    out_BFd.backward(grad_BFd)
    gradient = embedding.table.row_gradient
    assert gradient is not None

    weight = embedding.table.weight.detach().clone()
    dense = torch.nn.Embedding(len(weight), 3, _weight=weight)
    embedding.table = dense  # type: ignore[assignment]
    torch.testing.assert_close(embedding(inputs), out_BFd, rtol=0, atol=0)
    embedding(inputs).backward(grad_BFd)
    expected = dense.weight.grad
    assert expected is not None
    padding = [field.offset for field in LAYOUT.fields if field.pooling is not None]
    expected[padding] = 0.0
    touched = torch.zeros(len(expected), dtype=torch.bool)
    touched[gradient.rows_U] = True
    assert not expected[~touched].any()
    torch.testing.assert_close(gradient.grad_Ud, expected[gradient.rows_U])
    age = LAYOUT.fields[5]
    assert expected[age.offset + 1 : age.offset + age.size].any(dim=1).all(), "all edges and OOV learn"


def test_numbers_on_the_line_between_two_edges_are_interpolated() -> None:
    """With an edge's place as its vector, a row's vector is its place, as `np.interp` has it."""
    edges = np.array([-3.0, 0.5, 1.0, 8.0])
    field = FittedField(
        Field(name="x", kind="numeric", transform="linear"),
        pl.Series([str(number) for number in range(4)]),
        np.ones(4, np.int64),
        edges=tuple(edges.tolist()),
    )
    encoder = Encoder(Schema(label="y", fields=(field.field,)), [field])
    numbers = np.concatenate([edges, np.linspace(-5, 10, 301)])
    encoded = encoder.encode(Block(pl.DataFrame({"x": numbers}), 1, "rows"))
    embedding = Embedding(encoder.layout, 1).eval()
    with torch.no_grad():
        embedding.table.weight.copy_(torch.tensor([[np.nan], [0.0], [1.0], [2.0], [3.0], [np.nan]]))
        places = embedding(Inputs(torch.from_numpy(encoded.ids_BW), torch.from_numpy(encoded.values_BN)))
    np.testing.assert_allclose(places[:, 0, 0], np.interp(numbers, edges, np.arange(4.0)), atol=1e-6)


def test_numbers_start_small_but_for_vectors_that_values_multiply() -> None:
    torch.manual_seed(0)
    dim = 2000
    layout = Layout(
        (
            FieldLayout("ad", 0, 50, 0, 1, None, None),
            FieldLayout("price", 50, 3, 1, 1, None, 0),
            FieldLayout("age", 53, 9, 2, 1, None, 1, is_linear=True),
        )
    )
    weight = Table(layout, dim).weight.detach()
    assert not weight[[0, 50, 53]].any(), "padding"
    assert float(weight[54:].std()) == pytest.approx(1e-4, rel=0.05)
    assert float(weight[1:50].std()) == pytest.approx(1e-4, rel=0.02)
    assert float(weight[51].std()) == pytest.approx((2 / (1 + dim)) ** 0.5, rel=0.1)
