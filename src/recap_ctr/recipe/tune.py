"""Search for settings: trials side by side, each a training of its own, compared by validation AUC alone.

A study lives in SQLite (`study.db`, which Optuna's own tools read too). TPE proposes settings, and a trial that after
some epochs is behind the median of the finished ones is pruned. Not sooner: a strong regulariser starts slowly and wins
late (docs/decisions/0008). What a killed command had begun is taken up by the next one: the settings of a lost trial
are queued again, and as a trial trains in a directory named after its settings, it goes on from its saved state.
"""

import json
import shutil
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
import tomli_w
import torch
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.pool import NullPool

from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import machine as environment
from recap_ctr.jobs.local import Job, run_jobs
from recap_ctr.jobs.progress import meter, say
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from recap_ctr.nn.weights import load_tensors
from recap_ctr.recipe.spaces import Choices, Range, Space, check_space, parse_space, plain
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import atomic_file, read_json, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from recap_ctr.training.loop import BEST, Epoch, derive_seed, train
from recap_ctr.training.optimizer import DIVERGED
from recap_ctr.training.run import RunConfig

STUDY, RESULT, TOML, TRIALS = "study.db", "tune.json", "best.toml", "trials"
BASE, SETTINGS, REASON, EXHAUSTED = "base", "settings", "reason", "exhausted"  # attributes in the study
DRAWS = 100  # in a row without anything new: then the space has been searched
COMPARABLE = 4  # finished trials before any is pruned
LOCK_SECONDS = 300
_DRAWS = 2**43  # a stream apart from those of training
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
Settings = dict[str, Any]
"""Values by name, such as model.dropout; what is not among them is as in the base settings."""


@dataclass(frozen=True)
class Search:
    """All that decides what is tried, beside the data."""

    base: RunConfig
    """What the space leaves open, and the first trial."""
    space: Space
    prune_after: int = 8
    """Epochs that every trial may have."""

    def inputs(self, data: PreparedData) -> dict[str, Any]:
        known = self.base.inputs(data)
        return {name: known[name] for name in ("data", "model", "train", "threads", "device")} | {
            "space": plain(self.space),
            "prune_after": self.prune_after,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base.to_json(),
            "space": plain(self.space),
            "prune_after": self.prune_after,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Search":
        base, space = RunConfig.from_json(values["base"]), parse_space(values["space"], "space")
        return cls(base, space, values["prune_after"])

    def settings_of(self, config: RunConfig) -> Settings:
        """What a run has for the settings that are searched."""
        parts = {"model": config.model_config, "train": config.train}
        dumped = {part: record.model_dump(mode="json") for part, record in parts.items()}
        split = {name: name.partition(".") for name in self.space}
        return {name: dumped[part][field] for name, (part, _, field) in split.items()}

    def with_(self, settings: Settings) -> RunConfig:
        """The run of a trial; what doesn't go together is an InputError."""
        given: dict[str, Settings] = {"model": {}, "train": {}}
        for name, value in settings.items():
            part, _, field = name.partition(".")
            given[part][field] = value
        model = {**self.base.model_config.model_dump(mode="json"), **given["model"]}
        settled = {**self.base.train.model_dump(mode="json"), **given["train"]}
        return replace(
            self.base,
            model_config=parse_model(self.base.model, model),
            train=parse(TrainConfig, settled, "train"),
        )


@contextmanager
def _study(out: Path, search: Search) -> Iterator[optuna.Study]:
    """The study of a directory, without Optuna's own words about it."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(
        "sqlite://",  # the path goes past the URL, where it would have to be escaped
        engine_kwargs={
            "creator": lambda: sqlite3.connect(out / STUDY, timeout=LOCK_SECONDS),
            "poolclass": NullPool,
        },
    )
    try:
        yield optuna.create_study(
            storage=storage,
            study_name="recap",
            load_if_exists=True,
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(COMPARABLE, search.prune_after),
        )
    finally:
        storage.remove_session()
        optuna.logging.set_verbosity(before)


def tune(
    search: Search,
    data: PreparedData,
    out: Path,
    *,
    trials: int,
    minutes: float | None = None,
    workers: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Search until there are so many trials, or for so many minutes; returns the record, which is in `out` too."""
    base = search.base
    torch.set_num_threads(base.threads)
    check_space(search.space, base.model, dict(base.model_config), dict(base.train), "space")
    if claim(out, search.inputs(data), finished=RESULT, force=force):
        record: dict[str, Any] = read_json(out / RESULT)
        if _is_done(record, trials):
            if not quiet:
                say(f"{out} holds {len(record['trials'])} trials; nothing to do")
            return record
    (out / TRIALS).mkdir(exist_ok=True)
    with locked(out), _study(out, search) as study:
        _take_up(study)
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(_base_params(search) or {}, user_attrs={BASE: True})
        missing = max(trials - len(study.get_trials(deepcopy=False, states=ENDED)), 0)
        room = workers or environment.side_by_side(base.threads, base.device)
        deadline = None if minutes is None else time.time() + 60 * minutes
        asked = {
            "data": str(data.path), "search": search.to_json(), "out": str(out), "trials": trials, "deadline": deadline
        }  # fmt: skip
        jobs = [
            Job(f"worker {n}", "recap_ctr.recipe.tune:work", asked) for n in range(1, min(room, missing) + 1)
        ]
        if not quiet:
            say(f"{missing} trials, {len(jobs)} at a time, over {', '.join(map(_short, search.space))}")
        run_jobs(jobs, workers=room, title="tune", quiet=quiet)
        _take_up(study)
        _tidy(study, out)
        record = _record(study, search, data, out)
        with atomic_file(out / TOML) as file:
            file.write(_toml(search, record).encode())
        write_json(out / RESULT, record)
    if not (quiet or _is_done(record, trials)):
        say(f"out of time after {len(record['trials'])} of {trials} trials; the same command goes on")
    return record


def _is_done(record: dict[str, Any], trials: int) -> bool:
    return record["exhausted"] or len(record["trials"]) >= trials


def _take_up(study: optuna.Study) -> None:
    """Queue the settings of trials that nobody works on any more.

    Killed between the two lines it will queue them twice; the second is then a draw of nothing new.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.enqueue_trial(trial.params, user_attrs={BASE: _is_base(trial)})
        study.tell(trial.number, state=TrialState.FAIL)


def _is_base(trial: Trial | FrozenTrial) -> bool:
    return bool(trial.user_attrs.get(BASE))


# What a worker does.


class _OutOfTimeError(Exception):
    pass


def work(data: str, search: dict[str, Any], out: str, trials: int, deadline: float | None) -> int:
    """Trial after trial, until there are enough; returns how many it did. The arguments are plain, for the engine."""
    wanted, prepared, directory = Search.from_json(search), PreparedData(Path(data), verify=False), Path(out)
    torch.set_num_threads(wanted.base.threads)
    done = 0
    with _study(directory, wanted) as study:
        while deadline is None or time.time() < deadline:
            with locked(directory / TRIALS, wait=True):  # so that no two workers draw the same
                trial = _draw(study, wanted, trials)
            if trial is None:
                break
            try:
                _run(study, trial, wanted, prepared, directory, deadline)
            except _OutOfTimeError:
                break
            with locked(directory / TRIALS, wait=True):
                _tidy(study, directory)
            done += 1
    return done


def _draw(study: optuna.Study, search: Search, trials: int) -> Trial | None:
    """A trial whose settings are new and go together; None where there are enough, or no such settings are found."""
    known = study.get_trials(deepcopy=False)
    tried = [one.user_attrs.get(SETTINGS) for one in known if one.state in (*ENDED, TrialState.RUNNING)]
    if len(tried) >= trials:
        return None
    for at in range(DRAWS):
        # Seeded by the draw, so that neither workers nor another start repeat what was drawn. A proposal that is of no
        # use is not made again: TPE would insist on it.
        study.sampler = _sampler(search.base.train.seed, len(known) + at, informed=at == 0)
        trial = study.ask()
        try:
            settings = _suggest(trial, search)
            trial.set_user_attr(SETTINGS, settings)
            reason = "tried before" if settings in tried else None
        except InputError as error:
            reason = error.message
        if reason is None:
            return trial
        trial.set_user_attr(REASON, reason)
        study.tell(trial, state=TrialState.FAIL)
    study.set_user_attr(EXHAUSTED, True)
    return None


def _sampler(seed: int, draw: int, *, informed: bool) -> optuna.samplers.BaseSampler:
    own = derive_seed(seed, _DRAWS + draw) % 2**32
    if not informed:
        return optuna.samplers.RandomSampler(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of the liar, before Optuna 5
        return optuna.samplers.TPESampler(seed=own, constant_liar=True)


def _suggest(trial: Trial, search: Search) -> Settings:
    """Values for all settings of the space; those of the base as they are, even where they lie outside of it."""
    if _is_base(trial) and _base_params(search) is None:
        return search.settings_of(search.base)
    found = {name: _value(trial, name, each) for name, each in search.space.items()}
    return search.settings_of(search.base if _is_base(trial) else search.with_(found))


def _value(trial: Trial, name: str, each: Choices | Range) -> Any:
    if not isinstance(each, Range):
        return json.loads(trial.suggest_categorical(name, [json.dumps(choice) for choice in each]))
    if each.integer:
        low, high, step = int(each.low), int(each.high), int(each.step or 1)
        return trial.suggest_int(name, low, high, step=step, log=each.log)
    return float(f"{trial.suggest_float(name, each.low, each.high, step=each.step, log=each.log):.4g}")


def _base_params(search: Search) -> dict[str, Any] | None:
    """The base settings as the study has them; None if some lie outside of the space."""
    own, found = search.settings_of(search.base), {}
    for name, each in search.space.items():
        value = own[name]
        if not (each.holds(value) if isinstance(each, Range) else value in each):
            return None
        found[name] = value if isinstance(each, Range) else json.dumps(each[each.index(value)])
    return found


def _name(settings: Settings) -> str:
    """The directory of a trial."""
    return fingerprint(settings)[:10]


def _run(
    study: optuna.Study,
    trial: Trial,
    search: Search,
    data: PreparedData,
    out: Path,
    deadline: float | None,
) -> None:
    """Train, and tell the study how it went."""
    settings: Settings = trial.user_attrs[SETTINGS]
    directory = out / TRIALS / _name(settings)
    directory.mkdir(exist_ok=True)
    config, lines = search.with_(settings), list[Epoch]()

    with meter(f"trial {trial.number}", config.train.max_epochs, "epochs") as shown:

        def report(line: Epoch) -> None:
            lines.append(line)
            shown.advance(1, 1, f"valid AUC {line.valid_auc:.5f}")
            trial.report(line.valid_auc, line.epoch)
            if line.epoch >= search.prune_after and not _is_base(trial) and trial.should_prune():
                raise optuna.TrialPruned
            if deadline is not None and time.time() >= deadline:
                raise _OutOfTimeError

        value, reason = None, None
        try:
            train(
                config.model, config.model_config, config.train, data, directory,
                device=torch.device(config.device), quiet=True, on_epoch=report,
            )  # fmt: skip
            value = max(line.valid_auc for line in lines)
        except optuna.TrialPruned:
            reason = "pruned"
        except InputError as error:
            if error.fix != DIVERGED:  # else it is the settings' fault, and worth knowing for the sampler
                raise
            reason = "diverged"
    found = {
        REASON: reason,
        "seconds": sum(line.seconds for line in lines),
        "parameters": count_parameters(config.model, config.model_config, data.layout),
    }
    for key, each in found.items():
        trial.set_user_attr(key, each)
    study.tell(trial, value, state=TrialState.COMPLETE if value is not None else TrialState.PRUNED)
    outcome = reason or f"validation AUC {100 * (value or 0):.3f}"
    say(f"trial {trial.number}: {outcome} after {len(lines)} epochs; {in_words(settings)}")


def _tidy(study: optuna.Study, out: Path) -> None:
    """Of the trials that have ended, keep the weights of the best and of the base alone."""
    ended = study.get_trials(deepcopy=False, states=ENDED)
    best = _best(ended)
    for one in ended:
        if one is not best and not _is_base(one):
            shutil.rmtree(out / TRIALS / _name(one.user_attrs[SETTINGS]), ignore_errors=True)


def _best(trials: list[FrozenTrial]) -> FrozenTrial | None:
    """By validation AUC; the first of equals."""
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


# What is said of it.


def _record(study: optuna.Study, search: Search, data: PreparedData, out: Path) -> dict[str, Any]:
    known = study.get_trials(deepcopy=False)
    ended = [trial for trial in known if trial.state in ENDED]
    best = _best(ended)
    if best is None and ended:
        raise InputError(f"all {len(ended)} trials diverged", fix=DIVERGED)
    if best is None:
        raise InputError("no trial has finished yet", fix="run the same command again: it goes on")
    base = next((one for one in ended if _is_base(one) and one.state is TrialState.COMPLETE), None)
    return {
        "kind": "tune",
        "format": 1,
        **search.inputs(data),
        "data": {"name": data.name, "fingerprint": data.fingerprint},
        "exhausted": bool(study.user_attrs.get(EXHAUSTED)),
        "started_from": search.settings_of(search.base),
        "left_out": sum(trial.state is TrialState.FAIL and REASON in trial.user_attrs for trial in known),
        "best": _told(best),
        "base": None if base is None else _told(base),
        "gain": None if base is None else _gain(best, base, search, data, out),
        "trials": [_told(trial) for trial in ended],
        "versions": environment.versions() | {"optuna": optuna.__version__},
        "machine": environment.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _told(trial: FrozenTrial) -> dict[str, Any]:
    aucs = [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)]
    known = trial.user_attrs
    return {
        "number": trial.number,
        "state": known[REASON] or "complete",
        "settings": known[SETTINGS],
        "valid_auc": max(aucs, default=None),
        "valid_aucs": aucs,
        "seconds": known["seconds"],
        "parameters": known["parameters"],
    }


def _gain(
    best: FrozenTrial, base: FrozenTrial, search: Search, data: PreparedData, out: Path
) -> dict[str, float | None]:
    """How far the best is ahead of the base settings, with the standard error where it can be had."""
    assert best.value is not None and base.value is not None
    gain, valid = best.value - base.value, data.valid
    clicks = int(valid.labels.sum())
    chosen = [trial.user_attrs[SETTINGS] for trial in (best, base)]
    files = [out / TRIALS / _name(settings) / BEST for settings in chosen]
    few = min(clicks, len(valid) - clicks) < 2
    if best is base or few or not all(file.is_file() for file in files):
        return {"auc": gain, "standard_error": None}
    one, other = (
        _logits(search.with_(settings), file, data) for settings, file in zip(chosen, files, strict=True)
    )
    error = metrics.auc_difference(valid.labels, one, other, valid.weights).standard_error
    return {"auc": gain, "standard_error": error}


def _logits(config: RunConfig, weights: Path, data: PreparedData) -> npt.NDArray[np.float32]:
    """Over the validation rows."""
    device = torch.device(config.device)
    model = build(config.model, config.model_config, data.layout).to(device)
    model.load_state_dict(load_tensors(weights)[0])
    return predict(model, data.valid, device)


def _toml(search: Search, record: dict[str, Any]) -> str:
    """The best settings, as `recap train --config` reads them: what was searched, and what differs from defaults."""
    best = record["best"]
    config = search.with_(best["settings"])
    tables: dict[str, Settings] = {"model": {"name": config.model}, "train": {}}
    for part, own in (("model", config.model_config), ("train", config.train)):
        searched = {_short(name) for name in search.space if name.startswith(f"{part}.")}
        told = {*own.model_dump(exclude_defaults=True), *searched}
        dumped = own.model_dump(mode="json", exclude_none=True)
        tables[part] |= {name: value for name, value in dumped.items() if name in told}
    origin = (
        f"# Found by `recap tune`: validation AUC {100 * best['valid_auc']:.3f}, the best of {len(record['trials'])}"
        f" trials on {record['data']['name']}\n# (fingerprint {record['data']['fingerprint']}).\n"
    )
    return origin + tomli_w.dumps(tables)


def _short(name: str) -> str:
    return name.partition(".")[2]


def in_words(settings: Settings) -> str:
    """Settings on one line.

    >>> in_words({"train.l2": 0.001, "model.units": [64, 32], "model.batch_norm": True})
    'l2 0.001, units [64, 32], batch_norm true'
    """
    return ", ".join(f"{_short(name)} {json.dumps(value)}" for name, value in settings.items())
