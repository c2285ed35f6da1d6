"""How many recombined rows a portfolio's students learn from: what there is time and memory for, decided once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.data.recombine import num_cells
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs.executor import Job
from recap_ctr.recipe import pool
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.entrants import Entrant, Standing
from recap_ctr.recipe.pool import scored_pool
from recap_ctr.recipe.work import Work
from recap_ctr.training import pool as training_pool
from tests.support.tiny_recipe import TINY


class Noted:
    """An executor that runs nothing and notes what it was given."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.jobs: list[Job] = []

    def run(self, jobs: Sequence[Job], **_: Any) -> list[Any]:
        self.jobs += jobs
        return [None for _ in jobs]


def work_in(
    data: PreparedData, out: Path, *, budget: float | None = None, workers: int = 1, **settings: Any
) -> Work:
    config = recipe_config("default", {**TINY, "teachers": None, **settings}, "test")
    return Work(config, data, out, threads=1, executor=Noted(workers), budget=budget, quiet=True)


def entrants(work: Work, *epoch_seconds: float) -> list[Entrant]:
    """Return entrants that have trained ten epochs of these lengths."""
    raced = []
    for number, seconds in enumerate(epoch_seconds):
        name = f"entrant-{number}"
        work.journal.standings[name] = Standing([0.5], [0.5], 10.0, 10 * seconds, finished=True)
        raced.append(Entrant(name, name, {}, work.first_run(), work.out / name))
    return raced


def jobs_of(work: Work) -> list[Job]:
    assert isinstance(work.executor, Noted)
    return work.executor.jobs


def test_without_a_budget_every_network_scores_three_for_each_row(
    prepared: PreparedData, tmp_path: Path
) -> None:
    work = work_in(prepared, tmp_path / "fit")
    first, second = entrants(work, 1.0, 100.0)
    scored = scored_pool(work, [first, second, first])
    assert scored is not None and scored.recombination.ratio == 3
    assert scored.runs == [first.path, second.path, first.path], "one that counts twice teaches twice"
    assert [job.arguments["run"] for job in jobs_of(work)] == [str(first.path), str(second.path)]
    assert not work.journal.given_up


def test_scoring_takes_a_small_part_of_the_time_left(prepared: PreparedData, tmp_path: Path) -> None:
    ratios = []
    for number, seconds in enumerate((1.0, 4.0, 40.0, 400.0)):
        work = work_in(prepared, tmp_path / f"{number}", budget=10.0)
        teachers = entrants(work, seconds, seconds)
        left = work.clock.until(1.0, work.student_reserve())
        scored = scored_pool(work, teachers)
        ratio = 0 if scored is None else scored.recombination.ratio
        assert pool.FORWARD * 2 * seconds * ratio <= pool.TIME_SHARE * left
        assert bool(work.journal.given_up) == (ratio < 3)
        ratios.append(ratio)
    assert ratios[0] == 3 and ratios[-1] == 0 and 0 < ratios[2] < 3
    work = work_in(prepared, tmp_path / "two", budget=10.0, workers=2)
    scored = scored_pool(work, entrants(work, 40.0, 40.0))
    assert scored is not None and scored.recombination.ratio > ratios[2], "two workers score side by side"


def test_what_was_decided_stays(prepared: PreparedData, tmp_path: Path) -> None:
    first = work_in(prepared, tmp_path / "fit", budget=10.0)
    scored_pool(first, entrants(first, 80.0))
    again = work_in(prepared, tmp_path / "fit", budget=10.0)
    assert again.journal.recombined == first.journal.recombined not in (0, 3, None)
    scored = scored_pool(again, entrants(again, 1e-3))
    assert scored is not None and scored.recombination.ratio == first.journal.recombined


@pytest.mark.parametrize(("settings", "count"), [({"recombined": 0}, 1), ({}, 0)])
def test_unwanted_or_without_a_network_there_are_none(
    settings: dict[str, Any], count: int, prepared: PreparedData, tmp_path: Path
) -> None:
    work = work_in(prepared, tmp_path / "fit", **settings)
    assert scored_pool(work, entrants(work, *[1.0] * count)) is None
    assert not work.journal.given_up and work.journal.recombined is None


def test_with_one_side_there_are_none_and_that_is_said(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_pool, "sides_of", lambda train, layout: (("site", "ad"),))
    work = work_in(prepared, tmp_path / "fit")
    assert scored_pool(work, entrants(work, 1.0)) is None
    assert work.journal.given_up == ["recombined rows: all fields belong together"] and not jobs_of(work)


def test_rows_that_would_not_fit_in_memory_are_fewer(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_CELLS", 2 * num_cells(prepared.train) + 1)
    work = work_in(prepared, tmp_path / "fit")
    scored = scored_pool(work, entrants(work, 1.0))
    assert scored is not None and scored.recombination.ratio == 1
    assert work.journal.given_up == ["2 of 3 recombined rows for each training row"]
