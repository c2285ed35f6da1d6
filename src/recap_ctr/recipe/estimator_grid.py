"""Runs × checkpoints × routes, trained and scored: the cube of logits that a diagnosis reads, and the diagnosis."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import write_logits
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, Diagnosis, diagnose, findings
from recap_ctr.evaluation.sampling import negative_rate_shift, sampling_weights
from recap_ctr.jobs import machine as environment
from recap_ctr.jobs.local import Job, run_jobs
from recap_ctr.models.catalogue import model_class, short_name
from recap_ctr.models.recap import RecapConfig
from recap_ctr.pages.diagnosis import page
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import read_json, write_json
from recap_ctr.training.run import LOGITS, estimators

DIAGNOSIS, PAGES = "diagnosis.json", "diagnosis"  # the page has a directory of its own: a recipe has one, too


def survey_runs(
    recipe: Recipe, plan: Plan, *, runs: int, checkpoints: int, routes: int, model: str
) -> dict[Path, dict[str, Any]]:
    """Runs with checkpoints, and their reports; what is there is kept.

    They learn from labels alone, under the recipe's rate and regulariser, and differ in their seed.
    """
    model_config = recipe.config.settings_of(model)
    # All runs are equally long: a point of the trajectory must mean the same in each.
    settings = recipe.settings.model_copy(
        update={"checkpoints": checkpoints, "patience": recipe.settings.max_epochs}
    )
    base = recipe.run_config(plan, model, model_config, settings)
    routed = isinstance(model_config, RecapConfig)
    # Routes must be the same in all runs; greedy ones are chosen by each for itself, from late ones.
    choice = "late" if recipe.config.route_choice == "greedy" else recipe.config.route_choice
    where = recipe.place(f"survey-{short_name(model)}", base)
    configs = {
        where / f"seed-{seed}": base.with_(seed=seed, routes=routes if routed else 1, route_choice=choice)
        for seed in range(1, runs + 1)
    }
    return recipe.train(configs, "survey")


def survey(
    recipe: Recipe,
    plan: Plan,
    *,
    runs: int = 5,
    checkpoints: int = 4,
    routes: int = 8,
    model: str = "recap",
    split: str = "test",
) -> list[LogitTable]:
    """A table for each run, with a column for each route of each of its last checkpoints."""
    found = survey_runs(recipe, plan, runs=runs, checkpoints=checkpoints, routes=routes, model=model)
    routed = isinstance(recipe.config.settings_of(model), RecapConfig)
    tables = {run: run / LOGITS / f"grid-{split}" for run in found}
    jobs = [
        Job(
            run.name,
            "recap_ctr.recipe.estimator_grid:write_grid",
            {
                "data": str(recipe.data.path), "run": str(run), "out": str(table), "split": split,
                "model": model, "routed": routed, "threads": recipe.threads, "device": recipe.device,
            },
        )
        for run, table in tables.items()
        if not table.is_dir()
    ]  # fmt: skip
    if jobs:
        run_jobs(jobs, workers=recipe.workers, title="logits of the survey", quiet=recipe.quiet)
    return [LogitTable(table) for table in tables.values()]


def examine(
    recipe: Recipe, *, runs: int, checkpoints: int, routes: int, model: str, command: str = ""
) -> tuple[Diagnosis, list[str]]:
    """Train what is missing, diagnose it on held-out rows, and write the figures as JSON and as a page."""
    data = recipe.data
    split = "test" if len(data.test) else "valid"
    tables = survey(
        recipe, recipe.plan(), runs=runs, checkpoints=checkpoints, routes=routes, model=model, split=split
    )
    recipe.say(f"diagnosis of {sum(len(table.estimators) for table in tables)} estimators on {split} rows")
    shard = getattr(data, split)
    rate = recipe.config.negative_rate
    cube = Cube.from_tables(tables, shift=negative_rate_shift(rate))
    found = diagnose(cube, shard.labels, sampling_weights(shard, rate))
    said = findings(found)
    about = {"name": data.name, "fingerprint": data.fingerprint, "split": split}
    record = {
        **found.to_json(), "data": about, "model": model, "findings": said,
        "versions": environment.versions(), "machine": environment.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    write_json(recipe.out / DIAGNOSIS, record)
    page(found, said, about, command).write(recipe.out / PAGES)
    return found, said


def read_diagnosis(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """What `examine` wrote in a directory, if it did, and of these data."""
    found: dict[str, Any] | None = read_json(out / DIAGNOSIS) if (out / DIAGNOSIS).is_file() else None
    return found if found is not None and found["data"]["fingerprint"] == fingerprint else None


def write_grid(
    data: str, run: str, out: str, split: str, model: str, routed: bool, threads: int, device: str
) -> None:
    """The table of one run; the arguments are plain, for the engine."""
    model_class(model)  # one from outside is trusted because the user named it
    torch.set_num_threads(threads)
    on = torch.device(device)
    found = estimators(Path(run), Path(run).name, "grid" if routed else "checkpoint")
    models = {estimator: model.to(on) for estimator, model in found.items()}
    write_logits(Path(out), models, PreparedData(Path(data), verify=False), split, on)
