"""A run: one training from one seed, then calibration, evaluation and the artifact, in one resumable directory."""

import csv
import io
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from recap_ctr import environment, metrics
from recap_ctr.artifact import MANIFEST, write_artifact
from recap_ctr.calibrate import Calibration, fit_affine, fit_isotonic, negative_rate_shift
from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.encode import Layout
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.distil import teacher_targets
from recap_ctr.evaluate import evaluate, sampling_weights
from recap_ctr.logits import LogitTable
from recap_ctr.models import count_parameters, parse_model
from recap_ctr.predict import predict
from recap_ctr.progress import say
from recap_ctr.storage import atomic_file, claim, locked, read_json, write_json
from recap_ctr.train import Epoch, train

WIDE = 256  # numbers a row, from which on a step's matrix products are worth dividing
REPORT, HISTORY, ARTIFACT = "report.json", "history.csv", "artifact"
# Logistic regression only needs to converge; a larger step than a network's gets it there in a few epochs.
REFERENCE = TrainConfig(learning_rate=1e-2, l2=1e-6, update="fast", max_epochs=10)


def default_threads(config: Frozen, layout: Layout) -> int:
    """All cores for wide models, one for narrow ones, which more threads only slow down (docs/decisions/0004)."""
    return environment.num_cores() if layout.num_fields * getattr(config, "dim", 1) >= WIDE else 1


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run's outcome, beside the data."""

    model: str
    model_config: Frozen
    train: TrainConfig
    calibration: Literal["affine", "isotonic"] = "affine"
    negative_rate: float = 1.0
    """The share of negatives that was kept when the log was sampled."""
    reference: bool = True
    """Whether to train a logistic regression for comparison."""
    threads: int = 1
    device: str = "cpu"
    teachers: tuple[Path, ...] = ()
    """Logit tables over the training rows; with them the run is a student."""

    def inputs(self, data: PreparedData) -> dict[str, Any]:
        return {
            "data": data.fingerprint,
            "model": {"name": self.model, "config": self.model_config.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "calibration": self.calibration,
            "negative_rate": self.negative_rate,
            "reference": self.reference,
            "threads": self.threads,
            "device": self.device,
            "teachers": [LogitTable(path).checksum for path in self.teachers],
        }


def run(
    config: RunConfig, data: PreparedData, out: Path, *, force: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Do the run, or finish it, or read the report of a finished one."""
    torch.set_num_threads(config.threads)
    shift = negative_rate_shift(config.negative_rate)
    done = claim(out, config.inputs(data), finished=REPORT, force=force)
    if done and (out / ARTIFACT / MANIFEST).is_file():  # else it was moved away, and is packed anew
        if not quiet:
            say(f"{out} is finished; nothing to do")
        return read_report(out)
    with locked(out):
        device = torch.device(config.device)
        targets = teacher_targets(config.teachers, data) if config.teachers else None
        trained = train(
            config.model,
            config.model_config,
            config.train,
            data,
            out,
            device=device,
            targets=targets,
            quiet=quiet,
        )
        started = time.monotonic()
        raw = {name: predict(trained.model, shard, device) + shift for name, shard in _held_out(data).items()}
        weights = sampling_weights(data.valid, config.negative_rate)
        fit = fit_affine if config.calibration == "affine" else fit_isotonic
        calibration: Calibration = fit(data.valid.labels, raw["valid"], weights)
        found = {
            name: evaluate(
                shard.labels, raw[name], calibration, weights=sampling_weights(shard, config.negative_rate),
                groups=shard.groups, reliability=True,
            )
            for name, shard in _held_out(data).items()
        }  # fmt: skip
        reference = _reference(config, data, out, quiet) if config.reference else None
        about = {"name": data.name, "fingerprint": data.fingerprint, "rows": len(data.train)}
        brief = {split: _brief(figures) for split, figures in found.items()}
        write_artifact(
            out / ARTIFACT,
            name=config.model,
            config=config.model_config,
            weights=dict(trained.model.state_dict()),
            encoder=data.encoder,
            calibration=calibration,
            shift=shift,
            metrics=brief,
            data=about,
            training={**config.train.model_dump(mode="json"), "best_epoch": trained.best_epoch},
        )
        _write_history(out / HISTORY, trained.history)
        splits = {
            name: {k: v for k, v in split.items() if k != "oov"}
            for name, split in data.manifest["splits"].items()
        }
        report = {
            "kind": "report",
            "format": 1,
            **config.inputs(data),
            "data": {"name": data.name, "fingerprint": data.fingerprint, "splits": splits},
            "parameters": count_parameters(config.model, config.model_config, data.layout),
            "calibrated_by": calibration.to_dict()
            if config.calibration == "affine"
            else {"kind": "isotonic"},
            "metrics": found,
            "reference": reference,
            "best_epoch": trained.best_epoch,
            "history": [asdict(line) for line in trained.history],
            "seconds": {"train": trained.seconds, "evaluate": time.monotonic() - started},
            "versions": environment.versions(),
            "machine": environment.machine(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        write_json(out / REPORT, report)
    return report


def read_report(out: Path) -> dict[str, Any]:
    report = read_json(out / REPORT)
    assert isinstance(report, dict)
    return report


def _held_out(data: PreparedData) -> dict[str, Shard]:
    return {"valid": data.valid, "test": data.test} if len(data.test) else {"valid": data.valid}


def _reference(config: RunConfig, data: PreparedData, out: Path, quiet: bool) -> dict[str, Any]:
    """Logistic regression on the same rows: what the interactions are worth."""
    directory = out / "reference"
    directory.mkdir(exist_ok=True)
    settings = REFERENCE.model_copy(update={"seed": config.train.seed})
    if not quiet:
        say("training logistic regression for reference")
    device = torch.device(config.device)
    trained = train("lr", parse_model("lr", {}), settings, data, directory, device=device, quiet=True)
    found = {}
    shift = negative_rate_shift(config.negative_rate)
    for name, shard in _held_out(data).items():
        logits, weights = (
            predict(trained.model, shard, device) + shift,
            sampling_weights(shard, config.negative_rate),
        )
        found[name] = {
            "auc": metrics.auc(shard.labels, logits, weights),
            "logloss": metrics.logloss(shard.labels, logits, weights),
        }
    return {"logistic regression": found}


def _brief(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key != "reliability"}


def _write_history(path: Path, history: list[Epoch]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(history[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in history)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())
