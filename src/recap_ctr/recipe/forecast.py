"""The planner: what more teachers, averaged weights and routes are worth, told from a few runs before the rest is paid.

Its runs are the recipe's own: the probe's arms, the first teachers, and one student from labels alone. So nothing is
trained twice: `recap fit` goes on from them in the same directory, and afterwards says how good the forecast was.

A student of M teachers can't be forecast, only their ensemble: what it keeps of the gain shows when it is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2
from scipy.stats import t as student_t
from torch import nn

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.axes.routes import Routed
from recap_ctr.data.shards import Shard
from recap_ctr.diagnose import Cube, Curve, Estimate, curve
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.costs import scoring_seconds
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs import machine
from recap_ctr.models.recap import Recap
from recap_ctr.recipe.estimator_grid import survey_runs
from recap_ctr.recipe.probe import RESULT as PROBED
from recap_ctr.recipe.probe import finalists
from recap_ctr.recipe.stages import Plan, Recipe, RecipeConfig
from recap_ctr.storage.files import atomic_file, read_json, write_json
from recap_ctr.training.run import ARTIFACT, choose_routes, estimators, teacher_tables

Logits = npt.NDArray[np.floating[Any]]
FORECAST, RECOMMENDED = "forecast.json", "recommended.toml"
TEACHERS = 16
ROUTES = (1, 2, 4, 8, 16, 32)
CHECKPOINTS, SURVEY_ROUTES = 4, 8  # those of `recap diagnose`, which finds the run again
WORTH = 1e-4
"""Logloss that one more teacher must save to be recommended."""
DIRECTIONS = 20
"""In how many independent directions runs are taken to differ, where two of them can't tell (docs/decisions/0013)."""
LEVEL = 0.95
OF_TEACHERS = ("teacher_model", "teacher_settings", "train", "teacher_train", "negative_rate")
GIVEN_UP = ("teachers", "given_up")  # of a plan: what a budget may change without making other teachers
ENOUGH = 0.8  # of what most routes save: fewer that do are enough
TWO_RUNS = (
    "Two runs can't tell how much others would disagree: their intervals take runs to differ in"
    f" {DIRECTIONS} independent directions, and the level of one run from these two alone."
)
NO_STUDENT = (
    "Teachers' lines are those of their ensemble; what a student keeps of its gain is not known before one is"
    " trained."
)


@dataclass(frozen=True)
class Worth:
    """What the mean of some estimators is worth on validation rows."""

    count: int
    loss: Estimate
    auc: Estimate | None
    """None: the rows at hand can't tell what it gains in AUC."""
    gain: Estimate
    """Loss that it saves over one teacher, one route of the averaged student, or the best arm of the probe."""


@dataclass(frozen=True)
class Line(Worth):
    """One choice on an axis, with what it costs."""

    minutes: float
    """Of training, from the beginning, on this machine."""
    parameters: int
    """Stored."""
    microseconds: float
    """To score a row."""


@dataclass(frozen=True)
class Arms:
    """The better half of the probe's arms, best first, as estimators: there before any teacher is."""

    names: tuple[str, ...]
    rows: int
    """That each was trained on: where it is a sample of them, arms disagree more than teachers do."""
    means: tuple[Worth, ...]
    """Measured: the mean of the best 1, 2, .. of them."""
    forecast: tuple[Worth, ...]
    """From their disagreement: the mean of 1, 2, .. runs that are as they are on average."""


@dataclass(frozen=True)
class Forecast:
    """All lines, and what follows from them."""

    runs: int
    rows: int
    teachers: tuple[Line, ...]
    """The ensemble of M teachers; those beyond `runs` don't exist yet."""
    routes: tuple[Line, ...]
    """One student from labels, on K routes: measured."""
    averaging: tuple[Line, ...]
    """The same student on one route: its last weights, and their average."""
    arms: Arms | None
    """None where nothing was probed."""
    choice: dict[str, Any]
    """Teachers, routes, whether to average, and the minutes that takes."""
    notes: tuple[str, ...]


def forecast(recipe: Recipe, *, runs: int = 2) -> Forecast:
    """Train the few runs that are needed, unless they are there, and tell the rest from them."""
    if runs < 2:
        raise InputError(
            f"a forecast from {runs} run", fix="two at least: one alone has nothing to disagree with"
        )
    plan = recipe.plan()
    teachers = recipe.teachers(replace(plan, teachers=runs))
    ((learner, learned),) = survey_runs(
        recipe, plan, runs=1, checkpoints=CHECKPOINTS, routes=SURVEY_ROUTES, model=recipe.config.students[0]
    ).items()
    torch.set_num_threads(recipe.threads)
    device, valid = torch.device(recipe.device), recipe.data.valid
    models = {count: model.to(device) for count, model in _on_routes(learner, recipe).items()}
    teacher = load_artifact(next(iter(teachers)) / ARTIFACT).model.to(device)
    seconds = scoring_seconds(
        {"teacher": [teacher], **{str(count): [model] for count, model in models.items()}}, valid, device
    )
    costs = _Costs(recipe, list(teachers.values()), learned)
    lines = tuple(
        Line(
            one.count, one.loss, one.auc, one.gain, costs.minutes(one.count), one.count * costs.teacher_parameters,
            one.count * 1e6 * seconds["teacher"],
        )
        for one in of_runs(
            [LogitTable(path) for path in teacher_tables(list(teachers), "valid")], valid, recipe.config.negative_rate
        )
    )  # fmt: skip
    *_, raw = estimators(learner, None, "checkpoint").values()
    home = predict(models[1], valid, device)

    def measured(model: nn.Module, count: int) -> Line:
        loss, auc, gain = compared(valid, predict(model, valid, device), home, recipe.config.negative_rate)
        return Line(count, loss, auc, gain, costs.alone, learned["parameters"], 1e6 * seconds[str(count)])

    routes = tuple(measured(model, count) for count, model in models.items())
    averaging = measured(raw.to(device), 1), measured(models[1], 1)
    found = Forecast(
        runs=runs,
        rows=len(valid),
        teachers=lines,
        routes=routes,
        averaging=averaging,
        arms=of_arms(recipe),
        choice=choose(lines, routes, costs.alone, recipe.budget),
        notes=(TWO_RUNS, NO_STUDENT) if runs == 2 else (NO_STUDENT,),
    )
    about = {"name": recipe.data.name, "fingerprint": recipe.data.fingerprint}
    record = {
        "kind": "forecast", "format": 1, **asdict(found), "split": "valid", "data": about, "plan": asdict(plan),
        "recipe": recipe.config.model_dump(mode="json"), "budget": recipe.budget,
        "versions": machine.versions(), "machine": machine.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    write_json(recipe.out / FORECAST, record)
    _recommend(recipe, plan, found)
    return found


def _on_routes(run: Path, recipe: Recipe) -> dict[int, nn.Module]:
    """The averaged student on 1, 2, 4, .. routes, chosen as the recipe does, as far as it has so many."""
    model = load_artifact(run / ARTIFACT).model
    backbone = model.model if isinstance(model, Routed) else model
    if not isinstance(backbone, Recap):
        return {1: backbone}
    device, config = torch.device(recipe.device), recipe.config
    backbone.to(device)
    routes = {
        count: choose_routes(
            backbone, count, config.route_choice, recipe.data, device, negative_rate=config.negative_rate
        )
        for count in ROUTES
    }
    return {count: Routed(backbone, own) for count, own in routes.items() if len(own) == count}


class _Costs:
    """Training minutes, by what the runs at hand took."""

    def __init__(self, recipe: Recipe, teachers: Sequence[dict[str, Any]], learned: dict[str, Any]) -> None:
        config, rows = recipe.config, len(recipe.data.train)
        self.workers, self.teacher_parameters = recipe.workers, teachers[0]["parameters"]
        self.teacher: float = mean(one["seconds"]["train"] for one in teachers) / 60
        self.alone: float = learned["seconds"]["train"] / 60
        arms = len(config.student_factors) if config.l2 is None else 0
        rungs = arms * config.probe.rungs[0] + arms // 2 * (config.probe.rungs[-1] - config.probe.rungs[0])
        an_epoch = self.alone / len(learned["history"]) * min(1.0, config.probe.max_rows / rows)
        self.student_probe = rungs * an_epoch / self.workers if arms > 1 else 0.0

    def minutes(self, teachers: int) -> float:
        """Of so many teachers and a student of theirs."""
        return math.ceil(teachers / self.workers) * self.teacher + self.student_probe + self.alone


def of_arms(recipe: Recipe) -> Arms | None:
    """What the probe's arms tell together."""
    if recipe.config.l2 is not None or not (recipe.probe_directory / PROBED).is_file():
        return None
    tables, valid = finalists(recipe.probe_directory), recipe.data.valid
    for table in tables.values():
        table.check(recipe.data)
    rate = recipe.config.negative_rate
    columns = [np.asarray(table.logits_NM[:, 0], np.float64) for table in tables.values()]
    means = [np.mean(columns[:count], axis=0) for count in range(1, len(columns) + 1)]
    return Arms(
        names=tuple(arm.name for arm in tables),
        rows=min(len(recipe.data.train), recipe.config.probe.max_rows),
        means=tuple(
            Worth(count, *compared(valid, own, means[0], rate)) for count, own in enumerate(means, start=1)
        ),
        forecast=tuple(of_runs(list(tables.values()), valid, rate) if len(tables) > 1 else ()),
    )


def of_runs(tables: Sequence[LogitTable], shard: Shard, negative_rate: float = 1.0) -> list[Worth]:
    """Of the mean of 1, 2, .. such runs, by Eq. 6 from the disagreement of those at hand; a table is a run."""
    logits_NM, weights = undo_sampling(
        np.stack([table.logits_NM[:, 0] for table in tables], axis=1), shard, negative_rate
    )
    seen = curve(Cube.from_array(logits_NM[:, :, None, None]), shard.labels, "run", weights=weights)
    losses, aucs = (
        [of(shard.labels, logits, weights) for logits in logits_NM.T] for of in (metrics.logloss, metrics.auc)
    )
    found = []
    for point in seen.forecast[:TEACHERS]:
        scatter = _scatter(seen, point.count)
        auc = None if point.auc is None else over_runs(point.auc, aucs, point.count, scatter)
        gain = replace(
            point.gain, runs_low=scatter[0] * point.gain.value, runs_high=scatter[1] * point.gain.value
        )
        found.append(Worth(point.count, over_runs(point.loss, losses, point.count, scatter), auc, gain))
    return found


def _scatter(seen: Curve, count: int) -> tuple[float, float]:
    """The ends of the gain's interval over runs, as multiples of the gain."""
    gain = seen.forecast[count - 1].gain
    if gain.value <= 0:
        return 1.0, 1.0
    if gain.runs_low is not None and gain.runs_high is not None:
        return gain.runs_low / gain.value, gain.runs_high / gain.value
    low, high = (DIRECTIONS / float(chi2.ppf(end, DIRECTIONS)) for end in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    return low, high


def over_runs(
    expected: Estimate, alone: Sequence[float], count: int, scatter: tuple[float, float]
) -> Estimate:
    """The interval of the mean of `count` other runs: their level is as uncertain as that of those at hand and their
    own, what their mean gains over it as `scatter` says. Where runs that disagree more are worse alone, the two
    cancel in part, and the interval is wide.
    """
    level, gain = mean(alone), abs(mean(alone) - expected.value)
    reach = float(student_t.ppf((1 + LEVEL) / 2, len(alone) - 1)) * stdev(alone)
    reach *= math.sqrt(1 / len(alone) + 1 / count)
    less, more = (1 - scatter[0]) * gain, (scatter[1] - 1) * gain
    down, up = (more, less) if expected.value < level else (less, more)  # a loss falls, an AUC rises
    return replace(
        expected,
        runs_low=expected.value - math.hypot(reach, down),
        runs_high=expected.value + math.hypot(reach, up),
    )


def compared(
    valid: Shard, logits: Logits, base: Logits, negative_rate: float
) -> tuple[Estimate, Estimate, Estimate]:
    """Loss, AUC, and loss saved over `base`; intervals over rows are those of the difference to it."""
    (logits, weights), (base, _) = (undo_sampling(one, valid, negative_rate) for one in (logits, base))
    loss, auc = (of(valid.labels, logits, weights) for of in (metrics.logloss, metrics.auc))
    sign_N = np.where(np.asarray(valid.labels) == 1, -1.0, 1.0)
    change_N = np.logaddexp(0, sign_N * logits) - np.logaddexp(0, sign_N * base)
    mass_N = np.ones(len(change_N)) if weights is None else np.asarray(weights, np.float64)
    change = float(mass_N @ change_N / mass_N.sum())
    error = float(np.sqrt(mass_N**2 @ (change_N - change) ** 2) / mass_N.sum())
    of_auc = metrics.auc_difference(valid.labels, logits, base, weights).standard_error
    reach = 1.96
    return (
        Estimate(loss, loss - reach * error, loss + reach * error),
        Estimate(auc, auc - reach * of_auc, auc + reach * of_auc),
        Estimate(-change, -change - reach * error, -change + reach * error),
    )


def _best_routes(routes: Sequence[Line]) -> Line:
    return max(routes, key=lambda line: line.gain.value)


def choose(
    teachers: Sequence[Line], routes: Sequence[Line], alone: float, budget: float | None
) -> dict[str, Any]:
    """As many teachers as are worth their minutes and fit the budget; as few routes as bring what routes can bring."""
    by_count = {line.count: line for line in teachers}
    fitting = [line.count for line in teachers if budget is None or line.minutes <= budget]
    chosen = 0
    for count in sorted(fitting):
        before = by_count.get(count - 1, by_count[1])
        if count < 2 or before.loss.value - by_count[count].loss.value < WORTH:
            continue
        chosen = count
    best = _best_routes(routes)
    enough = [line for line in routes if line.gain.value >= ENOUGH * best.gain.value]
    own = enough[0] if best.gain.low > 0 else routes[0]
    return {
        "teachers": chosen,
        "routes": own.count,
        "minutes": by_count[chosen].minutes if chosen else alone,
    }


def _recommend(recipe: Recipe, plan: Plan, found: Forecast) -> None:
    """Write the recipe with the choice in it, and record its plan, so that `recap fit` keeps to what was probed."""
    own = {key: found.choice[key] for key in ("teachers", "routes")}
    config = RecipeConfig.model_validate({**recipe.config.model_dump(), **own})
    chosen = Recipe(
        config, recipe.data, recipe.out, threads=recipe.threads, device=recipe.device, workers=recipe.workers
    )
    chosen.record(replace(plan, teachers=config.teachers))
    with atomic_file(recipe.out / RECOMMENDED) as file:
        file.write(config.to_toml().encode())


def words(found: Forecast) -> list[str]:
    """What the forecast means."""
    one, last, chosen = found.teachers[0], found.teachers[-1], found.choice
    ensemble = found.teachers[max(chosen["teachers"], 2) - 1]
    said = [
        f"From {found.runs} runs: one teacher has logloss {one.loss.value:.5f} on {found.rows:,} validation rows, and"
        f" the mean of {ensemble.count} is forecast to save {_with_runs(ensemble.gain, 5)}, which gives"
        f" {_with_runs(ensemble.loss, 5)}; {last.count} would reach {last.loss.value:.5f}."
    ]
    if found.arms is not None and found.arms.forecast:
        said.append(_of_probe(found.arms, ensemble))
    if ensemble.auc is not None and one.auc is not None:
        said.append(
            f"In AUC: {100 * one.auc.value:.3f} for one, {_with_runs(ensemble.auc, 3, 100)} for {ensemble.count}."
        )
    else:
        said.append("What these gain in AUC is within the noise of the rows, so no AUC is forecast.")
    raw, averaged = found.averaging
    said.append(
        f"Averaging weights {'saves' if averaged.loss.value < raw.loss.value else 'costs'}"
        f" {abs(raw.loss.value - averaged.loss.value):.5f} of logloss at no cost"
        f" ({raw.loss.value:.5f} to {averaged.loss.value:.5f})"
        + ("." if averaged.loss.value < raw.loss.value else ": look at the schedule.")
    )
    if len(found.routes) > 1:
        best = _best_routes(found.routes)
        clear = best.gain.low > 0
        said.append(
            f"{best.count} routes save {best.gain.value:.6f} of logloss over one"
            f" ({best.gain.low:.6f} to {best.gain.high:.6f} with other rows), for"
            f" {best.microseconds / found.routes[0].microseconds:.1f} times the scoring time."
            if clear
            else f"No number of routes up to {found.routes[-1].count} saves more than chance over one."
        )
    recipe = f"{chosen['teachers']} teachers" if chosen["teachers"] else "no teachers"
    routes = "one route" if chosen["routes"] == 1 else f"{chosen['routes']} routes"
    said.append(
        f"Recommended: {recipe} and {routes}, about {chosen['minutes']:.0f} minutes of training in all"
        f" after the probe; one more teacher must save {WORTH:g} of logloss to be worth its time."
    )
    return [*said, *found.notes]


def _of_probe(arms: Arms, ensemble: Line) -> str:
    """The probe's word beside the teachers'."""
    best, every = arms.means[0], arms.means[-1]
    beside = arms.forecast[ensemble.count - 1].gain.value
    verb = "saves" if every.gain.value > 0 else "costs"
    return (
        f"The probe's {every.count} better arms, trained on {arms.rows:,} rows each, are estimators, too: their mean"
        f" {verb} {abs(every.gain.value):.5f} over the best of them ({best.loss.value:.5f} to {every.loss.value:.5f}),"
        f" and {ensemble.count} runs that disagree as they do would save {beside:.5f}, where teachers are forecast"
        f" {ensemble.gain.value:.5f}."
    )


def _with_runs(one: Estimate, digits: int, scale: float = 1.0) -> str:
    low, high = (scale * (end if end is not None else one.value) for end in (one.runs_low, one.runs_high))
    return f"{scale * one.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f} with other runs)"


def check(out: Path, report: Mapping[str, Any]) -> list[str]:
    """How good a forecast was, now that more teachers are there; nothing where there was none of these teachers."""
    if not (out / FORECAST).is_file():
        return []
    record = read_json(out / FORECAST)
    if not _is_of(record, report):
        return []
    said = []
    for measured in report["ensembles"]:
        count = measured["teachers"]
        if count <= record["runs"] or count > len(record["teachers"]):
            continue
        line, figures = record["teachers"][count - 1], measured["metrics"]["valid"]["raw"]
        for name, expected, value, scale, digits in (
            ("logloss", line["loss"], figures["logloss"], 1.0, 5),
            ("AUC", line["auc"], figures["auc"], 100.0, 3),
        ):
            if expected is None:
                continue
            inside = expected["runs_low"] <= value <= expected["runs_high"]
            said.append(
                f"{name} of {count} teachers, on validation: forecast from {record['runs']} runs"
                f" {_with_runs(Estimate(**expected), digits, scale)}, measured {scale * value:.{digits}f}:"
                f" {'inside' if inside else 'outside'}."
            )
    return said


def _is_of(record: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether a forecast is of a report's teachers: data, model and training, and what the probe found."""
    same_plan = all(
        record["plan"][key] == report["plan"][key] for key in record["plan"] if key not in GIVEN_UP
    )
    return (
        record["data"]["fingerprint"] == report["data"]["fingerprint"]
        and same_plan
        and all(record["recipe"][key] == report["recipe"][key] for key in OF_TEACHERS)
    )
