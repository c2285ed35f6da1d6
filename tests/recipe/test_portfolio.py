"""The fit by portfolio: what races, who teaches, what ships, and that it can be interrupted anywhere."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData
from recap_ctr.inference.manifest import read_artifact_manifest
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.executor import InThisProcess, Job
from recap_ctr.models.rates import RatesConfig
from recap_ctr.recipe import race
from recap_ctr.recipe.choice import Choice
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.entrants import Standing, train_slice
from recap_ctr.recipe.portfolio import Portfolio
from recap_ctr.recipe.refit import LastStage
from recap_ctr.recipe.work import Work
from recap_ctr.training import pool, trees
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import FitReport, read_report
from tests.support.tiny_recipe import TINY

SMALL: dict[str, Any] = {
    "model_settings": TINY["model_settings"],
    "teacher_settings": TINY["teacher_settings"],
    "portfolio": ["fm"],
    "train": {"batch_size": 256, "max_epochs": 3},
}

pytestmark = pytest.mark.slow


def portfolio(
    data: PreparedData, out: Path, *, budget: float | None = None, executor: Any = None, **changes: Any
) -> Portfolio:
    config = recipe_config("default", {**SMALL, **changes}, "test")
    executor = executor or InThisProcess()
    return Portfolio(Work(config, data, out, threads=1, executor=executor, budget=budget, quiet=True))


@pytest.fixture(scope="module")
def done(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitReport]:
    out = tmp_path_factory.mktemp("portfolio") / "fit"
    return out, portfolio(prepared, out).run()


class TestWithoutABudget:
    def test_strengths_and_kinds_raced(self, done: tuple[Path, FitReport], prepared: PreparedData) -> None:
        names = [arm.name for arm in done[1].arms]
        rows = len(prepared.train)
        for strength in (1e2, 1e3, 1e4):
            assert f"fcn l2={strength / rows:.3g}" in names
        assert sum(name.startswith("fm ") for name in names) >= 1
        assert sum("rate=" in name for name in names) == 1
        assert [arm.auc for arm in done[1].arms] == sorted((arm.auc for arm in done[1].arms), reverse=True)

    def test_nothing_that_was_trained_is_better_on_validation(
        self, done: tuple[Path, FitReport], prepared: PreparedData
    ) -> None:
        """Up to what the two halves of the validation rows do not agree on."""
        _, report = done
        shipped = report.metrics.valid.raw.auc
        assert report.chosen_because is not None
        others = [teacher.metrics.valid.raw.auc for teacher in report.teacher_runs.values()]
        if max(others) > shipped:
            assert "does not confirm" in report.chosen_because

    def test_the_student_learns_from_the_mean_that_validation_chose(
        self, done: tuple[Path, FitReport]
    ) -> None:
        out, report = done
        taken = [step.member for step in report.teaching if step.taken]
        assert taken and report.ensembles[0].teachers == len(taken)
        assert {arm.name for arm in report.arms if arm.weight} <= set(taken)
        students = [read_report(path) for path in out.iterdir() if path.name.startswith("student-recap")]
        taught = [student for student in students if student.teachers]
        assert len(taught) == 2 and {len(student.teachers) for student in taught} == {len(taken)}
        assert len(students) == 3, "and one that learns beside click rates, from labels alone"

    def test_members_stand_next_to_their_tables(
        self, done: tuple[Path, FitReport], prepared: PreparedData
    ) -> None:
        out, report = done
        for path in report.teacher_runs:
            table = LogitTable(out / path / "logits" / "train")
            table.check(prepared)

    def test_other_slices_change_the_report_and_train_nothing(
        self, done: tuple[Path, FitReport], prepared: PreparedData, tmp_path: Path
    ) -> None:
        out = Path(shutil.copytree(done[0], tmp_path / "fit"))
        before = {path: path.stat().st_mtime_ns for path in out.glob("*/state.safetensors")}
        report = portfolio(prepared, out, slices=["user"]).run()
        assert report.breakdown is not None and [entry.field for entry in report.breakdown.fields] == ["user"]
        assert report.metrics == done[1].metrics and report.arms == done[1].arms
        assert report.student == done[1].student
        after = {path: path.stat().st_mtime_ns for path in out.glob("*/state.safetensors")}
        assert after == before and len(after) > 3

    def test_again_it_is_up_to_date(self, done: tuple[Path, FitReport], prepared: PreparedData) -> None:
        out, report = done
        files = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
        marked = out / "artifact" / "graphs"  # Such as an export adds.
        marked.mkdir()
        again = portfolio(prepared, out).run()
        assert again.model_copy(update={"date": report.date}) == report
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == files
        assert marked.is_dir()
        marked.rmdir()

    def test_a_set_strength_is_the_only_one(self, prepared: PreparedData, tmp_path: Path) -> None:
        report = portfolio(prepared, tmp_path / "fit", l2=0.01, portfolio=[]).run()
        assert {arm.name.partition(" rate")[0] for arm in report.arms} == {"fcn l2=0.01"}


class TestRecombinedRows:
    """Trees are left out here: in the fit above they may teach alone, and they can't score rows."""

    ONE_STRENGTH: ClassVar[dict[str, Any]] = {"l2": 0.01, "learning_rate": 0.002, "portfolio": []}

    @pytest.fixture(autouse=True)
    def without_trees(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trees, "is_installed", lambda: False)

    def test_taught_students_learn_from_those_that_networks_have_scored(
        self, prepared: PreparedData, tmp_path: Path
    ) -> None:
        out = tmp_path / "fit"
        report = portfolio(prepared, out, **self.ONE_STRENGTH).run()
        students = [read_report(path) for path in out.glob("student-recap-*")]
        taught = [student for student in students if student.teachers]
        assert taught and not report.plan["given_up"]
        for student in taught:
            assert student.pool is not None and student.train.recombined == 3
            assert student.pool.rows == 3 * len(prepared.train)
            assert student.pool.teachers == len(set(student.teachers))
        assert all(student.pool is None for student in students if not student.teachers)

        files = {path: path.stat().st_mtime_ns for path in out.rglob("*.npy")}
        again = portfolio(prepared, out, **self.ONE_STRENGTH).run()
        assert again.model_copy(update={"date": report.date}) == report
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*.npy")} == files

    def test_they_are_left_out_where_all_fields_belong_together(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool, "sides_of", lambda train, layout: (("site", "ad"),))
        report = portfolio(prepared, tmp_path / "fit", refit=False, **self.ONE_STRENGTH).run()
        students = [read_report(path) for path in (tmp_path / "fit").glob("student-recap-*")]
        assert students and all(student.pool is None for student in students)
        assert any("all fields belong together" in what for what in report.plan["given_up"])


class TestBudget:
    def test_training_ends_with_it_and_that_is_said(self, prepared: PreparedData, tmp_path: Path) -> None:
        """How well it is kept is measured by benchmarks/fits/budgets.py."""
        endless = {"batch_size": 256, "max_epochs": 100_000, "patience": 100_000}
        report = portfolio(prepared, tmp_path / "fit", budget=0.2, train=endless).run()
        assert report.plan["budget"] == 0.2 and report.plan["taken"] > 0
        assert not any(arm.finished for arm in report.arms)
        assert Scorer.load(tmp_path / "fit" / "artifact")

    def test_time_that_early_stops_leave_goes_to_other_models_and_other_seeds(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            race, "LOOK_EPOCHS", (1e6, 1e6)
        )  # In the planned rounds nothing has time for a look.
        short = {"batch_size": 256, "max_epochs": 1}
        report = portfolio(prepared, tmp_path / "fit", budget=2.0, train=short).run()
        names = [arm.name for arm in report.arms]
        strengths = len(race.STRENGTHS) + 1  # One of them for the other model of the portfolio.
        assert len(names) > strengths and not any("a look at" in what for what in report.plan["given_up"])
        monkeypatch.setattr(race, "MAX_FURTHER", 8)
        report = portfolio(prepared, tmp_path / "longer", budget=2.0, train=short).run()
        repeated = [arm.name.removesuffix(" run 2") for arm in report.arms if arm.name.endswith(" run 2")]
        assert repeated and set(repeated) <= set(names)
        best = next(arm.name for arm in report.arms if " run " not in arm.name)
        assert best in repeated, "the best one has another seed first"

    def test_time_that_students_leave_goes_to_models_that_may_ship(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They come too late to teach, and a second call finds the same teachers, students and choice."""

        def spare(self: race.Race) -> float:
            return 0.0 if self.after_students is None else 30.0

        monkeypatch.setattr(race.Race, "_time_to_spare", spare)
        monkeypatch.setattr(race.Race, "_affordable", lambda _: 0)
        out = tmp_path / "fit"
        report = portfolio(prepared, out, budget=5.0).run()
        journal = json.loads(next(out.glob("race-*/journal.json")).read_text())
        late = journal["standings"].keys() - set(journal["candidates"])
        assert late and len(journal["further"]) == race.MAX_FURTHER
        assert not late & {step.member for step in report.teaching}
        assert late <= {arm.name for arm in report.arms}
        late_runs = {path for path in report.teacher_runs if not path.startswith("lightgbm")}
        assert len(late_runs) >= 2, "the best of them was packed, and may ship"
        again = portfolio(prepared, out, budget=5.0).run()
        assert again.model_copy(update={"date": report.date}) == report

    def test_a_close_run_ships_if_the_chosen_one_has_no_time_for_all_rows(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "fit"

        def choose(data: PreparedData, students: Runs, others: Runs) -> Choice:
            return Choice(next(iter(students)), None)

        def share(stage: LastStage, run: Path) -> float:
            return 0.0 if run.name.startswith("student") else 1.0

        monkeypatch.setattr("recap_ctr.recipe.portfolio.choose_shipped", choose)
        monkeypatch.setattr("recap_ctr.recipe.portfolio.prefer_simple", lambda choice, *_: choice)
        for module in ("portfolio", "students"):
            monkeypatch.setattr(f"recap_ctr.recipe.{module}.WORTH_OF_ROWS", 1.0)
        monkeypatch.setattr(LastStage, "share_in_time", share)
        report = portfolio(prepared, out, budget=2.0).run()
        assert report.student is not None and not report.student.startswith("student")
        assert report.refit is not None
        assert (
            report.chosen_because is not None
            and "learn from all rows, which is worth more" in report.chosen_because
        )
        again = portfolio(prepared, out, budget=2.0).run()
        assert again.student == report.student and again.chosen_because == report.chosen_because

    def test_what_counts_with_a_network_can_ship_and_learn_from_all_rows(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        simpler_than: list[list[str]] = []

        def choose(data: PreparedData, students: Runs, others: Runs) -> Choice:
            return Choice(next(path for path in others if path.name.startswith("blend-with-")), None)

        def prefer(choice: Choice, simpler: list[Path], data: PreparedData) -> Choice:
            simpler_than.append([path.name.partition("-")[0] for path in simpler])
            return choice

        monkeypatch.setattr("recap_ctr.recipe.portfolio.choose_shipped", choose)
        monkeypatch.setattr("recap_ctr.recipe.portfolio.prefer_simple", prefer)
        report = portfolio(prepared, tmp_path / "fit").run()
        assert report.model.name == "blend" and report.beside is not None
        assert report.beside.factors.keys() <= {"regression", "rates", "trees", "network"}
        assert simpler_than[-1][:2] == ["lr", "blend"] and simpler_than[-1][2] in ("fcn", "fm")
        assert report.refit is not None
        assert report.refit.rows == sum(map(len, (prepared.train, prepared.valid, prepared.test)))
        manifest = read_artifact_manifest(tmp_path / "fit" / "artifact")
        network = manifest["model"]["config"]["network"]
        assert ("network" in report.beside.factors) == (network is not None)

    def test_without_time_the_best_of_the_counting_models_ships(
        self, prepared: PreparedData, tmp_path: Path
    ) -> None:
        report = portfolio(prepared, tmp_path / "fit", budget=0.001).run()
        assert report.model.name in ("lr", "rates", "boosted", "blend") and not report.arms
        assert any("the race" in text for text in report.plan["given_up"])
        assert "the student" in report.plan["given_up"]
        assert report.reference is not None and report.reference.keys() == {"logistic regression", "LightGBM"}
        assert all(split.cut for by_split in report.reference.values() for split in by_split.values())

    @pytest.mark.parametrize(("budget", "heads"), [(None, 4), (10.0, 4), (1.0, 1)])
    def test_click_rates_have_several_heads_where_there_is_time(
        self, budget: float | None, heads: int, prepared: PreparedData, tmp_path: Path
    ) -> None:
        fit = portfolio(prepared, tmp_path / "fit", budget=budget)
        fit.journal.epoch_seconds = 8.0
        rates = next(config for config in fit._counted_configs() if config.model == "rates")
        assert isinstance(rates.model_config, RatesConfig) and rates.model_config.heads == heads

    def test_without_a_race_the_first_student_does_not_wait_for_references(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(race, "RACE_EPOCHS", 1e9)
        executor = Recording()
        report = portfolio(prepared, tmp_path / "fit", budget=1.0, executor=executor).run()
        timing, references = executor.names[:2]
        assert [name.startswith("timing") for name in timing] == [True, True]
        assert references[0] in report.students and references[1].startswith("lr")
        assert not report.arms and report.plan["given_up"][0].startswith("the race")


class Recording:
    """An executor that says it does two jobs at a time, does one, and keeps the names of all."""

    workers = 2

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        self.names.append([job.name for job in jobs])
        return InThisProcess().run(jobs, **arguments)


class Interrupting(InThisProcess):
    """An executor that is interrupted before the job whose name begins with some text, after those before it."""

    text = ""

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        named: list[Job] = list(jobs)
        for at, job in enumerate(named):
            if self.text and job.name.startswith(self.text):
                type(self).text = ""
                super().run(named[:at], **arguments)
                raise KeyboardInterrupt
        return super().run(named, **arguments)


def test_interrupted_anywhere_it_ships_the_best_so_far_and_goes_on_to_the_same_end(
    done: tuple[Path, FitReport], prepared: PreparedData, tmp_path: Path
) -> None:
    """One fit is interrupted in each of its stages, one after the other."""
    out, executor = tmp_path / "fit", Interrupting()
    for before in ("LightGBM", "fcn", "fm", "student-recap"):
        Interrupting.text = before
        with pytest.raises(KeyboardInterrupt):
            portfolio(prepared, out, executor=executor).run()
        assert not Interrupting.text, "the interrupt came where it was wanted"
        assert Scorer.load(out / "artifact")
        assert isinstance(read_report(out), FitReport)
        assert read_report(out).to_json()["interrupted"] is True
    finished = portfolio(prepared, out, executor=executor).run()
    assert finished.metrics == done[1].metrics and "interrupted" not in finished.to_json()
    assert [arm.auc for arm in finished.arms] == [arm.auc for arm in done[1].arms]


class InterruptedStudents(InThisProcess):
    """An executor that is interrupted when its first students have trained for an epoch."""

    is_over = False

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        named: list[Job] = list(jobs)
        if not self.is_over and any(job.name.startswith("student-recap") for job in named):
            self.is_over = True
            for job in named:
                values = job.arguments
                train_slice(values["data"], values["config"], values["out"], until=1, seconds=None)
            raise KeyboardInterrupt
        return super().run(named, **arguments)


def test_interrupted_while_students_train_they_count_and_go_on_to_the_same_end(
    done: tuple[Path, FitReport], prepared: PreparedData, tmp_path: Path
) -> None:
    out, executor = tmp_path / "fit", InterruptedStudents()
    with pytest.raises(KeyboardInterrupt):
        portfolio(prepared, out, executor=executor).run()
    so_far = read_report(out)
    assert isinstance(so_far, FitReport) and len(so_far.students) == 3
    finished = portfolio(prepared, out, executor=executor).run()
    assert finished.metrics == done[1].metrics
    assert finished.students == done[1].students


def test_interrupted_within_a_budget_the_race_is_not_lost(prepared: PreparedData, tmp_path: Path) -> None:
    out, executor = tmp_path / "fit", Interrupting()
    Interrupting.text = "student-recap"
    with pytest.raises(KeyboardInterrupt):
        portfolio(prepared, out, executor=executor, budget=3.0).run()
    so_far = read_report(out)
    report = portfolio(prepared, out, executor=executor, budget=3.0).run()
    assert isinstance(so_far, FitReport) and [arm.name for arm in report.arms] == [
        arm.name for arm in so_far.arms
    ]
    assert report.arms and report.plan["taken"] > so_far.seconds.train
    again = portfolio(prepared, out, executor=executor, budget=3.0).run()
    assert again.students == report.students and again.plan == report.plan


def test_a_taught_student_has_to_be_clearly_ahead_of_its_best_teacher(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learns from all rows is held back by teachers that have not learnt from them."""
    simpler_than: list[list[str]] = []

    def choose(data: PreparedData, students: Runs, others: Runs) -> Choice:
        return Choice(next(path for path, run in students.items() if run.teachers), None)

    def prefer(choice: Choice, simpler: list[Path], data: PreparedData) -> Choice:
        simpler_than.append([path.name.partition("-")[0] for path in simpler])
        return choice

    monkeypatch.setattr("recap_ctr.recipe.portfolio.choose_shipped", choose)
    monkeypatch.setattr("recap_ctr.recipe.portfolio.prefer_simple", prefer)
    portfolio(prepared, tmp_path / "fit").run()
    assert simpler_than[-1][:2] == ["lr", "blend"] and simpler_than[-1][2] in ("fcn", "fm")
    portfolio(prepared, tmp_path / "fit", refit=False).run()
    assert simpler_than[-1] == ["lr", "blend"], "without the last stage, what was measured ships"


def test_a_slow_starter_stays_in_the_race_if_there_is_time() -> None:
    fast = Standing([0.70, 0.71, 0.712, 0.713], [0.6] * 4, 4, 1.0, finished=False)
    slow = Standing([0.60, 0.65, 0.68, 0.70], [0.6] * 4, 4, 1.0, finished=False)
    assert slow.auc < fast.auc
    assert slow.outlook(4) < fast.outlook(4)
    assert slow.outlook(16) > fast.outlook(16)
    assert slow.outlook(8) == pytest.approx(0.70 + 0.6 * (0.70 - 0.65))
    assert slow.outlook(16) == pytest.approx(0.70 + (0.6 + 0.36) * (0.70 - 0.65))
    assert Standing(slow.aucs, slow.loglosses, 4, 1.0, finished=True).outlook(16) == slow.auc
