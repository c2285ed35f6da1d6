"""Compare ways to choose routes: how far the routes disagree, what their mean gains, and what it costs.

Each way is a kind of routes. All kinds are trained alike, with ranks that make no model larger than that of the first
kind, which has the size of FCN. Kinds differ in which adapters a route may take, and in which rows train these.
Validation rows choose among the kinds; figures on test rows are shown beside, and decide nothing. Shape suffixes: N
rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import FoldedRoutes, Routed, late_routes, random_routes
from recap_ctr.bench.margin import Floats, Margin, error_of_lead, pairs_won
from recap_ctr.bench.significance import holm
from recap_ctr.bench.tables import NONE, grid, p_text, spread, write_files
from recap_ctr.bench.variance import Family, corrected_family
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import Shard, held_out_shards
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.recap import (
    SIZE_LIMIT,
    Recap,
    RecapConfig,
    Route,
    default_rank,
    parameters_of_fcn,
    parameters_of_rank,
)
from recap_ctr.recipe.ablation import Cell, student_run, taught_plan, train_cells
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import write_json
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import RunReport
from recap_ctr.training.routes import MAX_ROUTES, ROUTE_SEED


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of routes: settings of the model, and whether routes branch late or are random."""

    name: str
    settings: Mapping[str, Any]
    late: bool = False
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training of students that have teachers."""


TIED, FREE, COLUMNS = (
    {"binding": binding, "sampling": "batch", "form": "additive"} for binding in ("tied", "free", "columns")
)
FIXED = {**COLUMNS, "sampling": "fixed"}
SIGNS = {"binding": "columns", "form": "signs", "sampling": "all", "num_adapters": 4}
KINDS = (
    Kind("tied, branching late", TIED, late=True),
    Kind("tied, random", TIED),
    Kind("free, random", FREE),
    Kind("free, four of a larger rank", {**FREE, "num_adapters": 4}),
    Kind("columns, one for each batch", COLUMNS),
    Kind("columns, one drawn for each row", {**COLUMNS, "sampling": "row"}),
    Kind("columns, rows of their own", FIXED),
    Kind("columns, rows and teachers of their own", FIXED, train={"kd_from": "column"}),
    Kind("four columns of signs, all in each batch", SIGNS),
)
"""The first one is the default, which the others are compared with."""
TRAININGS = {"ema": "labels alone", "ema-kd": "teachers"}
HEADER = [
    "routes",
    "learns from",
    "seeds",
    "parameters",
    "of FCN's size",
    "K",
    "V_ns",
    "AUC of one",
    "of the mean",
    "gain",
    "to the first",
    "p",
    "test AUC of the mean",
    "test gain",
    "cost",
    "accepted",
]
LEVEL = 0.05


@dataclass(frozen=True)
class Figures:
    """The figures of the routes of some runs on one split, one for each seed."""

    removed: tuple[float, ...]
    """V_ns: what the mean over routes removes (Eq. 5)."""
    alone: tuple[float, ...]
    """The AUC of one route, on average."""
    together: tuple[float, ...]
    """The AUC of the mean logit of all routes."""

    @property
    def gain(self) -> float:
        """Return what the mean over routes gains in AUC, on average over seeds."""
        return mean(self.together) - mean(self.alone)


@dataclass(frozen=True)
class Entry:
    """The runs of one kind and training."""

    kind: str
    training: str
    seeds: tuple[int, ...]
    parameters: int
    size: float
    """Parameters, relative to FCN with its published layers."""
    routes: int
    valid: Figures
    test: Figures | None
    """None where there are no test rows."""
    ahead: Margin | None
    """How far the mean of routes is ahead of that of the first kind on validation; None for the first."""
    cost: float
    """Time to score with all routes, relative to one route of the first kind."""


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[tuple[str, str], Cell]:
    """Return the runs of each kind of routes, with and without teachers; kinds of the same settings share theirs."""
    taught = taught_plan(recipe, plan, "recap", teachers)
    wanted = {}
    for training in TRAININGS:
        base = student_run(recipe, taught if "kd" in training else plan, "recap", training, teachers)
        first, *_ = configs = [
            RecapConfig(**{**base.model_config.model_dump(), "lora_rank": None, **kind.settings})
            for kind in KINDS
        ]
        for kind, model_config in zip(KINDS, configs, strict=True):
            changes = kind.train if "kd" in training else {}
            config = replace(
                base,
                model_config=of_equal_size(model_config, first, recipe.data.layout),
                train=base.train.model_copy(update=dict(changes)),
            )
            wanted[kind.name, training] = Cell(config, range(1, seeds + 1))
    return wanted


def of_equal_size(config: RecapConfig, first: RecapConfig, layout: Layout) -> RecapConfig:
    """Return the config with the largest rank that makes the model no larger than the first kind's. A rank that already
    follows from the model's size is kept, so that tables share their runs.
    """
    default = default_rank(config, layout)
    if config.form == "signs":
        return config
    limit = parameters_of_rank(first, layout, default_rank(first, layout))
    ranks = range(1, layout.num_fields * config.dim // 2 + 1)
    rank = max((rank for rank in ranks if parameters_of_rank(config, layout, rank) <= limit), default=1)
    return config if rank == default else config.model_copy(update={"lora_rank": rank})


def routes(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write the figures as JSON and the table as Markdown, and return the latter."""
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    trained = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="routes")
    count = recipe.config.routes or MAX_ROUTES
    costs = _costs(recipe, {kind: next(iter(trained[kind.name, "ema"])) for kind in KINDS}, count)
    entries = []
    for training in TRAININGS:
        first: _Measured | None = None
        for kind in KINDS:
            runs = trained[kind.name, training]
            measured = _measure(recipe, kind, runs, count)
            entries.append(
                _entry(recipe, kind, training, list(runs.values()), measured, first, costs[kind.name])
            )
            first = first or measured
    text = table_text(entries)
    write_files(reports / "routes", "routes", {"md": text})
    record = {
        "kind": "routes",
        "entries": [asdict(each) for each in entries],
        "accepted": {training: accepted(of) for training, of in _by_training(entries).items()},
    }
    write_json(reports / "routes" / "routes.json", record)
    return text


def _backbone(run: Path, device: torch.device) -> Recap:
    model = load_artifact(run / ARTIFACT).backbone.to(device)
    assert isinstance(model, Recap)
    return model


def _routes_of(kind: Kind, config: RecapConfig, count: int) -> list[Route]:
    return late_routes(config, count) if kind.late else random_routes(config, count, ROUTE_SEED)


@dataclass(frozen=True, eq=False)
class _Measured:
    """What the runs of a kind have on held-out rows."""

    routes: int
    figures: Mapping[str, Figures]
    won_N: Floats
    """Pairs of validation rows that the mean of routes ranks right, on average over seeds; see `pairs_won`."""


def _measure(recipe: Recipe, kind: Kind, runs: Runs, count: int) -> _Measured:
    """Score all held-out rows on the routes of a kind."""
    device, shards = torch.device(recipe.device), held_out_shards(recipe.data)
    families: dict[str, list[Family]] = {split: [] for split in shards}
    won_N = np.zeros(0)
    for run in runs:
        model = _backbone(run, device)
        chosen = _routes_of(kind, model.config, count)
        for split, shard in shards.items():
            logits_NM = predict_routes(model, shard, chosen, device)
            families[split].append(corrected_family(kind.name, "route", logits_NM, shard, recipe))
            if split == "valid":
                of_run_N = pairs_won(shard, logits_NM.mean(axis=1)) / len(runs)
                won_N = won_N + of_run_N if won_N.size else of_run_N
    figures = {
        split: Figures(
            removed=tuple(each.removed for each in of_runs),
            alone=tuple(each.auc_alone for each in of_runs),
            together=tuple(each.auc_together for each in of_runs),
        )
        for split, of_runs in families.items()
    }
    return _Measured(families["valid"][0].count, figures, won_N)


def _entry(
    recipe: Recipe,
    kind: Kind,
    training: str,
    reports: Sequence[RunReport],
    measured: _Measured,
    first: _Measured | None,
    cost: float,
) -> Entry:
    parameters = reports[0].parameters
    config = RecapConfig(**reports[0].model.config)
    return Entry(
        kind=kind.name,
        training=TRAININGS[training],
        seeds=tuple(report.train.seed for report in reports),
        parameters=parameters,
        size=parameters / parameters_of_fcn(config, recipe.data.layout),
        routes=measured.routes,
        valid=measured.figures["valid"],
        test=measured.figures.get("test"),
        ahead=None if first is None else _lead(recipe.data.valid, measured, first),
        cost=cost,
    )


def _lead(shard: Shard, measured: _Measured, first: _Measured) -> Margin:
    """Return how far a kind is ahead of the first, with errors over rows and seeds; both are paired."""
    aucs, others = measured.figures["valid"].together, first.figures["valid"].together
    gaps = [auc - other for auc, other in zip(aucs, others, strict=True)]
    return Margin(
        mean=mean(gaps),
        rows=error_of_lead(shard, measured.won_N - first.won_N),
        seeds=stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None,
        members=None,
        num_seeds=len(gaps),
        num_members=1,
    )


def _by_training(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    halves: dict[str, list[Entry]] = {}
    for entry in entries:
        halves.setdefault(entry.training, []).append(entry)
    return halves


def corrected_p(entries: Sequence[Entry]) -> dict[str, float]:
    """Return the p of each kind that is compared with the first over several seeds, corrected by Holm."""
    leads = {entry.kind: entry.ahead for entry in entries}
    return holm({kind: lead.p for kind, lead in leads.items() if lead is not None and lead.seeds is not None})


def accepted(entries: Sequence[Entry]) -> str | None:
    """Return the kind of one training that should replace the first; None if the first should stay.

    It is the best on validation of those that are better than the first beyond chance, and not larger than allowed.
    """
    p_values = corrected_p(entries)
    better = [
        entry
        for entry in entries
        if entry.size <= SIZE_LIMIT
        and entry.ahead is not None
        and entry.ahead.mean > 0
        and p_values.get(entry.kind, 1.0) < LEVEL
    ]
    return max(better, key=lambda entry: mean(entry.valid.together)).kind if better else None


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


def table_text(entries: Sequence[Entry]) -> str:
    """Return the table with its note as Markdown."""
    lines, choices = [], []
    for training, of_training in _by_training(entries).items():
        p_values, choice = corrected_p(of_training), accepted(of_training)
        lines += [_line(entry, p_values.get(entry.kind), choice) for entry in of_training]
        choices.append(f"learning from {training}, {choice or 'none'}")
    return "\n".join([*grid(HEADER, lines), "", _note(choices), ""])


def _line(entry: Entry, p: float | None, choice: str | None) -> list[str]:
    verdict = "too large" if entry.size > SIZE_LIMIT else "✓" if entry.kind == choice else ""
    return [
        entry.kind,
        entry.training,
        str(len(entry.seeds)),
        f"{entry.parameters:,}",
        f"{entry.size:.3f}",
        str(entry.routes),
        f"{mean(entry.valid.removed):.4f}",
        spread(entry.valid.alone, 3, 100),
        spread(entry.valid.together, 3, 100),
        f"{100 * entry.valid.gain:+.3f}",
        NONE if entry.ahead is None else f"{100 * entry.ahead.mean:+.3f} ± {100 * entry.ahead.error:.3f}",
        NONE if p is None else p_text(p),
        NONE if entry.test is None else spread(entry.test.together, 3, 100),
        NONE if entry.test is None else f"{100 * entry.test.gain:+.3f}",
        f"{entry.cost:.2f}",
        verdict,
    ]


def _note(choices: Sequence[str]) -> str:
    return (
        "On validation rows but for two columns, AUC in points. V_ns: variance between routes that their mean removes,"
        " in squared logits. Gain: the mean's AUC minus that of one route of the same model. To the first: the mean's"
        " AUC minus that of the default routes, ± its standard error over rows and seeds, both paired, as seeds share"
        " the order of rows and the initial vectors; p of a two-tailed t-test with degrees of freedom by Welch and"
        " Satterthwaite, corrected by Holm within each half of the table. Cost: time to score on all routes, relative"
        " to one route of the default, same process, interleaved. Accepted: the best on validation of those better than"
        f" the first at the level {LEVEL:g}, if its size is at most {SIZE_LIMIT} of FCN's; test rows have no say:"
        f" {'; '.join(choices)}."
    )
