"""Rows against the training rows of a model: what is said, as text and as JSON, and the exit code."""

from pathlib import Path

import polars as pl
import pytest

import recap_ctr
from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json


@pytest.fixture
def clean(click_log: pl.DataFrame, tmp_path: Path) -> Path:
    click_log.tail(900).write_parquet(tmp_path / "clean.parquet")
    return tmp_path / "clean.parquet"


@pytest.fixture
def spoilt(click_log: pl.DataFrame, tmp_path: Path) -> Path:
    spoilt = click_log.tail(900).with_columns(pl.col("site").str.to_uppercase(), pl.lit(None).alias("price"))
    spoilt.write_parquet(tmp_path / "spoilt.parquet")
    return tmp_path / "spoilt.parquet"


class TestCheck:
    def test_nothing_unusual(self, packed: Path, clean: Path, recap: Recap) -> None:
        done = recap("check", clean, "--against", packed)
        assert done.code == 0
        assert "900 rows: nothing unusual." in done.out
        assert "stability index" in done.out

    def test_findings_are_named_with_their_numbers_and_a_code(
        self, packed: Path, spoilt: Path, recap: Recap
    ) -> None:
        done = recap("check", spoilt, "--against", packed.parent, "--quiet")
        assert (done.code, done.err) == (3, "")
        assert "site: values are spelled otherwise (100.00%; usual 0.00%, limit" in done.out
        assert "price: missing values (100.00%; usual" in done.out
        assert done.out.count("fix: ") == 2
        result = only_json(recap("check", spoilt, "--against", packed, "--json").out)
        assert [finding["check"] for finding in result["findings"]] == ["spelling", "missing"]
        assert len(result["fields"]) == 5

    def test_python(self, packed: Path, clean: Path, click_log: pl.DataFrame) -> None:
        assert not recap_ctr.check(clean, packed).findings
        mapped = recap_ctr.check(
            click_log.tail(900).rename({"site": "page"}), recap_ctr.load(packed), columns={"site": "page"}
        )
        assert not mapped.findings
        absent = recap_ctr.check(click_log.tail(900).drop("site"), packed)
        assert [finding.cause for finding in absent.findings] == ["there is no such column"]

    def test_few_rows(self, packed: Path, click_log: pl.DataFrame, tmp_path: Path, recap: Recap) -> None:
        click_log.head(20).write_csv(tmp_path / "few.csv")
        done = recap("check", tmp_path / "few.csv", "--against", packed)
        assert done.code == 0 and "20 rows are too few to judge." in done.out

    def test_refusals(self, clean: Path, tmp_path: Path, recap: Recap) -> None:
        assert_refused(recap("check", clean, "--against", tmp_path), "holds no artifact")
        assert_refused(recap("check", clean), "--against")


class TestPredict:
    def test_it_warns_at_the_end(self, packed: Path, spoilt: Path, tmp_path: Path, recap: Recap) -> None:
        done = recap("predict", packed, spoilt, "--out", tmp_path / "scores.csv")
        assert done.code == 0
        assert "Warning: site: values are spelled otherwise" in done.err
        again = recap("predict", packed, spoilt, "--out", tmp_path / "again.csv", "--json", "-q")
        assert [finding["check"] for finding in only_json(again.out)["findings"]] == ["spelling", "missing"]

    def test_python_warns(self, packed: Path, spoilt: Path, clean: Path) -> None:
        recap_ctr.predict(packed, clean)
        with pytest.warns(recap_ctr.DataWarning) as warned:
            recap_ctr.predict(packed, spoilt)
        assert [str(warning.message).partition(" (")[0] for warning in warned] == [
            "site: values are spelled otherwise",
            "price: missing values",
        ]


class TestDrift:
    @pytest.mark.slow
    def test_text_json_page_and_code(self, packed: Path, clean: Path, tmp_path: Path, recap: Recap) -> None:
        done = recap("drift", packed, clean, "--out", tmp_path / "page")
        assert (done.code, done.out) == (0, "900 rows in 1 period: everything is within its limits.\n")
        assert (tmp_path / "page" / "report.html").is_file()
        beyond = recap("drift", packed, clean, "--max-psi", 0.0, "--quiet")
        assert beyond.code == 3 and "rows 1: site: stability index" in beyond.out
        result = only_json(recap("drift", packed, clean, "--json", "-q").out)
        assert result["rows"] == 900 and not result["findings"]

    def test_refusals(self, packed: Path, clean: Path, recap: Recap) -> None:
        for wrong in ("1", "d", "-1d", "1w", "0h"):
            assert_refused(recap("drift", packed, clean, f"--every={wrong}"), "expected hours or days")
