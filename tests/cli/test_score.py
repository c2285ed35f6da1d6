"""Commands that score: text in and text out, bad rows told in one message, and nothing left behind."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.conftest import Recap, contents
from tests.support.bad_logs import BAD_LOGS
from tests.support.command_line import assert_refused, only_json
from tests.support.table_files import WRITE


class TestPredict:
    def test_text_in_text_out(self, raw: Path, packed: Path, recap: Recap) -> None:
        done = recap("predict", packed, raw / "clicks.csv")
        assert done.code == 0
        rows, scored = (raw / "clicks.csv").read_text().splitlines(), done.out.splitlines()
        assert [line.rpartition(",")[0].rpartition(",")[0] for line in scored] == rows
        scores = [float(line.split(",")[-2]) for line in scored[1:]]
        assert all(0 < score < 1 for score in scores)

    def test_keep_leaves_out_the_other_columns(self, raw: Path, packed: Path, recap: Recap) -> None:
        done = recap("predict", packed, raw / "clicks.csv", "--keep", "ad")
        assert done.out.splitlines()[0] == "ad,score,logit"
        plain = recap("predict", packed, raw / "clicks.csv").out.splitlines()
        tails = [line.split(",")[-2:] for line in plain]
        assert [line.split(",")[-2:] for line in done.out.splitlines()] == tails
        assert_refused(
            recap("predict", packed, raw / "clicks.csv", "--keep", "adx"), "no column 'adx'", "'ad'"
        )

    def test_the_summary_names_unseen_and_missing_values(
        self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        rows = click_log.head(50).with_columns(pl.lit("new").alias("site"), pl.lit(None).alias("ad"))
        rows.write_parquet(raw / "rows.parquet")
        done = recap("predict", packed, raw / "rows.parquet", "--out", raw / "out.tsv")
        unseen = "Values that are not in the vocabulary (unseen in training, or rarer there than min_count): site 50."
        assert unseen in done.err
        assert "Values that are missing: ad 50, " in done.err
        result = only_json(
            recap("predict", packed, raw / "rows.parquet", "--out", raw / "o.tsv", "--json").out
        )
        assert (result["unseen"]["site"], result["missing"]["ad"]) == (50, 50)

    @pytest.mark.slow
    def test_map(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(600).rename({"ad": "advert"}).write_csv(raw / "renamed.csv")
        assert_refused(recap("predict", packed, raw / "renamed.csv"), "no column 'ad'", "--map ad=")
        mapped = recap("predict", packed, raw / "renamed.csv", "--map", "ad=advert")
        plain = recap("predict", packed, raw / "clicks.csv")
        assert mapped.out.replace("advert", "ad") == plain.out
        measured = recap("evaluate", packed, raw / "renamed.csv", "--map", "ad=advert", "--json")
        assert only_json(measured.out) == only_json(
            recap("evaluate", packed, raw / "clicks.csv", "--json").out
        )
        for wrong, word in (
            ("ad", "expected FIELD=COLUMN"),
            ("=x", "expected FIELD=COLUMN"),
            ("ad=", "expected FIELD=COLUMN"),
            ("ad=nowhere", "no column 'nowhere'"),
            ("adverts=ad", "no field 'adverts'"),
        ):
            assert_refused(recap("predict", packed, raw / "clicks.csv", "--map", wrong), word)

    def test_json_needs_out(self, raw: Path, packed: Path, recap: Recap) -> None:
        done = recap("predict", packed, raw / "clicks.csv", "--json")
        assert (done.code, done.err) == (2, "")
        error = only_json(done.out)["error"]
        assert error["message"].startswith("--json needs --out")
        assert error["fix"] == "add --out scores.csv"

    def test_list_columns_need_a_format_that_holds_them(
        self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        click_log.head(5).with_columns(pl.col("tags").str.split(" ")).write_parquet(raw / "lists.parquet")
        assert_refused(
            recap("predict", packed, raw / "lists.parquet"), "'tags' is of type List", ".parquet or .arrow"
        )
        assert recap("predict", packed, raw / "lists.parquet", "--out", raw / "out.arrow").code == 0

    def test_files_that_differ(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(5).drop("row").write_csv(raw / "other.csv")
        done = recap("predict", packed, raw / "clicks.csv", raw / "other.csv", "--out", raw / "out.csv")
        assert_refused(done, "the files differ in their columns: 'row'")
        assert not (raw / "out.csv").exists()

    @pytest.mark.slow
    def test_a_file_is_replaced_only_by_force(self, raw: Path, packed: Path, recap: Recap) -> None:
        out, arguments = raw / "made.csv", ("predict", packed, raw / "clicks.csv", "--out", raw / "made.csv")
        out.write_text("mine")
        assert_refused(recap(*arguments), "made.csv exists", "--force")
        assert out.read_text() == "mine"
        assert recap(*arguments, "--force").code == 0
        assert out.read_text() != "mine"

        before = contents(raw)
        again = recap(*arguments)
        assert (again.code, again.err) == (0, f"{out} is up to date.\n")
        assert only_json(recap(*arguments, "--json").out)["done_before"] is True
        assert_refused(recap(*arguments, "--map", "ad=site"), "made.csv exists", "--force")
        assert contents(raw) == before

    def test_names_with_brackets_and_spaces(self, raw: Path, packed: Path, recap: Recap) -> None:
        odd = raw / "a [1] *"
        odd.mkdir()
        shutil.copy(raw / "clicks.csv", odd / "clicks[2].csv")
        done = recap("predict", packed, odd / "clicks[2].csv", "--out", odd / "scores[3].parquet")
        assert done.code == 0, done.err
        assert pl.read_parquet(odd / "scores[3].parquet", glob=False).height == 600

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv.gz", "rows.csv.zst"])
    def test_files_cut_short(
        self, name: str, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        WRITE[name.removeprefix("rows")](click_log, raw / name)
        whole = (raw / name).read_bytes()
        for part in (whole[: len(whole) // 2], whole[:-3], whole[:10], b"noise" * 10, b""):
            (raw / name).write_bytes(part)
            assert_refused(recap("predict", packed, raw / name, "--out", raw / "out.csv"), name)
            assert not (raw / "out.csv").exists()

    @pytest.mark.parametrize("name", ["no/such.csv", "*.nothing", "empty"])
    def test_files_that_are_not_there(self, name: str, raw: Path, packed: Path, recap: Recap) -> None:
        (raw / "empty").mkdir()
        assert_refused(recap("predict", packed, raw / name))


class TestEvaluate:
    def test_negative_rate(self, raw: Path, packed: Path, recap: Recap) -> None:
        plain = only_json(recap("evaluate", packed, raw / "clicks.csv", "--json").out)
        corrected = only_json(
            recap("evaluate", packed, raw / "clicks.csv", "--negative-rate", 0.5, "--json").out
        )
        rate = plain["base_rate"]
        assert corrected["base_rate"] == pytest.approx(rate / (rate + (1 - rate) / 0.5))
        assert_refused(recap("evaluate", packed, raw / "clicks.csv", "--negative-rate", 0), "not in (0, 1]")

    def test_without_labels(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(5).drop("click").write_csv(raw / "unlabelled.csv")
        assert_refused(recap("evaluate", packed, raw / "unlabelled.csv"), "no column 'click' (label)")

    def test_rows_without_a_label_are_dropped_on_request(
        self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        unlabelled = pl.int_range(pl.len()) < 7
        log = click_log.with_columns(pl.when(unlabelled).then(None).otherwise("click").alias("click"))
        log.write_csv(raw / "partly.csv")
        click_log.slice(7).write_csv(raw / "labelled.csv")
        for command in (("evaluate",), ("explain", "--repeats", "1")):
            assert_refused(recap(*command, packed, raw / "partly.csv"), "click")
            done = recap(*command, packed, raw / "partly.csv", "--drop-unlabelled")
            assert done.code == 0 and "7 rows without a label were dropped." in done.err
            dropped, labelled = (
                only_json(recap(*command, packed, raw / name, "--drop-unlabelled", "--json").out)
                for name in ("partly.csv", "labelled.csv")
            )
            assert (dropped.pop("unlabelled"), labelled.pop("unlabelled")) == (7, 0)
            assert dropped == labelled
        log.head(5).write_csv(raw / "none.csv")
        refused = recap("evaluate", packed, raw / "none.csv", "--drop-unlabelled")
        assert_refused(refused, "no row has a label")
        refused = recap("explain", packed, raw / "none.csv", "--drop-unlabelled")
        assert_refused(refused, "there are no rows to explain")


@pytest.mark.parametrize("name", BAD_LOGS)
def test_a_bad_log_is_refused_and_nothing_is_left_behind(
    name: str, raw: Path, packed: Path, recap: Recap
) -> None:
    text, words = BAD_LOGS[name]
    (raw / "bad.csv").write_bytes(text)
    before = contents(raw)
    assert_refused(recap("evaluate", packed, raw / "bad.csv"), *words)
    done = recap("predict", packed, raw / "bad.csv", "--out", raw / "scores.parquet")
    if "label" in name or name == "one class":
        assert done.code == 0, "scoring needs no label"
        (raw / "scores.parquet").unlink()
        (raw / ".scores.parquet.inputs.json").unlink()
    else:
        assert_refused(done, *words)
    assert contents(raw) == before


class TestServer:
    """Scoring on a server that is there is tested in tests/serve/test_client.py."""

    @pytest.mark.slow
    def test_nobody_listens(self, raw: Path, recap: Recap) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        arguments = ("score", url, raw / "clicks.csv", "--timeout", "0.2", "--out", raw / "scores.csv")
        done = recap(*arguments)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: ") and "fix: check that the server runs" in done.err
        as_json = recap(*arguments, "--json")
        assert as_json.code == 1
        assert only_json(as_json.out)["error"]["fix"].startswith("check that the server runs")
        assert not (raw / "scores.csv").exists()

    def test_a_file_is_replaced_only_by_force(self, raw: Path, recap: Recap) -> None:
        done = recap("score", "http://127.0.0.1:9", raw / "clicks.csv", "--out", raw / "clicks.csv")
        assert_refused(done, "clicks.csv exists", "--force")


@pytest.mark.slow
class TestProcess:
    """What only a process of its own can show."""

    def test_pipes(self, raw: Path, packed: Path, recap: Recap) -> None:
        command = [sys.executable, "-m", "recap_ctr", "predict", str(packed), "-", "--threads", "1"]
        with (raw / "clicks.csv").open("rb") as rows:
            done = subprocess.run(command, stdin=rows, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == recap("predict", packed, raw / "clicks.csv", "--threads", 1).out
        assert done.stderr.decode().startswith("600 rows.\n")

    def test_a_reader_that_leaves_early(self, raw: Path, packed: Path, click_log: pl.DataFrame) -> None:
        click_log.write_csv(raw / "long.csv")
        assert (raw / "long.csv").stat().st_size > 1 << 16, "more than a pipe holds"
        command = [sys.executable, "-m", "recap_ctr", "predict", str(packed), str(raw / "long.csv"), "-q"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        with process.stderr:
            assert process.stderr.read() == b""
        assert process.wait() == 1

    def test_bad_input(self, packed: Path) -> None:
        command = [sys.executable, "-m", "recap_ctr", "predict", str(packed), "-"]
        done = subprocess.run(command, input=b"site,ad\na\n", capture_output=True)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.decode().startswith("error: standard input: row 1 has 1 fields, expected 2")
        assert b"Traceback" not in done.stderr
