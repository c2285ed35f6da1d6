"""The race of a portfolio: strengths of the regulariser, then kinds of models and settings, then the best of them.

An entrant is judged on all rows, as it is trained, at the length that the fit has time for.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from recap_ctr.config import TrainConfig
from recap_ctr.jobs.executor import Job
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.config import TEACHER_SEEDS
from recap_ctr.recipe.entrants import Entrant, Standing, train_slice
from recap_ctr.recipe.probe import three_digits
from recap_ctr.recipe.work import MIDDLE, Work
from recap_ctr.training.report import ArmSummary

STRENGTHS = (1e2, 1e3, 1e4)
"""Strengths of the embedding regulariser that race first, as l2 · rows: the weight of the prior against all rows."""
HALF_DECADE = 10**0.5
RACE_EPOCHS = 96  # Where all workers together have time for fewer, there is no race.
STRENGTH_PER_EPOCH, UNTRIED = 200.0, (300.0, 5e3)
"""Without a race, l2 · rows grows with the epochs that there is time for, within limits, because longer runs need a
stronger regulariser."""
EPOCHS = (8, 8, 16, None)  # Epochs of the four rounds, where there is no budget.
LEADERS = 2  # Entrants of the last round, where there is no budget; twice as many race in the one before.
SHARES = (0.2, 0.4, 0.5, 0.58)  # Shares of the time left after the references, at the end of each round.
BEFORE_REFIT = (
    0.75  # These shares are so much smaller where the student is trained again, on all rows, after all.
)
STUDENT_SHARE = (
    0.45  # The share of the time after the race that a student then has, before it is trained again.
)
LOOK_EPOCHS = (2.0, 8.0)
"""A model without time for a third of a student's epochs, within these limits, is left out."""
MAX_CHALLENGERS = 12
MAX_FURTHER = 4  # Rounds that may follow where runs have stopped so early that time is left.
STUDENT_LENGTH, STUDENT_TWICE = 2.0, 5.0
"""How much longer a student may take than the longest run that has stopped by itself, and if it is trained again."""
REPEAT_LENGTH = 1.5  # The same of a run from another seed.


@dataclass(frozen=True)
class TimeAfterStudents:
    """How much time is kept for the model that ships, once students are trained."""

    kept: float
    """The seconds that the best of all runs so far needs to learn from all rows, and to be packed."""
    again: float
    """How much longer than a run takes to keep for training it again, should it ship."""


class Race:
    """Models that are trained in slices, in four rounds."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.config, self.data, self.clock, self.journal = work.config, work.data, work.clock, work.journal
        self.entrants: dict[str, Entrant] = {}
        self.refits = False
        """Whether the student will be trained again on all rows."""
        self.after_students: TimeAfterStudents | None = None
        """What students have left, once they are trained."""

    def plan(self) -> None:
        """Decide whether there is time for a race after the references; if not, a student starts at once."""
        if self.journal.races is not None:
            return
        self.journal.races = bool(self.journal.standings) or self._epochs_in_budget() >= RACE_EPOCHS
        if not self.journal.races:
            self.work.give_up("the race: the student learns from labels")
            self.journal.race_began = self.clock.taken
        self.work.record()

    def run(self) -> None:
        """Race strengths of the regulariser, then kinds of models and other settings, then the best of them."""
        if not self.journal.races:
            return
        if self.journal.race_began is None:
            self.journal.race_began = self.clock.taken
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
        for settings in chain.from_iterable(self.journal.further):  # Those of an earlier call.
            self._enter(**settings)
        self.work.ship_best(self.work.pack([self.best()]))
        for number, leaders in self._last_rounds().items():
            self._round(number, self._leaders(leaders), "race of the best")
        for further in range(MAX_FURTHER):
            self._use_time_left(further)

    def use_time_of_students(self, time: TimeAfterStudents) -> None:
        """Give the time that students have left to further models: one of them may ship, with what counts beside it."""
        self.after_students = time
        if self.journal.races:
            for further in range(len(self.journal.further), MAX_FURTHER):
                self._use_time_left(further)

    def give_up_unseen(self) -> None:
        """Note the models that were entered and never had time to race."""
        for name in self.entrants:
            if name not in self.journal.standings:
                self.work.give_up(f"a look at {name}")

    def _use_time_left(self, further: int) -> None:
        """Give time that early stops have left to models without a look, or else to the best ones from other seeds.

        These become further teachers.
        """
        rounds = self.journal.further
        if further == len(rounds):
            if self._time_to_spare() < REPEAT_LENGTH * self._longest_finished():
                return
            unseen = [
                entrant.settings
                for entrant in self.entrants.values()
                if entrant.name not in self.journal.standings
            ]
            rounds.append((unseen or self._repeated_leaders())[: self.work.executor.workers])
            self.work.record()
        if further < len(rounds):
            entrants = [self._enter(**settings) for settings in rounds[further]]
            self._round(len(SHARES) + further, entrants, "race with the time left")

    def _repeated_leaders(self) -> list[dict[str, Any]]:
        """Return the settings of all kinds that have raced, the best first, with the number of the next run of each."""
        runs = Counter(entrant.kind for entrant in self.entrants.values())
        leaders: dict[str, Entrant] = {}
        for entrant in self._leaders(len(self.entrants)):
            leaders.setdefault(entrant.kind, entrant)
        return [{**leader.settings, "repeat": runs[kind] + 1} for kind, leader in leaders.items()]

    def _longest_finished(self) -> float:
        """Return the seconds of the longest run that has stopped by itself; infinite if none has."""
        finished = [standing.seconds for standing in self.journal.standings.values() if standing.finished]
        return max(finished, default=math.inf)

    def _time_to_spare(self) -> float:
        """Return the seconds that students will not need: they stop by themselves, too, if the best one did.

        After them, it is the time that is not needed for the model that ships.
        """
        if not self.clock.is_limited:
            return 0.0
        if self.after_students is not None:
            trained_twice = self.clock.until(1.0, self.work.reserve) / (1 + self.after_students.again)
            return min(self.clock.until(1.0, self.after_students.kept), trained_twice)
        if not self.journal.standings[self.best().name].finished:
            return 0.0
        student = (STUDENT_TWICE if self.refits else STUDENT_LENGTH) * self._longest_finished()
        return self.clock.until(1.0, self.work.reserve + student)

    def _enter(
        self, model: str, l2: float, rate_factor: float = 1.0, dim: int | None = None, repeat: int = 1
    ) -> Entrant:
        """Add a model to the race, with its run; with `repeat`, from another seed."""
        rate = self.work.training.learning_rate * rate_factor
        changes = {"l2": l2, "learning_rate": rate, "seed": TEACHER_SEEDS + len(self.entrants) + 1}
        entered = {"model": model, "l2": l2, "rate_factor": rate_factor, "dim": dim, "repeat": repeat}
        settings = self.config.teacher_settings if model == self.config.teacher_model else {}
        settings = self.work.settings_of(model, settings if dim is None else {**settings, "dim": dim})
        name = f"{model} l2={l2:.3g}"
        name += "" if rate_factor == 1 else f" rate={rate:g}"
        name += "" if dim is None else f" dim={dim}"
        kind, name = name, name + ("" if repeat == 1 else f" run {repeat}")
        if name in self.entrants:
            return self.entrants[name]
        config = self.work.run_config(model, settings, self.work.training.model_copy(update=changes))
        entrant = Entrant(name, kind, entered, config, self.work.path_of(model, config))
        self.entrants[name] = entrant
        return entrant

    def _last_rounds(self) -> dict[int, int]:
        """Return how many of the best take part in the last two rounds: as many as keep all workers busy.

        Without a budget nothing may depend on how many workers there are, so that every engine gives the same model.
        """
        workers = LEADERS if self.work.budget is None else self.work.executor.workers
        return {2: 2 * workers, 3: workers}

    def _epochs_in_budget(self) -> float:
        """Return how many epochs of the first model all workers together have time for."""
        available = self.clock.until(1.0, self.work.reserve) * self.work.executor.workers
        return available / max(self.journal.epoch_seconds, 1e-9)

    def _best_of_round(self, entrants: Sequence[Entrant]) -> Entrant:
        """Return the best strength of the first round; decided once."""
        if self.journal.best_strength is None:
            raced = [entrant for entrant in entrants if entrant.name in self.journal.standings]
            of_a_kind = [entrant for entrant in raced if entrant.config.model == self.config.teacher_model]
            best = max(of_a_kind, key=lambda entrant: self._outlook(entrant.name))
            self.journal.best_strength = best.name
            self.work.record()
        return self.entrants[self.journal.best_strength]

    def _challengers(self, best: Entrant) -> list[Entrant]:
        """Return models and settings that may be better than the best strength, the most promising first.

        Those that could not be trained long enough to judge are left out.
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
        return unseen[: self._affordable()]

    def _affordable(self) -> int:
        """Return how many models can be trained long enough to judge in the second round."""
        if not self.clock.is_limited:
            return MAX_CHALLENGERS
        fewest, most = LOOK_EPOCHS
        look = min(max(fewest, self._horizon() / 3), most) * self.epoch_seconds()
        available = self._until_end_of_round(1) * self.work.executor.workers
        return int(available / max(look, 1e-9))

    def epoch_seconds(self) -> float:
        """Return how long an epoch has taken, over all models so far."""
        spent = sum(standing.seconds for standing in self.journal.standings.values())
        epochs = sum(standing.epochs for standing in self.journal.standings.values())
        return spent / max(epochs, 1e-9)

    def _outlook(self, name: str) -> float:
        return self.journal.standings[name].outlook(self._horizon())

    def _horizon(self) -> float:
        """Return how many epochs a student will have time for; infinite without a budget."""
        if self.work.budget is None:
            return math.inf
        seconds = (1 - self._share(-1)) * (60 * self.work.budget - (self.journal.race_began or 0.0))
        return (STUDENT_SHARE if self.refits else 1.0) * seconds / max(self.journal.epoch_seconds, 1e-9)

    def _share(self, number: int) -> float:
        """Return the share of the time after the references at the end of a round."""
        return SHARES[number] * (BEFORE_REFIT if self.refits else 1.0)

    def _leaders(self, count: int) -> list[Entrant]:
        """Return the best entrants by outlook."""
        ranked = sorted(self.journal.standings, key=lambda name: -self._outlook(name))
        return [self.entrants[name] for name in ranked[:count]]

    def candidates(self) -> list[str]:
        """Return the entrants that have raced, without those that came after the teachers were chosen."""
        return list(self.journal.standings) if self.journal.candidates is None else self.journal.candidates

    def best(self, names: Iterable[str] | None = None) -> Entrant:
        """Return the entrant with the best validation AUC so far, of all candidates or of those with these names."""
        names = self.candidates() if names is None else names
        return self.entrants[max(names, key=lambda name: self.journal.standings[name].auc)]

    def _until_end_of_round(self, number: int) -> float:
        """Return the seconds until a round must end; infinite without a budget."""
        if number >= len(SHARES):
            return min(self._time_to_spare(), REPEAT_LENGTH * self._longest_finished())
        began = self.journal.race_began or 0.0
        share = self._share(number) + (1 - self._share(number)) * began / self.clock.seconds
        return self.clock.until(share, self.work.reserve)

    def _round(self, number: int, entrants: Sequence[Entrant], title: str) -> None:
        """Train all entrants for the same time, or to the same epoch, unless that was done before."""
        if self.journal.rounds > number:
            return
        live = [
            entrant
            for entrant in entrants
            if entrant.name not in self.journal.standings or not self.journal.standings[entrant.name].finished
        ]
        waves = -(-len(live) // self.work.executor.workers)
        seconds = self._until_end_of_round(number) / max(waves, 1)
        if live and seconds > 0:
            until = None if self.clock.is_limited else EPOCHS[number]
            left = seconds if math.isfinite(seconds) else None
            jobs = [
                Job(entrant.name, train_slice, self.work.slice_of(entrant.path, entrant.config, until, left))
                for entrant in live
            ]

            def receive(index: int, result: Any) -> None:
                self.journal.standings[live[index].name] = Standing(**result)
                self.work.record()

            self.work.executor.run(jobs, title=title, quiet=self.work.quiet, done=receive)
            ranked = sorted(live, key=lambda entrant: -self.journal.standings[entrant.name].auc)
            listed = "; ".join(
                f"{entrant.name} {100 * self.journal.standings[entrant.name].auc:.3f}"
                f" ({self.journal.standings[entrant.name].epochs:.1f} epochs)"
                for entrant in ranked
            )
            self.work.say(f"{title}: {listed}")
        self.journal.rounds = number + 1
        self.work.record()

    def best_training(self) -> TrainConfig:
        """Return the training of the most promising entrant of the teachers' kind; without a race, the configured
        training."""
        of_a_kind = [
            entrant
            for entrant in self.entrants.values()
            if entrant.config.model == self.config.teacher_model and entrant.name in self.candidates()
        ]
        if not of_a_kind:
            return self._untried_training()
        return max(of_a_kind, key=lambda entrant: self._outlook(entrant.name)).config.train

    def _untried_training(self) -> TrainConfig:
        """Return the training of a student where there was no race."""
        training = self.work.first_run().train
        if self.config.l2 is not None or self.work.budget is None:
            return training
        weakest, strongest = UNTRIED
        seconds = 60 * self.work.budget - (self.journal.race_began or 0.0)
        strength = STRENGTH_PER_EPOCH * seconds / max(self.journal.epoch_seconds, 1e-9)
        l2 = three_digits(min(max(strength, weakest), strongest) / len(self.data.train))
        return training.model_copy(update={"l2": l2})

    def arms(self, members: Sequence[str]) -> list[ArmSummary]:
        """Return how each entrant has done, the best first; `members` are those that teach."""
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
