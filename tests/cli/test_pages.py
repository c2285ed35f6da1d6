"""The command that makes pages of reports."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json


@pytest.mark.slow
def test_one_run(finished: Path, tmp_path: Path, recap: Recap) -> None:
    done = recap("report", finished, "--out", tmp_path / "page", "--json")
    result = only_json(done.out)
    assert Path(result["page"]).is_file()
    again = recap("report", finished, "--out", tmp_path / "page")
    assert again.out == f"{result['lead']}\n"
    assert f"Open {result['page']}" in again.err


@pytest.mark.slow
def test_several_runs_need_a_directory(finished: Path, tmp_path: Path, recap: Recap) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert_refused(recap("report", finished, copy), "needs a directory of its own", "--out DIR")
    done = recap("report", finished, copy, "--out", tmp_path / "page")
    assert done.code == 0
    assert "of 2 runs" in done.out


def test_what_has_no_report(tmp_path: Path, recap: Recap) -> None:
    assert_refused(recap("report", tmp_path), str(tmp_path))
