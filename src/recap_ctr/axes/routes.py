"""The route axis: which routes, and their mean logit (Eq. 15), with what they share computed once.

A tower's routes form a tree. A step is computed once for all routes with the same prefix, and where routes branch they
share `W h` and differ only in the thin product of their adapters.
Shapes: B batch, H heads, D width, C = D / 2, K routes, L leaves of a tower.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr import metrics
from recap_ctr.errors import InputError
from recap_ctr.losses import Output
from recap_ctr.models.fcn import halved
from recap_ctr.models.recap import Recap, RecapConfig, RecursiveTower, Route, TowerRoute
from recap_ctr.nn.embedding import Inputs
from recap_ctr.nn.norms import ScaleNorm


def random_routes(config: RecapConfig, count: int, seed: int) -> list[Route]:
    """Distinct routes drawn uniformly, the home route first; fewer where there are not as many."""
    rng = np.random.default_rng([seed, 1])
    possible = 1
    for step in range(config.depth):
        possible *= len(config.choices(step)) ** 2
    found = {config.home: None}  # a dict keeps the order of its keys
    while len(found) < min(count, possible):
        exponential, linear = (
            tuple(int(rng.choice(np.asarray(config.choices(step)))) for step in range(config.depth))
            for _ in range(2)
        )
        found[Route(exponential=exponential, linear=linear)] = None
    return list(found)


def late_routes(config: RecapConfig, count: int) -> list[Route]:
    """Routes that follow the home route and branch as late as they can: they share all but their last steps.

    Each tower gets about sqrt(count) leaves; with a mean fuse every pair of leaves is a route at no further cost.
    """
    leaves = 1
    while leaves**2 < count:
        leaves += 1
    own = _late_leaves(config, leaves)
    pairs = sorted(product(range(len(own)), repeat=2), key=lambda pair: (max(pair), pair))
    return [Route(exponential=own[i], linear=own[j]) for i, j in pairs][:count]


def _late_leaves(config: RecapConfig, count: int) -> list[TowerRoute]:
    home = config.home.linear
    found: list[TowerRoute] = []
    for branching in range(1, config.depth + 1):  # how many last steps may leave home
        start = config.depth - branching
        for tail in product(*(config.choices(step) for step in range(start, config.depth))):
            leaf = home[:start] + tail
            if leaf not in found:
                found.append(leaf)
        if len(found) >= count:
            break
    found.sort(key=lambda leaf: leaf != home)
    return found[:count]


def greedy_choice(
    labels_N: npt.NDArray[np.generic],
    logits_NK: npt.NDArray[np.float64],
    count: int,
    weights_N: npt.NDArray[np.generic] | None = None,
) -> list[int]:
    """Columns whose mean logit has the smallest logloss, taken one after the other, none of them twice."""
    chosen: list[int] = []
    total_N = np.zeros(len(logits_NK))
    while len(chosen) < min(count, logits_NK.shape[1]):
        rest = [at for at in range(logits_NK.shape[1]) if at not in chosen]
        losses = [
            metrics.logloss(labels_N, (total_N + logits_NK[:, at]) / (len(chosen) + 1), weights_N)
            for at in rest
        ]
        best = rest[int(np.argmin(losses))]
        chosen.append(best)
        total_N += logits_NK[:, best]
    return chosen


class Routed(nn.Module):
    """A backbone on fixed routes and at one depth: their mean logit (Eq. 15), and beside it each route's own."""

    def __init__(self, model: Recap, routes: Sequence[Route], depth: int | None = None) -> None:
        super().__init__()
        for route in routes:
            check_route(model.config, route)
        if depth is not None and depth not in model.config.train_depths:
            raise InputError(
                f"depth {depth} was not trained",
                fix=f"trained are {', '.join(map(str, model.config.train_depths))}",
            )
        self.model, self.routes, self.depth = model, tuple(routes), depth

    def forward(self, inputs: Inputs) -> Output:
        logits_KB = route_logits(self.model, inputs, self.routes, self.depth)
        return Output(logits_KB.mean(dim=0), {"logits_KB": logits_KB})


def check_route(config: RecapConfig, route: Route) -> None:
    for tower in (route.exponential, route.linear):
        if len(tower) != config.depth:
            raise InputError(f"a route of {len(tower)} steps, where the recursion has {config.depth}")
        for step, adapter in enumerate(tower):
            if adapter not in config.choices(step):
                raise InputError(f"a route takes adapter {adapter} at step {step + 1}, which has none such")


def route_logits(model: Recap, inputs: Inputs, routes: Sequence[Route], depth: int | None = None) -> Tensor:
    """One logit per row and route, K × B, by the route tree; equal to one pass per route."""
    if not routes:
        raise InputError("no route given")
    steps = depth or model.config.depth
    h0_BHD = halved(model.embedding(inputs), 1)
    exponential = _leaves(model.exponential, h0_BHD, [route.exponential[:steps] for route in routes])
    linear = _leaves(model.linear, h0_BHD, [route.linear[:steps] for route in routes])
    if model.gate is not None:
        pairs = [(exponential[r.exponential[:steps]], linear[r.linear[:steps]]) for r in routes]
        return torch.stack([model.fuse(*pair) for pair in pairs])
    # With a mean fuse a route's logit is the mean of two leaves: the heads run once per leaf, not once per pair.
    one = {leaf: model.exponential.logit(h) for leaf, h in exponential.items()}
    other = {leaf: model.linear.logit(h) for leaf, h in linear.items()}
    return torch.stack([(one[r.exponential[:steps]] + other[r.linear[:steps]]) / 2 for r in routes])


def mean_route_logit(
    model: Recap, inputs: Inputs, routes: Sequence[Route], depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """The K-route mean logit per row (Eq. 15), and the routes' disagreement: their standard deviation."""
    logits_KB = route_logits(model, inputs, routes, depth)
    return logits_KB.mean(dim=0), logits_KB.std(dim=0, correction=0)


def _leaves(tower: RecursiveTower, h0_BHD: Tensor, wanted: Sequence[TowerRoute]) -> dict[TowerRoute, Tensor]:
    """The tower's state at the end of each wanted route, walking their tree level by level."""
    states: dict[TowerRoute, Tensor] = {(): h0_BHD}
    for at in range(len(wanted[0])):
        prefixes = dict.fromkeys(route[: at + 1] for route in wanted)
        children: dict[TowerRoute, list[int]] = {}
        for prefix in prefixes:
            children.setdefault(prefix[:-1], []).append(prefix[-1])
        following: dict[TowerRoute, Tensor] = {}
        for parent, adapters in children.items():
            for adapter, h_BHD in zip(
                adapters, _branch(tower, states[parent], h0_BHD, at, adapters), strict=True
            ):
                following[(*parent, adapter)] = h_BHD
        states = following
    return states


def _branch(
    tower: RecursiveTower, h_BHD: Tensor, h0_BHD: Tensor, at: int, adapters: Sequence[int]
) -> list[Tensor]:
    """One step from one state with several adapters; `W h` is computed once where they only add to it."""
    if len(adapters) == 1 or tower.form == "multiplicative":
        return [_folded_step(tower, h_BHD, h0_BHD, at, adapter) for adapter in adapters]
    shared_BHC = F.linear(h_BHD, tower.cross.weight)
    return [_finish(tower, shared_BHC + tower.bank.delta(h_BHD, r), h_BHD, h0_BHD, at) for r in adapters]


def _folded_step(tower: RecursiveTower, h_BHD: Tensor, h0_BHD: Tensor, at: int, adapter: int) -> Tensor:
    """A step that no other route shares: its adapter is folded into W, which costs less than two thin products."""
    residual_CD = tower.bank.matrix(adapter)
    weight_CD = tower.cross.weight
    folded_CD = weight_CD * (1.0 + residual_CD) if tower.form == "multiplicative" else weight_CD + residual_CD
    return _finish(tower, F.linear(h_BHD, folded_CD), h_BHD, h0_BHD, at)


def _finish(tower: RecursiveTower, c_BHC: Tensor, h_BHD: Tensor, h0_BHD: Tensor, at: int) -> Tensor:
    norm = tower.norms[at] if len(tower.norms) else None
    assert norm is None or isinstance(norm, ScaleNorm)
    return tower.cross.combine(c_BHC, h_BHD, None if tower.exponential else h0_BHD, norm)
