"""The students of a portfolio: what they learn from, how long they train, and how much time is kept for training the
best one again on all rows."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recap_ctr.jobs.executor import Job
from recap_ctr.models.recap import RecapConfig
from recap_ctr.recipe.entrants import Standing, train_slice
from recap_ctr.recipe.pool import ScoredPool, scored_pool
from recap_ctr.recipe.probe import three_digits
from recap_ctr.recipe.race import HALF_DECADE, Race
from recap_ctr.recipe.refit import WORTH_OF_ROWS, LastStage
from recap_ctr.recipe.work import Work
from recap_ctr.training.config import RunConfig
from recap_ctr.training.loop import STATE, is_begun, trained_seconds
from recap_ctr.training.parallel import Runs, run_many
from recap_ctr.training.rates import RATES

MIN_STUDENT_EPOCHS = 1.5
"""Fewest epochs, timed on the teachers' model: towers that have not seen all rows add nothing to what counts."""
STUDENT = "the student"
HEAD_START = 0.85  # Of the time that a student may take before it is trained again; packing takes some, too.
AGAIN = 1.2  # How much longer than a run takes to keep for training it again, by the number of rows.
TEACHERS_SHARE = 0.35  # Of the time left for students: so much may be kept for their teachers' last training.
ON_TOP_FACTOR = 0.1  # The best regulariser is multiplied by this: beside click rates little is left to learn.


class Students:
    """Several students side by side, of which validation chooses one."""

    def __init__(self, work: Work, race: Race, last: LastStage, configs: dict[Path, RunConfig]) -> None:
        """Set up the stage; it adds the settings of its runs to `configs`."""
        self.work, self.race, self.last, self.configs = work, race, last, configs
        self.config, self.data, self.clock, self.journal = work.config, work.data, work.clock, work.journal
        self.begun: dict[Path, RunConfig] = {}
        """The runs that have begun."""
        self.pool: ScoredPool | None = None
        """The recombined rows that taught students learn from, too."""
        self.teachers_seconds = 0.0
        """How long it takes to train the teachers on all rows, too, and to let them score these."""

    def first(self) -> dict[Path, RunConfig]:
        """Return a student that need not wait for teachers, because there will be none; its training can start at
        once."""
        is_alone = self.journal.races is False and self.work.own_scores is None
        if not is_alone or not self.clock.is_limited or self.work.executor.workers < 2:
            return {}
        if not self.has_time():
            return {}
        path, config = next(iter(self._configs((), {}).items()))
        return {path: config}

    @property
    def head_start(self) -> float:
        """Return the seconds that the first student may be trained beside the references."""
        return HEAD_START * self._first_part(0.0)

    @property
    def again(self) -> float:
        """Return how much longer than a run takes to keep for training it again on all rows."""
        return AGAIN * self.last.num_rows / len(self.data.train)

    def train(self, members: Sequence[str], tables: Sequence[Path], counted: Runs) -> Runs:
        """Train students side by side; validation chooses among them, because the best differs between logs.

        `members` teach them by the logit tables in `tables`; `counted` are the runs that may stand beside their towers.
        """
        networks = [self.race.entrants[name] for name in members if name in self.race.entrants]
        self.pool = scored_pool(self.work, networks)
        configs = self._configs(tuple(path / "train" for path in tables), counted)
        if not self.has_time():
            configs = {path: config for path, config in configs.items() if (path / STATE).is_file()}
        if not configs:
            self.work.give_up(STUDENT)
            return {}
        self.begun = configs
        self.configs |= configs
        self.teachers_seconds = self.last.teacher_seconds([network.path for network in networks])
        teachers = " + ".join(members) or "labels alone"
        self.work.say(f"student: {' and '.join(self.config.students)}, taught by {teachers}")
        return run_many(
            configs,
            self.data,
            title="student",
            executor=self.work.executor,
            quiet=self.work.quiet,
            deadline=self._deadline(configs),
            teach=False,
        )

    def _deadline(self, configs: dict[Path, RunConfig]) -> float | None:
        """Return when students must be packed, so that there is time to train one again on all rows, if that pays.

        They train until only that much time is left. A student that still learns much by then goes on with its own
        rows.
        """
        left = self.clock.until(1.0, self.work.student_reserve())
        if not (self.last.is_wanted and self.clock.is_limited) or self.journal.taken is not None:
            return self.clock.deadline(left)
        trained = max(trained_seconds(path) for path in configs)
        seconds = self._first_part(trained)
        jobs = [
            Job(path.name, train_slice, self.work.slice_of(path, config, None if seconds else 0, seconds))
            for path, config in configs.items()
            if seconds or is_begun(path)
        ]
        if not jobs:
            return self.clock.deadline(left)
        results = self.work.executor.run(jobs, title="student", quiet=self.work.quiet)
        standings = [Standing(**result) for result in results]
        factor = (trained + left) / max(trained + seconds, 1e-9)
        # A student that is behind now may have the best outlook.
        outlook = max(standing.outlook(factor * standing.epochs) for standing in standings)
        if outlook - max(standing.auc for standing in standings) < WORTH_OF_ROWS:
            return time.time()
        return self.clock.deadline(self.clock.until(1.0, self.work.student_reserve()))

    def _first_part(self, trained: float) -> float:
        """Return the seconds that a student may train, so that enough time is left to train it again.

        It has been trained for `trained` seconds before. Without a budget, or if it won't be trained again, it may take
        all of the time.
        """
        left = self.clock.until(1.0, self.work.student_reserve() + self.work.last_seconds)
        if not self.last.is_wanted:
            return left
        if self.teachers_seconds <= TEACHERS_SHARE * left:
            left -= self.teachers_seconds
        longest = max((standing.seconds for standing in self.journal.standings.values()), default=0.0)
        return max(min((left - self.again * trained) / (1 + self.again), left - self.again * longest), 0.0)

    def _configs(self, teachers: tuple[Path, ...], counted: Runs) -> dict[Path, RunConfig]:
        """Return the runs of all students, by their directories."""
        return {
            self.work.path_of(f"student-{student}", config): config
            for student in self.config.students
            for config in self._configs_of(student, teachers, counted)
        }

    def _configs_of(self, student: str, teachers: tuple[Path, ...], counted: Runs) -> list[RunConfig]:
        """Return the runs of a student, the most promising first, as many as there are workers for.

        One student has a weaker regulariser than its teachers, because learning from teachers regularises, too. One
        learns from labels alone, beside the click rates, what these don't explain. One has its teachers' regulariser.
        """
        chosen = self.config.model_settings if student == self.config.students[0] else {}
        settings = self.work.settings_of(student, chosen)
        like = self.race.best_training()

        def config(factor: float, on_top: Path | None = None) -> RunConfig:
            changes = {
                "l2": three_digits(like.l2 * (factor if self.config.l2 is None else 1.0)),
                "learning_rate": like.learning_rate,
            }
            base = self.work.run_config(
                student, settings, self.work.student_training.model_copy(update=changes)
            )
            run = replace(base.with_seed(self.config.seed), teachers=() if on_top else teachers)
            return replace(
                run if self.pool is None else self.pool.taught(run),
                routes=self.config.routes if isinstance(base.model_config, RecapConfig) else 1,
                route_choice=self.config.route_choice,
                beside=tuple(run for run in counted if on_top is None or run != on_top),
                on_top=on_top,
            )

        runs = [config(1 / HALF_DECADE if teachers else 1.0)]
        rates = [run for run, report in counted.items() if report.model.name == RATES]
        if isinstance(runs[0].model_config, RecapConfig):
            runs += [config(ON_TOP_FACTOR, on_top=run) for run in rates]
        if self.config.l2 is None:
            runs.append(config(1.0 if teachers else 1 / HALF_DECADE))
        workers = len(runs) if self.work.budget is None else self.work.executor.workers
        return runs[: max(workers // len(self.config.students), 1)]

    def has_time(self) -> bool:
        """Return whether there is time for a student that sees all rows at least once; decided once."""
        if self.journal.taken is not None:
            return STUDENT not in self.journal.given_up
        needed = MIN_STUDENT_EPOCHS * max(self.race.epoch_seconds(), self.journal.epoch_seconds)
        return self.clock.until(1.0, self.work.student_reserve()) > needed
