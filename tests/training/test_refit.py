"""Training again on all rows: the length is what was best before, and nothing is selected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recap_ctr.axes.logits import Estimator, LogitTable, LogitWriter
from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.whole import WholeLog
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training import refit
from recap_ctr.training.config import LOGITS, RunConfig
from recap_ctr.training.linear import fit_logistic
from recap_ctr.training.loop import train
from recap_ctr.training.parallel import run_many, teacher_tables
from recap_ctr.training.pool import RECOMBINED, Recombination
from recap_ctr.training.refit import Refit, config_of, length_of, train_again
from recap_ctr.training.report import read_report

CPU = torch.device("cpu")


def again(config: RunConfig, length: float, data: PreparedData, out: Path) -> Refit:
    refit = Refit(config, length, out)
    assert train_again(**refit.arguments(data, data, None))
    return refit


def of_model(model: str, **training: object) -> RunConfig:
    return RunConfig(
        model,
        parse_model(model, {}),
        TrainConfig.model_validate(training),
        train_baseline=False,
        report_fields=False,
    )


def test_a_length_ends_a_run_between_validations(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    """One validation comes at the very end; an interrupted run goes on to the same bits."""
    changes = {"max_epochs": 1, "batch_size": 256, "validations": 2}
    settings = run_config.train.model_copy(update=changes)
    last = round(2.5 * -(-len(prepared.train) // 256))

    def weights(out: Path, stop_at: int = 0) -> dict[str, torch.Tensor]:
        out.mkdir(exist_ok=True)

        def interrupt(step: int) -> None:
            if step == stop_at:
                raise KeyboardInterrupt

        trained = train(
            run_config.model,
            run_config.model_config,
            settings,
            prepared,
            out,
            device=CPU,
            length=2.5,
            quiet=True,
            on_step=interrupt,
        )
        assert [epoch.step for epoch in trained.history] == [last] and trained.finished
        return dict(trained.model.state_dict())

    whole = weights(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        weights(tmp_path / "cut", stop_at=last - 3)
    resumed = weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_a_regression_has_its_strength_and_all_rows(prepared: PreparedData, tmp_path: Path) -> None:
    config = of_model("lr", update="convex")
    report = run_many({tmp_path / "lr": config}, prepared, title="lr", quiet=True)[tmp_path / "lr"]
    assert report.strength is not None
    assert length_of(config, report, len(prepared.train)) == report.strength
    refit = again(config, report.strength, prepared, tmp_path / "again")
    expected = fit_logistic(WholeLog(prepared.path), strengths=[report.strength])
    weights = refit.model(WholeLog(prepared.path)).state_dict()["wide.embedding.table.weight"][:, 0]
    assert np.allclose(weights, expected.weights_V, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rates", "boosted"])
def test_parts_that_count_know_the_held_out_rows(model: str, prepared: PreparedData, tmp_path: Path) -> None:
    config = of_model(model, l2=0.0, batch_size=256, max_epochs=3)
    path = tmp_path / model
    report = run_many({path: config}, prepared, title=model, quiet=True)[path]
    length = length_of(config, report, len(prepared.train))
    settings = config_of(config, path, len(prepared.train), len(WholeLog(prepared.path).train))
    refit = again(settings, length, prepared, tmp_path / "again")
    before = read_report(path).metrics.on("test").raw.logloss
    logits = predict(refit.model(WholeLog(prepared.path)), prepared.test, CPU).astype(np.float64)
    labels = np.asarray(prepared.test.labels, np.float64)
    assert np.mean(np.logaddexp(0, logits) - labels * logits) < before


@pytest.mark.slow
def test_a_taught_run_learns_from_the_same_teachers_on_all_rows(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    """With all weight on its teacher, a student of many epochs comes near it on held-out rows, too."""
    settings = {"batch_size": 256, "max_epochs": 2}
    teacher = replace(run_config, train=run_config.train.model_copy(update=settings))
    run_many({tmp_path / "teacher": teacher}, prepared, title="teacher", quiet=True)
    tables = teacher_tables([tmp_path / "teacher"], "train")
    student = replace(
        teacher,
        teachers=tables,
        train=teacher.train.model_copy(update={"kd_weight": 1000.0, "learning_rate": 0.01}),
    )
    refit = again(student, 12.0, prepared, tmp_path / "again")
    taught = predict(refit.model(WholeLog(prepared.path)), prepared.test, CPU)
    wanted = np.asarray(LogitTable(tmp_path / "teacher" / LOGITS / "test").logits_NM[:, 0])
    assert np.corrcoef(sigmoid(taught), sigmoid(wanted))[0, 1] > 0.9


def test_a_taught_run_has_the_same_recombined_rows(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made of the training rows, though all rows train."""
    recombination, teacher = Recombination(prepared, 2), tmp_path / "teacher"
    shards = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    tables = {teacher / LOGITS / split: (split, rows) for split, rows in shards.items()}
    tables[recombination.table_of(teacher)] = (RECOMBINED, recombination.rows())
    for path, (split, rows) in tables.items():
        with LogitWriter(path, prepared, split, [Estimator("t")], recombination.inputs, rows) as writer:
            writer.write(np.asarray(rows.ids[:, :1] % 7, np.float32))
    seen: dict[str, Any] = {}

    def note(*_: Any, **keywords: Any) -> None:
        seen.update(keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(refit, "train", note)
    student = replace(run_config, teachers=teacher_tables([teacher], "train"))
    with pytest.raises(KeyboardInterrupt):
        again(recombination.taught(student, [teacher]), 1.0, prepared, tmp_path / "again")
    np.testing.assert_array_equal(seen["pool"].rows.ids, recombination.rows().ids)
    np.testing.assert_allclose(seen["pool"].targets, sigmoid(seen["pool"].rows.ids[:, 0] % 7), rtol=1e-5)
    assert len(seen["targets"]) == sum(len(rows) for rows in shards.values())


@pytest.mark.slow
def test_a_student_learns_what_its_teacher_makes_of_rows_that_it_knows_now(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that has learned from all rows scores these and the recombined ones; a second one was left as it
    was."""
    teacher = replace(run_config, train=run_config.train.model_copy(update={"batch_size": 256}))
    left = tmp_path / "left"
    run_many({left: teacher.with_seed(9)}, prepared, title="teacher", quiet=True)
    learned = Refit(teacher, 1.0, tmp_path / "learned", recombined=2)
    for _ in range(2):  # What is there the second time is not written again.
        assert train_again(**learned.arguments(prepared, prepared, None))
        written = (learned.logits / "logits.npy").stat().st_mtime_ns
    assert (learned.logits / "logits.npy").stat().st_mtime_ns == written
    whole, recombination = WholeLog(prepared.path), Recombination(prepared, 2)
    model = learned.model(whole)
    pool = LogitTable(recombination.table_of(learned.out)).logits_NM[:, 0]
    np.testing.assert_allclose(pool, predict(model, recombination.rows(), CPU), atol=1e-5)

    seen: dict[str, Any] = {}

    def note(*_: Any, **keywords: Any) -> None:
        seen.update(keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(refit, "train", note)
    with pytest.raises(KeyboardInterrupt):
        again(
            replace(run_config, teachers=(learned.logits, left / LOGITS / "train")),
            1.0,
            prepared,
            tmp_path / "x",
        )
    before = [LogitTable(left / LOGITS / split).logits_NM[:, 0] for split in ("train", "valid", "test")]
    mean = (predict(model, whole.train, CPU) + np.concatenate(before)) / 2
    np.testing.assert_allclose(seen["targets"], sigmoid(mean), atol=1e-5)


def test_the_prior_weighs_the_same_against_all_rows(run_config: RunConfig, tmp_path: Path) -> None:
    config = replace(run_config, train=run_config.train.model_copy(update={"l2": 0.02}))
    assert config_of(config, tmp_path, 800, 1000).train.l2 == pytest.approx(0.016)
