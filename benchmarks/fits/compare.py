"""A budgeted fit against logistic regression, LightGBM and CatBoost, on rows that none of them has seen.

    python -m benchmarks.fits.compare DATA --source PATH --work DIR --budget 2 --budget 10 --budget 30

DATA names the table (see `TABLES`); PATH is where it lies. A tenth of the rows is held back from everybody: the last
ones where the rows have times, else random ones. The fit gets the rest as raw rows, and what it ships is measured. The
rivals get the same rows encoded with the fit's schema. On the last ninth of the rest they choose strength or number of
trees, with early stopping and no limit of time; then they train on all of the rest by what they have chosen, as the fit
does. Results, with CPU seconds and paired leads, go to results/DATA.json beside this file; what is there is not
measured again. CatBoost takes part if it is installed. `python -m benchmarks.summary --write` puts the table into
docs/results.md.
"""

import argparse
import gc
import json
import resource
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

import recap_ctr
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.data.split import Split
from recap_ctr.data.table import open_table
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import machine
from recap_ctr.schema import Schema
from recap_ctr.training.linear import design_matrix, fit_logistic
from recap_ctr.training.trees import SETTINGS, TreeColumns, fit_trees

RESULTS = Path(__file__).parent / "results"
PART = "part of the comparison"  # A column that says which rows are which.
Floats = npt.NDArray[np.float64]


def kuairand(source: Path) -> tuple[pl.DataFrame, str]:
    return pl.read_parquet(source).drop("long_view", "is_like"), "label"


def whole(label: str) -> Callable[[Path], tuple[pl.DataFrame, str]]:
    return lambda source: (pl.read_parquet(source), label)


def ml1m(source: Path) -> tuple[pl.DataFrame, str]:
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


def flights(source: Path) -> tuple[pl.DataFrame, str]:
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


TABLES: dict[str, Callable[[Path], tuple[pl.DataFrame, str]]] = {
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


@dataclass(frozen=True)
class Encoded:
    """The rows of rivals: to choose on, with the last ninth of the rest apart, and to train on in the end."""

    choosing: PreparedData
    final: PreparedData


def linear_logits(rows: Encoded) -> Floats:
    """Choose the strength, then fit the regression at that strength to all of the rest."""
    chosen = fit_logistic(rows.choosing).strength
    fitted = fit_logistic(rows.final, strengths=[chosen])
    return np.asarray(design_matrix(rows.final.test, rows.final.layout) @ fitted.weights_V + fitted.bias)


def tree_logits(rows: Encoded) -> Floats:
    """Choose the number of trees by early stopping, then fit as many to all of the rest."""
    import lightgbm

    threads = machine.num_cores()
    rounds = fit_trees(rows.choosing, threads=threads).booster.best_iteration
    columns, train = TreeColumns(rows.final), rows.final.train
    data = lightgbm.Dataset(
        columns.of(train), train.labels, weight=train.weights, categorical_feature=columns.categories
    )
    booster = lightgbm.train({**SETTINGS, "num_threads": threads, "seed": 1}, data, rounds)
    return np.asarray(booster.predict(columns.of(rows.final.test), raw_score=True))


def catboost_logits(rows: Encoded) -> Floats:
    """Choose the number of trees by early stopping (50 rounds, by logloss), then fit as many to all of the rest."""
    import catboost
    import pandas as pd

    def model(rounds: int, **settings: Any) -> Any:
        return catboost.CatBoostClassifier(
            iterations=rounds,
            thread_count=machine.num_cores(),
            random_seed=1,
            verbose=False,
            allow_writing_files=False,
            **settings,
        )

    def pool(data: PreparedData, shard: Shard) -> Any:
        columns = TreeColumns(data)
        frame = pd.DataFrame(columns.of(shard)).astype(dict.fromkeys(columns.categories, "int32"))
        labels = np.asarray(shard.labels, np.int32)
        return catboost.Pool(frame, labels, cat_features=columns.categories, weight=shard.weights)

    choosing, final = rows.choosing, rows.final
    first = model(2000, early_stopping_rounds=50, eval_metric="Logloss")
    first.fit(pool(choosing, choosing.train), eval_set=pool(choosing, choosing.valid))
    # CatBoost derives its rate from the number of rounds, so the second fit takes that of the first.
    second = model(first.get_best_iteration() + 1, learning_rate=first.learning_rate_)
    second.fit(pool(final, final.train))
    return np.asarray(second.predict(pool(final, final.test), prediction_type="RawFormulaVal"))


RIVALS: dict[str, Callable[[Encoded], Floats]] = {
    "logistic regression": linear_logits,
    "LightGBM": tree_logits,
    "CatBoost": catboost_logits,
}


@dataclass(frozen=True)
class Table:
    """A table of which a tenth of the rows is held back from everybody."""

    name: str
    rest: pl.DataFrame
    held_back: pl.DataFrame
    label: str
    schema: Schema

    @classmethod
    def read(cls, name: str, source: Path) -> "Table":
        """Hold back the last rows where the log has times, else random ones."""
        frame, label = TABLES[name](source)
        schema = open_table(frame, label=label).schema
        if schema.time is None:
            frame = frame.sample(fraction=1.0, shuffle=True, seed=1)
        else:
            frame = frame.sort(schema.time, maintain_order=True)
        cut = len(frame) * 9 // 10
        return cls(name, frame[:cut], frame[cut:], label, open_table(frame[:cut], label=label).schema)

    def encoded(self, work: Path) -> Encoded:
        """Encode the rows for the rivals, with the vocabularies of the rows that they train on."""
        cut, prepared = len(self.rest) * 8 // 9, []
        for stage, train in (("choosing", self.rest[:cut]), ("final", self.rest)):
            parts = {"train": train, "valid": self.rest[cut:], "test": self.held_back}
            rows = pl.concat([part.with_columns(pl.lit(name).alias(PART)) for name, part in parts.items()])
            table = open_table(rows, schema=self.schema)
            out = work / f"{self.name}-{stage}"
            prepared.append(table.prepared(out, Split(kind="column", column=PART), quiet=True)[0])
        return Encoded(*prepared)

    def rival_logits(self, work: Path, results: dict[str, Any]) -> dict[str, Floats]:
        """Return the rivals' logits of the rows held back, trained once for each table."""
        logits, encoded = {}, self.encoded(work)
        labels = self.held_back[self.label].to_numpy()
        for name, train in RIVALS.items():
            file = work / f"{self.name}-{name.replace(' ', '-')}.npy"
            if not file.is_file():
                try:
                    before, started = cpu_seconds(), time.monotonic()
                    scored = train(encoded)
                except ImportError:
                    continue
                results["rivals"][name] = {
                    "auc": metrics.auc(labels, scored),
                    "logloss": metrics.logloss(labels, scored),
                    "cpu_seconds": round(cpu_seconds() - before, 1),
                    "seconds": round(time.monotonic() - started, 1),
                }
                np.save(file, scored)
            logits[name] = np.load(file)
        return logits

    def measure(self, budget: float, work: Path, results: dict[str, Any]) -> dict[str, Any]:
        """Fit within a budget, and compare what ships with the rivals on the rows held back."""
        before, started = cpu_seconds(), time.monotonic()
        out = work / f"{self.name}-{budget:g}"
        result = recap_ctr.fit(self.rest, label=self.label, out=out, budget=budget, quiet=False)
        seconds = time.monotonic() - started
        gc.collect()  # It ends the fit's processes, whose time counts only then.
        cpu = cpu_seconds() - before
        with warnings.catch_warnings():  # Of what is not usual in rows that are later than all others.
            warnings.simplefilter("ignore", recap_ctr.DataWarning)
            scores = recap_ctr.predict(result.load(), self.held_back.drop(self.label))["score"]
        scored, labels = metrics.logit(scores.to_numpy()), self.held_back[self.label].to_numpy()
        leads = {}
        for name, rival in self.rival_logits(work, results).items():
            lead = metrics.auc_difference(labels, scored, rival)
            gain = metrics.logloss_difference(labels, rival, scored)
            leads[name] = {
                "auc": lead.difference,
                "error": lead.standard_error,
                "logloss": gain.difference,
                "logloss_error": gain.standard_error,
            }
        report = result.report
        return {
            "model": report.model.name,
            "auc": metrics.auc(labels, scored),
            "logloss": metrics.logloss(labels, scored),
            "own_test_auc": report.metrics.on("test").raw.auc,
            "all_rows": report.refit is not None,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "leads": leads,
            "given_up": report.plan["given_up"],
        }


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
    table = Table.read(arguments.data, arguments.source)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for budget in arguments.budget:
        key = f"{budget:g}"
        if key in results["fits"]:
            continue
        results["fits"][key] = table.measure(budget, arguments.work, results)
        results |= {
            "rows": {"rest": len(table.rest), "held back": len(table.held_back)},
            "split": "at random, seed 1" if table.schema.time is None else f"the last by {table.schema.time}",
            "machine": machine.machine(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps(results["fits"][key], indent=2))


if __name__ == "__main__":
    main()
