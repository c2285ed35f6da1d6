"""How far the estimators of each axis disagree, and what their mean gains: why the tables' effects have their order.

Shape suffixes: N rows, M estimators.
"""

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
from recap_ctr.bench.tables import grid, write_files
from recap_ctr.data.shards import Shard, held_out_shards
from recap_ctr.evaluation.evaluate import Array
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.ablation import PLAIN_FCN, train_cells
from recap_ctr.recipe.stages import Recipe
from recap_ctr.storage.files import write_json
from recap_ctr.training.config import ARTIFACT

TRAININGS = {
    "raw": "backbone",
    "ema": "backbone + EMA",
    "raw-kd": "backbone + KD",
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
    """The variance between estimators, unbiased and averaged over rows: τ² (1 - ρ), whatever their number."""
    removed: float
    """V_ns: the variance that the mean of exactly these removes (Eq. 5)."""
    predicted: float
    """Loss that the mean should save (Eq. 6)."""
    measured: float
    """Loss that it saves, against labels."""
    auc_alone: float
    auc_together: float


def family(
    name: str, axis: str, logits_NM: diagnose.Floats, labels_N: Array, weights_N: Array | None = None
) -> Family:
    """Return the figures of a diagnosis of these estimators, without intervals."""
    count = logits_NM.shape[1]
    cube = diagnose.Cube.from_array(logits_NM[:, :, None, None])
    diagnosed = diagnose.family(cube, labels_N, [(run, 0, 0) for run in range(count)], weights_N)
    return Family(
        name=name,
        axis=axis,
        count=count,
        variance=diagnosed.variance.value,
        removed=diagnosed.removed.value,
        predicted=diagnosed.predicted.value,
        measured=diagnosed.gain.value,
        auc_alone=diagnosed.auc_alone.value,
        auc_together=diagnosed.auc_together.value,
    )


def variance(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write the figures as JSON and the table as Markdown, and return the latter."""
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    students = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="variance")
    _, shard = held_out_shards(recipe.data).popitem()
    teacher = title_of(recipe.config.teacher_model)
    candidates = [
        _family_of_runs(PLAIN_FCN, list(students[PUBLISHED]), shard, recipe),
        _family_of_runs(f"{teacher} + EMA: the teachers", teachers, shard, recipe),
        *(
            family_of(name, list(students[training]), shard, recipe)
            for family_of in (_family_of_runs, _family_of_routes)
            for training, name in TRAININGS.items()
        ),
    ]
    families = [candidate for candidate in candidates if candidate is not None]
    text = "\n".join([*_markdown(families), "", _note(families, len(shard)), ""])
    write_files(reports / "variance", "variance", {"md": text})
    record = {"kind": "variance", "families": [asdict(each) for each in families]}
    write_json(reports / "variance" / "variance.json", record)
    return text


def _family_of_runs(name: str, runs: Sequence[Path], shard: Shard, recipe: Recipe) -> Family | None:
    """Return the family of runs that differ in their seed, each on one route; None where there is only one."""
    if len(runs) < 2:
        return None
    device = torch.device(recipe.device)
    models = [model_of_run(run, device, one_route=True) for run in runs]
    logits_NM = np.stack([predict(model, shard, device) for model in models], axis=1).astype(np.float64)
    return corrected_family(name, "run", logits_NM, shard, recipe)


def _family_of_routes(name: str, runs: Sequence[Path], shard: Shard, recipe: Recipe) -> Family | None:
    """Return the family of the routes of a run, its figures averaged over runs; None where there are no routes."""
    families, device = [], torch.device(recipe.device)
    for run in runs:
        model = model_of_run(run, device, one_route=False)
        if isinstance(model, Routed) and len(model.routes) > 1:
            logits_NM = predict_routes(model.model, shard, model.routes, device)
            families.append(corrected_family(name, "route", logits_NM, shard, recipe))
    if not families:
        return None
    figures = ("variance", "removed", "predicted", "measured", "auc_alone", "auc_together")
    means = {figure: mean(getattr(each, figure) for each in families) for figure in figures}
    return Family(name, "route", families[0].count, **means)


def corrected_family(
    name: str, axis: str, logits_NM: diagnose.Floats, shard: Shard, recipe: Recipe
) -> Family:
    """Return the family with the weights of rows, and corrected for the sampling of negatives."""
    logits_NM, weights_N = undo_sampling(logits_NM, shard, recipe.config.negative_rate)
    return family(name, axis, logits_NM, shard.labels, weights_N)


def model_of_run(run: Path, device: torch.device, *, one_route: bool) -> nn.Module:
    """Return the model of a finished run, on all of its routes or on one."""
    artifact = load_artifact(run / ARTIFACT)
    if one_route and artifact.routes:
        artifact = artifact.with_setting(routes=1)
    return artifact.model.to(device)


def _markdown(families: Sequence[Family]) -> list[str]:
    return grid(
        HEADER,
        [
            [
                each.name,
                each.axis,
                str(each.count),
                f"{each.variance:.5f}",
                f"{each.removed:.5f}",
                f"{each.predicted:.6f}",
                f"{each.measured:.6f}",
                f"{100 * each.auc_alone:.3f}",
                f"{100 * each.auc_together:.3f}",
            ]
            for each in families
        ],
    )


def _note(families: Sequence[Family], rows: int) -> str:
    """Return what the figures say about the order of effects, in words."""
    runs = {each.name: each for each in families if each.axis == "run"}
    routes = [each for each in families if each.axis == "route"]
    sentences = [
        f"On {rows:,} held-out rows; variance in squared logits, gains in logloss: predicted by Eq. 6, and measured."
    ]
    before, after = runs.get("backbone"), runs.get("backbone + EMA")
    if before and after and after.variance > 0:
        sentences.append(
            f"Averaging the trajectory leaves {after.variance / before.variance:.0%} of the backbone's variance"
            " between runs."
        )
    if before and routes:
        widest = max(routes, key=lambda each: each.variance)
        sentences.append(
            f"Routes vary at most {widest.variance / before.variance:.1%} as much as runs of the backbone do:"
            f" their mean can save {widest.predicted:.6f} of logloss, that of {before.count} runs"
            f" {before.predicted:.6f}."
        )
    return " ".join(sentences)
