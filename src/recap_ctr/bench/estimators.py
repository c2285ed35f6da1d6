"""What the mean of M estimators gains along each axis, with what theory predicts (the paper's Figures 1b and 1c).

The three axes are those of one family: runs of the recursive backbone, trained alike from labels alone, with their last
checkpoints and their routes. Other families stand beside it, for the gain as a function of V_ns.
Shape suffixes: N rows, M estimators, S runs, T checkpoints, R routes.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import spearmanr

from recap_ctr import diagnose
from recap_ctr.axes.logits import LogitTable, blocks
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed
from recap_ctr.bench import figures
from recap_ctr.bench.overview import PUBLISHED, plain_fcns
from recap_ctr.bench.published import title_of
from recap_ctr.bench.tables import grid
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData, Shard, held_out_shards
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.evaluate import Array
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.ablation import PLAIN_FCN, Cell, ablation_cells, finished_runs, train_cells
from recap_ctr.recipe.estimator_grid import grid_run, score_runs
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.estimators import load_average
from recap_ctr.training.parallel import teacher_tables
from recap_ctr.training.routes import MAX_ROUTES

CHECKPOINTS = 8
STUDENTS, GRID = "students", "grid"
BACKBONE = "recursive backbone"
AXES = {"run": "runs", "trajectory": "trajectory", "route": "routes"}
HEADER = [
    "estimators",
    "axis",
    "M",
    "AUC",
    "gain in AUC",
    "logloss",
    "V_ns",
    "predicted gain",
    "measured gain",
]


@dataclass(frozen=True)
class Point:
    """The figures of the mean of M estimators of one family, averaged over subsets of them."""

    family: str
    axis: str
    count: int
    auc: float
    auc_gain: float
    """AUC of the mean minus the mean AUC of its members."""
    logloss: float
    removed: float
    """V_ns (Eq. 5)."""
    predicted: float
    """Loss that the mean should save (Eq. 6)."""
    measured: float
    """Loss that it saves; labels cancel from it (Appendix B.3)."""

    @property
    def curved(self) -> float:
        """Return V_ns weighted by the curvature of the loss, of which Eq. 6 takes half."""
        return 2 * self.predicted


def scale(
    family: str, axis: str, logits_NM: diagnose.Floats, labels_N: Array, weights_N: Array | None = None
) -> list[Point]:
    """Return the figures of the mean of 1, 2, .. of the estimators, whose order does not matter."""
    if logits_NM.shape[1] == 1:
        auc = metrics.auc(labels_N, logits_NM[:, 0], weights_N)
        loss = metrics.logloss(labels_N, logits_NM[:, 0], weights_N)
        return [Point(family, axis, 1, auc, 0.0, loss, 0.0, 0.0, 0.0)]
    cube = diagnose.Cube.from_array(logits_NM[:, :, None, None])
    curve = diagnose.curve(cube, labels_N, "run", weights=weights_N)
    variance = float(np.average(logits_NM.var(axis=1, ddof=1), weights=weights_N))
    return [
        Point(
            family=family,
            axis=axis,
            count=point.count,
            auc=point.auc.value,
            auc_gain=point.auc_gain.value,
            logloss=point.loss.value,
            removed=variance * (1 - 1 / point.count),
            predicted=point.predicted.value,
            measured=point.gain.value,
        )
        for point in curve.points
    ]


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return what the table is made of apart from the teachers.

    These are the runs of the grid, students, and as many FCNs by the plateau rule as there are teachers.
    """
    students = ablation_cells(recipe, plan, "recap", ["ema-kd"], range(1, seeds + 1), teachers)
    routes = recipe.config.routes or MAX_ROUTES
    grid = grid_run(recipe, plan, checkpoints=CHECKPOINTS, routes=routes, model="recap")
    return {
        PUBLISHED: plain_fcns(recipe, plan, teachers),
        STUDENTS: students["ema-kd"],
        GRID: Cell(grid, range(1, seeds + 1)),
    }


def estimators(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing, write numbers, table and figure, and return the table as Markdown."""
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    split, shard = held_out_shards(recipe.data).popitem()
    wanted = cells(recipe, plan, teachers, seeds)
    runs = train_cells(recipe, wanted, title="estimators")

    def corrected(family: str, axis: str, logits_NM: diagnose.Floats) -> list[Point]:
        logits_NM, weights_N = undo_sampling(logits_NM, shard, recipe.config.negative_rate)
        return scale(family, axis, logits_NM, shard.labels, weights_N)

    logits_NSTR = _grid_logits(recipe, list(runs[GRID]), split)
    points = [
        point
        for axis, families in axes_of(logits_NSTR).items()
        for point in _mean_of([corrected(BACKBONE, axis, logits_NM) for logits_NM in families])
    ]
    teacher = title_of(recipe.config.teacher_model)
    points += corrected(PLAIN_FCN, "run", logits_of_runs(list(runs[PUBLISHED]), split))
    points += corrected(f"{teacher}, averaged weights", "run", logits_of_runs(teachers, split))
    device = torch.device(recipe.device)
    # Students that other tables trained are used too.
    students = finished_runs(recipe, wanted[STUDENTS].config)
    points += _mean_of(
        [corrected("RECAP", "route", _logits_of_routes(run, shard, device)) for run in students]
    )
    averages = [
        measure_average(
            f"{BACKBONE}, run {index + 1}",
            run,
            logits_NSTR[:, index, :, 0],
            ages_to_shares(wanted[GRID].config.train, len(recipe.data.train), logits_NSTR.shape[2]),
            recipe.data,
            device,
        )
        for index, run in enumerate(runs[GRID])
    ]
    text = table_text(points, split, len(shard), averages)
    about = {"data": recipe.data.name, "split": split, "rows": len(shard), "students": len(students)}

    def draw(figure: Figure) -> None:
        _draw(figure, points, f"What averaging estimators gains, {recipe.data.name}", split)

    figures.publish(
        reports / "estimators", text, about, [asdict(point) for point in points], draw, height=4.0
    )
    return text


def axes_of(logits_NSTR: diagnose.Floats) -> dict[str, list[diagnose.Floats]]:
    """Return the families of each axis that has several points: other axes stay at the last step and the home route."""
    runs = range(logits_NSTR.shape[1])
    families = {
        "run": [logits_NSTR[:, :, -1, 0]],
        "trajectory": [logits_NSTR[:, run, :, 0] for run in runs],
        "route": [logits_NSTR[:, run, -1, :] for run in runs],
    }
    return {axis: members for axis, members in families.items() if members[0].shape[1] > 1}


def _grid_logits(recipe: Recipe, runs: Sequence[Path], split: str) -> diagnose.Floats:
    """Return the logits of all runs, checkpoints and routes: rows × runs × checkpoints × routes."""
    cube = diagnose.Cube.from_tables(score_runs(recipe, runs, "recap", split))
    logits_CN = cube.block(0, len(cube))
    return np.moveaxis(logits_CN.reshape(*cube.shape, -1), -1, 0)


def logits_of_runs(runs: Sequence[Path], split: str) -> diagnose.Floats:
    """Return the logits of some runs on a split, rows × runs."""
    return np.concatenate(list(blocks([LogitTable(path) for path in teacher_tables(runs, split)])))


def _logits_of_routes(run: Path, shard: Shard, device: torch.device) -> diagnose.Floats:
    model = load_artifact(run / ARTIFACT).model.to(device)
    assert isinstance(model, Routed)
    return predict_routes(model.model, shard, model.routes, device)


def _mean_of(families: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of the points of several families, count by count."""
    names = ("auc", "auc_gain", "logloss", "removed", "predicted", "measured")
    return [
        replace(same[0], **{name: mean(getattr(point, name) for point in same) for name in names})
        for same in zip(*families, strict=True)
    ]


@dataclass(frozen=True)
class Average:
    """Eq. 11 on data: the logit of averaged weights against the average logit of the checkpoints that they average."""

    family: str
    checkpoints: int
    auc: float
    """AUC of the averaged weights; `auc_of_logits` is that of the averaged logits."""
    auc_of_logits: float
    distance: float
    """Root mean square of the difference between the two, in logits."""
    spread: float
    """The same between one checkpoint and the averaged logits."""

    def __str__(self) -> str:
        return (
            f"Eq. 11, {self.family}: the averaged weights of its last {self.checkpoints} checkpoints have"
            f" {100 * self.auc:.3f}, the averaged logits of the same {100 * self.auc_of_logits:.3f}; the two differ by"
            f" {self.distance:.3f} in the logit (root mean square), a checkpoint from its average by {self.spread:.3f}."
        )


def ages_to_shares(train: TrainConfig, rows: int, count: int) -> diagnose.Floats:
    """Return how much each of the last `count` epochs counts in the run's average of weights, oldest first."""
    steps = -(-rows // train.batch_size)
    horizons = train.ema_epochs if train.ema is None else (1 / ((1 - train.ema) * steps),)
    shares: diagnose.Floats = np.exp(-np.arange(count)[::-1] / min(horizons, default=math.inf))
    shares /= shares.sum()
    return shares


def measure_average(
    family: str,
    run: Path,
    checkpoints_NM: diagnose.Floats,
    shares_M: diagnose.Floats,
    data: PreparedData,
    device: torch.device,
) -> Average:
    """Return how well Eq. 11 holds over a run's checkpoints: their weights and their logits are averaged alike."""
    _, shard = held_out_shards(data).popitem()
    averaged_N = predict(load_average(run, shares_M, data, device), shard, device)
    together_N = np.average(checkpoints_NM, axis=1, weights=shares_M)
    return Average(
        family,
        checkpoints=len(shares_M),
        auc=metrics.auc(shard.labels, averaged_N, shard.weights),
        auc_of_logits=metrics.auc(shard.labels, together_N, shard.weights),
        distance=_root_mean_square(np.asarray(averaged_N, np.float64) - together_N),
        spread=_root_mean_square(checkpoints_NM - together_N[:, None]),
    )


def _root_mean_square(gaps: diagnose.Floats) -> float:
    return float(np.sqrt(np.mean(np.square(gaps))))


def table_text(points: Sequence[Point], split: str, rows: int, averages: Sequence[Average] = ()) -> str:
    """Return the table with its findings as Markdown."""
    return "\n".join([*_markdown(points), "", *_findings(points, split, rows), *map(str, averages), ""])


def _markdown(points: Sequence[Point]) -> list[str]:
    return grid(
        HEADER,
        [
            [
                point.family,
                point.axis,
                str(point.count),
                f"{100 * point.auc:.3f}",
                f"{100 * point.auc_gain:+.3f}",
                f"{point.logloss:.5f}",
                f"{point.removed:.5f}",
                f"{point.predicted:.6f}",
                f"{point.measured:.6f}",
            ]
            for point in points
        ],
    )


def _families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points by axis and family."""
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(f"{AXES[point.axis]}: {point.family}", []).append(point)
    return families


def _findings(points: Sequence[Point], split: str, rows: int) -> list[str]:
    largest = {name: family[-1] for name, family in _families(points).items() if family[-1].count > 1}
    gains = [f"{name}, {point.count} of them: {100 * point.auc_gain:+.3f}" for name, point in largest.items()]
    sentences = [
        f"On {rows:,} {split} rows; AUC in points; means over subsets of M estimators. The runs of the {BACKBONE} are"
        " taken at their last epoch; checkpoints are the raw weights of their last epochs.",
        f"Gains in AUC over one estimator, in points: {'; '.join(gains)}.",
    ]
    ratios = [point.measured / point.predicted for point in largest.values() if point.predicted > 0]
    if ratios:
        sentences.append(
            f"The loss that is saved is {min(ratios):.2f} to {max(ratios):.2f} of what Eq. 6 predicts from V_ns."
        )
    if len(largest) > 2:
        gain_of_auc = [point.auc_gain for point in largest.values()]
        order = {
            "V_ns": spearmanr([point.removed for point in largest.values()], gain_of_auc).statistic,
            "V_ns weighted by curvature": spearmanr(
                [point.curved for point in largest.values()], gain_of_auc
            ).statistic,
        }
        correlations = " and ".join(f"{value:+.2f} with {name}" for name, value in order.items())
        sentences.append(
            f"Over these {len(largest)} families the gain in AUC has a rank correlation of {correlations}: unlike that"
            " of the loss, it does not follow from the variance by algebra."
        )
    return sentences


def _draw(figure: Figure, points: Sequence[Point], title: str, split: str) -> None:
    """Draw gains against the number of estimators of one family, and against V_ns for all of them."""
    figure.suptitle(title, parse_math=False)
    left, middle, right = figure.subplots(1, 3)
    for index, (name, family) in enumerate(_families(points).items()):
        several = [point for point in family if point.count > 1 and point.removed > 0]
        gains = [100 * point.auc_gain for point in several]
        if family[0].family == BACKBONE:
            figures.series(
                left,
                index,
                [point.count for point in family],
                [100 * point.auc_gain for point in family],
                name,
            )
        saved = [point.measured for point in several]
        plain, curved = [point.removed for point in several], [point.curved for point in several]
        for axes, heights in ((middle, gains), (right, saved)):
            figures.series(axes, index, plain, heights, name, linestyle="")
            figures.series(axes, index, curved, heights, "", linestyle="", markerfacecolor="none")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("estimators averaged, M")
    left.set_ylabel(f"gain in {split} AUC (points)")
    middle.set_ylabel(f"gain in {split} AUC (points)")
    right.set_ylabel(f"gain in {split} logloss")
    for axes in (middle, right):
        axes.set_xlabel("V_ns; hollow: weighted by curvature")
        if any(point.removed > 0 for point in points):
            axes.set_xscale("log")
    figures.legend(figure, middle, columns=2)
