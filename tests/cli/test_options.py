"""Options that commands share: their choices are those of the code behind them, and their values are parsed."""

from enum import StrEnum
from typing import get_args

import pytest

from recap_ctr.bench.request import TABLES
from recap_ctr.cli.options import (
    ColumnsPer,
    PresetName,
    SplitName,
    complete_dataset,
    complete_device,
    complete_model,
    complete_split,
    drop_unset,
    parse_map,
    parse_settings,
)
from recap_ctr.cli.research import BenchTable
from recap_ctr.data.shards import SPLITS
from recap_ctr.datasets.catalogue import DATASETS
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS
from recap_ctr.recipe.config import PRESETS
from recap_ctr.training.estimators import Per


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        (SplitName, SPLITS),
        (PresetName, PRESETS),
        (ColumnsPer, get_args(Per)),
        (BenchTable, TABLES),
    ],
)
def test_choices_are_those_of_the_code_behind_them(choices: type[StrEnum], names: tuple[str, ...]) -> None:
    assert sorted(choices) == sorted(names)


def test_completion_offers_what_begins_alike() -> None:
    assert complete_model("") == list(MODELS)
    assert complete_model("re") == ["recap"]
    assert complete_dataset("ml") == [name for name in DATASETS if name.startswith("ml")] == ["ml-1m"]
    assert complete_split("h") == ["hash:"]
    assert complete_device("c") == ["cpu", "cuda"]


class TestSet:
    def test_values_are_those_of_toml_or_text(self) -> None:
        pairs = [
            "train.patience=3",
            "train.ema_epochs=[1, 2]",
            "model.loss=bce",
            'name="a b"',
            "l2=1e-3",
            "x=",
        ]
        assert parse_settings(pairs) == {
            "train": {"patience": 3, "ema_epochs": [1, 2]},
            "model": {"loss": "bce"},
            "name": "a b",
            "l2": 1e-3,
            "x": "",
        }
        assert parse_settings(None) == {}

    def test_the_last_one_wins(self) -> None:
        assert parse_settings(["l2=1", "l2=2"]) == {"l2": 2}

    @pytest.mark.parametrize("pair", ["patience", "=3", "train.=3", ".patience=3"])
    def test_what_is_no_pair(self, pair: str) -> None:
        with pytest.raises(InputError, match="expected KEY=VALUE"):
            parse_settings([pair])

    def test_a_value_is_no_table(self) -> None:
        with pytest.raises(InputError, match="can't be a table too"):
            parse_settings(["train=3", "train.patience=3"])


def test_map_is_parsed() -> None:
    assert parse_map(["ad=advert", "site=a=b"]) == {"ad": "advert", "site": "a=b"}
    with pytest.raises(InputError, match="expected FIELD=COLUMN"):
        parse_map(["ad"])


def test_options_that_were_not_set_are_dropped() -> None:
    options = {"l2": None, "seed": 0, "train": {"max_epochs": None}, "teacher_train": {"max_epochs": 2}}
    assert drop_unset(options) == {"seed": 0, "teacher_train": {"max_epochs": 2}}
