"""How much RECAP depends on its settings: one varied at a time around the recipe's own (the paper's Table 4).

Half of the paper's grid: each value is a student to train.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import t as student_t

from recap_ctr.bench import figures
from recap_ctr.bench.overview import held_out
from recap_ctr.bench.scaling import Repeated, finished, run_of, taught, train_cells
from recap_ctr.bench.tables import grid, spread
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.recap import RecapConfig, default_rank
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.run import RunConfig

FACTORS = (0.5, 1.0, 2.0)  # of the recipe's own value
KD_WEIGHTS = (0.0, 0.5, 1.0, 2.0)
TEACHERS = (1, 2)
HEADER = ["setting", "value", "runs", "parameters", "AUC", "logloss", "calibrated logloss", "ΔAUC"]


@dataclass(frozen=True)
class Variant:
    """The recipe's student with one setting at one value."""

    setting: str
    value: float
    config: RunConfig


@dataclass(frozen=True)
class Point:
    """A variant's figures: one for each run."""

    setting: str
    value: float
    default: bool
    runs: int
    parameters: int
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    calibrated: tuple[float, ...]
    gain: float
    """Mean AUC minus that of the recipe's own setting, over the same seeds."""


def variants(base: RunConfig, untaught: RunConfig, layout: Layout, steps_per_epoch: int) -> list[Variant]:
    """All arms; those at the recipe's own value are `base` itself. `untaught` is the student without teachers."""
    model, train = base.model_config, base.train
    assert isinstance(model, RecapConfig)

    def training(**changes: Any) -> RunConfig:
        return replace(base, train=train.model_copy(update=changes))

    def backbone(**changes: Any) -> RunConfig:
        return replace(base, model_config=model.model_copy(update=changes))

    found: list[Variant] = []
    horizons = train.ema_epochs or (() if train.ema is None else (1 / ((1 - train.ema) * steps_per_epoch),))
    if horizons:
        for factor in FACTORS:
            epochs = tuple(factor * horizon for horizon in horizons)
            longer = train.model_copy(update={"ema": None, "ema_epochs": horizons}).with_horizons(factor)
            changed = base if factor == 1 else replace(base, train=longer)
            found.append(Variant("EMA horizon (epochs)", mean(epochs), changed))
    for weight in sorted({*KD_WEIGHTS, train.kd_weight}):
        changed = training(kd_weight=weight) if weight else untaught
        found.append(Variant("KD weight λ", weight, base if weight == train.kd_weight else changed))
    total = len(base.teachers)
    found += [
        Variant("teachers", count, replace(base, teachers=base.teachers[:count]))
        for count in sorted({*TEACHERS, total})
        if count <= total
    ]
    # The rank is held where adapters vary: left to itself it would shrink as they grow, to keep the size.
    own = model.lora_rank or default_rank(model, layout)
    full = layout.num_fields * model.dim // 2
    for rank in sorted({min(max(round(factor * own), 1), max(full, own)) for factor in FACTORS}):
        found.append(Variant("LoRA rank", rank, base if rank == own else backbone(lora_rank=rank)))
    for count in sorted({round(factor * model.num_adapters) for factor in FACTORS} - {0}):
        if model.binding == "free" or count % model.depth == 0:
            changed = backbone(num_adapters=count, lora_rank=own)
            found.append(Variant("adapters", count, base if count == model.num_adapters else changed))
    return found


def arms_of(recipe: Recipe, plan: Plan, teachers: Sequence[Path]) -> tuple[RunConfig, list[Variant]]:
    """The recipe's student and all arms around it."""
    if not teachers:
        raise InputError("this table varies distillation", fix="give at least one teacher")
    base = run_of(recipe, taught(recipe, plan, "recap", teachers), "recap", "ema-kd", teachers)
    untaught = run_of(recipe, plan, "recap", "ema", teachers)
    steps = -(-len(recipe.data.train) // base.train.batch_size)
    return base, variants(base, untaught, recipe.data.layout, steps)


def cells(
    recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int
) -> dict[tuple[str, float], Repeated]:
    """What the table is made of; first the recipe's own, which all are compared with."""
    base, arms = arms_of(recipe, plan, teachers)
    first = sorted(arms, key=lambda arm: arm.config != base)
    return {(arm.setting, arm.value): Repeated(arm.config, range(1, seeds + 1)) for arm in first}


def sensitivity(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing; write numbers, table and figure; return the table as Markdown."""
    plan = recipe.plan()
    teachers = list(recipe.teachers(plan))
    base, arms = arms_of(recipe, plan, teachers)
    runs = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="sensitivity")
    own = list(next(iter(runs.values())).values())
    split = held_out(own[0])
    points = [
        _point(arm, list(runs[arm.setting, arm.value].values()), own, split, default=arm.config == base)
        for arm in arms
    ]
    known = [report["metrics"][split]["raw"]["auc"] for report in finished(recipe, base).values()]
    noise = stdev(known) if len(known) > 1 else None
    about = {"data": recipe.data.name, "split": split, "seed_noise": noise, "default_auc": known}
    text = "\n".join([*_markdown(points), "", *_findings(points, split, known, noise), ""])

    def draw(figure: Figure) -> None:
        _draw(figure, points, noise, f"RECAP's sensitivity to its settings, {recipe.data.name}", split)

    figures.publish(
        reports / "sensitivity", text, about, [asdict(point) for point in points], draw, height=5.0
    )
    return text


def _point(
    arm: Variant,
    reports: Sequence[dict[str, Any]],
    own: Sequence[dict[str, Any]],
    split: str,
    *,
    default: bool,
) -> Point:
    found = [report["metrics"][split] for report in reports]
    auc = tuple(one["raw"]["auc"] for one in found)
    return Point(
        arm.setting, arm.value, default, len(found), reports[0]["parameters"], auc,
        tuple(one["raw"]["logloss"] for one in found), tuple(one["calibrated"]["logloss"] for one in found),
        mean(auc) - mean(report["metrics"][split]["raw"]["auc"] for report in own),
    )  # fmt: skip


def _markdown(points: Sequence[Point]) -> list[str]:
    lines = []
    for point in points:
        line = [
            point.setting, f"{point.value:g}", str(point.runs), f"{point.parameters:,}", spread(point.auc, 3, 100),
            spread(point.logloss, 5), spread(point.calibrated, 5),
        ]  # fmt: skip
        gain = "" if point.default else f"{100 * point.gain:+.3f}"
        lines.append([*([line[0], *(f"**{text}**" for text in line[1:])] if point.default else line), gain])
    return grid(HEADER, lines)


def _findings(points: Sequence[Point], split: str, known: Sequence[float], noise: float | None) -> list[str]:
    others = [point for point in points if not point.default]
    said = [
        f"On {split} rows, AUC in points; the recipe's own value is bold, and ΔAUC the difference from it over the same"
        " seeds. Weight 0 is the student without teachers, by their regulariser; adapters vary at the recipe's rank."
    ]
    low, high = (pick(others, key=lambda point: point.gain) for pick in (min, max))
    said.append(
        f"Of {len(others)} other values the best is {_name(high)}, {100 * high.gain:+.3f} points, the worst"
        f" {_name(low)}, {100 * low.gain:+.3f}."
    )
    if noise is None:
        said.append("The noise between seeds is unknown: there is one run of the recipe's own setting.")
        return said
    reach = beyond_chance(noise, len(known), len(others), points[0].runs)
    beyond = [f"{_name(point)} ({100 * point.gain:+.3f})" for point in others if abs(point.gain) > reach]
    said.append(
        f"Seeds alone give ± {100 * noise:.3f} points (standard deviation over {len(known)} runs of the recipe's own)."
        f" Beyond {100 * reach:.3f}, what chance would show one such table in twenty, "
        + (f"are {', '.join(beyond)}." if beyond else "there is none.")
    )
    return said


def beyond_chance(noise: float, known: int, values: int, runs: int) -> float:
    """The largest difference of `values` from the recipe's own, of `runs` each, that chance passes 5 times in 100.

    By Student's t, since the noise itself is known from few runs, corrected by Bonferroni.
    """
    return float(student_t.ppf(1 - 0.025 / values, known - 1)) * noise * sqrt(2 / runs)


def _name(point: Point) -> str:
    return f"{point.setting} {point.value:g}"


def _draw(figure: Figure, points: Sequence[Point], noise: float | None, title: str, split: str) -> None:
    """One panel a setting, all on the same scale; values stand side by side, whatever their distance."""
    figure.suptitle(title, parse_math=False)
    settings = list(dict.fromkeys(point.setting for point in points))
    grid_of_axes = figure.subplots(2, 3, sharey=True, squeeze=False)
    for at, axes in enumerate(grid_of_axes.flat):
        if at >= len(settings):
            axes.axis("off")
            continue
        own = [point for point in points if point.setting == settings[at]]
        heights = [100 * mean(point.auc) for point in own]
        default = next(place for place, point in enumerate(own) if point.default)
        if noise is not None:
            figures.band(axes, heights[default], 100 * noise)
        figures.series(axes, 0, range(len(own)), heights, "one setting varied")
        axes.plot(
            [default], [heights[default]], color=figures.COLOURS[1], marker="D", markersize=8, linestyle="",
            label="the recipe's own",
        )  # fmt: skip
        axes.set_xticks(range(len(own)), [f"{point.value:g}" for point in own])
        axes.set_xlim(-0.4, len(own) - 0.6)
        axes.set_xlabel(settings[at])
        if at % 3 == 0:
            axes.set_ylabel(f"{split} AUC (points)")
    handles, labels = grid_of_axes.flat[0].get_legend_handles_labels()
    grid_of_axes.flat[-1].legend(handles, labels, loc="center")
