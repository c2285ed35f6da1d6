"""The route axis: which routes, and their mean logit (Eq. 15), with what they share computed once.

A tower's routes form a tree. A step is computed once for all routes with the same prefix, and where routes branch they
share `W h` and differ only in the thin product of their adapters.
Shapes: B batch, H heads, D width, C = D / 2, K routes, L leaves of a tower.
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
from recap_ctr.nn.norms import ScaleNorm

Folded = Mapping[int, Tensor]  # an adapter's number -> W with that adapter in it


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


class FoldedRoutes(nn.Module):
    """`Routed` for weights that no longer change: what `Routed` folds at every call is folded here once."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.routed = routed
        steps = routed.depth or routed.model.config.depth
        with torch.no_grad():
            for name in ("exponential", "linear"):
                tower: RecursiveTower = getattr(routed.model, name)
                wanted = [getattr(route, name)[:steps] for route in routed.routes]
                for adapter in _folded_adapters(tower, wanted):
                    self.register_buffer(f"{name}_{adapter}", fold(tower, adapter), persistent=False)

    def forward(self, inputs: Inputs) -> Output:
        folded = {name: self._folded(name) for name in ("exponential", "linear")}
        logits_KB = route_logits(self.routed.model, inputs, self.routed.routes, self.routed.depth, **folded)
        return Output(logits_KB.mean(dim=0), {"logits_KB": logits_KB})

    def _folded(self, tower: str) -> Folded:
        own = dict(self.named_buffers(recurse=False))
        return {int(name.rpartition("_")[2]): w for name, w in own.items() if name.startswith(f"{tower}_")}


def check_route(config: RecapConfig, route: Route) -> None:
    for tower in (route.exponential, route.linear):
        if len(tower) != config.depth:
            raise InputError(f"a route of {len(tower)} steps, where the recursion has {config.depth}")
        for step, adapter in enumerate(tower):
            if adapter not in config.choices(step):
                raise InputError(f"a route takes adapter {adapter} at step {step + 1}, which has none such")


def route_logits(
    model: Recap,
    inputs: Inputs,
    routes: Sequence[Route],
    depth: int | None = None,
    *,
    exponential: Folded | None = None,
    linear: Folded | None = None,
) -> Tensor:
    """One logit per row and route, K × B, by the route tree; equal to one pass per route.

    `exponential` and `linear` are adapters folded beforehand; without them they are folded here.
    """
    if not routes:
        raise InputError("no route given")
    steps = depth or model.config.depth
    h0_BHD = halved(model.embedding(inputs), 1)
    ends = [route.exponential[:steps] for route in routes], [route.linear[:steps] for route in routes]
    one_by_end = _leaves(model.exponential, h0_BHD, ends[0], exponential)
    other_by_end = _leaves(model.linear, h0_BHD, ends[1], linear)
    if model.gate is not None:
        pairs = [(one_by_end[end], other_by_end[other]) for end, other in zip(*ends, strict=True)]
        return torch.stack([model.fuse(*pair) for pair in pairs])
    # With a mean fuse a route's logit is the mean of two leaves: the heads run once per leaf, not once per pair.
    one = {leaf: model.exponential.logit(h) for leaf, h in one_by_end.items()}
    other = {leaf: model.linear.logit(h) for leaf, h in other_by_end.items()}
    return torch.stack([(one[i] + other[j]) / 2 for i, j in zip(*ends, strict=True)])


def mean_route_logit(
    model: Recap, inputs: Inputs, routes: Sequence[Route], depth: int | None = None
) -> tuple[Tensor, Tensor]:
    """The K-route mean logit per row (Eq. 15), and the routes' disagreement: their standard deviation."""
    logits_KB = route_logits(model, inputs, routes, depth)
    return logits_KB.mean(dim=0), logits_KB.std(dim=0, correction=0)


def _children(wanted: Sequence[TowerRoute], at: int) -> dict[TowerRoute, list[int]]:
    """Level `at` of the tree: the beginning of a route -> the adapters that follow it."""
    found: dict[TowerRoute, list[int]] = {}
    for prefix in dict.fromkeys(route[: at + 1] for route in wanted):
        found.setdefault(prefix[:-1], []).append(prefix[-1])
    return found


def _leaves(
    tower: RecursiveTower, h0_BHD: Tensor, wanted: Sequence[TowerRoute], folded: Folded | None
) -> dict[TowerRoute, Tensor]:
    """The tower's state at the end of each wanted route, walking their tree level by level."""
    if folded is None:
        folded = {adapter: fold(tower, adapter) for adapter in _folded_adapters(tower, wanted)}
    states: dict[TowerRoute, Tensor] = {(): h0_BHD}
    for at in range(len(wanted[0])):
        following: dict[TowerRoute, Tensor] = {}
        for parent, adapters in _children(wanted, at).items():
            branched = _branch(tower, states[parent], h0_BHD, at, adapters, folded)
            for adapter, h_BHD in zip(adapters, branched, strict=True):
                following[(*parent, adapter)] = h_BHD
        states = following
    return states


def _shares(tower: RecursiveTower, adapters: Sequence[int]) -> bool:
    """Whether a branch computes `W h` once: several adapters, which only add to it."""
    return len(adapters) > 1 and tower.form == "additive"


def _folded_adapters(tower: RecursiveTower, wanted: Sequence[TowerRoute]) -> list[int]:
    """The adapters of steps that no other route shares: folded into W they cost less than as two thin products."""
    branches = [adapters for at in range(len(wanted[0])) for adapters in _children(wanted, at).values()]
    return sorted({adapter for adapters in branches if not _shares(tower, adapters) for adapter in adapters})


def fold(tower: RecursiveTower, adapter: int) -> Tensor:
    """The tower's weight with an adapter in it, C × D."""
    residual_CD, weight_CD = tower.bank.matrix(adapter), tower.cross.weight
    return weight_CD * (1.0 + residual_CD) if tower.form == "multiplicative" else weight_CD + residual_CD


def _branch(
    tower: RecursiveTower,
    h_BHD: Tensor,
    h0_BHD: Tensor,
    at: int,
    adapters: Sequence[int],
    folded: Folded,
) -> list[Tensor]:
    """One step from one state with each of some adapters."""
    if not _shares(tower, adapters):
        return [_finish(tower, F.linear(h_BHD, folded[r]), h_BHD, h0_BHD, at) for r in adapters]
    shared_BHC = F.linear(h_BHD, tower.cross.weight)
    return [_finish(tower, shared_BHC + tower.bank.delta(h_BHD, r), h_BHD, h0_BHD, at) for r in adapters]


def _finish(tower: RecursiveTower, c_BHC: Tensor, h_BHD: Tensor, h0_BHD: Tensor, at: int) -> Tensor:
    norm = tower.norms[at] if len(tower.norms) else None
    assert norm is None or isinstance(norm, ScaleNorm)
    return tower.cross.combine(c_BHC, h_BHD, None if tower.exponential else h0_BHD, norm)
