"""What the mean of M estimators gains along each axis, beside what theory predicts (the paper's Figures 1b and 1c).

Shape suffixes: N rows, M estimators.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recap_ctr import diagnose
from recap_ctr.axes.logits import LogitTable, blocks
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed
from recap_ctr.bench import figures
from recap_ctr.bench.overview import PUBLISHED
from recap_ctr.bench.published import title_of
from recap_ctr.bench.scaling import Repeated, cells_of, finished, run_of, train_cells
from recap_ctr.bench.tables import grid
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.evaluate import Array
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.run import ARTIFACT, RunConfig, teacher_tables
from recap_ctr.training.run import estimators as estimators_of

CHECKPOINTS = 8
STUDENTS = "students"
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
    """The mean of M estimators of one family, itself a mean over subsets of them."""

    family: str
    axis: str
    count: int
    auc: float
    auc_gain: float
    """AUC minus the mean of the members'."""
    logloss: float
    removed: float
    """V_ns (Eq. 5)."""
    predicted: float
    """Loss that the mean should save (Eq. 6)."""
    measured: float
    """Loss that it saves; labels cancel from it (Appendix B.3)."""


def scale(
    family: str, axis: str, logits_NM: diagnose.Floats, labels_N: Array, weights_N: Array | None = None
) -> list[Point]:
    """The mean of 1, 2, .. of the estimators: no order among them counts."""
    if logits_NM.shape[1] == 1:
        auc, loss = (of(labels_N, logits_NM[:, 0], weights_N) for of in (metrics.auc, metrics.logloss))
        return [Point(family, axis, 1, auc, 0.0, loss, 0.0, 0.0, 0.0)]
    cube = diagnose.Cube.from_array(logits_NM[:, :, None, None])
    seen = diagnose.curve(cube, labels_N, "run", weights=weights_N)
    between = float(np.average(logits_NM.var(axis=1, ddof=1), weights=weights_N))
    return [
        Point(
            family, axis, one.count, one.auc.value, one.auc_gain.value, one.loss.value,
            between * (1 - 1 / one.count), one.predicted.value, one.gain.value,
        )
        for one in seen.points
    ]  # fmt: skip


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Repeated]:
    """What the table is made of, beside the teachers: as many FCN by the published protocol, trajectories, students."""
    published = cells_of(recipe, plan, "fcn", ["plain"], range(1, len(teachers) + 1), teachers)["plain"]
    students = cells_of(recipe, plan, "recap", ["ema-kd"], range(1, seeds + 1), teachers)["ema-kd"]
    paths = {name: Repeated(config, [1]) for name, config in trajectories(recipe, plan).items()}
    return {PUBLISHED: published, STUDENTS: students, **paths}


def estimators(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train what is missing; write numbers, table and figure; return the table as Markdown."""
    plan = recipe.plan()
    teachers = list(recipe.teachers(plan))
    shard = recipe.data.test if len(recipe.data.test) else recipe.data.valid
    split = "test" if len(recipe.data.test) else "valid"
    device = torch.device(recipe.device)
    wanted = cells(recipe, plan, teachers, seeds)
    runs = train_cells(recipe, wanted, title="estimators")

    def of_runs(runs: Sequence[Path]) -> diagnose.Floats:
        return np.concatenate(list(blocks([LogitTable(path) for path in teacher_tables(runs, split)])))

    def of_checkpoints(run: Path) -> diagnose.Floats:
        models = estimators_of(run, None, "checkpoint").values()
        return np.stack([predict(model.to(device), shard, device) for model in models], axis=1).astype(
            np.float64
        )

    def corrected(family: str, axis: str, logits_NM: diagnose.Floats) -> list[Point]:
        logits_NM, weights_N = undo_sampling(logits_NM, shard, recipe.config.negative_rate)
        return scale(family, axis, logits_NM, shard.labels, weights_N)

    points = [
        *corrected("FCN, published protocol", "run", of_runs(list(runs[PUBLISHED]))),
        *corrected(f"{title_of(recipe.config.teacher_model)}, averaged weights", "run", of_runs(teachers)),
    ]
    for name in trajectories(recipe, plan):
        points += corrected(name, "trajectory", of_checkpoints(next(iter(runs[name]))))
    each = []
    for run in finished(recipe, wanted[STUDENTS].config):  # and what other tables trained beside them
        model = load_artifact(run / ARTIFACT).model.to(device)
        assert isinstance(model, Routed)
        logits_NM = predict_routes(model.model, shard, model.routes, device)
        each.append(corrected("RECAP", "route", logits_NM))
    points += [_mean(list(same)) for same in zip(*each, strict=True)]
    text = "\n".join([*_markdown(points), "", *_findings(points, split, len(shard)), ""])
    about = {"data": recipe.data.name, "split": split, "rows": len(shard), "students": len(each)}

    def draw(figure: Figure) -> None:
        _draw(figure, points, f"What averaging estimators gains, {recipe.data.name}", split)

    figures.publish(reports / "estimators", text, about, [asdict(one) for one in points], draw, height=4.0)
    return text


def trajectories(recipe: Recipe, plan: Plan) -> dict[str, RunConfig]:
    """The recipe's own training, whose last epochs' raw weights are kept.

    The average that runs beside them changes no step. It says when to stop, after the rate's noise has become steady:
    without it the run would end while its checkpoints still get better, and these would not be exchangeable.
    """
    return {
        name: replace(own, train=own.train.model_copy(update={"checkpoints": CHECKPOINTS}))
        for name, student in (("FCN", "fcn"), ("recursive backbone", "recap"))
        for own in [run_of(recipe, plan, student, "ema", [])]
    }


def _mean(same: Sequence[Point]) -> Point:
    """Of several students' points."""
    names = ("auc", "auc_gain", "logloss", "removed", "predicted", "measured")
    return replace(same[0], **{name: mean(getattr(one, name) for one in same) for name in names})


def _markdown(points: Sequence[Point]) -> list[str]:
    return grid(
        HEADER,
        [
            [
                one.family, one.axis, str(one.count), f"{100 * one.auc:.3f}", f"{100 * one.auc_gain:+.3f}",
                f"{one.logloss:.5f}", f"{one.removed:.5f}", f"{one.predicted:.6f}", f"{one.measured:.6f}",
            ]
            for one in points
        ],
    )  # fmt: skip


def _families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """By axis and family."""
    found: dict[str, list[Point]] = {}
    for one in points:
        found.setdefault(f"{AXES[one.axis]}: {one.family}", []).append(one)
    return found


def _findings(points: Sequence[Point], split: str, rows: int) -> list[str]:
    last = {name: line[-1] for name, line in _families(points).items() if line[-1].count > 1}
    said = [
        f"On {rows:,} {split} rows; AUC in points, losses as they are; means over subsets of M estimators."
        f" Checkpoints are raw weights, of the last epochs of one run."
    ]
    gains = [f"{name}, {one.count} of them: {100 * one.auc_gain:+.3f}" for name, one in last.items()]
    said.append(f"Gains in AUC over one estimator, in points: {'; '.join(gains)}.")
    ratios = [one.measured / one.predicted for one in last.values() if one.predicted > 0]
    if ratios:
        said.append(
            f"The loss that is saved is {min(ratios):.2f} to {max(ratios):.2f} of what Eq. 6 predicts from V_ns."
        )
    return said


def _draw(figure: Figure, points: Sequence[Point], title: str, split: str) -> None:
    """Gain in AUC against the number of estimators; loss saved against loss predicted."""
    figure.suptitle(title, parse_math=False)
    left, right = figure.subplots(1, 2)
    for at, (name, line) in enumerate(_families(points).items()):
        figures.series(left, at, [one.count for one in line], [100 * one.auc_gain for one in line], name)
        seen = [one for one in line if one.predicted > 0 and one.measured > 0]
        figures.series(
            right, at, [one.predicted for one in seen], [one.measured for one in seen], name, linestyle=""
        )
    shown = [one.predicted for one in points if one.predicted > 0]
    if shown:
        ends = [min(shown), max(shown)]
        right.plot(ends, ends, color=figures.INK, linestyle="--", linewidth=1, label="measured = predicted")
        right.set_xscale("log")
        right.set_yscale("log")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel("estimators averaged, M")
    left.set_ylabel(f"gain in {split} AUC (points)")
    right.set_xlabel("predicted gain in logloss (Eq. 6)")
    right.set_ylabel(f"measured gain in {split} logloss")
    figures.legend(figure, right, columns=3)
