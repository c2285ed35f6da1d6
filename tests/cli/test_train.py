"""Commands that train: resumed, refused, replaced, and every bad setting told in one message."""

from pathlib import Path

import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.storage.files import read_json
from recap_ctr.training.loop import Trainer
from tests.conftest import Done, Recap, contents
from tests.support.command_line import assert_refused, only_json
from tests.support.trackers import install_tensorboard


class TestTrain:
    @pytest.mark.slow
    def test_interrupted_resumed_reported_refused_and_replaced(
        self, raw: Path, prepared: PreparedData, finished: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def train(*more: object) -> Done:
            settings = ("--config", raw / "train.toml", "--threads", 1)
            return recap("train", prepared.path, *settings, "--out", raw / "run", *more)

        real, steps = Trainer.step, iter(range(1, 100))

        def step(trainer: Trainer) -> int:
            if next(steps) == 15:
                raise KeyboardInterrupt
            return real(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", step)
            done = train()
        assert done.code == 130
        assert "error: interrupted\n  fix: run the same command again" in done.err

        assert "resuming after step 10" in train().err
        for name in ("best.safetensors", "artifact/model.safetensors", "artifact/manifest.json"):
            assert (raw / "run" / name).read_bytes() == (finished / name).read_bytes()

        before = contents(raw / "run")
        again = train("--json")
        assert only_json(again.out) == read_json(raw / "run" / "report.json")
        assert "is up to date" in again.err
        assert_refused(train("--threads", 2), "changed: threads", "--force")
        assert_refused(train("--l2", "1e-3", "--seed", 4), "changed: train", "--force")
        assert_refused(train("--set", "train.patience=7"), "changed: train", "--force")
        assert_refused(train("--model", "lr"), "changed: model", "--force")
        assert contents(raw / "run") == before

        install_tensorboard(monkeypatch)
        named = train("--set", "card.owner=the ads team", "--track", "tensorboard")
        assert f"tensorboard --logdir {raw / 'run' / 'tensorboard'}" in named.err
        assert "Owner: the ads team" in (raw / "run" / "artifact" / "MODEL_CARD.md").read_text()
        assert_refused(train("--set", "card.owners=us"), "owners", "did you mean 'owner'?")
        assert_refused(train("--track", "tensorbord"), "did you mean 'tensorboard'?")

        assert train("--seed", 4, "--force").code == 0
        assert read_json(raw / "run" / "report.json")["train"]["seed"] == 4

    @pytest.mark.slow
    def test_threads_seed_and_settings_are_part_of_the_record(
        self, raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        options = ("--config", raw / "train.toml", "--seed", 9, "--threads", 1, "--no-baseline")
        settings = ("--set", "train.patience=3", "--set", "model.dim=2", "--set", "calibration=isotonic")
        done = recap("train", prepared.path, *options, *settings, "--out", raw / "run", "--json")
        report = only_json(done.out)
        assert (report["train"]["seed"], report["threads"]) == (9, 1)
        assert (report["train"]["patience"], report["model"]["config"]["dim"]) == (3, 2)
        assert report["calibration"] == "isotonic"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[model]\ndims = 4", ["dims", "unknown setting; choose from dim", "did you mean 'dim'?"]),
            ("[model]\ndim = 3", ["dim", "value: 3"]),
            ("[model]\nname = 'gpt'", ["no model 'gpt'", "choose fcn"]),
            ("[train]\nlearning_rate = -1", ["learning_rate", "value: -1"]),
            ("[train]\nl2 = nan", ["l2"]),
            ("[train]\nepochs = 3", ["epochs", "unknown setting"]),
            ("[training]\nx = 3", ["training", "[model] and [train]"]),
            ("model = 'fcn'", ["model", "[model] and [train]"]),
            ("train = 3", ["train", "[model] and [train]"]),
            ("[model", ["is not valid TOML"]),
            ("\xff", ["is not valid TOML"]),
        ],
    )
    def test_bad_files(
        self, text: str, words: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        (raw / "bad.toml").write_bytes(text.encode("latin-1"))
        done = recap("train", prepared.path, "--config", raw / "bad.toml", "--out", raw / "run")
        assert_refused(done, *words)
        assert not (raw / "run").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--model", "gpt"], ["no model 'gpt'"]),
            (["--model", "recp"], ["no model 'recp'; did you mean 'recap'?"]),
            (["--config", "nowhere.toml"], ["nowhere.toml"]),
            (["--set", "train.update=quick"], ["update", "'quick'"]),
            (["--set", "train.ema=1.5"], ["ema"]),
            (["--set", "train.patence=3"], ["train: patence: unknown setting", "did you mean 'patience'?"]),
            (["--set", "calibration=none"], ["calibration", "'affine' or 'isotonic'"]),
            (["--set", "negative_rate=2"], ["negative_rate", "less than or equal to 1"]),
            (["--set", "route_choice=odd"], ["route_choice", "'late', 'random' or 'greedy'"]),
            (["--set", 'slices=["sit"]'], ["slices: no field 'sit'; did you mean 'site'?"]),
            (["--set", "teachers=2"], ["--set teachers: no such setting", "train.KEY, model.KEY"]),
            (["--set", "train=3"], ["--set train: no such setting", "train.KEY"]),
            (["--set", "calibration.kind=affine"], ["--set calibration.kind: no such setting"]),
            (["--set", "patience"], ["--set patience: expected KEY=VALUE"]),
            (["--device", "quantum"], ["no device 'quantum'", "choose cpu, cuda or mps"]),
            (["--device", "meta"], ["no device 'meta'", "choose cpu, cuda or mps"]),
            (["--set", "train.learning_rate=nan"], ["learning_rate"]),
            (["--routes", "2"], ["fcn has no routes", "remove --routes"]),
        ],
    )
    def test_bad_options(
        self, arguments: list[str], words: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        assert_refused(recap("train", prepared.path, "--out", raw / "run", *arguments), *words)
        assert not (raw / "run").exists()


@pytest.mark.slow
def test_models_are_listed(recap: Recap) -> None:
    done = recap("models", "-q")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "fcn: 201,728 parameters on ML-1M" in lines
    entries = only_json(recap("models", "--json").out)["models"]
    names = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert names == [entry["name"] for entry in entries]


class TestLogits:
    def test_a_table_for_a_student(
        self, finished: Path, prepared: PreparedData, tmp_path: Path, recap: Recap
    ) -> None:
        done = recap("logits", finished, prepared.path, "--out", tmp_path / "teacher", "--json")
        assert only_json(done.out)["rows"] == len(prepared.train)
        again = recap("logits", finished, prepared.path, "--out", tmp_path / "teacher")
        assert (again.code, again.err) == (0, f"{tmp_path / 'teacher'} is up to date.\n")

    def test_what_is_no_logit_table_is_left_alone(
        self, finished: Path, prepared: PreparedData, tmp_path: Path, recap: Recap
    ) -> None:
        (tmp_path / "notes.txt").write_text("somebody's")
        done = recap("logits", finished, prepared.path, "--out", tmp_path, "--force")
        assert_refused(done, "exists and is not a logit table", "choose another --out")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_other_data(self, finished: Path, raw: Path, recap: Recap) -> None:
        assert recap("prepare", raw / "clicks.csv", "--label", "click", "--out", raw / "data").code == 0
        done = recap("logits", finished, raw / "data", "--out", raw / "table")
        assert_refused(done, "was trained on other data")


@pytest.mark.slow
def test_tune_searches_and_goes_on(
    raw: Path, prepared: PreparedData, recap: Recap, one_process: None
) -> None:
    (raw / "space.toml").write_text('"train.l2" = [1e-5, 1e-3]\n')
    arguments = ("tune", prepared.path, "--config", raw / "train.toml", "--space", raw / "space.toml")
    options = ("--threads", 1, "--set", "train.max_epochs=1", "--out", raw / "study")
    record = only_json(recap(*arguments, *options, "--trials", 1, "--json", "-q").out)
    assert [trial["settings"] for trial in record["trials"]] == [{"train.l2": 1e-4}]
    done = recap(*arguments, *options, "--trials", 2)
    assert "valid AUC" in done.out
    assert f"Next: recap train {prepared.path} --config {raw / 'study' / 'best.toml'} --out run" in done.err
