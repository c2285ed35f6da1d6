"""The whole way on synthetic data, where the best possible score is known."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from recap_ctr import metrics
from recap_ctr.artifact import load_artifact
from recap_ctr.config import TrainConfig
from recap_ctr.data.prepare import Preparation, prepare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FileSource
from recap_ctr.data.synthetic import FORMAT, SyntheticConfig, SyntheticData
from recap_ctr.models import parse_model
from recap_ctr.predict import predict
from recap_ctr.progress import say
from recap_ctr.runs import ARTIFACT, RunConfig, run
from recap_ctr.schema import Field, Schema
from recap_ctr.score import Scorer, score
from recap_ctr.storage import claim, read_json, write_json

FINISHED = "demo.json"


def synthetic_schema(num_fields: int) -> Schema:
    fields = (Field(name=f"f{i}", kind="categorical", min_count=2) for i in range(1, num_fields + 1))
    return Schema(label="click", row_id="row", fields=tuple(fields))


def run_demo(out: Path, *, rows: int, seed: int, threads: int, force: bool, quiet: bool) -> dict[str, Any]:
    """Draw, prepare, train, evaluate and score; each part resumes or is left alone as its own command would."""
    config = SyntheticConfig(rows=rows, seed=seed)
    if claim(
        out,
        {"demo": {**asdict(config), "format": FORMAT}, "threads": threads},
        finished=FINISHED,
        force=force,
    ):
        if not quiet:
            say(f"{out} is finished; nothing to do")
        result: dict[str, Any] = read_json(out / FINISHED)
        return result
    drawn = SyntheticData(config)
    log = out / "clicks.csv"
    if not log.is_file():
        with open_sink(log) as sink:
            for block in drawn.blocks():
                sink.write(block.drop("bayes_logit"))
    schema = synthetic_schema(config.num_fields)
    data, _ = prepare(Preparation(schema, {"all": FileSource([log])}), out / "data", quiet=quiet)
    if not quiet:
        say(f"prepared {rows:,} rows; training FCN")
    settings = RunConfig(
        model="fcn",
        model_config=parse_model("fcn", {}),
        # A prior's share falls as rows grow: 1e-3 at the default 150,000 rows.
        train=TrainConfig(l2=150 / rows, learning_rate=3e-3, batch_size=2048, max_epochs=15, seed=seed),
        threads=threads,
    )
    report = run(settings, data, out / "run", quiet=quiet)
    table, closed = _against_bayes(report, data, drawn, out / "run")
    scored = _score_ten(log, out)
    finding = (
        f"FCN closes {closed:.0%} of the gap between the base rate and the best possible model,"
        f" measured against the known click probabilities of {len(data.test):,} test rows."
    )
    result = {"table": table, "closed": closed, "scored": scored, "finding": finding, "report": report}
    write_json(out / FINISHED, result)
    return result


def _against_bayes(
    report: dict[str, Any], data: PreparedData, drawn: SyntheticData, directory: Path
) -> tuple[list[list[str]], float]:
    test = data.test
    truth = drawn.frame()["bayes_logit"].to_numpy()[test.rows]
    artifact = load_artifact(directory / ARTIFACT)
    raw = predict(artifact.model, test, torch.device("cpu"))
    calibrated = artifact.calibration.apply(raw + artifact.shift)
    constant = np.full(len(test), metrics.logit(float(data.train.labels.mean())))
    reference = report["reference"]["logistic regression"]["test"]
    found = report["metrics"]["test"]

    def line(
        name: str, auc: float, loss: float, calibrated_loss: float | None, excess: float | None
    ) -> list[str]:
        numbers = [f"{auc:.4f}", f"{loss:.4f}"]
        numbers.append("" if calibrated_loss is None else f"{calibrated_loss:.4f}")
        return [name, *numbers, "" if excess is None else f"{excess:.4f}"]

    base, best = metrics.excess_logloss(truth, constant), metrics.excess_logloss(truth, calibrated)
    table = [
        line("base rate", 0.5, found["base_rate_logloss"], None, base),
        line("logistic regression", reference["auc"], reference["logloss"], None, None),
        line("FCN", found["raw"]["auc"], found["raw"]["logloss"], found["calibrated"]["logloss"], best),
        line(
            "Bayes (best possible)",
            metrics.auc(test.labels, truth),
            metrics.logloss(test.labels, truth),
            None,
            0.0,
        ),
    ]
    return table, 1 - best / base


def _score_ten(log: Path, out: Path) -> dict[str, Any]:
    """Score ten raw rows the way a user would: text in, text with two more columns out."""
    rows, scores = out / "ten.csv", out / "ten-scored.csv"
    with open_sink(rows) as sink:
        sink.write(pl.read_csv(log, n_rows=10, infer_schema=False))
    scorer = Scorer.load(out / "run")
    with open_sink(scores) as sink:
        score(scorer, FileSource([rows]), sink, quiet=True)
    frame = pl.read_csv(scores, infer_schema=False)
    short = frame.with_columns(pl.col("score", "logit").cast(pl.Float64).round(4).cast(pl.String))
    return {"columns": short.columns, "rows": [list(row) for row in short.rows()]}
