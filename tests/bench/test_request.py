"""Requests: which table they make, with which recipe, and with how many runs of each kind."""

import base64
import shutil
from pathlib import Path

import pytest

from recap_ctr.bench.request import ONE_RECIPE, ONE_SEED, Request, fulfil
from recap_ctr.bench.table1 import Treatment
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.stages import Recipe


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
            "capacity",
            (str(prepared.path),),
            tmp_path / "out",
            tmp_path / "reports",
            command="recap bench capacity",
        )
    )
    html = (tmp_path / "out" / prepared.name / "pages" / "capacity" / "report.html").read_text()
    assert '<p class="lead">Deeper is not better.</p>' in html
    assert "<td>1 + 1</td><td>90.1</td>" in html and "<li>No more.</li>" in html
    assert base64.b64encode(b"picture").decode() in html and "recap bench capacity" in html


@pytest.mark.parametrize("table", ["table1", *ONE_RECIPE])
def test_a_lack_of_teachers_is_refused_before_any_work(
    table: str, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Request(
        table, (str(prepared.path),), tmp_path / "out", tmp_path, settings={"teachers": 0, "l2": 0.1}
    )
    if table == "capacity":
        replaced = ONE_RECIPE[table]._replace(make=lambda recipe, seeds, reports: "alone")
        monkeypatch.setitem(ONE_RECIPE, table, replaced)
        assert fulfil(without) == "alone"
        return
    with pytest.raises(InputError, match="needs teachers"):
        fulfil(without)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_only_the_word_synthetic_has_the_quick_recipe(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []

    def table_of(recipe: Recipe, seeds: int, reports: Path) -> str:
        seen.append(recipe)
        return ""

    monkeypatch.setitem(ONE_RECIPE, "variance", ONE_RECIPE["variance"]._replace(make=table_of))
    shutil.copytree(prepared.path, tmp_path / "synthetic")
    for name, teachers in ((str(tmp_path / "synthetic"), 5), ("synthetic", 2)):
        fulfil(Request("variance", (name,), tmp_path / "out", tmp_path / "reports", quiet=True))
        assert seen[-1].data.name == "synthetic" and seen[-1].config.num_teachers == teachers
    fulfil(
        Request(
            "variance",
            ("synthetic",),
            tmp_path / "out",
            tmp_path / "reports",
            settings={"teachers": 3},
            quiet=True,
        )
    )
    assert seen[-1].config.teachers == 3


def test_baselines_that_are_tuned_have_no_l2_of_another_model(prepared: PreparedData, tmp_path: Path) -> None:
    request = Request(
        "table1",
        (str(prepared.path),),
        tmp_path / "out",
        tmp_path,
        models=("fcn",),
        settings={"l2": 0.1},
        treatment=Treatment.TUNED,
    )
    with pytest.raises(InputError, match="l2 is set, and --tuned finds one for each model"):
        fulfil(request)


def test_a_rank_that_is_capped_is_said(
    prepared: PreparedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(
        ONE_RECIPE, "variance", ONE_RECIPE["variance"]._replace(make=lambda recipe, seeds, reports: "")
    )
    for preset in ("default", "paper"):
        out = tmp_path / preset
        fulfil(Request("variance", (str(prepared.path),), out, out / "reports", preset=preset))
        said = capsys.readouterr().err
        assert ("96 would exceed 1.05 times FCN's size" in said) == (preset == "paper")


def test_one_seed_names_tables() -> None:
    assert set(ONE_SEED) <= set(ONE_RECIPE)


@pytest.mark.slow
def test_settings_override_those_of_the_file_table_by_table(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []

    def table_of(recipe: Recipe, seeds: int, reports: Path) -> str:
        seen.append(recipe)
        return ""

    monkeypatch.setitem(ONE_RECIPE, "variance", ONE_RECIPE["variance"]._replace(make=table_of))
    file = tmp_path / "reports" / prepared.name / "recipe.toml"
    file.parent.mkdir(parents=True)
    file.write_text("teachers = 4\n[train]\npatience = 7\nmax_epochs = 9\n")
    settings = {"train": {"max_epochs": 2}}
    for name in (str(prepared.path), "synthetic"):
        fulfil(
            Request(
                "variance", (name,), tmp_path / "out", tmp_path / "reports", settings=settings, quiet=True
            )
        )
    fulfil(
        Request(
            "variance",
            (str(prepared.path),),
            tmp_path / "paper",
            tmp_path / "reports",
            preset="paper",
            quiet=True,
        )
    )
    by_file, quick, paper = (recipe.config for recipe in seen)
    assert paper == recipe_config("paper", {}, "test"), "the file belongs to the default recipe"
    assert by_file.teachers == 4 and by_file.train == {"patience": 7, "max_epochs": 2}
    assert quick.train["max_epochs"] == 2 and quick.train["patience"] == 2
