"""How many recombined rows the students of a portfolio learn from: as many as its networks have time to score."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recap_ctr.data.recombine import MAX_CELLS, num_cells
from recap_ctr.recipe.entrants import Entrant
from recap_ctr.recipe.work import Work
from recap_ctr.training.config import RunConfig
from recap_ctr.training.pool import ONE_SIDE, Recombination

RATIO = 3  # For each training row, where there is time.
TIME_SHARE = 0.1  # Of the time that is left, to score them.
FORWARD = 0.3
"""Scoring rows takes at most this share of the time that training on them takes."""
TITLE = "recombined rows"


@dataclass(frozen=True)
class ScoredPool:
    """Recombined rows, and the runs that have scored them; one with more weight comes several times."""

    recombination: Recombination
    runs: list[Path]

    def taught(self, student: RunConfig) -> RunConfig:
        """Return the student as one that learns from these rows, too, if it has teachers."""
        return self.recombination.taught(student, self.runs) if student.teachers else student


def scored_pool(work: Work, teachers: Sequence[Entrant]) -> ScoredPool | None:
    """Let the networks among the teachers score recombined rows; None without networks, without time, or if unwanted.

    How many rows there are is decided once.
    """
    wanted = RATIO if work.config.recombined is None else work.config.recombined
    if not teachers or not wanted:
        return None
    ratio = work.journal.recombined
    if ratio is None:
        ratio = work.journal.recombined = _affordable_ratio(work, teachers, wanted)
        work.record()
    if ratio < wanted:
        work.give_up(f"{wanted - ratio} of {wanted} recombined rows for each training row")
    if not ratio:
        return None
    recombination = Recombination(work.data, ratio)
    if len(recombination.sides) == 1:
        work.give_up(f"{TITLE}: {ONE_SIDE}")
        return None
    runs = [teacher.path for teacher in teachers]
    work.say(f"{TITLE}: {recombination.summary(runs).sentence}")
    jobs = recombination.jobs(runs, threads=work.threads, device=work.device)
    work.executor.run(jobs, title=TITLE, quiet=work.quiet)
    return ScoredPool(recombination, runs)


def _affordable_ratio(work: Work, teachers: Sequence[Entrant], wanted: int) -> int:
    """Return how many rows for each training row fit in memory, and can be scored in a small part of the time left."""
    standings = work.journal.standings
    seconds = sum(
        FORWARD * standings[teacher.name].seconds / max(standings[teacher.name].epochs, 1e-9)
        for teacher in dict.fromkeys(teachers)
    )
    waves = max(seconds / min(work.executor.workers, len(set(teachers))), 1e-9)
    left = TIME_SHARE * work.clock.until(1.0, work.student_reserve())
    affordable = int(min(left / waves, wanted))
    return max(min(affordable, MAX_CELLS // num_cells(work.data.train) - 1), 0)
