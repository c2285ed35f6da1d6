"""How much RECAP depends on its settings: one varied at a time around the recipe's value (the paper's Table 4).

The grid is half of the paper's, because each value needs another student to be trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recap_ctr.bench import figures
from recap_ctr.bench.significance import chance_limit
from recap_ctr.bench.tables import grid, spread
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.recap import RecapConfig, default_rank
from recap_ctr.recipe.ablation import Cell, finished_runs, student_run, taught_plan, train_cells
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import RunReport

FACTORS = (0.5, 1.0, 2.0)  # The recipe's value is multiplied by these.
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
    """The figures of a variant, one for each run."""

    setting: str
    value: float
    default: bool
    runs: int
    parameters: int
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    calibrated: tuple[float, ...]
    gain: float
    """Mean AUC minus that of the recipe's value, over the same seeds as far as it has them."""

    @property
    def name(self) -> str:
        """Return the setting and its value as text."""
        return f"{self.setting} {self.value:g}"


def variants(base: RunConfig, untaught: RunConfig, layout: Layout, steps_per_epoch: int) -> list[Variant]:
    """Return all variants; those at the recipe's value are `base` itself.

    `untaught` is the student without teachers.
    """
    return [
        *_horizons(base, steps_per_epoch),
        *_distillation(base, untaught),
        *_adapters(base, layout),
    ]


def _horizons(base: RunConfig, steps_per_epoch: int) -> Iterator[Variant]:
    """Yield averages of other horizons, if the recipe averages weights."""
    train = base.train
    horizons = train.ema_epochs or (() if train.ema is None else (1 / ((1 - train.ema) * steps_per_epoch),))
    if not horizons:
        return
    by_epochs = train.model_copy(update={"ema": None, "ema_epochs": horizons})
    for factor in FACTORS:
        config = base if factor == 1 else replace(base, train=by_epochs.with_horizons(factor))
        yield Variant("EMA horizon (epochs)", mean(factor * horizon for horizon in horizons), config)


def _distillation(base: RunConfig, untaught: RunConfig) -> Iterator[Variant]:
    """Yield other weights of distillation, then smaller numbers of teachers."""
    train = base.train
    for weight in sorted({*KD_WEIGHTS, train.kd_weight}):
        if weight == train.kd_weight:
            config = base
        elif weight == 0:
            config = untaught
        else:
            config = replace(base, train=train.model_copy(update={"kd_weight": weight}))
        yield Variant("KD weight λ", weight, config)
    total = len(base.teachers)
    for count in sorted({*TEACHERS, total}):
        if count <= total:
            yield Variant("teachers", count, base.taught_by(base.teachers[:count]))


def _adapters(base: RunConfig, layout: Layout) -> Iterator[Variant]:
    """Yield other ranks of the adapters, then other numbers of them."""
    model = base.model_config
    assert isinstance(model, RecapConfig)
    default = model.lora_rank or default_rank(model, layout)
    full = layout.num_fields * model.dim // 2
    for rank in sorted({min(max(round(factor * default), 1), max(full, default)) for factor in FACTORS}):
        other_rank = replace(base, model_config=model.model_copy(update={"lora_rank": rank}))
        yield Variant("LoRA rank", rank, base if rank == default else other_rank)
    for count in sorted({round(factor * model.num_adapters) for factor in FACTORS} - {0}):
        if model.binding == "free" or count % model.depth == 0:
            # By default the rank would shrink as adapters are added, to keep the size; so it is fixed.
            changes = {"num_adapters": count, "lora_rank": default}
            other_count = replace(base, model_config=model.model_copy(update=changes))
            yield Variant("adapters", count, base if count == model.num_adapters else other_count)


def base_and_variants(
    recipe: Recipe, plan: Plan, teachers: Sequence[Path]
) -> tuple[RunConfig, list[Variant]]:
    """Return the recipe's student, and all variants of it."""
    if not teachers:
        raise InputError("this table varies distillation", fix="set at least one teacher")
    base = student_run(recipe, taught_plan(recipe, plan, "recap", teachers), "recap", "ema-kd", teachers)
    untaught = student_run(recipe, plan, "recap", "ema", teachers)
    steps = -(-len(recipe.data.train) // base.train.batch_size)
    return base, variants(base, untaught, recipe.data.layout, steps)


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[tuple[str, float], Cell]:
    """Return the cells of the table; first the recipe's student, which all others are compared with.

    A student of fewer teachers is trained at least once for each of the teachers, so that none of them is the line.
    """
    base, all_variants = base_and_variants(recipe, plan, teachers)
    total = len(base.teachers)
    wanted: dict[tuple[str, float], Cell] = {}
    for variant in sorted(all_variants, key=lambda variant: variant.config != base):
        in_turn = base.teachers if 0 < len(variant.config.teachers) < total else ()
        runs = max(seeds, len(in_turn))
        wanted[variant.setting, variant.value] = Cell(variant.config, range(1, runs + 1), in_turn)
    return wanted


def sensitivity(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write numbers, table and figure, and return the table as Markdown."""
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    base, all_variants = base_and_variants(recipe, plan, teachers)
    runs = train_cells(recipe, cells(recipe, plan, teachers, seeds), title="sensitivity")
    # Runs of the recipe's student that other tables trained are used, too.
    base_reports = list(finished_runs(recipe, base).values())
    split = base_reports[0].metrics.split
    points = [
        _point(
            variant,
            list(runs[variant.setting, variant.value].values()),
            base_reports,
            split,
            default=variant.config == base,
        )
        for variant in all_variants
    ]
    base_aucs = [report.metrics.on(split).raw.auc for report in base_reports]
    noise = stdev(base_aucs) if len(base_aucs) > 1 else None
    text = table_text(points, split, base_aucs)
    about = {"data": recipe.data.name, "split": split, "seed_noise": noise, "default_auc": base_aucs}

    def draw(figure: Figure) -> None:
        _draw(figure, points, noise, f"RECAP's sensitivity to its settings, {recipe.data.name}", split)

    figures.publish(
        reports / "sensitivity", text, about, [asdict(point) for point in points], draw, height=5.0
    )
    return text


def _point(
    variant: Variant,
    reports: Sequence[RunReport],
    base_reports: Sequence[RunReport],
    split: str,
    *,
    default: bool,
) -> Point:
    measured = [report.metrics.on(split) for report in reports]
    aucs, seeds = tuple(run.raw.auc for run in measured), {report.train.seed for report in reports}
    base_aucs = [report.metrics.on(split).raw.auc for report in base_reports if report.train.seed in seeds]
    return Point(
        setting=variant.setting,
        value=variant.value,
        default=default,
        runs=len(reports),
        parameters=reports[0].parameters,
        auc=aucs,
        logloss=tuple(run.raw.logloss for run in measured),
        calibrated=tuple(run.calibrated.logloss for run in measured),
        gain=mean(aucs) - mean(base_aucs),
    )


def table_text(points: Sequence[Point], split: str, base_aucs: Sequence[float]) -> str:
    """Return the table with its findings as Markdown; `base_aucs` are of all runs of the recipe's student."""
    return "\n".join([*_markdown(points), "", *_findings(points, split, base_aucs), ""])


def _markdown(points: Sequence[Point]) -> list[str]:
    body = []
    for point in points:
        cells = [
            f"{point.value:g}",
            str(point.runs),
            f"{point.parameters:,}",
            spread(point.auc, 3, 100),
            spread(point.logloss, 5),
            spread(point.calibrated, 5),
        ]
        if point.default:
            body.append([point.setting, *(f"**{text}**" for text in cells), ""])
        else:
            body.append([point.setting, *cells, f"{100 * point.gain:+.3f}"])
    return grid(HEADER, body)


def _findings(points: Sequence[Point], split: str, base_aucs: Sequence[float]) -> list[str]:
    others = [point for point in points if not point.default]
    worst, best = (pick(others, key=lambda point: point.gain) for pick in (min, max))
    sentences = [
        f"On {split} rows, AUC in points; the recipe's value is bold, and ΔAUC is the difference from it over the same"
        " seeds, as far as it has them. Weight 0 is the student without teachers, with their regulariser; fewer"
        " teachers are other ones for each seed, in turn, until each has taught; adapters vary at the recipe's rank.",
        f"Of {len(others)} other values the best is {best.name}, {100 * best.gain:+.3f} points, the worst"
        f" {worst.name}, {100 * worst.gain:+.3f}.",
    ]
    if len(base_aucs) < 2:
        return [
            *sentences,
            "The noise between seeds is unknown: there is only one run at the recipe's values.",
        ]
    noise = stdev(base_aucs)
    limit = chance_limit(noise, len(base_aucs), len(others), points[0].runs)
    beyond = [f"{point.name} ({100 * point.gain:+.3f})" for point in others if abs(point.gain) > limit]
    return [
        *sentences,
        f"Seeds alone give ± {100 * noise:.3f} points (standard deviation over {len(base_aucs)} runs at the recipe's"
        f" values). In one such table of twenty, chance alone gives a difference beyond {100 * limit:.3f} points;"
        f" differences beyond it here: {', '.join(beyond) or 'none'}.",
    ]


def _draw(figure: Figure, points: Sequence[Point], noise: float | None, title: str, split: str) -> None:
    """Draw one panel for each setting, all on the same scale."""
    figure.suptitle(title, parse_math=False)
    settings = list(dict.fromkeys(point.setting for point in points))
    panels = figure.subplots(2, 3, sharey=True, squeeze=False)
    for index, axes in enumerate(panels.flat):
        if index >= len(settings):
            axes.axis("off")
            continue
        _draw_setting(axes, [point for point in points if point.setting == settings[index]], noise)
        axes.set_xlabel(settings[index])
        if index % 3 == 0:
            axes.set_ylabel(f"{split} AUC (points)")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    panels.flat[-1].legend(handles, labels, loc="center")


def _draw_setting(axes: Axes, points: Sequence[Point], noise: float | None) -> None:
    """Draw the values of one setting at equal distances, with the recipe's value marked."""
    heights = [100 * mean(point.auc) for point in points]
    default = next(index for index, point in enumerate(points) if point.default)
    if noise is not None:
        figures.band(axes, heights[default], 100 * noise)
    figures.series(axes, 0, range(len(points)), heights, "one setting varied")
    axes.plot(
        [default],
        [heights[default]],
        color=figures.COLOURS[1],
        marker="D",
        markersize=8,
        linestyle="",
        label="the recipe's own",
    )
    axes.set_xticks(range(len(points)), [f"{point.value:g}" for point in points])
    axes.set_xlim(-0.4, len(points) - 0.6)
