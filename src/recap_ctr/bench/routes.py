"""Compare ways to choose routes: how far the routes disagree, what their mean gains, and what it costs.

Each way is a kind of routes. All kinds are trained alike, with ranks that make no model larger than that of the first
kind, which has the size of FCN. Kinds differ in which adapters a route may take, and in which rows train these.
One half of the validation rows chooses among the kinds, the other confirms the choice, and only what is chosen is
scored on test rows. Shape suffixes: N rows, S seeds, M routes.
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
from recap_ctr.data.shards import Shard
from recap_ctr.evaluation.halves import halves
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
    "confirmed",
    "p",
    "cost",
    "accepted",
    "test AUC of the mean",
    "test gain",
    "test, to the first",
]
LEVEL = 0.05


@dataclass(frozen=True)
class Figures:
    """The figures of the routes of some runs on the same rows, one for each seed."""

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
    choosing: Figures
    """On the half of the validation rows that chooses."""
    ahead: Margin | None
    """How far the mean of routes is ahead of that of the first kind on that half; None for the first."""
    confirmed: Margin | None
    """The same on the half that confirms."""
    cost: float
    """Time to score with all routes, relative to one route of the first kind."""
    test: Figures | None = None
    """On test rows; None where the kind is not chosen, and where there are none."""
    ahead_on_test: Margin | None = None


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
    """Return the config with the largest rank that makes the model no larger than the first kind's, nor than
    `SIZE_LIMIT` times FCN. A rank that already follows from the model's size is kept, so that tables share their runs.
    """
    default = default_rank(config, layout)
    if config.form == "signs":
        return config
    size = parameters_of_rank(first, layout, default_rank(first, layout))
    # Of few and small vectors, even the smallest default rank makes the first kind too large.
    limit = min(size, SIZE_LIMIT * parameters_of_fcn(first, layout))
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
    entries = [
        entry
        for training in TRAININGS
        for entry in _compare(
            recipe, training, [trained[kind.name, training] for kind in KINDS], costs, count
        )
    ]
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
    """What the runs of a kind have on some rows."""

    routes: int
    figures: Figures
    won_N: Floats
    """Pairs of rows that the mean of routes ranks right, on average over seeds; see `pairs_won`."""


def _compare(
    recipe: Recipe, training: str, runs_of_kinds: Sequence[Runs], costs: Mapping[str, float], count: int
) -> list[Entry]:
    """Return the entries of one training. Only the kind that is accepted is scored on test rows, and the first."""
    valid = recipe.data.valid
    halves_of_valid = [valid.take(np.sort(rows)) for rows in halves(valid.labels)]
    measured = [
        [_measure(recipe, kind, runs, count, half) for half in halves_of_valid]
        for kind, runs in zip(KINDS, runs_of_kinds, strict=True)
    ]
    entries = []
    for kind, runs, (choosing, confirming) in zip(KINDS, runs_of_kinds, measured, strict=True):
        reports = list(runs.values())
        config = RecapConfig(**reports[0].model.config)
        ahead, confirmed = (
            None if kind is KINDS[0] else _lead(half, of_kind, of_first)
            for half, of_kind, of_first in zip(
                halves_of_valid, (choosing, confirming), measured[0], strict=True
            )
        )
        entries.append(
            Entry(
                kind=kind.name,
                training=TRAININGS[training],
                seeds=tuple(report.train.seed for report in reports),
                parameters=reports[0].parameters,
                size=reports[0].parameters / parameters_of_fcn(config, recipe.data.layout),
                routes=choosing.routes,
                choosing=choosing.figures,
                ahead=ahead,
                confirmed=confirmed,
                cost=costs[kind.name],
            )
        )
    test = recipe.data.test
    if not len(test):
        return entries
    names = [entry.kind for entry in entries]
    at = names.index(accepted(entries) or names[0])
    chosen = _measure(recipe, KINDS[at], runs_of_kinds[at], count, test)
    # A choice is compared with the first kind, which has to be scored for that.
    lead = _lead(test, chosen, _measure(recipe, KINDS[0], runs_of_kinds[0], count, test)) if at else None
    entries[at] = replace(entries[at], test=chosen.figures, ahead_on_test=lead)
    return entries


def _measure(recipe: Recipe, kind: Kind, runs: Runs, count: int, shard: Shard) -> _Measured:
    """Score some rows on the routes of a kind."""
    device = torch.device(recipe.device)
    families: list[Family] = []
    won_SN: list[Floats] = []
    for run in runs:
        model = _backbone(run, device)
        logits_NM = predict_routes(model, shard, _routes_of(kind, model.config, count), device)
        families.append(corrected_family(kind.name, "route", logits_NM, shard, recipe))
        won_SN.append(pairs_won(shard, logits_NM.mean(axis=1)))
    figures = Figures(
        removed=tuple(each.removed for each in families),
        alone=tuple(each.auc_alone for each in families),
        together=tuple(each.auc_together for each in families),
    )
    return _Measured(families[0].count, figures, np.mean(won_SN, axis=0))


def _lead(shard: Shard, measured: _Measured, first: _Measured) -> Margin:
    """Return how far a kind is ahead of the first, with errors over rows and seeds.

    Both are paired: the rows are the same, and a seed gives both kinds the same initial vectors and order of rows.
    """
    gaps = [auc - other for auc, other in zip(measured.figures.together, first.figures.together, strict=True)]
    return Margin(
        mean=mean(gaps),
        rows=error_of_lead(shard, measured.won_N - first.won_N),
        seeds=stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None,
        members=None,
        num_seeds=len(gaps),
        num_members=1,
    )


def _by_training(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    of_trainings: dict[str, list[Entry]] = {}
    for entry in entries:
        of_trainings.setdefault(entry.training, []).append(entry)
    return of_trainings


def corrected_p(entries: Sequence[Entry]) -> dict[str, float]:
    """Return the p, on the half that confirms, of each kind that is compared with the first over several seeds.

    It is corrected by Holm for all of them: the half has other rows than the one that chooses, but the same seeds.
    """
    leads = {entry.kind: entry.confirmed for entry in entries}
    return holm({kind: lead.p for kind, lead in leads.items() if lead is not None and lead.seeds is not None})


def best_of(entries: Sequence[Entry]) -> Entry:
    """Return the best kind of one training on the half that chooses, the first among them; none larger than allowed."""
    allowed = [entry for entry in entries if entry.ahead is None or entry.size <= SIZE_LIMIT]
    return max(allowed, key=lambda entry: mean(entry.choosing.together))


def accepted(entries: Sequence[Entry]) -> str | None:
    """Return the kind of one training that should replace the first; None if the first should stay.

    It is the best on one half of the validation rows, if on the other half it is better than the first beyond chance.
    """
    best = best_of(entries)
    is_confirmed = (
        best.confirmed is not None
        and best.confirmed.mean > 0
        and corrected_p(entries).get(best.kind, 1.0) < LEVEL
    )
    return best.kind if is_confirmed else None


def _costs(recipe: Recipe, runs: Mapping[Kind, Path], count: int) -> dict[str, float]:
    """Return the time to score on all routes, by kind, relative to one route of the first kind."""
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    models: dict[str, list[nn.Module]] = {}
    for kind, run in runs.items():
        model = _backbone(run, device)
        if not models:
            models[""] = [FoldedRoutes(Routed(model, [model.config.home]))]
        models[kind.name] = [FoldedRoutes(Routed(model, _routes_of(kind, model.config, count)))]
    return relative_costs(models, recipe.data.valid, device)


def table_text(entries: Sequence[Entry]) -> str:
    """Return the table with its note as Markdown."""
    lines, choices = [], []
    for training, of_training in _by_training(entries).items():
        p_values, best, choice = corrected_p(of_training), best_of(of_training).kind, accepted(of_training)
        lines += [_line(entry, p_values.get(entry.kind), best, choice) for entry in of_training]
        choices.append(f"learning from {training}, {choice or 'none'}")
    return "\n".join([*grid(HEADER, lines), "", _note(choices), ""])


def _line(entry: Entry, p: float | None, best: str, choice: str | None) -> list[str]:
    verdict = ""
    if entry.size > SIZE_LIMIT:
        verdict = "too large"
    elif entry.kind == best and entry.ahead is not None:
        verdict = "✓" if entry.kind == choice else "not confirmed"
    return [
        entry.kind,
        entry.training,
        str(len(entry.seeds)),
        f"{entry.parameters:,}",
        f"{entry.size:.3f}",
        str(entry.routes),
        f"{mean(entry.choosing.removed):.4f}",
        spread(entry.choosing.alone, 3, 100),
        spread(entry.choosing.together, 3, 100),
        f"{100 * entry.choosing.gain:+.3f}",
        _lead_text(entry.ahead),
        _lead_text(entry.confirmed),
        NONE if p is None else p_text(p),
        f"{entry.cost:.2f}",
        verdict,
        NONE if entry.test is None else spread(entry.test.together, 3, 100),
        NONE if entry.test is None else f"{100 * entry.test.gain:+.3f}",
        _lead_text(entry.ahead_on_test),
    ]


def _lead_text(lead: Margin | None) -> str:
    return NONE if lead is None else f"{100 * lead.mean:+.3f} ± {100 * lead.error:.3f}"


def _note(choices: Sequence[str]) -> str:
    return (
        "AUC in points. V_ns: variance between routes that their mean removes, in squared logits. Gain: the mean's AUC"
        " minus that of one route of the same model. To the first: the mean's AUC minus that of the default routes, ±"
        " its standard error over rows and seeds, both paired, as seeds share the order of rows and the initial"
        " vectors. All these are of one half of the validation rows, which chooses the best kind of at most"
        f" {SIZE_LIMIT} times FCN's size. Confirmed: the same difference on the other half; p: its two-tailed t-test,"
        " with degrees of freedom by Welch and Satterthwaite, corrected by Holm for all kinds, as both halves of the"
        " rows have the same seeds. Where rows are too few for halves, all of them choose and confirm. Accepted: the"
        f" best kind, if p < {LEVEL:g}: {'; '.join(choices)}. Only what is accepted, or else the first, is scored on"
        " test rows. Cost: time to score on all routes, relative to one route of the default, same process,"
        " interleaved."
    )
