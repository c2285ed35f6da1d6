"""The command line: conventions that every command keeps, and every bad input told in one message, exit code 2."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import typer

from recap_ctr.cli import main as cli
from recap_ctr.data import encode, prepare
from recap_ctr.data.shards import PreparedData
from recap_ctr.datasets.catalogue import DATASETS
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.schema import Schema
from recap_ctr.training import loop as train_module
from tests.conftest import Done, Recap, contents
from tests.inference.test_artifact import forge
from tests.support import layouts

SETTINGS = """
[model]
name = "fcn"
dim = 4
num_exponential_layers = 1
num_linear_layers = 1
[train]
batch_size = 256
learning_rate = 0.01
l2 = 1e-4
max_epochs = 2
"""


@pytest.fixture
def raw(click_log: pl.DataFrame, click_schema: Schema, tmp_path: Path) -> Path:
    """A directory with clicks.csv, schema.toml and train.toml in it."""
    click_log.head(600).write_csv(tmp_path / "clicks.csv")
    (tmp_path / "schema.toml").write_text(click_schema.to_toml())
    (tmp_path / "train.toml").write_text(SETTINGS)
    return tmp_path


def commands() -> dict[str, Any]:
    """All commands by their full name, such as `schema infer`."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        below = getattr(command, "commands", None)
        if below is None:
            found[name] = command
        for sub, child in (below or {}).items():
            walk(child, f"{name} {sub}".strip())

    walk(typer.main.get_command(cli.app), "")
    return found


def only_json(text: str) -> dict[str, Any]:
    """One JSON object on one line, by the book: no NaN."""
    assert text.count("\n") == 1
    value: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    assert isinstance(value, dict)
    return value


def told(done: Done, *words: str) -> None:
    """Bad input: one message on standard error, in which the words stand, and nothing else anywhere."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert sum(line.startswith("error: ") for line in done.err.splitlines()) == 1
    assert len(done.err.splitlines()) <= 4
    for word in words:
        assert word in done.err


class TestConventions:
    @pytest.mark.parametrize("name", commands())
    def test_options(self, name: str, recap: Recap) -> None:
        command = commands()[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--quiet", "-q"} <= options
        assert "--json" in options or name == "serve"  # whose log is JSON, a line an event
        # Stages never replace each other; a page is made anew from its report each time.
        if "--out" in options and name not in ("fit", "bench", "report", "diagnose", "plan", "dial"):
            assert "--force" in options
        if name in ("prepare", "train", "tune", "fit", "synthetic", "demo"):
            assert "--seed" in options
        if name not in ("inspect", "models", "synthetic", "datasets", "download", "report", "score"):
            assert "--threads" in options
        shown = recap(*name.split(), "--help")
        assert (shown.code, shown.err) == (0, "")
        assert f"Example: recap {name} " in shown.out
        for line in command.help.splitlines():
            if "Example:" in line:
                for word in line.split():
                    assert not word.startswith("--") or word in options, f"{line}: no option {word}"
        assert recap(*name.split(), "-h") == shown

    def test_the_whole_way_in_json(self, raw: Path, recap: Recap) -> None:
        """Each command prints one JSON object and nothing else; quiet, it says nothing at all."""

        def call(*arguments: object) -> dict[str, Any]:
            done = recap(*arguments, "--json", "-q")
            assert (done.code, done.err) == (0, "")
            return only_json(done.out)

        drawn = call("synthetic", "--rows", 900, "--fields", 3, "--out", raw / "log.parquet")
        assert drawn["rows"] == pl.read_parquet(raw / "log.parquet").height == 900
        inferred = call(
            "schema", "infer", raw / "log.parquet", "--label", "click", "--out", raw / "inferred.toml"
        )
        assert [column["column"] for column in inferred["columns"]] == ["row", "click", "f1", "f2", "f3"]
        made = call("prepare", raw / "log.parquet", "--schema", raw / "inferred.toml", "--out", raw / "data")
        assert made["splits"]["train"]["rows"] == 720
        assert made["done_before"] is False
        trained = call(
            "train", raw / "data", "--config", raw / "train.toml", "--threads", 1, "--out", raw / "run"
        )
        assert trained == json.loads((raw / "run" / "report.json").read_bytes())
        measured = call("evaluate", raw / "run", raw / "log.parquet", "--threads", 1)
        assert measured["rows"] == 900
        scored = call(
            "predict", raw / "run" / "artifact", raw / "log.parquet", "--out", raw / "s.csv", "--threads", 1
        )
        assert scored["rows"] == 900
        assert scored["unseen"].keys() == {"f1", "f2", "f3"}
        assert call("inspect", raw / "run")["kind"] == "artifact"
        assert call("inspect", raw / "data")["kind"] == "prepared data"

    def test_the_whole_way_in_words(self, raw: Path, recap: Recap) -> None:
        """Tables go to standard output, what is said along the way to standard error."""
        log = raw / "clicks.csv"
        steps: list[tuple[tuple[object, ...], str, str]] = [
            (("synthetic", "--rows", 500, "--out", raw / "s.csv"), "", "best possible model"),
            (("schema", "infer", log, "--label", "click", "--out", raw / "i.toml"), "verdict", "recap prepare"),
            (("prepare", log, "--schema", raw / "schema.toml", "--out", raw / "data"), "clicked", "is ready"),
            (("train", raw / "data", "--config", raw / "train.toml", "--threads", 1, "--out", raw / "run"),
             "logistic regression", "epoch 2: train loss"),
            (("evaluate", raw / "run", log), "base rate", "when it was packed"),
            (("predict", raw / "run", log), "row,click,site,ad,user,price,tags,score,logit", "600 rows."),
            (("predict", raw / "run", log, "--out", raw / "scores.csv"), "", "calibrated probability"),
            (("logits", raw / "run", raw / "data", "--split", "train", "--out", raw / "l"), "", "recap train"),
            (("inspect", raw / "run"), "every file as its checksum says", "It is whole"),
            (("inspect", raw / "data"), "vocabulary", "recap fit"),
            (("models",), "fcn", "can be trained"),
            (("datasets",), "criteo-x4", "data sets"),
        ]  # fmt: skip
        for arguments, out, err in steps:
            done = recap(*arguments)
            assert done.code == 0, done.err
            assert out in done.out
            assert err in done.err
            last = done.err.splitlines()[-1]  # what to do next, or what the figures mean
            assert "recap " in last or arguments[0] in ("evaluate", "predict"), last

    @pytest.mark.parametrize(
        ("now", "logloss", "said"),
        [
            (0.75, 0.5, "within chance"),
            (0.6, 0.5, "train anew"),
            (0.9, 0.5, "easier"),
            (0.75, 0.8, "don't serve"),
        ],
    )
    def test_fresh_rows_are_set_beside_those_of_training(self, now: float, logloss: float, said: str) -> None:
        known = {"valid": self.figures(0.76, 0.5)}
        assert said in " ".join(cli._against_training(self.figures(now, logloss), known))

    @pytest.mark.parametrize(
        ("error", "rows", "rate"), [(0.0, 1000, 0.3), (None, 1000, 0.3), (0.01, 90, 0.1), (0.01, 90, 0.9)]
    )
    def test_nothing_is_said_of_chance_where_no_error_is_known(
        self, error: float | None, rows: int, rate: float
    ) -> None:
        fine = self.figures(0.76, 0.5)
        doubtful = self.figures(1.0, 0.5, error, rows, rate)
        for now, then in ((doubtful, fine), (fine, doubtful)):
            assert "chance" not in " ".join(cli._against_training(now, {"test": then}))

    def figures(
        self, auc: float, loss: float, error: float | None = 0.01, rows: int = 1000, rate: float = 0.3
    ) -> dict[str, Any]:
        raw = {"auc": auc, "auc_error": error}
        rest = {"base_rate_logloss": 0.7, "rows": rows, "base_rate": rate}
        return {"raw": raw, "calibrated": {"logloss": loss}, **rest}

    def test_threads_and_seed_are_part_of_the_record(self, raw: Path, recap: Recap) -> None:
        recap("prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", raw / "d", "--seed", 5)
        assert PreparedData(raw / "d").manifest["inputs"]["split"]["seed"] == 5
        done = recap(
            "train", raw / "d", "--config", raw / "train.toml", "--seed", 9, "--threads", 1, "--no-reference",
            "--out", raw / "run", "--json",
        )  # fmt: skip
        report = only_json(done.out)
        assert (report["train"]["seed"], report["threads"]) == (9, 1)

    def test_usage(self, raw: Path, recap: Recap) -> None:
        for arguments in (["predict"], ["--nonsense"], ["nonsense"], ["train", raw, "--threads", 0], ["train", raw],
                          ["synthetic", "--rows", "many", "--out", "x.csv"], ["demo", "--rows", 10]):  # fmt: skip
            done = recap(*arguments)
            assert done.code == 2
            assert done.out == ""
            assert "Traceback" not in done.err

    def test_a_fault_of_ours_is_shown_as_one(
        self, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fault(*_: object) -> None:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(encode.Encoder, "load", fault)
        with pytest.raises(ZeroDivisionError):
            recap("inspect", packed)

    def test_interrupted(self, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(encode.Encoder, "load", interrupt)
        assert recap("inspect", packed) == Done(
            1,
            "",
            "interrupted; nothing is half-written, and the same command goes on from what is finished\n",
        )


def test_models_are_listed(recap: Recap) -> None:
    done = recap("models", "-q")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "fcn: 201,728 parameters on ML-1M" in lines
    found = only_json(recap("models", "--json").out)["models"]
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == [
        entry["name"] for entry in found
    ]


class TestOutputs:
    def prepare(self, raw: Path, recap: Recap, *more: object) -> Done:
        return recap(
            "prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", raw / "data", *more
        )

    def test_prepare(self, raw: Path, recap: Recap) -> None:
        first = self.prepare(raw, recap, "--json")
        before = contents(raw / "data")
        again = self.prepare(raw, recap, "--json")
        assert only_json(again.out) == only_json(first.out) | {"done_before": True}
        assert "as prepared before" in self.prepare(raw, recap).err
        assert contents(raw / "data") == before

        shutil.copy(raw / "clicks.csv", raw / "copy.csv")  # the same content by another name and time
        (raw / "clicks.csv").unlink()
        (raw / "copy.csv").rename(raw / "clicks.csv")
        assert only_json(self.prepare(raw, recap, "--json").out)["done_before"] is True

        with (raw / "clicks.csv").open("a") as file:
            file.write("600,1,a,b,1,1,t1\n")
        told(self.prepare(raw, recap), "other inputs (changed: sources)", "--force")
        assert contents(raw / "data") == before
        forced = only_json(self.prepare(raw, recap, "--force", "--json").out)
        assert sum(split["rows"] for split in forced["splits"].values()) == 601

    def test_prepare_starts_over_what_was_cut_short(
        self, raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(prepare._Preparer, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            assert self.prepare(raw, recap).code == 1
        assert not (raw / "data").exists()
        assert not (raw / ".data.partial").exists()
        (raw / ".data.partial").mkdir()  # what SIGKILL would have left
        (raw / ".data.partial" / "spool").write_text("half")
        assert self.prepare(raw, recap).code == 0

    def test_train(
        self, raw: Path, prepared: PreparedData, finished: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Interrupted, resumed, reported, refused, replaced."""

        def train(*more: object) -> Done:
            return recap(
                "train",
                prepared.path,
                "--config",
                raw / "train.toml",
                "--threads",
                1,
                "--out",
                raw / "run",
                *more,
            )

        real, steps = train_module.Trainer.step, iter(range(1, 100))

        def step(trainer: train_module.Trainer) -> int:
            if next(steps) == 15:
                raise KeyboardInterrupt
            return real(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(train_module.Trainer, "step", step)
            done = train()
        assert done.code == 1
        assert done.err.endswith(
            "interrupted; nothing is half-written, and the same command goes on from what is finished\n"
        )

        assert "resuming after step 10" in train().err
        for name in ("best.safetensors", "artifact/model.safetensors", "artifact/manifest.json"):
            assert (raw / "run" / name).read_bytes() == (finished / name).read_bytes()

        before = contents(raw / "run")
        again = train("--json")
        assert only_json(again.out) == json.loads((raw / "run" / "report.json").read_bytes())
        assert "finished; nothing to do" in again.err
        told(train("--threads", 2), "changed: threads", "--force")
        told(train("--l2", "1e-3", "--seed", 4), "changed: train", "--force")
        told(train("--model", "lr"), "changed: model", "--force")
        assert contents(raw / "run") == before

        assert train("--seed", 4, "--force").code == 0
        assert json.loads((raw / "run" / "report.json").read_bytes())["train"]["seed"] == 4

    @pytest.mark.parametrize("name", ["predict", "schema", "synthetic"])
    def test_files(self, name: str, raw: Path, packed: Path, recap: Recap) -> None:
        out = raw / "made.csv"
        arguments = {
            "predict": ("predict", packed, raw / "clicks.csv"),
            "schema": ("schema", "infer", raw / "clicks.csv", "--label", "click"),
            "synthetic": ("synthetic", "--rows", 10),
        }[name]
        out.write_text("mine")
        told(recap(*arguments, "--out", out), "made.csv exists", "--force")
        assert out.read_text() == "mine"
        assert recap(*arguments, "--out", out, "--force").code == 0
        assert out.read_text() != "mine"

        before = contents(raw)
        again = recap(*arguments, "--out", out)
        assert again.code == 0
        assert "stands as made before" in again.err
        assert only_json(recap(*arguments, "--out", out, "--json").out)["done_before"] is True
        other = {"predict": ("--map", "ad=site"), "schema": ("--rows", 99), "synthetic": ("--seed", 2)}[name]
        told(recap(*arguments, "--out", out, *other), "made.csv exists", "--force")
        assert contents(raw) == before

    @pytest.mark.parametrize("force", [[], ["--force"]])
    def test_what_is_not_ours(
        self, force: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        (raw / "thesis").mkdir()
        (raw / "thesis" / "chapter.txt").write_text("years of work")
        for out in (raw / "thesis", raw / "thesis" / "chapter.txt"):
            told(recap("train", prepared.path, "--out", out, *force), "choose another --out")
            done = recap("prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", out, *force)
            told(done, "choose another --out")
            told(recap("demo", "--out", out, *force), "choose another --out")
        assert contents(raw / "thesis").keys() == {"chapter.txt"}

    def test_names_with_brackets_and_spaces(self, raw: Path, packed: Path, recap: Recap) -> None:
        odd = raw / "a [1] *"
        odd.mkdir()
        shutil.copy(raw / "clicks.csv", odd / "clicks[2].csv")
        done = recap("predict", packed, odd / "clicks[2].csv", "--out", odd / "scores[3].parquet")
        assert done.code == 0, done.err
        assert pl.read_parquet(odd / "scores[3].parquet", glob=False).height == 600


class TestPredict:
    def test_text_in_text_out(self, raw: Path, packed: Path, recap: Recap) -> None:
        done = recap("predict", packed, raw / "clicks.csv")
        assert done.code == 0
        given, scored = (raw / "clicks.csv").read_text().splitlines(), done.out.splitlines()
        assert [line.rpartition(",")[0].rpartition(",")[0] for line in scored] == given
        scores = [float(line.split(",")[-2]) for line in scored[1:]]
        assert all(0 < score < 1 for score in scores)

    def test_the_summary_names_unseen_and_missing_values(
        self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        rows = click_log.head(50).with_columns(pl.lit("new").alias("site"), pl.lit(None).alias("ad"))
        rows.write_parquet(raw / "rows.parquet")
        done = recap("predict", packed, raw / "rows.parquet", "--out", raw / "out.tsv")
        assert "Values that were not in the training rows: site 50." in done.err
        assert "Values that are missing: ad 50, " in done.err
        result = only_json(
            recap("predict", packed, raw / "rows.parquet", "--out", raw / "o.tsv", "--json").out
        )
        assert (result["unseen"]["site"], result["missing"]["ad"]) == (50, 50)

    def test_map(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(600).rename({"ad": "advert"}).write_csv(raw / "renamed.csv")
        told(recap("predict", packed, raw / "renamed.csv"), "no column 'ad'", "--map ad=")
        mapped = recap("predict", packed, raw / "renamed.csv", "--map", "ad=advert")
        plain = recap("predict", packed, raw / "clicks.csv")
        assert mapped.out.replace("advert", "ad") == plain.out
        measured = recap("evaluate", packed, raw / "renamed.csv", "--map", "ad=advert", "--json")
        assert only_json(measured.out) == only_json(
            recap("evaluate", packed, raw / "clicks.csv", "--json").out
        )
        for wrong, word in (
            ("ad", "expected FIELD=COLUMN"), ("=x", "expected FIELD=COLUMN"), ("ad=", "expected FIELD=COLUMN"),
            ("ad=nowhere", "no column 'nowhere'"), ("adverts=ad", "no field 'adverts'"),
        ):  # fmt: skip
            told(recap("predict", packed, raw / "clicks.csv", "--map", wrong), word)

    def test_json_needs_out(self, raw: Path, packed: Path, recap: Recap) -> None:
        told(recap("predict", packed, raw / "clicks.csv", "--json"), "--json needs --out")

    def test_list_columns_need_a_format_that_holds_them(
        self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        click_log.head(5).with_columns(pl.col("tags").str.split(" ")).write_parquet(raw / "lists.parquet")
        told(recap("predict", packed, raw / "lists.parquet"), "'tags' is of type List", ".parquet or .arrow")
        assert recap("predict", packed, raw / "lists.parquet", "--out", raw / "out.arrow").code == 0

    def test_files_that_differ(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(5).drop("row").write_csv(raw / "other.csv")
        done = recap("predict", packed, raw / "clicks.csv", raw / "other.csv", "--out", raw / "out.csv")
        told(done, "the files differ in their columns: 'row'")
        assert not (raw / "out.csv").exists()


class TestEvaluate:
    def test_negative_rate(self, raw: Path, packed: Path, recap: Recap) -> None:
        plain = only_json(recap("evaluate", packed, raw / "clicks.csv", "--json").out)
        corrected = only_json(
            recap("evaluate", packed, raw / "clicks.csv", "--negative-rate", 0.5, "--json").out
        )
        rate = plain["base_rate"]
        assert corrected["base_rate"] == pytest.approx(rate / (rate + (1 - rate) / 0.5))
        told(recap("evaluate", packed, raw / "clicks.csv", "--negative-rate", 0), "not in (0, 1]")

    def test_without_labels(self, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap) -> None:
        click_log.head(5).drop("click").write_csv(raw / "unlabelled.csv")
        told(recap("evaluate", packed, raw / "unlabelled.csv"), "no column 'click' (label)")


HEADER, ROW = "row,click,site,ad,user,price,tags\n", "1,0,a,b,1,1.5,t1\n2,1,a,b,1,1.5,t1\n"
BAD_LOGS: dict[str, tuple[bytes, list[str]]] = {
    "missing column": (b"row,click,site,user,price,tags\n1,0,a,1,1,t\n", ["no column 'ad' (", "present"]),
    "label not 0/1": (f"{HEADER}{ROW}3,2,a,b,1,1,t\n".encode(), ["row 3", "'2', neither 0 nor 1"]),
    "label missing": (f"{HEADER}{ROW}3,,a,b,1,1,t\n".encode(), ["row 3", "'click' is missing"]),
    "one class": (f"{HEADER}{'1,0,a,b,1,1,t' + chr(10)}".encode() + b"1,0,a,b,1,1,t\n" * 40, ["one class only"]),
    "empty": (b"", ["is empty"]),
    "header only": (HEADER.encode(), ["holds no rows"]),
    "ragged, short": (f"{HEADER}{ROW}3,0,a\n".encode(), ["row 3 has 3 fields, expected 7"]),
    "ragged, long": (f"{HEADER}{ROW}3,0,a,b,1,1,t,more\n".encode(), ["row 3 has 8 fields, expected 7"]),
    "broken UTF-8": (f"{HEADER}{ROW}".encode() + b"3,0,\xff\xfe,b,1,1,t\n", ["row 3 is not valid UTF-8"]),
    "broken UTF-8 header": (b"row,cl\xffick\n1,0\n", ["header line can't be read"]),
    "infinity": (f"{HEADER}{ROW}3,0,a,b,1,inf,t\n".encode(), ["row 3, field 'price': infinity"]),
    "no number": (f"{HEADER}{ROW}3,0,a,b,1,dear,t\n".encode(), ["row 3, field 'price': 'dear' is not a number"]),
    "10 MB cell": (f"{HEADER}{ROW}3,0,".encode() + b"x" * 10_000_000 + b",b,1,1,t\n",
                   ["row 3, column 'site'", "10,000,000 bytes"]),
    "duplicate columns": (b"row,click,site,ad,ad,user,price,tags\n1,0,a,b,b,1,1,t\n", ["'ad' appears twice"]),
    "open quote": (f'{HEADER}{ROW}3,0,"a,b,1,1,t\n'.encode(), ["row 3"]),
}  # fmt: skip


class TestBadLogs:
    """The same log is refused with the same words whatever is to be done with it, and nothing is left behind."""

    @pytest.mark.parametrize("name", BAD_LOGS)
    def test_prepare(self, name: str, raw: Path, recap: Recap) -> None:
        text, words = BAD_LOGS[name]
        (raw / "bad.csv").write_bytes(text)
        before = contents(raw)
        done = recap("prepare", raw / "bad.csv", "--schema", raw / "schema.toml", "--out", raw / "data")
        told(done, *words)
        assert contents(raw) == before

    @pytest.mark.parametrize("name", BAD_LOGS)
    def test_predict_and_evaluate(self, name: str, raw: Path, packed: Path, recap: Recap) -> None:
        text, words = BAD_LOGS[name]
        (raw / "bad.csv").write_bytes(text)
        before = contents(raw)
        told(recap("evaluate", packed, raw / "bad.csv"), *words)
        done = recap("predict", packed, raw / "bad.csv", "--out", raw / "scores.parquet")
        if "label" in name or name == "one class":
            assert done.code == 0, "a label is nothing that scoring needs"
            (raw / "scores.parquet").unlink()
            (raw / ".scores.parquet.inputs.json").unlink()
        else:
            told(done, *words)
        assert contents(raw) == before

    @pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv.gz", "rows.csv.zst"])
    def test_files_cut_short(
        self, name: str, raw: Path, packed: Path, click_log: pl.DataFrame, recap: Recap
    ) -> None:
        from tests.inference.test_scorer import WRITE

        WRITE[name.removeprefix("rows")](click_log, raw / name)
        whole = (raw / name).read_bytes()
        for part in (whole[: len(whole) // 2], whole[:-3], whole[:10], b"noise" * 10, b""):
            (raw / name).write_bytes(part)
            told(recap("predict", packed, raw / name, "--out", raw / "out.csv"), name)
            assert not (raw / "out.csv").exists()

    @pytest.mark.parametrize("name", ["no/such.csv", "*.nothing", "."])
    def test_files_that_are_not_there(self, name: str, raw: Path, packed: Path, recap: Recap) -> None:
        told(recap("predict", packed, raw / name))
        told(recap("prepare", raw / name, "--schema", raw / "schema.toml", "--out", raw / "data"))
        told(recap("schema", "infer", raw / name, "--label", "click", "--out", raw / "s.toml"))


class TestBadSettings:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", ["label"]),
            ("label = 'click'", ["fields"]),
            ("label = 'click'\n[[fields]]\nname = 'a'\nkind = 'odd'", ["fields.0.kind", "'odd'"]),
            (
                "label = 'click'\nlabels = 'x'\n[[fields]]\nname = 'a'\nkind = 'numeric'",
                ["labels", "unknown setting"],
            ),
            ("label = ", ["is not valid TOML"]),
            ("label = 'a'\n[[fields]]\nname = 'a'\nkind = 'numeric'", ["both the label and a field"]),
        ],
    )
    def test_schema(self, text: str, words: list[str], raw: Path, recap: Recap) -> None:
        (raw / "bad.toml").write_text(text)
        done = recap("prepare", raw / "clicks.csv", "--schema", raw / "bad.toml", "--out", raw / "data")
        told(done, "bad.toml", *words)

    def test_a_vocabulary_beyond_32_bits(self, raw: Path, recap: Recap) -> None:
        fields = "".join(
            f"[[fields]]\nname = '{name}'\nkind = 'categorical'\nhash_buckets = {2**30}\n"
            for name in ("site", "ad", "user")
        )
        (raw / "wide.toml").write_text(f"label = 'click'\n{fields}")
        done = recap("prepare", raw / "clicks.csv", "--schema", raw / "wide.toml", "--out", raw / "data")
        told(done, "3,221,225,478 values together; ids are 32-bit", "lower hash_buckets")
        assert not (raw / "data").exists()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[model]\ndims = 4", ["dims", "unknown setting; known are dim"]),
            ("[model]\ndim = 3", ["dim", "given: 3"]),
            ("[model]\nname = 'gpt'", ["no model 'gpt'", "known are fcn"]),
            ("[train]\nlearning_rate = -1", ["learning_rate", "given: -1"]),
            ("[train]\nl2 = nan", ["l2"]),
            ("[train]\nepochs = 3", ["epochs", "unknown setting"]),
            ("[training]\nx = 3", ["training", "[model] and [train]"]),
            ("model = 'fcn'", ["model", "[model] and [train]"]),
            ("train = 3", ["train", "[model] and [train]"]),
            ("[model", ["is not valid TOML"]),
            ("\xff", ["is not valid TOML"]),
        ],
    )
    def test_train(
        self, text: str, words: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        (raw / "bad.toml").write_bytes(text.encode("latin-1"))
        told(recap("train", prepared.path, "--config", raw / "bad.toml", "--out", raw / "run"), *words)
        assert not (raw / "run").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--model", "gpt"], ["no model 'gpt'"]),
            (["--config", "nowhere.toml"], ["nowhere.toml"]),
            (["--update", "quick"], ["update", "'quick'"]),
            (["--ema", "1.5"], ["ema"]),
            (["--calibration", "none"], ["known are affine and isotonic"]),
            (["--negative-rate", "2"], ["negative rate 2.0 is not in (0, 1]"]),
            (["--device", "quantum"], ["--device quantum"]),
            (["--learning-rate", "nan"], ["learning_rate"]),
        ],
    )
    def test_train_options(
        self, arguments: list[str], words: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        told(recap("train", prepared.path, "--out", raw / "run", *arguments), *words)
        assert not (raw / "run").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], ["no source file"]),
            (["clicks.csv"], ["--schema is missing"]),
            (["clicks.csv", "--schema", "nowhere.toml"], ["nowhere.toml"]),
            (["clicks.csv", "--schema", "schema.toml", "--split", "odd"], ["known are random and time"]),
            (["clicks.csv", "--schema", "schema.toml", "--ratio", "8:1"], ["--ratio 8:1"]),
            (["clicks.csv", "--schema", "schema.toml", "--split", "time"], ["needs a time column"]),
            (
                ["clicks.csv", "--schema", "schema.toml", "--split-column", "ad"],
                ["none of train, valid, test"],
            ),
            (["clicks.csv", "--schema", "schema.toml", "--test", "clicks.csv"], ["--test without --valid"]),
            (["clicks.csv", "--dataset", "ml-1m"], ["--dataset brings its own"]),
            (["--dataset", "nonsense", "--raw", "."], ["nonsense"]),
            (["--dataset", "ml-1m"], ["--raw is missing"]),
        ],
    )
    def test_prepare_options(
        self, arguments: list[str], words: list[str], raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(raw)
        before = contents(raw)
        told(recap("prepare", *arguments, "--out", "data"), *words)
        assert contents(raw) == before


class TestBadDirectories:
    def test_prepared_data(self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        for path in (raw, raw / "nowhere", packed, raw / "clicks.csv"):
            told(recap("train", path, "--out", raw / "run"), "holds no prepared data")
        copy = Path(shutil.copytree(prepared.path, raw / "data"))
        with (copy / "train" / "labels.npy").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\7")
        told(recap("train", copy, "--out", raw / "run"), "labels.npy has changed")
        (copy / "train" / "labels.npy").unlink()
        told(recap("train", copy, "--out", raw / "run"), "labels.npy is missing")
        (copy / "manifest.json").write_text("{")
        told(recap("train", copy, "--out", raw / "run"), "not valid JSON")
        told(recap("inspect", copy), "not valid JSON")

    def test_artifacts(self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        rows = raw / "clicks.csv"

        def all_refuse(path: Path, *words: str) -> None:
            told(recap("predict", path, rows), *words)
            told(recap("evaluate", path, rows), *words)
            told(recap("inspect", path), *words)

        all_refuse(raw, "holds no artifact")
        all_refuse(raw / "nowhere", "holds no artifact")
        told(recap("predict", prepared.path, rows), "holds no artifact")
        copy = Path(shutil.copytree(packed, raw / "copy"))
        weights = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(weights[:-1])
        all_refuse(copy, "model.safetensors is damaged", "fix: copy the artifact again")
        (copy / "model.safetensors").write_bytes(bytes([weights[0] ^ 1]) + weights[1:])
        all_refuse(copy, "model.safetensors is damaged")
        (copy / "model.safetensors").write_bytes(weights)
        (copy / "manifest.json").write_text("[]")
        told(recap("inspect", copy), "holds no artifact")
        shutil.copy(packed / "manifest.json", copy)
        forge(copy, lambda manifest: manifest.update(format=2))
        all_refuse(copy, "format 2; this version reads 1", "upgrade recap-ctr")


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """What a full disk does, by other means: writes beyond `size` fail, whoever makes them."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


class TestDisk:
    @pytest.mark.parametrize("size", [0, 1_500, 4_000])
    def test_no_room(self, size: int, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        """Every writer meets the limit; each tells it, leaves no litter, and succeeds once there is room."""
        rows = raw / "clicks.csv"
        for arguments in (
            ("prepare", rows, "--schema", raw / "schema.toml", "--out", raw / "data"),
            ("predict", packed, rows, "--out", raw / "out.csv"),
            ("predict", packed, rows, "--out", raw / "out.parquet"),
            ("predict", packed, rows, "--out", raw / "out.arrow"),
            ("synthetic", "--rows", 1_000, "--out", raw / "synthetic.parquet"),
        ):
            before = contents(raw)
            with no_file_larger_than(size):
                done = recap(*arguments, "-q")
            told(done, "no space left on the disk", "run the same command again")
            assert contents(raw) == before
        train = (
            "train",
            prepared.path,
            "--config",
            raw / "train.toml",
            "--threads",
            1,
            "--out",
            raw / "run",
            "-q",
        )
        with no_file_larger_than(size):
            told(recap(*train), "no space left on the disk")
        assert not (raw / "run" / "artifact").exists()
        assert not list((raw / "run").glob(".*"))
        assert recap(*train).code == 0
        load_artifact(raw / "run")

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
    @pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
    def test_what_the_system_refuses(
        self, number: int, call: str, raw: Path, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number), "/somewhere")

        owner: Any = os if call == "fsync" else Path
        before = contents(raw)
        word = "no space left" if number in (errno.ENOSPC, errno.EDQUOT) else "no permission"
        for arguments in (
            ("prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", raw / "new" / "data"),
            ("predict", packed, raw / "clicks.csv", "--out", raw / "new" / "out.parquet"),
            ("schema", "infer", raw / "clicks.csv", "--label", "click", "--out", raw / "new" / "schema.toml"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, call, refuse)
                told(recap(*arguments), word, "/somewhere")
            assert contents(raw) == before

    def test_places_that_cannot_be(
        self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        rows = raw / "clicks.csv"
        for place in (rows / "below", Path("/proc/nowhere/deeper"), raw / ("x" * 300)):
            for arguments in (
                ("prepare", rows, "--schema", raw / "schema.toml", "--out", place),
                ("train", prepared.path, "--config", raw / "train.toml", "--out", place),
                ("predict", packed, rows, "--out", place / "out.csv"),
                ("schema", "infer", rows, "--label", "click", "--out", place / "s.toml"),
                ("synthetic", "--rows", 10, "--out", place / "s.csv"),
                ("demo", "--rows", 5_000, "--out", place),
            ):
                told(recap(*arguments))

    def test_rights_to_read(
        self, raw: Path, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may read everything, so the refusal is played."""
        real: Callable[..., Any] = Path.open

        def guarded(path: Path, *arguments: Any, **settings: Any) -> Any:
            if path.name == "clicks.csv":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **settings)

        monkeypatch.setattr(Path, "open", guarded)
        told(recap("predict", packed, raw / "clicks.csv"), "ermission", "clicks.csv")


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

    def test_bad_input(self, raw: Path, packed: Path) -> None:
        command = [sys.executable, "-m", "recap_ctr", "predict", str(packed), "-"]
        done = subprocess.run(command, input=b"site,ad\na\n", capture_output=True)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.decode().startswith("error: standard input: row 1 has 1 fields, expected 2")
        assert b"Traceback" not in done.stderr


def test_runs_without_torch_say_what_is_missing(
    raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "recap_ctr.training.run")
    monkeypatch.delattr("recap_ctr.training.run")
    monkeypatch.setitem(sys.modules, "torch", None)
    told(recap("demo", "--out", raw / "demo"), "this needs PyTorch", "pip install 'recap-ctr[train]'")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "time", "--split-column", "c"], "--split and --split-column each say how to split"),
        (["--valid", "v.csv", "--split", "random"], "--split and --valid/--test each say how to split"),
        (["--dataset", "ml-1m", "--split", "time"], "--split and --dataset each say how to split"),
        (["--split-column", "c", "--ratio", "1:1:1"], "--ratio does not go with --split-column"),
        (["--raw", "somewhere"], "--raw goes with --dataset"),
        (["--no-check"], "--no-check goes with --dataset"),
    ],
)
def test_one_way_to_split(recap: Recap, tmp_path: Path, options: list[str], words: str) -> None:
    told(recap("prepare", "clicks.csv", "--out", tmp_path / "out", *options), words)


def test_a_public_data_set_is_checked_unless_told_otherwise(recap: Recap, tmp_path: Path) -> None:
    layouts.criteo(tmp_path)
    out = ("--dataset", "criteo-x4", "--raw", tmp_path, "--out", tmp_path / "out")
    told(
        recap("prepare", *out, "-q"),
        "criteo-x4: rows of train, valid and test: found (318, 41, 41)",
        "--no-check",
    )
    done = recap("prepare", *out, "--no-check", "--json")
    assert done.code == 0
    assert only_json(done.out)["splits"]["train"]["rows"] == 318
    assert len(only_json(done.out)["vocabulary"]) == 39
    assert only_json(done.out)["name"] == "criteo-x4-unchecked"
    assert "reports call them criteo-x4-unchecked" in recap("prepare", *out, "--no-check").err


def test_files_without_a_header_line(recap: Recap, click_log: pl.DataFrame, tmp_path: Path) -> None:
    """All that a user meets: lines as they were, lines without the label, and what `recap predict` wrote of them."""
    log = (
        click_log.head(600)
        .select("click", "site", "ad", "price")
        .with_columns(pl.col("price").fill_null(1.0))
    )
    log.write_csv(tmp_path / "log.txt", include_header=False, separator="\t")
    log.drop("click").write_csv(tmp_path / "bare.txt", include_header=False, separator="\t")
    run = tmp_path / "run"
    for command in (
        ("schema", "infer", tmp_path / "log.txt", "--label", "click", "--columns", "click,site,ad,price", "--out",
         tmp_path / "schema.toml"),
        ("prepare", tmp_path / "log.txt", "--schema", tmp_path / "schema.toml", "--out", tmp_path / "data"),
        ("train", tmp_path / "data", "--model", "lr", "--max-epochs", "1", "--out", run),
    ):  # fmt: skip
        assert recap(*command, "-q").code == 0
    assert recap("predict", run, tmp_path / "bare.txt", "--out", tmp_path / "bare.csv", "-q").code == 0
    scored = recap("predict", run, tmp_path / "log.txt", "--out", tmp_path / "scores.csv")
    assert f"recap evaluate {run} {tmp_path / 'scores.csv'}" in scored.err
    told = [recap("evaluate", run, tmp_path / name, "--json", "-q") for name in ("log.txt", "scores.csv")]
    assert told[0].code == 0
    assert told[0].out == told[1].out
    bare, full = (pl.read_csv(tmp_path / name) for name in ("bare.csv", "scores.csv"))
    assert bare.equals(full.drop("click"))
    assert (full.height, full.columns) == (600, ["click", "site", "ad", "price", "score", "logit"])


def test_fit_takes_no_stream(recap: Recap, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, called in (("-", "standard input"), (tmp_path / "pipe", str(tmp_path / "pipe"))):
        done = recap("fit", name, "--label", "click", "--out", tmp_path / "out")
        told(done, f"{called} can be read only once", "save them to a file first", "`recap prepare -`")
    assert not (tmp_path / "out").exists()


def test_data_sets_are_listed(recap: Recap) -> None:
    done = recap("datasets", "--json")
    listed = only_json(done.out)["datasets"]
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


def test_devices_are_those_of_the_help(recap: Recap, prepared: PreparedData, tmp_path: Path) -> None:
    told(
        recap("train", prepared.path, "--out", tmp_path / "x", "--device", "meta"),
        "known are cpu, cuda and mps",
    )
    assert not (tmp_path / "x").exists()
