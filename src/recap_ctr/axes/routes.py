"""The route axis: the choice of routes, and their mean logit (Eq. 15), with shared steps computed once.

A tower's routes form a tree. A step is computed once for all routes with the same prefix. Where routes branch, they
share `W h` and differ only in the thin product of their adapters.
Shapes: B batch, H heads, D width, C = D / 2, K routes.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.models.fcn import halved
from recap_ctr.models.recap import Recap, RecapConfig, RecursiveTower, Route, TowerRoute
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.lora import AdapterBank

Folded = Mapping[int, Tensor]  # adapter -> the tower's weight with that adapter added


def columns(config: RecapConfig, count: int) -> list[Route]:
    """Return the routes of the first `count` columns; fewer if there are fewer."""
    return [config.column(adapter) for adapter in range(min(count, config.num_adapters))]


def random_routes(config: RecapConfig, count: int, seed: int) -> list[Route]:
    """Return `count` distinct routes, the home route first, the others random; fewer if there are fewer."""
    if config.binding == "columns":
        return columns(config, count)
    rng = np.random.default_rng([seed, 1])
    num_possible = 1
    for step in range(config.depth):
        num_possible *= len(config.choices(step)) ** 2
    routes = {config.home: None}  # a dict, as it keeps the order of its keys
    while len(routes) < min(count, num_possible):
        exponential, linear = (
            tuple(int(rng.choice(np.asarray(config.choices(step)))) for step in range(config.depth))
            for _ in range(2)
        )
        routes[Route(exponential=exponential, linear=linear)] = None
    return list(routes)


def late_routes(config: RecapConfig, count: int) -> list[Route]:
    """Return up to `count` routes that leave the home route as late as possible, so that they share most steps.

    Each tower gets about sqrt(count) leaves; with a mean fuse, every pair of leaves is a route at no further cost.
    """
    if config.binding == "columns":
        return columns(config, count)
    num_leaves = 1
    while num_leaves**2 < count:
        num_leaves += 1
    leaves = _late_leaves(config, num_leaves)
    pairs = sorted(product(range(len(leaves)), repeat=2), key=lambda pair: (max(pair), pair))
    return [Route(exponential=leaves[i], linear=leaves[j]) for i, j in pairs][:count]


def _late_leaves(config: RecapConfig, count: int) -> list[TowerRoute]:
    """Return up to `count` routes of one tower, the home route first, then those that branch last."""
    home = config.home.linear
    leaves: list[TowerRoute] = []
    for num_branching in range(1, config.depth + 1):  # how many of the last steps may differ from home
        start = config.depth - num_branching
        for tail in product(*(config.choices(step) for step in range(start, config.depth))):
            leaf = home[:start] + tail
            if leaf not in leaves:
                leaves.append(leaf)
        if len(leaves) >= count:
            break
    leaves.sort(key=lambda leaf: leaf != home)
    return leaves[:count]


def share_between_leaves(routes: Sequence[Route]) -> float:
    """Return the share of the variance between leaves that the mean over routes removes, judging by their tree.

    A route's logit is the mean of one leaf in each tower. Two routes that share a leaf differ only in the other tower.
    A mean removes half of what the routes of a pair differ by, averaged over all pairs. Routes with leaves of their own
    give 1 - 1/K; all nine pairs of three leaves give 1 - 1/3.
    """
    differ = sum(
        (left.exponential != right.exponential) + (left.linear != right.linear)
        for left, right in product(routes, repeat=2)
    )
    return differ / (2 * len(routes) ** 2)


def greedy_choice(
    labels_N: npt.NDArray[np.generic],
    logits_NK: npt.NDArray[np.float64],
    count: int,
    weights_N: npt.NDArray[np.generic] | None = None,
) -> list[int]:
    """Return `count` distinct columns, each chosen so that the mean logit so far has the smallest logloss."""
    chosen: list[int] = []
    total_N = np.zeros(len(logits_NK))
    while len(chosen) < min(count, logits_NK.shape[1]):
        candidates = [column for column in range(logits_NK.shape[1]) if column not in chosen]
        losses = [
            metrics.logloss(labels_N, (total_N + logits_NK[:, column]) / (len(chosen) + 1), weights_N)
            for column in candidates
        ]
        best = candidates[int(np.argmin(losses))]
        chosen.append(best)
        total_N += logits_NK[:, best]
    return chosen


class Routed(nn.Module):
    """A backbone on fixed routes, read at one depth."""

    def __init__(self, model: Recap, routes: Sequence[Route], depth: int | None = None) -> None:
        super().__init__()
        for route in routes:
            check_route(model.config, route)
        if depth is not None and depth not in model.config.train_depths:
            raise InputError(
                f"depth {depth} was not trained",
                fix=f"choose from {', '.join(map(str, model.config.train_depths))}",
            )
        self.model, self.routes, self.depth = model, tuple(routes), depth

    def forward(self, inputs: Inputs) -> Output:
        """Return the routes' mean logit per row (Eq. 15), and each route's logit as `logits_KB`."""
        logits_KB = route_logits(self.model, inputs, self.routes, self.depth)
        return Output(logits_KB.mean(dim=0), {"logits_KB": logits_KB})


class FoldedRoutes(nn.Module):
    """`Routed` for final weights: it folds adapters into the weight once, where `Routed` does so at every call."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.routed = routed
        steps = routed.depth or routed.model.config.depth
        with torch.no_grad():
            for name in ("exponential", "linear"):
                tower: RecursiveTower = getattr(routed.model, name)
                tower_routes = [getattr(route, name)[:steps] for route in routed.routes]
                for adapter in _folded_adapters(tower, tower_routes):
                    self.register_buffer(f"{name}_{adapter}", fold(tower, adapter), persistent=False)

    def forward(self, inputs: Inputs) -> Output:
        """Return the routes' mean logit per row (Eq. 15), and each route's logit as `logits_KB`."""
        folded = {name: self._folded(name) for name in ("exponential", "linear")}
        logits_KB = route_logits(self.routed.model, inputs, self.routed.routes, self.routed.depth, **folded)
        return Output(logits_KB.mean(dim=0), {"logits_KB": logits_KB})

    def _folded(self, tower: str) -> Folded:
        buffers = dict(self.named_buffers(recurse=False))
        return {
            int(name.rpartition("_")[2]): weight_CD
            for name, weight_CD in buffers.items()
            if name.startswith(f"{tower}_")
        }


def check_route(config: RecapConfig, route: Route) -> None:
    """Refuse a route of the wrong length or with an adapter that its step doesn't have."""
    for tower in (route.exponential, route.linear):
        if len(tower) != config.depth:
            raise InputError(f"a route has {len(tower)} steps, but the model has depth {config.depth}")
        for step, adapter in enumerate(tower):
            if adapter not in config.choices(step):
                choices = ", ".join(map(str, config.choices(step)))
                raise InputError(
                    f"a route uses adapter {adapter} at step {step + 1}, which has only {choices}"
                )


def route_logits(
    model: Recap,
    inputs: Inputs,
    routes: Sequence[Route],
    depth: int | None = None,
    *,
    exponential: Folded | None = None,
    linear: Folded | None = None,
) -> Tensor:
    """Return one logit per row and route, K × B, by the route tree; equal to one pass per route.

    `exponential` and `linear` are the towers' weights with adapters folded in; None: they are folded here.
    """
    if not routes:
        raise InputError("no routes to score", fix="give one route at least")
    steps = depth or model.config.depth
    inputs, codes_BQ = model.apart(inputs)
    h0_BHD = halved(model.embedding(inputs), 1)
    pairs = [(route.exponential[:steps], route.linear[:steps]) for route in routes]
    exponential_states = _leaf_states(model.exponential, h0_BHD, [leaf for leaf, _ in pairs], exponential)
    linear_states = _leaf_states(model.linear, h0_BHD, [leaf for _, leaf in pairs], linear)
    beside_B = model.beside_logit(inputs, codes_BQ)
    if model.gate is not None:
        logits_KB = torch.stack([model.fuse(exponential_states[i], linear_states[j]) for i, j in pairs])
        return logits_KB if beside_B is None else logits_KB + beside_B
    # With a mean fuse, a route's logit is the mean of two leaves: the heads run once per leaf, not once per pair.
    exponential_logits = {leaf: model.exponential.logit(h) for leaf, h in exponential_states.items()}
    linear_logits = {leaf: model.linear.logit(h) for leaf, h in linear_states.items()}
    logits_KB = torch.stack([(exponential_logits[i] + linear_logits[j]) / 2 for i, j in pairs])
    return logits_KB if beside_B is None else logits_KB + beside_B


def mean_route_logit(
    model: Recap, inputs: Inputs, routes: Sequence[Route], depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mean logit of K routes per row (Eq. 15), and their disagreement: the standard deviation."""
    logits_KB = route_logits(model, inputs, routes, depth)
    return logits_KB.mean(dim=0), logits_KB.std(dim=0, correction=0)


def _children(routes: Sequence[TowerRoute], at: int) -> dict[TowerRoute, list[int]]:
    """Return level `at` of the route tree: each prefix of `at` steps, with the adapters that follow it."""
    children: dict[TowerRoute, list[int]] = {}
    for prefix in dict.fromkeys(route[: at + 1] for route in routes):
        children.setdefault(prefix[:-1], []).append(prefix[-1])
    return children


def _leaf_states(
    tower: RecursiveTower, h0_BHD: Tensor, routes: Sequence[TowerRoute], folded: Folded | None
) -> dict[TowerRoute, Tensor]:
    """Return the tower's state at the end of each route, walking their tree level by level."""
    if folded is None:
        folded = {adapter: fold(tower, adapter) for adapter in _folded_adapters(tower, routes)}
    states: dict[TowerRoute, Tensor] = {(): h0_BHD}
    for at in range(len(routes[0])):
        next_states: dict[TowerRoute, Tensor] = {}
        for parent, adapters in _children(routes, at).items():
            branches = _branch(tower, states[parent], h0_BHD, at, adapters, folded)
            for adapter, h_BHD in zip(adapters, branches, strict=True):
                next_states[(*parent, adapter)] = h_BHD
        states = next_states
    return states


def _shares_product(tower: RecursiveTower, adapters: Sequence[int]) -> bool:
    """Return whether a branch computes `W h` once for several adapters, because these only add to it."""
    return len(adapters) > 1 and tower.form == "additive"


def _folded_adapters(tower: RecursiveTower, routes: Sequence[TowerRoute]) -> list[int]:
    """Return the adapters of branches that don't share `W h`.

    Folded into the weight, such an adapter costs less than as two thin products.
    """
    branches = [adapters for at in range(len(routes[0])) for adapters in _children(routes, at).values()]
    return sorted(
        {adapter for adapters in branches if not _shares_product(tower, adapters) for adapter in adapters}
    )


def fold(tower: RecursiveTower, adapter: int) -> Tensor:
    """Return the tower's weight with an adapter added, C × D."""
    residual_CD, weight_CD = tower.bank.matrix(adapter), tower.cross.weight
    return weight_CD + residual_CD if tower.form == "additive" else weight_CD * (1.0 + residual_CD)


def _branch(
    tower: RecursiveTower,
    h_BHD: Tensor,
    h0_BHD: Tensor,
    at: int,
    adapters: Sequence[int],
    folded: Folded,
) -> list[Tensor]:
    """Return the states after step `at` from one state, one for each of `adapters`."""
    if _shares_product(tower, adapters):
        shared_BHC = F.linear(h_BHD, tower.cross.weight)
        assert isinstance(tower.bank, AdapterBank)
        bank = tower.bank
        products = (shared_BHC + bank.delta(h_BHD, adapter) for adapter in adapters)
    else:
        products = (F.linear(h_BHD, folded[adapter]) for adapter in adapters)
    anchor_BHD = None if tower.exponential else h0_BHD
    return [tower.cross.combine(c_BHC, h_BHD, anchor_BHD, tower.norm(at)) for c_BHC in products]
