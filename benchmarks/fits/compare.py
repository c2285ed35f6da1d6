"""A budgeted fit against logistic regression, LightGBM and CatBoost on the same rows.

    python -m benchmarks.fits.compare DATA --source PATH --work DIR --budget 2 --budget 10 --budget 30

DATA names the table (see `TABLES`); PATH is where it lies. The rivals train on the rows that the fit has prepared, to
their best: all strengths, early stopping on the validation rows, no limit of time. Results, with CPU seconds and paired
leads on the test rows, go to results/DATA.json beside this file; what is there is not measured again. CatBoost takes
part if it is installed. `python -m benchmarks.summary --write` puts the table into docs/results.md.
"""

import argparse
import gc
import json
import resource
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

import recap_ctr
from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import machine
from recap_ctr.training.linear import design_matrix, fit_logistic
from recap_ctr.training.trees import TreeColumns, fit_trees

RESULTS = Path(__file__).parent / "results"
Floats = npt.NDArray[np.float64]


def kuairand(source: Path) -> tuple[pl.DataFrame | str, str]:
    return pl.read_parquet(source).drop("long_view", "is_like"), "label"


def whole(label: str) -> Callable[[Path], tuple[pl.DataFrame | str, str]]:
    return lambda source: (str(source), label)


def ml1m(source: Path) -> tuple[pl.DataFrame | str, str]:
    """Return the ratings with users and movies: a click is a rating above 3, as in the published protocol."""

    def table(name: str, columns: list[str]) -> pl.DataFrame:
        lines = (source / name).read_text(encoding="latin-1").splitlines()
        rows = [line.split("::") for line in lines]
        return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")

    ratings = table("ratings.dat", ["user", "movie", "rating", "time"])
    users = table("users.dat", ["user", "gender", "age", "occupation", "zip"])
    movies = table("movies.dat", ["movie", "title", "genres"]).drop("title")
    joined = ratings.join(users, on="user", maintain_order="left").join(
        movies, on="movie", maintain_order="left"
    )
    rating = pl.col("rating").cast(pl.Int8)
    return joined.filter(rating != 3).with_columns((rating > 3).cast(pl.Int8).alias("click")).drop(
        "rating", "time"
    ), "click"


def flights(source: Path) -> tuple[pl.DataFrame | str, str]:
    """Return the flights from New York in 2013 with the weather at departure: a click is one that came 15 minutes late.

    What is known only afterwards, such as the delay of the departure, is left out.
    """
    hour = ["origin", "year", "month", "day", "hour"]
    with zipfile.ZipFile(source / "flights.csv.zip") as archive:
        rows = pl.read_csv(
            archive.read("flights.csv"), null_values=["NA", ""], infer_schema_length=None
        ).drop_nulls("arr_delay")
    weather = pl.read_csv(source / "weather.csv", null_values=["NA", ""], infer_schema_length=None)
    moment = pl.datetime("year", "month", "day", "hour", "minute").dt.strftime("%Y-%m-%d %H:%M:%S")
    known_later = ["arr_delay", "dep_delay", "dep_time", "arr_time", "air_time"]
    joined = rows.join(weather.drop("time_hour").unique(hour, keep="first"), on=hour, how="left")
    return (
        joined.with_columns((pl.col("arr_delay") > 15).cast(pl.Int8).alias("late"), moment.alias("ts"))
        .drop(*known_later, "year", "month", "day", "hour", "minute", "time_hour")
        .sort("ts", maintain_order=True)
    ), "late"


TABLES: dict[str, Callable[[Path], tuple[pl.DataFrame | str, str]]] = {
    "kuairand-pure": kuairand,
    "book-crossing": whole("label"),
    "ml-1m": ml1m,
    "flights": flights,
    "additive": whole("click"),
    "synthetic": whole("click"),
}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def linear_logits(data: PreparedData) -> Floats:
    fitted = fit_logistic(data)
    return np.asarray(design_matrix(data.test, data.layout) @ fitted.weights_V + fitted.bias)


def tree_logits(data: PreparedData) -> Floats:
    return fit_trees(data, threads=machine.num_cores()).logits(data.test)


def catboost_logits(data: PreparedData) -> Floats:
    """Train CatBoost on categories and numbers, until the validation logloss has not improved for 50 rounds."""
    import catboost
    import pandas as pd

    columns = TreeColumns(data)

    def pool(shard: Shard) -> Any:
        frame = pd.DataFrame(columns.of(shard))
        frame = frame.astype(dict.fromkeys(columns.categories, "int32"))
        return catboost.Pool(
            frame,
            np.asarray(shard.labels, np.int32),
            cat_features=columns.categories,
            weight=shard.weights,
        )

    model = catboost.CatBoostClassifier(
        iterations=2000,
        early_stopping_rounds=50,
        eval_metric="Logloss",
        thread_count=machine.num_cores(),
        random_seed=1,
        verbose=False,
        allow_writing_files=False,
    )
    model.fit(pool(data.train), eval_set=pool(data.valid))
    return np.asarray(model.predict(pool(data.test), prediction_type="RawFormulaVal"))


RIVALS: dict[str, Callable[[PreparedData], Floats]] = {
    "logistic regression": linear_logits,
    "LightGBM": tree_logits,
    "CatBoost": catboost_logits,
}


def rival_logits(table: str, data: PreparedData, work: Path, results: dict[str, Any]) -> dict[str, Floats]:
    """Return the rivals' logits of the test rows, trained once for each table."""
    logits = {}
    for name, train in RIVALS.items():
        file = work / f"{table}-{name.replace(' ', '-')}.npy"
        if not file.is_file():
            try:
                before, started = cpu_seconds(), time.monotonic()
                scored = train(data)
            except ImportError:
                continue
            results["rivals"][name] = {
                "auc": metrics.auc(data.test.labels, scored, data.test.weights),
                "logloss": metrics.logloss(data.test.labels, scored, data.test.weights),
                "cpu_seconds": round(cpu_seconds() - before, 1),
                "seconds": round(time.monotonic() - started, 1),
            }
            np.save(file, scored)
        logits[name] = np.load(file)
    return logits


def measure(
    data: pl.DataFrame | str, label: str, budget: float, out: Path
) -> tuple[recap_ctr.FitResult, float]:
    """Fit within a budget, and return the result with its CPU seconds."""
    before = cpu_seconds()
    result = recap_ctr.fit(data, label=label, out=out, budget=budget, quiet=False)
    gc.collect()  # It ends the fit's processes, whose time counts only then.
    return result, cpu_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=TABLES)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--budget", type=float, action="append", required=True)
    arguments = parser.parse_args()
    file = RESULTS / f"{arguments.data}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rivals": {}, "fits": {}}
    frame, label = TABLES[arguments.data](arguments.source)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for budget in arguments.budget:
        key = f"{budget:g}"
        if key in results["fits"]:
            continue
        started = time.monotonic()
        result, cpu = measure(frame, label, budget, arguments.work / f"{arguments.data}-{key}")
        taken = time.monotonic() - started
        data, report = result.data, result.report
        tables = result.out / report.student / "logits"
        scored = np.asarray(LogitTable(tables / "test").logits_NM[:, 0], np.float64)
        labels, weights = data.test.labels, data.test.weights
        leads = {}
        for name, rival in rival_logits(arguments.data, data, arguments.work, results).items():
            lead = metrics.auc_difference(labels, scored, rival, weights)
            leads[name] = {"auc": lead.difference, "error": lead.standard_error}
        raw = report.metrics.on("test").raw
        results["fits"][key] = {
            "model": report.model.name,
            "auc": raw.auc,
            "logloss": report.metrics.on("test").calibrated.logloss,
            "seconds": round(taken, 1),
            "cpu_seconds": round(cpu, 1),
            "leads": leads,
            "given_up": report.plan["given_up"],
        }
        results |= {
            "rows": {name: entry["rows"] for name, entry in data.manifest["splits"].items()},
            "split": data.split,
            "machine": machine.machine(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps(results["fits"][key], indent=2))


if __name__ == "__main__":
    main()
