"""Runs × checkpoints × routes, trained and scored: the cube of logits that a diagnosis reads, and the diagnosis."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import write_logits
from recap_ctr.axes.routes import late_routes, random_routes, share_between_leaves
from recap_ctr.config import Frozen
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.diagnose import Cube, Diagnosis, diagnose, findings
from recap_ctr.diagnose.diagnosis import most_forecast
from recap_ctr.evaluation.sampling import negative_rate_shift, sampling_weights
from recap_ctr.jobs import machine
from recap_ctr.jobs.executor import Job
from recap_ctr.models.catalogue import model_class, short_name
from recap_ctr.models.recap import RecapConfig
from recap_ctr.pages.diagnosis import page
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import read_object, write_json
from recap_ctr.training.config import LOGITS, RunConfig
from recap_ctr.training.estimators import load_estimators
from recap_ctr.training.parallel import Runs
from recap_ctr.training.routes import ROUTE_SEED

DIAGNOSIS, PAGES = "diagnosis.json", "diagnosis"  # The page has its own directory: a recipe has a page, too.


def grid_run(recipe: Recipe, plan: Plan, *, checkpoints: int, routes: int, model: str) -> RunConfig:
    """Return the config that all runs of a grid share: they learn from labels alone, and keep their checkpoints.

    All are equally long: a point of the trajectory must mean the same in each.
    """
    model_config = recipe.config.model_config_of(model)
    training = recipe.student_training
    training = training.model_copy(update={"checkpoints": checkpoints, "patience": training.max_epochs})
    base = recipe.run_config(plan, model, model_config, training)
    # Routes must be the same in all runs; greedy ones, which each run chooses for itself, are not.
    choice = "late" if recipe.config.route_choice == "greedy" else recipe.config.route_choice
    has_routes = isinstance(model_config, RecapConfig)
    return replace(base, routes=routes if has_routes else 1, route_choice=choice)


def train_grid(recipe: Recipe, plan: Plan, *, runs: int, checkpoints: int, routes: int, model: str) -> Runs:
    """Train runs that keep their checkpoints and differ in their seed; finished ones are read."""
    config = grid_run(recipe, plan, checkpoints=checkpoints, routes=routes, model=model)
    directory = recipe.directory_of_runs(f"survey-{short_name(model)}", config)
    configs = {directory / f"seed-{seed}": config.with_seed(seed) for seed in range(1, runs + 1)}
    return recipe.train(configs, "runs of the diagnosis")


def score_grid(
    recipe: Recipe,
    plan: Plan,
    *,
    runs: int = 5,
    checkpoints: int = 4,
    routes: int = 8,
    model: str = "recap",
    split: str = "test",
) -> list[LogitTable]:
    """Return a table for each run, with a column for each route of each of its last checkpoints."""
    trained = train_grid(recipe, plan, runs=runs, checkpoints=checkpoints, routes=routes, model=model)
    return score_runs(recipe, list(trained), model, split)


def score_runs(recipe: Recipe, runs: Sequence[Path], model: str, split: str) -> list[LogitTable]:
    """Return a table for each run of a grid; those that are missing are written."""
    tables = {run: run / LOGITS / f"grid-{split}" for run in runs}
    jobs = [
        Job(
            run.name,
            write_grid,
            {
                "data": str(recipe.data.path),
                "run": str(run),
                "out": str(table),
                "split": split,
                "model": model,
                "has_routes": isinstance(recipe.config.model_config_of(model), RecapConfig),
                "threads": recipe.threads,
                "device": recipe.device,
            },
        )
        for run, table in tables.items()
        if not table.is_dir()
    ]
    if jobs:
        recipe.runner.run(jobs, "logits of the diagnosis")
    return [LogitTable(table) for table in tables.values()]


def diagnose_recipe(
    recipe: Recipe,
    *,
    runs: int,
    checkpoints: int,
    routes: int,
    model: str,
    command: str = "",
) -> tuple[Diagnosis, list[str]]:
    """Train what is missing, diagnose it on held-out rows, and write the figures as JSON and as a page."""
    data = recipe.data
    split, shard = list(held_out_shards(data).items())[-1]
    tables = score_grid(
        recipe,
        recipe.plan(),
        runs=runs,
        checkpoints=checkpoints,
        routes=routes,
        model=model,
        split=split,
    )
    recipe.say(f"diagnosis of {sum(len(table.estimators) for table in tables)} estimators on {split} rows")
    rate = recipe.config.negative_rate
    shares = _route_shares(recipe, recipe.config.model_config_of(model), most_forecast(routes))
    cube = Cube.from_tables(tables, shift=negative_rate_shift(rate), route_shares=shares)
    diagnosis = diagnose(cube, shard.labels, sampling_weights(shard, rate))
    sentences = findings(diagnosis)
    about = {"name": data.name, "fingerprint": data.fingerprint, "split": split}
    record = {
        **diagnosis.to_json(),
        "data": about,
        "model": model,
        "findings": sentences,
        "versions": machine.versions(),
        "machine": machine.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    write_json(recipe.out / DIAGNOSIS, record)
    page(diagnosis, sentences, about, command).write(recipe.out / PAGES)
    return diagnosis, sentences


def _route_shares(recipe: Recipe, model: Frozen, most: int) -> tuple[float, ...]:
    """Return what means over 1, 2, ... up to `most` routes of the recipe's kind remove; empty for a model without
    routes."""
    if not isinstance(model, RecapConfig):
        return ()
    if recipe.config.route_choice == "random":
        drawn = random_routes(model, most, ROUTE_SEED)
        return tuple(share_between_leaves(drawn[:count]) for count in range(1, len(drawn) + 1))
    return tuple(share_between_leaves(late_routes(model, count)) for count in range(1, most + 1))


def read_diagnosis(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """Return the diagnosis in a directory, if there is one and it is of the data with this fingerprint."""
    if not (out / DIAGNOSIS).is_file():
        return None
    record = read_object(out / DIAGNOSIS, "a diagnosis")
    return record if record["data"]["fingerprint"] == fingerprint else None


def write_grid(
    data: str, run: str, out: str, split: str, model: str, has_routes: bool, threads: int, device: str
) -> None:
    """Write the table of one run. The arguments are plain, for a job."""
    model_class(model)  # A model from outside is trusted because the user named it.
    torch.set_num_threads(threads)
    on = torch.device(device)
    columns = load_estimators(Path(run), Path(run).name, "grid" if has_routes else "checkpoint")
    models = {estimator: module.to(on) for estimator, module in columns.items()}
    write_logits(Path(out), models, PreparedData(Path(data), verify=False), split, on)
