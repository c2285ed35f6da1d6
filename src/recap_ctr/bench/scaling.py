"""Estimator scaling, axis by axis: a backbone with and without each of them (the paper's Tables 2 and 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recap_ctr.bench import tables
from recap_ctr.bench.arms import arm_of
from recap_ctr.errors import InputError
from recap_ctr.recipe.ablation import Cell, ablation_cells, train_cells
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import RunReport, write_report


@dataclass(frozen=True)
class Entry:
    """One entry of a table: how its runs are trained, and whether they are measured on every route."""

    name: str
    ema: bool
    kd: bool
    routes: bool = False

    @property
    def training(self) -> str:
        """Return the name of the training: plain, ema, kd or ema-kd."""
        return "-".join(word for word, on in (("ema", self.ema), ("kd", self.kd)) if on) or "plain"


@dataclass(frozen=True)
class ScalingTable:
    """One of the two tables: the model that is trained, and the entries; the others are compared with the first."""

    caption: str
    student: str
    entries: tuple[Entry, ...]


TABLES = {
    "ablation": ScalingTable(
        "Ablation of estimator scaling",
        "recap",
        (
            Entry("Recursive backbone", ema=False, kd=False),
            Entry("+ trajectory scaling", ema=True, kd=False),
            Entry("+ cross-run scaling", ema=False, kd=True),
            Entry("+ route scaling", ema=False, kd=False, routes=True),
            Entry("RECAP", ema=True, kd=True, routes=True),
        ),
    ),
    "fcn-scaling": ScalingTable(
        "Estimator scaling of FCN",
        "fcn",
        (
            Entry("FCN", ema=False, kd=False),
            Entry("FCN + EMA", ema=True, kd=False),
            Entry("FCN + KD", ema=False, kd=True),
            Entry("FCN + EMA + KD", ema=True, kd=True),
        ),
    ),
}


def scaling(name: str, recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what a table needs, write its reports and the table, and return it as Markdown."""
    if name not in TABLES:
        raise InputError(f"no table {name!r}", fix=f"choose from {', '.join(TABLES)}")
    student = TABLES[name].student
    plan = recipe.plan()
    wanted = cells(name, recipe, plan, list(recipe.train_teachers(plan)), seeds)
    runs = train_cells(recipe, wanted, title=student)
    markdown, latex = render(name, {training: list(trained.values()) for training, trained in runs.items()})
    copy_reports({f"{student}-{training}": trained for training, trained in runs.items()}, reports)
    tables.write_files(reports / name, name, {"md": markdown, "tex": latex})
    return markdown


def cells(name: str, recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return the cells of the table `name`, by training."""
    # What matters most comes first, in case time runs out.
    entries = sorted(TABLES[name].entries, key=lambda entry: -entry.ema - entry.kd)
    trainings = [entry.training for entry in entries]
    return ablation_cells(recipe, plan, TABLES[name].student, trainings, range(1, seeds + 1), teachers)


def copy_reports(runs_by_training: Mapping[str, Runs], reports: Path) -> None:
    """Copy the reports alone to REPORTS/recipe/TRAINING/seed-N: they are small, and all tables share them."""
    for training, runs in runs_by_training.items():
        for report in runs.values():
            directory = reports / "recipe" / training / f"seed-{report.train.seed}"
            directory.mkdir(parents=True, exist_ok=True)
            write_report(directory, report)


def render(name: str, reports: Mapping[str, Sequence[RunReport]]) -> tuple[str, str]:
    """Return the table in Markdown and in LaTeX, from the reports of each training."""
    table = TABLES[name]
    has_routes = any(entry.routes for entry in table.entries)
    arms = []
    for entry in table.entries:
        marks = {"EMA": entry.ema, "KD": entry.kd, **({"Routes": entry.routes} if has_routes else {})}
        on_routes = [report.on_routes(every=entry.routes) for report in reports[entry.training]]
        arms.append(arm_of(entry.name, on_routes, marks=marks))
    baseline = table.entries[0]
    data = reports[baseline.training][0].data.name
    caption = f"{table.caption} on {data}"
    return (
        tables.markdown(caption, arms, baseline.name),
        tables.latex(caption, f"tab:{name}-{data}", arms, baseline.name),
    )
