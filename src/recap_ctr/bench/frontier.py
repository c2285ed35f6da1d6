"""AUC against stored parameters: single models, larger ones, ensembles and RECAP (the paper's Figures 1d and 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recap_ctr.bench import capacity, figures, table1
from recap_ctr.bench.tables import NONE, grid, spread
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.evaluation.evaluate import Metrics
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.ablation import Cell, ablation_cells, finished_runs, train_cells
from recap_ctr.recipe.report import measure_ensemble
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import ARTIFACT, LOGITS
from recap_ctr.training.parallel import Runs

RECAP = "RECAP"
OTHERS = {
    table1.Treatment.AS_PUBLISHED: ("other models", ""),
    table1.Treatment.AVERAGED: ("others, averaged", " + EMA"),
    table1.Treatment.TUNED: ("others, tuned", " + EMA, tuned"),
}
"""The kind of point of table 1's models, and the end of their names, by treatment."""
KINDS = ("single model", "ensemble", "capacity", "other models", RECAP, "others, averaged", "others, tuned")
MAX_ENSEMBLES = 12  # Ensembles of one size that are measured; their mean stands for the size.
SHOWN = 4.0  # How far below one teacher the figure reaches, in units of the teacher's distance from the best.
HEADER = ["model", "kind", "runs", "parameters", "AUC", "cost", "on the frontier"]


@dataclass(frozen=True)
class Point:
    """One way to spend parameters, with the AUC of each run."""

    name: str
    kind: str
    runs: int
    parameters: int
    auc: tuple[float, ...]
    cost: float | None = None
    """Time to score, relative to one teacher."""
    best: bool = False
    """Whether no other has a higher AUC with no more parameters."""
    valid_auc: tuple[float, ...] = ()
    """The same on validation rows, which decide which of several is named as the best; empty for models of table 1."""


def mark_frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points with those on the frontier marked."""

    def is_beaten(point: Point) -> bool:
        return any(
            other.parameters <= point.parameters
            and mean(other.auc) >= mean(point.auc)
            and (other.parameters, mean(other.auc)) != (point.parameters, mean(point.auc))
            for other in points
        )

    return [replace(point, best=not is_beaten(point)) for point in points]


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return students, and FCNs of other shapes: what the table is made of apart from the teachers."""
    students = ablation_cells(recipe, plan, "recap", ["ema-kd"], range(1, seeds + 1), teachers)
    shapes = capacity.cells(recipe, plan, teachers, seeds)
    # An FCN of the teachers' shape would only be another teacher.
    teacher = plan.arm.model_config(recipe.config.teacher_model, recipe.teacher_model_config)
    others = {_name(shape): cell for shape, cell in shapes.items() if cell.config.model_config != teacher}
    return {RECAP: students["ema-kd"], **others}


def frontier(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write numbers, table and figure, and return the table as Markdown."""
    plan = recipe.plan()
    teachers = recipe.train_teachers(plan)
    wanted = cells(recipe, plan, list(teachers), seeds)
    train_cells(recipe, wanted, title="frontier")
    split = next(iter(teachers.values())).metrics.split
    # Runs that other tables trained are used too.
    runs = {name: finished_runs(recipe, cell.config) for name, cell in wanted.items()}
    points = mark_frontier(_points(recipe, teachers, runs.pop(RECAP), runs, split, reports))
    text = table_text(points, split)
    about = {"data": recipe.data.name, "split": split}

    def draw(figure: Figure) -> None:
        _draw(figure, points, f"AUC for the parameters stored, {recipe.data.name}", split)

    figures.publish(reports / "frontier", text, about, [asdict(point) for point in points], draw, height=4.4)
    return text


def _points(
    recipe: Recipe, teachers: Runs, students: Runs, others: Mapping[str, Runs], split: str, reports: Path
) -> list[Point]:
    """Return all points, in the order of the table: one teacher first, RECAP last."""
    members, size = list(teachers), next(iter(teachers.values())).parameters
    title = recipe.config.teacher_model.upper()
    ensembles = {f"{count} × {title}": count for count in range(2, len(members) + 1)}
    costs = _costs(
        recipe,
        {
            title: members[:1],
            **{name: members[:count] for name, count in ensembles.items()},
            **{name: list(runs)[:1] for name, runs in others.items()},
            RECAP: list(students)[:1],
        },
    )
    return [
        _point(title, "single model", teachers, split, costs),
        *(
            Point(
                name,
                "ensemble",
                len(measured),
                count * size,
                tuple(metrics.on(split).raw.auc for metrics in measured),
                costs[name],
                valid_auc=tuple(metrics.valid.raw.auc for metrics in measured),
            )
            for name, count in ensembles.items()
            if (measured := _measure_ensembles(recipe, members, count))
        ),
        *(_point(name, "capacity", runs, split, costs) for name, runs in others.items()),
        *(
            point
            for treatment in table1.Treatment
            for point in _models_of_table1(reports, split, recipe.data, treatment)
        ),
        _point(RECAP, RECAP, students, split, costs),
    ]


def _measure_ensembles(recipe: Recipe, teachers: Sequence[Path], count: int) -> list[Metrics]:
    """Return the figures of ensembles of `count` teachers, for all choices of them, or for as many as are enough."""
    chosen = list(combinations(teachers, count))
    some = chosen[:: -(-len(chosen) // MAX_ENSEMBLES)]
    return [
        measure_ensemble(recipe.config, recipe.data, [run / LOGITS for run in runs]).metrics for runs in some
    ]


def _name(shape: capacity.Shape) -> str:
    branches = f", {shape.branches} branches" if shape.branches > 1 else ""
    return f"FCN, {shape.layers} layers{branches}"


def _point(name: str, kind: str, runs: Runs, split: str, costs: Mapping[str, float]) -> Point:
    reports = list(runs.values())
    aucs = tuple(report.metrics.on(split).raw.auc for report in reports)
    valid_aucs = tuple(report.metrics.valid.raw.auc for report in reports)
    return Point(name, kind, len(reports), reports[0].parameters, aucs, costs[name], valid_auc=valid_aucs)


def _models_of_table1(
    reports: Path, split: str, data: PreparedData, treatment: table1.Treatment
) -> list[Point]:
    """Return the models of table 1 that have reports on these data."""
    kind, suffix = OTHERS[treatment]
    return [
        Point(arm.name + suffix, kind, len(arm.seeds), arm.parameters, arm.figures["auc"])
        for name, arm in table1.read_arms(reports, treatment, data).items()
        if name != table1.OURS and arm.split == split and arm.parameters is not None
    ]


def _costs(recipe: Recipe, runs: Mapping[str, Sequence[Path]]) -> dict[str, float]:
    """Return the time to score with all runs of each entry, relative to the first entry."""
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    loaded = {
        path: load_artifact(path / ARTIFACT).model.to(device)
        for path in {path for paths in runs.values() for path in paths}
    }
    _, shard = held_out_shards(recipe.data).popitem()
    models = {name: [loaded[path] for path in paths] for name, paths in runs.items()}
    return relative_costs(models, shard, device)


def table_text(points: Sequence[Point], split: str) -> str:
    """Return the table with its findings as Markdown."""
    return "\n".join([*_markdown(points), "", *_findings(points, split), ""])


def _markdown(points: Sequence[Point]) -> list[str]:
    return grid(
        HEADER,
        [
            [
                point.name,
                point.kind,
                str(point.runs),
                f"{point.parameters:,}",
                spread(point.auc, 3, 100),
                NONE if point.cost is None else f"{point.cost:.2f}",
                "✓" if point.best else "",
            ]
            for point in points
        ],
    )


def _findings(points: Sequence[Point], split: str) -> list[str]:
    teacher, recap = points[0], points[-1]

    def gain(point: Point) -> str:
        return (
            f"{100 * (mean(point.auc) - mean(teacher.auc)):+.3f} at {point.parameters / teacher.parameters:.2f} times"
            " the parameters"
        )

    gains = [f"RECAP {gain(recap)}"]
    for kind, name in (("ensemble", "the best ensemble"), ("capacity", "the best other FCN")):
        of_kind = [point for point in points if point.kind == kind]
        if of_kind:
            best = max(of_kind, key=lambda point: mean(point.valid_auc))
            gains.append(f"{name} ({best.name.removeprefix('FCN, ')}) {gain(best)}")
    return [
        f"On {split} rows, AUC in points; cost is the time to score relative to one {teacher.name}, same process,"
        " interleaved. On the frontier: no other model has a higher AUC with no more parameters. The AUC of an ensemble"
        " is the mean over the choices of its members.",
        f"Over one {teacher.name}, in points: {'; '.join(gains)}. Validation rows say which is the best.",
    ]


def _draw(figure: Figure, points: Sequence[Point], subject: str, split: str) -> None:
    """Draw the better models; those far below are only in the table."""
    figure.suptitle(subject, parse_math=False)
    axes = figure.subplots()
    teacher, top = mean(points[0].auc), max(mean(point.auc) for point in points)
    floor = teacher - SHOWN * max(top - teacher, 1e-4)
    shown = [point for point in points if mean(point.auc) >= floor]
    hidden = len(points) - len(shown)
    _draw_points(axes, shown)
    figures.parameter_axis(axes, log=True)
    axes.set_ylabel(f"{split} AUC (points)")
    title = f"not shown: {hidden} below {100 * floor:.1f}" if hidden else None
    figures.legend(figure, axes, columns=7, title=title)
    in_order = sorted(
        shown, key=lambda point: (not point.best, point.kind in {kind for kind, _ in OTHERS.values()})
    )
    figures.write_names(
        figure,
        axes,
        [
            figures.Name(
                point.name.removeprefix("FCN, "),
                point.parameters,
                100 * mean(point.auc),
                KINDS.index(point.kind),
            )
            for point in in_order
        ],
    )


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the frontier, and a series for each kind of point."""
    edge = sorted((point for point in points if point.best), key=lambda point: point.parameters)
    axes.step(
        [point.parameters for point in edge],
        [100 * mean(point.auc) for point in edge],
        where="post",
        color=figures.PALE,
        linewidth=1,
        zorder=1,
        label="frontier",
    )
    for index, kind in enumerate(KINDS):
        of_kind = [point for point in points if point.kind == kind]
        if of_kind:
            xs, ys = [point.parameters for point in of_kind], [100 * mean(point.auc) for point in of_kind]
            figures.series(axes, index, xs, ys, kind, linestyle="", markersize=9 if kind == RECAP else 5)
