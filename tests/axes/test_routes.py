"""The route tree against one pass per route."""

import pytest
import torch

from recap_ctr.axes.routes import late_routes, mean_route_logit, random_routes, route_logits
from recap_ctr.errors import InputError
from recap_ctr.models.recap import Recap, Route
from tests.models.test_recap import config, model, rows


def naive(made: Recap, routes: list[Route], depth: int | None = None) -> torch.Tensor:
    return torch.stack([made(rows(), route, depth).logit_B for route in routes])


@pytest.mark.parametrize("fuse", ["mean", "gate"])
@pytest.mark.parametrize("form", ["additive", "multiplicative"])
@pytest.mark.parametrize("binding", ["tied", "free"])
def test_tree_equals_one_pass_per_route(form: str, fuse: str, binding: str) -> None:
    made = model(config(form=form, fuse=fuse, binding=binding))
    if made.gate is not None:
        torch.nn.init.normal_(made.gate.weight)
    for routes in (random_routes(made.config, 9, seed=1), late_routes(made.config, 9)):
        for depth in (None, 2):
            with torch.no_grad():
                found, expected = route_logits(made, rows(), routes, depth), naive(made, routes, depth)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_mean_and_disagreement_are_those_of_the_logits() -> None:
    made = model(config())
    routes = random_routes(made.config, 5, seed=0)
    with torch.no_grad():
        mean_B, spread_B = mean_route_logit(made, rows(), routes)
        logits_KB = naive(made, routes)
    torch.testing.assert_close(mean_B, logits_KB.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(spread_B, logits_KB.std(0, correction=0), atol=1e-5, rtol=1e-4)
    assert (spread_B > 0).all()


def test_random_routes_are_distinct_allowed_and_reproducible() -> None:
    settings = config()
    routes = random_routes(settings, 40, seed=3)

    assert len(set(routes)) == 40
    assert routes[0] == settings.home
    assert routes == random_routes(settings, 40, seed=3) != random_routes(settings, 40, seed=4)
    for route in routes:
        for tower in (route.exponential, route.linear):
            assert all(adapter in settings.choices(step) for step, adapter in enumerate(tower))


def test_there_are_only_so_many_routes() -> None:
    only = config(num_adapters=4)
    assert random_routes(only, 10, seed=0) == [only.home] == late_routes(only, 10)


def test_late_routes_share_their_beginning() -> None:
    settings = config(binding="free")
    routes = late_routes(settings, 64)

    assert len(set(routes)) == 64
    assert routes[0] == settings.home
    assert {route.exponential[:-1] for route in routes} == {settings.home.exponential[:-1]}
    assert len({route.linear for route in routes}) == 8


def test_no_route_is_an_error() -> None:
    with pytest.raises(InputError, match="no route"):
        route_logits(model(config()), rows(), [])
