"""Replay a log period by period, to compare updating with refitting every time and with doing neither.

Every model is judged on the period after the rows that it has seen. Each period's figures are written when they are
known, and every model has a directory of its own, so an interrupted replay goes on where it was. Updates are in a
directory that is named after their settings: others can be tried on the same fits.
"""

import gc
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import parse
from recap_ctr.data.moments import find_unit, read_seconds
from recap_ctr.data.roles import read_labels
from recap_ctr.data.source import Block, Source
from recap_ctr.data.table import RawTable, open_table
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.backtest import STRATEGIES, Backtest, Period, PeriodFigures, Strategy
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.engines import LOCAL
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.progress import say
from recap_ctr.pages.backtest import page
from recap_ctr.recipe.fit import fit
from recap_ctr.recipe.gate import GateLimits
from recap_ctr.recipe.retrain import UpdateConfig
from recap_ctr.recipe.update import update
from recap_ctr.schema import Schema
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import atomic_file, make_directory, read_json, remove_directory, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked

REPORT = "backtest.json"
UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
MIN_PERIODS = 3
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BacktestResult:
    """A finished replay."""

    out: Path
    report: Backtest
    page: Path
    summary: str


def read_period(text: str) -> int:
    """Return the seconds of a period such as 1d, 6h or 30m.

    >>> read_period("1d"), read_period("6h")
    (86400, 21600)
    """
    match = re.fullmatch(r"(\d+)([mhdw])", text)
    if match is None or int(match[1]) == 0:
        raise InputError(f"--every {text}: not a period", fix="write a number and m, h, d or w, such as 1d")
    return int(match[1]) * UNITS[match[2]]


def backtest(
    log: RawTable,
    *,
    out: str | Path,
    label: str | None = None,
    time: str | None = None,
    schema: Schema | str | Path | None = None,
    every: str = "1d",
    first: int | None = None,
    settings: Mapping[str, Any] | None = None,
    budget: float | None = None,
    update_settings: Mapping[str, Any] | None = None,
    gate: Mapping[str, Any] | None = None,
    threads: int = 1,
    executor: Executor | str = LOCAL,
    force: bool = False,
    quiet: bool = True,
) -> BacktestResult:
    """Replay a log: fit its `first` periods (by default half of them), then update each period, or refit, or neither.

    `time` is the column of moments, `every` the length of a period. `settings` and `budget` are those of the fits,
    `update_settings` and `gate` those of the updates: with others, the fits of before are used again. Rows of an update
    that the gate refuses are part of the next one.
    """
    directory, seconds = Path(out), read_period(every)
    update_config = parse(UpdateConfig, update_settings or {}, "update")
    limits = parse(GateLimits, gate or {}, "gate")
    table = open_table(log, label=label, schema=schema)
    fields = table.schema.model_copy(update={"time": time or table.schema.time})
    inputs = {
        "log": [{"size": file.size, "sha256": file.sha256} for file in table.source.files()],
        "schema": fields.model_dump(mode="json"),
        "every": every,
        "first": first,
        "settings": dict(settings or {}),
        "budget": budget,
        "threads": threads,
    }
    claim(directory, inputs, finished=REPORT, force=force)
    with locked(directory):
        files, starts = _cut(table.source, fields, seconds, directory / "rows")
        options = {"settings": settings, "budget": budget, "threads": threads, "executor": executor}
        replay = _Replay(files, starts, fields, directory, options, update_config, limits, quiet=quiet)
        report = replay.run(every, first or len(files) // 2)
        write_json(directory / REPORT, report.to_json())
    shown = page(report)
    return BacktestResult(directory, report, shown.write(directory), shown.lead)


def _cut(source: Source, schema: Schema, seconds: int, out: Path) -> tuple[list[Path], list[str]]:
    """Write the rows of each period to a file of its own; return the files and the moments when they begin."""
    if schema.time is None:
        raise InputError("a log without times can't be replayed", fix="--time COLUMN")
    frame = pl.concat([block.frame for block, _ in source.blocks()])
    if schema.time not in frame.columns:
        raise InputError(f"the log has no column {schema.time!r}", fix="--time COLUMN")
    raw = frame[schema.time]
    unit = "iso" if raw.dtype.is_temporal() else find_unit(as_text(raw.unique()))
    moments = None if unit is None else read_seconds(raw, unit)
    if moments is None or moments.has_nulls():
        raise InputError(f"the column {schema.time!r} does not hold moments", fix="--time COLUMN")
    periods = moments.to_numpy() // seconds
    numbers = np.unique(periods)
    if len(numbers) < MIN_PERIODS:
        raise InputError(
            f"the log has {len(numbers)} periods; at least {MIN_PERIODS} are needed",
            fix="choose a shorter --every",
        )
    make_directory(out)
    files = []
    for at, number in enumerate(numbers):
        files.append(out / f"{at:04d}.parquet")
        if not files[-1].is_file():
            with atomic_file(files[-1]) as file:
                frame.filter(pl.Series(periods == number)).write_parquet(file)
    starts = pl.from_epoch(pl.Series(numbers * seconds), "s").dt.strftime("%Y-%m-%d %H:%M")
    return files, starts.to_list()


class _Replay:
    """The models of all strategies in a directory, made one period after the other."""

    def __init__(
        self,
        files: list[Path],
        starts: list[str],
        schema: Schema,
        out: Path,
        options: dict[str, Any],
        update_config: UpdateConfig,
        limits: GateLimits,
        *,
        quiet: bool,
    ) -> None:
        self.files, self.starts, self.schema, self.out = files, starts, schema, out
        self.options, self.update_config, self.limits, self.quiet = options, update_config, limits, quiet
        named_after = {
            "update": update_config.model_dump(mode="json"),
            "gate": limits.model_dump(mode="json"),
        }
        self.updates = out / f"updates-{fingerprint(named_after)[:10]}"

    def run(self, every: str, first: int) -> Backtest:
        if not 0 < first < len(self.files):
            raise InputError(
                f"{first} periods to fit, of {len(self.files)}", fix="leave at least one period to judge on"
            )
        make_directory(self.updates)
        begun = self._make(self._fit, self.out / "fit", first, True)
        models: dict[Strategy, str] = dict.fromkeys(STRATEGIES, str(self.out / "fit"))
        before, since, periods = dict(models), first, []
        idle = {"cpu_seconds": 0.0, "shipped": False}
        for at in range(first, len(self.files)):
            made: dict[Strategy, dict[str, Any]] = dict.fromkeys(STRATEGIES, idle)
            if at > first:
                refit, updated = self.out / f"refit-{at:04d}", self.updates / f"update-{at:04d}"
                made["refit"] = self._make(self._fit, refit, at, False)
                models["refit"] = str(refit)
                made["update"] = self._make(self._update, updated, models["update"], self.files[since:at])
                if made["update"]["shipped"]:
                    models["update"], since = str(updated), at
            judged = self._judged(f"period-{at:04d}", self._judge, at, models, before)
            figures = {name: PeriodFigures(**judged[name], **made[name]) for name in STRATEGIES}
            periods.append(Period(start=self.starts[at], rows=judged["rows"], figures=figures))
            self._say(periods[-1])
            before = dict(models)
        oldest = self._judged("oldest-rows", self._judge_oldest, models)
        return Backtest(
            every=every,
            first_rows=sum(
                pl.scan_parquet(file).select(pl.len()).collect().item() for file in self.files[:first]
            ),
            first_cpu_seconds=begun["cpu_seconds"],
            periods=periods,
            oldest=oldest["logloss"],
            forgotten=oldest["forgotten"],
        )

    def _make(self, work: Callable[..., dict[str, Any]], out: Path, *arguments: Any) -> dict[str, Any]:
        """Return what is known of a model in `out`, and the CPU seconds that it took; make it if it isn't there.

        A model whose making was interrupted is made again from the start: what it had taken by then is not known.
        """
        file = out.with_name(f"{out.name}.json")
        if not file.is_file():
            remove_directory(out)
            gc.collect()  # Workers end with the objects that hold them, and only then is their CPU time known.
            started = _cpu_seconds()
            record = work(out, *arguments)
            gc.collect()
            write_json(file, {**record, "cpu_seconds": _cpu_seconds() - started})
        return _read_record(file)

    def _judged(self, name: str, judge: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what a judgement found; one that is finished is read back."""
        file = self.updates / f"{name}.json"
        if not file.is_file():
            write_json(file, judge(*arguments))
        return _read_record(file)

    def _fit(self, out: Path, periods: int, keep_state: bool) -> dict[str, Any]:
        fit(
            self.files[:periods],
            schema=self.schema,
            out=out,
            device="cpu",
            keep_state=keep_state,
            quiet=True,
            **self.options,
        )
        return {"shipped": True}

    def _update(self, out: Path, model: str, rows: list[Path]) -> dict[str, Any]:
        result = update(
            model,
            rows,
            out=out,
            settings=self.update_config,
            gate=self.limits,
            threads=self.options["threads"],
            force=True,
        )
        return {"shipped": result.shipped, "reasons": result.report.gate.reasons}

    def _judge(
        self, at: int, models: Mapping[Strategy, str], before: Mapping[Strategy, str]
    ) -> dict[str, Any]:
        """Return the figures of all models on the rows of a period."""
        labels, scores = self._scores(at, {*models.values(), *before.values()})
        judged: dict[str, Any] = {"rows": len(labels)}
        for name, path in models.items():
            now, then = scores[path], scores[before[name]]
            logits = _logits(now)
            judged[name] = {
                "auc": metrics.auc(labels, logits),
                "logloss": metrics.logloss(labels, logits),
                "calibration_error": metrics.expected_calibration_error(labels, now),
                "churn": float(np.abs(now - then).mean() / max(then.mean(), 1e-12)),
            }
        return judged

    def _judge_oldest(self, models: Mapping[Strategy, str]) -> dict[str, Any]:
        """Return how well all models still know the rows of the first period."""
        labels, scores = self._scores(0, set(models.values()))
        losses = {
            name: metrics.softplus(np.where(labels == 1, -1, 1) * _logits(scores[path]))
            for name, path in models.items()
        }
        gaps = {name: losses["update"] - losses[name] for name in models if name != "update"}
        return {
            "logloss": {name: float(loss_N.mean()) for name, loss_N in losses.items()},
            "forgotten": {
                name: {"mean": float(gap_N.mean()), "error": float(gap_N.std() / len(gap_N) ** 0.5)}
                for name, gap_N in gaps.items()
            },
        }

    def _scores(self, at: int, paths: set[str]) -> tuple[npt.NDArray[np.uint8], dict[str, Floats]]:
        """Return the labels of the rows of a period, and the scores of models by their paths."""
        frame, schema = pl.read_parquet(self.files[at], glob=False), self.schema
        block = Block(frame, 1, str(self.files[at]))
        labels = read_labels(block, schema.label, schema.positive, schema.negative)
        scores = {path: np.asarray(Scorer.load(Path(path)).score_frame(frame), np.float64) for path in paths}
        return labels, scores

    def _say(self, period: Period) -> None:
        if not self.quiet:
            listed = "; ".join(
                f"{name} {figures.logloss:.5f} ({figures.cpu_seconds:.1f} s)"
                for name, figures in period.figures.items()
            )
            say(f"{period.start}: logloss {listed}")


def _logits(scores: Floats) -> Floats:
    """Return the logits of probabilities, none of them infinite."""
    return np.asarray(metrics.logit(np.clip(scores, 1e-12, 1 - 1e-12)))


def _read_record(file: Path) -> dict[str, Any]:
    record = read_json(file)
    assert isinstance(record, dict)
    return record


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
