"""The default fit: race a portfolio of models, let the best mean of them teach a student, ship the best of all.

Every model is an ordinary run in a directory of its own, trained in slices: nothing is trained twice, and what the race
leaves behind can teach. So a model is judged on all rows, as it is trained, at the length that the fit has time for.
With a budget, all models of a round get the same time; without one, the same epochs.

After each round the decisions are written to a journal, so that an interrupted fit goes on where it was. The best model
so far is shipped as soon as there is one.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.own_scores import OWN_SCORES
from recap_ctr.config import TrainConfig
from recap_ctr.data.rates import crossable
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.jobs import machine
from recap_ctr.jobs.engines import LOCAL, executor_for
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.jobs.progress import brief, overall, say
from recap_ctr.models.catalogue import parse_model, short_name
from recap_ctr.models.recap import RecapConfig
from recap_ctr.recipe.choice import choose_shipped
from recap_ctr.recipe.clock import Clock
from recap_ctr.recipe.config import MAX_BATCH, TEACHER_SEEDS, RecipeConfig, training_of
from recap_ctr.recipe.entrants import RACE, Entrant, Journal, Standing, time_epoch, train_slice
from recap_ctr.recipe.probe import three_digits
from recap_ctr.recipe.report import portfolio_report
from recap_ctr.recipe.selection import Selection, select_members
from recap_ctr.recipe.ship import ship, shipped_auc
from recap_ctr.storage.files import make_directory, read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from recap_ctr.training import trees
from recap_ctr.training.config import LOGITS, WIDE, RunConfig
from recap_ctr.training.parallel import Runs, run_job, run_many
from recap_ctr.training.rates import RATES
from recap_ctr.training.references import CONVERGED, LOGISTIC, TREES, write_tree_logits
from recap_ctr.training.report import ArmSummary, FitReport, TeachingStep, parse_report, write_report

JOURNAL = "journal.json"
Floats = npt.NDArray[np.float64]
STRENGTHS = (1e2, 1e3, 1e4)
"""Strengths of the embedding regulariser that race first, as l2 · rows: the weight of the prior against all rows."""
MIDDLE = 1e3
HALF_DECADE = 10**0.5
RACE_EPOCHS = 48  # Where all workers together have time for fewer, there is no race.
STRENGTH_PER_EPOCH, UNTRIED = 200.0, (300.0, 5e3)
"""Without a race, l2 · rows grows with the epochs that there is time for, within limits: the longer a run, the stronger
the regulariser that is best for it."""
BATCH_FACTOR, RATE_FACTOR = 4, 2.0
"""Against the recipe's batches and learning rate: larger batches pass over the rows twice as fast, at a larger step."""
WIDE_DIM = 8  # Of vectors, where many fields make the towers' matrices large: a quarter of the work of 16.
VALIDATION_ROWS = 250_000  # An epoch of more rows is validated several times.
EPOCHS = (8, 8, 16, None)  # Of the four rounds, where there is no budget.
LEADERS = 2  # Of the last round, where there is no budget; twice as many race in the one before.
SHARES = (0.2, 0.4, 0.5, 0.58)  # Of the time that is left after the references, at the end of each round.
TYPICAL_EPOCHS = 260  # Of all models together, without a budget: most stop early.
REFERENCE_SHARE = 0.2  # Of the time; they stand beside the student's towers, too.
LOOK_EPOCHS = (
    2.0,
    8.0,
)  # A model without time for a third of a student's epochs, within these limits, is left out.
MIN_STUDENT_EPOCHS = 0.3
MAX_CHALLENGERS = 12
STUDENT = "the student"
ON_TOP_FACTOR = (
    0.1  # Of the best regulariser: beside click rates little is left to learn, and less to over-fit.
)
RATES_TRAINING = {"learning_rate": 2e-3, "l2": 0.0, "ema_epochs": (1.0,), "max_epochs": 40}
RATES_BATCHES = (256, 1024)  # The smallest and largest, for few rows and for many.
MAX_COUNTED_ROWS = 20_000_000  # Of more training rows, click rates would not fit in memory.
REPORT_SECONDS = 4.0  # To compare, to draw the page, and to end.


@dataclass(frozen=True)
class Ensemble:
    """The estimators that teach together, chosen among the named ones."""

    names: list[str]
    selection: Selection

    @property
    def members(self) -> list[str]:
        """Return the members' names; one with more weight comes several times."""
        return [self.names[member] for member in self.selection.members]

    def steps(self) -> list[TeachingStep]:
        """Return what each member adds, with the one that was not worth adding."""
        refused = self.selection.refused
        steps = [*self.selection.steps, *([refused] if refused else [])]
        return [
            TeachingStep(
                member=self.names[step.member],
                logloss=step.logloss,
                confirmed=step.confirmed,
                taken=step is not refused,
            )
            for step in steps
        ]


class Portfolio:
    """The stages of a fit by portfolio, of prepared data in a directory."""

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
        """Set up the race; `budget` is in minutes, counted from `started`, a time of `time.time`.

        `own_scores` is the directory of the logit tables of a model that the user has. `executor` may be the name of an
        engine: as many jobs run at a time as it has cores for.
        """
        self.config, self.data, self.out, self.device, self.quiet = config, data, out, device, quiet
        self.threads = threads or max(machine.num_cores() // 4, 1)
        self.executor = executor_for(executor, self.threads, device)
        self.training = self._paced(training_of(config, len(data.train), teacher=True))
        self.student_training = self._paced(training_of(config, len(data.train)))
        inputs = {
            "data": data.fingerprint,
            "recipe": config.model_dump(mode="json"),
            "threads": self.threads,
            "device": device,
            "budget": budget,
        }
        if own_scores is not None:
            inputs["own_scores"] = own_scores.name
        self._journal_file = out / f"race-{fingerprint(inputs)[:10]}" / JOURNAL
        self.journal = self._read_journal()
        self.budget = budget
        is_finished = self.journal.taken is not None  # Then there is nothing left to hurry for.
        self.clock = Clock(None if is_finished else budget, started=started, spent=self.journal.spent)
        self.entrants: dict[str, Entrant] = {}
        self.counted: Runs = {}
        """The runs of lr and rates, which need no race; they teach, stand beside the student's towers, and may ship."""
        self.references: dict[str, Path] = {}
        self.own_scores = own_scores
        self.pack_seconds = 1.0
        """How long it takes to calibrate, measure and pack a run: the longest that was seen."""

    def run(self) -> FitReport:
        """Do all stages, ship the best model, and return the report. Interrupted, ship the best so far."""
        make_directory(self.out)
        with locked(self.out), overall("fit", self._time), brief():
            try:
                return self._run()
            except KeyboardInterrupt:
                if self.counted:
                    self.say("interrupted: packing the best so far; the same command goes on from here")
                    self._finish({}, self._pack([self._best()] if self.journal.standings else []), None)
                raise

    def _time(self) -> tuple[float, float]:
        """Return the seconds that the fit has taken, and those that it will take: its budget, or an estimate."""
        if self.clock.is_limited or not self.journal.epoch_seconds:
            return self.clock.taken, self.clock.seconds
        epochs = TYPICAL_EPOCHS * self.journal.epoch_seconds / self.executor.workers
        return self.clock.taken, max(epochs, self.clock.taken)

    def _run(self) -> FitReport:
        self._train_references()
        self._race()
        ensemble = self._select()
        teachers = self._pack_teachers(ensemble)
        students = self._train_students(ensemble)
        return self._finish(students, teachers, ensemble)

    def say(self, text: str) -> None:
        """Show a message, unless the fit is quiet."""
        if not self.quiet:
            say(text)

    # Runs and their names.

    def _paced(self, training: TrainConfig) -> TrainConfig:
        """Return the training with what makes passes quick and decisions frequent, where the user has not decided."""
        decided = {**self.config.train, **self.config.teacher_train}
        changes: dict[str, Any] = {}
        if "validations" not in decided:
            changes["validations"] = max(round(len(self.data.train) / VALIDATION_ROWS), 1)
        if "batch_size" not in decided:
            changes["batch_size"] = min(BATCH_FACTOR * training.batch_size, MAX_BATCH)
            if self.config.learning_rate is None and changes["batch_size"] > training.batch_size:
                changes["learning_rate"] = RATE_FACTOR * training.learning_rate
        return training.model_copy(update=changes)

    def _settings_of(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Return a model's settings; vectors are smaller where there are many fields, unless their size is set."""
        config = parse_model(model, settings)
        is_wide = self.data.layout.num_fields * getattr(config, "dim", 0) >= WIDE
        if is_wide and "dim" not in settings:
            return {**settings, "dim": WIDE_DIM}
        return settings

    def _run_config(self, model: str, settings: dict[str, Any], training: TrainConfig) -> RunConfig:
        return RunConfig(
            model=model,
            model_config=parse_model(model, settings),
            train=training,
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            train_baseline=False,
            report_fields=False,
            threads=self.threads,
            device=self.device,
        )

    def _path_of(self, name: str, config: RunConfig) -> Path:
        return self.out / f"{short_name(name)}-{fingerprint(config.training_inputs(self.data))[:10]}"

    def _enter(self, model: str, l2: float, rate_factor: float = 1.0, dim: int | None = None) -> Entrant:
        """Add a model to the race, with its run."""
        rate = self.training.learning_rate * rate_factor
        changes = {"l2": l2, "learning_rate": rate, "seed": TEACHER_SEEDS + len(self.entrants) + 1}
        settings = self.config.teacher_settings if model == self.config.teacher_model else {}
        settings = self._settings_of(model, settings if dim is None else {**settings, "dim": dim})
        name = f"{model} l2={l2:.3g}"
        name += "" if rate_factor == 1 else f" rate={rate:g}"
        name += "" if dim is None else f" dim={dim}"
        if name in self.entrants:
            return self.entrants[name]
        config = self._run_config(model, settings, self.training.model_copy(update=changes))
        entrant = Entrant(name, config, self._path_of(model, config))
        self.entrants[name] = entrant
        return entrant

    # References.

    def _train_references(self) -> None:
        """Train what the result is compared with, and what counts; the best of them is the first to be shipped."""
        deadline = self.clock.deadline(max(REFERENCE_SHARE * self.clock.seconds, 1.0))
        configs = [self._run_config("lr", {}, CONVERGED)]
        if crossable(self.data.layout) and len(self.data.train) <= MAX_COUNTED_ROWS:
            configs.append(self._run_config(RATES, {}, self._rates_training()))
        # References that a budget has cut must not be taken for those of a longer fit.
        suffix = "" if self.budget is None else f"-{self.budget:g}"
        runs = {self._path_of(f"{config.model}{suffix}", config): config for config in configs}
        self.references = {LOGISTIC: next(iter(runs)) / LOGITS}
        jobs = [run_job(directory, config, self.data, deadline) for directory, config in runs.items()]
        if not self.journal.epoch_seconds:
            first = self._first_run().to_json()
            jobs.append(Job("timing", time_epoch, {"data": str(self.data.path), "config": first}))
        if trees.is_installed():
            self.references[TREES] = self.out / f"lightgbm{suffix}-{self.data.fingerprint[:10]}"
            arguments = {
                "data": str(self.data.path),
                "out": str(self.references[TREES]),
                "threads": self.threads,
                "deadline": deadline,
            }
            jobs.append(Job(TREES, write_tree_logits, arguments))
        if self.own_scores is not None:
            self.references[OWN_SCORES] = self.own_scores
        self.say(f"references: {', '.join(self.references)}")
        results = self.executor.run(jobs, title="references", quiet=self.quiet)
        self.counted = {
            directory: parse_report(result) for directory, result in zip(runs, results, strict=False)
        }
        if not self.journal.epoch_seconds:
            self.journal.epoch_seconds = results[len(runs)]
            total = self._time()[1]
            self.say(
                f"time: {self.journal.epoch_seconds:.1f} s an epoch, {self.executor.workers} runs at a time;"
                f" {'' if self.clock.is_limited else 'about '}{total / 60:.1f} minutes in all"
            )
        if deadline is not None and time.time() > deadline:
            self._give_up("training the references to their end")
        self._note_packing(self.counted)
        self._ship_best(self.counted)
        self._record()

    def _rates_training(self) -> TrainConfig:
        smallest, largest = RATES_BATCHES
        size = min(max(len(self.data.train) // 100, smallest), largest)
        return self.training.model_copy(update={**RATES_TRAINING, "batch_size": size})

    # The race.

    def _race(self) -> None:
        """Race strengths of the regulariser, then kinds of models and other settings, then the best of them."""
        if self.journal.race_began is None:
            self.journal.race_began = self.clock.taken
        if not self.journal.standings and self._epochs_in_budget() < RACE_EPOCHS:
            self._give_up("the race: the student learns from labels")
            return
        kind, rows = self.config.teacher_model, len(self.data.train)
        strengths = [s / rows for s in STRENGTHS] if self.config.l2 is None else [self.config.l2]
        first = [self._enter(kind, three_digits(l2)) for l2 in strengths]
        if self.config.l2 is None and self.config.portfolio:
            first.append(self._enter(self.config.portfolio[0], three_digits(MIDDLE / rows)))
        self._round(0, first, "race of strengths")
        if not self.journal.standings:
            return
        best = self._best_of_round(first)
        self._round(1, self._challengers(best), "race of models")
        self._ship_best(self._pack([self._best()]))
        for number, leaders in self._last_rounds().items():
            self._round(number, self._leaders(leaders), "race of the best")

    def _last_rounds(self) -> dict[int, int]:
        """Return how many of the best race in the last two rounds: as many as keep all workers busy.

        Without a budget nothing may depend on how many workers there are, so that every engine gives the same model.
        """
        workers = LEADERS if self.budget is None else self.executor.workers
        return {2: 2 * workers, 3: workers}

    def _first_run(self) -> RunConfig:
        """Return the run of the teachers' model at a middling strength."""
        l2 = three_digits(MIDDLE / len(self.data.train)) if self.config.l2 is None else self.config.l2
        settings = self._settings_of(self.config.teacher_model, self.config.teacher_settings)
        return self._run_config(
            self.config.teacher_model, settings, self.training.model_copy(update={"l2": l2})
        )

    def _epochs_in_budget(self) -> float:
        """Return how many epochs of the first model all workers together have time for."""
        available = self.clock.until(1.0, self.reserve) * self.executor.workers
        return available / max(self.journal.epoch_seconds, 1e-9)

    def _best_of_round(self, entrants: Sequence[Entrant]) -> Entrant:
        """Return the best strength of the first round; decided once."""
        if self.journal.best_strength is None:
            raced = [entrant for entrant in entrants if entrant.name in self.journal.standings]
            of_a_kind = [entrant for entrant in raced if entrant.config.model == self.config.teacher_model]
            best = max(of_a_kind, key=lambda entrant: self._outlook(entrant.name))
            self.journal.best_strength = best.name
            self._record()
        return self.entrants[self.journal.best_strength]

    def _challengers(self, best: Entrant) -> list[Entrant]:
        """Return models and settings that may be better than the best strength, the most promising first.

        Those that would not have time for a look are left out, and that is said.
        """
        kind, l2 = best.config.model, best.config.train.l2
        rows = len(self.data.train)
        wanted: list[dict[str, Any]] = []
        if self.config.l2 is None:
            strengths = [strength / rows for strength in STRENGTHS]
            factors = [HALF_DECADE, 1 / HALF_DECADE]
            if l2 >= 0.99 * strengths[-1]:
                factors = [HALF_DECADE, 10.0]
            elif l2 <= 1.01 * strengths[0]:
                factors = [1 / HALF_DECADE, 0.1]
            wanted = [{"model": kind, "l2": three_digits(l2 * factor)} for factor in factors]
        wanted += [{"model": model, "l2": l2} for model in self.config.portfolio]
        if self.config.learning_rate is None:
            wanted.insert(3, {"model": kind, "l2": l2, "rate_factor": 2.0})
        base = getattr(parse_model(kind, self.config.teacher_settings), "dim", None)
        if base is not None and getattr(best.config.model_config, "dim", base) < base:
            wanted.append({"model": kind, "l2": l2, "dim": base})
        entrants = [self._enter(**settings) for settings in wanted]
        unseen = [entrant for entrant in entrants if entrant.name not in self.journal.standings]
        affordable = self._affordable()
        for entrant in unseen[affordable:]:
            self._give_up(f"a look at {entrant.name}")
        return unseen[:affordable]

    def _affordable(self) -> int:
        """Return how many models can have a look in the second round."""
        if not self.clock.is_limited:
            return MAX_CHALLENGERS
        fewest, most = LOOK_EPOCHS
        look = min(max(fewest, self._horizon() / 3), most) * self._epoch_seconds()
        available = self._until_end_of_round(1) * self.executor.workers
        return int(available / max(look, 1e-9))

    def _epoch_seconds(self) -> float:
        """Return how long an epoch has taken, over all models so far."""
        spent = sum(standing.seconds for standing in self.journal.standings.values())
        epochs = sum(standing.epochs for standing in self.journal.standings.values())
        return spent / max(epochs, 1e-9)

    def _outlook(self, name: str) -> float:
        return self.journal.standings[name].outlook(self._horizon())

    def _horizon(self) -> float:
        """Return how many epochs a student will have time for; infinite without a budget."""
        if self.budget is None:
            return math.inf
        seconds = (1 - SHARES[-1]) * (60 * self.budget - (self.journal.race_began or 0.0))
        return seconds / max(self.journal.epoch_seconds, 1e-9)

    def _leaders(self, count: int) -> list[Entrant]:
        """Return the best entrants by outlook."""
        ranked = sorted(self.journal.standings, key=lambda name: -self._outlook(name))
        return [self.entrants[name] for name in ranked[:count]]

    def _best(self) -> Entrant:
        """Return the entrant with the best validation AUC so far."""
        standings = self.journal.standings
        return self.entrants[max(standings, key=lambda name: standings[name].auc)]

    @property
    def reserve(self) -> float:
        """Return the seconds to keep for packing and for the report."""
        return 2 * self.pack_seconds + REPORT_SECONDS

    def _until_end_of_round(self, number: int) -> float:
        """Return the seconds until a round must end; infinite without a budget."""
        began = self.journal.race_began or 0.0
        share = SHARES[number] + (1 - SHARES[number]) * began / self.clock.seconds
        return self.clock.until(share, self.reserve)

    def _round(self, number: int, entrants: Sequence[Entrant], title: str) -> None:
        """Train all entrants for the same time, or to the same epoch, unless that was done before."""
        if self.journal.rounds > number:
            return
        live = [
            entrant
            for entrant in entrants
            if entrant.name not in self.journal.standings or not self.journal.standings[entrant.name].finished
        ]
        waves = -(-len(live) // self.executor.workers)
        seconds = self._until_end_of_round(number) / max(waves, 1)
        if live and seconds > 0:
            jobs = [Job(entrant.name, train_slice, self._slice(entrant, number, seconds)) for entrant in live]

            def receive(index: int, result: Any) -> None:
                self.journal.standings[live[index].name] = Standing(**result)
                self._record()

            self.executor.run(jobs, title=title, quiet=self.quiet, done=receive)
            ranked = sorted(live, key=lambda entrant: -self.journal.standings[entrant.name].auc)
            listed = "; ".join(
                f"{entrant.name} {100 * self.journal.standings[entrant.name].auc:.3f}"
                f" ({self.journal.standings[entrant.name].epochs:.1f} epochs)"
                for entrant in ranked
            )
            self.say(f"{title}: {listed}")
        self.journal.rounds = number + 1
        self._record()

    def _slice(self, entrant: Entrant, number: int, seconds: float) -> dict[str, Any]:
        return {
            "data": str(self.data.path),
            "config": entrant.config.to_json(),
            "out": str(entrant.path),
            "until": None if self.clock.is_limited else EPOCHS[number],
            "seconds": seconds if math.isfinite(seconds) else None,
        }

    # Teachers and students.

    def _select(self) -> "Ensemble":
        """Choose the members of the teaching ensemble among all that may teach.

        Models that stand beside the student's towers don't: the towers are worth more if they know something else. Nor
        do trees that are worse than the regression because the budget cut them, nor trees alone: without a race to
        show what can be reached, a student would learn no more than they know.
        """
        valid, rate = self.data.valid, self.config.negative_rate

        def logits_of(table: Path) -> tuple[Floats, Floats | None]:
            logits_N = np.asarray(LogitTable(table).logits_NM[:, 0], np.float64)
            return undo_sampling(logits_N, valid, rate)

        tables = {name: self.entrants[name].path / RACE for name in self.journal.standings}
        tables |= {name: path / "valid" for name, path in self.references.items()}
        columns = {name: logits_of(table)[0] for name, table in tables.items()}
        weights = logits_of(tables[LOGISTIC])[1]
        regression = columns.pop(LOGISTIC)
        if not self.journal.standings:
            columns.pop(TREES, None)
        if TREES in columns:
            losses = [
                metrics.logloss(valid.labels, logits, weights) for logits in (columns[TREES], regression)
            ]
            if losses[0] > losses[1]:
                del columns[TREES]
        if not columns:
            return Ensemble([], Selection((), None))
        return Ensemble(list(columns), select_members(valid.labels, list(columns.values()), weights))

    def _pack(self, entrants: Sequence[Entrant]) -> Runs:
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
        self._note_packing(runs)
        return runs

    def _note_packing(self, runs: Runs) -> None:
        seconds = [report.seconds.evaluate for report in runs.values()]
        self.pack_seconds = max(self.pack_seconds, *seconds) if seconds else self.pack_seconds

    def _pack_teachers(self, ensemble: "Ensemble") -> Runs:
        """Pack the members of the ensemble, and the best model, which may be shipped."""
        members = [self.entrants[name] for name in ensemble.members if name in self.entrants]
        teachers = self._pack([*members, *([self._best()] if self.journal.standings else [])])
        self._ship_best({**self.counted, **teachers})
        return teachers

    def _tables_of(self, ensemble: "Ensemble") -> list[Path]:
        """Return the directories of the members' logit tables; a member with more weight comes several times."""
        return [self.references.get(name) or self.entrants[name].path / LOGITS for name in ensemble.members]

    def _train_students(self, ensemble: "Ensemble") -> Runs:
        """Train students side by side, of which validation chooses: what is best differs between logs."""
        if not self._has_time_for_a_student():
            self._give_up(STUDENT)
            return {}
        configs = {}
        for student in self.config.students:
            for config in self._students(
                student, tuple(path / "train" for path in self._tables_of(ensemble))
            ):
                configs[self._path_of(f"student-{student}", config)] = config
        teachers = " + ".join(ensemble.members) or "labels alone"
        self.say(f"student: {' and '.join(self.config.students)}, taught by {teachers}")
        return run_many(
            configs,
            self.data,
            title="student",
            executor=self.executor,
            quiet=self.quiet,
            deadline=self.clock.deadline(self.clock.until(1.0, self._student_reserve())),
        )

    def _students(self, student: str, teachers: tuple[Path, ...]) -> list[RunConfig]:
        """Return the runs of a student, the most promising first, as many as there are workers for.

        One has a weaker regulariser than its teachers, since soft targets regularise too. One learns beside the click
        rates what these leave open, from labels alone. One has its teachers' regulariser.
        """
        chosen = self.config.model_settings if student == self.config.students[0] else {}
        settings = self._settings_of(student, chosen)
        like = self._best_training()

        def config(factor: float, on_top: Path | None = None) -> RunConfig:
            changes = {
                "l2": three_digits(like.l2 * (factor if self.config.l2 is None else 1.0)),
                "learning_rate": like.learning_rate,
            }
            base = self._run_config(student, settings, self.student_training.model_copy(update=changes))
            return replace(
                base.with_seed(self.config.seed),
                teachers=() if on_top else teachers,
                routes=self.config.routes if isinstance(base.model_config, RecapConfig) else 1,
                route_choice=self.config.route_choice,
                beside=tuple(run for run in self.counted if on_top is None or run != on_top),
                on_top=on_top,
            )

        runs = [config(1 / HALF_DECADE if teachers else 1.0)]
        rates = [run for run, report in self.counted.items() if report.model.name == RATES]
        if isinstance(runs[0].model_config, RecapConfig):
            runs += [config(ON_TOP_FACTOR, on_top=run) for run in rates]
        if self.config.l2 is None:
            runs.append(config(1.0 if teachers else 1 / HALF_DECADE))
        workers = len(runs) if self.budget is None else self.executor.workers
        return runs[: max(workers // len(self.config.students), 1)]

    def _best_training(self) -> TrainConfig:
        """Return the training of the most promising entrant of the teachers' kind; as configured without a race."""
        of_a_kind = [
            entrant
            for entrant in self.entrants.values()
            if entrant.config.model == self.config.teacher_model and entrant.name in self.journal.standings
        ]
        if not of_a_kind:
            return self._untried_training()
        return max(of_a_kind, key=lambda entrant: self._outlook(entrant.name)).config.train

    def _untried_training(self) -> TrainConfig:
        """Return the training of a student where there was no race."""
        training = self._first_run().train
        if self.config.l2 is not None or self.budget is None:
            return training
        weakest, strongest = UNTRIED
        seconds = 60 * self.budget - (self.journal.race_began or 0.0)
        strength = STRENGTH_PER_EPOCH * seconds / max(self.journal.epoch_seconds, 1e-9)
        l2 = three_digits(min(max(strength, weakest), strongest) / len(self.data.train))
        return training.model_copy(update={"l2": l2})

    def _has_time_for_a_student(self) -> bool:
        if self.journal.taken is not None:
            return STUDENT not in self.journal.given_up
        needed = MIN_STUDENT_EPOCHS * max(self._epoch_seconds(), self.journal.epoch_seconds)
        return self.clock.until(1.0, self._student_reserve()) > needed

    def _student_reserve(self) -> float:
        """Return the seconds to keep after a student's training: it is measured on routes and depths, on all rows."""
        return self.reserve + self.journal.epoch_seconds

    # What is shipped.

    def _ship_best(self, runs: Runs) -> None:
        """Ship the best of the runs on validation rows, unless a better model of the same data is shipped already."""
        best = max(runs, key=lambda path: runs[path].metrics.valid.raw.auc)
        if runs[best].metrics.valid.raw.auc > shipped_auc(self.out, self.data):
            ship(best, self.out)

    def _give_up(self, what: str) -> None:
        """Note what there is no time for."""
        if what not in self.journal.given_up:
            self.journal.given_up.append(what)

    def _finish(self, students: Runs, teachers: Runs, ensemble: "Ensemble | None") -> FitReport:
        """Ship the best run on validation, and report on it and on all that was tried."""
        choice = choose_shipped(self.data, students, {**teachers, **self.counted})
        if choice.reason:
            self.say(f"shipped: {choice.path.name}; {choice.reason}")
        ship(choice.path, self.out)
        if ensemble and self.journal.taken is None:
            self.journal.taken = self.clock.taken
        report = portfolio_report(
            self.config,
            self.data,
            self.out,
            teachers=teachers,
            students=students,
            choice=choice,
            references=self.references,
            members=self._tables_of(ensemble) if ensemble else [],
            plan={"budget": self.budget, "taken": self.journal.taken, "given_up": self.journal.given_up},
            arms=self._arms(ensemble.members if ensemble else ()),
            teaching=ensemble.steps() if ensemble else [],
        )
        write_report(self.out, report)
        self._record()
        return report

    def _arms(self, members: Sequence[str]) -> list[ArmSummary]:
        standings = self.journal.standings
        return [
            ArmSummary(
                name=name,
                auc=standing.auc,
                logloss=standing.loglosses[standing.aucs.index(standing.auc)],
                epochs=standing.epochs,
                seconds=standing.seconds,
                finished=standing.finished,
                weight=members.count(name),
            )
            for name, standing in sorted(standings.items(), key=lambda item: -item[1].auc)
        ]

    # The journal.

    def _read_journal(self) -> Journal:
        if not self._journal_file.is_file():
            return Journal()
        values = read_object(self._journal_file, "a journal")
        standings = {name: Standing(**standing) for name, standing in values["standings"].items()}
        return Journal(**{**values, "standings": standings})

    def _record(self) -> None:
        """Write down what has been decided and how long it took."""
        self.journal.spent = self.clock.taken if self.journal.taken is None else self.journal.taken
        make_directory(self._journal_file.parent)
        write_json(self._journal_file, asdict(self.journal))
