"""Forecast from a few runs what more teachers, averaged weights and routes would gain, before they are trained.

These runs belong to the recipe: the probe's arms, the first teachers, and one student that learns from labels alone.
`recap fit` goes on from them in the same directory, so nothing is trained twice, and says afterwards how good the
forecast was.

Only the gain of the ensemble can be forecast. How much of it a student keeps shows when the student is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.axes.routes import Routed
from recap_ctr.data.shards import Shard
from recap_ctr.diagnose import Cube, Curve, Estimate, curve
from recap_ctr.diagnose.results import MIN_TEACHER_GAIN, AxisChoice, Forecast, ProbeArms, Worth
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.costs import scoring_seconds
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs import machine
from recap_ctr.models.recap import Recap
from recap_ctr.pages.forecast import check_sentence, forecast_notes
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.estimator_grid import train_grid
from recap_ctr.recipe.probe import RESULT, finalists
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import atomic_file, read_object, write_json
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.estimators import load_estimators
from recap_ctr.training.parallel import Runs, teacher_tables
from recap_ctr.training.report import FitReport, RunReport
from recap_ctr.training.routes import choose_routes

Logits = npt.NDArray[np.floating[Any]]
FORECAST, RECOMMENDED = "forecast.json", "recommended.toml"
MAX_TEACHERS = 16
ROUTES = (1, 2, 4, 8, 16, 32)
CHECKPOINTS, GRID_ROUTES = 4, 8  # Those of `recap diagnose`, which finds the student's run again.
DIRECTIONS = 20
"""Number of independent directions in which two runs are assumed to differ (docs/decisions/0013)."""
LEVEL = 0.95
NORMAL_QUANTILE = 1.96  # Of the same level.
ENOUGH = 0.8  # Share of what most routes save; the fewest routes that save as much are recommended.
TEACHER_KEYS = ("teacher_model", "teacher_settings", "train", "teacher_train", "negative_rate")
"""Keys of a recipe that decide what its teachers are."""
BUDGET_KEYS = ("teachers", "given_up")
"""Keys of a plan that a budget may change without making other teachers."""


def forecast(recipe: Recipe, *, runs: int = 2, max_teachers: int = MAX_TEACHERS) -> Forecast:
    """Train the few runs that are missing, forecast the rest from them, and write both forecast and recipe."""
    if runs < 2:
        raise InputError(
            f"a forecast needs at least two runs, not {runs}",
            fix="set --runs 2 or more: one run has no other to disagree with",
        )
    plan = recipe.plan()
    teachers = recipe.train_teachers(replace(plan, teachers=runs))
    ((student, report),) = train_grid(
        recipe,
        plan,
        runs=1,
        checkpoints=CHECKPOINTS,
        routes=GRID_ROUTES,
        model=recipe.config.students[0],
    ).items()
    torch.set_num_threads(recipe.threads)
    on_routes = _on_routes(student, recipe)
    costs = _Costs(recipe, teachers, report, _scoring_microseconds(recipe, teachers, on_routes))
    ensembles = _ensembles(recipe, teachers, costs)[:max_teachers]
    routes, averaging = _measure_student(recipe, student, on_routes, costs)
    result = Forecast(
        runs=runs,
        rows=len(recipe.data.valid),
        teachers=ensembles,
        routes=routes,
        averaging=averaging,
        arms=worth_of_arms(recipe),
        choice=choose(ensembles, routes, costs.student_minutes, recipe.budget),
        notes=forecast_notes(runs, DIRECTIONS),
    )
    _write(recipe, plan, result)
    _write_recommended(recipe, plan, result)
    return result


# What the runs at hand measure and cost.


def _on_routes(student: Path, recipe: Recipe) -> dict[int, nn.Module]:
    """Return the averaged student on 1, 2, 4, .. routes, chosen as the recipe does, up to as many as it has."""
    model = load_artifact(student / ARTIFACT).model
    backbone = model.model if isinstance(model, Routed) else model
    device, config = torch.device(recipe.device), recipe.config
    backbone.to(device)
    if not isinstance(backbone, Recap):
        return {1: backbone}
    routes = {
        count: choose_routes(
            backbone, count, config.route_choice, recipe.data, device, negative_rate=config.negative_rate
        )
        for count in ROUTES
    }
    return {count: Routed(backbone, chosen) for count, chosen in routes.items() if len(chosen) == count}


def _scoring_microseconds(
    recipe: Recipe, teachers: Runs, on_routes: Mapping[int, nn.Module]
) -> dict[str, float]:
    """Return the time to score a row with a teacher, and with the student on each number of routes."""
    device = torch.device(recipe.device)
    teacher = load_artifact(next(iter(teachers)) / ARTIFACT).model.to(device)
    models = {"teacher": [teacher], **{str(count): [model] for count, model in on_routes.items()}}
    seconds = scoring_seconds(models, recipe.data.valid, device)
    return {name: 1e6 * value for name, value in seconds.items()}


class _Costs:
    """What training and scoring would cost, judging by the runs at hand."""

    def __init__(
        self, recipe: Recipe, teachers: Runs, student: RunReport, microseconds: dict[str, float]
    ) -> None:
        config, probe = recipe.config, recipe.config.probe
        reports = list(teachers.values())
        self.workers, self.microseconds = recipe.runner.workers, microseconds
        self.teacher_parameters, self.student_parameters = reports[0].parameters, student.parameters
        self.teacher_minutes = mean(report.seconds.train for report in reports) / 60
        self.student_minutes = student.seconds.train / 60
        arms = len(config.student_factors) if config.l2 is None else 0
        epochs = arms * probe.rungs[0] + arms // 2 * (probe.rungs[-1] - probe.rungs[0])
        sampled = min(1.0, probe.max_rows / len(recipe.data.train))
        epoch_minutes = self.student_minutes / len(student.history) * sampled
        self.probe_minutes = epochs * epoch_minutes / self.workers if arms > 1 else 0.0

    def minutes(self, teachers: int) -> float:
        """Return the training time of `teachers` teachers and of a student that they teach."""
        waves = math.ceil(teachers / self.workers)
        return waves * self.teacher_minutes + self.probe_minutes + self.student_minutes


def _ensembles(recipe: Recipe, teachers: Runs, costs: _Costs) -> tuple[AxisChoice, ...]:
    """Return what ensembles of 1, 2, .. teachers are worth and cost."""
    tables = [LogitTable(path) for path in teacher_tables(list(teachers), "valid")]
    return tuple(
        AxisChoice(
            worth.count,
            worth.loss,
            worth.auc,
            worth.gain,
            minutes=costs.minutes(worth.count),
            parameters=worth.count * costs.teacher_parameters,
            microseconds=worth.count * costs.microseconds["teacher"],
        )
        for worth in worth_of_runs(tables, recipe.data.valid, recipe.config.negative_rate)
    )


def _measure_student(
    recipe: Recipe, student: Path, on_routes: Mapping[int, nn.Module], costs: _Costs
) -> tuple[tuple[AxisChoice, ...], tuple[AxisChoice, ...]]:
    """Return the student on each number of routes; and on one route, with its last and with its averaged weights."""
    device, valid = torch.device(recipe.device), recipe.data.valid
    on_one_route = predict(on_routes[1], valid, device)

    def measure(model: nn.Module, count: int) -> AxisChoice:
        logits = predict(model, valid, device)
        return AxisChoice(
            count,
            *compare(valid, logits, on_one_route, recipe.config.negative_rate),
            minutes=costs.student_minutes,
            parameters=costs.student_parameters,
            microseconds=costs.microseconds[str(count)],
        )

    *_, last_weights = load_estimators(student, None, "checkpoint").values()
    routes = tuple(measure(model, count) for count, model in on_routes.items())
    return routes, (measure(last_weights.to(device), 1), measure(on_routes[1], 1))


def worth_of_arms(recipe: Recipe) -> ProbeArms | None:
    """Return what the mean of the probe's arms gains; None if the recipe has probed nothing."""
    if recipe.config.l2 is not None or not (recipe.probe_directory / RESULT).is_file():
        return None
    tables, valid = finalists(recipe.probe_directory), recipe.data.valid
    for table in tables.values():
        table.check(recipe.data)
    rate = recipe.config.negative_rate
    columns = [np.asarray(table.logits_NM[:, 0], np.float64) for table in tables.values()]
    means = [np.mean(columns[:count], axis=0) for count in range(1, len(columns) + 1)]
    return ProbeArms(
        names=tuple(arm.name for arm in tables),
        rows=min(len(recipe.data.train), recipe.config.probe.max_rows),
        means=tuple(
            Worth(count, *compare(valid, logits, means[0], rate))
            for count, logits in enumerate(means, start=1)
        ),
        forecast=tuple(worth_of_runs(list(tables.values()), valid, rate) if len(tables) > 1 else ()),
    )


# Estimates and their intervals.


def worth_of_runs(tables: Sequence[LogitTable], shard: Shard, negative_rate: float = 1.0) -> list[Worth]:
    """Return what the mean of 1, 2, .. runs gains, by Eq. 6 from how far the given runs disagree; each table holds one
    run."""
    logits_NM, weights = undo_sampling(
        np.stack([table.logits_NM[:, 0] for table in tables], axis=1), shard, negative_rate
    )
    gains = curve(Cube.from_array(logits_NM[:, :, None, None]), shard.labels, "run", weights=weights)
    losses, aucs = (
        [metric(shard.labels, logits, weights) for logits in logits_NM.T]
        for metric in (metrics.logloss, metrics.auc)
    )
    worths = []
    for point in gains.forecast[:MAX_TEACHERS]:
        scatter = gain_scatter(gains, point.count)
        loss = with_run_interval(point.loss, losses, point.count, scatter)
        auc = None if point.auc is None else with_run_interval(point.auc, aucs, point.count, scatter)
        low, high = (multiple * point.gain.value for multiple in scatter)
        worths.append(Worth(point.count, loss, auc, replace(point.gain, runs_low=low, runs_high=high)))
    return worths


def gain_scatter(gains: Curve, count: int) -> tuple[float, float]:
    """Return the ends of the gain's interval over runs, as multiples of the gain of `count` runs."""
    gain = gains.forecast[count - 1].gain
    if gain.value <= 0:
        return 1.0, 1.0
    if gain.runs_low is not None and gain.runs_high is not None:
        return gain.runs_low / gain.value, gain.runs_high / gain.value
    from scipy.special import gammaincinv  # scipy.stats would take every fit a second to import.

    # The quantiles of a chi-squared distribution.
    ends = (2 * float(gammaincinv(DIRECTIONS / 2, end)) for end in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    low, high = (DIRECTIONS / end for end in ends)
    return low, high


def with_run_interval(
    expected: Estimate, alone: Sequence[float], count: int, scatter: tuple[float, float]
) -> Estimate:
    """Return a forecast for the mean of `count` other runs with its interval over runs.

    `alone` are the figures of the runs at hand. The level of single runs is uncertain by theirs and by that of the
    other runs; the gain of their mean over that level is uncertain as `scatter` says. Both count as independent. Where
    runs that disagree more are worse alone, they cancel in part, and the interval is wider than needed.
    """
    from scipy.special import stdtrit  # The inverse of Student's distribution function.

    level, gain = mean(alone), abs(mean(alone) - expected.value)
    reach = float(stdtrit(len(alone) - 1, (1 + LEVEL) / 2)) * stdev(alone)
    reach *= math.sqrt(1 / len(alone) + 1 / count)
    less, more = (1 - scatter[0]) * gain, (scatter[1] - 1) * gain
    down, up = (more, less) if expected.value < level else (less, more)  # A loss falls, an AUC rises.
    return replace(
        expected,
        runs_low=expected.value - math.hypot(reach, down),
        runs_high=expected.value + math.hypot(reach, up),
    )


def compare(
    valid: Shard, logits: Logits, base: Logits, negative_rate: float
) -> tuple[Estimate, Estimate, Estimate]:
    """Return loss, AUC, and loss saved over `base`; intervals over rows are those of the difference to `base`."""
    logits, weights = undo_sampling(logits, valid, negative_rate)
    base, _ = undo_sampling(base, valid, negative_rate)
    loss, auc = (metric(valid.labels, logits, weights) for metric in (metrics.logloss, metrics.auc))
    sign_N = np.where(np.asarray(valid.labels) == 1, -1.0, 1.0)
    change_N = np.logaddexp(0, sign_N * logits) - np.logaddexp(0, sign_N * base)
    mass_N = np.ones(len(change_N)) if weights is None else np.asarray(weights, np.float64)
    change = float(mass_N @ change_N / mass_N.sum())
    loss_error = float(np.sqrt(mass_N**2 @ (change_N - change) ** 2) / mass_N.sum())
    auc_error = metrics.auc_difference(valid.labels, logits, base, weights).standard_error
    return _estimate(loss, loss_error), _estimate(auc, auc_error), _estimate(-change, loss_error)


def _estimate(value: float, error: float) -> Estimate:
    reach = NORMAL_QUANTILE * error
    return Estimate(value, value - reach, value + reach)


# The choice, and the files that keep it.


def choose(
    teachers: Sequence[AxisChoice], routes: Sequence[AxisChoice], student_minutes: float, budget: float | None
) -> dict[str, Any]:
    """Return how many teachers are worth their time and fit the budget, and the fewest routes that bring most."""
    by_count = {choice.count: choice for choice in teachers}
    affordable = [choice.count for choice in teachers if budget is None or choice.minutes <= budget]
    num_teachers = 0
    for count in sorted(affordable):
        smaller = by_count.get(count - 1, by_count[1])
        if count >= 2 and smaller.loss.value - by_count[count].loss.value >= MIN_TEACHER_GAIN:
            num_teachers = count
    best = max(routes, key=lambda choice: choice.gain.value)
    enough = [choice for choice in routes if choice.gain.value >= ENOUGH * best.gain.value]
    return {
        "teachers": num_teachers,
        "routes": enough[0].count if best.gain.low > 0 else routes[0].count,
        "minutes": by_count[num_teachers].minutes if num_teachers else student_minutes,
    }


def _write(recipe: Recipe, plan: Plan, result: Forecast) -> None:
    """Write the forecast with all that it was made from."""
    record = {
        "kind": "forecast",
        "format": 1,
        **asdict(result),
        "split": "valid",
        "data": {"name": recipe.data.name, "fingerprint": recipe.data.fingerprint},
        "plan": asdict(plan),
        "recipe": recipe.config.model_dump(mode="json"),
        "budget": recipe.budget,
        "versions": machine.versions(),
        "machine": machine.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    write_json(recipe.out / FORECAST, record)


def _write_recommended(recipe: Recipe, plan: Plan, result: Forecast) -> None:
    """Write the recipe with the choice in it, and record its plan, so that `recap fit` keeps to what was probed."""
    choice = {key: result.choice[key] for key in ("teachers", "routes")}
    config = RecipeConfig.model_validate({**recipe.config.model_dump(), **choice})
    recommended = Recipe(
        config,
        recipe.data,
        recipe.out,
        threads=recipe.threads,
        device=recipe.device,
        runner=recipe.runner,
    )
    recommended.record(replace(plan, teachers=config.num_teachers))
    with atomic_file(recipe.out / RECOMMENDED) as file:
        file.write(config.to_toml().encode())


# The check of a forecast.


def check_forecast(out: Path, report: FitReport) -> list[str]:
    """Return how good the forecast in `out` was, now that more teachers are trained; nothing if it was of others."""
    if not (out / FORECAST).is_file():
        return []
    record = read_object(out / FORECAST, "a forecast")
    if not _has_the_same_teachers(record, report):
        return []
    runs, forecasts = record["runs"], record["teachers"]
    sentences = []
    for ensemble in report.ensembles:
        if not runs < ensemble.teachers <= len(forecasts):
            continue
        expected, measured = forecasts[ensemble.teachers - 1], ensemble.metrics.valid.raw
        for metric, key, value in (("logloss", "loss", measured.logloss), ("AUC", "auc", measured.auc)):
            if expected[key] is not None:
                estimate = Estimate(**expected[key])
                sentences.append(check_sentence(metric, ensemble.teachers, runs, estimate, value))
    return sentences


def _has_the_same_teachers(record: Mapping[str, Any], report: FitReport) -> bool:
    """Return whether a forecast's data, teachers and training, and what the probe found, are those of a report."""
    plan = {key: value for key, value in record["plan"].items() if key not in BUDGET_KEYS}
    return (
        record["data"]["fingerprint"] == report.data.fingerprint
        and all(report.plan[key] == value for key, value in plan.items())
        and all(record["recipe"][key] == report.recipe[key] for key in TEACHER_KEYS)
    )
