"""AUC against stored parameters: single models, larger ones, ensembles and RECAP (the paper's Figures 1d and 4)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import nn

from recap_ctr.bench import capacity, figures, table1
from recap_ctr.bench.overview import held_out
from recap_ctr.bench.scaling import Repeated, Runs, cells_of, finished, train_cells
from recap_ctr.bench.tables import NONE, grid, spread
from recap_ctr.data.shards import PreparedData
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.run import ARTIFACT

RECAP = "RECAP"
OTHERS, AVERAGED = "other models", "others, averaged"
KINDS = ("single model", "ensemble", "capacity", OTHERS, RECAP, AVERAGED)
SHOWN = 4.0  # how far below one teacher the figure reaches, in its distance from the best
HEADER = ["model", "kind", "runs", "parameters", "AUC", "cost", "on the frontier"]


@dataclass(frozen=True)
class Point:
    """A way to spend parameters: one AUC for each run."""

    name: str
    kind: str
    runs: int
    parameters: int
    auc: tuple[float, ...]
    cost: float | None = None
    """Time to score, over that of one teacher."""
    best: bool = False
    """Whether no other has a higher AUC at no more parameters."""


def mark(points: Sequence[Point]) -> list[Point]:
    """The same points, those on the frontier marked."""

    def beaten(one: Point) -> bool:
        return any(
            other.parameters <= one.parameters
            and mean(other.auc) >= mean(one.auc)
            and (other.parameters, mean(other.auc)) != (one.parameters, mean(one.auc))
            for other in points
        )

    return [replace(one, best=not beaten(one)) for one in points]


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Repeated]:
    """What the table is made of, beside the teachers: students, and FCN of other shapes."""
    students = cells_of(recipe, plan, "recap", ["ema-kd"], range(1, seeds + 1), teachers)["ema-kd"]
    shapes = capacity.cells(recipe, plan, teachers, seeds)
    # One of the teachers' own shape is a teacher from another seed.
    own_config = plan.arm.model_config(recipe.config.teacher_model, recipe.teacher_config)
    others = {_name(shape): cell for shape, cell in shapes.items() if cell.config.model_config != own_config}
    return {RECAP: students, **others}


def frontier(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing; write numbers, table and figure; return the table as Markdown."""
    plan = recipe.plan()
    teachers = recipe.teachers(plan)
    members = list(teachers)
    wanted = cells(recipe, plan, members, seeds)
    train_cells(recipe, wanted, title="frontier")
    split = held_out(teachers[members[0]])
    runs = {name: finished(recipe, cell.config) for name, cell in wanted.items()}
    students = runs.pop(RECAP)
    title, size = recipe.config.teacher_model.upper(), teachers[members[0]]["parameters"]
    ensembles = {f"{one['teachers']} × {title}": one for one in recipe.ensembles(members)[1:]}
    costs = _costs(
        recipe,
        {
            title: members[:1],
            **{name: members[: one["teachers"]] for name, one in ensembles.items()},
            **{name: list(found)[:1] for name, found in (*runs.items(), (RECAP, students))},
        },
    )
    points = mark(
        [
            _point(title, "single model", teachers, split, costs),
            *(
                Point(
                    name, "ensemble", 1, one["teachers"] * size, (one["metrics"][split]["raw"]["auc"],), costs[name]
                )
                for name, one in ensembles.items()
            ),
            *(_point(name, "capacity", found, split, costs) for name, found in runs.items()),
            *_others(reports, split, recipe.data, averaged=False),
            *_others(reports, split, recipe.data, averaged=True),
            _point(RECAP, RECAP, students, split, costs),
        ]
    )  # fmt: skip
    text = "\n".join([*_markdown(points), "", *_findings(points, split), ""])
    about = {"data": recipe.data.name, "split": split}

    def draw(figure: Figure) -> None:
        _draw(figure, points, f"AUC for the parameters stored, {recipe.data.name}", split)

    figures.publish(reports / "frontier", text, about, [asdict(point) for point in points], draw, height=4.4)
    return text


def _name(shape: capacity.Shape) -> str:
    heads = f", {shape.heads} heads" if shape.heads > 1 else ""
    return f"FCN, {shape.layers} layers{heads}"


def _point(name: str, kind: str, runs: Runs, split: str, costs: dict[str, float]) -> Point:
    found = list(runs.values())
    aucs = tuple(report["metrics"][split]["raw"]["auc"] for report in found)
    return Point(name, kind, len(found), found[0]["parameters"], aucs, costs[name])


def _others(reports: Path, split: str, data: PreparedData, *, averaged: bool) -> list[Point]:
    """The models of table 1, as far as their reports on these data are there."""
    kind, mark = (AVERAGED, " + EMA") if averaged else (OTHERS, "")
    return [
        Point(arm.name + mark, kind, len(arm.seeds), arm.parameters, arm.figures["auc"])
        for name, arm in table1.read_arms(reports, averaged=averaged, data=data).items()
        if name != table1.OURS and arm.split == split and arm.parameters is not None
    ]


def _costs(recipe: Recipe, models: dict[str, Sequence[Path]]) -> dict[str, float]:
    """Time to score, over that of the first entry."""
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    loaded: dict[Path, nn.Module] = {}
    for path in {path for paths in models.values() for path in paths}:
        loaded[path] = load_artifact(path / ARTIFACT).model.to(device)
    shard = recipe.data.test if len(recipe.data.test) else recipe.data.valid
    return relative_costs(
        {name: [loaded[path] for path in paths] for name, paths in models.items()}, shard, device
    )


def _markdown(points: Sequence[Point]) -> list[str]:
    return grid(
        HEADER,
        [
            [
                point.name, point.kind, str(point.runs), f"{point.parameters:,}", spread(point.auc, 3, 100),
                NONE if point.cost is None else f"{point.cost:.2f}", "✓" if point.best else "",
            ]
            for point in points
        ],
    )  # fmt: skip


def _findings(points: Sequence[Point], split: str) -> list[str]:
    one, recap = points[0], points[-1]
    said = [
        f"On {split} rows, AUC in points; cost is the time to score relative to one {one.name}, same process,"
        " interleaved. On the frontier: no other model has a higher AUC with no more parameters."
    ]

    def gain(point: Point) -> str:
        return (
            f"{100 * (mean(point.auc) - mean(one.auc)):+.3f} at {point.parameters / one.parameters:.2f} times"
            " the parameters"
        )

    told = [f"RECAP {gain(recap)}"]
    for kind, name in (("ensemble", "the best ensemble"), ("capacity", "the best other FCN")):
        own = [point for point in points if point.kind == kind]
        if own:
            best = max(own, key=lambda point: mean(point.auc))
            told.append(f"{name} ({best.name.removeprefix('FCN, ')}) {gain(best)}")
    said.append(f"Over one {one.name}, in points: {'; '.join(told)}.")
    return said


def _draw(figure: Figure, points: Sequence[Point], subject: str, split: str) -> None:
    """Where the better ones are; what lies far below is in the table alone."""
    figure.suptitle(subject, parse_math=False)
    axes = figure.subplots()
    one, top = mean(points[0].auc), max(mean(point.auc) for point in points)
    floor = one - SHOWN * max(top - one, 1e-4)
    shown = [point for point in points if mean(point.auc) >= floor]
    hidden = len(points) - len(shown)
    edge = sorted((point for point in shown if point.best), key=lambda point: point.parameters)
    axes.step(
        [point.parameters for point in edge], [100 * mean(point.auc) for point in edge], where="post",
        color=figures.PALE, linewidth=1, zorder=1, label="frontier",
    )  # fmt: skip
    for at, kind in enumerate(KINDS):
        own = [point for point in shown if point.kind == kind]
        if own:
            xs, ys = [point.parameters for point in own], [100 * mean(point.auc) for point in own]
            figures.series(axes, at, xs, ys, kind, linestyle="", markersize=9 if kind == RECAP else 5)
    figures.sizes(axes, log=True)
    axes.set_ylabel(f"{split} AUC (points)")
    title = f"not shown: {hidden} below {100 * floor:.1f}" if hidden else None
    figures.legend(figure, axes, columns=7, title=title)
    figures.names(
        figure,
        axes,
        [
            figures.Name(
                point.name.removeprefix("FCN, "),
                point.parameters,
                100 * mean(point.auc),
                KINDS.index(point.kind),
            )
            for point in sorted(shown, key=lambda point: (not point.best, point.kind in (OTHERS, AVERAGED)))
        ],
    )
