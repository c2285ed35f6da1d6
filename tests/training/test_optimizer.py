"""The two updates against a plain optimiser and against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recap_ctr.axes.trajectory import MovingAverage
from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.table import Table
from recap_ctr.training.optimizer import Update

LAYOUT = Layout.of_sizes([12, 9])


class Small(nn.Module):
    """A table and a dense weight, enough to tell updates apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(LAYOUT, 3, std=0.5)
        self.dense = nn.Linear(6, 1)

    def forward(self, inputs: Inputs) -> Tensor:
        logit: Tensor = self.dense(self.table(inputs.ids_BW).flatten(1)).squeeze(1)
        return logit


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().train()


def batch(step: int, rows: int = 6) -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.stack(
        [
            torch.randint(1, 12, (rows,), generator=generator),
            torch.randint(13, 21, (rows,), generator=generator),
        ],
        1,
    )
    return Inputs(ids.int(), torch.empty(rows, 0)), torch.randint(0, 2, (rows,), generator=generator).float()


def loss_of(model: Small, step: int, factor: float = 1.0) -> Tensor:
    inputs, labels = batch(step)
    return factor * nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)


@pytest.mark.parametrize(("l2", "net_l2"), [(0.0, 0.0), (0.01, 0.0), (0.01, 0.1)])
@pytest.mark.parametrize("clip", [10.0, 0.05])
def test_exact_is_dense_adam_on_the_whole_loss(l2: float, net_l2: float, clip: float) -> None:
    ours, reference = small(), small()
    reference.eval()  # plain look-up with a dense gradient
    update = Update(ours, TrainConfig(l2=l2, net_l2=net_l2, clip=clip))
    optimiser = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for step in range(30):
        loss_of(ours, step).backward()  # type: ignore[no-untyped-call]
        update.step(1e-2)

        optimiser.zero_grad()
        total = loss_of(reference, step) + l2 / 2 * reference.table.weight.square().sum()
        total = total + net_l2 / 2 * sum(weight.square().sum() for weight in reference.dense.parameters())
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimiser.step()
    for (name, weight), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=2e-6, rtol=1e-5, msg=name)


def test_fast_equals_exact_where_every_row_is_touched() -> None:
    everything = torch.tensor([[i, 12 + min(i, 8)] for i in range(12)], dtype=torch.int32)
    models = [small(), small()]
    updates = [
        Update(model, TrainConfig(update=kind, l2=0.01))
        for model, kind in zip(models, ("exact", "fast"), strict=True)
    ]
    labels = torch.arange(12).remainder(2).float()
    for _ in range(20):
        for model, update in zip(models, updates, strict=True):
            logits = model(Inputs(everything, torch.empty(12, 0)))
            nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
            update.step(1e-2)
    torch.testing.assert_close(models[0].table.weight, models[1].table.weight)
    torch.testing.assert_close(models[0].dense.weight, models[1].dense.weight)


def test_fast_moves_only_the_rows_of_the_batch() -> None:
    model = small()
    update = Update(model, TrainConfig(update="fast", l2=0.01))
    before = model.table.weight.detach().clone()
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    update.step(1e-2)
    touched = torch.tensor(sorted(set(batch(0)[0].ids_BW.reshape(-1).tolist())))
    untouched = [row for row in range(21) if row not in touched.tolist()]

    assert torch.equal(model.table.weight[untouched], before[untouched])
    assert (model.table.weight[touched] != before[touched]).all()


def test_fast_regularises_a_returning_row_for_all_the_steps_it_missed() -> None:
    """The first moment after the return shows the gradient that Adam saw: data plus l2 * k * row."""
    model = small()
    l2, gap = 0.05, 7
    update = Update(model, TrainConfig(update="fast", l2=l2, clip=1e9))

    def step(row: int) -> None:
        ids = torch.tensor([[row, 13]], dtype=torch.int32)
        model(Inputs(ids, torch.empty(1, 0))).sum().backward()
        update.step(1e-2)

    step(1)
    for _ in range(gap - 1):
        step(2)
    row, first = model.table.weight[1].detach().clone(), update.state()["first.table"][1].clone()
    data = model.dense.weight[0, :3].detach().clone()
    step(1)

    expected = 0.9 * first + 0.1 * (data + l2 * gap * row)
    torch.testing.assert_close(update.state()["first.table"][1], expected)


def test_distinct_finds_each_row_once_and_places_every_id() -> None:
    table = Table(LAYOUT, 3)
    ids = torch.tensor([[3, 14], [3, 15], [5, 14]], dtype=torch.int32)

    rows, places = table.distinct(ids)

    assert sorted(rows.tolist()) == [3, 5, 14, 15]
    assert torch.equal(rows[places.long()], ids.reshape(-1).long())


@pytest.mark.slow
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    touches=st.lists(
        st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), min_size=1, max_size=30
    ),
    beta=st.floats(0.5, 0.9999),
    warmup=st.floats(0.5, 50.0),
)
def test_lazy_average_equals_dense_average(touches: list[list[int]], beta: float, warmup: float) -> None:
    """Over any pattern of touched rows, warm-up included, and read at any time."""
    lazy_source, dense_source = small(1), small(1)
    lazy = MovingAverage(lazy_source, beta, lazy=True, warmup=warmup)
    dense = MovingAverage(dense_source, beta, lazy=False, warmup=warmup)
    generator = torch.Generator().manual_seed(0)
    for step, rows in enumerate(touches, start=1):
        index = torch.tensor(rows)
        change = torch.randn(len(rows), 3, generator=generator)
        lazy.before_rows_change("table", index)
        with torch.no_grad():
            for model in (lazy_source, dense_source):
                model.table.weight[index] += change
                model.dense.weight += change.mean()
        lazy.after_step(step)
        dense.after_step(step)
        if step % 7 == 0:
            lazy.settle()  # reading must not disturb what follows
    settled, reference = lazy.settle().state_dict(), dense.settle().state_dict()
    for name in settled:
        torch.testing.assert_close(settled[name], reference[name], atol=1e-6, rtol=1e-5)


def test_average_starts_as_a_copy_and_follows_the_recurrence() -> None:
    model = small(2)
    average = MovingAverage(model, 0.9, lazy=False)
    expected = model.dense.weight.detach().clone()
    for step in range(1, 40):
        with torch.no_grad():
            model.dense.weight += 0.1
        average.after_step(step)
        beta = min(0.9, (1 + step) / (10 + step))
        expected = beta * expected + (1 - beta) * model.dense.weight.detach()
    got = average.settle()
    assert isinstance(got, Small)
    torch.testing.assert_close(got.dense.weight, expected)


def test_a_setting_that_came_later_leaves_no_trace_where_it_is_not_used() -> None:
    """Else all runs of before would have other names."""
    assert "net_l2" not in TrainConfig().model_dump() and "ema_warmup" not in TrainConfig().model_dump()
    assert TrainConfig(net_l2=1e-5).model_dump()["net_l2"] == 1e-5
    assert TrainConfig().model_dump().keys() == TrainConfig.model_fields.keys() - {
        "net_l2",
        "ema_warmup",
        "validations",
        "kd_from",
        "recombined",
        "window_rows",
        "precision",
    }


def test_a_dense_gradient_of_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile a table is looked up as usual, and its gradient has all rows."""
    model = Small()
    update = Update(model, TrainConfig())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    ids = torch.stack([torch.arange(1, 9), torch.arange(13, 21)], dim=1)
    model.train()(Inputs(ids, torch.empty(8, 0))).sum().backward()
    with pytest.raises(InputError, match=r"got a gradient of all its rows.*\n.*without torch\.compile"):
        update.step(1e-3)
