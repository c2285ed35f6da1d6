"""Commands about data: what they write, and every bad log, schema and option told in one message."""

import json
import os
import shutil
from pathlib import Path

import polars as pl
import pytest

from recap_ctr.data.encode import Encoder
from recap_ctr.data.quality import repeated_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.datasets.catalogue import DATASETS
from recap_ctr.schema import read_schema
from tests.conftest import Done, Recap, contents
from tests.support import layouts
from tests.support.bad_logs import BAD_LOGS
from tests.support.command_line import assert_refused, only_json
from tests.support.forged_artifact import forge


class TestPrepare:
    def prepare(self, raw: Path, recap: Recap, *more: object) -> Done:
        return recap(
            "prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", raw / "data", *more
        )

    @pytest.mark.slow
    def test_again_and_with_other_inputs(self, raw: Path, recap: Recap) -> None:
        first = self.prepare(raw, recap, "--json")
        before = contents(raw / "data")
        again = self.prepare(raw, recap, "--json")
        assert only_json(again.out) == only_json(first.out) | {"done_before": True}
        assert "is up to date" in self.prepare(raw, recap).err
        assert contents(raw / "data") == before

        shutil.copy(raw / "clicks.csv", raw / "copy.csv")  # The same content by another name and time.
        (raw / "clicks.csv").unlink()
        (raw / "copy.csv").rename(raw / "clicks.csv")
        assert only_json(self.prepare(raw, recap, "--json").out)["done_before"] is True

        with (raw / "clicks.csv").open("a") as file:
            file.write("600,1,a,b,1,1,t1\n")
        assert_refused(self.prepare(raw, recap), "other inputs (changed: sources)", "--force")
        assert contents(raw / "data") == before
        forced = only_json(self.prepare(raw, recap, "--force", "--json").out)
        assert sum(split["rows"] for split in forced["splits"].values()) == 601

    def test_what_was_cut_short_starts_over(
        self, raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "save", interrupt)
            assert self.prepare(raw, recap).code == 130
        assert not (raw / "data").exists()
        assert not (raw / ".data.partial").exists()
        (raw / ".data.partial").mkdir()  # As SIGKILL would have left it.
        (raw / ".data.partial" / "spool").write_text("half")
        assert self.prepare(raw, recap).code == 0

    def test_the_seed_is_part_of_the_record(self, raw: Path, recap: Recap) -> None:
        assert self.prepare(raw, recap, "--seed", 5).code == 0
        assert PreparedData(raw / "data").manifest["inputs"]["split"]["seed"] == 5

    @pytest.mark.parametrize("name", BAD_LOGS)
    def test_bad_logs(self, name: str, raw: Path, recap: Recap) -> None:
        text, words = BAD_LOGS[name]
        (raw / "bad.csv").write_bytes(text)
        before = contents(raw)
        done = recap("prepare", raw / "bad.csv", "--schema", raw / "schema.toml", "--out", raw / "data")
        assert_refused(done, *words)
        assert contents(raw) == before

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", ["label"]),
            ("label = 'click'", ["fields"]),
            ("label = 'click'\n[[fields]]\nname = 'a'\nkind = 'odd'", ["fields.0.kind", "'odd'"]),
            (
                "label = 'click'\nlabels = 'x'\n[[fields]]\nname = 'a'\nkind = 'numeric'",
                ["labels", "unknown setting", "did you mean 'label'?"],
            ),
            ("label = ", ["is not valid TOML"]),
            ("label = 'a'\n[[fields]]\nname = 'a'\nkind = 'numeric'", ["both the label and a field"]),
        ],
    )
    def test_bad_schemas(self, text: str, words: list[str], raw: Path, recap: Recap) -> None:
        (raw / "bad.toml").write_text(text)
        done = recap("prepare", raw / "clicks.csv", "--schema", raw / "bad.toml", "--out", raw / "data")
        assert_refused(done, "bad.toml", *words)

    def test_a_vocabulary_beyond_32_bits(self, raw: Path, recap: Recap) -> None:
        fields = "".join(
            f"[[fields]]\nname = '{name}'\nkind = 'categorical'\nhash_buckets = {2**30}\n"
            for name in ("site", "ad", "user")
        )
        (raw / "wide.toml").write_text(f"label = 'click'\n{fields}")
        done = recap("prepare", raw / "clicks.csv", "--schema", raw / "wide.toml", "--out", raw / "data")
        assert_refused(done, "3,221,225,478 values together; ids are 32-bit", "lower hash_buckets")
        assert not (raw / "data").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], ["no source file"]),
            (["clicks.csv"], ["a label or a schema", "--label COLUMN, or --schema schema.toml"]),
            (["clicks.csv", "--label", "clicked"], ["no column 'clicked'", "'click'"]),
            (["clicks.csv", "--schema", "nowhere.toml"], ["nowhere.toml"]),
            (
                ["clicks.csv", "--schema", "schema.toml", "--split", "odd"],
                ["choose random, time or hash:COLUMN"],
            ),
            (["clicks.csv", "--schema", "schema.toml", "--ratio", "8:1"], ["8:1"]),
            (["clicks.csv", "--schema", "schema.toml", "--split", "time"], ["needs a time column"]),
            (
                ["clicks.csv", "--schema", "schema.toml", "--split-column", "ad"],
                ["row 1, column 'ad': the split is", "write train, valid or test"],
            ),
            (["clicks.csv", "--schema", "schema.toml", "--test", "clicks.csv"], ["--test without --valid"]),
            (["clicks.csv", "--dataset", "ml-1m"], ["--dataset has its own"]),
            (["--dataset", "ml-1m", "--positive", "1"], ["--dataset has its own", "--positive"]),
            (["clicks.csv", "--schema", "schema.toml", "--positive", "1"], ['write positive = "1" into']),
            (["clicks.csv", "--label", "click", "--separator", "::"], ["--separator '::' can't separate"]),
            (["clicks.csv", "--label", "ad"], ["the label 'ad' is", "neither 0 nor 1", "--positive"]),
            (["--dataset", "nonsense", "--raw", "."], ["nonsense"]),
            (["--dataset", "ml1m", "--raw", "."], ["no data set 'ml1m'; did you mean 'ml-1m'?"]),
            (["--dataset", "ml-1m"], ["--raw is missing"]),
        ],
    )
    def test_bad_options(
        self, arguments: list[str], words: list[str], raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(raw)
        before = contents(raw)
        assert_refused(recap("prepare", *arguments, "--out", "data"), *words)
        assert contents(raw) == before

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--split", "time", "--split-column", "c"], "--split and --split-column each say how to split"),
            (["--valid", "v.csv", "--split", "random"], "--split and --valid/--test each say how to split"),
            (["--dataset", "ml-1m", "--split", "time"], "--split and --dataset each say how to split"),
            (["--split-column", "c", "--ratio", "1:1:1"], "--ratio does not go with --split-column"),
            (["--raw", "somewhere"], "--raw is for --dataset"),
            (["--no-check"], "--no-check is for --dataset"),
        ],
    )
    def test_one_way_to_split(self, recap: Recap, tmp_path: Path, options: list[str], words: str) -> None:
        assert_refused(recap("prepare", "clicks.csv", "--out", tmp_path / "out", *options), words)

    @pytest.mark.slow
    def test_a_public_data_set_is_checked_unless_told_otherwise(self, recap: Recap, tmp_path: Path) -> None:
        layouts.criteo(tmp_path)
        out = ("--dataset", "criteo-x4", "--raw", tmp_path, "--out", tmp_path / "out")
        assert_refused(
            recap("prepare", *out, "-q"), "criteo-x4: rows of train, valid and test", "318", "--no-check"
        )
        done = recap("prepare", *out, "--no-check", "--json")
        assert done.code == 0
        assert only_json(done.out)["splits"]["train"]["rows"] == 318
        assert len(only_json(done.out)["vocabulary"]) == 39
        assert only_json(done.out)["name"] == "criteo-x4-unchecked"
        assert "reports call them criteo-x4-unchecked" in recap("prepare", *out, "--no-check").err


def test_data_sets_are_listed(recap: Recap) -> None:
    listed = only_json(recap("datasets", "--json").out)["datasets"]
    assert [entry["name"] for entry in listed] == list(DATASETS)
    assert [entry["name"] for entry in listed if entry["download"]] == ["ml-1m"]
    shown = recap("datasets")
    for entry in listed:
        for words in (
            entry["name"],
            entry["title"],
            f"{entry['rows']:,}",
            ", ".join(entry["files"]),
            entry["homepage"],
        ):
            assert words in shown.out
    assert max(map(len, shown.out.splitlines())) <= 140


def test_a_data_set_that_can_not_be_downloaded_says_where_it_is(recap: Recap, tmp_path: Path) -> None:
    assert_refused(recap("download", "criteo-x4", tmp_path), "can't be downloaded; ml-1m can", "https://")


@pytest.mark.parametrize("name", ["no/such.csv", "*.nothing", "empty"])
def test_files_that_are_not_there(name: str, raw: Path, recap: Recap) -> None:
    (raw / "empty").mkdir()
    assert_refused(recap("prepare", raw / name, "--schema", raw / "schema.toml", "--out", raw / "data"))
    assert_refused(recap("schema", "infer", raw / name, "--label", "click", "--out", raw / "s.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schema", "synthetic"])
def test_a_file_is_replaced_only_by_force(name: str, raw: Path, recap: Recap) -> None:
    out = raw / "made.csv"
    arguments = {
        "schema": ("schema", "infer", raw / "clicks.csv", "--label", "click"),
        "synthetic": ("synthetic", "--rows", 10),
    }[name]
    other = {"schema": ("--rows", 99), "synthetic": ("--seed", 2)}[name]
    out.write_text("mine")
    assert_refused(recap(*arguments, "--out", out), "made.csv exists", "--force")
    assert out.read_text() == "mine"
    assert recap(*arguments, "--out", out, "--force").code == 0
    assert out.read_text() != "mine"

    before = contents(raw)
    again = recap(*arguments, "--out", out)
    assert again.code == 0
    assert "is up to date" in again.err
    assert only_json(recap(*arguments, "--out", out, "--json").out)["done_before"] is True
    assert_refused(recap(*arguments, "--out", out, *other), "made.csv exists", "--force")
    assert contents(raw) == before


@pytest.mark.slow
def test_an_additive_log_has_its_own_columns(raw: Path, recap: Recap) -> None:
    out = raw / "additive.csv"
    arguments = ("synthetic", "--order", 1, "--rows", 2_000, "--out", out)
    drawn = only_json(recap(*arguments, "--json").out)
    assert 0.7 < drawn["bayes"]["auc"] < 0.9
    assert out.read_text().splitlines()[0] == "row,ts,user,ad,site,price,click"
    assert "is up to date" in recap(*arguments).err
    assert_refused(recap(*arguments, "--fields", 4), "--fields does not go with --order 1")
    assert_refused(recap("synthetic", "--order", 2, "--out", raw / "two.csv"), "'2' is not one of")


class TestInspect:
    @pytest.mark.slow
    def test_prepared_data(self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        for path in (raw, raw / "nowhere", packed, raw / "clicks.csv"):
            assert_refused(recap("train", path, "--out", raw / "run"), "holds no prepared data")
        copy = Path(shutil.copytree(prepared.path, raw / "data"))
        with (copy / "train" / "labels.npy").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\7")
        assert_refused(recap("train", copy, "--out", raw / "run"), "labels.npy has changed")
        (copy / "train" / "labels.npy").unlink()
        assert_refused(recap("train", copy, "--out", raw / "run"), "labels.npy is missing")
        (copy / "manifest.json").write_text("{")
        assert_refused(recap("train", copy, "--out", raw / "run"), "not valid JSON")
        assert_refused(recap("inspect", copy), "not valid JSON")

    @pytest.mark.slow
    def test_artifacts(self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        rows = raw / "clicks.csv"

        def all_refuse(path: Path, *words: str) -> None:
            assert_refused(recap("predict", path, rows), *words)
            assert_refused(recap("evaluate", path, rows), *words)
            assert_refused(recap("inspect", path), *words)

        all_refuse(raw, "holds no artifact")
        all_refuse(raw / "nowhere", "holds no artifact")
        assert_refused(recap("predict", prepared.path, rows), "holds no artifact")
        copy = Path(shutil.copytree(packed, raw / "copy"))
        weights = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(weights[:-1])
        all_refuse(copy, "model.safetensors is damaged", "fix: copy the artifact again")
        (copy / "model.safetensors").write_bytes(bytes([weights[0] ^ 1]) + weights[1:])
        all_refuse(copy, "model.safetensors is damaged")
        (copy / "model.safetensors").write_bytes(weights)
        (copy / "manifest.json").write_text("[]")
        assert_refused(recap("inspect", copy), "holds no artifact")
        shutil.copy(packed / "manifest.json", copy)
        forge(copy, lambda manifest: manifest.update(format=2))
        all_refuse(copy, "format 2; this version reads 1", "upgrade recap-ctr")


@pytest.mark.slow
def test_files_without_a_header_line(recap: Recap, click_log: pl.DataFrame, tmp_path: Path) -> None:
    """All that a user meets: lines as they were, lines without the label, and what `recap predict` wrote of them."""
    log = (
        click_log.head(600)
        .select("click", "site", "ad", "price")
        .with_columns(pl.col("price").fill_null(1.0))
    )
    text, bare, schema, data, run = (
        tmp_path / name for name in ("log.txt", "bare.txt", "schema.toml", "data", "run")
    )
    log.write_csv(text, include_header=False, separator="\t")
    log.drop("click").write_csv(bare, include_header=False, separator="\t")
    columns = ("--label", "click", "--columns", "click,site,ad,price")
    for command in (
        ("schema", "infer", text, *columns, "--out", schema),
        ("prepare", text, "--schema", schema, "--out", data),
        ("train", data, "--model", "lr", "--max-epochs", "1", "--out", run),
    ):
        assert recap(*command, "-q").code == 0
    assert recap("predict", run, bare, "--out", tmp_path / "bare.csv", "-q").code == 0
    scored = recap("predict", run, text, "--out", tmp_path / "scores.csv")
    assert f"recap evaluate {run} {tmp_path / 'scores.csv'}" in scored.err
    evaluations = [recap("evaluate", run, path, "--json", "-q") for path in (text, tmp_path / "scores.csv")]
    assert evaluations[0].code == 0
    assert evaluations[0].out == evaluations[1].out
    without_label, whole = (pl.read_csv(tmp_path / name) for name in ("bare.csv", "scores.csv"))
    assert without_label.equals(whole.drop("click"))
    assert (whole.height, whole.columns) == (600, ["click", "site", "ad", "price", "score", "logit"])


class TestInputsAsUsersHaveThem:
    @pytest.fixture
    def logs(self, raw: Path) -> Path:
        """Return a directory of JSON lines by day: nested, with words for labels, and some labels missing."""
        rows = pl.read_csv(raw / "clicks.csv").with_row_index("i").rows(named=True)
        for day in (1, 2):
            (raw / "logs" / f"day={day}").mkdir(parents=True)
        for row in rows:
            event = None if row["i"] % 50 == 7 else "Click" if row["click"] else "Skip"
            nested = {"event": event, "ad": {"site": row["site"], "id": row["ad"]}, "user": row["user"]}
            with (raw / "logs" / f"day={1 + row['i'] % 2}" / "part.jsonl").open("a") as file:
                file.write(json.dumps(nested) + "\n")
        return raw / "logs"

    @pytest.mark.slow
    def test_prepare_reads_counts_and_says(self, logs: Path, recap: Recap) -> None:
        call = ("prepare", logs, "--label", "event", "--out", logs.parent / "data")
        assert_refused(
            recap(*call), "day=", "part.jsonl: row", "the label 'event' is missing", "--drop-unlabelled"
        )
        done = recap(*call, "--drop-unlabelled")
        assert done.code == 0, done.err
        assert "label 'event': 'click' counts as a click; pass --positive to choose" in done.err
        assert "12 rows without a label were dropped." in done.err
        data = PreparedData(logs.parent / "data")
        assert {field.name for field in data.schema.fields} == {"ad.site", "ad.id", "user", "day"}
        summary = only_json(recap(*call, "--drop-unlabelled", "--json").out)
        assert summary["unlabelled"] == 12
        assert summary["repeated"] == repeated_rows(data)

    def test_infer_takes_the_users_choice(self, logs: Path, recap: Recap) -> None:
        out = logs.parent / "schema2.toml"
        call = ("schema", "infer", logs, "--label", "event", "--drop-unlabelled", "--out", out)
        done = recap(*call, "--positive", "skip")
        assert done.code == 0, done.err
        assert "counts as a click; pass" not in done.err
        schema = read_schema(out)
        assert (schema.positive, schema.negative) == ("skip", None)
        assert_refused(recap(*call), "schema2.toml exists", "--force")

    @pytest.mark.slow
    def test_a_separator_is_noticed_or_named(self, raw: Path, recap: Recap) -> None:
        table = pl.read_csv(raw / "clicks.csv", infer_schema=False)
        table.write_csv(raw / "tabs.csv", separator="\t")
        done = recap("schema", "infer", raw / "tabs.csv", "--label", "click", "--out", raw / "1.toml")
        assert "tabs.csv: the columns are separated by tabs, and are read that way" in done.err
        table.write_csv(raw / "hats.csv", separator="^")
        named = ("--separator", "^", "--out", raw / "2.toml")
        assert recap("schema", "infer", raw / "hats.csv", "--label", "click", *named).code == 0
        prepared = recap(
            "prepare", raw / "hats.csv", "--schema", raw / "2.toml", "--out", raw / "data", "--json"
        )
        assert sum(split["rows"] for split in only_json(prepared.out)["splits"].values()) == len(table)
