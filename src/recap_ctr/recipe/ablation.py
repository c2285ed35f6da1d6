"""A student with and without each axis of estimators: the runs behind the demo and the paper's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from recap_ctr.config import TrainConfig, parse
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.recap import RecapConfig
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import REPORT, read_report
from recap_ctr.training.routes import MAX_ROUTES
from recap_ctr.training.run import is_finished

PLAIN: dict[str, Any] = {
    "schedule": "plateau",
    "ema": None,
    "ema_epochs": [],
    "patience": 2,
    "max_epochs": 100,
}
"""Training without an average: the published schedule, whose decaying rate is a fairer rival than a constant one."""
RAW: dict[str, Any] = {"ema": None, "ema_epochs": []}
"""The recipe's own training, but without the average."""
PLAIN_FCN = "FCN, plateau rule"
"""The title of FCNs trained in this way: by the published schedule, but at the regulariser that a probe found."""
Key = TypeVar("Key")


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed, and also in their teachers where each has only some of all teachers."""

    config: RunConfig
    seeds: Sequence[int]
    all_teachers: tuple[Path, ...] = ()
    """The logit tables of all teachers, where a run learns from some of them. Seed s then learns from teacher s and
    those after it, in turn, so that the mean over seeds does not depend on one teacher's luck."""

    def run(self, seed: int) -> RunConfig:
        """Return the run of one seed."""
        run, count = self.config.with_seed(seed), len(self.all_teachers)
        if not count:
            return run
        numbers = range(seed - 1, seed - 1 + len(run.teachers))
        return run.taught_by(tuple(self.all_teachers[number % count] for number in numbers))


def ablation_cells(
    recipe: Recipe,
    plan: Plan,
    student: str,
    trainings: Sequence[str],
    seeds: Sequence[int],
    teachers: Sequence[Path],
) -> dict[str, Cell]:
    """Return the cells of one model by training, which is plain, ema, kd or ema-kd."""
    if not teachers:
        raise InputError("this table compares with distillation", fix="set at least one teacher")
    is_taught = any("kd" in training for training in trainings)
    taught = taught_plan(recipe, plan, student, teachers) if is_taught else plan
    return {
        training: Cell(
            student_run(recipe, taught if "kd" in training else plan, student, training, teachers), seeds
        )
        for training in dict.fromkeys(trainings)
    }


def taught_plan(recipe: Recipe, plan: Plan, student: str, teachers: Sequence[Path]) -> Plan:
    """Return the plan with the regulariser of a taught student, which a separate probe finds."""
    l2 = recipe.student_l2(plan, student, recipe.config.model_config_of(student), teachers)
    return replace(plan, l2=l2)


def student_run(
    recipe: Recipe, plan: Plan, student: str, training: str, teachers: Sequence[Path]
) -> RunConfig:
    """Return what a model's runs of one training have in common.

    A training is named by words: `ema` has the average of weights; `raw` is the same without it, and without both words
    it is the plateau rule; `kd` has teachers; `fixed` has one route in training, too.
    """
    words = training.split("-")
    model_config = recipe.config.model_config_of(student)
    if "fixed" in words and isinstance(model_config, RecapConfig):
        settings_of_one = {"num_adapters": model_config.depth, "binding": "tied", "sampling": "batch"}
        model_config = parse_model(student, {**model_config.model_dump(mode="json"), **settings_of_one})
    # A table compares one route with several, whether they gain or not.
    routes = recipe.config.routes or MAX_ROUTES
    settings = recipe.student_training
    if "ema" not in words:
        changes = RAW if "raw" in words else PLAIN
        settings = parse(TrainConfig, {**settings.model_dump(), **changes}, "bench")
    run = recipe.run_config(plan, student, model_config, settings)
    return replace(
        recipe.taught(run, teachers) if "kd" in words else run,
        routes=routes if isinstance(model_config, RecapConfig) else 1,
        route_choice=recipe.config.route_choice,
    )


def own_cell(
    recipe: Recipe, plan: Plan, student: str, training: str, seeds: Sequence[int], teachers: Sequence[Path]
) -> Cell:
    """Return the cell of one training, at the regulariser that a probe of exactly this training finds."""
    run = student_run(recipe, plan, student, training, teachers)
    l2 = recipe.own_l2(plan, run)
    return Cell(replace(run, train=run.train.model_copy(update={"l2": l2})), seeds)


def train_cells(recipe: Recipe, cells: Mapping[Key, Cell], *, title: str) -> dict[Key, Runs]:
    """Train all runs of all cells side by side; runs that some table trained before are reused."""
    configs: dict[Path, RunConfig] = {}
    directories: dict[Key, list[Path]] = {key: [] for key in cells}
    for key, cell in cells.items():
        for seed in cell.seeds:
            run = cell.run(seed)
            directory = directory_of(recipe, run) / f"seed-{seed}"
            configs[directory] = run
            directories[key].append(directory)
    runs = recipe.train(configs, title)
    return {key: {path: runs[path] for path in paths} for key, paths in directories.items()}


def directory_of(recipe: Recipe, config: RunConfig) -> Path:
    """Return the directory of all runs of this config, whatever their seeds; every table uses the same one."""
    averaged = config.train.ema is not None or config.train.ema_epochs
    is_raw = not averaged and config.train.schedule != PLAIN["schedule"]
    words = [word for word, on in (("ema", averaged), ("raw", is_raw), ("kd", config.teachers)) if on]
    return recipe.directory_of_runs(f"{config.model}-{'-'.join(words) or 'plain'}", config)


def finished_runs(recipe: Recipe, config: RunConfig) -> Runs:
    """Return all runs of this config that any table has finished, in the order of their seeds."""
    runs = [
        (path.parent, read_report(path.parent))
        for path in directory_of(recipe, config).glob(f"seed-*/{REPORT}")
        if is_finished(path.parent, config)
    ]
    return dict(sorted(runs, key=lambda run: run[1].train.seed))
