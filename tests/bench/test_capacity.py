"""Figure 1a: the shapes, how they are trained, and the numbers beside them."""

import json
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest

from recap_ctr.axes.logits import LogitTable
from recap_ctr.bench.capacity import Shape, capacity, configs, shape_of, shapes
from recap_ctr.diagnose import predicted_gain
from recap_ctr.evaluation import metrics
from recap_ctr.models.catalogue import count_parameters
from recap_ctr.models.fcn import FCNConfig
from recap_ctr.recipe.report import measure_ensembles
from recap_ctr.training.config import LOGITS
from recap_ctr.training.report import RunReport, read_report
from tests.support.bench_files import check_figure_files
from tests.support.finished_tables import Workshop


def test_both_ways_of_growing_hold_the_recipes_shape() -> None:
    default = shape_of(FCNConfig())
    assert default == Shape(3, 4, 1)
    assert all(default in grown for grown in shapes(default).values())
    assert [shape.branches for shape in shapes(default)["breadth"]] == [1, 2, 3]
    assert shapes(Shape(1, 1, 2))["depth"] == [Shape(1, 1, 2), Shape(2, 2, 2)]


@pytest.mark.slow
def test_shapes_differ_in_shape_alone_and_learn_from_labels(workshop: Workshop) -> None:
    recipe = workshop.recipe
    plan = recipe.plan()
    by_shape = configs(recipe, plan)
    assert next(iter(by_shape)) == Shape(1, 1, 1), "the recipe's shape comes first"
    for shape, config in by_shape.items():
        assert isinstance(config.model_config, FCNConfig)
        assert shape_of(config.model_config) == shape
        assert config.train == recipe.student_training.model_copy(
            update={"l2": plan.l2, "learning_rate": plan.learning_rate}
        )
        assert config.train.ema_epochs and not config.teachers
        same = {"num_exponential_layers": 1, "num_linear_layers": 1, "num_branches": 1}
        assert config.model_config.model_copy(update=same) == recipe.teacher_model_config


@pytest.mark.slow
def test_table_has_the_figures_of_its_runs(workshop: Workshop) -> None:
    before = workshop.trained()
    text = capacity(workshop.recipe, 2, workshop.reports)
    after = workshop.trained()

    assert {path: after[path] for path in before} == before
    stored = json.loads((workshop.reports / "capacity" / "capacity.json").read_text())
    by_shape: dict[Shape, dict[int, tuple[Path, RunReport]]] = {}
    for path in after:
        report = read_report(path)
        if report.model.name == "fcn" and report.train.ema_epochs and not report.train.checkpoints:
            shape = shape_of(FCNConfig(**report.model.config))
            by_shape.setdefault(shape, {})[report.train.seed] = (path, report)
    points = stored["points"]
    assert len({(p["exponential_layers"], p["linear_layers"], p["branches"]) for p in points}) == 4

    def aucs_of(shape: Shape) -> list[float]:
        return [by_shape[shape][seed][1].metrics.on("test").raw.auc for seed in (1, 2)]

    test = workshop.recipe.data.test
    for point in points:
        shape = Shape(point["exponential_layers"], point["linear_layers"], point["branches"])
        assert point["auc"] == aucs_of(shape)
        assert point["gain"] == pytest.approx(mean(point["auc"]) - mean(aucs_of(Shape(1, 1, 1))))
        assert point["default"] == (shape == Shape(1, 1, 1))
        report = by_shape[shape][1][1]
        config = FCNConfig(**report.model.config)
        assert point["parameters"] == count_parameters("fcn", config, workshop.recipe.data.layout)
        logits_NM = np.stack(
            [LogitTable(by_shape[shape][seed][0] / LOGITS / "test").logits_NM[:, 0] for seed in (1, 2)], 1
        ).astype(np.float64)
        mean_N = logits_NM.mean(axis=1)
        # Eq. 3 by hand; of two runs, the mean of both removes half of the variance.
        lost = point["loss_by_variance"]
        assert lost == pytest.approx(2 * predicted_gain(logits_NM), rel=1e-9)
        exact = mean(point["logloss"]) - metrics.logloss(test.labels, mean_N)
        assert lost / 2 == pytest.approx(exact, rel=0.5)
    assert text.count("**1 + 1**") == 1, "the recipe's shape is listed once"

    teachers = workshop.recipe.train_teachers(workshop.recipe.plan())
    aucs = [report.metrics.on("test").raw.auc for report in teachers.values()]
    ensembles = measure_ensembles(workshop.recipe.config, workshop.recipe.data, list(teachers))
    together = ensembles[-1].metrics.on("test").raw.auc
    assert stored["ensemble"]["gain"]["test"] == pytest.approx(together - mean(aucs))
    assert stored["ensemble"]["noise"]["test"] == pytest.approx(stdev(aucs))
    double = next(point for point in points if point["exponential_layers"] == 2)
    assert f"Twice the depth gains {100 * double['gain']:+.3f} points" in text
    assert f"the mean of 3 runs gains {100 * (together - mean(aucs)):+.3f}" in text

    check_figure_files(workshop.reports / "capacity")
    files = {path: path.read_bytes() for path in (workshop.reports / "capacity").iterdir()}
    assert capacity(workshop.recipe, 2, workshop.reports) == text
    assert {path: path.read_bytes() for path in files} == files
    assert workshop.trained() == after
