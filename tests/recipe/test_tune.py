"""The search: the base run comes first; it can be killed, extended, run out of time or out of new settings."""

import json
import os
import shutil
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
from recap_ctr.jobs import engines
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe import study as study_module
from recap_ctr.recipe import tune as tune_module
from recap_ctr.recipe.spaces import parse_space
from recap_ctr.recipe.study import Search
from recap_ctr.recipe.tune import TuneRecord, trial_directory, tune
from recap_ctr.storage.files import read_json
from recap_ctr.training.config import RunConfig
from recap_ctr.training.loop import Trainer
from tests.conftest import Recap, contents
from tests.support.killed_workers import KilledWorkers

SMALL = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
TRAIN: dict[str, Any] = {"batch_size": 512, "learning_rate": 1e-2, "max_epochs": 2}
L2 = {"train.l2": {"low": 1e-6, "high": 1e-2, "log": True}}
BASE = '[model]\nname = "lr"\n[train]\nbatch_size = 512\nlearning_rate = 0.01\nmax_epochs = 2\n'


def search_for(space: dict[str, Any], model: str = "lr", prune_after: int = 8, **train: Any) -> Search:
    config = parse_model(model, SMALL if model == "fcn" else {})
    base = RunConfig(model, config, TrainConfig(**{**TRAIN, **train}))
    return Search(base, parse_space(space, "test"), prune_after)


def tune_here(
    search: Search,
    data: PreparedData,
    out: Path,
    *,
    trials: int,
    minutes: float | None = None,
    force: bool = False,
    quiet: bool = True,
) -> TuneRecord:
    """Search in this process, which saves the seconds that a worker takes to import torch."""
    return tune(
        search,
        data,
        out,
        trials=trials,
        minutes=minutes,
        executor=InThisProcess(),
        force=force,
        quiet=quiet,
    )


def count_steps(
    monkeypatch: pytest.MonkeyPatch, before_step: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Return a list that grows by the step that each update of a later training starts from.

    `before_step` is called with the number of updates so far.
    """
    step_of_trainer, steps = Trainer.step, list[int]()

    def step(trainer: Trainer) -> int:
        before_step(len(steps))
        steps.append(trainer.progress.step)
        return step_of_trainer(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    return steps


class TestSearch:
    @pytest.mark.slow
    def test_the_base_comes_first_and_the_best_is_kept(self, prepared: PreparedData, tmp_path: Path) -> None:
        out = tmp_path / "tuned"
        search = search_for({**L2, "model.linear_dropout": [0, 0.1, 0.4]}, "fcn")
        record = tune_here(search, prepared, out, trials=4)

        assert [trial.number for trial in record.trials] == [0, 1, 2, 3]
        first = record.trials[0]
        assert first == record.base
        assert first.settings == {"train.l2": 1e-5, "model.linear_dropout": 0.1} == record.started_from
        best = max(record.trials, key=lambda trial: trial.valid_auc or 0.0)
        assert record.best == best
        assert best.valid_auc is not None and first.valid_auc is not None and record.gain is not None
        assert record.gain.auc == pytest.approx(best.valid_auc - first.valid_auc)
        assert all(len(trial.valid_aucs) == 2 and trial.state == "complete" for trial in record.trials)
        assert record.to_json() == read_json(out / "tune.json")
        assert record.data.fingerprint == prepared.fingerprint
        assert record.versions.keys() >= {"optuna", "torch"} and record.machine["cores"]
        # The weights of the best trial and of the base are kept, no others.
        assert len(list((out / "trials").iterdir())) == len({best.number, 0})

    @pytest.mark.slow
    def test_the_same_seed_draws_the_same(self, prepared: PreparedData, tmp_path: Path) -> None:
        def settings(out: Path, seed: int) -> list[Any]:
            record = tune_here(search_for(L2, seed=seed, max_epochs=1), prepared, out, trials=2)
            return [trial.settings for trial in record.trials]

        first = settings(tmp_path / "a", 1)
        assert first == settings(tmp_path / "b", 1)
        assert first != settings(tmp_path / "c", 2)
        assert first[0] != first[1]

    @pytest.mark.slow
    def test_more_trials_extend_a_search_and_enough_leave_it_alone(
        self, prepared: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "odd [name] 100% {x}?#"
        two = tune_here(search_for(L2), prepared, out, trials=2)
        four = tune_here(search_for(L2), prepared, out, trials=4)
        assert four.trials[:2] == two.trials and len(four.trials) == 4
        before = contents(out)
        assert tune_here(search_for(L2), prepared, out, trials=3, quiet=False) == four
        assert "holds 4 trials; nothing to do" in capsys.readouterr().err
        assert contents(out) == before

    @pytest.mark.slow
    def test_other_inputs_are_refused(self, prepared: PreparedData, tmp_path: Path) -> None:
        out = tmp_path / "tuned"
        tune_here(search_for(L2), prepared, out, trials=1)
        for other, changed in (
            (search_for({"train.l2": [0.1]}), "space"),
            (search_for(L2, batch_size=256), "train"),
            (search_for(L2, "fm"), "model"),
            (search_for(L2, prune_after=3), "prune_after"),
        ):
            with pytest.raises(InputError, match=rf"\(changed: {changed}\)"):
                tune_here(other, prepared, out, trials=1)
        record = tune_here(search_for({"train.l2": [0.1]}), prepared, out, trials=1, force=True)
        assert len(record.trials) == 1

    def test_a_wrong_space_leaves_nothing_behind(self, prepared: PreparedData, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"model\.dropout can't be searched"):
            tune_here(search_for({"model.dropout": [0.1]}), prepared, tmp_path / "tuned", trials=1)
        assert not (tmp_path / "tuned").exists()

    @pytest.mark.slow
    def test_a_trial_that_lags_is_pruned(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(study_module, "MIN_FINISHED", 1)
        too_slow = {"train.learning_rate": [1e-9, 2e-9, 3e-9]}
        search = search_for(too_slow, "fcn", prune_after=2, max_epochs=4, patience=4)
        record = tune_here(search, prepared, tmp_path / "tuned", trials=4)
        states = [(trial.state, len(trial.valid_aucs)) for trial in record.trials]
        assert states[0] == ("complete", 4)
        assert set(states[1:]) == {("pruned", 2)}
        assert record.best.number == 0
        assert record.gain is not None
        assert record.gain.to_json() == {"auc": 0.0, "standard_error": None}
        assert len(list((tmp_path / "tuned" / "trials").iterdir())) == 1

    @pytest.mark.slow
    def test_a_small_space_is_searched_once(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No settings are tried twice, and none that don't go together; then the search ends with fewer trials."""
        monkeypatch.setattr(study_module, "MAX_FAILED_DRAWS", 12)
        search = search_for({"model.num_heads": [1, 3, 4]}, "qnn", max_epochs=1, update="fast")
        record = tune_here(search, prepared, tmp_path / "tuned", trials=9)
        assert [trial.settings["model.num_heads"] for trial in record.trials] == [4, 1]
        assert record.exhausted and record.left_out >= 12
        assert tune_here(search, prepared, tmp_path / "tuned", trials=9) == record

    @pytest.mark.slow
    def test_a_setting_that_is_not_in_a_runs_dump_can_be_searched(
        self, prepared: PreparedData, tmp_path: Path
    ) -> None:
        search = search_for({"train.net_l2": [0.0, 1e-4]}, max_epochs=1)
        record = tune_here(search, prepared, tmp_path / "tuned", trials=2)
        assert [trial.settings["train.net_l2"] for trial in record.trials] == [0.0, 1e-4]

    @pytest.mark.slow
    def test_a_trial_that_diverges_does_not_end_the_search(
        self, prepared: PreparedData, tmp_path: Path
    ) -> None:
        search = search_for({"train.learning_rate": [1e30]}, "fcn", clip=1e30)
        record = tune_here(search, prepared, tmp_path / "tuned", trials=2)
        assert [trial.state for trial in record.trials] == ["complete", "diverged"]
        hopeless = search_for(L2, "fcn", clip=1e30, learning_rate=1e30)
        with pytest.raises(InputError, match="all 1 trials diverged"):
            tune_here(hopeless, prepared, tmp_path / "hopeless", trials=1)

    @pytest.mark.slow
    def test_an_interrupted_search_goes_on_from_the_saved_state(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = tune_here(search_for(L2), prepared, tmp_path / "whole", trials=3)
        per_epoch = -(-len(prepared.train) // TRAIN["batch_size"])

        def interrupt(updates: int) -> None:
            if updates == 3 * per_epoch + 2:  # In the second epoch of the second trial.
                raise KeyboardInterrupt

        steps = count_steps(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune_here(search_for(L2), prepared, tmp_path / "tuned", trials=3)
        steps[:] = [-1] * 100
        record = tune_here(search_for(L2), prepared, tmp_path / "tuned", trials=3)

        assert steps[100] == per_epoch, "the lost trial goes on after its first epoch"
        assert len(record.trials) == 3
        for resumed, uninterrupted in zip(record.trials[:2], whole.trials, strict=False):
            assert resumed.settings == uninterrupted.settings
            assert resumed.valid_aucs == uninterrupted.valid_aucs

    @pytest.mark.slow
    def test_out_of_time(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "tuned"
        calls = iter([0.0] * 2)  # For the deadline, and for the start of the first trial.
        with monkeypatch.context() as patch:
            patch.setattr(tune_module, "time", SimpleNamespace(time=lambda: next(calls, 1e9)))
            with pytest.raises(InputError, match="no trial has finished yet"):
                tune_here(search_for(L2), prepared, out, trials=2, minutes=1.0)
        steps = count_steps(monkeypatch)
        record = tune_here(search_for(L2), prepared, out, trials=2)
        assert steps[0] > 0, "the first trial was stopped after an epoch, and goes on from there"
        assert len(record.trials) == 2 and record.base is not None


@pytest.mark.slow
def test_test_rows_are_never_read(prepared: PreparedData, tmp_path: Path) -> None:
    """The files of the test rows are garbage, so a worker process that reads them fails."""
    copy = Path(shutil.copytree(prepared.path, tmp_path / "data"))
    for file in (copy / "test").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    without_test_rows = PreparedData(copy, verify=False)
    record = tune(
        search_for(L2),
        without_test_rows,
        tmp_path / "tuned",
        trials=1,
        executor=LocalProcesses(1),
        quiet=True,
    )
    assert len(record.trials) == 1
    with pytest.raises(ValueError):
        np.load(copy / "test" / "labels.npy")


@pytest.mark.slow
def test_a_killed_worker_ends_the_command_and_the_next_goes_on(
    prepared: PreparedData, tmp_path: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tests = Path(recap_ctr.__file__).parents[1], Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{tests}")
    (tmp_path / "base.toml").write_text(BASE.replace("max_epochs = 2", "max_epochs = 3\npatience = 3"))
    (tmp_path / "space.toml").write_text("[train]\nl2 = {low = 1e-6, high = 1e-2, log = true}\n")
    out = tmp_path / "tuned"
    command = ["tune", prepared.path, "--config", tmp_path / "base.toml", "--space", tmp_path / "space.toml"]
    command += ["--trials", 2, "--threads", 1, "--out", out]

    with monkeypatch.context() as patch:
        patch.setattr(engines, "LocalProcesses", lambda workers, **_: KilledWorkers(workers))
        killed = recap(*command)
    assert killed.code == 1 and "ended without a result, with code -9" in killed.err, killed.err
    started = {path.parent for path in out.glob("trials/*/state.safetensors")}
    assert started

    resumed = recap(*command)
    assert resumed.code == 0, resumed.err
    record = TuneRecord.model_validate_json((out / "tune.json").read_text())
    assert [len(trial.valid_aucs) for trial in record.trials] == [3, 3]
    assert started <= {trial_directory(out, trial.settings) for trial in record.trials}


@pytest.mark.slow
def test_the_command(
    prepared: PreparedData, tmp_path: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is trained with the config that the search wrote is as good as the search says."""
    monkeypatch.setattr(engines, "LocalProcesses", lambda workers, **_: InThisProcess())
    (tmp_path / "base.toml").write_text(BASE)
    out = tmp_path / "tuned"
    command = ["tune", prepared.path, "--config", tmp_path / "base.toml", "--trials", 3]
    command += ["--threads", 1, "--out", out]
    done = recap(*command)
    assert done.code == 0, done.err
    assert "trial  valid AUC  epochs" in done.out
    assert "3 trials, 0 of them pruned" in done.out
    assert f"Next: recap train {prepared.path} --config {out / 'best.toml'}" in done.err

    again = recap(*command, "--json")
    record = TuneRecord.model_validate_json(again.out)
    assert "nothing to do" in again.err
    config = tomllib.loads((out / "best.toml").read_text())
    assert config["model"] == {"name": "lr"}
    assert config["train"] == {
        "batch_size": 512,
        "max_epochs": 2,
        "l2": record.best.settings["train.l2"],
        "learning_rate": record.best.settings["train.learning_rate"],
    }

    training = ["train", prepared.path, "--config", out / "best.toml", "--threads", 1, "--no-baseline"]
    trained = recap(*training, "--out", tmp_path / "run", "--json", "-q")
    history = json.loads(trained.out)["history"]
    assert [epoch["valid_auc"] for epoch in history] == record.best.valid_aucs


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
def test_wrong_options_are_refused(
    prepared: PreparedData, tmp_path: Path, recap: Recap, options: tuple[str, ...], words: str
) -> None:
    done = recap("tune", prepared.path, "--out", tmp_path / "t", *options)
    assert done.code == 2 and words in done.err, done
    assert not (tmp_path / "t").exists()
