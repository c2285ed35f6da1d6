"""The whole way on synthetic data, where the best possible score is known: the recipe, and what each part adds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import nn

from recap_ctr.axes.predict import predict
from recap_ctr.bench.overview import costs, logistic_regression
from recap_ctr.bench.scaling import cells_of, train_cells
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
from recap_ctr.pages.run import page
from recap_ctr.recipe.stages import Recipe
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import read_json, write_json
from recap_ctr.training.report import Reference
from recap_ctr.training.run import ARTIFACT

FINISHED = "demo.json"
TRAININGS = ("ema-kd", "plain", "ema", "kd")
MAX_EPOCHS = 12  # of a run: more would gain a little, but no longer fit into five minutes on two cores
RECAP, FCN, BASE, BAYES = "RECAP", "FCN", "base rate", "Bayes (best possible)"
HEADER = ["model", "test AUC", "logloss", "calibrated", "excess over Bayes", "parameters", "cost"]
FIGURES = {"auc": (100, 2), "logloss": (1, 4), "calibrated_logloss": (1, 4), "excess_logloss": (1, 5)}
"""With the scale and the digits that they are shown with."""
Floats = npt.NDArray[np.floating[Any]]


def run_demo(out: Path, *, rows: int, seed: int, threads: int, force: bool, quiet: bool) -> dict[str, Any]:
    """Draw, prepare, run the recipe and its ablation, measure and score; each part resumes or is left alone."""
    config, settings = SyntheticConfig(rows=rows, seed=seed), quick_recipe(rows, seed, max_epochs=MAX_EPOCHS)
    inputs = {
        "demo": {**asdict(config), "format": FORMAT},
        "recipe": settings.model_dump(mode="json"),
        "threads": threads,
    }
    if claim(out, inputs, finished=FINISHED, force=force):
        if not quiet:
            say(f"{out} is finished; nothing to do")
        known: dict[str, Any] = read_json(out / FINISHED)
        return known
    log = out / "clicks.csv"
    drawn, data = draw(config, log, out / "data", quiet=quiet)
    recipe = Recipe(settings, data, out, threads=threads, quiet=quiet)
    recipe.say(f"data: {rows:,} rows of {config.num_fields} fields, drawn and prepared")
    with brief():
        plan = replace(recipe.plan(), max_epochs=MAX_EPOCHS)  # for the students without an average too
        teachers = recipe.teachers(plan)
        recipe.say("students: the recursive backbone plain, with EMA, with KD, and with both, which is RECAP")
        wanted = cells_of(recipe, plan, "recap", TRAININGS, [seed], list(teachers))
        students = train_cells(recipe, wanted, title="recap")
        (regression,) = logistic_regression(recipe)
    report = recipe.finish(plan, teachers, students["ema-kd"])
    truth = drawn.frame()["bayes_logit"].to_numpy()[data.test.rows]
    own = {training: path for training, runs in students.items() for path in runs}
    table = _table(recipe, truth, list(teachers), own, regression)
    best = next(line for line in table if line["model"] == BAYES)
    reference = {BAYES: {"test": Reference(auc=best["auc"][0], logloss=best["logloss"][0])}}
    shown = report.model_copy(update={"reference": reference})
    page(shown, f"recap demo --rows {rows} --seed {seed}").write(out)
    result = {
        "table": table,
        "finding": asdict(find(table, len(data.test))),
        "scored": _score_ten(log, out),
        "report": report.to_json(),
    }
    write_json(out / FINISHED, result)
    return result


def _table(
    recipe: Recipe, truth: Floats, teachers: list[Path], students: dict[str, Path], regression: Path
) -> list[dict[str, Any]]:
    """A line for each model: its figures on the test rows, one of each for every run, its size and its cost."""
    data = recipe.data
    loaded = {training: load_artifact(path / ARTIFACT) for training, path in students.items()}
    one_route = {training: artifact.with_setting(routes=1).model for training, artifact in loaded.items()}
    members = [load_artifact(path / ARTIFACT) for path in teachers]
    linear = load_artifact(regression / ARTIFACT)
    cost = costs(teachers, students["ema-kd"], recipe)
    models: list[nn.Module] = [member.model for member in members]
    size, own_size = members[0].manifest["parameters"], loaded["ema-kd"].manifest["parameters"]
    all_routes = {training: artifact.model for training, artifact in loaded.items()}

    def line(
        name: str, estimators: Sequence[Sequence[nn.Module]], parameters: int, cost: float | None
    ) -> dict[str, Any]:
        found = [_figures(estimator, data, truth) for estimator in estimators]
        values = {figure: [one[figure] for one in found] for figure in FIGURES}
        return {"model": name, **values, "parameters": parameters, "cost": cost}

    return [
        _known(BASE, np.full(len(truth), metrics.logit(float(data.train.labels.mean()))), data, truth),
        line("logistic regression", [[linear.model]], linear.manifest["parameters"], None),
        line(FCN, [[model] for model in models], size, cost["one"]),
        line(f"ensemble of {len(models)} FCN", [models], size * len(models), cost["ensemble"]),
        line("recursive backbone", [[one_route["plain"]]], own_size, cost["route"]),
        line("+ EMA", [[one_route["ema"]]], own_size, cost["route"]),
        line("+ KD", [[one_route["kd"]]], own_size, cost["route"]),
        line("+ routes", [[all_routes["plain"]]], own_size, cost["routes"]),
        line(RECAP, [[all_routes["ema-kd"]]], own_size, cost["routes"]),
        _known(BAYES, truth, data, truth),
    ]


def _figures(estimator: Sequence[nn.Module], data: PreparedData, truth: Floats) -> dict[str, float]:
    """Of the mean logit of some models, calibrated on the validation rows."""
    valid, test = (
        np.mean([predict(model, shard, torch.device("cpu")) for model in estimator], axis=0)
        for shard in (data.valid, data.test)
    )
    calibration = fit_affine(data.valid.labels, valid)
    found = evaluate(data.test.labels, test, calibration)
    return {
        "auc": found["raw"]["auc"],
        "logloss": found["raw"]["logloss"],
        "calibrated_logloss": found["calibrated"]["logloss"],
        "excess_logloss": metrics.excess_logloss(truth, calibration.apply(test)),
    }


def _known(name: str, logits: Floats, data: PreparedData, truth: Floats) -> dict[str, Any]:
    """The line of logits that nothing was trained for."""
    return {
        "model": name,
        "auc": [metrics.auc(data.test.labels, logits)],
        "logloss": [metrics.logloss(data.test.labels, logits)],
        "calibrated_logloss": [],
        "excess_logloss": [metrics.excess_logloss(truth, logits)],
        "parameters": None,
        "cost": None,
    }


def cells(line: dict[str, Any]) -> list[str]:
    """A line of the table as text, under HEADER: mean ± standard deviation where there are several runs."""
    figures = [spread(line[figure], digits, scale) for figure, (scale, digits) in FIGURES.items()]
    size = "" if line["parameters"] is None else f"{line['parameters']:,}"
    return [line["model"], *figures, size, "" if line["cost"] is None else f"{line['cost']:.1f}"]


@dataclass(frozen=True)
class Finding:
    """What the table says of RECAP, favourable or not."""

    ensemble_gain: float
    """In AUC, over the mean of single FCNs."""
    recap_gain: float
    recovered: float | None
    """RECAP's share of the ensemble's gain, if that is one."""
    size: float
    """Stored parameters relative to one FCN's."""
    cost: float
    closed: float
    """Share of the gap in expected logloss between the base rate and Bayes."""
    text: str


def find(table: list[dict[str, Any]], rows: int) -> Finding:
    lines = {line["model"]: line for line in table}
    alone, recap = lines[FCN], lines[RECAP]
    (together,) = (line for name, line in lines.items() if name.startswith("ensemble"))
    ensemble_gain, recap_gain = (mean(line["auc"]) - mean(alone["auc"]) for line in (together, recap))
    recovered = recap_gain / ensemble_gain if ensemble_gain > 0 else None
    size, cost = recap["parameters"] / alone["parameters"], recap["cost"]
    closed = 1 - recap["excess_logloss"][0] / lines[BASE]["excess_logloss"][0]
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
