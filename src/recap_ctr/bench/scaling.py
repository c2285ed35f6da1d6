"""Estimator scaling, axis by axis: a backbone with and without each axis (the paper's Tables 2 and 3).

Each entry has a regulariser that its own probe finds; one that suits other training would be a second cause of
differences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recap_ctr.bench import tables
from recap_ctr.bench.arms import arm_of
from recap_ctr.errors import InputError
from recap_ctr.recipe.ablation import Cell, own_cell, student_run, train_cells
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import atomic_directory, make_directory
from recap_ctr.training.parallel import Runs, teacher_tables
from recap_ctr.training.report import RunReport, write_report

MARKS = ("EMA", "KD", "Routes")
RUNS = "runs"


@dataclass(frozen=True)
class Entry:
    """One entry of a table: how its runs are trained, and whether they are measured on every route."""

    name: str
    training: str
    """The words of `student_run`, such as raw, ema or ema-kd."""
    routes: bool = False
    teachers: int | None = None
    """How many of the teachers teach it, in turn over seeds; None: all, where the training has any."""
    own_l2: bool = True
    """Whether it has the regulariser that a probe of its own finds, or that of the plan."""

    @property
    def runs(self) -> str:
        """Return the name of its runs, which entries with and without routes share."""
        parts = [self.training]
        if self.teachers is not None:
            parts.append(f"from-{self.teachers}")
        return "-".join(parts if self.own_l2 else [*parts, "shared-l2"])

    @property
    def marks(self) -> dict[str, bool]:
        """Return the ticks of its line."""
        words = self.training.split("-")
        return {"EMA": "ema" in words, "KD": "kd" in words, "Routes": self.routes}


@dataclass(frozen=True)
class ScalingTable:
    """One of the tables: the model that is trained, and the entries; the others are compared with the first."""

    caption: str
    student: str
    entries: tuple[Entry, ...]
    note: str = ""
    """What the text under the table says of its entries."""


TABLES = {
    "ablation": ScalingTable(
        "Ablation of estimator scaling",
        "recap",
        (
            Entry("Recursive backbone", "raw"),
            Entry("one route in training, too", "raw-fixed"),
            Entry("by the plateau rule", "plain"),
            Entry("+ trajectory scaling", "ema"),
            Entry("+ cross-run scaling", "raw-kd"),
            Entry("+ route scaling", "raw", routes=True),
            Entry("RECAP on one route", "ema-kd"),
            Entry("RECAP", "ema-kd", routes=True),
        ),
        "One route in training, too: a step has one adapter, whose rank is larger where that keeps the model's size.",
    ),
    "fcn-scaling": ScalingTable(
        "Estimator scaling of FCN",
        "fcn",
        (
            Entry("FCN", "raw"),
            Entry("FCN by the plateau rule", "plain"),
            Entry("FCN + EMA", "ema"),
            Entry("FCN + KD", "raw-kd"),
            Entry("FCN + EMA + KD", "ema-kd"),
        ),
    ),
    "teachers": ScalingTable(
        "What teachers give, and what their soft targets give",
        "recap",
        (
            Entry("no teacher, l2 of the plan", "ema", own_l2=False),
            Entry("no teacher, own l2", "ema"),
            Entry("one teacher, l2 of the plan", "ema-kd", teachers=1, own_l2=False),
            Entry("one teacher, own l2", "ema-kd", teachers=1),
            Entry("all teachers, l2 of the plan", "ema-kd", own_l2=False),
            Entry("all teachers, own l2", "ema-kd"),
        ),
        "One teacher: the student of seed s learns from teacher s, in turn, so that the line is a mean over teachers;"
        " its own l2 was found with the first of them.",
    ),
}
"""Each entry differs from its neighbours in one thing. All have the same schedule, except the plateau rule."""


def scaling(name: str, recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what a table needs, write its reports and the table, and return it as Markdown."""
    if name not in TABLES:
        raise InputError(f"no table {name!r}", fix=f"choose from {', '.join(TABLES)}")
    student = TABLES[name].student
    plan = recipe.plan()
    wanted = cells(name, recipe, plan, list(recipe.train_teachers(plan)), seeds)
    runs = train_cells(recipe, wanted, title=student)
    reports_by_runs = {key: list(trained.values()) for key, trained in runs.items()}
    markdown, latex = render(name, reports_by_runs, note_on_l2(recipe.config, recipe.edges))
    copy_reports({f"{student}-{key}": trained for key, trained in runs.items()}, reports / name)
    tables.write_files(reports / name, name, {"md": markdown, "tex": latex})
    return markdown


def cells(name: str, recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return the cells of the table `name`, by the name of their runs."""
    if not teachers:
        raise InputError("this table compares with distillation", fix="set at least one teacher")
    student = TABLES[name].student
    wanted: dict[str, Cell] = {}
    for entry in TABLES[name].entries:
        if entry.runs in wanted:
            continue
        taught_by = teachers[: entry.teachers]
        if entry.own_l2:
            cell = own_cell(recipe, plan, student, entry.training, range(1, seeds + 1), taught_by)
        else:
            run = student_run(recipe, plan, student, entry.training, taught_by)
            cell = Cell(run, range(1, seeds + 1))
        in_turn = teacher_tables(teachers, "train") if entry.teachers is not None and taught_by else ()
        wanted[entry.runs] = replace(cell, all_teachers=in_turn)
    return wanted


def copy_reports(runs_by_training: Mapping[str, Runs], table: Path) -> None:
    """Copy only the reports to TABLE/runs/TRAINING/seed-N, in place of those that the table was made of before.

    Each table has its own reports, because trainings of the same name differ between tables, for example in their
    regulariser.
    """
    with atomic_directory(table / RUNS) as copies:
        for training, runs in runs_by_training.items():
            for report in runs.values():
                directory = copies / training / f"seed-{report.train.seed}"
                make_directory(directory)
                write_report(directory, report)


def note_on_l2(config: RecipeConfig, edges: Mapping[float, str]) -> str:
    """Return where the regularisers of a table's lines come from; `edges` are those that no probe has bounded."""
    if config.l2 is not None:
        return "All lines have the l2 that is set: none has one of its own."
    if len(config.student_factors) < 2:
        return "All lines have the l2 of the plan: the recipe has no student_factors to look for another."
    beyond = "".join(
        f" Where it is {l2:.3g}, this was the {edge} that was tried, and the best may lie beyond."
        for l2, edge in sorted(edges.items())
    )
    return f"A line's own l2 is the one that a probe of its very training found.{beyond}"


def render(name: str, reports: Mapping[str, Sequence[RunReport]], note: str = "") -> tuple[str, str]:
    """Return the table in Markdown and in LaTeX, from the reports of each entry's runs; `note` ends its notes."""
    table = TABLES[name]
    columns = [mark for mark in MARKS if any(entry.marks[mark] for entry in table.entries)]
    arms = []
    for entry in table.entries:
        marks = {mark: entry.marks[mark] for mark in columns}
        on_routes = [report.on_routes(every=entry.routes) for report in reports[entry.runs]]
        strengths = {report.train.l2 for report in on_routes}
        arms.append(arm_of(f"{entry.name} (l2 {min(strengths):.3g})", on_routes, marks=marks))
    data = reports[table.entries[0].runs][0].data.name
    caption, note = f"{table.caption} on {data}", f"{table.note} {note}".strip()
    return (
        tables.markdown(caption, arms, arms[0].name, note),
        tables.latex(caption, f"tab:{name}-{data}", arms, arms[0].name, note),
    )
