"""The whole way on a small scale: everything that `recap demo` promises is there, and a second call leaves it alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recap_ctr import demo
from recap_ctr.bench.synthetic import quick_recipe
from recap_ctr.data.shards import PreparedData
from recap_ctr.demo import (
    BASE,
    BAYES,
    FCN,
    HEADER,
    QUICK_HEADER,
    RECAP,
    cells,
    find,
    run_demo,
    run_full_demo,
)
from recap_ctr.evaluation.evaluate import Metrics
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.probe import ProbeConfig
from recap_ctr.recipe.stages import Recipe
from recap_ctr.storage.files import read_json
from recap_ctr.training.report import FitReport, RunReport, parse_report, read_report
from recap_ctr.training.routes import MAX_ROUTES
from tests.conftest import Recap, contents, in_process

pytestmark = pytest.mark.slow

DEMO = ("demo", "--full", "--rows", 5_000, "--threads", 1, "--json", "--out")
ENSEMBLE = "ensemble of 2 FCN"
NAMES = [
    BASE,
    "logistic regression",
    FCN,
    ENSEMBLE,
    "recursive backbone",
    "+ EMA",
    "+ KD",
    "+ routes",
    RECAP,
    BAYES,
]


def tiny_recipe(rows: int, seed: int, *, max_epochs: int) -> RecipeConfig:
    """As many stages as the real one, and as little work in each as can be."""
    return quick_recipe(rows, seed, max_epochs=max_epochs).model_copy(
        update={
            "teachers": 2,
            "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
            "model_settings": {"dim": 4},
            "train": {"batch_size": 256, "max_epochs": 2, "ema_epochs": [1.0]},
            "learning_rate": 0.02,
            "probe": ProbeConfig(strengths=(1e2,), rungs=(1,), refinements=(), dropouts=(), confirm=0),
        }
    )


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Run jobs in this process, with the tiny recipe."""
    with in_process() as patch:
        patch.setattr(demo, "quick_recipe", tiny_recipe)
        patch.setattr(demo, "MAX_EPOCHS", 2)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that was interrupted when all was trained, just before its artifact was written, and then resumed."""
    out = tmp_path_factory.mktemp("demo") / "out"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_full_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True)
    assert not (out / "artifact").exists()
    before = contents(out)
    assert sum(name.endswith("/report.json") for name in before) == 2 + 4 + 1
    run_full_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True)
    after = contents(out)
    assert {name: after[name] for name in before} == before
    return out


@pytest.fixture(scope="module")
def result(made: Path) -> dict[str, Any]:
    values: dict[str, Any] = read_json(made / "demo.json")
    return values


def reports(made: Path, pattern: str) -> list[RunReport]:
    return [read_report(path.parent) for path in sorted(made.glob(f"{pattern}/report.json"))]


def test_the_table_has_every_entry_and_its_figures(made: Path, result: dict[str, Any]) -> None:
    table = {entry["model"]: entry for entry in result["table"]}

    assert list(table) == NAMES
    runs = {name: len(entry["auc"]) for name, entry in table.items()}
    assert runs == dict.fromkeys(NAMES, 1) | {FCN: 2}
    # 500 test rows: Bayes' AUC is 0.8 by construction, its standard error here 0.025.
    assert table[BAYES]["auc"] == [pytest.approx(0.8, abs=0.1)]
    assert table[BASE]["auc"] == [0.5]
    assert table[BAYES]["excess_logloss"] == [0.0]
    assert all(value > 0 for name in NAMES[:-1] for value in table[name]["excess_logloss"])
    assert table[ENSEMBLE]["parameters"] == 2 * table[FCN]["parameters"]
    assert table[FCN]["cost"] == 1.0
    shown = (made / "report.html").read_text(encoding="utf-8")
    assert f"<td>{BAYES}</td><td></td><td>{100 * table[BAYES]['auc'][0]:.3f}</td>" in shown
    assert table[ENSEMBLE]["cost"] == pytest.approx(2.0, abs=1.0)
    for name in ("recursive backbone", "+ EMA", "+ KD"):
        assert 0 < table[name]["cost"] < table[RECAP]["cost"] == table["+ routes"]["cost"]


def test_the_figures_are_those_of_the_runs_own_reports(made: Path, result: dict[str, Any]) -> None:
    table = {entry["model"]: entry for entry in result["table"]}
    teachers = reports(made, "teachers-*/teacher-*")
    fit = parse_report(result["report"])
    assert isinstance(fit, FitReport)

    def check(name: str, *metrics: Metrics) -> None:
        figures = [measured.on("test") for measured in metrics]
        entry = table[name]
        assert entry["auc"] == pytest.approx([run.raw.auc for run in figures], abs=1e-6)
        assert entry["logloss"] == pytest.approx([run.raw.logloss for run in figures], abs=1e-6)
        assert entry["calibrated_logloss"] == pytest.approx(
            [run.calibrated.logloss for run in figures], abs=1e-6
        )

    check("logistic regression", *(report.metrics for report in reports(made, "lr-*")))
    check(FCN, *(report.metrics for report in teachers))
    check(ENSEMBLE, fit.ensembles[-1].metrics)
    students = [
        ("recursive backbone", "plain", "1"),
        ("+ EMA", "ema", "1"),
        ("+ KD", "kd", "1"),
        ("+ routes", "plain", "8"),
        (RECAP, "ema-kd", "8"),
    ]
    for name, training, routes in students:
        (report,) = reports(made, f"recap-{training}-" + "[0-9a-f]" * 10 + "/seed-1")
        assert report.parameters == table[name]["parameters"]
        check(name, report.metrics_by_routes[routes])


def test_the_artifact_is_recap(made: Path, result: dict[str, Any], recap: Recap) -> None:
    artifact = load_artifact(made / "artifact")
    recap_entry = next(entry for entry in result["table"] if entry["model"] == RECAP)

    assert (artifact.name, len(artifact.routes)) == ("recap", 8)
    assert artifact.manifest["parameters"] == recap_entry["parameters"]
    assert artifact.manifest["metrics"]["test"]["raw"]["auc"] == pytest.approx(
        recap_entry["auc"][0], abs=1e-6
    )
    assert pl.read_csv(made / "clicks.csv").height == 5_000
    assert len(PreparedData(made / "data").train) == 4_000
    done = recap("predict", made / "artifact", made / "ten.csv", "-q")
    assert done.out == (made / "ten-scored.csv").read_text()
    assert len(done.out.splitlines()) == 11


def test_a_finished_demo_is_left_alone(recap: Recap, made: Path) -> None:
    before = contents(made)
    again = recap(*DEMO, made)
    assert again.code == 0
    assert "nothing to do" in again.err
    assert json.loads(again.out) == read_json(made / "demo.json")
    assert contents(made) == before


def test_other_inputs_need_force(recap: Recap, made: Path) -> None:
    before = contents(made)
    done = recap(*DEMO, made, "--seed", 2)
    assert done.code == 2
    assert "--force" in json.loads(done.out)["error"]["fix"]
    assert contents(made) == before


def test_the_table_reads_well_without_json(recap: Recap, made: Path, result: dict[str, Any]) -> None:
    done = recap(*[part for part in DEMO if part != "--json"], made, "-q")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0].split("  ")[0] == HEADER[0]
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(NAMES)]] == NAMES
    assert any(line.startswith("row  click  f1") for line in lines)
    assert lines[-1] == result["finding"]["text"]


# The sentence, whichever way it turns out.


def entry_of(
    name: str, *auc: float, excess: float = 0.02, parameters: int = 100, cost: float = 1.0
) -> dict[str, Any]:
    return {
        "model": name,
        "auc": list(auc),
        "logloss": [0.4] * len(auc),
        "calibrated_logloss": [],
        "excess_logloss": [excess],
        "parameters": parameters,
        "cost": cost,
    }


def a_table(together: float, recap: float) -> list[dict[str, Any]]:
    return [
        entry_of(BASE, 0.5, excess=0.1),
        entry_of(FCN, 0.75, 0.77),
        entry_of(ENSEMBLE, together),
        entry_of(RECAP, recap, excess=0.025, parameters=98, cost=1.8),
    ]


@pytest.mark.parametrize(
    ("together", "recap", "recovered", "sentence"),
    [
        (
            0.764,
            0.763,
            0.75,
            "gains +0.40 points over one of them on average, RECAP +0.30, 75% of that, at 0.98",
        ),
        (0.764, 0.758, -0.5, "RECAP -0.20, -50% of that, at 0.98"),
        (0.758, 0.763, None, "gains -0.20 points over one of them on average, RECAP +0.30 at 0.98"),
    ],
)
def test_the_finding_says_what_the_table_shows(
    together: float, recap: float, recovered: float | None, sentence: str
) -> None:
    finding = find(a_table(together, recap), 15_000)

    assert finding.recovered == (None if recovered is None else pytest.approx(recovered))
    assert (finding.size, finding.cost, finding.closed) == (0.98, 1.8, 0.75)
    assert sentence in finding.text
    assert "1.8 of its cost; RECAP closes 75% of the gap" in finding.text


def test_cells() -> None:
    assert cells(entry_of(FCN, 0.75, 0.77)) == [
        FCN,
        "76.00 ± 1.41",
        "0.4000 ± 0.0000",
        "",
        "0.02000",
        "100",
        "1.0",
    ]
    assert len(HEADER) == len(cells(entry_of(BASE, 0.5)))


def test_the_real_recipe_is_that_of_fit_but_shorter() -> None:
    """Five teachers, eight routes and a probe; fewer epochs than by default."""
    config, default = quick_recipe(150_000, 3, max_epochs=demo.MAX_EPOCHS), RecipeConfig()

    assert (config.model, config.teacher_model, config.seed) == ("recap", "fcn", 3)
    assert (config.teachers, config.routes, config.l2) == (default.teachers, MAX_ROUTES, None)
    assert max(config.probe.rungs) < max(default.probe.rungs)
    assert 1 < len(config.probe.strengths) < len(default.probe.strengths)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("quick") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "MINUTES", 0.15)
        return out, run_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True)


class TestQuick:
    """The demo of two minutes, here with seconds to spend."""

    def test_the_table_ends_with_the_best_possible_model(self, quick: tuple[Path, dict[str, Any]]) -> None:
        out, result = quick
        names = [row[0] for row in result["table"]]
        assert names[0] == BASE and names[1] == "logistic regression" and names[-1] == BAYES
        assert names[-2] == f"shipped: {result['report']['model']['name']}"
        assert all(len(row) == len(QUICK_HEADER) for row in result["table"])
        assert float(result["table"][-1][3]) == 0.0
        assert min(float(row[2]) for row in result["table"]) == float(result["table"][-1][2])
        report = read_report(out)
        assert f"{100 * report.metrics.on('test').raw.auc:.2f}" == result["table"][-2][1]

    def test_ten_rows_are_scored_and_the_page_shows_bayes(self, quick: tuple[Path, dict[str, Any]]) -> None:
        out, result = quick
        assert len(result["scored"]["rows"]) == 10
        assert BAYES in (out / "report.html").read_text()

    def test_finished_it_is_left_alone(self, quick: tuple[Path, dict[str, Any]]) -> None:
        out, result = quick
        before = contents(out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "MINUTES", 0.15)
            assert run_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True) == result
        assert contents(out) == before

    def test_the_sentence_says_what_each_model_closes(self, quick: tuple[Path, dict[str, Any]]) -> None:
        text = quick[1]["finding"]["text"]
        assert "logistic regression closes" in text and "shipped: " in text
