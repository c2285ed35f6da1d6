"""Figure 1a: the shapes, what they are trained like, and the numbers beside them."""

import json
from statistics import mean, stdev

import pytest

from recap_ctr.bench.capacity import Shape, capacity, configs, own_shape, shapes
from recap_ctr.models.catalogue import count_parameters
from recap_ctr.models.fcn import FCNConfig
from recap_ctr.training.run import read_report
from tests.bench.conftest import Kitchen
from tests.bench.test_figures import check


def test_both_ways_of_growing_hold_the_recipes_own() -> None:
    own = own_shape(FCNConfig())
    assert own == Shape(3, 4, 1)
    assert all(own in line for line in shapes(own).values())
    assert [shape.heads for shape in shapes(own)["breadth"]] == [1, 2]
    assert shapes(Shape(1, 1, 2))["depth"] == [Shape(1, 1, 2), Shape(2, 2, 2)]


def test_shapes_differ_in_shape_alone_and_learn_from_labels(kitchen: Kitchen) -> None:
    own = kitchen.recipe
    plan = own.plan()
    found = configs(own, plan)
    assert next(iter(found)) == Shape(1, 1, 1), "the recipe's own comes first"
    for shape, config in found.items():
        assert isinstance(config.model_config, FCNConfig)
        assert own_shape(config.model_config) == shape
        assert config.train == own.settings.model_copy(
            update={"l2": plan.l2, "learning_rate": plan.learning_rate}
        )
        assert config.train.ema_epochs and not config.teachers
        same = {"num_exponential_layers": 1, "num_linear_layers": 1, "num_heads": 1}
        assert config.model_config.model_copy(update=same) == own.teacher_config


def test_table_has_the_figures_of_its_runs(kitchen: Kitchen) -> None:
    before = kitchen.trained()
    text = capacity(kitchen.recipe, 1, kitchen.reports)
    after = kitchen.trained()

    assert {path: after[path] for path in before} == before
    stored = json.loads((kitchen.reports / "capacity" / "capacity.json").read_text())
    by_shape = {}
    for path in after:
        report = read_report(path)
        if (
            report["model"]["name"] == "fcn"
            and report["train"]["ema_epochs"]
            and not report["train"]["checkpoints"]
        ):
            by_shape[own_shape(FCNConfig(**report["model"]["config"]))] = report
    points = stored["points"]
    assert len({(p["exponential_layers"], p["linear_layers"], p["heads"]) for p in points}) == 3
    own = by_shape[Shape(1, 1, 1)]["metrics"]["test"]["raw"]["auc"]
    for point in points:
        shape = Shape(point["exponential_layers"], point["linear_layers"], point["heads"])
        report = by_shape[shape]
        assert point["auc"] == [report["metrics"]["test"]["raw"]["auc"]]
        assert point["valid_auc"] == [report["metrics"]["valid"]["raw"]["auc"]]
        assert point["gain"] == pytest.approx(point["auc"][0] - own)
        assert point["default"] == (shape == Shape(1, 1, 1))
        config = FCNConfig(**report["model"]["config"])
        assert point["parameters"] == count_parameters("fcn", config, kitchen.recipe.data.layout)
    assert text.count("**1 + 1**") == 1, "the recipe's own is one line"

    teachers = kitchen.recipe.teachers(kitchen.recipe.plan())
    aucs = [report["metrics"]["test"]["raw"]["auc"] for report in teachers.values()]
    together = kitchen.recipe.ensembles(list(teachers))[-1]["metrics"]["test"]["raw"]["auc"]
    assert stored["ensemble"]["gain"]["test"] == pytest.approx(together - mean(aucs))
    assert stored["ensemble"]["noise"]["test"] == pytest.approx(stdev(aucs))
    double = next(point for point in points if point["exponential_layers"] == 2)
    assert f"Twice the depth gains {100 * double['gain']:+.3f} points" in text
    assert f"the mean of 3 runs gains {100 * (together - mean(aucs)):+.3f}" in text

    check(kitchen.reports / "capacity")
    files = {path: path.read_bytes() for path in (kitchen.reports / "capacity").iterdir()}
    assert capacity(kitchen.recipe, 1, kitchen.reports) == text
    assert {path: path.read_bytes() for path in files} == files
    assert kitchen.trained() == after
