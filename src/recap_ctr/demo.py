"""The whole way on synthetic data, where the best possible score is known: a budgeted fit, or what each part adds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import nn

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.bench.arms import metric_values
from recap_ctr.bench.overview import costs, logistic_regression
from recap_ctr.bench.synthetic import draw, quick_recipe
from recap_ctr.bench.tables import spread
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FileSource
from recap_ctr.data.synthetic import FORMAT, SyntheticConfig
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.evaluation.evaluate import evaluate
from recap_ctr.inference.scorer import Scorer, score
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.progress import brief, say
from recap_ctr.pages.references import lead_text
from recap_ctr.pages.run import page
from recap_ctr.recipe.ablation import ablation_cells, train_cells
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.portfolio import Portfolio
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.recipe.work import Work
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import read_object, write_json
from recap_ctr.training.config import ARTIFACT, LOGITS
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import FitReport, Reference

FINISHED = "demo.json"
MINUTES = 1.7  # The budget of the quick demo's fit; the demo takes two minutes in all.
TRAININGS = ("ema-kd", "plain", "ema", "kd")
MAX_EPOCHS = 12  # More epochs would gain a little, but not fit into five minutes on two cores.
QUICK_HEADER = ["model", "test AUC", "logloss", "excess over Bayes", "the shipped model's lead"]
RECAP, FCN, BASE, BAYES = "RECAP", "FCN", "base rate", "Bayes (best possible)"
HEADER = ["model", "test AUC", "logloss", "calibrated", "excess over Bayes", "parameters", "cost"]
FIGURES = {"auc": (100, 2), "logloss": (1, 4), "calibrated_logloss": (1, 4), "excess_logloss": (1, 5)}
"""The figures of an entry, with the scale and the digits that they are shown with."""
Floats = npt.NDArray[np.floating[Any]]
Entry = dict[str, Any]
"""A model's name, a list of each of FIGURES with one value per run, and its parameters and cost, if it has them."""


def run_demo(
    out: Path, *, rows: int, seed: int, threads: int | None, force: bool, quiet: bool
) -> dict[str, Any]:
    """Draw, prepare, fit within a budget, compare with references and with Bayes, and score ten rows."""
    started, config = time.time(), SyntheticConfig(rows=rows, seed=seed)
    inputs = {"demo": {**asdict(config), "format": FORMAT}, "minutes": MINUTES, "threads": threads}
    if claim(out, inputs, finished=FINISHED, force=force):
        return _read_finished(out, quiet)
    log = out / "clicks.csv"
    drawn, data = draw(config, log, out / "data", quiet=quiet)
    work = Work(
        recipe_config("default", {"seed": seed}, "demo"),
        data,
        out,
        threads=threads,
        budget=MINUTES,
        started=started,
        quiet=quiet,
    )
    work.say(f"data: {rows:,} rows of {config.num_fields} fields, drawn and prepared")
    portfolio = Portfolio(work)
    report = portfolio.run()
    truth = drawn.frame()["bayes_logit"].to_numpy()[data.test.rows]
    table, finding = _compare(report, portfolio.references, data, truth, out)
    page(_beside(report, truth, data), f"recap demo --rows {rows} --seed {seed}").write(out)
    result = {
        "table": table,
        "finding": {"text": finding},
        "scored": _score_ten(log, out),
        "report": report.to_json(),
    }
    write_json(out / FINISHED, result)
    return result


def _read_finished(out: Path, quiet: bool) -> dict[str, Any]:
    if not quiet:
        say(f"{out} is finished; nothing to do")
    return read_object(out / FINISHED, "the record of a demo")


def _compare(
    report: FitReport, references: Mapping[str, Path], data: PreparedData, truth: Floats, out: Path
) -> tuple[list[list[str]], str]:
    """Return the rows under QUICK_HEADER, and what they say."""
    names = {**references, f"shipped: {report.model.name}": out / report.student / LOGITS}
    logits: dict[str, Floats] = {BASE: np.full(len(truth), metrics.logit(float(data.train.labels.mean())))}
    for name, tables in names.items():
        valid, test = (LogitTable(tables / split).logits_NM[:, 0] for split in ("valid", "test"))
        logits[name] = fit_affine(data.valid.labels, valid).apply(test)
    logits[BAYES] = truth
    labels, rows = data.test.labels, []
    excess = {name: metrics.excess_logloss(truth, column) for name, column in logits.items()}
    for name, column in logits.items():
        reference = (report.reference or {}).get(name)
        rows.append(
            [
                name,
                f"{100 * metrics.auc(labels, column):.2f}",
                f"{metrics.logloss(labels, column):.4f}",
                f"{excess[name]:.5f}",
                lead_text(reference["test"]) if reference else "",
            ]
        )
    closed = {name: 1 - excess[name] / excess[BASE] for name in names}
    listed = ", ".join(f"{name} closes {share:.0%}" for name, share in closed.items())
    finding = (
        f"Of the gap in logloss between the base rate and the best possible model, measured against the known click"
        f" probabilities of {len(truth):,} test rows, {listed}."
    )
    return rows, finding


def _beside(report: FitReport, truth: Floats, data: PreparedData) -> FitReport:
    """Return the report with the best possible model among its references."""
    labels = data.test.labels
    best = Reference(auc=metrics.auc(labels, truth), logloss=metrics.logloss(labels, truth))
    references = report.reference or {}
    return report.model_copy(update={"reference": {**references, BAYES: {"test": best}}})


def run_full_demo(
    out: Path, *, rows: int, seed: int, threads: int, force: bool, quiet: bool
) -> dict[str, Any]:
    """Draw, prepare, run the recipe and its ablation, measure and score; each part resumes or is left alone."""
    config, settings = SyntheticConfig(rows=rows, seed=seed), quick_recipe(rows, seed, max_epochs=MAX_EPOCHS)
    inputs = {
        "demo": {**asdict(config), "format": FORMAT},
        "recipe": settings.model_dump(mode="json"),
        "threads": threads,
    }
    if claim(out, inputs, finished=FINISHED, force=force):
        return _read_finished(out, quiet)
    log = out / "clicks.csv"
    drawn, data = draw(config, log, out / "data", quiet=quiet)
    recipe = Recipe(settings, data, out, threads=threads, quiet=quiet)
    recipe.say(f"data: {rows:,} rows of {config.num_fields} fields, drawn and prepared")
    plan, teachers, students, regression = _train(recipe)
    report = recipe.finish(asdict(plan), teachers, students["ema-kd"])
    truth = drawn.frame()["bayes_logit"].to_numpy()[data.test.rows]
    student_of = {training: path for training, runs in students.items() for path in runs}
    table = _table(recipe, truth, list(teachers), student_of, regression)
    _write_page(report, table, f"recap demo --full --rows {rows} --seed {seed}", out)
    result = {
        "table": table,
        "finding": asdict(find(table, len(data.test))),
        "scored": _score_ten(log, out),
        "report": report.to_json(),
    }
    write_json(out / FINISHED, result)
    return result


def _train(recipe: Recipe) -> tuple[Plan, Runs, dict[str, Runs], Path]:
    """Return the plan, the teachers, the students by training, and the logistic regression."""
    with brief():
        # The limit is set here too, because students without an average would train for longer.
        plan = replace(recipe.plan(), max_epochs=MAX_EPOCHS)
        teachers = recipe.train_teachers(plan)
        recipe.say("students: the recursive backbone plain, with EMA, with KD, and with both, which is RECAP")
        cells = ablation_cells(recipe, plan, "recap", TRAININGS, [recipe.config.seed], list(teachers))
        students = train_cells(recipe, cells, title="recap")
        (regression,) = logistic_regression(recipe)
    return plan, teachers, students, regression


def _write_page(report: FitReport, table: Sequence[Entry], command: str, out: Path) -> None:
    """Write the page of the fit, with the best possible model beside it."""
    best = next(entry for entry in table if entry["model"] == BAYES)
    reference = {BAYES: {"test": Reference(auc=best["auc"][0], logloss=best["logloss"][0])}}
    page(report.model_copy(update={"reference": reference}), command).write(out)


def _table(
    recipe: Recipe, truth: Floats, teachers: list[Path], students: Mapping[str, Path], regression: Path
) -> list[Entry]:
    """Return an entry for each model: its figures on the test rows, one of each for every run, its size and cost."""
    data = recipe.data
    loaded = {training: load_artifact(path / ARTIFACT) for training, path in students.items()}
    one_route = {training: artifact.with_setting(routes=1).model for training, artifact in loaded.items()}
    all_routes = {training: artifact.model for training, artifact in loaded.items()}
    members = [load_artifact(path / ARTIFACT) for path in teachers]
    models: list[nn.Module] = [member.model for member in members]
    linear = load_artifact(regression / ARTIFACT)
    cost = costs(teachers, students["ema-kd"], recipe)
    teacher_size = members[0].manifest["parameters"]
    student_size = loaded["ema-kd"].manifest["parameters"]

    def entry(
        name: str, estimators: Sequence[Sequence[nn.Module]], parameters: int, cost: float | None
    ) -> Entry:
        runs = [_figures(estimator, data, truth) for estimator in estimators]
        values = {figure: [run[figure] for run in runs] for figure in FIGURES}
        return {"model": name, **values, "parameters": parameters, "cost": cost}

    base_rate = np.full(len(truth), metrics.logit(float(data.train.labels.mean())))
    return [
        _entry_of_logits(BASE, base_rate, data, truth),
        entry("logistic regression", [[linear.model]], linear.manifest["parameters"], None),
        entry(FCN, [[model] for model in models], teacher_size, cost["one"]),
        entry(f"ensemble of {len(models)} FCN", [models], teacher_size * len(models), cost["ensemble"]),
        entry("recursive backbone", [[one_route["plain"]]], student_size, cost["route"]),
        entry("+ EMA", [[one_route["ema"]]], student_size, cost["route"]),
        entry("+ KD", [[one_route["kd"]]], student_size, cost["route"]),
        entry("+ routes", [[all_routes["plain"]]], student_size, cost["routes"]),
        entry(RECAP, [[all_routes["ema-kd"]]], student_size, cost["routes"]),
        _entry_of_logits(BAYES, truth, data, truth),
    ]


def _figures(estimator: Sequence[nn.Module], data: PreparedData, truth: Floats) -> dict[str, float]:
    """Return the figures of the mean logit of some models, calibrated on the validation rows."""
    valid, test = (
        np.mean([predict(model, shard, torch.device("cpu")) for model in estimator], axis=0)
        for shard in (data.valid, data.test)
    )
    calibration = fit_affine(data.valid.labels, valid)
    return {
        **metric_values(evaluate(data.test.labels, test, calibration)),
        "excess_logloss": metrics.excess_logloss(truth, calibration.apply(test)),
    }


def _entry_of_logits(name: str, logits: Floats, data: PreparedData, truth: Floats) -> Entry:
    """Return the entry of logits that nothing was trained for."""
    return {
        "model": name,
        "auc": [metrics.auc(data.test.labels, logits)],
        "logloss": [metrics.logloss(data.test.labels, logits)],
        "calibrated_logloss": [],
        "excess_logloss": [metrics.excess_logloss(truth, logits)],
        "parameters": None,
        "cost": None,
    }


def cells(entry: Entry) -> list[str]:
    """Return an entry as text, under HEADER: mean ± standard deviation where there are several runs."""
    figures = [spread(entry[figure], digits, scale) for figure, (scale, digits) in FIGURES.items()]
    size = "" if entry["parameters"] is None else f"{entry['parameters']:,}"
    return [entry["model"], *figures, size, "" if entry["cost"] is None else f"{entry['cost']:.1f}"]


@dataclass(frozen=True)
class Finding:
    """What the table says of RECAP, favourable or not."""

    ensemble_gain: float
    """What the ensemble gains in AUC over the mean of single FCNs."""
    recap_gain: float
    """What RECAP gains over them."""
    recovered: float | None
    """RECAP's share of the ensemble's gain; None if the ensemble gains nothing."""
    size: float
    """Stored parameters relative to one FCN's."""
    cost: float
    """Time to score relative to one FCN's."""
    closed: float
    """RECAP's share of the gap in expected logloss between the base rate and Bayes."""
    text: str


def find(table: Sequence[Entry], rows: int) -> Finding:
    """Return what the table of `rows` test rows says of RECAP."""
    entries = {entry["model"]: entry for entry in table}
    alone, recap = entries[FCN], entries[RECAP]
    (together,) = (entry for name, entry in entries.items() if name.startswith("ensemble"))
    ensemble_gain, recap_gain = (mean(entry["auc"]) - mean(alone["auc"]) for entry in (together, recap))
    recovered = recap_gain / ensemble_gain if ensemble_gain > 0 else None
    size, cost = recap["parameters"] / alone["parameters"], recap["cost"]
    closed = 1 - recap["excess_logloss"][0] / entries[BASE]["excess_logloss"][0]
    share = "" if recovered is None else f", {recovered:.0%} of that,"
    text = (
        f"In test AUC the {together['model']} gains {100 * ensemble_gain:+.2f} points over one of them on average,"
        f" RECAP {100 * recap_gain:+.2f}{share} at {size:.2f} of one FCN's size and {cost:.1f} of its cost;"
        f" RECAP closes {closed:.0%} of the gap in logloss between the base rate and the best possible model,"
        f" measured against the known click probabilities of {rows:,} test rows."
    )
    return Finding(ensemble_gain, recap_gain, recovered, size, cost, closed, text)


def _score_ten(log: Path, out: Path) -> dict[str, Any]:
    """Score ten raw rows the way a user would: text in, text with two more columns out."""
    rows, scores = out / "ten.csv", out / "ten-scored.csv"
    with open_sink(rows) as sink:
        sink.write(pl.read_csv(log, n_rows=10, infer_schema=False))
    scorer = Scorer.load(out / ARTIFACT)
    with open_sink(scores) as sink:
        score(scorer, FileSource([rows]), sink, quiet=True)
    frame = pl.read_csv(scores, infer_schema=False)
    short = frame.with_columns(pl.col("score", "logit").cast(pl.Float64).round(4).cast(pl.String))
    return {"columns": short.columns, "rows": [list(row) for row in short.rows()]}
