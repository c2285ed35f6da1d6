"""A run: one training from one seed, then calibration, evaluation and the artifact, in one resumable directory.

And several of them side by side, on the machine's cores.
"""

import csv
import io
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from recap_ctr.axes.logits import Estimator, LogitTable
from recap_ctr.axes.predict import predict, predict_routes, write_logits
from recap_ctr.axes.routes import Routed, greedy_choice, late_routes, random_routes
from recap_ctr.axes.teachers import teacher_targets
from recap_ctr.config import Frozen, TrainConfig, parse, read_toml
from recap_ctr.data.layout import Layout
from recap_ctr.data.quality import field_quality
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration, fitting
from recap_ctr.evaluation.evaluate import evaluate
from recap_ctr.evaluation.sampling import negative_rate_shift, undo_sampling
from recap_ctr.inference.artifact import MANIFEST, dial_settings, setting_quality, write_artifact
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs import machine as environment
from recap_ctr.jobs.local import Job, run_jobs
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from recap_ctr.models.recap import Recap, RecapConfig, Route
from recap_ctr.nn.weights import load_tensors, to_arrays
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import atomic_file, read_json, write_json
from recap_ctr.storage.locks import locked
from recap_ctr.training.loop import Epoch, Trainer, checkpoints, train

WIDE = 256  # numbers a row, from which on a step's matrix products are worth dividing
REPORT, HISTORY, ARTIFACT, LOGITS = "report.json", "history.csv", "artifact", "logits"
Per = Literal["model", "route", "checkpoint", "grid"]
RouteChoice = Literal["late", "random", "greedy"]
TIMED_STEPS = 16
ROUTE_SEED = 1
GREEDY_CANDIDATES = 4  # for each route that is chosen from them
# Logistic regression only needs to converge; a larger step than a network's gets it there in a few epochs.
REFERENCE = TrainConfig(learning_rate=1e-2, l2=1e-6, update="fast", max_epochs=10)


@dataclass(frozen=True)
class RunSettings:
    """What a TOML says about a run: a model by name with its settings, and how it is trained; still unchecked."""

    model: str
    model_settings: dict[str, Any]
    train: dict[str, Any]


def read_settings(path: Path, model: str = "fcn") -> RunSettings:
    """The tables [model] and [train]; the former names the model, unless it is the one that is expected."""
    tables = read_toml(path)
    for key, table in tables.items():
        if key not in ("model", "train") or not isinstance(table, dict):
            raise InputError(f"{path}: {key} is no table known here; known are [model] and [train]")
    settings = dict(tables.get("model", {}))
    return RunSettings(str(settings.pop("name", model)), settings, tables.get("train", {}))


def settings_for(model: str | None, path: Path | None) -> RunSettings:
    """Those of a file, if one is given; of its [model], only if no other model is."""
    expected = model or "fcn"
    settings = RunSettings(expected, {}, {}) if path is None else read_settings(path, expected)
    return settings if model in (None, settings.model) else replace(settings, model=model, model_settings={})


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
    """Whether to stand alone: with a logistic regression for comparison, and what there is to know of the fields."""
    threads: int = 1
    device: str = "cpu"
    teachers: tuple[Path, ...] = ()
    """Logit tables over the training rows; with them the run is a student."""
    routes: int = 1
    """K of Eq. 15: how many routes the artifact averages; one is the home route, unless it is chosen greedily."""
    route_choice: RouteChoice = "late"
    """Routes that share all but their last steps, any, or those of the former that do best on validation."""

    def __post_init__(self) -> None:
        if self.routes < 1:
            raise InputError(f"{self.routes} routes: at least one is needed")
        if self.routes > 1 and not isinstance(self.model_config, RecapConfig):
            raise InputError(f"{self.model} has no routes", fix="leave out --routes, or train recap")

    def with_(
        self,
        *,
        seed: int,
        teachers: tuple[Path, ...] = (),
        routes: int = 1,
        route_choice: RouteChoice = "late",
    ) -> "RunConfig":
        """The same run from another seed, perhaps as a student, perhaps on routes."""
        train = self.train.model_copy(update={"seed": seed})
        return replace(self, train=train, teachers=teachers, routes=routes, route_choice=route_choice)

    def to_json(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {"model_config": self.model_config.model_dump(mode="json")}
        plain |= {"train": self.train.model_dump(mode="json")}
        return own | plain | {"teachers": [str(path) for path in self.teachers]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        parsed = {
            "model_config": parse_model(values["model"], values["model_config"]),
            "train": parse(TrainConfig, values["train"], "run"),
            "teachers": tuple(Path(path) for path in values["teachers"]),
        }
        return cls(**{**values, **parsed})

    def training(self, data: PreparedData) -> dict[str, Any]:
        """What the weights depend on: it names a run's directory."""
        return {
            "data": data.fingerprint,
            "model": {"name": self.model, "config": self.model_config.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "threads": self.threads,
            "device": self.device,
            "teachers": [LogitTable(path).checksum for path in self.teachers],
        }

    def finishing(self) -> dict[str, Any]:
        """What only the report and the artifact depend on: where it changes, these alone are made anew."""
        return {
            "calibration": self.calibration,
            "negative_rate": self.negative_rate,
            "reference": self.reference,
            "routes": {"count": self.routes, "choice": self.route_choice},
        }

    def inputs(self, data: PreparedData) -> dict[str, Any]:
        return {**self.training(data), **self.finishing()}

    def without_seed(self, data: PreparedData) -> dict[str, Any]:
        """What trainings that differ in their seed alone have in common."""
        own = self.training(data)
        return {**own, "train": {key: value for key, value in own["train"].items() if key != "seed"}}


def run(
    config: RunConfig, data: PreparedData, out: Path, *, force: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Do the run, or finish it, or read the report of a finished one."""
    torch.set_num_threads(config.threads)
    shift = negative_rate_shift(config.negative_rate)
    done = claim(out, config.training(data), finished=REPORT, force=force)
    if done and is_finished(out, config):
        if not quiet:
            say(f"{out} is finished; nothing to do")
        return read_report(out)
    with locked(out):
        if done:
            if not quiet:
                say(f"{out} is trained; calibrating, measuring and packing it anew")
            _unfinish(out, config)
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
        routes = choose_routes(
            trained.model, config.routes, config.route_choice, data, device, negative_rate=config.negative_rate
        )  # fmt: skip
        shipped = _on_routes(trained.model, routes)
        calibration, found = _assess(config, shipped, data, device)
        by_routes = {str(len(routes)): _briefly(found)} if routes else {}
        if len(routes) > 1:
            by_routes = {"1": _briefly(_assess(config, trained.model, data, device)[1]), **by_routes}
        reference = _reference(config, data, out, quiet) if config.reference else None
        about = {"name": data.name, "fingerprint": data.fingerprint, "rows": len(data.train)}
        write_artifact(
            out / ARTIFACT,
            name=config.model,
            config=config.model_config,
            weights=to_arrays(trained.model.state_dict()),
            encoder=data.encoder,
            calibration=calibration,
            shift=shift,
            metrics=_briefly(found),
            dial=_dial(config, trained.model, routes, calibration, data, device),
            routes=routes,
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
            "metrics_by_routes": by_routes,
            "reference": reference,
            "fields": field_quality(data) if config.reference else None,
            "best_epoch": trained.best_epoch,
            "history": [asdict(line) for line in trained.history],
            "seconds": {"train": trained.seconds, "evaluate": time.monotonic() - started},
            "versions": environment.versions(),
            "machine": environment.machine(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        write_json(out / REPORT, report)
    return report


def is_finished(out: Path, config: RunConfig) -> bool:
    """Whether a trained run has been calibrated, measured and packed as this config has it.

    If its artifact was moved away, it is packed anew.
    """
    if not (out / REPORT).is_file() or not (out / ARTIFACT / MANIFEST).is_file():
        return False
    report = read_report(out)
    known = {**report, "reference": report["reference"] is not None}  # there it is what was found
    return all(known[key] == value for key, value in config.finishing().items())


def _unfinish(out: Path, config: RunConfig) -> None:
    """Back to the trained weights. Logits go too where they are of routes that may become others."""
    known = read_report(out)["routes"]
    if known != config.finishing()["routes"] or config.route_choice == "greedy":
        aside = out / f".{LOGITS}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        if (out / LOGITS).is_dir():
            (out / LOGITS).rename(aside)  # all at once: half a table must not look like one
        shutil.rmtree(aside, ignore_errors=True)
    (out / REPORT).unlink()


def read_report(out: Path) -> dict[str, Any]:
    if not (out / REPORT).is_file():
        raise InputError(
            f"{out} holds no {REPORT}", fix="give a directory that `recap fit` or `recap train` has finished"
        )
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
    for name, shard in _held_out(data).items():
        raw = predict(trained.model, shard, device)
        logits, weights = undo_sampling(raw, shard, config.negative_rate)
        found[name] = {
            "auc": metrics.auc(shard.labels, logits, weights),
            "logloss": metrics.logloss(shard.labels, logits, weights),
        }
    return {"logistic regression": found}


def _briefly(found: dict[str, Any]) -> dict[str, Any]:
    return {
        split: {key: value for key, value in figures.items() if not key.startswith("reliability")}
        for split, figures in found.items()
    }


def _assess(
    config: RunConfig, model: nn.Module, data: PreparedData, device: torch.device
) -> tuple[Calibration, dict[str, Any]]:
    """Calibrate on the validation rows, then measure on all held-out ones."""
    held_out = _held_out(data)
    raw = {
        name: undo_sampling(predict(model, shard, device), shard, config.negative_rate)
        for name, shard in held_out.items()
    }
    calibration = fitting(config.calibration)(data.valid.labels, *raw["valid"])
    found = {
        name: evaluate(
            held_out[name].labels, logits, calibration, weights=weights, groups=held_out[name].groups, reliability=True
        )
        for name, (logits, weights) in raw.items()
    }  # fmt: skip
    return calibration, found


def _dial(
    config: RunConfig,
    model: nn.Module,
    routes: tuple[Route, ...],
    calibration: Calibration,
    data: PreparedData,
    device: torch.device,
) -> list[dict[str, Any]]:
    """How good each setting is on the validation rows, by the calibration of what is shipped."""
    depths = config.model_config.train_depths if isinstance(config.model_config, RecapConfig) else ()
    found = []
    for setting in dial_settings(len(routes), depths):
        dialled = (
            Routed(model, routes[: setting.routes], setting.depth) if isinstance(model, Recap) else model
        )
        raw, weights = undo_sampling(predict(dialled, data.valid, device), data.valid, config.negative_rate)
        found.append(setting_quality(setting, data.valid.labels, calibration.apply(raw), weights))
    return found


def choose_routes(
    model: nn.Module,
    count: int,
    choice: RouteChoice,
    data: PreparedData,
    device: torch.device,
    *,
    negative_rate: float,
) -> tuple[Route, ...]:
    """The routes to ship; none for a model without them.

    Those drawn at random are the same in all runs of a shape, so that one can say what all have in common on a route.
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
    return tuple(candidates[at] for at in greedy_choice(data.valid.labels, logits_NK, count, weights))


def _on_routes(model: nn.Module, routes: tuple[Route, ...]) -> nn.Module:
    return Routed(model, routes) if isinstance(model, Recap) else model


def teach(data: str, config: dict[str, Any], out: str) -> dict[str, Any]:
    """A run, and its logits over all rows as tables beside it; the arguments are plain, for the engine."""
    settings, directory, prepared = RunConfig.from_json(config), Path(out), PreparedData(Path(data))
    report = run(settings, prepared, directory)
    tables = {split: directory / LOGITS / split for split in ("train", *_held_out(prepared))}
    missing = {split: path for split, path in tables.items() if not path.is_dir()}
    if missing:
        loaded = load_artifact(directory / ARTIFACT)
        device = torch.device(settings.device)
        count = len(loaded.routes)  # fewer than were asked for, where there are not as many
        estimator = Estimator(
            f"{settings.model}-seed-{settings.train.seed}", route=f"mean of {count}" if count > 1 else None
        )
        for split, path in missing.items():
            write_logits(path, {estimator: loaded.model.to(device)}, prepared, split, device)
    return report


def estimators(path: Path, name: str | None, per: Per) -> dict[Estimator, nn.Module]:
    """The columns of a logit table: what the artifact ships, each of its routes, each checkpoint of its run, or each
    route of each checkpoint."""
    loaded = load_artifact(path)
    run_name = name or f"{loaded.name}-seed-{loaded.manifest['training']['seed']}"
    if per == "model":
        return {Estimator(run_name): loaded.model}
    if per in ("route", "grid") and not loaded.routes:
        raise InputError(f"{path} has no routes", fix=f"leave out --per {per}, or train recap")
    if per == "route":
        assert isinstance(loaded.model, Routed)
        return _per_route(loaded.model.model, loaded.routes, run_name, None)
    found: dict[Estimator, nn.Module] = {}
    for step, file in checkpoints(path):
        model = build(loaded.name, loaded.config, loaded.encoder.layout)
        model.load_state_dict(load_tensors(file)[0])
        if per == "grid":
            found |= _per_route(model, loaded.routes, run_name, step)
        else:
            found[Estimator(run_name, step=step)] = model
    if not found:
        raise InputError(
            f"{path} holds no checkpoints", fix="give a run that was trained with [train] checkpoints = N"
        )
    return found


def _per_route(
    model: nn.Module, routes: Sequence[Route], run_name: str, step: int | None
) -> dict[Estimator, nn.Module]:
    assert isinstance(model, Recap)
    return {Estimator(run_name, step, _route_text(route)): Routed(model, [route]) for route in routes}


def _route_text(route: Route) -> str:
    """Such as 0.1.2.3/0.5.2.3: the adapters of the exponential tower, then of the linear one."""
    return "/".join(".".join(map(str, tower)) for tower in (route.exponential, route.linear))


def teacher_tables(directories: Sequence[Path], split: str) -> tuple[Path, ...]:
    return tuple(directory / LOGITS / split for directory in directories)


def _job_name(out: Path) -> str:
    """For the board: the run's directory without its hash, and the one above it where several seeds share that."""
    parts = [out.parent.name, out.name] if out.name.startswith("seed-") else [out.name]
    return " ".join(re.sub(r"-[0-9a-f]{10}$", "", part) for part in parts)


def run_many(
    configs: dict[Path, RunConfig],
    data: PreparedData,
    *,
    title: str,
    workers: int | None = None,
    quiet: bool = False,
    done: Callable[[Path, dict[str, Any]], None] | None = None,
) -> dict[Path, dict[str, Any]]:
    """Runs side by side, each in its directory and with its logit tables, over one prepared data set.

    Each resumes by itself. As many run at a time as there are cores for their threads; `done` is told each report.
    """
    if not configs:
        return {}
    threads = max(config.threads for config in configs.values())
    places = list(configs)
    jobs = [
        Job(
            _job_name(out),
            "recap_ctr.training.run:teach",
            {"data": str(data.path), "config": config.to_json(), "out": str(out)},
        )
        for out, config in configs.items()
    ]
    room = workers or environment.side_by_side(threads, next(iter(configs.values())).device)
    tell = None if done is None else lambda at, report: done(places[at], report)
    reports = run_jobs(jobs, workers=room, title=title, quiet=quiet, done=tell)
    return dict(zip(places, reports, strict=True))


def epoch_seconds(config: RunConfig, data: PreparedData) -> float:
    """What an epoch of a run takes here, by a few of its steps."""
    torch.set_num_threads(config.threads)
    trainer = Trainer(config.model, config.model_config, config.train, data, torch.device(config.device))
    trainer.step()
    steps = min(TIMED_STEPS, trainer.steps_per_epoch)
    began = time.monotonic()
    for _ in range(steps):
        trainer.step()
    return (time.monotonic() - began) / steps * trainer.steps_per_epoch


def _write_history(path: Path, history: list[Epoch]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(history[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in history)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())
