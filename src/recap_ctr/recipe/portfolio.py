"""The default fit: race a portfolio of models, let those whose mean is best teach a student, and ship the best of all.

Every model is an ordinary run in a directory of its own, trained in slices: nothing is trained twice, and what the race
leaves behind can teach. So a model is judged on all rows, as it is trained, at the length that the fit has time for.
With a budget, all models of a round get the same time; without one, the same epochs.

After each round the decisions are written to a journal, so that an interrupted fit goes on where it was. The best model
so far is shipped as soon as there is one. The race is in `race`, what all stages share in `work`.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import LogitTable, is_table
from recap_ctr.axes.own_scores import OWN_SCORES
from recap_ctr.config import TrainConfig
from recap_ctr.data.rates import crossable
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.progress import brief, overall
from recap_ctr.recipe.choice import Choice, choose_shipped, prefer_simple
from recap_ctr.recipe.entrants import RACE, Entrant, time_epoch, train_slice
from recap_ctr.recipe.race import Race, TimeAfterStudents
from recap_ctr.recipe.refit import WORTH_OF_ROWS, LastStage, RawRows
from recap_ctr.recipe.report import portfolio_report
from recap_ctr.recipe.selection import Selection, select_members
from recap_ctr.recipe.ship import INTERRUPTED, ship
from recap_ctr.recipe.students import Students
from recap_ctr.recipe.work import Work
from recap_ctr.storage.files import make_directory
from recap_ctr.storage.locks import locked
from recap_ctr.training import trees
from recap_ctr.training.beside import BLEND
from recap_ctr.training.boosted import BOOSTED
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.parallel import Runs, packed_early, run_job, run_many
from recap_ctr.training.rates import RATES
from recap_ctr.training.references import CONVERGED, LOGISTIC, TREES, write_tree_logits
from recap_ctr.training.report import REPORT, FitReport, TeachingStep, parse_report, write_report

Floats = npt.NDArray[np.float64]
TYPICAL_EPOCHS = 260  # All models together take about this many without a budget: most stop early.
MOST_TIMED = 4  # At most this many runs at a time are timed for an epoch.
REFERENCE_SHARE = 0.2  # The references may take this share of the time; they also stand beside the towers.
REFERENCE_SECONDS, LARGEST_SHARE = 60.0, 0.4
"""How much of a short budget the references may take, and the largest share: in a minute they get further than
towers."""
LARGEST_SHARE_BESIDE = 0.7  # Their largest share where a student is trained beside them from the start.
SHARES_BESIDE = {"lr": 0.5, RATES: 0.75}
"""When the first references must have ended, as shares of the time for references; the trees come last."""
RATES_TRAINING = {"learning_rate": 2e-3, "l2": 0.0, "ema_epochs": (1.0,), "max_epochs": 40}
RATES_HEADS: dict[str, Any] = {"heads": 4, "loss": "members-bce"}
HEADS_EPOCHS = (
    7.0  # Four heads are trained in about the time of so many epochs of the first model; if not, one is.
)
RATES_BATCHES = (256, 1024)  # The smallest and largest, for few rows and for many.
MAX_COUNTED_ROWS = 20_000_000  # With more training rows, click rates would not fit in memory.


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

    def __init__(self, work: Work, raw: RawRows | None = None) -> None:
        """Set up the stages; `raw` is the table that was prepared, if the fit knows it."""
        self.work, self.race = work, Race(work)
        self.config, self.data, self.clock, self.journal = work.config, work.data, work.clock, work.journal
        self.configs: dict[Path, RunConfig] = {}
        """The settings of all runs that may ship."""
        self.last = LastStage(work, raw, self.configs)
        self.counted: Runs = {}
        """The runs of lr, boosted and rates, which need no race; they stand beside the towers, and may ship."""
        self.blend: Runs = {}
        """The run that adds them up."""
        self.with_network: Runs = {}
        """The run that adds up the same and the best network of the race."""
        self.references: dict[str, Path] = {}
        self.students = Students(work, self.race, self.last, self.configs)
        self.race.refits = self.last.is_wanted

    def run(self) -> FitReport:
        """Do all stages, ship the best model, and return the report. Interrupted, ship the best so far."""
        make_directory(self.work.out)
        with locked(self.work.out), overall("fit", self._time), brief():
            try:
                return self._run()
            except KeyboardInterrupt:
                self.work.record()
                if self._has_finished_references():
                    self.work.say(INTERRUPTED)
                    self._ship_what_is_there()
                raise

    def _ship_what_is_there(self) -> None:
        """Ship the best model so far, which may be a half-trained student; the next call trains students further."""
        with packed_early(
            self.students.begun, self.data, executor=self.work.executor, quiet=self.work.quiet
        ) as students:
            self._finish(students, self._pack_best(), None)
        self.work.say(f"{self.work.out / ARTIFACT} is the best so far")

    def _has_finished_references(self) -> bool:
        """Keep those references that have finished, and return whether the regression is among them."""
        self.references = {
            name: tables for name, tables in self.references.items() if is_table(tables / "valid")
        }
        return LOGISTIC in self.references and self.references[LOGISTIC].parent in self.counted

    def _pack_best(self) -> Runs:
        """Pack the best of the race, if there was one."""
        return self._pack([self.race.best()] if self.journal.standings else [])

    def _pack(self, entrants: list[Entrant]) -> Runs:
        """Pack models of the race, which may ship from now on."""
        self.configs |= {entrant.path: entrant.config for entrant in entrants}
        return self.work.pack(entrants)

    def _time(self) -> tuple[float, float]:
        """Return the seconds that the fit has taken, and those that it will take: its budget, or an estimate."""
        if self.clock.is_limited or not self.journal.epoch_seconds:
            return self.clock.taken, self.clock.seconds
        epochs = TYPICAL_EPOCHS * self.journal.epoch_seconds / self.work.executor.workers
        return self.clock.taken, max(epochs, self.clock.taken)

    def _run(self) -> FitReport:
        self._time_epoch()
        self.race.plan()
        self._train_references()
        self.race.run()
        ensemble = self._select()
        teachers = self._pack_teachers(ensemble)
        self._add_a_network(teachers)
        students = self.students.train(ensemble.members, self._tables_of(ensemble), self.counted)
        teachers |= self._use_time_of_students(students)
        self.race.give_up_unseen()
        return self._finish(students, teachers, ensemble)

    def _time_epoch(self) -> None:
        """Measure how long an epoch takes, which decides how the time is spent."""
        if self.journal.epoch_seconds:
            return
        arguments = {"data": str(self.data.path), "config": self.work.first_run().to_json()}
        # Several at a time, as it will be: they share the machine's memory, and each gets slower.
        count = min(self.work.executor.workers, MOST_TIMED)
        jobs = [Job(f"timing {number + 1}", time_epoch, arguments) for number in range(count)]
        results = self.work.executor.run(jobs, title="timing", quiet=self.work.quiet)
        self.journal.epoch_seconds = max(results)
        self.work.say(
            f"time: {self.journal.epoch_seconds:.1f} s an epoch, {self.work.executor.workers} runs at a time;"
            f" {'' if self.clock.is_limited else 'about '}{self._time()[1] / 60:.1f} minutes in all"
        )
        self.work.record()

    # References.

    def _train_references(self) -> None:
        """Train the references and the models that count clicks; the best of them is the first to be shipped."""
        # References that a budget has cut must not be taken for those of a longer fit.
        suffix = "" if self.work.budget is None else f"-{self.work.budget:g}"
        self.students.begun = first_student = self.students.first()
        seconds = self._reference_seconds(beside=bool(first_student))
        deadline = self.clock.deadline(seconds)
        configs = self._counted_configs()
        runs = {self.work.path_of(f"{config.model}{suffix}", config): config for config in configs}
        self.configs |= runs
        self.references = {LOGISTIC: next(iter(runs)) / LOGITS}
        shares = SHARES_BESIDE if first_student else {}
        jobs = [
            run_job(
                path,
                config,
                self.data,
                self.clock.deadline(shares.get(config.model, 1.0) * seconds),
                teach=False,
            )
            for path, config in runs.items()
        ]
        if trees.is_installed():
            self.references[TREES] = self.work.out / f"lightgbm{suffix}-{self.data.fingerprint[:10]}"
            arguments = {
                "data": str(self.data.path),
                "out": str(self.references[TREES]),
                "threads": self.work.threads,
                "deadline": deadline,
            }
            jobs.append(Job(TREES, write_tree_logits, arguments))
        if self.work.own_scores is not None:
            self.references[OWN_SCORES] = self.work.own_scores
        self.work.say(f"references: {', '.join(self.references)}")

        def receive(index: int, result: Any) -> None:
            if len(head_start) <= index < len(head_start) + len(runs):
                path = list(runs)[index - len(head_start)]
                self.counted[path] = parse_report(result)
                self.work.ship_best({path: self.counted[path]})

        head_start = [
            Job(
                path.name,
                train_slice,
                self.work.slice_of(path, config, None, min(seconds, self.students.head_start)),
            )
            for path, config in first_student.items()
        ]
        self.work.executor.run([*head_start, *jobs], title="references", quiet=self.work.quiet, done=receive)
        self.counted = {path: self.counted[path] for path in runs}  # In the same order each time.
        if deadline is not None and time.time() > deadline:
            self.work.give_up("training the references to their end")
        self.work.note_packing(self.counted)
        self._blend(suffix)
        self.work.ship_best({**self.counted, **self.blend})
        if self.last.is_wanted and self.clock.is_limited:
            self.work.last_seconds = self.last.seconds(list(self.counted))
        self.work.record()

    def _counted_configs(self) -> list[RunConfig]:
        """Return the runs that need no race: the regression first, then the quickest."""
        configs = [self.work.run_config("lr", {}, CONVERGED)]
        if len(self.data.train) <= MAX_COUNTED_ROWS:
            if crossable(self.data.layout):
                heads = RATES_HEADS if self._has_time_for_heads() else {}
                configs.append(self.work.run_config(RATES, heads, self._rates_training()))
            if trees.is_installed():
                configs.append(self.work.run_config(BOOSTED, {}, self.work.training))
        return configs

    def _has_time_for_heads(self) -> bool:
        """Return whether the network on click rates has time for several heads; the same for every call of a fit."""
        if self.work.budget is None:
            return True
        seconds = 60 * self.work.budget
        largest = max(REFERENCE_SHARE * seconds, min(REFERENCE_SECONDS, LARGEST_SHARE * seconds))
        return HEADS_EPOCHS * self.journal.epoch_seconds <= SHARES_BESIDE[RATES] * largest

    def _reference_seconds(self, *, beside: bool) -> float:
        """Return how many seconds the references may take: more if a student takes one of the workers (`beside`).

        Where there is no time for a student either, they may have all of it.
        """
        if not self.clock.is_limited:
            return math.inf
        if not self.students.has_time():
            return self.clock.until(1.0, self.work.reserve + self.work.student_reserve() / 2)
        total, workers = self.clock.seconds, self.work.executor.workers
        factor = workers / (workers - 1) if beside else 1.0
        largest = min(factor * LARGEST_SHARE, LARGEST_SHARE_BESIDE) if beside else LARGEST_SHARE
        wanted = max(REFERENCE_SHARE * total, min(factor * REFERENCE_SECONDS, largest * total))
        last_stage = self.students.again * self.students.head_start if beside and self.last.is_wanted else 0.0
        return min(wanted, self.clock.until(1.0, self.work.student_reserve() + last_stage))

    def _blend(self, suffix: str) -> None:
        """Add up the models that count clicks: with many rows and little time, there is nothing better."""
        if len(self.counted) > 1:
            config = replace(self.work.run_config(BLEND, {}, self.work.training), beside=tuple(self.counted))
            self.blend = self._add_up(config, f"{BLEND}{suffix}")

    def _add_a_network(self, teachers: Runs) -> None:
        """Add up the best network of the race and the models that count clicks.

        It differs less from these than a network alone, so that fewer rows show which is better; and it needs no more
        training, where students get little.
        """
        if teachers and self.counted:  # Without a race, there is no network yet.
            best = max(teachers, key=lambda path: teachers[path].metrics.valid.raw.auc)
            training = next(
                entrant.config.train for entrant in self.race.entrants.values() if entrant.path == best
            )
            config = replace(self.work.run_config(BLEND, {}, training), beside=(*self.counted, best))
            name = f"{BLEND}-with-{teachers[best].model.name}"
            is_done = (self.work.path_of(name, config) / REPORT).is_file()
            if not is_done and self.clock.until(1.0, self.work.reserve) < self.work.pack_seconds:
                self.work.give_up("adding the best network to what counts")
                return
            self.with_network |= self._add_up(config, name)
            self.work.ship_best(self.with_network)

    def _add_up(self, config: RunConfig, name: str) -> Runs:
        path = self.work.path_of(name, config)
        self.configs[path] = config
        return run_many(
            {path: config},
            self.data,
            title=BLEND,
            executor=self.work.executor,
            quiet=self.work.quiet,
            teach=False,
        )

    def _rates_training(self) -> TrainConfig:
        smallest, largest = RATES_BATCHES
        size = min(max(len(self.data.train) // 100, smallest), largest)
        return self.work.training.model_copy(update={**RATES_TRAINING, "batch_size": size})

    # Teachers and students.

    def _select(self) -> "Ensemble":
        """Choose the members of the teaching ensemble among all that may teach.

        Models beside the student's towers don't teach, because the towers gain more if they know something else. Trees
        that are worse than the regression, because the budget cut them, don't teach either. Nor do trees alone: if no
        race shows what can be reached, a student would learn only what they know.
        """
        valid, rate = self.data.valid, self.config.negative_rate

        def logits_of(table: Path) -> tuple[Floats, Floats | None]:
            logits_N = np.asarray(LogitTable(table).logits_NM[:, 0], np.float64)
            return undo_sampling(logits_N, valid, rate)

        if self.journal.candidates is None:
            self.journal.candidates = list(self.journal.standings)
            self.work.record()
        tables = {name: self.race.entrants[name].path / RACE for name in self.journal.candidates}
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

    def _pack_teachers(self, ensemble: "Ensemble") -> Runs:
        """Pack the members of the ensemble, and the best model, which may be shipped."""
        members = [self.race.entrants[name] for name in ensemble.members if name in self.race.entrants]
        teachers = self._pack([*members, *([self.race.best()] if self.journal.standings else [])])
        self.work.ship_best({**self.counted, **self.blend, **teachers})
        return teachers

    def _tables_of(self, ensemble: "Ensemble") -> list[Path]:
        """Return the directories of the members' logit tables; a member with more weight comes several times."""
        return [
            self.references.get(name) or self.race.entrants[name].path / LOGITS for name in ensemble.members
        ]

    def _use_time_of_students(self, students: Runs) -> Runs:
        """Train further models in the time that students have left, but for what the shipped model will need.

        Return the best of them.
        """
        if self.clock.is_limited:
            shippable = [*students, *self.blend, *self.with_network]
            kept = max((self._last_seconds(path) for path in shippable), default=0.0)
            again = self.students.again if self.last.is_wanted else 0.0
            self.race.use_time_of_students(TimeAfterStudents(self.work.student_reserve() + kept, again))
        late = self.journal.standings.keys() - self.race.candidates()
        if not late:
            return {}
        best = self._pack([self.race.best(late)])
        self._add_a_network(best)
        return best

    def _last_seconds(self, path: Path) -> float:
        """Return how long a run will take to learn from all rows, after its teachers if it has any."""
        if not self.last.is_wanted:
            return 0.0
        teachers = self.last.teacher_seconds(self.last.teachers_of(path))
        return self.last.seconds(self.last.runs_of(path)) + teachers

    # What is shipped.

    def _finish(self, students: Runs, teachers: Runs, ensemble: "Ensemble | None") -> FitReport:
        """Ship the best run on validation, and report on it and on all that was tried."""
        others = {**teachers, **self.counted, **self.blend, **self.with_network}
        choice = choose_shipped(self.data, students, others)
        simpler = [self.references[LOGISTIC].parent, *self.blend]
        if choice.path in simpler:
            simpler = simpler[: simpler.index(choice.path)]
        elif teachers and (choice.path in self.with_network or self._is_held_back(choice)):
            # A teacher gains more from learning all rows than a student, which it holds to what it thought of them.
            simpler.append(max(teachers, key=lambda path: teachers[path].metrics.valid.raw.auc))
        choice = prefer_simple(choice, simpler, self.data)
        if ensemble is not None:
            choice = self._with_time_for_all_rows(choice, {**students, **others})
        if choice.reason:
            self.work.say(f"shipped: {choice.path.name}; {choice.reason}")
        if not self.last.is_done(choice.path):
            ship(choice.path, self.work.out)
        report = self._report(choice, students, teachers, ensemble)
        write_report(self.work.out, report)
        if ensemble is not None:
            report = self._learn_from_all_rows(choice, report)
            if self.journal.taken is None:
                self.journal.taken = self.clock.taken
            report = report.model_copy(update={"plan": self._plan()})
            write_report(self.work.out, report)
        self.work.record()
        return report

    def _is_held_back(self, choice: Choice) -> bool:
        """Return whether the chosen run will learn from all rows, and its teachers have no time to do so before."""
        if not self.last.is_wanted or not self.configs[choice.path].teachers:
            return False
        return not self.last.teachers_learn(choice.path)

    def _with_time_for_all_rows(self, choice: Choice, runs: Runs) -> Choice:
        """Return another run if the chosen one has no time to learn from all rows, and that one has and is close.

        What all rows teach is worth more than a small lead on validation rows. Decided once.
        """
        if self.work.budget is None or not self.last.is_wanted:
            return choice
        if self.journal.instead is None:
            self.journal.instead = self._closest_in_time(choice.path, runs) or choice.path.name
            self.work.record()
        if self.journal.instead == choice.path.name:
            return choice
        path = choice.path.with_name(self.journal.instead)
        lead = 100 * (runs[choice.path].metrics.valid.raw.auc - runs[path].metrics.valid.raw.auc)
        return Choice(
            path,
            f"{choice.path.name} is ahead of {path.name} on validation rows by {lead:.3f} points of AUC, but had no"
            " time left to learn from all rows, which is worth more",
        )

    def _closest_in_time(self, chosen: Path, runs: Runs) -> str | None:
        """Return the best run that has time to learn from all rows, if the chosen one has none and is not far ahead."""
        if self.last.share_in_time(chosen):
            return None
        aucs = {path: run.metrics.valid.raw.auc for path, run in runs.items()}
        close = [path for path in runs if aucs[chosen] - aucs[path] < WORTH_OF_ROWS]
        in_time = [path for path in close if self.last.share_in_time(path)]
        return max(in_time, key=lambda path: aucs[path]).name if in_time else None

    def _learn_from_all_rows(self, choice: Choice, report: FitReport) -> FitReport:
        """Train the chosen model on all rows and ship the result, if that is wanted and there is time for it."""
        if not self.last.is_wanted:
            return report
        if not self.last.has_time(choice.path):
            return report
        self.work.say(f"all rows: {choice.path.name} learns from {self.last.num_rows:,} rows")
        refit = self.last.run(choice.path)
        if refit is None:
            return report
        ship(self.work.out / refit.directory, self.work.out)
        return report.model_copy(update={"refit": refit})

    def _plan(self) -> dict[str, Any]:
        """Return the budget, how much of it was used, and what there was no time for."""
        return {
            "budget": self.work.budget,
            "taken": self.journal.taken,
            "given_up": self.journal.given_up,
        }

    def _report(
        self, choice: Choice, students: Runs, teachers: Runs, ensemble: "Ensemble | None"
    ) -> FitReport:
        """Return the report on the chosen run, measured on rows that it has not learnt from, and on all others."""
        report = portfolio_report(
            self.config,
            self.data,
            self.work.out,
            teachers=teachers,
            students=students,
            choice=choice,
            references=self.references,
            members=self._tables_of(ensemble) if ensemble else [],
            plan=self._plan(),
            arms=self.race.arms(ensemble.members if ensemble else ()),
            teaching=ensemble.steps() if ensemble else [],
        )
        return report.model_copy(update={"interrupted": True}) if ensemble is None else report
