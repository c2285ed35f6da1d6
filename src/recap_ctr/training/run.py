"""One run: training from one seed, then calibration, evaluation and the artifact, in one resumable directory."""

import csv
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recap_ctr.axes.logits import table_checksum
from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import Routed, greedy_choice, late_routes, random_routes
from recap_ctr.axes.teachers import teacher_targets
from recap_ctr.config import Frozen, TrainConfig, parse, read_toml
from recap_ctr.data.layout import Layout
from recap_ctr.data.quality import field_quality, repeated_rows
from recap_ctr.data.shards import PreparedData, Rows, Shard
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration, fitting
from recap_ctr.evaluation.evaluate import Metrics, evaluate
from recap_ctr.evaluation.sampling import negative_rate_shift, undo_sampling
from recap_ctr.inference.artifact import MANIFEST, WEIGHTS, write_artifact
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.setting import measured_settings
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs import machine
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.rates import Rates
from recap_ctr.models.recap import Recap, RecapConfig, Route, assign_columns
from recap_ctr.nn.group import alone, current_group
from recap_ctr.nn.sharded import give_rows, whole_weights
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import atomic_file, remove_directory
from recap_ctr.storage.hashes import sha256
from recap_ctr.storage.locks import locked
from recap_ctr.training import trees
from recap_ctr.training.beside import put_beside
from recap_ctr.training.breakdown import held_out_breakdown
from recap_ctr.training.linear import train_linear
from recap_ctr.training.loop import Start, Trained, Trainer, train
from recap_ctr.training.rates import RATES, train_rates, with_rates
from recap_ctr.training.references import (
    LOGISTIC,
    TREES,
    compare_with_reference,
    held_out_logits,
    write_tree_logits,
)
from recap_ctr.training.report import (
    REPORT,
    DataSummary,
    Epoch,
    ModelSummary,
    Reference,
    RouteChoice,
    RouteGain,
    RouteSummary,
    RunReport,
    Seconds,
    SplitCount,
    read_report,
    write_report,
)

WIDE = 256  # Numbers per row from which on a step's matrix products are worth dividing among threads.
HISTORY, ARTIFACT, LOGITS = "history.csv", "artifact", "logits"
TIMED_STEPS = 16
ROUTE_SEED = 1
GREEDY_CANDIDATES = 4  # For each route that is chosen from them.
MAX_ROUTES = 8  # K where the run chooses it, if more than one route is worth its cost.
CHANCE = 2.0  # Standard errors that a gain must exceed before it is paid for.


@dataclass(frozen=True)
class RunSettings:
    """What a TOML file says about a run, still unchecked: a model by name, its settings, and its training."""

    model: str
    model_settings: dict[str, Any]
    train: dict[str, Any]
    origin: str = ""
    """Where they come from, in a word, such as published or defaults; tables show it."""


def read_settings(path: Path, model: str = "fcn") -> RunSettings:
    """Return the tables [model] and [train] of a file, and its `origin`; [model] may lack the model's name."""
    tables = read_toml(path)
    origin = str(tables.pop("origin", ""))
    for key, table in tables.items():
        if key not in ("model", "train") or not isinstance(table, dict):
            raise InputError(f"{path}: unknown table {key}", fix="use only [model] and [train]")
    settings = dict(tables.get("model", {}))
    return RunSettings(str(settings.pop("name", model)), settings, tables.get("train", {}), origin)


def settings_for(model: str | None, path: Path | None) -> RunSettings:
    """Return the settings in `path`; ignore its [model] table if `model` names another model."""
    expected = model or "fcn"
    settings = RunSettings(expected, {}, {}) if path is None else read_settings(path, expected)
    return settings if model in (None, settings.model) else replace(settings, model=model, model_settings={})


def default_threads(config: Frozen, layout: Layout) -> int:
    """Return all cores for wide models, 1 for narrow ones, which more threads only slow down (docs/decisions/0004)."""
    return machine.num_cores() if layout.num_fields * getattr(config, "dim", 1) >= WIDE else 1


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run's outcome, other than the data."""

    model: str
    model_config: Frozen
    train: TrainConfig
    calibration: Literal["affine", "isotonic"] = "affine"
    negative_rate: float = 1.0
    """The share of negatives that was kept when the log was sampled."""
    train_baseline: bool = True
    """Whether to train logistic regression, and LightGBM where it is installed, for comparison."""
    report_fields: bool = True
    """Whether to report how much of each field is unknown or has drifted."""
    threads: int = 1
    device: str = "cpu"
    teachers: tuple[Path, ...] = ()
    """Logit tables over the training rows; with them the run is a student."""
    routes: int | None = 1
    """K of Eq. 15: how many routes the artifact averages. One is the home route, unless it is chosen greedily.

    None: `MAX_ROUTES` if their gain in AUC on validation rows is beyond chance, else one.
    """
    route_choice: RouteChoice = "late"
    """Routes that share all but their last steps, random ones, or those late ones that do best on validation."""
    beside: tuple[Path, ...] = ()
    """Finished runs of lr and rates, which are put beside the towers of RECAP if that is better on validation rows."""

    on_top: Path | None = None
    """A finished run of rates, beside which RECAP's towers are trained from the start."""

    def __post_init__(self) -> None:
        negative_rate_shift(self.negative_rate)  # It refuses an impossible rate.
        if self.train.update == "convex" and self.model != "lr":
            raise InputError(
                f"update is convex, and the loss of {self.model} is not",
                fix='use update = "exact" or "fast", or train lr',
            )
        has_columns = isinstance(self.model_config, RecapConfig) and self.model_config.sampling == "fixed"
        if self.train.kd_from == "column" and not has_columns:
            raise InputError(
                f"kd_from is column, and rows have no columns of their own in {self.model}",
                fix='train recap with binding = "columns" and sampling = "fixed"',
            )
        if self.routes is not None and self.routes < 1:
            raise InputError(f"{self.routes} routes: at least one is needed")
        if (self.routes or 1) > 1 and not isinstance(self.model_config, RecapConfig):
            raise InputError(f"{self.model} has no routes", fix="remove --routes, or train recap")

    def with_seed(self, seed: int) -> "RunConfig":
        """Return the same run from another seed."""
        return replace(self, train=self.train.model_copy(update={"seed": seed}))

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values, for a job."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "model_config": self.model_config.model_dump(mode="json"),
            "train": self.train.model_dump(mode="json"),
            "teachers": [str(path) for path in self.teachers],
            "beside": [str(path) for path in self.beside],
            "on_top": None if self.on_top is None else str(self.on_top),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the config that `to_json` wrote."""
        parsed = {
            "model_config": parse_model(values["model"], values["model_config"]),
            "train": parse(TrainConfig, values["train"], "run"),
            "teachers": tuple(Path(path) for path in values["teachers"]),
            "beside": tuple(Path(path) for path in values["beside"]),
            "on_top": None if values["on_top"] is None else Path(values["on_top"]),
        }
        return cls(**{**values, **parsed})

    def training_inputs(
        self, data: PreparedData, checksum: Callable[[Path], str] = table_checksum
    ) -> dict[str, Any]:
        """Return what the weights depend on; it names a run's directory. `checksum` is that of a teacher's table."""
        return {
            "data": data.fingerprint,
            "model": {"name": self.model, "config": self.model_config.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "threads": self.threads,
            "device": self.device,
            "teachers": [checksum(path) for path in self.teachers],
            **({"on_top": sha256(self.on_top / ARTIFACT / WEIGHTS)} if self.on_top else {}),
        }

    def inputs_without_seed(
        self, data: PreparedData, checksum: Callable[[Path], str] = table_checksum
    ) -> dict[str, Any]:
        """Return what runs that differ in their seed alone have in common."""
        inputs = self.training_inputs(data, checksum)
        return {**inputs, "train": {key: value for key, value in inputs["train"].items() if key != "seed"}}


def run(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    force: bool = False,
    quiet: bool = False,
    deadline: float | None = None,
) -> RunReport:
    """Do the run, or go on with one that was interrupted, or read the report of a finished one.

    At the `deadline`, a time of `time.time`, training ends with what it has. Workers of a group do the run together;
    the first of them alone claims the directory and writes what a run writes once.
    """
    group = current_group()
    quiet = quiet or not group.is_first
    if group.size > 1:
        _refuse_group(config)
    torch.set_num_threads(max(config.threads // group.local_size, 1))
    inputs = config.training_inputs(data)
    trained_before = group.decide(group.is_first and claim(out, inputs, finished=REPORT, force=force))
    if trained_before and group.decide(group.is_first and is_finished(out, config)):
        if not quiet:
            say(f"{out} is up to date")
        return read_report(out)
    with locked(out) if group.is_first else nullcontext():
        if trained_before and group.is_first:
            if not quiet:
                say(f"{out} is trained; calibrating, measuring and packing it again")
            _remove_results(out, config)
        trained = _train(config, data, out, quiet=quiet, deadline=deadline)
        return _finish(config, data, out, trained, quiet=quiet)


def _refuse_group(config: RunConfig) -> None:
    """Refuse what only one worker can do."""
    if config.train.update == "convex" or config.model == RATES:
        raise InputError(f"{config.model} of this kind is trained by one worker", fix="remove --workers")
    if config.beside or config.on_top is not None:
        raise InputError("parts beside the towers are put there by one worker", fix="remove --workers")


def advance(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    until: int | None,
    deadline: float | None,
    quiet: bool,
) -> Trained:
    """Train the weights of a run for a while, and return the best so far; nothing is calibrated or packed.

    `until` is an epoch, `deadline` a time of `time.time`. What an earlier call packed is removed, as it is out of date.
    """
    torch.set_num_threads(config.threads)
    was_packed = claim(out, config.training_inputs(data), finished=REPORT, force=False)
    with locked(out):
        if was_packed:
            _remove_results(out, config, trained_on=True)
        return _train(config, data, out, quiet=quiet, until=until, deadline=deadline)


def _train(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    quiet: bool,
    until: int | None = None,
    deadline: float | None = None,
) -> Trained:
    """Train the weights, or go on from the last saved state."""
    device = torch.device(config.device)
    if config.train.update == "convex":
        return train_linear(config.model_config, data, device, config.train.seed, deadline=deadline)
    if config.model == RATES:
        return train_rates(
            config.model_config,
            config.train,
            data,
            out,
            device=device,
            until=until,
            deadline=deadline,
            quiet=quiet,
        )
    targets = _targets(config, data) if config.teachers else None
    model_config: Frozen = config.model_config
    rows: Rows = data
    start = None
    if config.on_top is not None:
        rates = load_artifact(config.on_top / ARTIFACT).model
        model_config, rows, initial = with_rates(model_config, rates, data)
        start = Start(initial)
    return train(
        config.model,
        model_config,
        config.train,
        rows,
        out,
        device=device,
        targets=targets,
        start=start,
        until=until,
        deadline=deadline,
        quiet=quiet,
    )


def _targets(config: RunConfig, data: PreparedData) -> npt.NDArray[np.float32]:
    """Return what a student learns from, one probability for each training row."""
    columns_N = None
    if config.train.kd_from == "column":
        assert isinstance(config.model_config, RecapConfig)
        ids = torch.from_numpy(np.array(data.train.ids))
        columns_N = assign_columns(ids, config.model_config.num_adapters).numpy()
    return teacher_targets(config.teachers, data, columns_N)


def _about_data(data: PreparedData) -> dict[str, Any]:
    """Return what an artifact says of the rows that it was trained on."""
    return {
        "name": data.name,
        "fingerprint": data.fingerprint,
        "rows": len(data.train),
        "clicks": data.manifest["splits"]["train"]["positives"],
        **({} if data.split is None else {"split": data.split}),
    }


def _finish(config: RunConfig, data: PreparedData, out: Path, trained: Trained, *, quiet: bool) -> RunReport:
    """Choose routes, calibrate, measure, pack the artifact and write the report of a trained model.

    Of a group, only the first worker writes, and compares with references; the reports of the others lack these.
    """
    started = time.monotonic()
    device = torch.device(config.device)
    model, beside = trained.model, None
    if config.beside and isinstance(model, Recap):
        model, beside = put_beside(model, config.beside, data, device)
        if not quiet:
            say(beside.sentence)
    if isinstance(model, Recap | Rates):  # What ships may be more than what was configured.
        config = replace(config, model_config=model.config)
    shipped = _choose_and_measure(config, model, data, device)
    calibration = shipped.calibration
    if shipped.gain is not None and not quiet:
        say(shipped.gain.sentence)
    breakdown = held_out_breakdown(shipped.model, data, device, calibration, config.negative_rate)
    logits = {split: predict(shipped.model, shard, device) for split, shard in held_out_shards(data).items()}
    _pack(config, data, out, trained, model, shipped)
    is_first = current_group().is_first
    report = RunReport(
        kind="report",
        format=1,
        **_origin(config, data),
        reference=_references(config, logits, data, out, quiet)
        if config.train_baseline and is_first
        else None,
        calibrated_by=calibration.to_dict() if config.calibration == "affine" else {"kind": "isotonic"},
        metrics=shipped.metrics,
        metrics_by_routes=shipped.metrics_by_routes,
        **({} if shipped.gain is None else {"route_gain": shipped.gain}),
        **({} if beside is None else {"beside": beside}),
        fields=field_quality(data) if config.report_fields and is_first else None,
        repeated=repeated_rows(data) if config.report_fields and is_first else None,
        breakdown=breakdown,
        best_epoch=trained.best_epoch,
        history=trained.history,
        seconds=Seconds(train=trained.seconds, evaluate=time.monotonic() - started),
        versions=machine.versions(),
        machine=machine.machine(),
        date=datetime.now(UTC).date().isoformat(),
    )
    if is_first:
        write_report(out, report)
    return report


@dataclass(frozen=True)
class _Shipped:
    """The model on the routes that ship, and what was measured to choose them."""

    model: nn.Module
    routes: tuple[Route, ...]
    gain: RouteGain | None
    calibration: Calibration
    metrics: Metrics
    metrics_by_routes: dict[str, Metrics]


def _pack(
    config: RunConfig, data: PreparedData, out: Path, trained: Trained, model: nn.Module, shipped: _Shipped
) -> None:
    """Write the artifact and the history; workers other than the first give it their rows."""
    dial = _measure_dial(
        config, model, shipped.routes, shipped.calibration, data, torch.device(config.device)
    )
    weights = whole_weights(model)
    if not current_group().is_first:
        give_rows(weights)
        return
    write_artifact(
        out / ARTIFACT,
        name=config.model,
        config=config.model_config,
        weights=weights,
        encoder=data.encoder,
        calibration=shipped.calibration,
        shift=negative_rate_shift(config.negative_rate),
        metrics=shipped.metrics.without_reliability().to_json(),
        dial=dial,
        routes=shipped.routes,
        data=_about_data(data),
        training={**config.train.model_dump(mode="json"), "best_epoch": trained.best_epoch},
        profile=data.profile,
    )
    _write_history(out / HISTORY, trained.history)


def _choose_and_measure(
    config: RunConfig, model: nn.Module, data: PreparedData, device: torch.device
) -> _Shipped:
    """Choose the routes to ship, then calibrate and measure them, one route, and all that were considered."""
    count = config.routes or MAX_ROUTES
    candidates = choose_routes(
        model, count, config.route_choice, data, device, negative_rate=config.negative_rate
    )
    gain = _route_gain(config, model, candidates, data, device)
    routes = candidates if gain is None else candidates[: gain.shipped]
    models = {1: model, len(candidates): _on(model, candidates)} if candidates else {}
    models[len(routes)] = _on(model, routes)
    measured = {
        count: _calibrate_and_measure(config, routed, data, device) for count, routed in models.items()
    }
    calibration, figures = measured[len(routes)]
    by_routes = {str(count): entry.without_reliability() for count, (_, entry) in measured.items() if count}
    return _Shipped(models[len(routes)], routes, gain, calibration, figures, by_routes)


def _origin(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    """Return the part of a report that says what decided the run: the data and the config."""
    splits = {
        name: SplitCount(rows=split["rows"], positives=split["positives"])
        for name, split in data.manifest["splits"].items()
    }
    return {
        "data": DataSummary(name=data.name, fingerprint=data.fingerprint, splits=splits, split=data.split),
        "model": ModelSummary(name=config.model, config=config.model_config.model_dump(mode="json")),
        "train": config.train,
        "threads": config.threads,
        "device": config.device,
        "teachers": [table_checksum(path) for path in config.teachers],
        "calibration": config.calibration,
        "negative_rate": config.negative_rate,
        "routes": RouteSummary(count=config.routes, choice=config.route_choice),
        "parameters": count_parameters(config.model, config.model_config, data.layout),
    }


def is_finished(out: Path, config: RunConfig) -> bool:
    """Return whether a trained run has been calibrated, measured and packed as `config` wants it.

    A run whose artifact was moved away is not finished: it is packed again.
    """
    if not (out / REPORT).is_file() or not (out / ARTIFACT / MANIFEST).is_file():
        return False
    report = read_report(out)
    return (
        report.calibration == config.calibration
        and report.negative_rate == config.negative_rate
        and (report.reference is not None) == config.train_baseline
        and (report.routes.count, report.routes.choice) == (config.routes, config.route_choice)
        and (report.beside is not None) == bool(config.beside)
    )


def _remove_results(out: Path, config: RunConfig, *, trained_on: bool = False) -> None:
    """Go back to the trained weights. Remove the logits too, if weights or the routes that they are of may change."""
    routes = read_report(out).routes
    may_change = trained_on or config.route_choice == "greedy" or config.routes is None or config.beside
    if may_change or (routes.count, routes.choice) != (config.routes, config.route_choice):
        remove_directory(out / LOGITS)
    (out / REPORT).unlink()


def held_out_shards(data: PreparedData) -> dict[str, Shard]:
    """Return the validation rows and, where there are any, the test rows."""
    return {"valid": data.valid, "test": data.test} if len(data.test) else {"valid": data.valid}


def _references(
    config: RunConfig, logits: dict[str, npt.NDArray[np.float32]], data: PreparedData, out: Path, quiet: bool
) -> dict[str, dict[str, Reference]]:
    """Train what the model, which gave these `logits`, is compared with on the same rows: it shows its worth."""
    device, shards = torch.device(config.device), held_out_shards(data)
    if not quiet:
        say("training a logistic regression for comparison")
    with alone():  # Of a group, only the first worker does this.
        linear = train_linear(parse_model("lr", {}), data, device, config.train.seed).model
        references = {LOGISTIC: {split: predict(linear, shard, device) for split, shard in shards.items()}}
    if trees.is_installed():
        if not quiet:
            say("training LightGBM for comparison")
        tables = out / "reference" / "lightgbm"
        write_tree_logits(str(data.path), str(tables), config.threads)
        references[TREES] = held_out_logits(tables, data)
    return {
        name: compare_with_reference(logits, reference, data, config.negative_rate)
        for name, reference in references.items()
    }


def _calibrate_and_measure(
    config: RunConfig, model: nn.Module, data: PreparedData, device: torch.device
) -> tuple[Calibration, Metrics]:
    """Calibrate on the validation rows, then measure on all held-out ones."""
    shards = held_out_shards(data)
    predictions = {
        split: undo_sampling(predict(model, shard, device), shard, config.negative_rate)
        for split, shard in shards.items()
    }
    calibration = fitting(config.calibration)(data.valid.labels, *predictions["valid"])
    figures = {
        split: evaluate(
            shards[split].labels,
            logits,
            calibration,
            weights=weights,
            groups=shards[split].groups,
            reliability=True,
        )
        for split, (logits, weights) in predictions.items()
    }
    return calibration, Metrics(**figures)


def _measure_dial(
    config: RunConfig,
    model: nn.Module,
    routes: tuple[Route, ...],
    calibration: Calibration,
    data: PreparedData,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return every setting's calibration and quality on the validation rows; `calibration` is the full setting's."""
    depths = config.model_config.train_depths if isinstance(config.model_config, RecapConfig) else ()
    settings = measured_settings(len(routes), depths)
    return measure_settings(
        model,
        routes,
        settings,
        data.valid,
        device,
        calibrations={settings[0]: calibration},
        kind=config.calibration,
        negative_rate=config.negative_rate,
    )


def _on(model: nn.Module, routes: tuple[Route, ...]) -> nn.Module:
    """Return the model on the mean of `routes`; a model without routes as it is."""
    return Routed(model, routes) if isinstance(model, Recap) else model


def _route_gain(
    config: RunConfig,
    model: nn.Module,
    candidates: tuple[Route, ...],
    data: PreparedData,
    device: torch.device,
) -> RouteGain | None:
    """Compare the mean of the candidates with the first of them on validation; None where there is no choice."""
    if config.routes is not None or len(candidates) < 2 or not isinstance(model, Recap):
        return None
    if not metrics.are_comparable(data.valid.labels):
        return RouteGain(routes=len(candidates), auc=0.0, standard_error=0.0, shipped=1)
    logits_NK, weights = undo_sampling(
        predict_routes(model, data.valid, candidates, device), data.valid, config.negative_rate
    )
    labels = data.valid.labels
    gain = metrics.auc_difference(labels, logits_NK.mean(axis=1), logits_NK[:, 0], weights)
    is_beyond_chance = gain.difference > CHANCE * gain.standard_error
    return RouteGain(
        routes=len(candidates),
        auc=gain.difference,
        standard_error=gain.standard_error,
        shipped=len(candidates) if is_beyond_chance else 1,
    )


def choose_routes(
    model: nn.Module,
    count: int,
    choice: RouteChoice,
    data: PreparedData,
    device: torch.device,
    *,
    negative_rate: float,
) -> tuple[Route, ...]:
    """Return the routes to ship; none for a model without routes.

    Random routes are the same in all runs of a shape, so that runs can be compared route by route.
    """
    if not isinstance(model, Recap):
        return ()
    if choice == "random":
        return tuple(random_routes(model.config, count, ROUTE_SEED))
    if choice == "late":
        return tuple(late_routes(model.config, count))
    candidates = late_routes(model.config, GREEDY_CANDIDATES * count)
    logits_NK = predict_routes(model, data.valid, candidates, device)
    logits_NK, weights = undo_sampling(logits_NK, data.valid, negative_rate)
    chosen = greedy_choice(data.valid.labels, logits_NK, count, weights)
    return tuple(candidates[index] for index in chosen)


def epoch_seconds(config: RunConfig, data: PreparedData) -> float:
    """Return how long an epoch of a run takes on this machine, measured over a few of its steps."""
    torch.set_num_threads(config.threads)
    trainer = Trainer(config.model, config.model_config, config.train, data, torch.device(config.device))
    trainer.step()
    steps = min(TIMED_STEPS, trainer.steps_per_epoch)
    started = time.monotonic()
    for _ in range(steps):
        trainer.step()
    return (time.monotonic() - started) / steps * trainer.steps_per_epoch


def _write_history(path: Path, history: list[Epoch]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Epoch.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(epoch.model_dump() for epoch in history)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())
