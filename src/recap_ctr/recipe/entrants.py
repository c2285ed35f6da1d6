"""The models of a portfolio's race: their runs, how they have done so far, and the jobs that train them in slices."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recap_ctr.axes.logits import Estimator
from recap_ctr.axes.predict import write_logits
from recap_ctr.data.shards import PreparedData
from recap_ctr.training.config import RunConfig
from recap_ctr.training.run import advance, epoch_seconds

RACE = "race"  # The logit table of an entrant's validation rows, in its run's directory.
DECAY, MAX_DOUBLINGS = 0.6, 3.0


@dataclass(frozen=True, eq=False)
class Entrant:
    """A model in the race, and its run."""

    name: str
    kind: str
    """The name without the number of the run: runs of one kind differ in their seed."""
    settings: dict[str, Any]
    """What it was entered with."""
    config: RunConfig
    path: Path


@dataclass
class Standing:
    """How an entrant has done so far, with a figure for each validation."""

    aucs: list[float]
    loglosses: list[float]
    epochs: float
    seconds: float
    finished: bool

    @property
    def auc(self) -> float:
        """Return the best validation AUC so far."""
        return max(self.aucs)

    def outlook(self, horizon: float) -> float:
        """Return the AUC that may be reached after `horizon` epochs.

        A strong regulariser starts slowly and wins late. Each doubling of a run's length is taken to gain `DECAY` times
        what the one before has gained.
        """
        count = len(self.aucs)
        if self.finished or count < 2 or horizon <= self.epochs:
            return self.auc
        gain = max(self.aucs[-1] - self.aucs[count // 2 - 1], 0.0)
        doublings = min(math.log2(horizon / self.epochs), MAX_DOUBLINGS)
        further = DECAY * (1 - math.pow(DECAY, doublings)) / (1 - DECAY)
        return max(self.auc, self.aucs[-1] + further * gain)


@dataclass
class Journal:
    """What has been decided and measured so far."""

    spent: float = 0.0
    rounds: int = 0
    standings: dict[str, Standing] = field(default_factory=dict)
    best_strength: str | None = None
    """The name of the best entrant of the first round."""
    further: list[list[dict[str, Any]]] = field(default_factory=list)
    """The settings of the entrants of each round after the last planned one."""
    candidates: list[str] | None = None
    """The entrants among which the teachers were chosen; those that raced in time that students left came later."""
    given_up: list[str] = field(default_factory=list)
    epoch_seconds: float = 0.0
    """Seconds of an epoch of the first model, measured before the race."""
    races: bool | None = None
    """Whether there is time for a race; None before that is decided."""
    race_began: float | None = None
    """Seconds that were spent when the race began."""
    grows: bool | None = None
    """Whether there is time to prepare all rows once more, with vocabularies that grow; None before it is decided."""
    instead: str | None = None
    """The run that ships because it has time to learn from all rows, or the chosen one; None before it is decided."""
    last_share: float | None = None
    """For what share of its length the chosen run has time when it learns from all rows; None before it is decided."""
    teachers_learn: bool | None = None
    """Whether a student's teachers learn from all rows before it does; None before it is decided."""
    recombined: int | None = None
    """How many recombined rows there are for each training row; None before it is decided."""
    taken: float | None = None
    """Seconds that the fit took, once it is finished."""


def train_slice(
    data: str, config: dict[str, Any], out: str, until: int | None, seconds: float | None
) -> dict[str, Any]:
    """Train a model of the race for a while, write its logits of the validation rows, and return how it has done.

    The arguments are plain, for a job.
    """
    deadline = None if seconds is None else time.time() + seconds
    settings, directory, prepared = (
        RunConfig.from_json(config),
        Path(out),
        PreparedData(Path(data), verify=False),
    )
    trained = advance(settings, prepared, directory, until=until, deadline=deadline, quiet=False)
    last, best = trained.history[-1], trained.history[trained.best_epoch - 1]
    estimator = Estimator(f"{settings.model}-seed-{settings.train.seed}", best.step)
    write_logits(
        directory / RACE, {estimator: trained.model}, prepared, "valid", torch.device(settings.device)
    )
    steps_per_epoch = -(-len(prepared.train) // settings.train.batch_size)
    return asdict(
        Standing(
            aucs=[epoch.valid_auc for epoch in trained.history],
            loglosses=[epoch.valid_logloss for epoch in trained.history],
            epochs=last.step / steps_per_epoch,
            seconds=trained.seconds,
            finished=trained.finished,
        )
    )


def time_epoch(data: str, config: dict[str, Any]) -> float:
    """Return how long an epoch of a run takes here. The arguments are plain, for a job."""
    return epoch_seconds(RunConfig.from_json(config), PreparedData(Path(data), verify=False))
