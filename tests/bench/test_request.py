"""Which table a request goes to, and with how many runs of each kind."""

from pathlib import Path

import pytest

from recap_ctr.bench.request import ONE_RECIPE, ONE_SEED, Request, fulfil
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe import Recipe


@pytest.mark.parametrize("table", ONE_RECIPE)
@pytest.mark.parametrize("asked", [None, 2])
def test_tables_of_many_settings_make_do_with_one_seed(
    table: str, asked: int | None, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Path]] = []

    def table_of(recipe: Recipe, seeds: int, reports: Path) -> str:
        seen.append((seeds, reports))
        return ""

    monkeypatch.setitem(ONE_RECIPE, table, table_of)
    fulfil(Request(table, (str(prepared.path),), tmp_path / "out", tmp_path / "reports", seeds=asked))
    assert seen == [(asked or (1 if table in ONE_SEED else 3), tmp_path / "reports" / prepared.name)]


def test_one_seed_names_tables() -> None:
    assert set(ONE_SEED) <= set(ONE_RECIPE)
