"""Figures 1b and 1c: means over subsets against brute force, and families of the estimators they name."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch

from recap_ctr import diagnose
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed
from recap_ctr.bench.estimators import axes_of, cells, estimators, measure_average, scale
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


def test_equation_11_weighs_checkpoints_by_age(prepared: PreparedData) -> None:
    rng = np.random.default_rng(0)
    checkpoints_NM = rng.normal(size=(len(prepared.test), 3))
    config = RunConfig("lr", parse_model("lr", {}), TrainConfig(ema_epochs=(2.0,)))
    weights = np.exp([-1.0, -0.5, 0.0])
    exact_N = checkpoints_NM @ weights / weights.sum()
    average = measure_average("LR", exact_N, checkpoints_NM, config, prepared.test)
    assert average.distance == pytest.approx(0.0, abs=1e-12) and average.auc == average.auc_of_logits
    expected = np.sqrt(((checkpoints_NM - exact_N[:, None]) ** 2).mean())
    assert average.spread == pytest.approx(expected)
    shifted = measure_average("LR", exact_N + 0.5, checkpoints_NM, config, prepared.test)
    assert shifted.distance == pytest.approx(0.5) and "by 0.500 in the logit" in str(shifted)


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
        run = directory_of(recipe, grid.config) / f"seed-{seed}"
        steps = [step for step, _ in checkpoints(run)]
        assert steps == [epoch.step for epoch in read_report(run).history]
        models = load_estimators(run, None, "checkpoint").values()
        logits = [predict(model, shard, device) for model in models]
        means.append(metrics.auc(shard.labels, np.mean(logits, axis=0)))
    assert last["recursive backbone", "trajectory"]["auc"] == pytest.approx(np.mean(means))

    # l2 is set, so that no probe changes it.
    student = student_run(recipe, recipe.plan(), "recap", "ema-kd", teachers)
    aucs, variances = [], []
    for run in finished_runs(recipe, student):
        model = load_artifact(run / ARTIFACT).model
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
