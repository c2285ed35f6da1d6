"""The search: first the base, then what the space allows; killed, pruned, exhausted, out of time, asked for more."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recap_ctr
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.jobs.local import Job
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe import tune as tune_module
from recap_ctr.recipe.spaces import parse_space
from recap_ctr.recipe.tune import Search, tune, work
from recap_ctr.training import loop as train_module
from recap_ctr.training.run import RunConfig
from tests.conftest import Recap, contents

SMALL = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
TRAIN: dict[str, Any] = {"batch_size": 512, "learning_rate": 1e-2, "max_epochs": 2}
L2 = {"train.l2": {"low": 1e-6, "high": 1e-2, "log": True}}
BASE = '[model]\nname = "lr"\n[train]\nbatch_size = 512\nlearning_rate = 0.01\nmax_epochs = 2\n'


def search(space: dict[str, Any], model: str = "lr", prune_after: int = 8, **train: Any) -> Search:
    config = parse_model(model, SMALL if model == "fcn" else {})
    base = RunConfig(model, config, TrainConfig(**{**TRAIN, **train}))
    return Search(base, parse_space(space, "test"), prune_after)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in this process, one after the other: the same function without seconds of imports."""

    def run(jobs: list[Job], **_: object) -> list[Any]:
        return [work(**json.loads(json.dumps(job.arguments))) for job in jobs]

    monkeypatch.setattr(tune_module, "run_jobs", run)


def count_steps(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], None] = lambda _: None) -> list[int]:
    """The steps of all trainings from now on; `at` is told each number before."""
    real, steps = train_module.Trainer.step, list[int]()

    def step(trainer: train_module.Trainer) -> int:
        at(len(steps))
        steps.append(trainer.progress.step)
        return real(trainer)

    monkeypatch.setattr(train_module.Trainer, "step", step)
    return steps


@pytest.mark.usefixtures("inline")
class TestSearch:
    def test_the_base_comes_first_and_the_best_is_kept(self, prepared: PreparedData, tmp_path: Path) -> None:
        out = tmp_path / "tuned"
        wanted = search({**L2, "model.linear_dropout": [0, 0.1, 0.4]}, "fcn")
        record = tune(wanted, prepared, out, trials=4, workers=1, quiet=True)

        assert [trial["number"] for trial in record["trials"]] == [0, 1, 2, 3]
        first = record["trials"][0]
        assert first == record["base"]
        assert first["settings"] == {"train.l2": 1e-5, "model.linear_dropout": 0.1} == record["started_from"]
        best = max(record["trials"], key=lambda trial: float(trial["valid_auc"]))
        assert record["best"] == best
        assert record["gain"]["auc"] == pytest.approx(best["valid_auc"] - first["valid_auc"])
        assert all(
            len(trial["valid_aucs"]) == 2 and trial["state"] == "complete" for trial in record["trials"]
        )
        assert record == json.loads((out / "tune.json").read_text())
        assert record["data"]["fingerprint"] == prepared.fingerprint
        assert record["versions"].keys() >= {"optuna", "torch"} and record["machine"]["cores"]
        # Of the weights, those of the best and of the base.
        assert len(list((out / "trials").iterdir())) == len({best["number"], 0})

    def test_the_same_seed_draws_the_same(self, prepared: PreparedData, tmp_path: Path) -> None:
        def settings(out: Path, seed: int) -> list[Any]:
            record = tune(search(L2, seed=seed, max_epochs=1), prepared, out, trials=2, workers=1, quiet=True)
            return [trial["settings"] for trial in record["trials"]]

        first = settings(tmp_path / "a", 1)
        assert first == settings(tmp_path / "b", 1)
        assert first != settings(tmp_path / "c", 2)
        assert len({str(one) for one in first}) == 2

    def test_more_trials_go_on_and_enough_are_left_alone(
        self, prepared: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "odd [name] 100% {x}?#"
        two = tune(search(L2), prepared, out, trials=2, workers=1, quiet=True)
        four = tune(search(L2), prepared, out, trials=4, workers=1, quiet=True)
        assert four["trials"][:2] == two["trials"] and len(four["trials"]) == 4
        before = contents(out)
        assert tune(search(L2), prepared, out, trials=3, workers=1) == four
        assert "holds 4 trials; nothing to do" in capsys.readouterr().err
        assert contents(out) == before

    def test_other_inputs_are_refused(self, prepared: PreparedData, tmp_path: Path) -> None:
        tune(search(L2), prepared, tmp_path / "tuned", trials=1, workers=1, quiet=True)
        for other, changed in (
            (search({"train.l2": [0.1]}), "space"),
            (search(L2, batch_size=256), "train"),
            (search(L2, "fm"), "model"),
            (search(L2, prune_after=3), "prune_after"),
        ):
            with pytest.raises(InputError, match=rf"other inputs \(changed: {changed}\)"):
                tune(other, prepared, tmp_path / "tuned", trials=1, workers=1, quiet=True)
        record = tune(
            search({"train.l2": [0.1]}), prepared, tmp_path / "tuned", trials=1, force=True, quiet=True
        )
        assert len(record["trials"]) == 1

    def test_a_wrong_space_leaves_nothing_behind(self, prepared: PreparedData, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"model\.dropout: no setting to search"):
            tune(search({"model.dropout": [0.1]}), prepared, tmp_path / "tuned", trials=1)
        assert not (tmp_path / "tuned").exists()

    def test_what_lags_is_pruned(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tune_module, "COMPARABLE", 1)
        monkeypatch.setattr(
            train_module.Trainer,
            "_validate",
            lambda trainer, _: (0.7 if trainer.config.learning_rate > 1e-3 else 0.5, 0.6),
        )
        hopeless = search(
            {"train.learning_rate": [1e-6, 2e-6, 3e-6]}, prune_after=2, max_epochs=4, patience=4
        )
        record = tune(hopeless, prepared, tmp_path / "tuned", trials=4, workers=1, quiet=True)
        states = [(trial["state"], len(trial["valid_aucs"])) for trial in record["trials"]]
        assert states[0] == ("complete", 4)
        assert set(states[1:]) == {("pruned", 2)}
        assert record["best"]["number"] == 0
        assert record["gain"] == {"auc": 0.0, "standard_error": None}
        assert len(list((tmp_path / "tuned" / "trials").iterdir())) == 1

    def test_a_small_space_is_searched_once(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No settings twice, those that don't go together not at all; then it ends, short of what was asked for."""
        monkeypatch.setattr(tune_module, "DRAWS", 12)
        wanted = search({"model.num_heads": [1, 3, 4]}, "qnn", max_epochs=1, update="fast")
        record = tune(wanted, prepared, tmp_path / "tuned", trials=9, workers=1, quiet=True)
        assert [trial["settings"]["model.num_heads"] for trial in record["trials"]] == [4, 1]
        assert record["exhausted"] and record["left_out"] >= 12
        again = tune(wanted, prepared, tmp_path / "tuned", trials=9, workers=1, quiet=True)
        assert again == record

    def test_what_diverges_is_no_reason_to_stop(self, prepared: PreparedData, tmp_path: Path) -> None:
        wanted = search({"train.learning_rate": [1e30]}, "fcn", clip=1e30)
        record = tune(wanted, prepared, tmp_path / "tuned", trials=2, workers=1, quiet=True)
        assert [trial["state"] for trial in record["trials"]] == ["complete", "diverged"]
        with pytest.raises(InputError, match="all 1 trials diverged"):
            hopeless = search(L2, "fcn", clip=1e30, learning_rate=1e30)
            tune(hopeless, prepared, tmp_path / "hopeless", trials=1, workers=1, quiet=True)

    def test_killed_it_goes_on_from_the_saved_state(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = tune(search(L2), prepared, tmp_path / "whole", trials=3, workers=1, quiet=True)
        per_epoch = -(-len(prepared.train) // TRAIN["batch_size"])

        def die(step: int) -> None:
            if step == 3 * per_epoch + 2:  # in the second epoch of the second trial
                raise KeyboardInterrupt

        steps = count_steps(monkeypatch, die)
        with pytest.raises(KeyboardInterrupt):
            tune(search(L2), prepared, tmp_path / "tuned", trials=3, workers=1, quiet=True)
        steps[:] = [-1] * 100
        record = tune(search(L2), prepared, tmp_path / "tuned", trials=3, workers=1, quiet=True)

        assert steps[100] == per_epoch, "the lost trial goes on after its first epoch"
        assert len(record["trials"]) == 3
        for mine, theirs in zip(record["trials"][:2], whole["trials"], strict=False):
            assert mine["settings"] == theirs["settings"]
            assert mine["valid_aucs"] == theirs["valid_aucs"]

    def test_out_of_time(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def go(minutes: float | None) -> dict[str, Any]:
            return tune(
                search(L2), prepared, tmp_path / "tuned", trials=2, minutes=minutes, workers=1, quiet=True
            )

        calls = iter([0.0] * 2)  # the deadline, and the start of the first trial
        with monkeypatch.context() as patch:
            patch.setattr(tune_module, "time", SimpleNamespace(time=lambda: next(calls, 1e9)))
            with pytest.raises(InputError, match="no trial has finished yet"):
                go(1.0)
        steps = count_steps(monkeypatch)
        record = go(None)
        assert steps[0] > 0, "the first trial was stopped after an epoch, and goes on from there"
        assert len(record["trials"]) == 2 and record["base"] is not None


def test_test_rows_are_never_read(prepared: PreparedData, tmp_path: Path) -> None:
    """By the workers neither, which are processes of their own: what lies in their place is no array at all."""
    copy = Path(shutil.copytree(prepared.path, tmp_path / "data"))
    for file in (copy / "test").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    blind = PreparedData(copy, verify=False)
    record = tune(search(L2), blind, tmp_path / "tuned", trials=1, workers=1, quiet=True)
    assert len(record["trials"]) == 1
    with pytest.raises(ValueError):
        np.load(copy / "test" / "labels.npy")


def test_a_killed_worker_ends_the_command_and_the_next_goes_on(
    prepared: PreparedData, tmp_path: Path
) -> None:
    (tmp_path / "base.toml").write_text(BASE.replace("max_epochs = 2", "max_epochs = 12\npatience = 12"))
    (tmp_path / "space.toml").write_text("[train]\nl2 = {low = 1e-6, high = 1e-2, log = true}\n")
    out = tmp_path / "tuned"
    command = [
        sys.executable, "-m", "recap_ctr", "tune", str(prepared.path), "--config", str(tmp_path / "base.toml"),
        "--space", str(tmp_path / "space.toml"), "--trials", "2", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    settings: dict[str, Any] = {
        "env": {**os.environ, "PYTHONPATH": str(Path(recap_ctr.__file__).parents[1])},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(command, **settings) as process:
        while process.poll() is None and not list(out.glob("trials/*/state.safetensors")):
            time.sleep(0.005)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert "ended without a result, with code -9" in process.communicate()[1]
        assert process.returncode == 1
    left = {path.parent.name for path in out.glob("trials/*/state.safetensors")}
    done = subprocess.run(command, **settings)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "tune.json").read_text())
    assert [len(trial["valid_aucs"]) for trial in record["trials"]] == [12, 12]
    assert left <= {tune_module._name(trial["settings"]) for trial in record["trials"]}


@pytest.mark.usefixtures("inline")
def test_the_command(prepared: PreparedData, tmp_path: Path, recap: Recap) -> None:
    """From the search to a model by the settings that it found, which are as good as it says."""
    (tmp_path / "base.toml").write_text(BASE)
    asked = (
        "tune", prepared.path, "--config", tmp_path / "base.toml", "--trials", 3, "--threads", 1,
        "--out", tmp_path / "t",
    )  # fmt: skip
    done = recap(*asked)
    assert done.code == 0, done.err
    assert "trial  valid AUC  epochs" in done.out
    assert "3 trials, 0 of them pruned" in done.out
    assert f"Next: recap train {prepared.path} --config {tmp_path / 't' / 'best.toml'}" in done.err

    again = recap(*asked, "--json")
    record = json.loads(again.out)
    assert "nothing to do" in again.err
    found = tomllib.loads((tmp_path / "t" / "best.toml").read_text())
    best = record["best"]["settings"]
    assert found["model"] == {"name": "lr"}
    assert found["train"] == {
        "batch_size": 512,
        "max_epochs": 2,
        "l2": best["train.l2"],
        "learning_rate": best["train.learning_rate"],
    }

    trained = recap(
        "train", prepared.path, "--config", tmp_path / "t" / "best.toml", "--threads", 1, "--no-reference",
        "--out", tmp_path / "run", "--json", "-q",
    )  # fmt: skip
    history = json.loads(trained.out)["history"]
    assert [line["valid_auc"] for line in history] == record["best"]["valid_aucs"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "nope"), "no model 'nope'"),
        (("--space", "none.toml"), "no file none.toml"),
        (("--space", "os:environ"), "is neither a list of choices nor a range"),
        (("--space", "os.path:nothing"), "os.path has no nothing"),
        (("--model", "dnn", "--space", "recap_ctr.nowhere:SPACE"), "on PYTHONPATH, or install it"),
    ],
)
def test_what_is_refused(
    prepared: PreparedData, tmp_path: Path, recap: Recap, options: tuple[str, ...], words: str
) -> None:
    done = recap("tune", prepared.path, "--out", tmp_path / "t", *options)
    assert done.code == 2 and words in done.err, done
    assert not (tmp_path / "t").exists()
