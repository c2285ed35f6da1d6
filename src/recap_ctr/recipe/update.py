"""Train a shipped model further on later rows, with vocabularies that grow, and ship the result only if it is better.

New rows are encoded with the shipped model's vocabularies, to which the values are added that have become frequent. The
newest fifth of them is held out. The rest trains the model further (`retrain`). The newest rows then calibrate it and
judge it (`gate`); they are trained on at the next update.
"""

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recap_ctr.axes.predict import predict
from recap_ctr.config import Record, parse
from recap_ctr.data.grow import Base, changes
from recap_ctr.data.moments import DAY
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.data.source import Source
from recap_ctr.data.split import Split
from recap_ctr.data.table import RawTable, open_source
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fitting
from recap_ctr.evaluation.evaluate import Metrics, evaluate
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.inference.delta import write_delta
from recap_ctr.inference.manifest import MANIFEST, TRAINING_STATE, WEIGHTS
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.setting import measured_settings
from recap_ctr.inference.torch_backend import PackedModel, load_artifact
from recap_ctr.jobs.progress import say
from recap_ctr.models.recap import RecapConfig
from recap_ctr.nn.weights import to_arrays
from recap_ctr.recipe.gate import FieldShares, GateLimits, NewestRows, Ranking, Verdict, judge
from recap_ctr.recipe.retrain import Retraining, UpdateConfig
from recap_ctr.recipe.state import (
    TrainingState,
    empty_bucket_shares,
    empty_row_shares,
    read_state,
    state_directory,
    unknown_shares,
    write_state,
)
from recap_ctr.storage.claims import INPUTS, claim
from recap_ctr.storage.files import atomic_directory, copy_file, read_json, remove_directory
from recap_ctr.storage.hashes import sha256
from recap_ctr.storage.locks import locked
from recap_ctr.training.config import ARTIFACT

NEWEST = (4, 1, 0)  # Rows that train, and newest ones that judge.
FINISHED = "finished"  # No update has such a file: a finished one leaves no working directory.


class UpdateReport(Record):
    """What an update did, and what the gate said."""

    shipped: bool
    rows: dict[str, int]
    """Rows that were trained on for the first time, that were replayed, and that judged."""
    added: dict[str, int]
    """Values that got a vector, by field."""
    forgotten: dict[str, int]
    """Values that lost their vectors, by field."""
    gate: Verdict
    seconds: float


@dataclass(frozen=True)
class UpdateResult:
    """A finished update: the new artifact, if the gate let it pass, and the report."""

    out: Path
    report: UpdateReport

    @property
    def shipped(self) -> bool:
        """Return whether there is a new artifact."""
        return self.report.shipped


def update(
    artifact: str | Path,
    rows: RawTable,
    *,
    out: str | Path,
    settings: UpdateConfig | Mapping[str, Any] | None = None,
    gate: GateLimits | Mapping[str, Any] | None = None,
    delta: str | Path | None = None,
    threads: int = 1,
    force: bool = False,
    quiet: bool = True,
) -> UpdateResult:
    """Train a shipped model further on new rows, and write the result to `out` if it is better on the newest of them.

    `artifact` is an artifact, or the fit that holds one. If the artifact holds the training state that `fit(...,
    keep_state=True)` keeps, the counts of rare values continue, earlier rows are replayed, and teachers go on teaching.
    Values keep their ids, and values that have become frequent are added. `settings` say how to train, `gate` what the
    result must keep to. If the gate refuses it, nothing is written, and the result says why. What changed is also
    written to `delta`, if given. After an interruption, the same call goes on.
    """
    config = settings if isinstance(settings, UpdateConfig) else parse(UpdateConfig, settings or {}, "update")
    limits = gate if isinstance(gate, GateLimits) else parse(GateLimits, gate or {}, "gate")
    target, started = Path(out), time.monotonic()
    work = target.with_name(f".{target.name}.update")
    outputs = (target, *([] if delta is None else [Path(delta)]))
    taken = () if force else tuple(path for path in outputs if path.exists())
    for path in taken:
        if not _is_result_of(work, path):
            raise _exists(path)
    torch.set_num_threads(threads)
    shipped = load_artifact(Path(artifact))
    source = open_source(rows, shipped.encoder.schema.columns, shipped.encoder.schema.separator)
    kept = state_directory(Path(artifact)) / MANIFEST
    inputs = {
        "artifact": shipped.manifest["files"][WEIGHTS]["sha256"],
        "state": sha256(kept) if kept.is_file() else None,
        "rows": [{"size": file.size, "sha256": file.sha256} for file in source.files()],
        "settings": config.model_dump(mode="json"),
        "threads": threads,
    }
    if taken and read_json(work / INPUTS) != inputs:
        raise _exists(taken[0])
    claim(work, inputs, finished=FINISHED, force=True)
    with locked(work):
        state = read_state(Path(artifact), shipped.encoder)
        if state is None and not quiet:
            say("no training state: rare values are counted from zero, and no earlier rows are replayed")
        if shipped.graphs and not quiet:
            say("exported graphs are not renewed: run recap export after the update")
        stages = _Update(shipped, state or TrainingState(), config, limits, work, quiet=quiet)
        report = stages.run(source, target, None if delta is None else Path(delta), started)
        remove_directory(work)
    return UpdateResult(target, report)


def _is_result_of(work: Path, path: Path) -> bool:
    """Return whether the interrupted update in `work` wrote this artifact or delta, and so may write it again."""
    manifests = [directory / MANIFEST for directory in (work / ARTIFACT, path)]
    if not (work / INPUTS).is_file() or not all(file.is_file() for file in manifests):
        return False
    artifact, written = map(read_json, manifests)
    return isinstance(written, dict) and artifact["files"] in (
        written.get("files"),
        written.get("target", {}).get("files"),
    )


def _exists(path: Path) -> InputError:
    return InputError(f"{path} exists", fix="choose another --out, or replace it with --force")


class _Update:
    """The stages of an update in a directory: rows, training, gate, and what ships."""

    def __init__(
        self,
        shipped: PackedModel,
        state: TrainingState,
        config: UpdateConfig,
        limits: GateLimits,
        work: Path,
        *,
        quiet: bool,
    ) -> None:
        self.shipped, self.state, self.config, self.limits = shipped, state, config, limits
        self.work, self.quiet = work, quiet
        self.device = torch.device("cpu")
        self.negative_rate = math.exp(shipped.shift)

    def run(self, source: Source, out: Path, delta: Path | None, started: float) -> UpdateReport:
        """Do all stages; write the artifact to `out`, and what changed to `delta`, if the gate lets it pass."""
        data = self._prepare(source)
        retraining = Retraining(self.shipped, self.state, self.config, data, self.work, quiet=self.quiet)
        model = retraining.run()
        verdict = self._judge(retraining, model)
        added, forgotten = changes(self.shipped.encoder, data.encoder)
        report = UpdateReport(
            shipped=verdict.passes,
            rows={
                "trained": len(retraining.fresh),
                "replayed": len(retraining.epoch) - self.config.passes * len(retraining.fresh),
                "newest": len(data.valid),
            },
            added=added,
            forgotten=forgotten,
            gate=verdict,
            seconds=time.monotonic() - started,
        )
        if verdict.passes:
            self._write(retraining, model, report)
            if delta is not None:
                write_delta(self.shipped.path, self.work / ARTIFACT, delta)
            with atomic_directory(out) as partial:
                shutil.copytree(self.work / ARTIFACT, partial, dirs_exist_ok=True, copy_function=copy_file)
        return report

    def _prepare(self, source: Source) -> PreparedData:
        """Encode the new rows with the shipped vocabularies, which grow."""
        schema = self.shipped.encoder.schema
        days = self.config.forget_after
        if days is not None and self.state.last_V is None:
            raise InputError(
                "--forget-after needs to know when each value was last seen",
                fix="name a time column in the schema, and fit with --keep-state",
            )
        base = Base(
            self.shipped.manifest["files"][WEIGHTS]["sha256"],
            self.shipped.encoder,
            self.state.rare,
            self.state.last_V,
            None if days is None else days * DAY,
            self.shipped.profile,
        )
        rule = Split(kind="time" if schema.time else "random", ratio=NEWEST)
        preparation = Preparation(schema, {"all": source}, rule, base=base)
        return write_prepared_data(preparation, self.work / "rows", quiet=self.quiet)[0]

    def _judge(self, retraining: Retraining, model: nn.Module) -> Verdict:
        """Compare the trained model with the shipped one on the newest rows."""
        valid = retraining.data.valid
        as_shipped = replace(valid, ids=retraining.shipped_ids_G[np.asarray(valid.ids)])
        updated, weights = self._logits(retraining.routed(model), valid)
        shipped, _ = self._logits(self.shipped.model, as_shipped)
        return judge(
            NewestRows(np.asarray(valid.labels), weights, updated, shipped),
            self.shipped.calibration,
            limits=self.limits,
            fields=self._field_shares(retraining, as_shipped),
            ranking=self._ranking(retraining, shipped),
        )

    def _field_shares(self, retraining: Retraining, newest: Shard) -> dict[str, FieldShares]:
        """Return the shares of each field in the newest rows and, as far as they are known, when the model shipped."""
        encoder, profile = self.shipped.encoder, self.shipped.profile
        now = unknown_shares(newest.ids, encoder.layout)
        if self.state.seen_V is not None:
            now |= empty_bucket_shares(newest.ids, encoder, self.state.seen_V)
        before = {**now, **self.state.unknown}
        counts = retraining.data.manifest["splits"]["valid"]["missing"]
        missing = {name: counts[name] / len(newest) for name in now}
        missing |= empty_row_shares(newest.ids, encoder.layout)
        if profile is None:
            missing_before = missing
        else:
            rows = max(sum(profile.rows), 1)
            missing_before = {field.name: sum(field.missing) / rows for field in profile.fields}
        return {
            name: FieldShares(before[name], now[name], missing_before[name], missing[name]) for name in now
        }

    def _ranking(self, retraining: Retraining, newest_logits: npt.NDArray[np.float64]) -> Ranking:
        """Return how the shipped model ranks all new rows; its logits of the newest ones are known."""
        train, valid = retraining.data.train, retraining.data.valid
        as_shipped = replace(train, ids=retraining.shipped_ids_G[np.asarray(train.ids)])
        logits = np.concatenate([self._logits(self.shipped.model, as_shipped)[0], newest_logits])
        labels = np.concatenate([train.labels, valid.labels])
        return Ranking(
            metrics.auc(labels, logits),
            metrics.auc_error(labels, logits) or 0.0,
            self.shipped.metrics.held_out.raw.auc,
        )

    def _logits(
        self, model: nn.Module, shard: Shard
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[Any] | None]:
        return undo_sampling(predict(model, shard, self.device).astype(np.float64), shard, self.negative_rate)

    def _write(self, retraining: Retraining, model: nn.Module, report: UpdateReport) -> None:
        """Calibrate the model on the newest rows; write its artifact and training state to the working directory."""
        directory, recorded = self.work / ARTIFACT, self.shipped.manifest
        config, routes, valid = model.config, self.shipped.routes, retraining.data.valid
        kind = str(self.shipped.calibration.to_dict()["kind"])
        logits, weights = self._logits(retraining.routed(model), valid)
        calibration = fitting(kind)(valid.labels, logits, weights)
        figures = evaluate(valid.labels, logits, calibration, weights=weights, groups=valid.groups)
        settings = measured_settings(
            len(routes), config.train_depths if isinstance(config, RecapConfig) else ()
        )
        write_artifact(
            directory,
            name=self.shipped.name,
            config=config,  # type: ignore[arg-type]
            weights=to_arrays(model.state_dict()),
            encoder=retraining.data.encoder,
            calibration=calibration,
            shift=self.shipped.shift,
            metrics=Metrics(valid=figures).to_json(),
            dial=measure_settings(
                model,
                routes,
                settings,
                valid,
                self.device,
                calibrations={settings[0]: calibration},
                kind=kind,
                negative_rate=self.negative_rate,
            ),
            routes=routes,
            profile=retraining.data.profile,
            data={
                **recorded["data"],
                "fingerprint": retraining.data.fingerprint,
                **self._totals(retraining.fresh.shard),
            },
            training={
                **recorded["training"],
                "updates": self.state.updates + 1,
                "gate": report.gate.to_json(),
            },
        )
        checksum = read_json(directory / MANIFEST)["files"][WEIGHTS]["sha256"]
        write_state(directory / TRAINING_STATE, retraining.next_state(), checksum)

    def _totals(self, rows: Shard) -> dict[str, int]:
        """Return the training rows so far, with these new ones, and their clicks if those of before are known."""
        data = self.shipped.manifest["data"]
        clicks = {"clicks": data["clicks"] + int(np.sum(rows.labels))} if "clicks" in data else {}
        return {"rows": data["rows"] + len(rows), **clicks}
