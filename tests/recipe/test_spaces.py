"""Search spaces: how they are read, what is refused, and that the built-in ones fit their models."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, config_class, parse_model
from recap_ctr.recipe.spaces import SPACES, Range, check_space, named_space, parse_space, plain


def check(model: str, given: dict[str, Any], **base: Any) -> None:
    check_space(parse_space(given, "space"), model, base, {}, "space")


def test_every_model_has_a_space() -> None:
    assert set(SPACES) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_built_in_spaces_fit_their_models(model: str) -> None:
    """Each value of each setting makes a model with some values of the others, and defaults are among the values."""
    space = named_space(model, None)
    check_space(space, model, {}, {}, model)
    assert "train.l2" in space
    values = {
        name: each.samples() if isinstance(each, Range) else list(each)
        for name, each in space.items()
        if name.startswith("model.")
    }
    for name, each in space.items():
        kind = TrainConfig if name.startswith("train.") else config_class(model)
        default = kind.model_fields[name.partition(".")[2]].default
        default = list(default) if isinstance(default, tuple) else default
        assert each.holds(default) if isinstance(each, Range) else default in each, name
    for name, choices in values.items():
        for value in choices:
            changes = [{}, *({other: each} for other in values if other != name for each in values[other])]
            assert any(fits(model, {name: value, **change}) for change in changes), (name, value)


def fits(model: str, settings: dict[str, Any]) -> bool:
    try:
        parse_model(model, {name.partition(".")[2]: value for name, value in settings.items()})
    except InputError:
        return False
    return True


def test_most_of_what_is_drawn_goes_together() -> None:
    """Else a search would spend its draws on nothing."""
    for model in ("rfm", "finalmlp", "final", "recap", "autoint", "qnn"):
        names = {
            name: each.samples() if isinstance(each, Range) else each
            for name, each in named_space(model, None).items()
            if not name.startswith("train.") and "dropout" not in name
        }
        whole = [fits(model, dict(zip(names, values, strict=True))) for values in product(*names.values())]
        assert sum(whole) > len(whole) / 2, model


def test_toml_and_python_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[model]\ndropout = [0, 0.5]\n[train]\nl2 = {low = 1e-5, high = 0.1, log = true}\n")
    space = named_space("dnn", str(file))
    assert space == parse_space(
        {"model.dropout": (0, 0.5), "train.l2": {"low": 1e-5, "high": 0.1, "log": True}}, "here"
    )
    assert parse_space(plain(space), "again") == space


def test_ranges_know_what_they_hold() -> None:
    whole, stepped = Range(low=1, high=4, integer=True), Range(low=0.0, high=0.3, step=0.1)
    assert [whole.holds(value) for value in (1, 4, 5, 2.5, "2")] == [True, True, False, False, False]
    assert [stepped.holds(value) for value in (0.1, 0.3, 0.15)] == [True, True, False]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the space is empty"),
        ({"model.dropot": [0.1]}, r"model\.dropot: no setting to search; known are dim, units"),
        ({"dropout": [0.1]}, r"dropout: settings are called model\.NAME or train\.NAME"),
        ({"train.seed": [1, 2]}, r"train\.seed: no setting to search"),
        ({"train.rate": [1]}, r"train\.rate: no setting to search; known are batch_size"),
        ({"model.dropout": [0.1, 1.5]}, r"model\.dropout: .*less than 1 \(given: 1\.5\)"),
        ({"model.dropout": 0.1}, r"model\.dropout: 0\.1 is neither a list of choices nor a range"),
        ({"model.dropout": []}, r"model\.dropout: \[\]: choices must be one or more"),
        ({"model.dropout": [0, 0.0]}, r"each of them once"),
        ({"model.dim": {"low": 2, "high": 9}}, r"model\.dim: .*integer"),
        ({"model.dim": {"low": 2, "high": 9.5, "integer": True}}, "needs whole numbers"),
        ({"train.l2": {"low": 0, "high": 1, "log": True}}, "starts above 0"),
        ({"train.l2": {"low": 1, "high": 1}}, "must be below high"),
        ({"train.l2": {"low": 0, "high": 1, "step": 0.3}}, "don't arrive at 1"),
        ({"train.l2": {"low": 1, "high": 2, "step": 1, "log": True}}, "has no step"),
        ({"train.l2": {"low": 0, "hihg": 1}}, r"train\.l2: (hihg: unknown setting|high: Field required)"),
        ({"train.l2": {"low": -1, "high": 1}}, r"train\.l2: .*greater than or equal to 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check("dnn", given)


def test_values_that_only_do_not_go_together_are_no_error() -> None:
    check("qnn", {"model.num_heads": [1, 3]})
    with pytest.raises(InputError, match="must divide"):
        parse_model("qnn", {"num_heads": 3})


def test_where_a_space_may_come_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file nowhere"):
        named_space("lr", "nowhere.toml")
    with pytest.raises(InputError, match=r"no space of my_ctr\.nets:Pairs here"):
        named_space("my_ctr.nets:Pairs", None)
    with pytest.raises(InputError, match="is no mapping"):
        named_space("lr", "recap_ctr.recipe.spaces:PARTS")
    assert named_space("lr", "tests.recipe.test_spaces:SPACE").keys() == {"train.l2"}


SPACE = {"train.l2": [0.1, 0.2]}
