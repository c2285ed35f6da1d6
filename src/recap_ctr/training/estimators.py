"""The estimators that one finished run holds: the whole model, its routes, its checkpoints, or all of a grid."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from recap_ctr.axes.logits import Estimator
from recap_ctr.axes.predict import to_inputs
from recap_ctr.axes.routes import Routed
from recap_ctr.axes.trajectory import restore_statistics
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import Floats
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import build
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.device import seed
from recap_ctr.nn.weights import load_tensors
from recap_ctr.training.loop import STATISTICS_ROWS, checkpoints

Per = Literal["model", "route", "checkpoint", "grid"]


def load_estimators(path: Path, name: str | None, per: Per) -> dict[Estimator, nn.Module]:
    """Return the columns of a logit table, one for the whole model, each route, each checkpoint, or each route of each.

    `path` is an artifact or the run that holds one; `name` is the run's name in the table, by default model and seed.
    """
    loaded = load_artifact(path)
    run_name = name or f"{loaded.name}-seed-{loaded.manifest['training']['seed']}"
    if per == "model":
        return {Estimator(run_name): loaded.model}
    if per in ("route", "grid") and not loaded.routes:
        raise InputError(f"{path} has no routes", fix=f"remove --per {per}, or train recap")
    if per == "route":
        assert isinstance(loaded.model, Routed)
        return _by_route(loaded.model.model, loaded.routes, run_name, None)
    columns: dict[Estimator, nn.Module] = {}
    for step, file in checkpoints(path):
        model = build(loaded.name, loaded.config, loaded.encoder.layout)
        model.load_state_dict(load_tensors(file)[0])
        if per == "grid":
            columns |= _by_route(model, loaded.routes, run_name, step)
        else:
            columns[Estimator(run_name, step=step)] = model
    if not columns:
        raise InputError(
            f"{path} holds no checkpoints", fix="name a run that was trained with [train] checkpoints = N"
        )
    return columns


def load_average(path: Path, shares_M: Floats, data: PreparedData, device: torch.device) -> nn.Module:
    """Return the model whose weights are a weighted average of a run's checkpoints, oldest first (Eq. 11).

    A model with routes takes the first of those that the run ships. Statistics of norms are measured on training rows.
    """
    loaded = load_artifact(path)
    model = build(loaded.name, loaded.config, loaded.encoder.layout).to(device)
    averaged: dict[str, Tensor] = {}
    for (_, file), share in zip(checkpoints(path), shares_M / shares_M.sum(), strict=True):
        for name, tensor in load_tensors(file)[0].items():
            averaged[name] = averaged.get(name, 0) + float(share) * tensor.double()
    model.load_state_dict(
        {name: tensor.to(model.state_dict()[name].dtype) for name, tensor in averaged.items()}
    )
    size = loaded.manifest["training"]["batch_size"]
    rows = np.random.default_rng(0).permutation(len(data.train))[:STATISTICS_ROWS]
    batches = [np.sort(rows[start : start + size]) for start in range(0, len(rows) - 1, size)]
    seed(0, device)  # A model that draws routes draws the same ones each time.
    restore_statistics(model, (to_inputs(data.train.batch(batch), device) for batch in batches))
    return Routed(model, loaded.routes[:1]) if isinstance(model, Recap) and loaded.routes else model


def _by_route(
    model: nn.Module, routes: Sequence[Route], run_name: str, step: int | None
) -> dict[Estimator, nn.Module]:
    assert isinstance(model, Recap)
    return {Estimator(run_name, step, _route_text(route)): Routed(model, [route]) for route in routes}


def _route_text(route: Route) -> str:
    """Return a route as text, such as 0.1.2.3/0.5.2.3: adapters of the exponential tower, then of the linear one."""
    return "/".join(".".join(map(str, tower)) for tower in (route.exponential, route.linear))
