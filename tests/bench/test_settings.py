"""The published settings under benchmarks/ are valid, and each file is of the model it is named after."""

from pathlib import Path

import pytest

from recap_ctr.bench.published import DATASETS, PAPER_ORDER
from recap_ctr.config import TrainConfig, parse, read_toml
from recap_ctr.models import parse_model
from recap_ctr.recipe import recipe_config
from recap_ctr.runs import read_settings

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
    found = {path.stem for path in (BENCHMARKS / dataset).glob("*.toml")}
    assert found >= set(PAPER_ORDER) - {"lr", "fm", "recap"}
