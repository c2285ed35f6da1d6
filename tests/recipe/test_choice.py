"""What a fit ships: the student, unless another run is better on both halves of the validation rows."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from recap_ctr.axes.logits import Estimator, LogitWriter
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import halves, metrics
from recap_ctr.recipe.choice import Choice, choose_shipped, prefer_simple
from recap_ctr.training.config import LOGITS
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import ModelSummary, PartGain, RunReport, read_report, write_report


def run_with(
    directory: Path, logits: npt.NDArray[Any], data: PreparedData, reports: RunReport, model: str = "recap"
) -> Runs:
    """Return a finished run that has these logits on the validation rows."""
    with LogitWriter(directory / LOGITS / "valid", data, "valid", [Estimator(directory.name)]) as writer:
        writer.write(logits[:, None])
    auc = metrics.auc(data.valid.labels, logits.astype(np.float32))
    raw = reports.metrics.valid.raw.model_copy(update={"auc": auc})
    valid = reports.metrics.valid.model_copy(update={"raw": raw})
    changes = {
        "metrics": reports.metrics.model_copy(update={"valid": valid}),
        "model": ModelSummary(name=model, config={}),
    }
    report = reports.model_copy(update=changes)
    write_report(directory, report)
    return {directory: report}


@pytest.fixture(name="report")
def any_report(finished: Path) -> RunReport:
    return read_report(finished)


def test_the_student_is_shipped_if_nothing_is_better(
    prepared: PreparedData, report: RunReport, tmp_path: Path
) -> None:
    labels = prepared.valid.labels.astype(float)
    noise = np.random.default_rng(0).normal(size=len(labels))
    student = run_with(tmp_path / "student", labels + 0.1 * noise, prepared, report)
    teacher = run_with(tmp_path / "teacher-1", labels + 2 * noise, prepared, report, "fcn")
    shipped = choose_shipped(prepared, student, teacher)
    assert shipped.path == tmp_path / "student"
    assert shipped.reason == "no other run is better on validation rows; fcn (teacher-1) comes next"


def test_a_better_run_is_shipped_and_the_reason_given(
    prepared: PreparedData, report: RunReport, tmp_path: Path
) -> None:
    labels = prepared.valid.labels.astype(float)
    noise = np.random.default_rng(0).normal(size=len(labels))
    student = run_with(tmp_path / "student", labels + 2 * noise, prepared, report)
    others = run_with(tmp_path / "teacher-1", labels + 3 * noise, prepared, report, "fcn")
    others |= run_with(tmp_path / "reference-lr", labels + 0.1 * noise, prepared, report, "lr")
    shipped = choose_shipped(prepared, student, others)
    assert shipped.path == tmp_path / "reference-lr"
    assert shipped.reason is not None
    assert shipped.reason.startswith("lr (reference-lr) is better on validation rows than the student: +")


def test_a_lead_that_the_other_half_does_not_confirm_is_luck(
    prepared: PreparedData, report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "MIN_OF_A_CLASS", 5)
    labels = prepared.valid.labels.astype(float)
    noise = np.random.default_rng(0).normal(size=len(labels))
    order = np.random.default_rng(halves.SEED).permutation(len(labels))
    student_logits = labels + noise
    lucky = student_logits.copy()
    lucky[order[::2]] += 0.5 * labels[order[::2]]
    lucky[order[1::2]] -= 0.1 * labels[order[1::2]]
    student = run_with(tmp_path / "student", student_logits, prepared, report)
    shipped = choose_shipped(
        prepared, student, run_with(tmp_path / "teacher-1", lucky, prepared, report, "fcn")
    )
    assert shipped.path == tmp_path / "student"
    assert shipped.reason is not None and "which the other half does not confirm (-" in shipped.reason


def test_of_several_students_the_best_is_the_one_to_beat(
    prepared: PreparedData, report: RunReport, tmp_path: Path
) -> None:
    labels = prepared.valid.labels.astype(float)
    noise = np.random.default_rng(0).normal(size=len(labels))
    students = run_with(tmp_path / "worse", labels + 2 * noise, prepared, report)
    students |= run_with(tmp_path / "better", labels + noise, prepared, report)
    assert choose_shipped(prepared, students, {}).path == tmp_path / "better"


class TestPreferSimple:
    def leads(self, prepared: PreparedData, report: RunReport, tmp_path: Path, gain: float) -> Choice:
        labels = prepared.valid.labels.astype(float)
        rng = np.random.default_rng(0)
        simple = labels + 2 * rng.normal(size=len(labels))
        run_with(tmp_path / "lr", simple, prepared, report, "lr")
        run_with(
            tmp_path / "student", simple + gain * labels + rng.normal(size=len(labels)), prepared, report
        )
        return prefer_simple(Choice(tmp_path / "student", "why"), [tmp_path / "lr"], prepared)

    def test_a_clear_lead_stands(self, prepared: PreparedData, report: RunReport, tmp_path: Path) -> None:
        assert self.leads(prepared, report, tmp_path, 3.0) == Choice(tmp_path / "student", "why")

    def test_a_lead_that_chance_gives_does_not(
        self, prepared: PreparedData, report: RunReport, tmp_path: Path
    ) -> None:
        choice = self.leads(prepared, report, tmp_path, 0.1)
        assert choice.path == tmp_path / "lr"
        assert (
            choice.reason is not None
            and "compared with lr" in choice.reason
            and "the simpler model is shipped" in choice.reason
        )

    @pytest.mark.parametrize(("errors", "ships"), [(1.1, "student"), (0.9, "lr")])
    def test_one_standard_error_is_the_limit(
        self,
        errors: float,
        ships: str,
        prepared: PreparedData,
        report: RunReport,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        lead = metrics.Difference(errors * 0.001, 0.001)
        monkeypatch.setattr(metrics, "logloss_difference", lambda *_: lead)
        assert self.leads(prepared, report, tmp_path, 1.0).path == tmp_path / ships

    @pytest.mark.parametrize(("optimism", "ships"), [(0.0, "student"), (0.002, "lr")])
    def test_rows_that_fitted_the_proportions_flatter(
        self,
        optimism: float,
        ships: str,
        prepared: PreparedData,
        report: RunReport,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A lead of 0.002 is none if proportions are worse by as much on rows that did not fit them."""
        monkeypatch.setattr(metrics, "logloss_difference", lambda *_: metrics.Difference(0.002, 0.001))
        beside = PartGain(factors={"towers": 1.0}, logloss=0.0, optimism=optimism)
        mixed = report.model_copy(update={"beside": beside})
        labels = prepared.valid.labels.astype(float)
        run_with(tmp_path / "lr", labels, prepared, report, "lr")
        run_with(tmp_path / "student", labels, prepared, mixed)
        choice = Choice(tmp_path / "student", "why")
        assert prefer_simple(choice, [tmp_path / "lr"], prepared).path == tmp_path / ships

    def test_better_probabilities_alone_are_a_lead(
        self, prepared: PreparedData, report: RunReport, tmp_path: Path
    ) -> None:
        """A few rows that the simplest is very sure of, and wrong about, hardly change its AUC."""
        labels = prepared.valid.labels.astype(float)
        noise = np.random.default_rng(0).normal(size=len(labels))
        usual, wrong = 2 * labels + noise, 2 * labels + noise
        wrong[np.flatnonzero(labels == 1)[:12]] = -6.0
        run_with(tmp_path / "lr", wrong, prepared, report, "lr")
        run_with(tmp_path / "student", usual, prepared, report)
        choice = Choice(tmp_path / "student", "why")
        assert prefer_simple(choice, [tmp_path / "lr"], prepared) is choice

    def test_of_two_simpler_models_the_better_one_is_shipped(
        self, prepared: PreparedData, report: RunReport, tmp_path: Path
    ) -> None:
        labels = prepared.valid.labels.astype(float)
        rng = np.random.default_rng(0)
        blend = 2 * labels + rng.normal(size=len(labels))
        run_with(tmp_path / "lr", labels + 2 * rng.normal(size=len(labels)), prepared, report, "lr")
        run_with(tmp_path / "blend", blend, prepared, report, "blend")
        run_with(tmp_path / "student", blend + 0.3 * rng.normal(size=len(labels)), prepared, report)
        runs = [tmp_path / "lr", tmp_path / "blend"]
        choice = prefer_simple(Choice(tmp_path / "student", "why"), runs, prepared)
        assert choice.path == tmp_path / "blend"
        assert choice.reason is not None and choice.reason.startswith("compared with blend, student")

    def test_nothing_is_simpler_than_the_simplest(self, prepared: PreparedData, tmp_path: Path) -> None:
        choice = Choice(tmp_path / "lr", None)
        assert prefer_simple(choice, [], prepared) is choice
