"""Figures 1b and 1c: means over subsets against brute force, and families of the estimators they name."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from recap_ctr import diagnose
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed
from recap_ctr.bench.estimators import ages_to_shares, axes_of, cells, estimators, measure_average, scale
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.ablation import PLAIN_FCN, directory_of, finished_runs, student_run
from recap_ctr.recipe.report import measure_ensembles
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.estimators import load_estimators
from recap_ctr.training.loop import checkpoints
from recap_ctr.training.report import read_report
from recap_ctr.training.run import run
from tests.support.bench_files import check_figure_files
from tests.support.finished_tables import Workshop


def test_each_point_is_the_mean_over_subsets() -> None:
    rng = np.random.default_rng(0)
    shared_N = rng.normal(size=500)
    logits_NM = shared_N[:, None] + 0.5 * rng.normal(size=(500, 4))
    labels_N = (rng.random(500) < metrics.sigmoid(shared_N)).astype(np.int8)

    points = scale("four", "run", logits_NM, labels_N)

    assert [point.count for point in points] == [1, 2, 3, 4]
    for point in points:
        chosen = [logits_NM[:, list(members)] for members in combinations(range(4), point.count)]
        assert point.auc == pytest.approx(
            np.mean([metrics.auc(labels_N, part.mean(axis=1)) for part in chosen])
        )
        assert point.logloss == pytest.approx(
            np.mean([metrics.logloss(labels_N, part.mean(axis=1)) for part in chosen])
        )
        assert point.auc_gain == pytest.approx(point.auc - points[0].auc)
        assert point.removed == pytest.approx(np.mean([part.var(axis=1).mean() for part in chosen]))
        # Eq. 6 at the mean of all four; at the means of fewer the curvature differs a little.
        assert point.predicted == pytest.approx(
            np.mean([diagnose.predicted_gain(part) for part in chosen]), rel=0.02
        )
        assert point.measured == pytest.approx(
            np.mean([diagnose.exact_gain(part) for part in chosen]), abs=1e-12
        )
    # Eq. 5: what is removed grows as 1 - 1/M.
    assert points[1].removed / points[3].removed == pytest.approx((1 / 2) / (3 / 4))


def test_equation_11_is_exact_for_a_linear_model(prepared: PreparedData, tmp_path: Path) -> None:
    """Whichever epoch was the best: weights and logits are averaged over the same span of the trajectory."""
    train = TrainConfig(
        batch_size=256, max_epochs=4, patience=4, learning_rate=0.3, ema_epochs=(2.0,), checkpoints=3
    )
    run(RunConfig("lr", parse_model("lr", {}), train), prepared, tmp_path, quiet=True)
    models = load_estimators(tmp_path, None, "checkpoint").values()
    device = torch.device("cpu")
    logits = [predict(model, prepared.test, device).astype(np.float64) for model in models]
    checkpoints_NM = np.stack(logits, axis=1)
    shares_M = ages_to_shares(train, len(prepared.train), 3)
    average = measure_average("LR", tmp_path, checkpoints_NM, shares_M, prepared, device)
    assert average.distance < 1e-5 < 0.05 < average.spread
    assert average.auc == pytest.approx(average.auc_of_logits)
    together_N = checkpoints_NM @ shares_M
    assert average.spread == pytest.approx(np.sqrt(((checkpoints_NM - together_N[:, None]) ** 2).mean()))
    assert "last 3 checkpoints" in str(average)


def test_checkpoints_count_by_age_as_in_the_average_of_weights() -> None:
    by_epochs = ages_to_shares(TrainConfig(batch_size=100, ema_epochs=(2.0, 8.0)), 1_000, 3)
    assert by_epochs == pytest.approx(np.exp([-1.0, -0.5, 0.0]) / np.exp([-1.0, -0.5, 0.0]).sum())
    by_steps = ages_to_shares(TrainConfig(batch_size=100, ema=1 - 1 / 20), 1_000, 3)
    assert by_steps == pytest.approx(by_epochs)
    assert ages_to_shares(TrainConfig(), 1_000, 2) == pytest.approx([0.5, 0.5])


def test_axes_are_those_of_one_family() -> None:
    logits_NSTR = np.random.default_rng(0).normal(size=(5, 2, 3, 4))
    families = axes_of(logits_NSTR)
    assert {axis: [each.shape for each in members] for axis, members in families.items()} == {
        "run": [(5, 2)],
        "trajectory": [(5, 3), (5, 3)],
        "route": [(5, 4), (5, 4)],
    }
    assert (families["trajectory"][1] == logits_NSTR[:, 1, :, 0]).all()
    assert (families["route"][0] == logits_NSTR[:, 0, -1]).all()
    assert list(axes_of(logits_NSTR[:, :1, :, :1])) == ["trajectory"]


@pytest.mark.slow
def test_table_averages_runs_checkpoints_and_routes(workshop: Workshop) -> None:
    recipe, before = workshop.recipe, workshop.trained()
    text = estimators(recipe, 2, workshop.reports)
    after = workshop.trained()

    assert {path: after[path] for path in before} == before
    stored = json.loads((workshop.reports / "estimators" / "estimators.json").read_text())
    last = {(point["family"], point["axis"]): point for point in stored["points"]}
    assert {key: point["count"] for key, point in last.items()} == {
        ("recursive backbone", "run"): 2,
        ("recursive backbone", "trajectory"): 3,
        ("recursive backbone", "route"): 4,
        (PLAIN_FCN, "run"): 3,
        ("FCN, averaged weights", "run"): 3,
        ("RECAP", "route"): 4,
    }
    teachers = list(recipe.train_teachers(recipe.plan()))
    together = measure_ensembles(recipe.config, recipe.data, teachers)[-1].metrics.on("test").raw
    assert last["FCN, averaged weights", "run"]["auc"] == pytest.approx(together.auc)
    assert last["FCN, averaged weights", "run"]["logloss"] == pytest.approx(together.logloss, abs=1e-6)

    device, shard = torch.device("cpu"), recipe.data.test
    grid = cells(recipe, recipe.plan(), teachers, 2)["grid"]
    means = []
    for seed in grid.seeds:
        of_seed = directory_of(recipe, grid.config) / f"seed-{seed}"
        steps = [step for step, _ in checkpoints(of_seed)]
        assert steps == [epoch.step for epoch in read_report(of_seed).history]
        models = load_estimators(of_seed, None, "checkpoint").values()
        logits = [predict(model, shard, device) for model in models]
        means.append(metrics.auc(shard.labels, np.mean(logits, axis=0)))
    assert last["recursive backbone", "trajectory"]["auc"] == pytest.approx(np.mean(means))

    # l2 is set, so that no probe changes it.
    student = student_run(recipe, recipe.plan(), "recap", "ema-kd", teachers)
    aucs, variances = [], []
    for taught in finished_runs(recipe, student):
        model = load_artifact(taught / ARTIFACT).model
        assert isinstance(model, Routed)
        aucs.append(metrics.auc(shard.labels, predict(model, shard, device)))
        variances.append(predict_routes(model.model, shard, model.routes, device).var(axis=1).mean())
    assert stored["students"] == len(aucs) == 2
    assert last["RECAP", "route"]["auc"] == pytest.approx(np.mean(aucs))
    assert last["RECAP", "route"]["removed"] == pytest.approx(np.mean(variances))
    gain = 100 * last["recursive backbone", "trajectory"]["auc_gain"]
    assert f"trajectory: recursive backbone, 3 of them: {gain:+.3f}" in text
    assert text.count("Eq. 11, ") == 2 and "rank correlation" in text

    check_figure_files(workshop.reports / "estimators")
    files = {path: path.read_bytes() for path in (workshop.reports / "estimators").iterdir()}
    assert estimators(recipe, 2, workshop.reports) == text
    assert {path: path.read_bytes() for path in files} == files
    assert workshop.trained() == after
