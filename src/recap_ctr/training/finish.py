"""From trained weights to a finished run: choose routes, calibrate, measure, pack the artifact and write the report."""

import csv
import io
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recap_ctr.axes.logits import table_checksum
from recap_ctr.axes.predict import predict
from recap_ctr.axes.routes import Routed
from recap_ctr.data.levels import levels_of
from recap_ctr.data.quality import field_quality, repeated_rows
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.evaluate import Metrics, evaluate
from recap_ctr.evaluation.levels import calibrated
from recap_ctr.evaluation.sampling import negative_rate_shift, undo_sampling
from recap_ctr.evaluation.slices import Breakdown
from recap_ctr.inference.about import weak_slices
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.setting import measured_settings
from recap_ctr.jobs import machine
from recap_ctr.jobs.progress import say
from recap_ctr.models.blend import Blend
from recap_ctr.models.boosted import Boosted
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.rates import Rates
from recap_ctr.models.recap import Recap, RecapConfig, Route
from recap_ctr.nn.group import alone, current_group
from recap_ctr.nn.sharded import give_rows, whole_weights
from recap_ctr.storage.files import atomic_file
from recap_ctr.training import trees
from recap_ctr.training.beside import put_beside
from recap_ctr.training.breakdown import held_out_breakdown
from recap_ctr.training.config import ARTIFACT, HISTORY, RunConfig
from recap_ctr.training.linear import train_linear
from recap_ctr.training.loop import Trained
from recap_ctr.training.pool import Recombination
from recap_ctr.training.references import (
    LOGISTIC,
    TREES,
    compare_with_reference,
    held_out_logits,
    write_tree_logits,
)
from recap_ctr.training.report import (
    DataSummary,
    Epoch,
    ModelSummary,
    Reference,
    RouteGain,
    RouteSummary,
    RunReport,
    Seconds,
    SplitCount,
    write_report,
)
from recap_ctr.training.routes import MAX_ROUTES, choose_routes, route_gain

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Shipped:
    """The routes that ship, what was measured to choose them, and the logits for each held-out split."""

    routes: tuple[Route, ...]
    gain: RouteGain | None
    calibration: Calibration
    metrics: Metrics
    metrics_by_routes: dict[str, Metrics]
    logits: dict[str, Logits]


def finish(config: RunConfig, data: PreparedData, out: Path, trained: Trained, *, quiet: bool) -> RunReport:
    """Choose routes, calibrate, measure, pack the artifact and write the report of a trained model.

    In a group, only the first worker writes files and compares with references; the reports of the other workers lack
    both.
    """
    started = time.monotonic()
    device = torch.device(config.device)
    model, beside = trained.model, trained.parts
    if config.beside and isinstance(model, Recap):
        model, beside = put_beside(model, config.beside, data, device)
        if not quiet:
            say(beside.sentence)
    if isinstance(model, Recap | Blend | Rates | Boosted):  # What ships may be more than what was configured.
        config = replace(config, model_config=model.config)
    shipped = _choose_and_measure(config, model, data, device)
    calibration = shipped.calibration
    if shipped.gain is not None and not quiet:
        say(shipped.gain.sentence)
    breakdown = held_out_breakdown(shipped.logits, data, calibration, config.negative_rate, config.slices)
    _pack(config, data, out, trained, model, shipped, breakdown)
    is_first = current_group().is_first
    report = RunReport(
        kind="report",
        format=1,
        **_origin(config, data),
        reference=_references(config, shipped.logits, data, out, quiet)
        if config.train_baseline and is_first
        else None,
        calibrated_by=calibration.to_dict() if config.calibration == "affine" else {"kind": "isotonic"},
        metrics=shipped.metrics,
        metrics_by_routes=shipped.metrics_by_routes,
        **({} if shipped.gain is None else {"route_gain": shipped.gain}),
        **({} if beside is None else {"beside": beside}),
        **({} if trained.strength is None else {"strength": trained.strength}),
        fields=field_quality(data) if config.report_fields and is_first else None,
        repeated=repeated_rows(data) if config.report_fields and is_first else None,
        breakdown=breakdown,
        **({} if config.slices is None else {"slices": list(config.slices)}),
        best_epoch=trained.best_epoch,
        **({} if trained.finished else {"cut": True}),
        history=trained.history,
        seconds=Seconds(train=trained.seconds, evaluate=time.monotonic() - started),
        versions=machine.versions(),
        machine=machine.machine(),
        date=datetime.now(UTC).date().isoformat(),
    )
    if is_first:
        write_report(out, report)
    return report


def _choose_and_measure(
    config: RunConfig, model: nn.Module, data: PreparedData, device: torch.device
) -> _Shipped:
    """Choose the routes to ship, then calibrate and measure them, one route, and all that were considered."""
    count = config.routes or MAX_ROUTES
    candidates = choose_routes(
        model, count, config.route_choice, data, device, negative_rate=config.negative_rate
    )
    gain = route_gain(config, model, candidates, data, device)
    routes = candidates if gain is None else candidates[: gain.shipped]
    models = {1: model, len(candidates): _on(model, candidates)} if candidates else {}
    models[len(routes)] = _on(model, routes)
    measured = {
        count: _calibrate_and_measure(config, routed, data, device) for count, routed in models.items()
    }
    calibration, figures, logits = measured[len(routes)]
    by_routes = {
        str(count): entry.without_reliability() for count, (_, entry, _) in measured.items() if count
    }
    return _Shipped(routes, gain, calibration, figures, by_routes, logits)


def _pack(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    trained: Trained,
    model: nn.Module,
    shipped: _Shipped,
    breakdown: Breakdown,
) -> None:
    """Write the artifact and the history; workers other than the first give it their rows."""
    dial = _measure_dial(
        config, model, shipped.routes, shipped.calibration, data, torch.device(config.device)
    )
    weights = whole_weights(model)
    if not current_group().is_first:
        give_rows(weights)
        return
    metrics = shipped.metrics.without_reliability().to_json()
    metrics[breakdown.split] |= weak_slices(breakdown)
    write_artifact(
        out / ARTIFACT,
        name=config.model,
        config=config.model_config,
        weights=weights,
        encoder=data.stored_fields,
        calibration=shipped.calibration,
        shift=negative_rate_shift(config.negative_rate),
        metrics=metrics,
        dial=dial,
        routes=shipped.routes,
        data=_about_data(data),
        training={**config.train.model_dump(mode="json"), "best_epoch": trained.best_epoch},
        profile=data.profile,
    )
    _write_history(out / HISTORY, trained.history)


def _about_data(data: PreparedData) -> dict[str, Any]:
    """Return what an artifact says of the rows that its model was trained on."""
    return {
        "name": data.name,
        "fingerprint": data.fingerprint,
        "rows": len(data.train),
        "clicks": data.manifest["splits"]["train"]["positives"],
        **({} if data.split is None else {"split": data.split}),
    }


def _origin(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    """Return the part of a report that says what decided the run: the data and the config."""
    splits = {
        name: SplitCount(rows=split["rows"], positives=split["positives"])
        for name, split in data.manifest["splits"].items()
    }
    return {
        "data": DataSummary(
            name=data.name,
            fingerprint=data.fingerprint,
            splits=splits,
            split=data.split,
            **({} if data.split_note is None else {"split_note": data.split_note}),
        ),
        "model": ModelSummary(name=config.model, config=config.model_config.model_dump(mode="json")),
        "train": config.train,
        "threads": config.threads,
        "device": config.device,
        "teachers": [table_checksum(path) for path in config.teachers],
        **(
            {"pool": Recombination(data, config.train.recombined).summary(config.pool)} if config.pool else {}
        ),
        "calibration": config.calibration,
        "negative_rate": config.negative_rate,
        "routes": RouteSummary(count=config.routes, choice=config.route_choice),
        "parameters": count_parameters(config.model, config.model_config, data.layout),
    }


def _references(
    config: RunConfig, logits: dict[str, Logits], data: PreparedData, out: Path, quiet: bool
) -> dict[str, dict[str, Reference]]:
    """Train the references on the same rows, and compare them with the model, which gave these `logits`."""
    device, shards = torch.device(config.device), held_out_shards(data)
    if not quiet:
        say("training a logistic regression for comparison")
    with alone():  # Of a group, only the first worker does this.
        linear = train_linear(parse_model("lr", {}), data, device, config.train.seed, quiet=quiet).model
        references = {LOGISTIC: {split: predict(linear, shard, device) for split, shard in shards.items()}}
    if trees.is_installed():
        if not quiet:
            say("training LightGBM for comparison")
        tables = out / "reference" / "lightgbm"
        write_tree_logits(str(data.path), str(tables), config.threads, quiet=quiet)
        references[TREES] = held_out_logits(tables, data)
    return {
        name: compare_with_reference(
            logits, reference, data, config.negative_rate, calibration=config.calibration
        )
        for name, reference in references.items()
    }


def _calibrate_and_measure(
    config: RunConfig, model: nn.Module, data: PreparedData, device: torch.device
) -> tuple[Calibration, Metrics, dict[str, Logits]]:
    """Calibrate on the validation rows, then measure on all held-out ones; return their logits, too."""
    shards = held_out_shards(data)
    logits_of = {split: predict(model, shard, device) for split, shard in shards.items()}
    predictions = {
        split: undo_sampling(logits_of[split], shard, config.negative_rate) for split, shard in shards.items()
    }
    levels = levels_of(data, [data.valid], config.negative_rate)
    calibration = calibrated(config.calibration, levels, data.valid.labels, *predictions["valid"])
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
    return calibration, Metrics(**figures), logits_of


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
        levels=levels_of(data, [data.valid], config.negative_rate),
    )


def _on(model: nn.Module, routes: tuple[Route, ...]) -> nn.Module:
    """Return the model on the mean of `routes`, or unchanged if it has no routes."""
    return Routed(model, routes) if isinstance(model, Recap) else model


def _write_history(path: Path, history: list[Epoch]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Epoch.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(epoch.model_dump() for epoch in history)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())
