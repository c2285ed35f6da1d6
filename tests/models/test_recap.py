"""The recursive backbone against its formulas (Eqs. 8, 9, 16)."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.fcn import FCN, FCNConfig, halved
from recap_ctr.models.recap import Recap, RecapConfig, RecursiveTower, Route, default_rank, parameters_of_rank
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.losses import LOSSES

LAYOUT = Layout.of_sizes([5, 4, 6])
CRITEO = Layout.of_sizes([3] * 38 + [910_747 - 38 * 3])
ML_1M = Layout.of_sizes([3] * 6 + [9_751 - 6 * 3])


def config(**settings: object) -> RecapConfig:
    found = parse_model("recap", {"dim": 4, "lora_rank": 3, "num_adapters": 8, **settings})
    assert isinstance(found, RecapConfig)
    return found


def model(settings: RecapConfig, seed: int = 0) -> Recap:
    """A model whose every part matters: large embeddings and adapters, statistics off their start."""
    torch.manual_seed(seed)
    made = Recap(settings, LAYOUT)
    with torch.no_grad():
        made.embedding.table.weight.normal_()
        for tower in (made.exponential, made.linear):
            tower.bank.a_ACR.normal_(std=0.5)
    made.train()
    for _ in range(3):
        made(rows())
    return made.eval()


def rows(count: int = 6) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    columns = [
        torch.randint(f.offset + 1, f.offset + f.size, (count,), generator=generator) for f in LAYOUT.fields
    ]
    return Inputs(torch.stack(columns, 1).int(), torch.empty(count, 0))


def by_hand(tower: RecursiveTower, h0: Tensor, adapters: tuple[int, ...], form: str) -> Tensor:
    """The recursion as written: materialise W + AB^T (or W ∘ (1 + AB^T)), one step after the other."""
    h = h0
    for at, adapter in enumerate(adapters):
        residual = tower.bank.a_ACR[adapter] @ tower.bank.b_ADR[adapter].T
        weight = tower.cross.weight + residual if form == "additive" else tower.cross.weight * (1 + residual)
        c = tower.norms[at](F.linear(h, weight))
        assert tower.cross.layer_norm is not None
        gate = F.relu(tower.cross.layer_norm(c))
        anchor = h if tower.exponential else h0
        h = anchor * (torch.cat([c, c * gate], dim=-1) + tower.cross.bias) + h
    return tower.head(h)[:, 0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_recursion_is_the_formula(form: str) -> None:
    made = model(config(form=form))
    route = Route(exponential=(0, 5, 2, 7), linear=(4, 1, 6, 3))
    h0 = halved(made.embedding(rows()), 1)
    for depth in (2, 4):
        towers = [
            by_hand(made.exponential, h0, route.exponential[:depth], form),
            by_hand(made.linear, h0, route.linear[:depth], form),
        ]
        found = made(rows(), route, depth).logit_B
        torch.testing.assert_close(found, sum(towers) / 2, atol=1e-4, rtol=1e-4)


def test_adapters_of_rank_zero_effect_leave_fcn_with_shared_weights() -> None:
    """Without adapters and with one step, RECAP is FCN with one layer a tower."""
    settings = config(depth=1, train_depths=(1,), depth_weights=(1.0,), num_adapters=1)
    made = model(settings)
    with torch.no_grad():
        made.exponential.bank.a_ACR.zero_()
        made.linear.bank.a_ACR.zero_()
    fcn = FCN(FCNConfig(dim=4, num_exponential_layers=1, num_linear_layers=1), LAYOUT).eval()
    with torch.no_grad():
        fcn.embedding.table.weight.copy_(made.embedding.table.weight)
        for mine, other in ((made.exponential, fcn.exponential), (made.linear, fcn.linear)):
            layer = other.layers[0]
            layer.load_state_dict(
                {
                    **mine.cross.state_dict(),
                    **{f"scale_norm.{k}": v for k, v in mine.norms[0].state_dict().items()},
                }
            )
            other.head.load_state_dict(mine.head.state_dict())

    torch.testing.assert_close(made(rows()).logit_B, fcn(rows()).logit_B)


def test_rows_with_their_own_adapters_equal_rows_alone() -> None:
    made = model(config(sampling="row"))
    h = halved(made.embedding(rows()), 1)
    adapters = torch.tensor([3, 0, 3, 7, 1, 0])

    together = made.linear.step(h, h, 1, adapters)

    for i, adapter in enumerate(adapters.tolist()):
        alone = made.linear.step(h[i : i + 1], h[i : i + 1], 1, adapter)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_loss_weighs_depths() -> None:
    made = model(config()).train()
    torch.manual_seed(9)
    output = made(rows())
    labels = torch.tensor([0.0, 1, 1, 0, 1, 0])

    expected = sum(
        alpha * F.binary_cross_entropy_with_logits(logit, labels)
        for alpha, logit in zip((0.1, 0.9), output.aux["logits_KB"], strict=True)
    )

    torch.testing.assert_close(LOSSES["depth-bce"](output, labels, None), expected)
    assert torch.equal(output.logit_B, output.aux["logits_KB"][-1])


def test_tied_adapters_belong_to_their_step_and_free_ones_to_none() -> None:
    assert [list(config(num_adapters=8).choices(step)) for step in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert list(config(binding="free").choices(3)) == list(range(8))
    assert config().home == Route(exponential=(0, 1, 2, 3), linear=(0, 1, 2, 3))


@pytest.mark.parametrize("sampling", ["batch", "row"])
def test_training_samples_every_allowed_adapter_and_no_other(sampling: str) -> None:
    made = model(config(sampling=sampling)).train()
    h0 = halved(made.embedding(rows()), 1)
    seen = {at: set() for at in range(4)}  # type: dict[int, set[int]]
    for _ in range(60):
        for at in range(4):
            drawn = made._draw(at, h0)
            seen[at] |= {drawn} if isinstance(drawn, int) else set(drawn.tolist())
    assert seen == {at: {at, at + 4} for at in range(4)}


def test_parameters_by_formula() -> None:
    criteo = parse_model("recap", {"lora_rank": 96})
    assert isinstance(criteo, RecapConfig)
    assert count_parameters("recap", criteo, CRITEO) == parameters_of_rank(criteo, CRITEO, 96) == 16_402_786
    for settings in (config(), config(fuse="gate", lora_rank=7), config(layer_norm=False, scale_norm=False)):
        assert settings.lora_rank is not None
        expected = parameters_of_rank(settings, LAYOUT, settings.lora_rank)
        assert count_parameters("recap", settings, LAYOUT) == expected


def test_default_rank_is_the_largest_within_the_size_of_fcn() -> None:
    settings = RecapConfig()
    fcn = count_parameters("fcn", FCNConfig(), ML_1M)
    rank = default_rank(settings, ML_1M)

    assert count_parameters("recap", settings, ML_1M) <= 1.05 * fcn
    assert parameters_of_rank(settings, ML_1M, rank + 4) > 1.05 * fcn


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"train_depths": (2, 3)}, "train_depths"),
        ({"train_depths": (4, 2)}, "train_depths"),
        ({"depth_weights": (1.0,)}, "depth_weights"),
        ({"depth_weights": (0.5, 0.6)}, "sum to 1"),
        ({"num_adapters": 3}, "tied adapters"),
        ({"form": "multiplicative", "sampling": "row"}, "multiplicative"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        config(**settings)


def test_before_sampling_begins_all_rows_take_the_home_route_and_variants_follow_it() -> None:
    made = model(config(sample_from=2, exponential_dropout=0.0, linear_dropout=0.0)).train()
    assert made.config.choices(1) == range(1, 8, 4)
    made.epoch = 1
    made.begin_epoch()
    for tower in (made.exponential, made.linear):
        for step in range(4):
            torch.testing.assert_close(tower.bank.matrix(step + 4), tower.bank.matrix(step))
    made.exponential.bank.a_ACR.grad = None
    made(rows()).logit_B.sum().backward()
    grad = made.exponential.bank.a_ACR.grad
    assert grad is not None
    assert grad[:4].abs().sum(dim=(1, 2)).min() > 0
    assert grad[4:].abs().max() == 0

    made.epoch = 3
    before = made.exponential.bank.a_ACR.detach().clone()
    with torch.no_grad():
        made.exponential.bank.a_ACR[0] += 1.0
    made.begin_epoch()  # too late to follow: the variants are on their own
    torch.testing.assert_close(made.exponential.bank.a_ACR[4], before[4])
    drawn = {made._adapter(None, "linear", 0, torch.empty(3, 1, 2)) for _ in range(40)}
    assert drawn == {0, 4}


def test_sampling_late_needs_a_home() -> None:
    with pytest.raises(InputError, match="sample_from goes with tied"):
        config(binding="free", sample_from=3)
