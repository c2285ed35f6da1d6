"""Which routes through the model a run ships: how they are chosen, and whether more than one is worth its cost."""

import torch
from torch import nn

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import greedy_choice, late_routes, random_routes
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.models.recap import Recap, Route
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import RouteChoice, RouteGain

ROUTE_SEED = 1
GREEDY_CANDIDATES = 4  # For each route that is chosen from them.
MAX_ROUTES = 8  # K where the run chooses it, if more than one route is worth its cost.
CHANCE = 2.0  # Standard errors that a gain must exceed before it is paid for.


def choose_routes(
    model: nn.Module,
    count: int,
    choice: RouteChoice,
    data: PreparedData,
    device: torch.device,
    *,
    negative_rate: float,
) -> tuple[Route, ...]:
    """Return the routes to ship; none for a model without routes.

    Random routes are the same in all runs of a shape, so that runs can be compared route by route.
    """
    if not isinstance(model, Recap):
        return ()
    if choice == "random":
        return tuple(random_routes(model.config, count, ROUTE_SEED))
    if choice == "late":
        return tuple(late_routes(model.config, count))
    candidates = late_routes(model.config, GREEDY_CANDIDATES * count)
    logits_NK = predict_routes(model, data.valid, candidates, device)
    logits_NK, weights = undo_sampling(logits_NK, data.valid, negative_rate)
    chosen = greedy_choice(data.valid.labels, logits_NK, count, weights)
    return tuple(candidates[index] for index in chosen)


def route_gain(
    config: RunConfig,
    model: nn.Module,
    candidates: tuple[Route, ...],
    data: PreparedData,
    device: torch.device,
) -> RouteGain | None:
    """Compare the mean of the candidates with the first of them on validation; None where there is no choice."""
    if config.routes is not None or len(candidates) < 2 or not isinstance(model, Recap):
        return None
    if not metrics.are_comparable(data.valid.labels):
        return RouteGain(routes=len(candidates), auc=0.0, standard_error=0.0, shipped=1)
    logits_NK, weights = undo_sampling(
        predict_routes(model, data.valid, candidates, device), data.valid, config.negative_rate
    )
    labels = data.valid.labels
    gain = metrics.auc_difference(labels, logits_NK.mean(axis=1), logits_NK[:, 0], weights)
    is_beyond_chance = gain.difference > CHANCE * gain.standard_error
    return RouteGain(
        routes=len(candidates),
        auc=gain.difference,
        standard_error=gain.standard_error,
        shipped=len(candidates) if is_beyond_chance else 1,
    )
