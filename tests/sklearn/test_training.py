"""What the parameters of a CTRClassifier ask for is what the commands would do."""

from typing import Any

import numpy as np
import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.sklearn.classifier import CTRClassifier
from recap_ctr.sklearn.training import config_from
from recap_ctr.training.config import RunConfig

SMALL = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
STUDENT = {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4}


def taught(**parameters: Any) -> CTRClassifier:
    defaults = {
        "model_settings": STUDENT,
        "teacher_settings": SMALL,
        "teachers": np.int64(2),
        "routes": 4,
        "learning_rate": 0.05,
        "batch_size": 64,
        "max_epochs": 1,
        "random_state": 1,
    }
    return CTRClassifier(**{**defaults, **parameters})


def test_defaults_are_those_of_the_commands() -> None:
    alone = config_from(CTRClassifier(random_state=1).get_params())
    with_teachers = config_from(CTRClassifier(teachers=5, random_state=1).get_params())

    assert alone == RunConfig(
        "fcn", parse_model("fcn", {}), TrainConfig(), train_baseline=False, report_fields=False
    )
    # Stated beside the recipe's own defaults are only those that equal TrainConfig's.
    assert with_teachers == RecipeConfig(teachers=5, train={"update": "exact", "kd_weight": 1.0})


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ({}, {"model": "recap", "l2": None, "learning_rate": 0.05, "teachers": 2, "teacher_model": "fcn"}),
        ({"l2": 0.0, "routes": None}, {"l2": 0.0, "routes": None}),
        ({"model": "auto", "route_choice": "greedy"}, {"model": "auto", "route_choice": "greedy"}),
        (
            {"teachers": 0, "l2": "probe", "model_settings": SMALL},
            {"model": "fcn", "l2": None, "teachers": 0, "teacher_model": "fcn", "teacher_settings": SMALL},
        ),
        (
            {"ema": 0.9, "batch_size": np.int64(32), "kd_weight": 0.5},
            {"train": {"batch_size": 32, "max_epochs": 1, "update": "exact", "ema": 0.9, "kd_weight": 0.5}},
        ),
        ({"random_state": 1001}, {"seed": 1}),
    ],
    ids=str,
)
def test_parameters_become_a_recipe(settings: dict[str, Any], recipe: dict[str, Any]) -> None:
    config = config_from(taught(**settings).get_params())

    assert isinstance(config, RecipeConfig)
    assert {name: getattr(config, name) for name in recipe} == recipe
    config.model_dump_json()  # nothing of numpy is left in it
