"""Estimator scaling taken apart: the same backbone with and without each axis (the paper's Tables 2 and 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from recap_ctr.bench import tables
from recap_ctr.config import TrainConfig, parse
from recap_ctr.errors import InputError
from recap_ctr.models.recap import RecapConfig
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import atomic_file, write_json
from recap_ctr.training.run import REPORT, RunConfig, is_finished, read_report, teacher_tables

PLAIN: dict[str, Any] = {
    "schedule": "plateau",
    "ema": None,
    "ema_epochs": [],
    "patience": 2,
    "max_epochs": 100,
}
"""Training without an average: the published protocol, whose decaying rate is a fairer rival than a constant one."""


Runs = dict[Path, dict[str, Any]]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Line:
    """One line of a table: which training it reads, and on how many routes."""

    name: str
    ema: bool
    kd: bool
    routes: bool = False

    @property
    def training(self) -> str:
        return "-".join(word for word, on in (("ema", self.ema), ("kd", self.kd)) if on) or "plain"


@dataclass(frozen=True)
class Repeated:
    """Runs that differ in their seed alone."""

    config: RunConfig
    seeds: Sequence[int]


BENCHES = {
    "ablation": (
        Line("Recursive backbone", False, False),
        Line("+ trajectory scaling", True, False),
        Line("+ cross-run scaling", False, True),
        Line("+ route scaling", False, False, True),
        Line("RECAP", True, True, True),
    ),
    "fcn-scaling": (
        Line("FCN", False, False),
        Line("FCN + EMA", True, False),
        Line("FCN + KD", False, True),
        Line("FCN + EMA + KD", True, True),
    ),
}


def bench(name: str, recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what the table needs, for each seed; write its reports and the table; return it as Markdown."""
    if name not in BENCHES:
        raise InputError(f"no table {name!r}", fix=f"known are {', '.join(BENCHES)}, overview and variance")
    student = _student(name)
    plan = recipe.plan()
    wanted = cells(name, recipe, plan, list(recipe.teachers(plan)), seeds)
    found = train_cells(recipe, wanted, title=student)
    by_training = {training: list(runs.values()) for training, runs in found.items()}
    table = render(name, by_training)
    copy_reports({f"{student}-{training}": runs for training, runs in found.items()}, reports)
    directory = reports / name
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("md", table[0]), ("tex", table[1])):
        with atomic_file(directory / f"{name}.{suffix}") as file:
            file.write(text.encode())
    return table[0]


def _student(name: str) -> str:
    return "recap" if name == "ablation" else "fcn"


def cells(name: str, recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Repeated]:
    """What a table of this module is made of."""
    # What matters most comes first, should time run out.
    lines = sorted(BENCHES[name], key=lambda line: -line.ema - line.kd)
    return cells_of(
        recipe, plan, _student(name), [line.training for line in lines], range(1, seeds + 1), teachers
    )


def cells_of(
    recipe: Recipe,
    plan: Plan,
    student: str,
    trainings: Sequence[str],
    seeds: Sequence[int],
    teachers: Sequence[Path],
) -> dict[str, Repeated]:
    """Cells of one model, by training: plain, ema, kd, ema-kd."""
    if not teachers:
        raise InputError("this table compares with distillation", fix="give at least one teacher")
    needs = any("kd" in training for training in trainings)
    own = taught(recipe, plan, student, teachers) if needs else plan
    return {
        training: Repeated(
            run_of(recipe, own if "kd" in training else plan, student, training, teachers), seeds
        )
        for training in dict.fromkeys(trainings)
    }


def taught(recipe: Recipe, plan: Plan, student: str, teachers: Sequence[Path]) -> Plan:
    """The plan with the regulariser of a taught student, which a probe of its own finds."""
    l2 = recipe.student_l2(plan, student, recipe.config.settings_of(student), teachers)
    return replace(plan, l2=l2)


def train_cells(recipe: Recipe, cells: Mapping[Key, Repeated], *, title: str) -> dict[Key, Runs]:
    """All runs of all cells, side by side; what any table trained before is found again."""
    configs: dict[Path, RunConfig] = {}
    where: dict[Key, list[Path]] = {key: [] for key in cells}
    for key, cell in cells.items():
        for seed in cell.seeds:
            path = stage(recipe, cell.config) / f"seed-{seed}"
            configs[path] = replace(cell.config, train=cell.config.train.model_copy(update={"seed": seed}))
            where[key].append(path)
    done = recipe.train(configs, title)
    return {key: {path: done[path] for path in paths} for key, paths in where.items()}


def stage(recipe: Recipe, config: RunConfig) -> Path:
    """Where runs of these settings are, whatever their seeds: the same place for every table."""
    averaged = config.train.ema is not None or config.train.ema_epochs
    words = [word for word, on in (("ema", averaged), ("kd", config.teachers)) if on]
    return recipe.place(f"{config.model}-{'-'.join(words) or 'plain'}", config)


def finished(recipe: Recipe, config: RunConfig) -> Runs:
    """All runs of these settings that any table has finished, by seed."""
    found = [
        (path.parent, read_report(path.parent))
        for path in stage(recipe, config).glob(f"seed-*/{REPORT}")
        if is_finished(path.parent, config)
    ]
    return dict(sorted(found, key=lambda one: int(one[1]["train"]["seed"])))


def copy_reports(found: Mapping[str, Runs], reports: Path) -> None:
    """Reports alone, as REPORTS/recipe/TRAINING/seed-N/report.json: small enough to keep, and once for all tables."""
    for training, runs in found.items():
        for report in runs.values():
            target = reports / "recipe" / training / f"seed-{report['train']['seed']}"
            target.mkdir(parents=True, exist_ok=True)
            write_json(target / REPORT, report)


def render(name: str, by_training: dict[str, list[dict[str, Any]]]) -> tuple[str, str]:
    """The table in Markdown and in LaTeX, from the reports of each training."""
    lines = BENCHES[name]
    arms = []
    for line in lines:
        reports = [on_routes(report, all_of_them=line.routes) for report in by_training[line.training]]
        marks = {"EMA": line.ema, "KD": line.kd}
        if any(one.routes for one in lines):
            marks["Routes"] = line.routes
        arms.append(tables.arm_of(line.name, reports, marks=marks))
    data = by_training[lines[0].training][0]["data"]["name"]
    caption = (
        f"{'Ablation of estimator scaling' if name == 'ablation' else 'Estimator scaling of FCN'} on {data}"
    )
    return (
        tables.markdown(caption, arms, lines[0].name),
        tables.latex(caption, f"tab:{name}-{data}", arms, lines[0].name),
    )


def on_routes(report: dict[str, Any], *, all_of_them: bool) -> dict[str, Any]:
    """The report with the figures of one route, or of the mean over all."""
    by_routes = report["metrics_by_routes"]
    if not by_routes:
        return report
    count = max(by_routes, key=int) if all_of_them else min(by_routes, key=int)
    return {**report, "metrics": by_routes[count]}


def run_of(recipe: Recipe, plan: Plan, student: str, training: str, teachers: Sequence[Path]) -> RunConfig:
    """What a model's runs of one training have in common."""
    model_config = recipe.config.settings_of(student)
    settings = recipe.settings
    if "ema" not in training:
        settings = parse(TrainConfig, {**settings.model_dump(), **PLAIN}, "bench")
    return replace(
        recipe.run_config(plan, student, model_config, settings),
        teachers=teacher_tables(teachers, "train") if "kd" in training else (),
        routes=recipe.config.routes if isinstance(model_config, RecapConfig) else 1,
        route_choice=recipe.config.route_choice,
    )
