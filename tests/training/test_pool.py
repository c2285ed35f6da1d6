"""A student's pool: recombined rows cost what they should, change nothing else, and bring it closer to its teachers."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recap_ctr.axes.logits import Estimator, LogitTable
from recap_ctr.axes.predict import predict, write_logits
from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.data.recombine import num_cells, recombined
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.data.whole import WholeLog
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training import pool as pools
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.loop import Trainer, train
from recap_ctr.training.parallel import teacher_tables
from recap_ctr.training.pool import Pool, Recombination, read_pool
from recap_ctr.training.run import run
from tests.support.golden import SMALL
from tests.support.plain_rows import PlainRows, plain_rows
from tests.support.training_state import bits

CPU = torch.device("cpu")
Floats = np.ndarray


def pool_for(data: PlainRows, ratio: int = 2) -> tuple[Floats, Pool]:
    """Return random targets of the training rows, and a pool with random targets."""
    rng = np.random.default_rng(0)
    sides = tuple((field.name,) for field in data.layout.fields)
    rows = recombined(data.train, data.layout, sides, ratio, seed=1)
    return rng.random(len(data.train), np.float32), Pool(rows, rng.random(len(rows), np.float32))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_loss_of_recombined_rows_is_that_of_a_loop(is_weighted: bool) -> None:
    """A training row has its label and its target, a recombined row its target alone."""
    data, kd_weight = plain_rows(40), 2.0
    if is_weighted:
        weights = np.random.default_rng(1).random(40, np.float32) + 0.5
        object.__setattr__(data.train, "weights", weights)
    targets, pool = pool_for(data)
    config = TrainConfig(batch_size=120, kd_weight=kd_weight)
    trainer = Trainer("lr", parse_model("lr", {}), config, data, CPU, targets, pool=pool)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    logits = [predict(trainer.model, shard, CPU).astype(float) for shard in (data.train, pool.rows)]

    def cost(logit: float, wanted: float) -> float:
        return math.log1p(math.exp(logit)) - wanted * logit

    total = weight = 0.0
    for row in range(40):
        w = float(data.train.weights[row]) if data.train.weights is not None else 1.0
        labelled = cost(logits[0][row], float(data.train.labels[row]))
        total += w * (labelled + kd_weight * cost(logits[0][row], float(targets[row])))
        weight += w
    for row in range(80):
        w = float(pool.rows.weights[row]) if pool.rows.weights is not None else 1.0
        total += w * kd_weight * cost(logits[1][row], float(pool.targets[row]))
        weight += w * kd_weight / (1 + kd_weight)
    trainer.step()
    assert trainer.progress.loss_sum == pytest.approx(total / weight, rel=1e-5)


def test_without_a_pool_nothing_changes() -> None:
    data = plain_rows(40)
    targets, _ = pool_for(data)
    trainer = Trainer("lr", parse_model("lr", {}), TrainConfig(), data, CPU, targets)
    assert trainer.taught is data.train and trainer.targets is targets


class TestSteps:
    def test_an_epoch_is_as_long_as_without_a_pool(self) -> None:
        """So validations and averages count the same steps."""
        data = plain_rows(1_000)
        targets, pool = pool_for(data, 3)
        config = TrainConfig(batch_size=100, ema_epochs=(2.0,), validations=2)
        model = parse_model("lr", {})
        plain = Trainer("lr", model, config, data, CPU, targets)
        taught = Trainer("lr", model, config, data, CPU, targets, pool=pool)
        assert (taught.steps_per_epoch, taught.validated_at) == (plain.steps_per_epoch, plain.validated_at)
        assert [average.beta for average in taught.averages] == [average.beta for average in plain.averages]
        assert taught.steps_per_pass == 40

    def test_a_pass_takes_every_row_once(self) -> None:
        data = plain_rows(130)
        targets, pool = pool_for(data, 2)
        config = TrainConfig(batch_size=50, max_epochs=9)
        trainer = Trainer("lr", parse_model("lr", {}), config, data, CPU, targets, pool=pool)
        for _ in range(2):
            assert sum(trainer.step() for _ in range(trainer.steps_per_pass)) == 3 * 130

    @pytest.mark.parametrize("window_rows", [0, 200])
    def test_a_killed_run_ends_with_the_same_bits(self, window_rows: int, tmp_path: Path) -> None:
        data = plain_rows(400)
        targets, pool = pool_for(data, 2)
        config = TrainConfig(
            batch_size=64, max_epochs=4, update="fast", ema_epochs=(1.0,), window_rows=window_rows
        )
        model = parse_model("fcn", SMALL)

        def whole(out: Path) -> None:
            train("fcn", model, config, data, out, device=CPU, targets=targets, pool=pool, quiet=True)

        for name in ("whole", "parts"):
            (tmp_path / name).mkdir()
        whole(tmp_path / "whole")
        part = Trainer("fcn", model, config, data, CPU, targets, pool=pool)
        for _ in range(part.steps_per_epoch - 2):  # In the middle of an epoch, and of a pass.
            part.step()
        part.save(tmp_path / "parts")
        whole(tmp_path / "parts")
        assert bits(tmp_path / "parts") == bits(tmp_path / "whole")


def interactions(rows: Shard, layout: Layout) -> Floats:
    """Return the logits of a teacher that knows what pairs and triples of independent fields are worth."""
    rng = np.random.default_rng(9)
    vectors = [rng.normal(size=(field.size, 3)) for field in layout.fields]
    e, f, g = (
        vectors[at][np.asarray(rows.ids[:, at]) - field.offset] for at, field in enumerate(layout.fields)
    )
    logits: Floats = (e * f + f * g + e * g).sum(axis=1) / 2 + (e * f * g).sum(axis=1) / 2
    return logits.astype(np.float32)


@pytest.mark.slow
def test_a_pool_brings_a_student_closer_to_its_teacher_at_equal_steps(tmp_path: Path) -> None:
    layout, rng = Layout.of_sizes([22, 22, 22]), np.random.default_rng(4)

    def drawn(count: int) -> Shard:
        ids = rng.integers(1, 21, (count, 3)).astype(np.int32) + np.array([0, 22, 44], np.int32)
        rows = Shard(
            ids, np.empty((count, 0), np.float32), np.zeros(count, np.uint8), np.arange(count), *[None] * 3
        )
        clicks = rng.random(count) < sigmoid(interactions(rows, layout))
        return replace(rows, labels=clicks.astype(np.uint8))

    data, fresh = PlainRows(layout, drawn(1_000), drawn(300)), drawn(2_000)
    rows = recombined(data.train, layout, (("f0",), ("f1",), ("f2",)), 3, seed=1)
    pool = Pool(rows, sigmoid(interactions(rows, layout)).astype(np.float32))
    targets = sigmoid(interactions(data.train, layout)).astype(np.float32)
    config = TrainConfig(
        batch_size=128,
        learning_rate=5e-3,
        update="fast",
        schedule="constant",
        max_epochs=40,
        patience=40,
        ema_epochs=(4.0,),
    )

    def distance(name: str, given_pool: Pool | None) -> tuple[int, float]:
        (tmp_path / name).mkdir()
        model = parse_model("fcn", {**SMALL, "dim": 8})
        trained = train(
            *("fcn", model, config, data, tmp_path / name),
            device=CPU,
            targets=targets,
            pool=given_pool,
            length=40.0,
            quiet=True,
        )
        gap = predict(trained.model, fresh, CPU) - interactions(fresh, layout)
        return trained.history[-1].step, float(np.sqrt(np.mean(gap**2)))

    (steps, without), (same_steps, with_pool) = distance("without", None), distance("with", pool)
    assert steps == same_steps
    assert with_pool < 0.8 * without


@pytest.fixture(scope="module")
def teacher(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("pool") / "teacher"))


@pytest.fixture(scope="module")
def recombination(prepared: PreparedData, teacher: Path) -> Recombination:
    recombination = Recombination(prepared, 2)
    for job in recombination.jobs([teacher, teacher], threads=1, device="cpu"):
        job.function(**job.arguments)
    return recombination


class TestTables:
    def test_a_teacher_scores_the_rows_once(
        self, recombination: Recombination, teacher: Path, prepared: PreparedData
    ) -> None:
        assert recombination.jobs([teacher], threads=1, device="cpu") == []
        table = LogitTable(recombination.table_of(teacher))
        model = load_artifact(teacher / ARTIFACT).model
        np.testing.assert_allclose(
            table.logits_NM[:, 0], predict(model, recombination.rows(), CPU), atol=1e-5
        )
        made = read_pool([table.path], 2, prepared)
        assert made is not None and len(made.rows) == 2 * len(prepared.train)
        np.testing.assert_allclose(made.targets, sigmoid(np.asarray(table.logits_NM[:, 0])), atol=1e-6)
        assert read_pool([], 0, prepared) is None

    def test_in_a_log_of_all_rows_they_are_the_same(
        self, recombination: Recombination, teacher: Path, prepared: PreparedData
    ) -> None:
        whole = WholeLog(prepared.path)
        np.testing.assert_array_equal(recombination.rows(whole).ids, recombination.rows().ids)

    def test_logits_of_other_rows_are_refused(
        self, recombination: Recombination, teacher: Path, prepared: PreparedData
    ) -> None:
        with pytest.raises(InputError, match="other recombined rows"):
            read_pool([recombination.table_of(teacher)], 1, prepared)

    def test_too_many_rows_are_refused(self, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "MAX_CELLS", 3 * num_cells(prepared.train))
        Recombination(prepared, 2)
        with pytest.raises(InputError, match="recombined is 3: training and recombined rows"):
            Recombination(prepared, 3)

    def test_some_of_the_rows_are_those_of_some_training_rows(self) -> None:
        data = plain_rows(50)
        _, pool = pool_for(data, 2)
        some = pool.take(np.array([3, 7]), 50)
        np.testing.assert_array_equal(some.rows.ids, pool.rows.ids[[3, 7, 53, 57]])
        np.testing.assert_array_equal(some.targets, pool.targets[[3, 7, 53, 57]])

    @pytest.mark.slow
    def test_a_student_reports_them(
        self,
        recombination: Recombination,
        teacher: Path,
        run_config: RunConfig,
        prepared: PreparedData,
        tmp_path: Path,
    ) -> None:
        student = replace(run_config, teachers=_train_table(teacher, prepared), train_baseline=False)
        taught = recombination.taught(student, [teacher])
        assert RunConfig.from_json(taught.to_json()) == taught
        assert taught.train.patience == 3 * student.train.patience, (
            "for as many passes over the training rows"
        )
        report = run(taught, prepared, tmp_path / "run", quiet=True)
        assert report.pool is not None and report.pool.rows == 2 * len(prepared.train)
        assert report.pool.sides == [["site"], ["ad"], ["user"], ["price"], ["tags"]]
        assert "scored by one teacher; made of 5 sides" in report.pool.sentence
        plain = run(student, prepared, tmp_path / "plain", quiet=True)
        assert plain.pool is None
        assert [epoch.step for epoch in plain.history] == [epoch.step for epoch in report.history]
        assert plain.metrics != report.metrics


def _train_table(teacher: Path, data: PreparedData) -> tuple[Path, ...]:
    """Return the teacher's table of the training rows, which is written if it is missing."""
    tables = teacher_tables([teacher], "train")
    if not tables[0].is_dir():
        model = load_artifact(teacher / ARTIFACT).model
        write_logits(tables[0], {Estimator("teacher"): model}, data, "train", CPU)
    return tables


class TestConfig:
    def test_runs_of_before_keep_their_names(self, run_config: RunConfig, prepared: PreparedData) -> None:
        assert "recombined" not in TrainConfig().model_dump(mode="json")
        assert "pool" not in run_config.training_inputs(prepared)

    def test_a_pool_names_the_run(self, run_config: RunConfig, prepared: PreparedData) -> None:
        training = run_config.train.model_copy(update={"recombined": 1})
        taught = replace(run_config, train=training, teachers=(Path("a"),), pool=(Path("b"),))
        inputs = taught.training_inputs(prepared, str)
        assert inputs["pool"] == ["b"] and inputs["train"]["recombined"] == 1

    @pytest.mark.parametrize("changes", [{"teachers": (Path("a"),)}, {"pool": (Path("b"),)}])
    def test_recombined_rows_need_teachers_that_have_scored_them(
        self, run_config: RunConfig, changes: dict[str, Any]
    ) -> None:
        training = run_config.train.model_copy(update={"recombined": 1})
        with pytest.raises(InputError, match="recombined is 1"):
            replace(run_config, train=training, **changes)
