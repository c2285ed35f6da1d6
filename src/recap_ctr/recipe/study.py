"""The Optuna study behind a search: what is searched, the database of trials, and how a new trial is drawn.

A study is an SQLite file (`study.db`), which Optuna's own tools read too. TPE proposes settings, and a trial that after
some epochs is behind the median of the finished ones is pruned. Not sooner: a strong regulariser starts slowly and wins
late (docs/decisions/0008).
"""

import json
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.pool import NullPool

from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.spaces import Choices, Range, Space, parse_space, space_to_json
from recap_ctr.training.config import RunConfig
from recap_ctr.training.feed import derive_seed

STUDY = "study.db"
BASE, SETTINGS, REASON, EXHAUSTED = "base", "settings", "reason", "exhausted"  # Attributes in the study.
MAX_FAILED_DRAWS = 100  # After this many in a row the space counts as searched.
MIN_FINISHED = 4  # Trials that must have finished before one is pruned.
LOCK_SECONDS = 300
_SAMPLER_STREAM = 2**43  # Random numbers apart from those of training.
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
Settings = dict[str, Any]
"""Values by the name of the setting, such as model.dropout; the base run has all others."""


@dataclass(frozen=True)
class Search:
    """All that decides which settings are tried, other than the data."""

    base: RunConfig
    """The first trial; the others differ from it only in the settings of the space."""
    space: Space
    prune_after: int = 8
    """Epochs that every trial may train before it can be pruned."""

    def inputs(self, data: PreparedData) -> dict[str, Any]:
        """Return what the outcome of the search depends on."""
        inputs = self.base.training_inputs(data)
        return {name: inputs[name] for name in ("data", "model", "train", "threads", "device")} | {
            "space": space_to_json(self.space),
            "prune_after": self.prune_after,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain JSON values, for a job."""
        return {
            "base": self.base.to_json(),
            "space": space_to_json(self.space),
            "prune_after": self.prune_after,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Search":
        """Return the search that `to_json` wrote."""
        base, space = RunConfig.from_json(values["base"]), parse_space(values["space"], "space")
        return cls(base, space, values["prune_after"])

    def settings_of(self, config: RunConfig) -> Settings:
        """Return a run's values for the settings of the space."""
        configs = {"model": config.model_config, "train": config.train}
        dumps = {part: part_config.model_dump(mode="json") for part, part_config in configs.items()}
        settings = {}
        for name in self.space:
            part, _, field = name.partition(".")
            # The dump of a TrainConfig lacks some settings that are at their default.
            settings[name] = dumps[part].get(field, getattr(configs[part], field))
        return settings

    def run_config(self, settings: Settings) -> RunConfig:
        """Return the base run with `settings` changed; values that don't go together are an InputError."""
        parts: dict[str, Settings] = {
            "model": self.base.model_config.model_dump(mode="json"),
            "train": self.base.train.model_dump(mode="json"),
        }
        for name, value in settings.items():
            part, _, field = name.partition(".")
            parts[part][field] = value
        return replace(
            self.base,
            model_config=parse_model(self.base.model, parts["model"]),
            train=parse(TrainConfig, parts["train"], "train"),
        )


@contextmanager
def open_study(out: Path, search: Search) -> Iterator[optuna.Study]:
    """Open the study in the directory `out`, with Optuna's messages turned off while it is open."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(
        "sqlite://",  # In the URL the path would have to be escaped, so it goes into the creator.
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
            pruner=optuna.pruners.MedianPruner(MIN_FINISHED, search.prune_after),
        )
    finally:
        storage.remove_session()
        optuna.logging.set_verbosity(verbosity)


def queue_base(study: optuna.Study, search: Search) -> None:
    """Queue the base run as the first trial of a new study."""
    study.enqueue_trial(_base_params(search) or {}, user_attrs={BASE: True})


def requeue_lost_trials(study: optuna.Study) -> bool:
    """Queue the settings of trials that were running when their worker ended; return whether there were any.

    If this is killed between the two calls, the settings are queued twice; the second time they are skipped as tried.
    """
    lost = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in lost:
        study.enqueue_trial(trial.params, user_attrs={BASE: is_base(trial)})
        study.tell(trial.number, state=TrialState.FAIL)
    return bool(lost)


def is_base(trial: Trial | FrozenTrial) -> bool:
    """Return whether the trial is that of the base run."""
    return bool(trial.user_attrs.get(BASE))


def best_trial(trials: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the highest validation AUC, the first of equals; None if none is complete."""
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


def draw_trial(study: optuna.Study, search: Search, num_trials: int) -> Trial | None:
    """Return a trial whose settings are new and go together.

    None if the study has `num_trials` trials, or if MAX_FAILED_DRAWS draws in a row were of no use; the study is then
    marked as exhausted.
    """
    drawn = study.get_trials(deepcopy=False)
    tried = [trial.user_attrs.get(SETTINGS) for trial in drawn if trial.state in (*ENDED, TrialState.RUNNING)]
    if len(tried) >= num_trials:
        return None
    for draw in range(MAX_FAILED_DRAWS):
        # The seed depends on the number of draws so far, so that no worker and no later call repeats a draw. After a
        # draw that failed the next is random: TPE would insist on its proposal.
        study.sampler = _sampler(search.base.train.seed, len(drawn) + draw, informed=draw == 0)
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
    """Return the sampler of one draw: TPE if `informed` by earlier trials, else a random one."""
    sampler_seed = derive_seed(seed, _SAMPLER_STREAM + draw) % 2**32
    if not informed:
        return optuna.samplers.RandomSampler(sampler_seed)
    with warnings.catch_warnings():
        # Before Optuna 5, constant_liar warns that it is experimental.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=sampler_seed, constant_liar=True)


def _suggest(trial: Trial, search: Search) -> Settings:
    """Return values for all settings of the space; for the base run its own, even if they lie outside the space."""
    if is_base(trial) and _base_params(search) is None:
        return search.settings_of(search.base)
    settings = {name: _suggest_value(trial, name, values) for name, values in search.space.items()}
    return search.settings_of(search.base if is_base(trial) else search.run_config(settings))


def _suggest_value(trial: Trial, name: str, values: Choices | Range) -> Any:
    """Return the sampler's value for one setting."""
    if not isinstance(values, Range):
        return json.loads(trial.suggest_categorical(name, [json.dumps(choice) for choice in values]))
    if values.integer:
        low, high, step = int(values.low), int(values.high), int(values.step or 1)
        return trial.suggest_int(name, low, high, step=step, log=values.log)
    number = trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)
    return float(f"{number:.4g}")


def _base_params(search: Search) -> dict[str, Any] | None:
    """Return the base run's settings as Optuna stores them; None if one of them lies outside the space."""
    settings, params = search.settings_of(search.base), {}
    for name, values in search.space.items():
        value = settings[name]
        if not (values.holds(value) if isinstance(values, Range) else value in values):
            return None
        params[name] = value if isinstance(values, Range) else json.dumps(values[values.index(value)])
    return params
