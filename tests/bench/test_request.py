"""Which table a request goes to, and with how many runs of each kind."""

import base64
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

    monkeypatch.setitem(ONE_RECIPE, table, ONE_RECIPE[table]._replace(make=table_of))
    fulfil(Request(table, (str(prepared.path),), tmp_path / "out", tmp_path / "reports", seeds=asked))
    assert seen == [(asked or (1 if table in ONE_SEED else 3), tmp_path / "reports" / prepared.name)]


def test_every_table_has_a_page_with_its_figure(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table_of(recipe: Recipe, seeds: int, reports: Path) -> str:
        (reports / "capacity").mkdir(parents=True)
        (reports / "capacity" / "capacity.png").write_bytes(b"picture")
        return "Deeper is not better.\n\n| shape | AUC |\n| --- | --- |\n| **1 + 1** | <u>90.1</u> |\n\nNo more.\n"

    monkeypatch.setitem(ONE_RECIPE, "capacity", ONE_RECIPE["capacity"]._replace(make=table_of))
    fulfil(
        Request(
            "capacity", (str(prepared.path),), tmp_path / "out", tmp_path / "reports", command="recap bench capacity"
        )
    )  # fmt: skip
    html = (tmp_path / "out" / prepared.name / "pages" / "capacity" / "report.html").read_text()
    assert '<p class="lead">Deeper is not better.</p>' in html
    assert "<td>1 + 1</td><td>90.1</td>" in html and "<li>No more.</li>" in html
    assert base64.b64encode(b"picture").decode() in html and "recap bench capacity" in html


def test_one_seed_names_tables() -> None:
    assert set(ONE_SEED) <= set(ONE_RECIPE)
