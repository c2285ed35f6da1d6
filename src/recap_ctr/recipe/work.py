"""What all stages of a portfolio share: data, clock, journal, and how a run is set up, packed and shipped."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.jobs import machine
from recap_ctr.jobs.engines import LOCAL, executor_for
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import parse_model, short_name
from recap_ctr.recipe.clock import Clock
from recap_ctr.recipe.config import MAX_BATCH, RecipeConfig, training_of
from recap_ctr.recipe.entrants import Entrant, Journal, Standing
from recap_ctr.recipe.probe import three_digits
from recap_ctr.recipe.ship import ship_best
from recap_ctr.storage.files import make_directory, read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.breakdown import check_slices
from recap_ctr.training.config import ARTIFACT, WIDE, RunConfig
from recap_ctr.training.parallel import Runs, run_many

JOURNAL = "journal.json"
VALIDATION_ROWS = 250_000  # An epoch of more rows is validated several times.
BATCH_FACTOR, RATE_FACTOR = 4, 2.0
"""Against the recipe's batches and learning rate: larger batches pass over the rows twice as fast, at a larger step."""
WIDE_DIM = (
    8  # Size of vectors where many fields make the towers' matrices large: a quarter of the work of 16.
)
MIDDLE = 1e3
REPORT_SECONDS = 4.0  # To compare, to draw the page, and to end.
FIELD_SECONDS = 0.2  # The same for each field, as far as its slices take time.


class Work:
    """Everything that is decided before the first stage, and what is noted from stage to stage."""

    def __init__(
        self,
        config: RecipeConfig,
        data: PreparedData,
        out: Path,
        *,
        threads: int | None = None,
        device: str = "cpu",
        executor: Executor | str = LOCAL,
        budget: float | None = None,
        started: float | None = None,
        own_scores: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Read the journal of an earlier call, and start the clock.

        `budget` is in minutes, counted from `started`, a time of `time.time`. `executor` may be the name of an engine:
        as many jobs run at a time as it has cores for. `own_scores` is the directory of the logit tables of a model
        that the user has.
        """
        self.config, self.data, self.out, self.device, self.quiet = config, data, out, device, quiet
        check_slices(config.slices, data.schema)
        self.threads = threads or max(machine.num_cores() // 4, 1)
        self.executor = executor_for(executor, self.threads, device)
        self.training = self._paced(training_of(config, len(data.train), teacher=True))
        self.student_training = self._paced(training_of(config, len(data.train)))
        inputs = {
            "data": data.fingerprint,
            "recipe": config.model_dump(mode="json", exclude={"card", "slices"}),
            "threads": self.threads,
            "device": device,
            "budget": budget,
        }
        if own_scores is not None:
            inputs["own_scores"] = own_scores.name
        self._journal_file = out / f"race-{fingerprint(inputs)[:10]}" / JOURNAL
        self.journal = self._read_journal()
        self.budget, self.own_scores = budget, own_scores
        is_finished = self.journal.taken is not None  # Then there is nothing left to hurry for.
        self.clock = Clock(None if is_finished else budget, started=started, spent=self.journal.spent)
        self.pack_seconds = 1.0
        """How long it takes to calibrate, measure and pack a run: the longest that was seen."""
        self.last_seconds = 0.0
        """How long it takes to train the parts again that need no race, on all rows, if that is wanted."""

    def say(self, text: str) -> None:
        """Show a message, unless the fit is quiet."""
        if not self.quiet:
            say(text)

    def _paced(self, training: TrainConfig) -> TrainConfig:
        """Return the training settings; where the user has not decided, passes are quick and decisions frequent."""
        decided = {**self.config.train, **self.config.teacher_train}
        changes: dict[str, Any] = {}
        if "validations" not in decided:
            changes["validations"] = max(round(len(self.data.train) / VALIDATION_ROWS), 1)
        if "batch_size" not in decided:
            changes["batch_size"] = min(BATCH_FACTOR * training.batch_size, MAX_BATCH)
            if self.config.learning_rate is None and changes["batch_size"] > training.batch_size:
                changes["learning_rate"] = RATE_FACTOR * training.learning_rate
        return training.model_copy(update=changes)

    def settings_of(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Return a model's settings; vectors are smaller where there are many fields, unless their size is set."""
        config = parse_model(model, settings)
        is_wide = self.data.layout.num_fields * getattr(config, "dim", 0) >= WIDE
        if is_wide and "dim" not in settings:
            return {**settings, "dim": WIDE_DIM}
        return settings

    def run_config(self, model: str, settings: dict[str, Any], training: TrainConfig) -> RunConfig:
        """Return a run with what all runs of a fit have in common."""
        return RunConfig(
            model=model,
            model_config=parse_model(model, settings),
            train=training,
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            train_baseline=False,
            report_fields=False,
            slices=self.config.slices,
            threads=self.threads,
            device=self.device,
        )

    def path_of(self, name: str, config: RunConfig) -> Path:
        """Return the directory of a run."""
        return self.out / f"{short_name(name)}-{fingerprint(config.training_inputs(self.data))[:10]}"

    def first_run(self) -> RunConfig:
        """Return the run of the teachers' model at a medium strength of the regulariser."""
        l2 = three_digits(MIDDLE / len(self.data.train)) if self.config.l2 is None else self.config.l2
        settings = self.settings_of(self.config.teacher_model, self.config.teacher_settings)
        return self.run_config(
            self.config.teacher_model, settings, self.training.model_copy(update={"l2": l2})
        )

    def slice_of(
        self, path: Path, config: RunConfig, until: int | None, seconds: float | None
    ) -> dict[str, Any]:
        """Return the arguments of the job that trains a run to the epoch `until`, or for some seconds."""
        return {
            "data": str(self.data.path),
            "config": config.to_json(),
            "out": str(path),
            "until": until,
            "seconds": seconds,
        }

    def pack(self, entrants: Sequence[Entrant]) -> Runs:
        """Calibrate, measure and pack runs as they are, with their logit tables."""
        configs = {entrant.path: entrant.config for entrant in dict.fromkeys(entrants)}
        runs = run_many(
            configs,
            self.data,
            title="packing",
            executor=self.executor,
            quiet=self.quiet,
            deadline=time.time(),
        )
        self.note_packing(runs)
        return runs

    def note_packing(self, runs: Runs) -> None:
        """Note how long packing the slowest of some runs took."""
        seconds = [report.seconds.evaluate for report in runs.values()]
        self.pack_seconds = max(self.pack_seconds, *seconds) if seconds else self.pack_seconds

    @property
    def reserve(self) -> float:
        """Return the seconds to keep for packing and for the report."""
        return 2 * self.pack_seconds + REPORT_SECONDS

    def student_reserve(self) -> float:
        """Return the seconds to keep after a student's training: it is measured on routes and depths, on all rows."""
        return 1.25 * self.pack_seconds + 0.6 * self.journal.epoch_seconds + self.report_seconds

    @property
    def report_seconds(self) -> float:
        """Return the seconds to keep for the report, whose slices take time for each field."""
        return REPORT_SECONDS + FIELD_SECONDS * self.data.layout.num_fields

    def ship_best(self, runs: Runs) -> None:
        """Ship the best of the runs on validation rows, unless a better model of the same data is shipped already.

        What a finished fit has shipped stays: a simpler model may have been preferred to a better one.
        """
        if self.journal.taken is None or not (self.out / ARTIFACT / MANIFEST).is_file():
            ship_best(runs, self.out, self.data)

    def give_up(self, what: str) -> None:
        """Note what there is no time for."""
        if what not in self.journal.given_up:
            self.journal.given_up.append(what)

    def _read_journal(self) -> Journal:
        if not self._journal_file.is_file():
            return Journal()
        values = read_object(self._journal_file, "a journal")
        standings = {name: Standing(**standing) for name, standing in values["standings"].items()}
        return Journal(**{**values, "standings": standings})

    def record(self) -> None:
        """Write down what has been decided and how long it took."""
        self.journal.spent = self.clock.taken if self.journal.taken is None else self.journal.taken
        make_directory(self._journal_file.parent)
        write_json(self._journal_file, asdict(self.journal))
