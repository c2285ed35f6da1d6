"""FinalMLP against loops that follow its formulas."""

import pytest
import torch

from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.finalmlp import Bilinear, Context, FinalMLP, FinalMLPConfig, Selection
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.losses import LOSSES
from recap_ctr.nn.mlp import MLP
from recap_ctr.nn.table import Table
from recap_ctr.training.optimizer import Update
from tests.support import checks
from tests.support.naive import INPUTS, LAYOUT, Vector, affine, lively, mlp, sigmoid

SMALL = {
    "dim": 2,
    "units1": (5, 4),
    "units2": (6,),
    "num_heads": 2,
    "selection_units": (3,),
    "batch_norm2": False,
}


def gates(selection: Selection, context: Vector) -> Vector:
    hidden = selection.gate[0]
    assert isinstance(hidden, MLP)
    return [2 * sigmoid(value) for value in affine(selection.gate[1], mlp(hidden, context))]


@pytest.mark.parametrize(
    "settings",
    [{}, {"feature_selection": False}, {"context1": ("f1",), "context2": ("f2", "f0")}, {"num_heads": 1}],
)
def test_forward_is_the_formula(settings: dict[str, object]) -> None:
    config = FinalMLPConfig.model_validate({**SMALL, **settings})
    model = lively(FinalMLP(config, LAYOUT))
    assert isinstance(model, FinalMLP)

    logit_B = model(INPUTS).logit_B

    for row, x in enumerate(model.embedding(INPUTS).flatten(1).tolist()):
        streams = [x, x]
        for at, (selection, names) in enumerate(
            zip(model.selections, (config.context1, config.context2), strict=False)
        ):
            assert isinstance(selection, Selection)
            context = [] if selection.constant_1d is None else selection.constant_1d[0].tolist()
            start = 0  # the field's first row in the context's table
            for name in names:
                assert selection.context is not None
                field = LAYOUT.fields[int(name[1:])]
                table_row = int(INPUTS.ids_BW[row, field.start]) - field.offset + start
                context += selection.context.embedding.table.weight[table_row].tolist()
                start += field.size
            gate = gates(selection, context)
            streams[at] = [g * value for g, value in zip(gate, x, strict=True)]
        h1, h2 = mlp(model.stream1, streams[0]), mlp(model.stream2, streams[1])
        expected = affine(model.head1, h1)[0] + affine(model.head2, h2)[0]
        weight = model.bilinear.weight_HIJ
        heads, share1, share2 = weight.shape
        for head in range(heads):
            for i in range(share1):
                for j in range(share2):
                    expected += h1[head * share1 + i] * float(weight[head, i, j]) * h2[head * share2 + j]
        assert float(logit_B[row]) == pytest.approx(expected, rel=1e-9)


def test_heads_multiply_only_their_slices_and_start_tiny() -> None:
    torch.manual_seed(0)
    bilinear = Bilinear(400, 100, 5)
    assert bilinear.weight_HIJ.shape == (5, 80, 20)
    assert float(bilinear.weight_HIJ.detach().std()) == pytest.approx((2 / 8001) ** 0.5, rel=0.05)
    first, second = torch.zeros(1, 400), torch.zeros(1, 100)
    first[0, 3], second[0, 25] = 1.0, 1.0  # slices of two different heads

    assert bilinear(first, second).item() == 0.0


def test_gates_without_context_start_at_one_and_only_their_last_bias_learns() -> None:
    model = FinalMLP(FinalMLPConfig(), LAYOUT).train()
    for selection in model.selections:
        assert torch.equal(selection(INPUTS), torch.ones(1, 48))
    LOSSES["bce"](model(INPUTS), torch.tensor([1.0, 0.0, 1.0]), None).backward()  # type: ignore[no-untyped-call]
    learning = [
        name
        for name, weight in model.selections.named_parameters()
        if weight.grad is not None and weight.grad.abs().sum() > 0
    ]

    assert learning == ["0.gate.1.bias", "1.gate.1.bias"]


def test_the_table_of_a_context_holds_only_its_fields() -> None:
    """Fields may be in any order, and multi or numeric; PAD rows move with their field."""
    torch.manual_seed(0)
    names = ("tags", "age", "price", "other")
    context, whole = Context(checks.LAYOUT, names, 3), Embedding(checks.LAYOUT, 3)
    table = context.embedding.table
    assert table.weight.shape == (4 + 6 + 3 + 5, 3)
    assert table.weight[[0, 4, 10, 13]].abs().sum() == 0
    assert table.pad_rows_P.tolist() == [0]
    with torch.no_grad():
        for start, field in (
            (0, checks.LAYOUT.fields[4]),
            (4, checks.LAYOUT.fields[5]),
            (10, checks.LAYOUT.fields[3]),
            (13, checks.LAYOUT.fields[1]),
        ):
            whole.table.weight[field.offset : field.offset + field.size] = table.weight[
                start : start + field.size
            ]
    inputs = checks.rows(20)

    torch.testing.assert_close(context(inputs), whole(inputs)[:, [4, 5, 3, 1]].flatten(1))


@pytest.mark.parametrize("update", ["exact", "fast"])
def test_context_tables_learn(update: str) -> None:
    torch.manual_seed(0)
    config = parse_model("finalmlp", {"context1": ("tags", "plain"), "context2": ("plain",)})
    model = build("finalmlp", config, checks.LAYOUT).train()
    steps = Update(model, TrainConfig.model_validate({"update": update}))
    tables = [module for module in model.modules() if isinstance(module, Table)]
    before = [table.weight.detach().clone() for table in tables]
    for _ in range(2):
        LOSSES["bce"](model(checks.rows(64)), torch.arange(64).remainder(2).float(), None).backward()  # type: ignore[no-untyped-call]
        steps.step(1e-2)

    assert [len(table.weight) for table in tables] == [31, 4 + 7, 7]
    for table, old in zip(tables, before, strict=True):
        assert (table.weight - old).abs().max() > 1e-3
        assert table.weight[table.pad_rows_P.long()].abs().sum() == 0


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_heads": 3}, "num_heads 3 must divide the last of units1, which is 400"),
        ({"units2": (50, 25)}, "units2"),
        ({"context1": ("f0",), "feature_selection": False}, "context1 needs feature_selection"),
        ({"context2": ("f0", "f0")}, "context2 names a field twice"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_model("finalmlp", settings)


def test_unknown_context_field_is_named() -> None:
    config = parse_model("finalmlp", {"context1": ("user",)})
    with pytest.raises(InputError, match=r"no field 'user'.*\n.*choose from f0, f1, f2"):
        build("finalmlp", config, LAYOUT)
