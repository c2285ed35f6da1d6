"""The published settings under benchmarks/ are valid, and each file is of the model it is named after."""

import re
from pathlib import Path

import pytest

from recap_ctr.bench.published import DATASETS, PAPER_ORDER, logged
from recap_ctr.config import TrainConfig, parse, read_toml
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.spaces import Range, named_space
from recap_ctr.training.config import read_settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*/*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_settings_are_valid(path: Path) -> None:
    if path.stem == "recipe":
        recipe_config("default", read_toml(path), str(path))
        return
    settings = read_settings(path)
    assert settings.model == path.stem
    parse_model(settings.model, settings.model_settings)
    parse(TrainConfig, settings.train, str(path))
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_baseline_has_settings_for_the_papers_data(dataset: str) -> None:
    names = {path.stem for path in (BENCHMARKS / dataset).glob("*.toml")}
    assert names >= set(PAPER_ORDER) - {"lr", "fm", "recap"}


LOGGED = [
    path
    for path in sorted(BENCHMARKS.glob("*/*.toml"))
    if path.read_text().startswith("# As in the public run log") or path.stem in ("ecn", "fcn", "qnn")
]


@pytest.mark.parametrize("path", LOGGED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_public_log_is_that_of_the_settings(path: Path) -> None:
    figures = logged(path.parent.name, path.stem)
    quoted = re.match(r"#.*?\((?:test AUC )?(0\.\d+), logloss (0\.\d+)", path.read_text())
    assert (figures is None) == (quoted is None)
    if figures and quoted:
        assert (round(figures.auc / 100, 6), figures.logloss) == (float(quoted[1]), float(quoted[2]))


@pytest.mark.parametrize("path", LOGGED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_search_could_find_what_was_published_as_tuned(path: Path) -> None:
    """But for no regulariser at all, beside which the weakest is nothing, and for sizes that belong to a data set."""
    settings = read_settings(path)
    published = {
        **{f"model.{key}": value for key, value in settings.model_settings.items()},
        **{f"train.{key}": value for key, value in settings.train.items()},
    }
    space = named_space(settings.model, None)
    for name in published.keys() & space.keys() - {"model.num_products", "model.neurons"}:
        each, value = space[name], published[name]
        if (name, value) == ("train.l2", 0.0):
            continue
        assert each.holds(value) if isinstance(each, Range) else value in each, (name, value)
