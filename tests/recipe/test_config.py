"""The recipe's settings: presets, checks, and the training that follows from them."""

import tomllib
from typing import Any

import pytest

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.recap import RecapConfig, default_rank
from recap_ctr.recipe.config import (
    PRESETS,
    RecipeConfig,
    batch_size,
    merge_settings,
    recipe_config,
    training_of,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "nothing"}, "no model 'nothing'"),
        ({"teacher_model": "nothing"}, "no model 'nothing'"),
        ({"routes": 0}, "routes"),
        ({"seed": 1000}, "seed"),
        ({"train": {"l2": 1.0}}, r"l2 is a setting of the recipe itself: move it out of \[train\]"),
        ({"teacher_train": {"seed": 1}}, r"move it out of \[teacher_train\]"),
        ({"probe": {"strength": [1.0]}}, "unknown setting"),
        ({"model_settings": {"size": 3}}, "unknown setting"),
        ({"teacher_settings": {"size": 3}}, "unknown setting"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_config("default", settings, "test")


def test_settings_of_training_are_checked_too() -> None:
    with pytest.raises(InputError, match="epochs"):
        training_of(recipe_config("default", {"train": {"epochs": 1}}, "test"), 1_000)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match=r"no preset 'best'\n  fix: choose from default, paper"):
        recipe_config("best", {}, "test")


def test_settings_change_single_keys_of_a_presets_tables() -> None:
    config = recipe_config("paper", {"train": {"max_epochs": 3}, "teachers": 1}, "test")
    assert config.train == {**PRESETS["paper"]["train"], "max_epochs": 3}
    assert config.teachers == 1
    assert PRESETS["paper"]["train"]["max_epochs"] == 20, "the preset itself is unchanged"


def test_merging_leaves_both_sides_unchanged() -> None:
    base, settings = (
        {"train": {"patience": 3}, "l2": 0.1},
        {"train": {"patience": 4}, "probe": {"rungs": [1]}},
    )
    assert merge_settings(base, settings) == {"train": {"patience": 4}, "l2": 0.1, "probe": {"rungs": [1]}}
    assert base == {"train": {"patience": 3}, "l2": 0.1}


def test_the_papers_preset_is_what_the_paper_states() -> None:
    """Every field is pinned: one that is changed by mistake would make another method of it."""
    config = recipe_config("paper", {}, "test")

    def values(record: Frozen) -> dict[str, Any]:
        """Return all settings, also those that names of directories leave out."""
        return {name: getattr(record, name) for name in type(record).model_fields}

    student, teacher = (training_of(config, 10**6, teacher=is_teacher) for is_teacher in (False, True))
    published = {
        "batch_size": 4096,
        "learning_rate": 1e-3,
        "l2": 1e-5,
        "net_l2": 0.0,
        "clip": 10.0,
        "update": "exact",
        "validations": 1,
        "plateau_factor": 0.1,
        "min_learning_rate": 1e-6,
        "ema_epochs": (),
        "ema_warmup": 0.0,
        "checkpoints": 0,
        "kd_weight": 1.0,
        "kd_from": "mean",
        "recombined": 0,
        "window_rows": None,
        "precision": "float32",
        "seed": 1,
    }
    assert values(student) == {
        **published,
        "schedule": "cosine",
        "max_epochs": 20,
        "patience": 20,
        "ema": 0.9995,
    }
    assert values(teacher) == {
        **published,
        "schedule": "plateau",
        "max_epochs": 100,
        "patience": 2,
        "ema": None,
    }
    assert values(config.probe) == {
        "strengths": (1e1, 1e2, 1e3, 1e4, 1e5),
        "rungs": (8, 16),
        "refinements": (0.5, 0.25),
        "rate_factors": (0.5, 2.0),
        "horizon_factors": (),
        "dropouts": (),
        "dim_factors": (),
        "extend": 4,
        "confirm": 16,
        "max_rows": 300_000,
    }
    assert values(config.model_config_of("recap")) == {
        "dim": 16,
        "depth": 4,
        "num_adapters": 8,
        "lora_rank": None,
        "max_rank": 96,
        "form": "additive",
        "binding": "free",
        "sampling": "batch",
        "sample_from": 0,
        "exponential_dropout": 0.1,
        "linear_dropout": 0.1,
        "layer_norm": True,
        "scale_norm": True,
        "fuse": "mean",
        "first_order": False,
        "rates": None,
        "boosted": None,
        "tower_limit": None,
        "train_depths": (2, 3, 4),
        "depth_weights": (1 / 3, 1 / 3, 1 / 3),
        "loss": "depth-bce",
    }
    assert values(config.model_config_of(config.teacher_model)) == {
        "dim": 16,
        "num_exponential_layers": 3,
        "num_linear_layers": 4,
        "num_heads": 1,
        "num_branches": 1,
        "exponential_dropout": 0.1,
        "linear_dropout": 0.1,
        "layer_norm": True,
        "scale_norm": True,
        "loss": "tri-bce",
    }
    tables = {"model_settings", "teacher_settings", "train", "teacher_train", "probe", "card"}
    of_portfolios = {"portfolio", "refit"}
    rest = {name: value for name, value in values(config).items() if name not in tables | of_portfolios}
    assert rest == {
        "model": "recap",
        "teacher_model": "fcn",
        "teachers": 5,
        "routes": 8,
        "route_choice": "random",
        "l2": None,
        "learning_rate": None,
        "recombined": 0,
        "student_factors": (),
        "ship": "student",
        "calibration": "affine",
        "negative_rate": 1.0,
        "slices": None,
        "seed": 1,
    }


def test_the_papers_preset_does_not_follow_the_default_recipe() -> None:
    """A new default, such as another way to train adapters, must not become the paper's."""
    paper = PRESETS["paper"]
    by_shape = {
        "dim",
        "lora_rank",
        "exponential_dropout",
        "linear_dropout",
        "layer_norm",
        "scale_norm",
        "loss",
    }
    beside = {"first_order", "rates", "boosted", "tower_limit"}
    assert set(RecapConfig.model_fields) - set(paper["model_settings"]) == by_shape | beside
    assert {"model", "teacher_model", "teachers", "routes", "route_choice", "calibration"} <= set(paper)
    trained = {"schedule", "ema", "ema_epochs", "ema_warmup", "max_epochs", "kd_weight", "kd_from"}
    assert trained <= set(paper["train"])


def test_a_cosine_decays_before_a_run_ends_whatever_its_length() -> None:
    longer = recipe_config("paper", {"train": {"max_epochs": 40}}, "test")
    assert training_of(longer, 10**6).patience == 40
    assert training_of(longer, 10**6, teacher=True).patience == 2
    assert (
        training_of(recipe_config("default", {"train": {"schedule": "cosine"}}, "test"), 10**6).patience == 60
    )
    own = recipe_config("paper", {"train": {"patience": 4}}, "test")
    assert training_of(own, 10**6).patience == 4
    assert training_of(recipe_config("default", {}, "test"), 10**6).patience == 3


def test_the_papers_rank_is_capped_where_the_model_would_outgrow_fcn() -> None:
    config = recipe_config("paper", {}, "test").model_config_of("recap")
    assert isinstance(config, RecapConfig)
    small = Layout.of_sizes([6_042, 4, 9, 23, 3_643, 10, 20])
    large = Layout.of_sizes([25_000] * 39)
    assert default_rank(config, large) == 96
    rank = default_rank(config, small)
    fcn = count_parameters("fcn", parse_model("fcn", {}), small)
    assert rank < 56
    assert count_parameters("recap", config, small) <= 1.05 * fcn
    wider = config.model_copy(update={"lora_rank": rank + 4})
    assert count_parameters("recap", wider, small) > 1.05 * fcn


def test_the_papers_preset_survives_toml() -> None:
    config = recipe_config("paper", {}, "test")
    back = recipe_config("default", tomllib.loads(config.to_toml()), "test")
    assert back == config
    assert training_of(back, 10**6, teacher=True).ema is None


def test_a_model_of_the_teachers_kind_is_built_like_them() -> None:
    config = recipe_config("default", {"teacher_settings": {"dim": 8}, "model_settings": {"dim": 4}}, "test")
    dims = [getattr(config.model_config_of(name), "dim", None) for name in ("fcn", "recap", "qnn")]
    assert dims == [8, 4, 16]
    student = recipe_config("default", {"model": "fcn", "teacher_settings": {"dim": 8}}, "test")
    assert getattr(student.model_config_of("fcn"), "dim", None) == 16


def test_auto_has_two_students() -> None:
    assert RecipeConfig(model="auto").students == ("recap", "fcn")
    assert RecipeConfig().students == ("recap",)


def test_small_data_get_small_batches() -> None:
    sizes = [batch_size(rows) for rows in (10, 10_000, 50_000, 200_000, 10**8)]
    assert sizes == sorted(sizes) and sizes[0] == 128 and sizes[-1] == 4096


def test_teachers_ignore_what_only_students_use() -> None:
    config = recipe_config(
        "default", {"train": {"kd_weight": 0.5, "patience": 7}, "teacher_train": {"patience": 9}}, "test"
    )
    student, teacher = training_of(config, 10_000), training_of(config, 10_000, teacher=True)
    assert (student.kd_weight, student.patience) == (0.5, 7)
    assert (teacher.kd_weight, teacher.patience) == (1.0, 9)
    by_column = recipe_config("default", {"train": {"kd_from": "column"}}, "test")
    assert training_of(by_column, 1_000).kd_from == "column"
    assert training_of(by_column, 1_000, teacher=True).kd_from == "mean", "a teacher has no columns"
    assert student.schedule == teacher.schedule == "constant"
