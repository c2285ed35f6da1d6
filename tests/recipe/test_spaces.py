"""Search spaces: how they are read, which are refused, and whether the built-in ones fit their models."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, config_class, parse_model
from recap_ctr.recipe.spaces import SPACES, Range, check_space, named_space, parse_space, space_to_json


def check(model: str, space: dict[str, Any]) -> None:
    check_space(parse_space(space, "space"), model, {}, {}, "space")


def test_every_model_has_a_space() -> None:
    assert set(SPACES) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_built_in_spaces_fit_their_models(model: str) -> None:
    """Each value makes a valid model together with some value of another setting, and defaults are in the space."""
    space = named_space(model, None)
    check_space(space, model, {}, {}, model)
    assert "train.l2" in space
    choices = {
        name: values.samples() if isinstance(values, Range) else list(values)
        for name, values in space.items()
        if name.startswith("model.")
    }
    for name, values in space.items():
        kind = TrainConfig if name.startswith("train.") else config_class(model)
        default = kind.model_fields[name.partition(".")[2]].default
        default = list(default) if isinstance(default, tuple) else default
        assert values.holds(default) if isinstance(values, Range) else default in values, name
    for name in choices:
        others = [{other: value} for other in choices if other != name for value in choices[other]]
        for value in choices[name]:
            assert any(fits(model, {name: value, **change}) for change in ({}, *others)), (name, value)


def fits(model: str, settings: dict[str, Any]) -> bool:
    try:
        parse_model(model, {name.partition(".")[2]: value for name, value in settings.items()})
    except InputError:
        return False
    return True


def test_most_draws_go_together() -> None:
    """Otherwise a search would waste its draws."""
    for model in ("rfm", "finalmlp", "final", "recap", "autoint", "qnn"):
        choices = {
            name: values.samples() if isinstance(values, Range) else values
            for name, values in named_space(model, None).items()
            if not name.startswith("train.") and "dropout" not in name
        }
        valid = [fits(model, dict(zip(choices, draw, strict=True))) for draw in product(*choices.values())]
        assert sum(valid) > len(valid) / 2, model


def test_toml_and_python_give_the_same_space(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[model]\ndropout = [0, 0.5]\n[train]\nl2 = {low = 1e-5, high = 0.1, log = true}\n")
    space = named_space("dnn", str(file))
    assert space == parse_space(
        {"model.dropout": (0, 0.5), "train.l2": {"low": 1e-5, "high": 0.1, "log": True}}, "here"
    )
    assert parse_space(space_to_json(space), "again") == space


def test_ranges_hold_their_numbers_and_no_others() -> None:
    integers, stepped = Range(low=1, high=4, integer=True), Range(low=0.0, high=0.3, step=0.1)
    assert [integers.holds(value) for value in (1, 4, 5, 2.5, "2")] == [True, True, False, False, False]
    assert [stepped.holds(value) for value in (0.1, 0.3, 0.15)] == [True, True, False]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "the space is empty"),
        ({"model.dropot": [0.1]}, r"model\.dropot can't be searched; choose from dim, units"),
        ({"dropout": [0.1]}, r"dropout: the name of a setting begins with model\. or train\."),
        ({"train.seed": [1, 2]}, r"train\.seed can't be searched"),
        ({"train.rate": [1]}, r"train\.rate can't be searched; choose from batch_size"),
        ({"model.dropout": [0.1, 1.5]}, r"model\.dropout: .*less than 1 \(value: 1\.5\)"),
        ({"model.dropout": 0.1}, r"model\.dropout: 0\.1 is neither a list of choices nor a range"),
        ({"model.dropout": []}, r"model\.dropout: the list of choices is empty"),
        ({"model.dropout": [0, 0.0]}, r"model\.dropout: the choice 0\.0 is there twice"),
        ({"model.dim": {"low": 2, "high": 9}}, r"model\.dim: .*integer"),
        ({"model.dim": {"low": 2, "high": 9.5, "integer": True}}, "needs whole numbers"),
        ({"train.l2": {"low": 0, "high": 1, "log": True}}, "starts above 0"),
        ({"train.l2": {"low": 1, "high": 1}}, "must be below high"),
        ({"train.l2": {"low": 0, "high": 1, "step": 0.3}}, "don't end at 1"),
        ({"train.l2": {"low": 1, "high": 2, "step": 1, "log": True}}, "has no step"),
        ({"train.l2": {"low": 0, "hihg": 1}}, r"train\.l2: (hihg: unknown setting|high: Field required)"),
        ({"train.l2": {"low": -1, "high": 1}}, r"train\.l2: .*greater than or equal to 0"),
    ],
)
def test_a_wrong_space_is_refused(space: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check("dnn", space)


def test_values_that_only_do_not_go_together_are_allowed() -> None:
    check("qnn", {"model.num_heads": [1, 3]})
    with pytest.raises(InputError, match="must divide"):
        parse_model("qnn", {"num_heads": 3})


def test_a_space_comes_from_a_file_or_by_its_dotted_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file nowhere"):
        named_space("lr", "nowhere.toml")
    with pytest.raises(InputError, match=r"no built-in space for my_ctr\.nets:Pairs"):
        named_space("my_ctr.nets:Pairs", None)
    with pytest.raises(InputError, match="is not a mapping"):
        named_space("lr", "recap_ctr.recipe.spaces:PARTS")
    assert named_space("lr", "tests.recipe.test_spaces:SPACE").keys() == {"train.l2"}


SPACE = {"train.l2": [0.1, 0.2]}
