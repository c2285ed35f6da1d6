"""The catalogue of models."""

import pytest

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, catalogue, model_class, parse_model


@pytest.mark.slow
def test_catalogue_names_purpose_and_paper_of_each_model() -> None:
    entries = {entry["name"]: entry for entry in catalogue()}
    assert list(entries) == list(MODELS)
    for entry in entries.values():
        assert 40 < len(entry["purpose"]) < 120 and entry["purpose"].endswith("."), entry
        assert len(entry["paper"]) > 20, entry
    assert [entries[name]["parameters"] for name in ("fcn", "ecn", "qnn")] == [201_728, 169_125, 207_649]


def test_unknown_model_and_setting_are_named() -> None:
    with pytest.raises(InputError, match="no model 'fnc'"):
        model_class("fnc")
    with pytest.raises(InputError, match="num_layer"):
        parse_model("ecn", {"num_layer": 2})
