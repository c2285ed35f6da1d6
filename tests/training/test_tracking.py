"""Trackers get every epoch once, as it ends, and what the report says; one that is missing or fails costs no model."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import announce_epoch
from recap_ctr.storage.files import write_json
from recap_ctr.training import trackers
from recap_ctr.training.report import RunReport, read_report
from recap_ctr.training.tracking import RECORD, check_tracker, describe, tracked_by
from tests.support.trackers import FakeMlflow, FakeWandb, events, install_tensorboard


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A finished run in a directory of its own, in which trackers leave their files."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def report(out: Path) -> RunReport:
    return read_report(out)


def follow(report: RunReport, out: Path, tracker: trackers.Tracker, *, epochs: int = 0) -> None:
    """Let a tracker hear of some epochs, then of the report."""
    with tracked_by(tracker, out) as log_report:
        for epoch in report.history[:epochs]:
            announce_epoch(str(out), epoch.model_dump())
        log_report(report)


def interrupt(report: RunReport, out: Path, tracker: trackers.Tracker) -> None:
    """Let a tracker hear of one epoch, and no more."""
    with pytest.raises(KeyboardInterrupt), tracked_by(tracker, out):
        announce_epoch(str(out), report.history[0].model_dump())
        raise KeyboardInterrupt


def aucs(report: RunReport) -> list[tuple[int, float]]:
    return [(epoch.step, epoch.valid_auc) for epoch in report.history]


def test_what_is_tracked_is_in_the_report(report: RunReport, out: Path) -> None:
    tracked = describe(report, out)
    assert tracked.parameters["model"] == "fcn"
    assert tracked.parameters["train.batch_size"] == 256
    assert tracked.parameters["model.dim"] == 4
    assert tracked.parameters["data.fingerprint"] == report.data.fingerprint
    assert tracked.figures["test/auc"] == report.metrics.on("test").raw.auc
    assert tracked.figures["valid/calibrated_logloss"] == report.metrics.valid.calibrated.logloss
    assert [file.name for file in tracked.files] == ["MODEL_CARD.md", "report.json"]


def test_a_tracker_that_is_not_installed_is_refused_with_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"wandb is not installed\n  fix: pip install 'recap-ctr\[track\]'"):
        check_tracker("wandb")
    with pytest.raises(InputError, match="no tracker 'mlfow'; did you mean 'mlflow'"):
        check_tracker("mlfow")
    assert check_tracker(None) is None


class TestMlflow:
    @pytest.fixture
    def mlflow(self, monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
        return FakeMlflow(monkeypatch)

    def test_epochs_come_as_they_end_and_the_rest_from_the_report(
        self, report: RunReport, out: Path, mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert check_tracker("mlflow") == "mlflow"
        with tracked_by("mlflow", out) as log_report:
            announce_epoch(str(out), report.history[0].model_dump())
            parent, child = mlflow.runs.values()
            assert (child["parent"], child["status"]) == ("run-0", "RUNNING")
            assert [name for name, *_ in child["metrics"]][:3] == ["epoch", "train/loss", "valid/auc"]
            log_report(report)
        parent, child = mlflow.runs.values()
        assert parent["params"]["model.dim"] == child["params"]["model.dim"] == "4"
        assert ("test/auc", report.metrics.on("test").raw.auc, 0, 0) in parent["metrics"]
        steps = [step for name, _, _, step in child["metrics"] if name == "valid/auc"]
        assert steps == [epoch.step for epoch in report.history]
        assert parent["files"] == ["MODEL_CARD.md", "report.json"]
        assert mlflow.models == [out / "artifact"]
        assert [run["status"] for run in mlflow.runs.values()] == ["FINISHED", "FINISHED"]
        assert "mlflow.pyfunc.load_model('models:/model')" in capsys.readouterr().err

    def test_a_repeated_command_logs_nothing_twice(
        self, report: RunReport, out: Path, mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
    ) -> None:
        follow(report, out, "mlflow")
        before = json.dumps(mlflow.runs)
        follow(report, out, "mlflow", epochs=2)
        assert json.dumps(mlflow.runs) == before
        assert f"up to date; remove {out / RECORD} to log it again" in capsys.readouterr().err
        other = report.model_copy(update={"parameters": 5})
        follow(other, out, "mlflow")
        assert len(mlflow.runs) == 4  # Another result is another run: settings of one can't be changed.

    def test_an_interrupted_run_goes_on(self, report: RunReport, out: Path, mlflow: FakeMlflow) -> None:
        interrupt(report, out, "mlflow")
        assert mlflow.runs["run-0"]["status"] == "KILLED"
        follow(report, out, "mlflow", epochs=2)
        parent, child = mlflow.runs.values()
        steps = [step for name, _, _, step in child["metrics"] if name == "valid/auc"]
        assert steps == [epoch.step for epoch in report.history]
        assert parent["status"] == "FINISHED"

    def test_a_failure_is_one_warning_without_passwords_and_tried_again(
        self,
        report: RunReport,
        out: Path,
        mlflow: FakeMlflow,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(*_: object, **__: object) -> Any:
            raise ConnectionError("no answer from https://me:secret@tracker.example/api\nand more")

        with monkeypatch.context() as patch:
            patch.setattr(mlflow, "log_batch", fail)
            with tracked_by("mlflow", out, quiet=True):
                for epoch in report.history[:2]:
                    announce_epoch(str(out), epoch.model_dump())
        warning = (
            f"Warning: mlflow did not take the epochs of {out}: no answer from https://tracker.example/api\n"
        )
        assert capsys.readouterr().err == warning
        follow(report, out, "mlflow")
        child = next(run for run in mlflow.runs.values() if run["parent"] and run["metrics"])
        assert len([name for name, *_ in child["metrics"] if name == "epoch"]) == len(report.history)

    def test_a_damaged_record_costs_a_warning(
        self, report: RunReport, out: Path, mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_json(out / RECORD, {"mlflow": 3})
        follow(report, out, "mlflow")
        assert "Warning: mlflow did not take the report" in capsys.readouterr().err


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def tensorboard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_tensorboard(monkeypatch)

    def test_it_has_the_curves_the_figures_and_the_card(
        self, report: RunReport, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        interrupt(report, out, "tensorboard")
        assert events(out / "tensorboard" / "runs" / "run", "valid/auc") == aucs(report)[:1]
        follow(report, out, "tensorboard", epochs=2)
        assert events(out / "tensorboard" / "runs" / "run", "valid/auc") == aucs(report)
        result = out / "tensorboard" / "result"
        assert events(result, "final/test/auc") == [(0, report.metrics.on("test").raw.auc)]
        ((_, card),) = events(result, "model card")
        assert card.startswith("# FCN click model")
        assert f"tensorboard --logdir {out / 'tensorboard'}" in capsys.readouterr().err


class TestWandb:
    def test_one_run_has_all_curves_and_the_artifact(
        self,
        report: RunReport,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        wandb = FakeWandb(monkeypatch)
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        interrupt(report, out, "wandb")
        follow(report, out, "wandb", epochs=2)
        first, second = wandb.runs
        assert (first.exit_code, second.exit_code) == (1, 0)
        assert (first.options["mode"], second.options["id"], second.options["resume"]) == (
            "offline",
            "new",
            "allow",
        )
        logged = [(figures["run/step"], figures["run/valid/auc"]) for figures in first.logged + second.logged]
        assert logged == aucs(report)
        assert second.summary["test/auc"] == report.metrics.on("test").raw.auc
        assert second.config["runs"]["run"]["model.dim"] == 4
        (artifact,) = second.artifacts
        assert artifact.directory == str(out / "artifact")
        assert artifact.files == ["report/MODEL_CARD.md", "report/report.json"]
        assert "offline run; send it by `wandb sync wandb/offline-run`" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("variables", "mode"),
        [({}, "offline"), ({"WANDB_API_KEY": "x"}, "online"), ({"WANDB_MODE": "disabled"}, None)],
    )
    def test_nothing_is_sent_unless_asked(
        self, variables: dict[str, str], mode: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert trackers.wandb_mode() == mode
