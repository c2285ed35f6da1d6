"""Hyperparameter search: trials side by side, each a training run, compared by validation AUC alone.

A killed search goes on with the next command: settings of a lost trial are queued again, and because a trial trains in
a directory named after its settings, it resumes from its saved state.
"""

import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import optuna
import tomli_w
import torch
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import field_serializer

from recap_ctr.axes.predict import predict
from recap_ctr.config import Record, TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import machine
from recap_ctr.jobs.engines import LOCAL, executor_for
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.jobs.progress import meter, say
from recap_ctr.models.catalogue import build, count_parameters
from recap_ctr.nn.weights import load_tensors
from recap_ctr.recipe.spaces import check_space
from recap_ctr.recipe.study import (
    ENDED,
    EXHAUSTED,
    REASON,
    SETTINGS,
    Search,
    Settings,
    best_trial,
    draw_trial,
    is_base,
    open_study,
    queue_base,
    requeue_lost_trials,
)
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import atomic_file, make_directory, read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from recap_ctr.training.config import RunConfig
from recap_ctr.training.loop import BEST, train
from recap_ctr.training.record import DIVERGED
from recap_ctr.training.report import DataSummary, Epoch, ModelSummary

RESULT, TOML, TRIALS = "tune.json", "best.toml", "trials"


class TrialRecord(Record):
    """One trial that has ended."""

    number: int
    state: Literal["complete", "pruned", "diverged"]
    settings: Settings
    valid_auc: float | None
    """The best of `valid_aucs`; None if the trial diverged in its first epoch."""
    valid_aucs: list[float]
    """Validation AUC after each epoch."""
    seconds: float
    parameters: int


class Gain(Record):
    """How far the best trial is ahead of the base run in validation AUC."""

    auc: float
    standard_error: float | None
    """None if the base run is the best, or if the validation rows have fewer than two clicks or non-clicks."""


class TuneRecord(Record):
    """The outcome of a search, with all that decided it: the content of `tune.json`."""

    kind: Literal["tune"]
    format: int
    data: DataSummary
    model: ModelSummary
    train: TrainConfig
    threads: int
    device: str
    space: dict[str, Any]
    prune_after: int
    exhausted: bool
    """Whether the draws found nothing new any more."""
    started_from: Settings
    """The base run's values for the settings of the space."""
    left_out: int
    """Draws that were skipped because they were tried before or don't go together."""
    best: TrialRecord
    base: TrialRecord | None
    """The trial of the base run; None if it diverged or has not ended."""
    gain: Gain | None
    trials: list[TrialRecord]
    versions: dict[str, str]
    machine: dict[str, str | int]
    date: str

    @field_serializer("train")
    def _whole_config(self, train: TrainConfig) -> dict[str, Any]:
        """Write all of the training settings, whether they were set or are at their defaults."""
        return train.model_dump(mode="json")

    def is_finished(self, num_trials: int) -> bool:
        """Return whether a search for `num_trials` trials has nothing left to do."""
        return self.exhausted or len(self.trials) >= num_trials


def tune(
    search: Search,
    data: PreparedData,
    out: Path,
    *,
    trials: int,
    minutes: float | None = None,
    executor: Executor | str = LOCAL,
    force: bool = False,
    quiet: bool = False,
) -> TuneRecord:
    """Search until `trials` trials have ended or `minutes` have passed; write the record to `out` and return it.

    `executor` may be the name of an engine: as many trials run at a time as it has cores for their threads.
    """
    base = search.base
    torch.set_num_threads(base.threads)
    check_space(search.space, base.model, dict(base.model_config), dict(base.train), "space")
    if claim(out, search.inputs(data), finished=RESULT, force=force):
        record = TuneRecord.model_validate(read_object(out / RESULT, "the record of a search"))
        if record.is_finished(trials):
            if not quiet:
                say(f"{out} holds {len(record.trials)} trials; nothing to do")
            return record
    make_directory(out / TRIALS)
    executor = executor_for(executor, base.threads, base.device)
    deadline = None if minutes is None else time.time() + 60 * minutes
    with locked(out), open_study(out, search) as study:
        requeue_lost_trials(study)
        if not study.get_trials(deepcopy=False):
            queue_base(study, search)
        arguments = {
            "data": str(data.path),
            "search": search.to_json(),
            "out": str(out),
            "trials": trials,
            "deadline": deadline,
        }
        while missing := max(trials - len(study.get_trials(deepcopy=False, states=ENDED)), 0):
            num_workers = min(executor.workers, missing)
            jobs = [Job(f"worker {number}", work, arguments) for number in range(1, num_workers + 1)]
            if not quiet:
                say(f"{missing} trials, {len(jobs)} at a time, over {', '.join(map(_short, search.space))}")
            executor.run(jobs, title="tune", quiet=quiet)
            # An engine that replaces a lost worker leaves its trial behind.
            is_lost = requeue_lost_trials(study)
            if not is_lost or (deadline is not None and time.time() >= deadline):
                break
        _remove_weights(study, out)
        record = _record(study, search, data, out)
        with atomic_file(out / TOML) as file:
            file.write(_best_toml(search, record).encode())
        write_json(out / RESULT, record.to_json())
    if not (quiet or record.is_finished(trials)):
        say(f"out of time after {len(record.trials)} of {trials} trials; run the same command again to go on")
    return record


class _OutOfTimeError(Exception):
    """The deadline has passed."""


def work(data: str, search: dict[str, Any], out: str, trials: int, deadline: float | None) -> int:
    """Run one trial after the other until there are `trials` in all; return how many this worker ran.

    `deadline` is in seconds since the epoch. The arguments are plain, for a job.
    """
    parsed, prepared, directory = Search.from_json(search), PreparedData(Path(data), verify=False), Path(out)
    torch.set_num_threads(parsed.base.threads)
    count = 0
    with open_study(directory, parsed) as study:
        while deadline is None or time.time() < deadline:
            with locked(directory / TRIALS, wait=True):  # Otherwise two workers could draw the same settings.
                trial = draw_trial(study, parsed, trials)
            if trial is None:
                break
            try:
                _run_trial(study, trial, parsed, prepared, directory, deadline)
            except _OutOfTimeError:
                break
            with locked(directory / TRIALS, wait=True):
                _remove_weights(study, directory)
            count += 1
    return count


def _run_trial(
    study: optuna.Study,
    trial: Trial,
    search: Search,
    data: PreparedData,
    out: Path,
    deadline: float | None,
) -> None:
    """Train the trial's run, and record in the study how it ended."""
    settings: Settings = trial.user_attrs[SETTINGS]
    config = search.run_config(settings)
    directory = trial_directory(out, settings)
    make_directory(directory)
    epochs: list[Epoch] = []
    reason = None
    with meter(f"trial {trial.number}", config.train.max_epochs, "epochs") as shown:

        def end_epoch(epoch: Epoch) -> None:
            epochs.append(epoch)
            shown.advance(1, 1, f"valid AUC {epoch.valid_auc:.5f}")
            trial.report(epoch.valid_auc, epoch.epoch)
            if epoch.epoch >= search.prune_after and not is_base(trial) and trial.should_prune():
                raise optuna.TrialPruned
            if deadline is not None and time.time() >= deadline:
                raise _OutOfTimeError

        try:
            train(
                config.model,
                config.model_config,
                config.train,
                data,
                directory,
                device=torch.device(config.device),
                quiet=True,
                on_epoch=end_epoch,
            )
        except optuna.TrialPruned:
            reason = "pruned"
        except InputError as error:
            # Only divergence is the settings' fault; then the trial counts, and the sampler learns from it.
            if error.fix != DIVERGED:
                raise
            reason = "diverged"
    trial.set_user_attr(REASON, reason)
    trial.set_user_attr("seconds", sum(epoch.seconds for epoch in epochs))
    trial.set_user_attr("parameters", count_parameters(config.model, config.model_config, data.layout))
    if reason is None:
        best_auc = max(epoch.valid_auc for epoch in epochs)
        study.tell(trial, best_auc, state=TrialState.COMPLETE)
    else:
        study.tell(trial, state=TrialState.PRUNED)
    outcome = reason or f"validation AUC {100 * best_auc:.3f}"
    say(f"trial {trial.number}: {outcome} after {len(epochs)} epochs; {in_words(settings)}")


def trial_directory(out: Path, settings: Settings) -> Path:
    """Return where the trial with these settings trains; equal settings share a directory."""
    return out / TRIALS / fingerprint(settings)[:10]


def _remove_weights(study: optuna.Study, out: Path) -> None:
    """Remove the directories of trials that have ended, except those of the best and of the base run."""
    ended = study.get_trials(deepcopy=False, states=ENDED)
    best = best_trial(ended)
    for trial in ended:
        if trial is not best and not is_base(trial):
            shutil.rmtree(trial_directory(out, trial.user_attrs[SETTINGS]), ignore_errors=True)


def _record(study: optuna.Study, search: Search, data: PreparedData, out: Path) -> TuneRecord:
    """Return the record of the trials so far; without a complete one there is nothing to record."""
    drawn = study.get_trials(deepcopy=False)
    ended = [trial for trial in drawn if trial.state in ENDED]
    best = best_trial(ended)
    if best is None and ended:
        raise InputError(f"all {len(ended)} trials diverged", fix=DIVERGED)
    if best is None:
        raise InputError("no trial has finished yet", fix="run the same command again: it goes on")
    base = next((trial for trial in ended if is_base(trial) and trial.state is TrialState.COMPLETE), None)
    inputs = search.inputs(data)
    return TuneRecord(
        kind="tune",
        format=1,
        data=DataSummary(name=data.name, fingerprint=data.fingerprint),
        model=ModelSummary(**inputs["model"]),
        train=search.base.train,
        threads=search.base.threads,
        device=search.base.device,
        space=inputs["space"],
        prune_after=search.prune_after,
        exhausted=bool(study.user_attrs.get(EXHAUSTED)),
        started_from=search.settings_of(search.base),
        left_out=sum(trial.state is TrialState.FAIL and REASON in trial.user_attrs for trial in drawn),
        best=_trial_record(best),
        base=None if base is None else _trial_record(base),
        gain=None if base is None else _gain(best, base, search, data, out),
        trials=[_trial_record(trial) for trial in ended],
        versions=machine.versions() | {"optuna": optuna.__version__},
        machine=machine.machine(),
        date=datetime.now(UTC).date().isoformat(),
    )


def _trial_record(trial: FrozenTrial) -> TrialRecord:
    aucs = [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)]
    attributes = trial.user_attrs
    return TrialRecord(
        number=trial.number,
        state=attributes[REASON] or "complete",
        settings=attributes[SETTINGS],
        valid_auc=max(aucs, default=None),
        valid_aucs=aucs,
        seconds=attributes["seconds"],
        parameters=attributes["parameters"],
    )


def _gain(best: FrozenTrial, base: FrozenTrial, search: Search, data: PreparedData, out: Path) -> Gain:
    """Return how far the best trial is ahead of the base run, with the standard error if it can be computed."""
    assert best.value is not None and base.value is not None
    gain, valid = best.value - base.value, data.valid
    clicks = int(valid.labels.sum())
    too_few = min(clicks, len(valid) - clicks) < 2
    settings_of_both = [trial.user_attrs[SETTINGS] for trial in (best, base)]
    files = [trial_directory(out, settings) / BEST for settings in settings_of_both]
    if best is base or too_few or not all(file.is_file() for file in files):
        return Gain(auc=gain, standard_error=None)
    best_logits, base_logits = (
        _valid_logits(search.run_config(settings), file, data)
        for settings, file in zip(settings_of_both, files, strict=True)
    )
    difference = metrics.auc_difference(valid.labels, best_logits, base_logits, valid.weights)
    return Gain(auc=gain, standard_error=difference.standard_error)


def _valid_logits(config: RunConfig, weights: Path, data: PreparedData) -> npt.NDArray[np.float32]:
    """Return a trial's logits over the validation rows."""
    device = torch.device(config.device)
    model = build(config.model, config.model_config, data.layout).to(device)
    model.load_state_dict(load_tensors(weights)[0])
    return predict(model, data.valid, device)


def _best_toml(search: Search, record: TuneRecord) -> str:
    """Return the best run's config for `recap train --config`: what was searched, and what differs from defaults."""
    config = search.run_config(record.best.settings)
    tables: dict[str, Settings] = {"model": {"name": config.model}, "train": {}}
    for part, part_config in (("model", config.model_config), ("train", config.train)):
        searched = {_short(name) for name in search.space if name.startswith(f"{part}.")}
        written = searched | part_config.model_dump(exclude_defaults=True).keys()
        dumped = part_config.model_dump(mode="json", exclude_none=True)
        tables[part] |= {name: value for name, value in dumped.items() if name in written}
    assert record.best.valid_auc is not None
    origin = (
        f"# Found by `recap tune`: validation AUC {100 * record.best.valid_auc:.3f}, the best of {len(record.trials)}"
        f" trials on {record.data.name}\n# (fingerprint {record.data.fingerprint}).\n"
    )
    return origin + tomli_w.dumps(tables)


def _short(name: str) -> str:
    """Return the name of a setting without its part: l2 for train.l2."""
    return name.partition(".")[2]


def in_words(settings: Settings) -> str:
    """Return the settings as one line of text.

    >>> in_words({"train.l2": 0.001, "model.units": [64, 32], "model.batch_norm": True})
    'l2 0.001, units [64, 32], batch_norm true'
    """
    return ", ".join(f"{_short(name)} {json.dumps(value)}" for name, value in settings.items())
