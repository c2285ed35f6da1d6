"""What a larger FCN gains: deeper towers and more of them, trained by the recipe (the paper's Figure 1a).

With several runs of a shape, its loss has two parts (Eq. 3): the loss of the mean over runs, and what single runs lose
because they vary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recap_ctr.bench import figures
from recap_ctr.bench.estimators import logits_of_runs
from recap_ctr.bench.tables import NONE, grid, spread
from recap_ctr.data.shards import held_out_shards
from recap_ctr.diagnose.theory import curvature
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.models.fcn import FCNConfig
from recap_ctr.recipe.ablation import Cell, student_run, train_cells
from recap_ctr.recipe.report import measure_ensembles
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import Runs

SHALLOW = ((1, 1), (2, 2))
# Not more: the exponential tower's order doubles with each layer; with eight, losses on synthetic data pass 10,000.
TIMES_DEEPER = (1.0, 1.5, 2.0)
BRANCHES = (1, 2, 3)
HEADER = [
    "grown in",
    "layers",
    "branches",
    "runs",
    "parameters",
    "validation AUC",
    "AUC",
    "logloss",
    "of the mean",
    "by variance",
    "ΔAUC",
]


class Shape(NamedTuple):
    """The capacity of an FCN: layers of its exponential and its linear towers, and how many there are of each."""

    exponential: int
    linear: int
    branches: int

    @property
    def layers(self) -> str:
        """Return the layers of both towers as text."""
        return f"{self.exponential} + {self.linear}"


@dataclass(frozen=True)
class Point:
    """The figures of a shape, one for each run."""

    kind: str
    exponential_layers: int
    linear_layers: int
    branches: int
    default: bool
    parameters: int
    runs: int
    valid_auc: tuple[float, ...]
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    gain: float
    """Mean AUC minus that of the recipe's shape, over the same seeds."""
    loss_by_variance: float | None
    """What a run loses because runs vary, the second term of Eq. 3; None for one run."""

    @property
    def loss_of_mean(self) -> float | None:
        """Return the loss of the mean over all runs that there could be, the first term of Eq. 3."""
        return None if self.loss_by_variance is None else mean(self.logloss) - self.loss_by_variance

    @property
    def shape(self) -> Shape:
        """Return the shape that the figures are of."""
        return Shape(self.exponential_layers, self.linear_layers, self.branches)


@dataclass(frozen=True)
class Ensemble:
    """The mean of the teachers, which is another way to spend parameters."""

    teachers: int
    model: str
    gain: dict[str, float]
    """What the mean gains in AUC over one teacher, by split."""
    noise: dict[str, float]
    """Standard deviation of the teachers' AUC, by split."""


def default_config(recipe: Recipe, plan: Plan) -> FCNConfig:
    """Return the config of the recipe's FCN: the teachers', if they are FCNs, because their ensemble is compared."""
    config = recipe.teacher_model_config
    if not isinstance(config, FCNConfig):
        config = recipe.config.model_config_of("fcn")
    config = plan.arm.model_config("fcn", config)
    assert isinstance(config, FCNConfig)
    return config


def shape_of(config: FCNConfig) -> Shape:
    """Return the shape of an FCN."""
    return Shape(config.num_exponential_layers, config.num_linear_layers, config.num_branches)


def shapes(default: Shape) -> dict[str, list[Shape]]:
    """Return shapes from small to large for each way of growing; both ways contain the recipe's shape.

    >>> [shape.layers for shape in shapes(Shape(3, 4, 1))["depth"]]
    ['1 + 1', '2 + 2', '3 + 4', '5 + 6', '6 + 8']
    """
    depths = {
        *SHALLOW,
        *((ceil(times * default.exponential), ceil(times * default.linear)) for times in TIMES_DEEPER),
    }
    in_order = sorted(depths, key=lambda pair: (sum(pair), pair))
    return {
        "depth": [Shape(*layers, default.branches) for layers in in_order],
        "breadth": [default._replace(branches=times * default.branches) for times in BRANCHES],
    }


def configs(recipe: Recipe, plan: Plan) -> dict[Shape, RunConfig]:
    """Return the runs of each shape, the recipe's first: with averaged weights, from labels alone."""
    config = default_config(recipe, plan)
    base = student_run(recipe, plan, "fcn", "ema", [])
    default = shape_of(config)
    others = [shape for grown in shapes(default).values() for shape in grown]
    return {
        shape: replace(
            base,
            model_config=config.model_copy(
                update={
                    "num_exponential_layers": shape.exponential,
                    "num_linear_layers": shape.linear,
                    "num_branches": shape.branches,
                }
            ),
        )
        for shape in dict.fromkeys([default, *others])
    }


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[Shape, Cell]:
    """Return the cells that the table is made of, apart from the teachers."""
    return {shape: Cell(config, range(1, seeds + 1)) for shape, config in configs(recipe, plan).items()}


def capacity(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write numbers, table and figure, and return the table as Markdown."""
    plan = recipe.plan()
    teachers = recipe.train_teachers(plan)
    runs = train_cells(recipe, cells(recipe, plan, list(teachers), seeds), title="capacity")
    default = shape_of(default_config(recipe, plan))
    points = [
        _point(kind, shape, recipe, runs[shape], runs[default], default=shape == default)
        for kind, grown in shapes(default).items()
        for shape in grown
    ]
    split = next(iter(runs[default].values())).metrics.split
    ensemble = _ensemble(recipe, teachers)
    text = table_text(points, split, ensemble)
    about = {
        "data": recipe.data.name,
        "split": split,
        "ensemble": None if ensemble is None else asdict(ensemble),
    }

    def draw(figure: Figure) -> None:
        _draw(figure, points, ensemble, f"AUC of FCN by depth and breadth, {recipe.data.name}", split)

    figures.publish(reports / "capacity", text, about, [asdict(point) for point in points], draw, height=3.8)
    return text


def _point(
    kind: str, shape: Shape, recipe: Recipe, runs: Runs, default_runs: Runs, *, default: bool
) -> Point:
    reports = list(runs.values())
    split = reports[0].metrics.split
    aucs = _aucs(runs, split)
    return Point(
        kind=kind,
        exponential_layers=shape.exponential,
        linear_layers=shape.linear,
        branches=shape.branches,
        default=default,
        parameters=reports[0].parameters,
        runs=len(reports),
        valid_auc=_aucs(runs, "valid"),
        auc=aucs,
        logloss=tuple(report.metrics.on(split).raw.logloss for report in reports),
        gain=mean(aucs) - mean(_aucs(default_runs, split)),
        loss_by_variance=_loss_by_variance(recipe, list(runs)),
    )


def _loss_by_variance(recipe: Recipe, runs: Sequence[Path]) -> float | None:
    """Return the second term of Eq. 3, half of the variance between runs times the curvature; None for one run."""
    if len(runs) < 2:
        return None
    split, shard = held_out_shards(recipe.data).popitem()
    logits_NM, weights_N = undo_sampling(logits_of_runs(runs, split), shard, recipe.config.negative_rate)
    curved_N = curvature(logits_NM.mean(axis=1)) * logits_NM.var(axis=1, ddof=1)
    return float(np.average(curved_N, weights=weights_N)) / 2


def _aucs(runs: Runs, split: str) -> tuple[float, ...]:
    return tuple(report.metrics.on(split).raw.auc for report in runs.values())


def _ensemble(recipe: Recipe, teachers: Runs) -> Ensemble | None:
    """Return what the mean of the teachers gains; None where there is only one."""
    if len(teachers) < 2:
        return None
    together = dict(measure_ensembles(recipe.config, recipe.data, list(teachers))[-1].metrics.items())
    return Ensemble(
        teachers=len(teachers),
        model=recipe.config.teacher_model,
        gain={split: figures.raw.auc - mean(_aucs(teachers, split)) for split, figures in together.items()},
        noise={split: stdev(_aucs(teachers, split)) for split in together},
    )


def table_text(points: Sequence[Point], split: str, ensemble: Ensemble | None) -> str:
    """Return the table with its findings as Markdown."""
    return "\n".join([*_markdown(points), "", *_findings(points, split, ensemble), ""])


def _markdown(points: Sequence[Point]) -> list[str]:
    body = []
    for point in points:
        if point.default and point.kind != points[0].kind:
            continue  # The recipe's shape is both deep and broad; it is listed once.
        cells = [
            point.kind,
            point.shape.layers,
            str(point.branches),
            str(point.runs),
            f"{point.parameters:,}",
            spread(point.valid_auc, 3, 100),
            spread(point.auc, 3, 100),
            spread(point.logloss, 5),
            NONE if point.loss_of_mean is None else f"{point.loss_of_mean:.5f}",
            NONE if point.loss_by_variance is None else f"{point.loss_by_variance:.5f}",
        ]
        gain = "" if point.default else f"{100 * point.gain:+.3f}"
        body.append([*(f"**{text}**" if point.default else text for text in cells), gain])
    return grid(HEADER, body)


def _findings(points: Sequence[Point], split: str, ensemble: Ensemble | None) -> list[str]:
    default = next(point for point in points if point.default)
    twice = 2 * default.exponential_layers, 2 * default.linear_layers
    deep = next(point for point in points if (point.exponential_layers, point.linear_layers) == twice)
    broad = next(
        point for point in points if point.kind == "breadth" and point.branches == 2 * default.branches
    )
    gains = (
        f"Twice the depth gains {100 * deep.gain:+.3f} points at {deep.parameters / default.parameters:.2f} times the"
        f" parameters, twice the branches {100 * broad.gain:+.3f} at {broad.parameters / default.parameters:.2f} times"
    )
    if ensemble is not None:
        gains += (
            f"; the mean of {ensemble.teachers} runs gains {100 * ensemble.gain[split]:+.3f} over one of them,"
            f" whose standard deviation between seeds is {100 * ensemble.noise[split]:.3f}"
        )
    return [
        f"On {split} rows, AUC in points; the recipe's own shape is bold. Layers are exponential + linear; branches"
        " are pairs of towers. Eq. 3 splits a run's logloss into that of the mean over runs and what variance costs.",
        f"{gains}.",
    ]


def _draw(figure: Figure, points: Sequence[Point], ensemble: Ensemble | None, title: str, split: str) -> None:
    """Draw AUC against size, on held-out rows and on the validation rows, which also stopped training."""
    figure.suptitle(title, parse_math=False)
    splits = list(dict.fromkeys([split, "valid"]))
    names: list[tuple[Axes, list[figures.Name]]] = []
    for axes, panel_split in zip(figure.subplots(1, len(splits), squeeze=False).flat, splits, strict=True):
        heights = [100 * mean(point.auc if panel_split == split else point.valid_auc) for point in points]
        if ensemble is not None:
            middle = next(height for point, height in zip(points, heights, strict=True) if point.default)
            figures.band(axes, middle, 100 * ensemble.noise[panel_split])
            axes.axhline(
                middle + 100 * ensemble.gain[panel_split],
                color=figures.INK,
                linestyle="--",
                linewidth=1,
                label=f"+ gain of averaging {ensemble.teachers} runs",
            )
        names.append((axes, _draw_shapes(axes, points, heights)))
        figures.parameter_axis(axes, log=False)
        axes.set_ylabel(f"{'validation' if panel_split == 'valid' else panel_split} AUC (points)")
    figures.legend(figure, figure.axes[0], columns=4)
    for axes, names_of_panel in names:
        figures.write_names(figure, axes, names_of_panel)


def _draw_shapes(axes: Axes, points: Sequence[Point], heights: Sequence[float]) -> list[figures.Name]:
    """Draw a series for each way of growing, and return the names of the points."""
    names = []
    for index, kind in enumerate(("depth", "breadth")):
        drawn = [(point, height) for point, height in zip(points, heights, strict=True) if point.kind == kind]
        xs, ys = [point.parameters for point, _ in drawn], [height for _, height in drawn]
        figures.series(axes, index, xs, ys, f"FCN, {kind}")
        names += [
            figures.Name(
                point.shape.layers if kind == "depth" else f"{point.branches} branches",
                point.parameters,
                height,
                index,
            )
            for point, height in drawn
            if kind == "depth" or not point.default
        ]
    return names
