from collections.abc import Callable
from pathlib import Path

import pytest

from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, catalogue, count_parameters, model_class, parse_model
from tests.support import checks
from tests.support.published import AVAZU, CRITEO, KDD12, KKBOX, ML_1M


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, check: Callable[[str], None]) -> None:
    check(name)


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    checks.check_save_and_load(name, tmp_path)


def fcn(exponential: int, linear: int, **settings: object) -> tuple[str, dict[str, object]]:
    return "fcn", {"num_exponential_layers": exponential, "num_linear_layers": linear, **settings}


# Totals printed in public run logs.
PUBLISHED = [
    (*fcn(3, 4), ML_1M, 201_728),
    (*fcn(3, 4, scale_norm=False), CRITEO, 15_944_754),
    (*fcn(4, 5, scale_norm=False), CRITEO, 16_336_626),
    (*fcn(4, 4), KDD12, 74_866_354),
    (*fcn(4, 2, dim=128), KKBOX, 20_074_766),
    (*fcn(5, 5, dim=128), KKBOX, 25_625_878),
    (*fcn(4, 5, num_heads=4), AVAZU, 240_735_242),
    ("ecn", {"num_layers": 4, "num_heads": 3}, AVAZU, 180_346_345),
    ("ecn", {"num_layers": 2}, ML_1M, 169_125),
    ("ecn", {"num_layers": 3, "dim": 128}, KKBOX, 15_909_767),
    *(
        ("ecn", {"num_layers": n, "scale_norm": False}, CRITEO, 14_768_513 + 195_936 * (n - 1))
        for n in range(1, 7)
    ),
    *(("ecn", {"num_layers": n}, KDD12, 74_711_795 + 22_050 * (n - 1)) for n in range(1, 9)),
    ("lcn", {"num_layers": 2}, ML_1M, 169_125),
    ("lr", {}, CRITEO, 910_748),
]


@pytest.mark.parametrize(("name", "settings", "layout", "total"), PUBLISHED)
def test_published_totals(name: str, settings: dict[str, object], layout: Layout, total: int) -> None:
    assert count_parameters(name, parse_model(name, settings), layout) == total


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
