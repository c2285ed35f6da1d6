"""A run is a directory: what its report says, and when it is resumed, left alone or refused."""

import csv
import dataclasses
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource, Source
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import IsotonicCalibration
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.schema import Schema
from recap_ctr.storage.locks import locked
from recap_ctr.training import loop
from recap_ctr.training.config import RunConfig
from recap_ctr.training.loop import train
from recap_ctr.training.report import REPORT, RunReport, read_report
from recap_ctr.training.run import is_finished, run
from tests.conftest import contents
from tests.support.training_state import bits

CPU = torch.device("cpu")
TINY = parse_model("fcn", {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1})


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for below in value:
            yield from numbers(below)
    elif isinstance(value, float | int):
        yield value


class TestReport:
    @pytest.fixture
    def report(self, finished: Path) -> dict[str, Any]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        text = (finished / "report.json").read_text(encoding="utf-8")
        report: dict[str, Any] = json.loads(text, parse_constant=refuse)
        return report

    def test_it_says_how_it_was_made(
        self, report: dict[str, Any], run_config: RunConfig, prepared: PreparedData
    ) -> None:
        assert (report["kind"], report["format"]) == ("report", 1)
        assert report["model"] == {"name": "fcn", "config": run_config.model_config.model_dump(mode="json")}
        assert report["train"] == run_config.train.model_dump(mode="json")
        assert (report["threads"], report["device"], report["negative_rate"]) == (1, "cpu", 1.0)
        assert report["data"]["fingerprint"] == prepared.fingerprint
        assert report["data"]["splits"]["train"]["rows"] == len(prepared.train) == 2_400
        assert report["versions"].keys() >= {"python", "recap-ctr", "torch", "numpy", "polars"}
        assert report["machine"].keys() == {"processor", "cores", "system"}
        assert report["seconds"].keys() == {"train", "evaluate"}
        assert all(seconds > 0 for seconds in report["seconds"].values())
        assert len(report["date"]) == 10
        assert all(math.isfinite(number) for number in numbers(report))

    def test_its_history_is_that_of_the_run(self, report: dict[str, Any], finished: Path) -> None:
        history = report["history"]
        assert [epoch["epoch"] for epoch in history] == [1, 2]
        assert [epoch["step"] for epoch in history] == [10, 20]
        assert history[report["best_epoch"] - 1]["valid_auc"] == max(epoch["valid_auc"] for epoch in history)
        with (finished / "history.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        read = [{key: float(value) if value else None for key, value in row.items()} for row in rows]
        assert read == history

    def test_its_figures_are_those_of_scikit_learn(
        self, report: dict[str, Any], finished: Path, prepared: PreparedData
    ) -> None:
        artifact = load_artifact(finished)
        assert report["parameters"] == sum(weight.numel() for weight in artifact.model.parameters())
        for name, shard in (("valid", prepared.valid), ("test", prepared.test)):
            figures, raw = report["metrics"][name], predict(artifact.model, shard, CPU)
            rate = shard.labels.mean()
            assert figures["rows"] == len(shard)
            assert figures["base_rate"] == pytest.approx(rate)
            assert figures["base_rate_logloss"] == pytest.approx(
                log_loss(shard.labels, np.full(len(shard), rate))
            )
            for kind, logits in (("raw", raw), ("calibrated", artifact.calibration.apply(raw))):
                scores = sigmoid(logits)
                assert figures[kind]["auc"] == pytest.approx(roc_auc_score(shard.labels, scores), abs=1e-9)
                assert figures[kind]["logloss"] == pytest.approx(log_loss(shard.labels, scores), abs=1e-9)
            assert sum(line["rows"] for line in figures["reliability"]) == len(shard)
            assert 0.4 < report["reference"]["logistic regression"][name]["auc"] < 1
        # Calibration is fitted on the validation rows: there it takes the mean to the base rate.
        valid = report["metrics"]["valid"]
        assert valid["calibrated"]["mean_prediction"] == pytest.approx(valid["base_rate"], abs=1e-6)
        assert valid["calibrated"]["logloss"] <= valid["raw"]["logloss"] + 1e-9

    def test_the_artifact_says_the_same(self, report: dict[str, Any], finished: Path) -> None:
        manifest = load_artifact(finished).manifest
        assert manifest["calibration"] == report["calibrated_by"]
        for name, figures in report["metrics"].items():
            packed = {k: v for k, v in manifest["metrics"][name].items() if "slices" not in k}
            assert packed == {k: v for k, v in figures.items() if not k.startswith("reliability")}
        assert manifest["training"] == report["train"] | {"best_epoch": report["best_epoch"]}
        assert manifest["data"]["fingerprint"] == report["data"]["fingerprint"]


class TestVariants:
    def run(self, config: RunConfig, data: PreparedData, out: Path, **changes: Any) -> RunReport:
        return run(dataclasses.replace(config, **changes), data, out, quiet=True)

    @pytest.mark.slow
    def test_isotonic(self, run_config: RunConfig, prepared: PreparedData, tmp_path: Path) -> None:
        report = self.run(
            run_config, prepared, tmp_path / "run", calibration="isotonic", train_baseline=False
        )
        assert report.calibrated_by == {"kind": "isotonic"}
        assert report.reference is None
        assert isinstance(load_artifact(tmp_path / "run").calibration, IsotonicCalibration)

    @pytest.mark.slow
    def test_without_test_rows_and_with_groups_of_one_row(
        self, run_config: RunConfig, click_log: pl.DataFrame, click_schema: Schema, tmp_path: Path
    ) -> None:
        """Groups that have nothing to rank must not cost a finished training its report."""
        schema = click_schema.model_copy(update={"group": "row"})
        rows: dict[str, Source] = {
            "train": FrameSource(click_log.head(500)),
            "valid": FrameSource(click_log.tail(500)),
        }
        preparation = Preparation(schema, rows, Split(kind="files"))
        data, _ = write_prepared_data(preparation, tmp_path / "data", quiet=True)
        report = self.run(run_config, data, tmp_path / "run")
        assert report.metrics.test is None and report.metrics.split == "valid"
        assert report.metrics.valid.raw.group_auc is None

    def test_a_loss_that_is_no_number_is_an_error(
        self, run_config: RunConfig, prepared: PreparedData, tmp_path: Path
    ) -> None:
        settings = run_config.train.model_copy(update={"learning_rate": 1e30, "clip": 1e30})
        with pytest.raises(InputError, match=r"the loss became (nan|inf).*\n  fix: lower learning_rate"):
            self.run(run_config, prepared, tmp_path / "run", train=settings)
        assert not (tmp_path / "run" / "artifact").exists()

    @pytest.mark.parametrize("rate", [0.0, 1.5, float("nan")])
    def test_an_impossible_negative_rate(
        self, run_config: RunConfig, prepared: PreparedData, tmp_path: Path, rate: float
    ) -> None:
        with pytest.raises(InputError, match="negative rate"):
            self.run(run_config, prepared, tmp_path / "run", negative_rate=rate)
        assert list(tmp_path.iterdir()) == []


class TestOutput:
    def test_a_finished_run_is_left_alone(
        self,
        finished: Path,
        prepared: PreparedData,
        run_config: RunConfig,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        before = contents(finished)
        assert run(run_config, prepared, finished) == read_report(finished)
        assert contents(finished) == before
        assert "is up to date" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"threads": 2}, "threads"),
            ({"train": TrainConfig(batch_size=128)}, "train"),
            ({"model_config": parse_model("fcn", {"dim": 8})}, "model"),
            ({"model": "lr", "model_config": parse_model("lr", {})}, "model"),
        ],
    )
    def test_other_inputs_are_refused(
        self,
        finished: Path,
        prepared: PreparedData,
        run_config: RunConfig,
        changes: dict[str, Any],
        named: str,
    ) -> None:
        before = contents(finished)
        with pytest.raises(InputError, match=rf"other inputs \(changed: {named}\)\n  fix: .*--force"):
            run(dataclasses.replace(run_config, **changes), prepared, finished, quiet=True)
        assert contents(finished) == before

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "changes", [{"calibration": "isotonic", "negative_rate": 0.5}, {"train_baseline": False}]
    )
    def test_what_only_finishes_a_run_does_not_train_it_again(
        self,
        finished: Path,
        prepared: PreparedData,
        run_config: RunConfig,
        changes: dict[str, Any],
        tmp_path: Path,
    ) -> None:
        copy = Path(shutil.copytree(finished, tmp_path / "run"))
        before, weights = read_report(copy), (copy / "artifact" / "model.safetensors").read_bytes()
        other = dataclasses.replace(run_config, **changes)
        assert not is_finished(copy, other)
        report = run(other, prepared, copy, quiet=True)
        assert is_finished(copy, other) and not is_finished(copy, run_config)
        assert report.history == before.history
        assert (copy / "artifact" / "model.safetensors").read_bytes() == weights
        assert (report.reference is None) == (not other.train_baseline)
        assert (report.calibration, report.negative_rate) == (other.calibration, other.negative_rate)
        back = run(run_config, prepared, copy, quiet=True)
        assert back.metrics == before.metrics and back.calibrated_by == before.calibrated_by

    @pytest.mark.slow
    def test_other_data_are_refused_unless_forced(
        self,
        finished: Path,
        run_config: RunConfig,
        click_log: pl.DataFrame,
        click_schema: Schema,
        tmp_path: Path,
    ) -> None:
        copy = Path(shutil.copytree(finished, tmp_path / "run"))
        data, _ = write_prepared_data(
            Preparation(click_schema, {"all": FrameSource(click_log.head(1_000))}),
            tmp_path / "data",
            quiet=True,
        )
        with pytest.raises(InputError, match=r"changed: data"):
            run(run_config, data, copy, quiet=True)
        report = run(run_config, data, copy, force=True, quiet=True)
        assert report.data.fingerprint == load_artifact(copy).manifest["data"]["fingerprint"]
        assert report.data.splits["train"].rows == 800

    def test_what_is_not_ours_is_never_touched(
        self, prepared: PreparedData, run_config: RunConfig, tmp_path: Path
    ) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        for force in (False, True):
            with pytest.raises(InputError, match="holds something else"):
                run(run_config, prepared, tmp_path, force=force, quiet=True)
            with pytest.raises(InputError, match="is a file"):
                run(run_config, prepared, tmp_path / "thesis.txt", force=force, quiet=True)
        assert (tmp_path / "thesis.txt").read_text() == "years of work"

    @pytest.mark.slow
    def test_killed_before_its_inputs_were_written(
        self, prepared: PreparedData, run_config: RunConfig, tmp_path: Path
    ) -> None:
        (tmp_path / ".inputs.json.partial").write_text("{")
        run(run_config, prepared, tmp_path, quiet=True)

    def test_brackets_in_a_path_are_only_a_name(self, finished: Path, tmp_path: Path) -> None:
        load_artifact(Path(shutil.copytree(finished, tmp_path / "run [1]*")))

    def test_two_processes_do_not_share_a_run(
        self, finished: Path, prepared: PreparedData, run_config: RunConfig, tmp_path: Path
    ) -> None:
        copy = Path(shutil.copytree(finished, tmp_path / "run"))
        (copy / "report.json").unlink()
        with locked(copy), pytest.raises(InputError, match="another process is writing"):
            run(run_config, prepared, copy, quiet=True)


MODES = [
    TrainConfig(batch_size=256, learning_rate=1e-2, max_epochs=2, update="exact", ema=0.9),
    TrainConfig(batch_size=256, learning_rate=1e-2, max_epochs=2, update="fast"),
    TrainConfig(batch_size=256, learning_rate=1e-2, max_epochs=2, update="fast", ema=0.9, schedule="cosine"),
]


@pytest.fixture(scope="module")
def uninterrupted(
    prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> dict[TrainConfig, dict[str, bytes]]:
    torch.set_num_threads(1)
    states = {}
    for config in MODES:
        out = tmp_path_factory.mktemp("whole")
        train("fcn", TINY, config, prepared, out, device=CPU, quiet=True)
        states[config] = bits(out)
    return states


@pytest.mark.slow
@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    mode=st.sampled_from(MODES),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    often=st.booleans(),
)
def test_interrupted_at_any_step_it_ends_with_the_same_bits(
    mode: TrainConfig,
    steps: list[int],
    often: bool,
    prepared: PreparedData,
    uninterrupted: dict[TrainConfig, dict[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """State saved after every step or after epochs only, interrupted up to three times."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_SECONDS", -1.0 if often else 1e9)
        for stop in steps:

            def interrupt(step: int, stop: int = stop) -> None:
                if step == stop:
                    raise KeyboardInterrupt

            try:
                train("fcn", TINY, mode, prepared, out, device=CPU, quiet=True, on_step=interrupt)
            except KeyboardInterrupt:
                torch.manual_seed(random.randrange(2**31))  # what else the process drew must not matter
        train("fcn", TINY, mode, prepared, out, device=CPU, quiet=True)
    assert bits(out) == uninterrupted[mode]


@pytest.mark.slow
def test_interrupted_while_the_artifact_is_written_it_ends_with_the_same_bits(
    prepared: PreparedData,
    run_config: RunConfig,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from recap_ctr.inference import artifact

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for part in ("save_arrays", "model_card", "write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(artifact, part, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(run_config, prepared, tmp_path / "run", quiet=True)
        assert not (tmp_path / "run" / REPORT).exists()
        with pytest.raises(InputError, match=r"holds no artifact|is an unfinished run"):
            load_artifact(tmp_path / "run")
    run(run_config, prepared, tmp_path / "run", quiet=True)
    for name in ("best.safetensors", "artifact/model.safetensors", "artifact/manifest.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_a_finished_run_whose_artifact_is_gone_is_packed_again(
    finished: Path, prepared: PreparedData, run_config: RunConfig, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    weights = (copy / "artifact" / "model.safetensors").read_bytes()
    shutil.rmtree(copy / "artifact")

    run(run_config, prepared, copy, quiet=True)

    assert (copy / "artifact" / "model.safetensors").read_bytes() == weights


def test_a_run_goes_on_only_with_the_torch_it_was_begun_with(
    finished: Path,
    prepared: PreparedData,
    run_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    (copy / "report.json").unlink()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(InputError, match=r"begun with torch .*, this is 2\.99"):
        run(run_config, prepared, copy, quiet=True)


def test_a_teacher_for_each_column_needs_columns() -> None:
    train = TrainConfig(kd_from="column")
    with pytest.raises(InputError, match=r"rows have no columns of their own in recap\n.*fixed"):
        RunConfig("recap", parse_model("recap", {}), train)
    with pytest.raises(InputError, match="rows have no columns of their own in fcn"):
        RunConfig("fcn", parse_model("fcn", {}), train)
    RunConfig("recap", parse_model("recap", {"binding": "columns", "sampling": "fixed"}), train)
