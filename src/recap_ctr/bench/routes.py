"""Kinds of routes raced against each other: how far they disagree, what their mean gains, and what it costs.

All kinds have the same size, within 1.05 of FCN, and the same training; they differ in which adapters a route may take
and in which rows train them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import FoldedRoutes, Routed, late_routes, random_routes
from recap_ctr.bench.arms import Arm
from recap_ctr.bench.significance import holm, paired_difference
from recap_ctr.bench.tables import NONE, grid, p_text, spread, write_files
from recap_ctr.bench.variance import corrected_family
from recap_ctr.data.shards import held_out_shards
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.recap import Recap, RecapConfig, Route
from recap_ctr.recipe.ablation import Cell, student_run, taught_plan, train_cells
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import write_json
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.parallel import Runs
from recap_ctr.training.routes import MAX_ROUTES, ROUTE_SEED


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of routes: settings of the model, and whether routes branch late or are random."""

    name: str
    settings: Mapping[str, Any]
    late: bool = False
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training of students that have teachers."""


COLUMNS = {"binding": "columns", "sampling": "fixed"}
SIGNS = {"binding": "columns", "form": "signs", "sampling": "all", "num_adapters": 4}
KINDS = (
    Kind("tied, branching late", {}, late=True),
    Kind("tied, random", {}),
    Kind("free, random", {"binding": "free"}),
    Kind("free, four of a larger rank", {"binding": "free", "num_adapters": 4}),
    Kind("columns, one for each batch", {"binding": "columns"}),
    Kind("columns, one drawn for each row", {"binding": "columns", "sampling": "row"}),
    Kind("columns, rows of their own", COLUMNS),
    Kind("columns, rows and teachers of their own", COLUMNS, train={"kd_from": "column"}),
    Kind("four columns of signs, all in each batch", SIGNS),
)
"""The first one is the default, which the others are compared with."""
TRAININGS = {"ema": "labels alone", "ema-kd": "teachers"}
HEADER = [
    "routes",
    "learns from",
    "seeds",
    "parameters",
    "K",
    "V_ns",
    "AUC of one",
    "of the mean",
    "gain",
    "to the first",
    "p",
    "cost",
]


@dataclass(frozen=True)
class Entry:
    """The runs of one kind and training, with one value of each figure per seed."""

    kind: str
    training: str
    seeds: tuple[int, ...]
    parameters: int
    routes: int
    removed: tuple[float, ...]
    """V_ns: what the mean over routes removes (Eq. 5)."""
    alone: tuple[float, ...]
    """The AUC of one route, on average."""
    together: tuple[float, ...]
    """The AUC of the mean logit of all routes."""
    cost: float
    """Time to score with all routes, relative to one route of the first kind."""

    @property
    def gains(self) -> tuple[float, ...]:
        """Return what the mean over routes gains in AUC, by seed."""
        return tuple(together - alone for alone, together in zip(self.alone, self.together, strict=True))


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[tuple[str, str], Cell]:
    """Return the runs of each kind of routes, with and without teachers; kinds of the same settings share theirs."""
    taught = taught_plan(recipe, plan, "recap", teachers)
    wanted = {}
    for training in TRAININGS:
        base = student_run(recipe, taught if "kd" in training else plan, "recap", training, teachers)
        for kind in KINDS:
            settings = {**base.model_config.model_dump(), "lora_rank": None, **kind.settings}
            changes = kind.train if "kd" in training else {}
            config = replace(
                base,
                model_config=parse_model("recap", settings),
                train=base.train.model_copy(update=dict(changes)),
            )
            wanted[kind.name, training] = Cell(config, range(1, seeds + 1))
    return wanted


def routes(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write the figures as JSON and the table as Markdown, and return the latter."""
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    trained = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="routes")
    count = recipe.config.routes or MAX_ROUTES
    costs = _costs(recipe, {kind: next(iter(trained[kind.name, "ema"])) for kind in KINDS}, count)
    entries = [
        _entry(recipe, kind, training, trained[kind.name, training], count, costs[kind.name])
        for training in TRAININGS
        for kind in KINDS
    ]
    split = next(iter(trained[KINDS[0].name, "ema"].values())).metrics.split
    text = "\n".join([*_markdown(entries, split), "", _note(split), ""])
    write_files(reports / "routes", "routes", {"md": text})
    record = {"kind": "routes", "entries": [asdict(each) for each in entries]}
    write_json(reports / "routes" / "routes.json", record)
    return text


def _backbone(run: Path, device: torch.device) -> Recap:
    model = load_artifact(run / ARTIFACT).backbone.to(device)
    assert isinstance(model, Recap)
    return model


def _routes_of(kind: Kind, config: RecapConfig, count: int) -> list[Route]:
    return late_routes(config, count) if kind.late else random_routes(config, count, ROUTE_SEED)


def _entry(recipe: Recipe, kind: Kind, training: str, runs: Runs, count: int, cost: float) -> Entry:
    _, shard = held_out_shards(recipe.data).popitem()
    device = torch.device(recipe.device)
    families = []
    for run in runs:
        model = _backbone(run, device)
        logits_NM = predict_routes(model, shard, _routes_of(kind, model.config, count), device)
        families.append(corrected_family(kind.name, "route", logits_NM, shard, recipe))
    reports = list(runs.values())
    return Entry(
        kind=kind.name,
        training=TRAININGS[training],
        seeds=tuple(report.train.seed for report in reports),
        parameters=reports[0].parameters,
        routes=families[0].count,
        removed=tuple(each.removed for each in families),
        alone=tuple(each.auc_alone for each in families),
        together=tuple(each.auc_together for each in families),
        cost=cost,
    )


def _costs(recipe: Recipe, runs: Mapping[Kind, Path], count: int) -> dict[str, float]:
    """Return the time to score on all routes, by kind, relative to one route of the first kind."""
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    _, shard = held_out_shards(recipe.data).popitem()
    models: dict[str, list[nn.Module]] = {}
    for kind, run in runs.items():
        model = _backbone(run, device)
        if not models:
            models[""] = [FoldedRoutes(Routed(model, [model.config.home]))]
        models[kind.name] = [FoldedRoutes(Routed(model, _routes_of(kind, model.config, count)))]
    return relative_costs(models, shard, device)


def _markdown(entries: Sequence[Entry], split: str) -> list[str]:
    lines = []
    for training in dict.fromkeys(entry.training for entry in entries):
        of_training = [entry for entry in entries if entry.training == training]
        arms = [Arm(each.kind, {}, each.seeds, {"auc": each.together}, split=split) for each in of_training]
        gaps = [paired_difference(arms[0], arm, "auc") for arm in arms[1:]]
        corrected = holm({str(at): gap.p for at, gap in enumerate(gaps) if gap and gap.p is not None})
        for at, entry in enumerate(of_training):
            gap = gaps[at - 1] if at else None
            p = corrected.get(str(at - 1))
            lines.append(
                [
                    entry.kind,
                    entry.training,
                    str(len(entry.seeds)),
                    f"{entry.parameters:,}",
                    str(entry.routes),
                    f"{mean(entry.removed):.4f}",
                    spread(entry.alone, 3, 100),
                    spread(entry.together, 3, 100),
                    f"{100 * mean(entry.gains):+.3f}",
                    NONE if gap is None else f"{100 * gap.mean:+.3f}",
                    NONE if p is None else p_text(p),
                    f"{entry.cost:.2f}",
                ]
            )
    return grid(HEADER, lines)


def _note(split: str) -> str:
    return (
        f"On {split} rows, AUC in points. V_ns: variance between routes that their mean removes, in squared logits."
        " Gain: the mean's AUC minus that of one route of the same model. To the first: the mean's AUC minus that of"
        " the default routes, paired over seeds; p of a two-tailed t-test, corrected by Holm within each half of the"
        " table. Cost: time to score on all routes, relative to one route of the default, same process, interleaved."
    )
