"""The recursive backbone against its formulas (Eqs. 8, 9, 16)."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recap_ctr.axes.routes import fold, late_routes, random_routes
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.fcn import FCN, FCNConfig, halved
from recap_ctr.models.recap import Recap, RecapConfig, RecursiveTower, Route, default_rank, parameters_of_rank
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.lora import AdapterBank, SignBank
from recap_ctr.nn.losses import LOSSES
from tests.support.published import CRITEO, ML_1M
from tests.support.small_recap import LAYOUT, recap_config, recap_model, recap_rows


def by_hand(tower: RecursiveTower, h0: Tensor, adapters: tuple[int, ...], form: str) -> Tensor:
    """Follow the formula step by step, with W + AB^T (or W ∘ (1 + AB^T)) as a matrix."""
    h = h0
    assert isinstance(tower.bank, AdapterBank)
    for at, adapter in enumerate(adapters):
        residual = tower.bank.a_ACR[adapter] @ tower.bank.b_ADR[adapter].T
        weight = tower.cross.weight + residual if form == "additive" else tower.cross.weight * (1 + residual)
        c = tower.norms[at](F.linear(h, weight))
        assert tower.cross.layer_norm is not None
        gate = F.relu(tower.cross.layer_norm(c))
        anchor = h if tower.exponential else h0
        h = anchor * (torch.cat([c, c * gate], dim=-1) + tower.cross.bias) + h
    return tower.head(h)[:, 0, 0]  # type: ignore[no-any-return]


def test_a_limit_holds_for_each_tower_in_evaluation_alone() -> None:
    free, limited = recap_model(recap_config()), recap_model(recap_config())
    limited.load_state_dict(free.state_dict())
    rows = recap_rows(64)
    limited.limit_towers(1e-3)
    biases = [float(tower.head.bias.detach()) for tower in (free.exponential, free.linear)]
    with torch.no_grad():
        logits_B = limited.eval()(rows).logit_B
        assert not torch.allclose(free.eval()(rows).logit_B, logits_B, atol=2e-3)
        assert torch.allclose(logits_B, torch.full_like(logits_B, sum(biases) / 2), atol=1.001e-3)
        for each in (free, limited):
            each.train()
        torch.manual_seed(1)
        expected_B = free(rows).logit_B
        torch.manual_seed(1)
        assert torch.equal(limited(rows).logit_B, expected_B)


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_recursion_is_the_formula(form: str) -> None:
    model = recap_model(recap_config(form=form))
    route = Route(exponential=(0, 5, 2, 7), linear=(4, 1, 6, 3))
    h0 = halved(model.embedding(recap_rows()), 1)
    for depth in (2, 4):
        towers = [
            by_hand(model.exponential, h0, route.exponential[:depth], form),
            by_hand(model.linear, h0, route.linear[:depth], form),
        ]
        logit_B = model(recap_rows(), route, depth).logit_B
        torch.testing.assert_close(logit_B, sum(towers) / 2, atol=1e-4, rtol=1e-4)


def test_one_step_without_adapters_is_fcn_with_one_layer() -> None:
    config = recap_config(depth=1, train_depths=(1,), depth_weights=(1.0,), num_adapters=1)
    model = recap_model(config)
    with torch.no_grad():
        for tower in (model.exponential, model.linear):
            assert isinstance(tower.bank, AdapterBank)
            tower.bank.a_ACR.zero_()
    fcn = FCN(FCNConfig(dim=4, num_exponential_layers=1, num_linear_layers=1), LAYOUT).eval()
    with torch.no_grad():
        fcn.embedding.table.weight.copy_(model.embedding.table.weight)
        for tower, fcn_tower in ((model.exponential, fcn.exponential), (model.linear, fcn.linear)):
            layer = fcn_tower.layers[0]
            layer.load_state_dict(
                {
                    **tower.cross.state_dict(),
                    **{f"scale_norm.{k}": v for k, v in tower.norms[0].state_dict().items()},
                }
            )
            fcn_tower.head.load_state_dict(tower.head.state_dict())

    torch.testing.assert_close(model(recap_rows()).logit_B, fcn(recap_rows()).logit_B)


def test_rows_with_their_own_adapters_equal_rows_alone() -> None:
    model = recap_model(recap_config(sampling="row"))
    h = halved(model.embedding(recap_rows()), 1)
    adapters = torch.tensor([3, 0, 3, 7, 1, 0])

    together = model.linear.step(h, h, 1, adapters)

    for i, adapter in enumerate(adapters.tolist()):
        alone = model.linear.step(h[i : i + 1], h[i : i + 1], 1, adapter)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_loss_weighs_depths() -> None:
    model = recap_model(recap_config()).train()
    torch.manual_seed(9)
    output = model(recap_rows())
    labels = torch.tensor([0.0, 1, 1, 0, 1, 0])

    expected = sum(
        alpha * F.binary_cross_entropy_with_logits(logit, labels)
        for alpha, logit in zip((0.1, 0.9), output.aux["logits_KB"], strict=True)
    )

    torch.testing.assert_close(LOSSES["depth-bce"](output, labels, None), expected)
    assert torch.equal(output.logit_B, output.aux["logits_KB"][-1])


def test_tied_adapters_belong_to_one_step_and_free_ones_to_all() -> None:
    assert [list(recap_config(num_adapters=8).choices(step)) for step in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert list(recap_config(binding="free").choices(3)) == list(range(8))
    assert recap_config().home == Route(exponential=(0, 1, 2, 3), linear=(0, 1, 2, 3))


@pytest.mark.parametrize("sampling", ["batch", "row"])
def test_training_samples_every_allowed_adapter_and_no_other(sampling: str) -> None:
    model = recap_model(recap_config(sampling=sampling)).train()
    h0 = halved(model.embedding(recap_rows()), 1)
    drawn: dict[int, set[int]] = {at: set() for at in range(4)}
    for _ in range(60):
        for at in range(4):
            adapter = model.draw_adapter(at, h0)
            drawn[at] |= {adapter} if isinstance(adapter, int) else set(adapter.tolist())
    assert drawn == {at: {at, at + 4} for at in range(4)}


def test_parameters_by_formula() -> None:
    criteo = parse_model("recap", {"lora_rank": 96})
    assert isinstance(criteo, RecapConfig)
    assert count_parameters("recap", criteo, CRITEO) == parameters_of_rank(criteo, CRITEO, 96) == 16_402_786
    for config in (
        recap_config(),
        recap_config(fuse="gate", lora_rank=7),
        recap_config(layer_norm=False, scale_norm=False),
    ):
        assert config.lora_rank is not None
        expected = parameters_of_rank(config, LAYOUT, config.lora_rank)
        assert count_parameters("recap", config, LAYOUT) == expected


def test_default_rank_is_the_largest_within_the_size_of_fcn() -> None:
    config = RecapConfig()
    fcn = count_parameters("fcn", FCNConfig(), ML_1M)
    rank = default_rank(config, ML_1M)

    assert count_parameters("recap", config, ML_1M) <= 1.05 * fcn
    assert parameters_of_rank(config, ML_1M, rank + 4) > 1.05 * fcn


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"train_depths": (2, 3)}, "train_depths"),
        ({"train_depths": (4, 2)}, "train_depths"),
        ({"depth_weights": (1.0,)}, "depth_weights"),
        ({"depth_weights": (0.5, 0.6)}, "sum to 1"),
        ({"num_adapters": 3}, "tied adapters"),
        ({"form": "multiplicative", "sampling": "row"}, "multiplicative"),
        ({"binding": "free", "sampling": "fixed"}, "it needs binding 'columns'"),
        ({"sampling": "all"}, "it needs binding 'columns'"),
        ({"form": "signs"}, "form 'signs' needs binding 'columns'"),
        ({"binding": "columns", "sample_from": 2}, "sample_from needs binding 'tied'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        recap_config(**settings)


def test_before_sampling_all_rows_take_the_home_route_and_its_adapters_are_copied() -> None:
    model = recap_model(recap_config(sample_from=2, exponential_dropout=0.0, linear_dropout=0.0)).train()
    assert model.config.choices(1) == range(1, 8, 4)
    model.epoch = 1
    model.begin_epoch()
    for tower in (model.exponential, model.linear):
        for step in range(4):
            torch.testing.assert_close(tower.bank.matrix(step + 4), tower.bank.matrix(step))
    model.exponential.bank.a_ACR.grad = None
    model(recap_rows()).logit_B.sum().backward()
    grad = model.exponential.bank.a_ACR.grad
    assert grad is not None
    assert grad[:4].abs().sum(dim=(1, 2)).min() > 0
    assert grad[4:].abs().max() == 0

    model.epoch = 3
    before = model.exponential.bank.a_ACR.detach().clone()
    with torch.no_grad():
        model.exponential.bank.a_ACR[0] += 1.0
    model.begin_epoch()  # sampling has begun, so nothing is copied any more
    torch.testing.assert_close(model.exponential.bank.a_ACR[4], before[4])
    drawn = {model.choose_adapter(None, "linear", 0, torch.empty(3, 1, 2)) for _ in range(40)}
    assert drawn == {0, 4}


def test_late_sampling_needs_tied_adapters() -> None:
    with pytest.raises(InputError, match="sample_from needs binding 'tied'"):
        recap_config(binding="free", sample_from=3)


COLUMNS = {"binding": "columns", "num_adapters": 4}
UNDROPPED = {"exponential_dropout": 0.0, "linear_dropout": 0.0}


def test_a_training_row_takes_its_own_column_in_every_batch() -> None:
    config = recap_config(**COLUMNS, **UNDROPPED, sampling="fixed")
    model = recap_model(config).train()
    inputs = recap_rows()
    (column_B,) = model._draw_columns(inputs)
    assert isinstance(column_B, Tensor) and len(set(column_B.tolist())) > 1, "rows are divided among columns"
    some = torch.tensor([0, 2, 3])
    (part,) = model._draw_columns(Inputs(inputs.ids_BW[some], inputs.values_BN[some]))
    assert isinstance(part, Tensor) and torch.equal(part, column_B[some])
    for (
        module
    ) in model.modules():  # Let norms use their own statistics, so that rows don't depend on each other.
        if module is not model:
            module.eval()
    logits_B = model(inputs).logit_B
    for column in range(4):
        alone_B = model(inputs, config.column(column)).logit_B
        torch.testing.assert_close(logits_B[column_B == column], alone_B[column_B == column])


def test_routes_of_columns_are_the_columns() -> None:
    config = recap_config(**COLUMNS)
    expected = [config.column(adapter) for adapter in range(4)]
    assert late_routes(config, 8) == random_routes(config, 8, seed=1) == expected
    assert late_routes(config, 2) == expected[:2] and config.home == expected[0]


@pytest.mark.parametrize(("sampling", "kind"), [("batch", int), ("row", Tensor)])
def test_columns_can_be_drawn_for_a_batch_or_for_a_row(sampling: str, kind: type) -> None:
    model = recap_model(recap_config(**COLUMNS, sampling=sampling)).train()
    (drawn,) = model._draw_columns(recap_rows())
    assert isinstance(drawn, kind)
    assert model.eval()._draw_columns(recap_rows()) == (None,)


@pytest.mark.parametrize("form", ["additive", "signs"])
def test_with_all_columns_in_each_batch_the_loss_is_the_mean_of_theirs(form: str) -> None:
    config = recap_config(**COLUMNS, **UNDROPPED, sampling="all", form=form)
    model = recap_model(config).train()
    inputs, labels = recap_rows(), torch.tensor([0.0, 1, 1, 0, 1, 0])
    output = model(inputs)
    alone = [model(inputs, config.column(column)) for column in range(4)]
    losses = [LOSSES["depth-bce"](each, labels, None) for each in alone]
    torch.testing.assert_close(LOSSES["depth-bce"](output, labels, None), torch.stack(losses).mean())
    expected_B = torch.stack([each.logit_B for each in alone]).mean(0)
    torch.testing.assert_close(output.logit_B, expected_B)


def test_signs_scale_rows_and_columns_of_the_weight() -> None:
    config = recap_config(**COLUMNS, form="signs")
    torch.manual_seed(0)
    tower = Recap(config, LAYOUT).linear
    assert isinstance(tower.bank, SignBank)
    assert set(tower.bank.rows_AC.flatten().tolist()) == {-1.0, 1.0}
    weight_CD = fold(tower, 2)
    expected_CD = tower.bank.rows_AC[2][:, None] * tower.cross.weight * tower.bank.columns_AD[2][None, :]
    torch.testing.assert_close(weight_CD, expected_CD)
    signs = parse_model("recap", {"form": "signs", "binding": "columns"})
    assert isinstance(signs, RecapConfig) and default_rank(signs, ML_1M) == 1
    assert count_parameters("recap", signs, ML_1M) == parameters_of_rank(signs, ML_1M, 1)


def test_a_training_step_draws_in_the_order_of_all_runs_before() -> None:
    """Golden: with another order of draws, the seeds of published runs would give other models."""
    model = recap_model(recap_config(exponential_dropout=0.3, linear_dropout=0.3)).train()
    torch.manual_seed(7)
    golden = [-19.50554, 4.27020, -48.81171, -12.51222, 13.01433, 2.90910]
    assert model(recap_rows()).logit_B.tolist() == pytest.approx(golden, rel=1e-4)
