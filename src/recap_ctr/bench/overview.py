"""One table of what estimator scaling does on a data set: single models, their ensembles, and RECAP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from recap_ctr.bench.margin import NOTE, Margin, margin
from recap_ctr.bench.published import title_of
from recap_ctr.bench.scaling import copy_reports, note_on_l2
from recap_ctr.bench.tables import NO_TEST, grid, spread, write_files
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import held_out_shards
from recap_ctr.errors import InputError
from recap_ctr.evaluation.evaluate import SplitFigures
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.ablation import PLAIN_FCN, Cell, own_cell, train_cells
from recap_ctr.recipe.report import measure_ensembles
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import write_json
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.parallel import Runs

TRAININGS = ("ema-kd", "raw", "plain", "ema", "raw-kd")
PUBLISHED = "published"
METRICS = ("auc", "logloss", "calibrated")
# How the logistic regression of the committed tables was trained; those of `recap fit` and `recap train` converge.
LOGISTIC = TrainConfig(learning_rate=1e-2, l2=1e-6, update="fast", max_epochs=10)
HEADER = ["model", "l2", "runs", "parameters", "AUC", "logloss", "calibrated", "cost"]


@dataclass(frozen=True)
class Entry:
    """A model or an ensemble, with one value of each figure per run."""

    name: str
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    calibrated: tuple[float, ...]
    parameters: int
    cost: float | None = None
    """Time to score, relative to one teacher."""
    l2: float | None = None
    """Strength of the embedding regulariser; None for a model without a table, and for several runs together."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {**vars(self), **{metric: list(getattr(self, metric)) for metric in METRICS}}


def entry_of(
    name: str,
    figures: Sequence[SplitFigures],
    parameters: int,
    cost: float | None = None,
    l2: float | None = None,
) -> Entry:
    """Return the entry of a model whose runs have these figures."""
    return Entry(
        name,
        tuple(run.raw.auc for run in figures),
        tuple(run.raw.logloss for run in figures),
        tuple(run.calibrated.logloss for run in figures),
        parameters,
        cost,
        l2,
    )


def single_entries(recipe: Recipe, title: str, runs: Runs, costs: tuple[float, float]) -> list[Entry]:
    """Return an entry of runs that differ in their seed, and one of their ensemble; `costs` are of one and of all."""
    reports = list(runs.values())
    split, size = reports[0].metrics.split, reports[0].parameters
    figures = [report.metrics.on(split) for report in reports]
    entries = [entry_of(title, figures, size, costs[0], reports[0].train.l2)]
    if len(runs) > 1:
        together = measure_ensembles(recipe.config, recipe.data, list(runs))[-1].metrics.on(split)
        entries.append(entry_of(f"ensemble of {len(runs)}", [together], size * len(runs), costs[1]))
    return entries


def logistic_regression(recipe: Recipe) -> Runs:
    """Train a logistic regression for comparison, on the recipe's data."""
    config = RunConfig(
        model="lr",
        model_config=parse_model("lr", {}),
        train=LOGISTIC.model_copy(update={"seed": recipe.config.seed}),
        calibration=recipe.config.calibration,
        negative_rate=recipe.config.negative_rate,
        train_baseline=False,
        report_fields=False,
        device=recipe.device,
    )
    directory = recipe.directory("lr", config.training_inputs(recipe.data))
    return recipe.train({directory: config}, "logistic regression")


def costs(
    teachers: Sequence[Path], student: Path, recipe: Recipe, others: Sequence[Path] = ()
) -> dict[str, float]:
    """Return times to score, relative to one teacher, measured side by side.

    They are of `one` teacher, the `ensemble` of all, the student on one `route` and on all of its `routes`; and where
    there are other runs, of `another` and of all `others`.
    """
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    members, rest = (
        [load_artifact(path / ARTIFACT).model.to(device) for path in paths] for paths in (teachers, others)
    )
    shipped = load_artifact(student / ARTIFACT)
    _, shard = held_out_shards(recipe.data).popitem()
    return relative_costs(
        {
            "one": members[:1],
            "ensemble": members,
            "route": [shipped.with_setting(routes=1).model.to(device)],
            "routes": [shipped.model.to(device)],
            **({"another": rest[:1], "others": rest} if rest else {}),
        },
        shard,
        device,
    )


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return students by training, and FCNs by the plateau rule; each kind has an l2 of its own."""
    if not teachers:
        raise InputError("this table compares with distillation", fix="set at least one teacher")
    students = {
        training: own_cell(recipe, plan, "recap", training, range(1, seeds + 1), teachers)
        for training in TRAININGS
    }
    return {**students, PUBLISHED: plain_fcns(recipe, plan, teachers)}


def plain_fcns(recipe: Recipe, plan: Plan, teachers: Sequence[Path]) -> Cell:
    """Return as many FCNs by the plateau rule as there are teachers, at the regulariser that is best for them."""
    return own_cell(recipe, plan, "fcn", "plain", range(1, len(teachers) + 1), teachers)


def overview(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what the table needs, write it as JSON and as Markdown, and return the latter."""
    plan = recipe.plan()
    teachers = recipe.train_teachers(plan)
    students = train_cells(recipe, cells(recipe, plan, list(teachers), seeds), title="overview")
    published = students.pop(PUBLISHED)
    entries = collect(recipe, teachers, students, published, logistic_regression(recipe))
    margins = _margins(recipe, teachers, published, students["ema-kd"])
    notes = [
        *findings(entries, margins),
        *([NOTE] if margins else []),
        f"Cost: time to score relative to one {title_of(recipe.config.teacher_model)}, same process, interleaved.",
        *([] if len(recipe.data.test) else [NO_TEST]),
        f"The learning rate is the probe's, {plan.learning_rate:g}. Teachers have the l2 of the plan."
        f" {note_on_l2(recipe.config, recipe.edges)} Lines of the backbone but that by the plateau rule differ in what"
        " they name and have one schedule. Table 1 has FCN by its published settings.",
    ]
    text = "\n".join([*markdown(entries), "", *notes, ""])
    by_training = {f"recap-{training}": runs for training, runs in students.items()}
    copy_reports({"teachers": teachers, "fcn-plain": published, **by_training}, reports / "overview")
    write_files(reports / "overview", "overview", {"md": text})
    record = {"kind": "overview", "lines": [entry.to_json() for entry in entries]}
    write_json(reports / "overview" / "overview.json", record)
    return text


def collect(
    recipe: Recipe, teachers: Runs, students: Mapping[str, Runs], published: Runs, baseline: Runs
) -> list[Entry]:
    """Return all entries, in the order of the table."""
    split = next(iter(teachers.values())).metrics.split
    (regression,) = baseline.values()
    base_rate = regression.metrics.on(split).base_rate_logloss
    # Where teachers are FCNs, those by the plateau rule cost the same.
    differ = recipe.config.teacher_model != "fcn"
    cost = costs(list(teachers), next(iter(students["ema-kd"])), recipe, list(published) if differ else ())

    def student_entry(name: str, training: str, *, routes: bool) -> Entry:
        reports = [report.on_routes(every=routes) for report in students[training].values()]
        figures = [report.metrics.on(split) for report in reports]
        relative = cost["routes" if routes else "route"]
        return entry_of(name, figures, reports[0].parameters, relative, reports[0].train.l2)

    teacher_costs = cost["one"], cost["ensemble"]
    published_costs = (cost["another"], cost["others"]) if differ else teacher_costs
    averaged = f"{title_of(recipe.config.teacher_model)}, averaged weights: the teachers"
    return [
        Entry("base rate", (0.5,), (base_rate,), (base_rate,), 0),
        entry_of("logistic regression", [regression.metrics.on(split)], regression.parameters),
        *single_entries(recipe, PLAIN_FCN, published, published_costs),
        *single_entries(recipe, averaged, teachers, teacher_costs),
        student_entry("recursive backbone, plateau rule", "plain", routes=False),
        student_entry("recursive backbone", "raw", routes=False),
        student_entry("+ EMA", "ema", routes=False),
        student_entry("+ KD", "raw-kd", routes=False),
        student_entry("+ routes", "raw", routes=True),
        student_entry("RECAP", "ema-kd", routes=True),
    ]


def _margins(recipe: Recipe, teachers: Runs, published: Runs, students: Runs) -> list[Margin]:
    """Return RECAP's margins over each ensemble, in the order of the table."""
    split = next(iter(teachers.values())).metrics.split
    return [
        margin(recipe.data, list(students), list(members), split)
        for members in (published, teachers)
        if len(members) > 1
    ]


def findings(entries: Sequence[Entry], margins: Sequence[Margin]) -> list[str]:
    """Return how RECAP compares with each ensemble, in the order of the table."""
    recap = entries[-1]
    sentences = []
    pairs = [pair for pair in pairwise(entries) if pair[1].name.startswith("ensemble")]
    for (member, ensemble), ahead in zip(pairs, margins, strict=True):
        alone, together = mean(member.auc), ensemble.auc[0]
        share = ""
        if together > alone:
            share = f"; {(mean(recap.auc) - alone) / (together - alone):.0%} of its gain"
        sentences.append(
            f"RECAP minus the {ensemble.name} of {member.name}: {ahead}{share}, at"
            f" {recap.parameters / member.parameters:.3f} of one member's size."
        )
    return sentences


def markdown(entries: Sequence[Entry]) -> list[str]:
    """Return the table: AUC in points, mean ± standard deviation where there are several runs."""
    return grid(
        HEADER,
        [
            [
                entry.name,
                "" if entry.l2 is None else f"{entry.l2:.3g}",
                str(len(entry.auc)),
                f"{entry.parameters:,}" if entry.parameters else "",
                spread(entry.auc, 3, 100),
                spread(entry.logloss, 5),
                spread(entry.calibrated, 5),
                "" if entry.cost is None else f"{entry.cost:.2f}",
            ]
            for entry in entries
        ],
    )
