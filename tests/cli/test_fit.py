"""The commands of the whole recipe: what they refuse, how options and --set combine, and what they print."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recap_ctr.data.shards import PreparedData
from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json

TINY_RECIPE: dict[str, Any] = {
    "l2": 0.01,
    "model": "fcn",
    "model_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "train": {"batch_size": 256, "max_epochs": 9},
    "teacher_train": {"max_epochs": 9},
}


def test_fit_takes_no_stream(recap: Recap, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, called in (("-", "standard input"), (tmp_path / "pipe", str(tmp_path / "pipe"))):
        done = recap("fit", name, "--label", "click", "--out", tmp_path / "out")
        assert_refused(
            done, f"{called} can be read only once", "save them to a file first", "`recap prepare -`"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["a label or a schema", "--label COLUMN"]),
        (("--label", "clicked"), ["no column 'clicked' (label); did you mean 'click'?", "--label"]),
        (("--label", "click", "--model", "recapp"), ["no model 'recapp'; did you mean 'recap'?"]),
        (("--label", "click", "--weight", "wheight"), ["no column 'wheight' (weight)"]),
        (("--label", "click", "--group", "usr"), ["no column 'usr' (group); did you mean 'user'?"]),
        (("--label", "click", "--positive", "yes"), ["the label 'click' is never 'yes'", "'0', '1'"]),
        (("--label", "click", "--separator", "ab"), ["--separator 'ab'", "one character"]),
        (("--label", "click", "--teacher-model", "fnc"), ["no model 'fnc'; did you mean 'fcn'?"]),
        (
            ("--label", "click", "--set", "teacher=3"),
            ["teacher: unknown setting", "did you mean 'teachers'?"],
        ),
        (("--label", "click", "--set", "teachers=some"), ["teachers", "'some'"]),
        (("--label", "click", "--set", "train=3"), ["train", "value: 3"]),
        (("--label", "click", "--preset", "papr"), ["'papr' is not one of", "did you mean 'paper'?"]),
        (
            ("--label", "click", "--set", 'slices=["sit"]'),
            ["slices: no field 'sit'; did you mean 'site'?", "fix: choose from "],
        ),
        (("--label", "click", "--split", "tme"), ["--split tme: no such rule; did you mean 'time'?"]),
    ],
)
def test_bad_options(arguments: tuple[str, ...], words: list[str], raw: Path, recap: Recap) -> None:
    assert_refused(recap("fit", raw / "clicks.csv", *arguments, "--out", raw / "out"), *words)
    assert not (raw / "out" / "artifact").exists()


@pytest.mark.slow
def test_options_win_over_the_file_and_set_wins_over_options(
    raw: Path, prepared: PreparedData, recap: Recap, one_process: None
) -> None:
    (raw / "recipe.toml").write_text(tomli_w.dumps({**TINY_RECIPE, "teachers": 3, "model": "dnn"}))
    options = ("--teachers", 1, "--model", "dcn", "--seed", 3, "--threads", 1)
    settings = ("--set", "model=fcn", "--set", "train.max_epochs=1", "--set", "teacher_train.max_epochs=1")
    others = (
        *("--set", "train.patience=1", "--set", "seed=4", "--set", "calibration=isotonic"),
        *("--set", 'slices=["user"]'),
    )
    call = (
        "fit",
        prepared.path,
        "--config",
        raw / "recipe.toml",
        *options,
        *settings,
        *others,
        "--out",
        raw / "model",
    )
    report = only_json(recap(*call, "--json", "-q").out)
    assert (report["train"]["max_epochs"], report["train"]["patience"], report["train"]["seed"]) == (1, 1, 4)
    assert (report["calibration"], len(report["teacher_runs"])) == ("isotonic", 1)
    assert [entry["field"] for entry in report["breakdown"]["fields"]] == report["slices"] == ["user"]

    done = recap(*call)
    assert "shipped: fcn" in done.out
    assert f"Next: recap predict {raw / 'model' / 'artifact'} rows.csv" in done.err


def test_a_directory_of_something_else_is_left_alone(raw: Path, prepared: PreparedData, recap: Recap) -> None:
    (raw / "thesis").mkdir()
    (raw / "thesis" / "chapter.txt").write_text("years of work")
    for command in (("fit", prepared.path), ("plan", prepared.path), ("demo",)):
        assert_refused(recap(*command, "--out", raw / "thesis"), "choose another --out")
    assert [path.name for path in (raw / "thesis").iterdir()] == ["chapter.txt"]


def test_commands_without_torch_say_what_is_missing(
    raw: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in (("demo",), ("fit", raw / "clicks.csv", "--label", "click")):
        done = recap(*command, "--out", raw / "out")
        assert_refused(done, "this command needs PyTorch", "pip install 'recap-ctr[train]'")


class TestPlanOfRowsThatThereAreNot:
    call = ("plan", "--rows", "4.3e9", "--vocabulary", "9e8", "--workers", 64)

    @pytest.mark.slow
    def test_words_and_json(self, recap: Recap) -> None:
        words = recap(*self.call)
        assert (words.code, words.err) == (0, "")
        assert words.out.startswith(
            "4,300,000,000 rows of 39 fields with 900,000,000 values; fcn, batches of 4,096"
        )
        for part in ("state of a run", "moments", "sums of gradients", "validation", "rows to artifact"):
            assert part in words.out
        assert "With 64 workers, " in words.out
        assert "one core of" in words.out

        plan = only_json(recap(*self.call, "--json").out)
        assert plan["memory_bytes"]["table"] == -(-900_000_000 // 64) * 16 * 4
        assert plan["workload"]["train"]["update"] == "fast"

    @pytest.mark.slow
    def test_options_reach_the_formulas(self, recap: Recap) -> None:
        options = ("--fields", 5, "--model", "dnn", "--dim", 8, "--batch-size", 8192, "--network", 1)
        settings = ("--set", "train.update=exact", "--set", "train.ema=0", "--set", "model.units=[16]")
        plan = only_json(recap(*self.call, *options, *settings, "--json").out)
        assert plan["shape"]["dims"] == [8]
        assert plan["shape"]["dense_parameters"] < 5 * 8 * 16 + 100
        assert plan["memory_bytes"]["averages"] == 0
        assert plan["workload"]["train"]["batch_size"] == 8192
        uneven = only_json(recap(*self.call, "--ratio", "98:1:1", "--json").out)["workload"]
        assert (uneven["train_rows"], uneven["valid_rows"]) == (4_214_000_000, 43_000_000)
        sent = sum(plan["network_bytes_a_step"].values())
        assert plan["step_seconds"]["network"] == pytest.approx(sent / 1.25e8, rel=1e-4)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), ["nothing to plan", "--rows"]),
            (("data",), ["--out is missing"]),
            (("data", "--out", "model", "--workers", 2), ["--workers goes with --rows"]),
            (("data", "--rows", "1e6"), ["--rows and prepared data"]),
            (("--rows", "1e6", "--out", "model"), ["--rows and --out"]),
            (("--rows", "1e6"), ["--rows without --vocabulary"]),
            (("--rows", "1e6", "--vocabulary", "3e9"), ["--vocabulary 3,000,000,000", "32 bits"]),
            ((*call[1:], "--batch-size", 32), ["64 workers, and batches of 32 rows", "--batch-size"]),
            ((*call[1:], "--ratio", "9:1"), ["--ratio 9:1", "such as 8:1:1"]),
            ((*call[1:], "--set", "routes=2"), ["--set routes", "train.KEY"]),
            ((*call[1:], "--model", "fnc"), ["no model 'fnc'; did you mean 'fcn'?"]),
        ],
    )
    def test_bad_options(self, arguments: tuple[object, ...], words: list[str], recap: Recap) -> None:
        assert_refused(recap("plan", *arguments), *words)
