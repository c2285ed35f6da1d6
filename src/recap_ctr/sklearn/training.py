"""Train what the parameters of a CTRClassifier ask for: one run, or a recipe with teachers or a probe."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from sklearn.utils import check_random_state

from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs.machine import pick_device
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.config import TEACHER_SEEDS, RecipeConfig
from recap_ctr.recipe.stages import Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import FitReport, RouteChoice, RunReport
from recap_ctr.training.run import run

TRAINING = (
    "learning_rate",
    "l2",
    "batch_size",
    "max_epochs",
    "patience",
    "update",
    "schedule",
    "ema",
    "ema_epochs",
    "kd_weight",
)
"""The parameters of a classifier that are settings of TrainConfig."""
PROBE = "probe"
ORIGIN = "CTRClassifier"
Parameters = Mapping[str, Any]


class _Settings(Frozen):
    """The parameters of a classifier that neither TrainConfig nor the config of a model checks."""

    validation_fraction: float = Field(gt=0, lt=1)
    calibration: Literal["affine", "isotonic"]
    negative_rate: float = Field(gt=0, le=1)
    teachers: NonNegativeInt
    routes: PositiveInt | None
    route_choice: RouteChoice
    budget: PositiveFloat | None
    threads: PositiveInt


def config_from(parameters: Parameters) -> RunConfig | RecipeConfig:
    """Return what the parameters of a classifier ask for, checked: a recipe if there are teachers or a probe."""
    names = _Settings.model_fields
    settings = parse(_Settings, {name: parameters[name] for name in names}, ORIGIN)
    is_probed = parameters["l2"] == PROBE
    is_recipe = settings.teachers > 0 or is_probed
    values = {name: parameters[name] for name in TRAINING} | {"l2": None if is_probed else parameters["l2"]}
    chosen = {name: value for name, value in values.items() if value is not None}
    seed = _seed(parameters["random_state"])
    if is_recipe and seed >= 0:
        seed %= TEACHER_SEEDS
    training = parse(TrainConfig, {**chosen, "seed": seed}, ORIGIN)
    device = pick_device(parameters["device"])
    model = parameters["model"] or ("recap" if settings.teachers else "fcn")
    if is_recipe:
        return _recipe_config(parameters, settings, model, training, set(chosen))
    return RunConfig(
        model=model,
        model_config=parse_model(model, dict(parameters["model_settings"] or {})),
        train=training,
        calibration=settings.calibration,
        negative_rate=settings.negative_rate,
        train_baseline=False,
        report_fields=False,
        threads=settings.threads,
        device=device,
        routes=settings.routes or 1,
        route_choice=settings.route_choice,
    )


def _seed(random_state: Any) -> int:
    """Return a whole number as it is, so that `recap train --seed` trains the same model; or draw one."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _recipe_config(
    parameters: Parameters, settings: _Settings, model: str, training: TrainConfig, chosen: set[str]
) -> RecipeConfig:
    """Return the recipe; of `training` it gets only the settings that were chosen, and else has its own."""
    model_settings = _plain_settings("recap" if model == "auto" else model, parameters["model_settings"])
    teacher_model, teacher_settings = parameters["teacher_model"], parameters["teacher_settings"]
    if settings.teachers == 0 and model != "auto":
        # Without teachers the probe trains models of the classifier's own kind.
        teacher_model, teacher_settings = model, model_settings
    train = training.model_dump(include=chosen)
    values = {
        "model": model,
        "model_settings": model_settings,
        "teachers": settings.teachers,
        "teacher_model": teacher_model,
        "teacher_settings": _plain_settings(teacher_model, teacher_settings),
        "routes": settings.routes,
        "route_choice": settings.route_choice,
        "l2": train.pop("l2", None),
        "learning_rate": train.pop("learning_rate", None),
        "train": train,
        "calibration": settings.calibration,
        "negative_rate": settings.negative_rate,
        "seed": training.seed,
    }
    return parse(RecipeConfig, {name: value for name, value in values.items() if value is not None}, ORIGIN)


def _plain_settings(model: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a model's settings as plain JSON values, checked."""
    return parse_model(model, dict(settings or {})).model_dump(mode="json", exclude_unset=True)


def seed_of(config: RunConfig | RecipeConfig) -> int:
    """Return the seed of the model, or of the student."""
    return config.seed if isinstance(config, RecipeConfig) else config.train.seed


def train(
    config: RunConfig | RecipeConfig, parameters: Parameters, data: PreparedData, out: Path
) -> RunReport | FitReport:
    """Train in the directory `out`, and return the report that the command would write."""
    quiet = not parameters["verbose"]
    if isinstance(config, RunConfig):
        return run(config, data, out, quiet=quiet)
    budget = parameters["budget"]
    recipe = Recipe(
        config,
        data,
        out,
        threads=int(parameters["threads"]),
        device=pick_device(parameters["device"]),
        budget=None if budget is None else float(budget),
        quiet=quiet,
    )
    return recipe.run()


def recipe_to_repeat(config: RecipeConfig, report: FitReport, parameters: Parameters) -> dict[str, Any]:
    """Return the parameters of a recipe as they were asked for, not as the probe found them.

    So a classifier that is loaded and fitted again looks for l2 again.
    """
    names = {"teacher_model", "teacher_settings", "route_choice", "l2", "learning_rate"}
    values = config.model_dump(mode="json", include=names) | {"teachers": report.plan["teachers"]}
    return values | ({"l2": PROBE} if parameters["l2"] == PROBE else {})


@contextmanager
def torch_left_alone() -> Iterator[None]:
    """Restore torch's random state and threads at the end: a run changes both, and the process is the caller's."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
