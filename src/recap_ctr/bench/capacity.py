"""What a larger FCN gains: deeper towers and more heads, trained by the recipe (the paper's Figure 1a)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recap_ctr.bench import figures
from recap_ctr.bench.overview import held_out
from recap_ctr.bench.scaling import Repeated, Runs, run_of, train_cells
from recap_ctr.bench.tables import grid, spread
from recap_ctr.models.fcn import FCNConfig
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.run import RunConfig

SHALLOW = ((1, 1), (2, 2))
# Not more: the exponential tower's order doubles with each layer; with eight, losses on synthetic data pass 10,000.
TIMES_DEEPER = (1.0, 1.5, 2.0)
TIMES_BROADER = (1, 2)
HEADER = ["grown in", "layers", "heads", "runs", "parameters", "validation AUC", "AUC", "logloss", "ΔAUC"]


class Shape(NamedTuple):
    """The capacity of an FCN."""

    exponential: int
    linear: int
    heads: int

    @property
    def layers(self) -> str:
        return f"{self.exponential} + {self.linear}"


@dataclass(frozen=True)
class Point:
    """A shape's figures: one for each run."""

    kind: str
    exponential_layers: int
    linear_layers: int
    heads: int
    default: bool
    parameters: int
    runs: int
    valid_auc: tuple[float, ...]
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    gain: float
    """Mean AUC minus that of the recipe's own shape, over the same seeds."""


def own_config(recipe: Recipe, plan: Plan) -> FCNConfig:
    """The teachers', where they are FCNs: capacity is measured against their ensemble."""
    teachers = isinstance(recipe.teacher_config, FCNConfig)
    config = plan.arm.model_config(
        "fcn", recipe.teacher_config if teachers else recipe.config.settings_of("fcn")
    )
    assert isinstance(config, FCNConfig)
    return config


def own_shape(config: FCNConfig) -> Shape:
    return Shape(config.num_exponential_layers, config.num_linear_layers, config.num_heads)


def shapes(own: Shape) -> dict[str, list[Shape]]:
    """By the way of growing, from small to large; both hold the recipe's own.

    The paper adds towers; a head is FCN's own branch, with vectors of its own for all values.

    >>> [shape.layers for shape in shapes(Shape(3, 4, 1))["depth"]]
    ['1 + 1', '2 + 2', '3 + 4', '5 + 6', '6 + 8']
    """
    depths = {
        *SHALLOW,
        *((ceil(times * own.exponential), ceil(times * own.linear)) for times in TIMES_DEEPER),
    }
    return {
        "depth": [Shape(*layers, own.heads) for layers in sorted(depths, key=lambda pair: (sum(pair), pair))],
        "breadth": [own._replace(heads=times * own.heads) for times in TIMES_BROADER],
    }


def configs(recipe: Recipe, plan: Plan) -> dict[Shape, RunConfig]:
    """The runs of each shape, the recipe's own first: with averaged weights, from labels alone."""
    config = own_config(recipe, plan)
    base = run_of(recipe, plan, "fcn", "ema", [])
    own = own_shape(config)
    return {
        shape: replace(
            base,
            model_config=config.model_copy(
                update={
                    "num_exponential_layers": shape.exponential,
                    "num_linear_layers": shape.linear,
                    "num_heads": shape.heads,
                }
            ),
        )
        for shape in dict.fromkeys([own, *(shape for line in shapes(own).values() for shape in line)])
    }


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[Shape, Repeated]:
    """What the table is made of, beside the teachers."""
    return {shape: Repeated(config, range(1, seeds + 1)) for shape, config in configs(recipe, plan).items()}


def capacity(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing; write numbers, table and figure; return the table as Markdown."""
    plan = recipe.plan()
    teachers = recipe.teachers(plan)
    runs = train_cells(recipe, cells(recipe, plan, list(teachers), seeds), title="capacity")
    own = own_shape(own_config(recipe, plan))
    points = [
        _point(kind, shape, runs[shape], runs[own]) for kind, line in shapes(own).items() for shape in line
    ]
    split = held_out(next(iter(runs[own].values())))
    ensemble = _ensemble(recipe, teachers)
    about = {"data": recipe.data.name, "split": split, "ensemble": ensemble}
    text = "\n".join([*_markdown(points), "", *_findings(points, split, ensemble), ""])

    def draw(figure: Figure) -> None:
        _draw(figure, points, ensemble, f"AUC of FCN by depth and breadth, {recipe.data.name}", split)

    figures.publish(reports / "capacity", text, about, [asdict(point) for point in points], draw, height=3.8)
    return text


def _point(kind: str, shape: Shape, runs: Runs, own: Runs) -> Point:
    found = list(runs.values())
    split = held_out(found[0])
    auc = _aucs(runs, split)
    return Point(
        kind, *shape, runs is own, found[0]["parameters"], len(found), _aucs(runs, "valid"), auc,
        tuple(report["metrics"][split]["raw"]["logloss"] for report in found), mean(auc) - mean(_aucs(own, split)),
    )  # fmt: skip


def _aucs(runs: Runs, split: str) -> tuple[float, ...]:
    return tuple(report["metrics"][split]["raw"]["auc"] for report in runs.values())


def _ensemble(recipe: Recipe, teachers: Runs) -> dict[str, Any] | None:
    """What the mean of the teachers gains over one of them, by split: the other way to spend parameters."""
    if len(teachers) < 2:
        return None
    together = recipe.ensembles(list(teachers))[-1]["metrics"]
    return {
        "teachers": len(teachers),
        "model": recipe.config.teacher_model,
        "gain": {split: together[split]["raw"]["auc"] - mean(_aucs(teachers, split)) for split in together},
        "noise": {split: stdev(_aucs(teachers, split)) for split in together},
    }


def _markdown(points: Sequence[Point]) -> list[str]:
    lines = []
    for point in points:
        if point.default and point.kind != points[0].kind:
            continue  # it stands above already
        line = [
            point.kind, f"{point.exponential_layers} + {point.linear_layers}", str(point.heads), str(point.runs),
            f"{point.parameters:,}", spread(point.valid_auc, 3, 100), spread(point.auc, 3, 100),
            spread(point.logloss, 5),
        ]  # fmt: skip
        gain = "" if point.default else f"{100 * point.gain:+.3f}"
        lines.append([*(f"**{text}**" if point.default else text for text in line), gain])
    return grid(HEADER, lines)


def _findings(points: Sequence[Point], split: str, ensemble: dict[str, Any] | None) -> list[str]:
    own = next(point for point in points if point.default)
    twice = 2 * own.exponential_layers, 2 * own.linear_layers
    double = next(point for point in points if (point.exponential_layers, point.linear_layers) == twice)
    broad = next(point for point in points if point.kind == "breadth" and point.heads == 2 * own.heads)
    said = [
        f"On {split} rows, AUC in points; the recipe's own shape is bold. Layers are exponential + linear; the paper"
        " adds towers for breadth, here it is heads, each with vectors of its own.",
        f"Twice the depth gains {100 * double.gain:+.3f} points at {double.parameters / own.parameters:.2f} times the"
        f" parameters, twice the heads {100 * broad.gain:+.3f} at {broad.parameters / own.parameters:.2f} times",
    ]
    if ensemble is not None:
        said[-1] += (
            f"; the mean of {ensemble['teachers']} runs gains {100 * ensemble['gain'][split]:+.3f} over one of them,"
            f" whose standard deviation between seeds is {100 * ensemble['noise'][split]:.3f}"
        )
    said[-1] += "."
    return said


def _draw(
    figure: Figure, points: Sequence[Point], ensemble: dict[str, Any] | None, title: str, split: str
) -> None:
    """AUC against size, on held-out rows and on those that training was stopped by."""
    figure.suptitle(title, parse_math=False)
    names = list(dict.fromkeys([split, "valid"]))
    drawn: list[tuple[Axes, list[figures.Name]]] = []
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        heights = {id(point): 100 * mean(point.auc if name == split else point.valid_auc) for point in points}
        own = next(point for point in points if point.default)
        if ensemble is not None:
            middle = heights[id(own)]
            figures.band(axes, middle, 100 * ensemble["noise"][name])
            axes.axhline(
                middle + 100 * ensemble["gain"][name], color=figures.INK, linestyle="--", linewidth=1,
                label=f"+ gain of averaging {ensemble['teachers']} runs",
            )  # fmt: skip
        wanted = []
        for at, kind in enumerate(("depth", "breadth")):
            line = [point for point in points if point.kind == kind]
            xs, ys = [point.parameters for point in line], [heights[id(point)] for point in line]
            figures.series(axes, at, xs, ys, f"FCN, {kind}")
            for point, x, y in zip(line, xs, ys, strict=True):
                layers = f"{point.exponential_layers} + {point.linear_layers}"
                if kind == "depth" or not point.default:
                    wanted.append(
                        figures.Name(layers if kind == "depth" else f"{point.heads} heads", x, y, at)
                    )
        figures.sizes(axes, log=False)
        axes.set_ylabel(f"{'validation' if name == 'valid' else name} AUC (points)")
        drawn.append((axes, wanted))
    figures.legend(figure, figure.axes[0], columns=4)
    for axes, wanted in drawn:
        figures.names(figure, axes, wanted)
