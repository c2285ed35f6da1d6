"""The route tree against one pass per route."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recap_ctr.axes import predict as predict_module
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import (
    FoldedRoutes,
    Routed,
    check_route,
    greedy_choice,
    late_routes,
    mean_route_logit,
    random_routes,
    route_logits,
    share_between_leaves,
)
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.lora import AdapterBank
from tests.support.small_recap import recap_config, recap_model, recap_rows


def naive(model: Recap, routes: list[Route], depth: int | None = None) -> torch.Tensor:
    return torch.stack([model(recap_rows(), route, depth).logit_B for route in routes])


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["mean", "gate"])
@pytest.mark.parametrize("form", ["additive", "multiplicative"])
@pytest.mark.parametrize("binding", ["tied", "free"])
def test_tree_equals_one_pass_per_route(form: str, fuse: str, binding: str) -> None:
    model = recap_model(recap_config(form=form, fuse=fuse, binding=binding))
    if model.gate is not None:
        torch.nn.init.normal_(model.gate.weight)
    for routes in (random_routes(model.config, 9, seed=1), late_routes(model.config, 9)):
        for depth in (None, 2):
            with torch.no_grad():
                logits_KB = route_logits(model, recap_rows(), routes, depth)
                expected_KB = naive(model, routes, depth)
            torch.testing.assert_close(logits_KB, expected_KB, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
@pytest.mark.parametrize("binding", ["tied", "free"])
@pytest.mark.parametrize(("count", "depth"), [(1, None), (1, 2), (9, None), (9, 2)])
def test_folding_once_changes_nothing(form: str, binding: str, count: int, depth: int | None) -> None:
    model = recap_model(recap_config(form=form, binding=binding))
    for routes in (random_routes(model.config, count, seed=1), late_routes(model.config, count)):
        routed = Routed(model, routes, depth)
        folded = FoldedRoutes(routed)
        with torch.no_grad():
            output, expected = folded(recap_rows()), routed(recap_rows())
        assert torch.equal(output.aux["logits_KB"], expected.aux["logits_KB"])
        assert torch.equal(output.logit_B, expected.logit_B)
        assert not any(buffer.requires_grad for buffer in folded.buffers())


def test_folded_routes_ignore_later_changes_of_the_adapters() -> None:
    model = recap_model(recap_config())
    routed = Routed(model, [model.config.home])
    with torch.no_grad():
        folded, before = FoldedRoutes(routed), routed(recap_rows()).logit_B
        for tower in (model.exponential, model.linear):
            assert isinstance(tower.bank, AdapterBank)
            tower.bank.a_ACR.add_(1.0)
        assert torch.equal(folded(recap_rows()).logit_B, before)
        assert not torch.equal(routed(recap_rows()).logit_B, before)


@pytest.mark.slow
def test_mean_and_disagreement_are_those_of_the_logits() -> None:
    model = recap_model(recap_config())
    routes = random_routes(model.config, 5, seed=0)
    with torch.no_grad():
        mean_B, spread_B = mean_route_logit(model, recap_rows(), routes)
        logits_KB = naive(model, routes)
    torch.testing.assert_close(mean_B, logits_KB.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(spread_B, logits_KB.std(0, correction=0), atol=1e-5, rtol=1e-4)
    assert (spread_B > 0).all()


def test_random_routes_are_distinct_allowed_and_reproducible() -> None:
    config = recap_config()
    routes = random_routes(config, 40, seed=3)

    assert len(set(routes)) == 40
    assert routes[0] == config.home
    assert routes == random_routes(config, 40, seed=3) != random_routes(config, 40, seed=4)
    for route in routes:
        for tower in (route.exponential, route.linear):
            assert all(adapter in config.choices(step) for step, adapter in enumerate(tower))


def test_one_adapter_per_step_gives_one_route() -> None:
    config = recap_config(num_adapters=4)
    assert random_routes(config, 10, seed=0) == [config.home] == late_routes(config, 10)


def test_late_routes_share_their_beginning() -> None:
    config = recap_config(binding="free")
    routes = late_routes(config, 64)

    assert len(set(routes)) == 64
    assert routes[0] == config.home
    assert {route.exponential[:-1] for route in routes} == {config.home.exponential[:-1]}
    assert len({route.linear for route in routes}) == 8


def test_no_routes_are_refused() -> None:
    with pytest.raises(InputError, match="no routes to score"):
        route_logits(recap_model(recap_config()), recap_rows(), [])


@pytest.mark.parametrize("fuse", ["mean", "gate"])
@pytest.mark.parametrize("depth", [None, 1, 3, 4])
def test_routed_gives_the_mean_of_its_routes_at_every_trained_depth(depth: int | None, fuse: str) -> None:
    model = recap_model(recap_config(train_depths=(1, 3, 4), depth_weights=(0.1, 0.1, 0.8), fuse=fuse))
    if model.gate is not None:
        nn.init.normal_(model.gate.weight)
    routes = random_routes(model.config, 7, seed=2)

    with torch.no_grad():
        output = Routed(model, routes, depth)(recap_rows())
        logits_KB = naive(model, routes, depth)

    torch.testing.assert_close(output.logit_B, logits_KB.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.aux["logits_KB"], logits_KB, atol=1e-5, rtol=1e-5)
    assert logits_KB.std(0).min() > 0


def test_routed_refuses_a_depth_that_was_not_trained() -> None:
    model = recap_model(recap_config())
    for depth in (0, 1, 3, 5, -1):
        with pytest.raises(InputError, match=rf"depth {depth} was not trained\n  fix: choose from 2, 4"):
            Routed(model, [model.config.home], depth)


@pytest.mark.parametrize("tower", ["exponential", "linear"])
@pytest.mark.parametrize(
    ("binding", "wrong", "message"),
    [
        ("free", (0, 1, 2), "a route has 3 steps, but the model has depth 4"),
        ("free", (0, 1, 2, 3, 4), "a route has 5 steps"),
        ("free", (), "a route has 0 steps"),
        ("free", (0, 1, 8, 3), "adapter 8 at step 3"),
        ("free", (-1, 1, 2, 3), "adapter -1 at step 1"),
        ("tied", (0, 1, 2), "a route has 3 steps"),
        ("tied", (1, 1, 2, 3), "adapter 1 at step 1, which has only 0, 4"),
        ("tied", (0, 5, 2, 4), "adapter 4 at step 4"),
        ("tied", (0, 5, 2, 11), "adapter 11 at step 4"),
    ],
)
def test_impossible_routes_are_refused(
    tower: str, binding: str, wrong: tuple[int, ...], message: str
) -> None:
    model = recap_model(recap_config(binding=binding))
    route = model.config.home.model_copy(update={tower: wrong})
    with pytest.raises(InputError, match=message):
        check_route(model.config, route)
    with pytest.raises(InputError, match=message):
        Routed(model, [model.config.home, route])


@pytest.mark.parametrize("binding", ["free", "tied"])
def test_home_random_and_late_routes_are_possible(binding: str) -> None:
    config = recap_config(binding=binding)
    for route in (config.home, *random_routes(config, 30, 5), *late_routes(config, 30)):
        check_route(config, route)


def test_fewer_late_routes_are_the_first_of_more() -> None:
    for config in (
        recap_config(),
        recap_config(binding="free"),
        recap_config(binding="free", num_adapters=2),
    ):
        most = late_routes(config, 300)
        assert len(set(most)) == len(most) == min(300, len(config.choices(0)) ** 8)
        for count in (1, 2, 3, 4, 9, 17):
            assert late_routes(config, count) == most[:count]


Floats = npt.NDArray[np.float64]


def logloss(labels_N: Floats, logits_N: Floats, weights_N: Floats) -> float:
    losses_N = np.logaddexp(0, logits_N) - labels_N * logits_N
    return float((weights_N * losses_N).sum() / weights_N.sum())


@st.composite
def choices(draw: st.DrawFn) -> tuple[Floats, Floats, Floats, int]:
    """Labels, logits of several columns, whole weights, and how many columns to choose."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns = draw(st.integers(1, 6))
    labels_N = rng.integers(0, 2, 30).astype(np.float64)
    logits_NK = rng.normal(0, 2, (30, columns)) + rng.normal(0, 2, (30, 1))
    return labels_N, logits_NK, rng.integers(1, 4, 30).astype(np.float64), draw(st.integers(1, 7))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(case=choices(), weighted=st.booleans())
def test_each_greedy_choice_is_the_best_remaining_column(
    case: tuple[Floats, Floats, Floats, int], weighted: bool
) -> None:
    labels_N, logits_NK, weights_N, count = case
    weights_N = weights_N if weighted else np.ones_like(weights_N)

    chosen = greedy_choice(labels_N, logits_NK, count, weights_N if weighted else None)

    columns = range(logits_NK.shape[1])
    assert len(chosen) == len(set(chosen)) == min(count, len(columns))
    for taken in range(1, len(chosen) + 1):
        losses = {
            at: logloss(labels_N, logits_NK[:, [*chosen[: taken - 1], at]].mean(axis=1), weights_N)
            for at in columns
            if at not in chosen[: taken - 1]
        }
        assert losses[chosen[taken - 1]] == pytest.approx(min(losses.values()), abs=1e-12)
    assert chosen == greedy_choice(labels_N, logits_NK, len(columns), weights_N if weighted else None)[:count]


@settings(deadline=None, derandomize=True, max_examples=30)
@given(case=choices())
def test_a_weight_of_n_counts_a_row_n_times(case: tuple[Floats, Floats, Floats, int]) -> None:
    labels_N, logits_NK, weights_N, count = case
    repeats = weights_N.astype(int)
    repeated = greedy_choice(labels_N.repeat(repeats), logits_NK.repeat(repeats, axis=0), count)
    assert greedy_choice(labels_N, logits_NK, count, weights_N) == repeated


def test_weights_change_the_choice() -> None:
    labels_N, logits_NK = np.array([1.0, 0.0]), np.array([[3.0, 1.0], [1.0, -3.0]])
    assert greedy_choice(labels_N, logits_NK, 1) == [1]
    assert greedy_choice(labels_N, logits_NK, 1, np.array([100.0, 1.0])) == [0]


class OneRoute(nn.Module):
    """A backbone on one route, step by step."""

    def __init__(self, model: Recap, route: Route, depth: int | None) -> None:
        super().__init__()
        self.model, self.route, self.depth = model, route, depth

    def forward(self, inputs: Inputs) -> Output:
        output: Output = self.model(inputs, self.route, self.depth)
        return output


@pytest.mark.parametrize("depth", [None, 2])
def test_predictions_by_route_are_those_of_each_route(
    depth: int | None, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_module, "EVAL_ROWS", 128)  # several batches, the last one short
    torch.manual_seed(0)
    model = Recap(recap_config(), prepared.layout)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.train()
    routes, cpu = random_routes(model.config, 5, seed=0), torch.device("cpu")

    logits_NK = predict_routes(model, prepared.valid, routes, cpu, depth)

    assert logits_NK.shape == (len(prepared.valid), 5)
    assert logits_NK.dtype == np.float64
    for at, route in enumerate(routes):
        expected: npt.NDArray[Any] = predict(OneRoute(model, route, depth), prepared.valid, cpu)
        np.testing.assert_allclose(logits_NK[:, at], expected, atol=1e-4, rtol=1e-4)
    assert logits_NK.std(axis=1).min() > 0


def test_the_mean_removes_what_the_leaves_of_its_routes_differ_by() -> None:
    config = recap_config(num_adapters=12, depth=4, train_depths=(4,), depth_weights=(1.0,))
    assert share_between_leaves(late_routes(config, 1)) == 0
    assert share_between_leaves(late_routes(config, 4)) == pytest.approx(1 / 2), "four pairs of two leaves"
    assert share_between_leaves(late_routes(config, 9)) == pytest.approx(1 - 1 / 3)
    alone = [Route(exponential=(at,) * 4, linear=(at,) * 4) for at in range(5)]
    assert share_between_leaves(alone) == pytest.approx(1 - 1 / 5)
