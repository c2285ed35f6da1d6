"""How far the estimators of each axis disagree, and what their mean gains: why the tables' effects have their order."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import nn

from recap_ctr import diagnose
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed
from recap_ctr.bench.overview import PUBLISHED, cells
from recap_ctr.bench.published import title_of
from recap_ctr.bench.scaling import train_cells
from recap_ctr.data.shards import Shard
from recap_ctr.evaluation.evaluate import Array
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.stages import Recipe
from recap_ctr.storage.files import atomic_file, write_json
from recap_ctr.training.run import ARTIFACT

TRAININGS = {
    "plain": "backbone",
    "ema": "backbone + EMA",
    "kd": "backbone + KD",
    "ema-kd": "backbone + EMA + KD",
}
HEADER = [
    "estimators",
    "axis",
    "M",
    "variance",
    "V_ns",
    "predicted gain",
    "measured gain",
    "AUC of one",
    "of the mean",
]


@dataclass(frozen=True)
class Family:
    """Estimators that differ along one axis."""

    name: str
    axis: str
    count: int
    variance: float
    """Between estimators, unbiased, mean over rows: τ² (1 - ρ), whatever their number."""
    removed: float
    """V_ns: what the mean of just these removes (Eq. 5)."""
    predicted: float
    """Loss that the mean should save (Eq. 6)."""
    measured: float
    """Loss that it saves, against labels."""
    auc_alone: float
    auc_together: float


def family(
    name: str, axis: str, logits_NM: diagnose.Floats, labels_N: Array, weights_N: Array | None = None
) -> Family:
    """The figures of a diagnosis, without their intervals."""
    count = logits_NM.shape[1]
    cube = diagnose.Cube.from_array(logits_NM[:, :, None, None])
    found = diagnose.family(cube, labels_N, [(m, 0, 0) for m in range(count)], weights_N)
    figures = (
        found.variance,
        found.removed,
        found.predicted,
        found.gain,
        found.auc_alone,
        found.auc_together,
    )
    return Family(name, axis, count, *(figure.value for figure in figures))


def variance(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing; write the figures as JSON and the table as Markdown; return the latter."""
    plan = recipe.plan()
    teachers = list(recipe.teachers(plan))
    students = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="variance")
    shard = recipe.data.test if len(recipe.data.test) else recipe.data.valid
    found = [
        _runs("FCN, published protocol", list(students[PUBLISHED]), shard, recipe),
        _runs(f"{title_of(recipe.config.teacher_model)} + EMA: the teachers", teachers, shard, recipe),
        *(_runs(name, list(students[training]), shard, recipe) for training, name in TRAININGS.items()),
        *(_routes(name, list(students[training]), shard, recipe) for training, name in TRAININGS.items()),
    ]
    families = [one for one in found if one is not None]
    text = "\n".join([*_markdown(families), "", _note(families, len(shard)), ""])
    directory = reports / "variance"
    directory.mkdir(parents=True, exist_ok=True)
    write_json(
        directory / "variance.json", {"kind": "variance", "families": [asdict(one) for one in families]}
    )
    with atomic_file(directory / "variance.md") as file:
        file.write(text.encode())
    return text


def _runs(name: str, runs: Sequence[Path], shard: Shard, recipe: Recipe) -> Family | None:
    """Runs that differ in their seed, each on one route."""
    if len(runs) < 2:
        return None
    device = torch.device(recipe.device)
    models = [_model(run, device, routes=1) for run in runs]
    logits_NM = np.stack([predict(model, shard, device) for model in models], axis=1).astype(np.float64)
    return _corrected(name, "run", logits_NM, shard, recipe)


def _corrected(name: str, axis: str, logits_NM: diagnose.Floats, shard: Shard, recipe: Recipe) -> Family:
    """With the weights of rows, and for sampled negatives."""
    logits_NM, weights = undo_sampling(logits_NM, shard, recipe.config.negative_rate)
    return family(name, axis, logits_NM, shard.labels, weights)


def _routes(name: str, runs: Sequence[Path], shard: Shard, recipe: Recipe) -> Family | None:
    """The routes of each run; figures are means over runs."""
    each, device = [], torch.device(recipe.device)
    for run in runs:
        model = _model(run, device, routes=None)
        if isinstance(model, Routed) and len(model.routes) > 1:
            logits_NM = predict_routes(model.model, shard, model.routes, device)
            each.append(_corrected(name, "route", logits_NM, shard, recipe))
    if not each:
        return None
    figures = ("variance", "removed", "predicted", "measured", "auc_alone", "auc_together")
    means = {figure: mean(getattr(one, figure) for one in each) for figure in figures}
    return Family(name, "route", each[0].count, **means)


def _model(run: Path, device: torch.device, *, routes: int | None) -> nn.Module:
    artifact = load_artifact(run / ARTIFACT)
    return (artifact if routes is None or not artifact.routes else artifact.dialled(routes=routes)).model.to(
        device
    )


def _markdown(families: Sequence[Family]) -> list[str]:
    lines = [HEADER, ["---"] * len(HEADER)]
    for one in families:
        figures = [f"{one.variance:.5f}", f"{one.removed:.5f}", f"{one.predicted:.6f}", f"{one.measured:.6f}"]
        aucs = [f"{100 * one.auc_alone:.3f}", f"{100 * one.auc_together:.3f}"]
        lines.append([one.name, one.axis, str(one.count), *figures, *aucs])
    return [f"| {' | '.join(line)} |" for line in lines]


def _note(families: Sequence[Family], rows: int) -> str:
    """What the figures say about the order of effects, in words."""
    runs = {one.name: one for one in families if one.axis == "run"}
    routes = [one for one in families if one.axis == "route"]
    said = [
        f"On {rows:,} held-out rows; variance in squared logits, gains in logloss: predicted by Eq. 6, and measured."
    ]
    before, after = runs.get("backbone"), runs.get("backbone + EMA")
    if before and after and after.variance > 0:
        said.append(
            f"Averaging the trajectory leaves {after.variance / before.variance:.0%} of the backbone's variance"
            " between runs."
        )
    if before and routes:
        widest = max(routes, key=lambda one: one.variance)
        said.append(
            f"Routes vary at most {widest.variance / before.variance:.1%} as much as runs of the backbone do:"
            f" their mean can save {widest.predicted:.6f} of logloss, that of {before.count} runs"
            f" {before.predicted:.6f}."
        )
    return " ".join(said)
