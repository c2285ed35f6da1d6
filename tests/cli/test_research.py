"""Commands for researchers: what they refuse, and a table from beginning to end."""

from pathlib import Path

import pytest

from recap_ctr.data.shards import PreparedData
from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tabel1", "--data", "synthetic"), ["'tabel1' is not one of", "did you mean 'table1'?"]),
        (("table1",), ["missing option '--data'", "recap bench --help"]),
        (("table1", "--data", "nowhere"), ["nowhere holds no prepared data"]),
        (("table1", "--data", "synthetic", "--models", "recp"), ["recp"]),
        (("ablation", "--data", "synthetic", "--set", "teacher=1"), ["did you mean 'teachers'?"]),
        (("ablation", "--data", "synthetic", "--set", "teachers"), ["expected KEY=VALUE"]),
    ],
)
def test_bad_requests(arguments: tuple[str, ...], words: list[str], tmp_path: Path, recap: Recap) -> None:
    assert_refused(recap("bench", *arguments, "--out", tmp_path / "out"), *words)


@pytest.mark.slow
def test_a_table(prepared: PreparedData, tmp_path: Path, recap: Recap, one_process: None) -> None:
    settings = tmp_path / "reports" / prepared.name / "lr.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[train]\nbatch_size = 512\nmax_epochs = 1\n")
    places = ("--reports", tmp_path / "reports", "--out", tmp_path / "out")
    call = ("bench", "table1", "--data", prepared.path, "--models", "lr", "--seeds", 1, *places)
    planned = recap(*call, "--dry-run")
    assert planned.code == 0
    assert "without --dry-run" in planned.err
    result = only_json(recap(*call, "--json", "-q").out)
    assert result["table"] == "table1"
    assert "| model | settings | seeds | parameters | AUC" in result["markdown"]


def test_diagnose_refuses_a_directory_of_something_else(
    prepared: PreparedData, tmp_path: Path, recap: Recap
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = recap("diagnose", prepared.path, "--set", "teachers=0", "--out", tmp_path)
    assert_refused(done, "choose another --out")
