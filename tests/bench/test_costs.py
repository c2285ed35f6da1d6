"""A dry run: it counts what a table lacks, and trains nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from recap_ctr.bench import scaling
from recap_ctr.bench.costs import Cost, Rehearsal, say_costs
from recap_ctr.bench.request import ONE_RECIPE, Request, fulfil
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe.probe import ProbeConfig, most_epochs
from recap_ctr.recipe.stages import recipe_config
from tests.bench.conftest import Kitchen
from tests.bench.test_scaling import TINY


def rehearsal(kitchen: Kitchen) -> Rehearsal:
    own = kitchen.recipe
    return Rehearsal(own.config, own.data, own.out, threads=own.threads, workers=2, quiet=True)


def missing(costs: list[Cost]) -> dict[str, int]:
    found: dict[str, int] = {}
    for cost in costs:
        found[cost.label] = found.get(cost.label, 0) + cost.runs
    return found


@pytest.mark.parametrize("table", ONE_RECIPE)
def test_where_nothing_is_done_all_stages_count(table: str, prepared: PreparedData, tmp_path: Path) -> None:
    config = recipe_config("default", {**TINY, "teachers": 2, "l2": None}, "test")
    costs = Rehearsal(config, prepared, tmp_path / "out", quiet=True).rehearse(ONE_RECIPE[table].cells, 2)
    found = missing(costs)
    assert found["probe of fcn"] == 1 and found["teachers"] == 2
    assert sum("taught" in label for label in found) == (table != "capacity")
    wanted = {
        "overview": {"recap-ema-kd": 2, "recap-plain": 2, "recap-ema": 2, "recap-kd": 2, "fcn-plain": 2},
        "ablation": {"recap-ema-kd": 2, "recap-plain": 2, "recap-ema": 2, "recap-kd": 2},
        "fcn-scaling": {"fcn-ema-kd": 2, "fcn-plain": 2, "fcn-ema": 2, "fcn-kd": 2},
        "estimators": {"recap-ema-kd": 2, "fcn-plain": 2, "fcn-ema": 1, "recap-ema": 1},
        "frontier": {"recap-ema-kd": 2, "fcn-ema": 4},
    }
    for label, runs in wanted.get(table, {}).items():
        assert found[label] == runs
    assert all(cost.minutes > 0 for cost in costs)
    assert not (tmp_path / "out").exists(), "nothing is written, a guessed plan least of all"


def test_only_what_a_finished_table_lacks_counts(kitchen: Kitchen) -> None:
    before = kitchen.trained()
    assert rehearsal(kitchen).rehearse(ONE_RECIPE["ablation"].cells, 2) == []
    assert missing(rehearsal(kitchen).rehearse(ONE_RECIPE["ablation"].cells, 3)) == {
        f"recap-{training}": 1 for training in ("ema-kd", "ema", "kd", "plain")
    }
    (line,) = rehearsal(kitchen).rehearse(
        lambda recipe, plan, teachers, seeds: {
            0: scaling.cells_of(recipe, plan, "recap", ["ema"], [7], teachers)["ema"]
        },
        1,
    )
    assert line.origin == "as finished runs took" and line.epochs == 3
    anew = rehearsal(kitchen)
    anew.config = anew.config.model_copy(update={"routes": 2, "calibration": "isotonic"})
    assert anew.rehearse(ONE_RECIPE["ablation"].cells, 2) == [], "to pack them anew takes no time"
    assert kitchen.trained() == before


def test_probe_is_as_long_as_its_arms_together() -> None:
    config = ProbeConfig(
        strengths=(1.0, 2.0, 3.0, 4.0), rungs=(2, 6), refinements=(0.5,), rate_factors=(0.5, 2.0),
        horizon_factors=(), dropouts=(0.0,), dim_factors=(2.0,),
    )  # fmt: skip
    # Four to epoch 2, two of them to 6; two and one of them; the same for rates; one all along, twice.
    assert most_epochs(config, probe_rate=True) == (8 + 8) + 2 * (4 + 4) + 6 + 6
    assert most_epochs(config, probe_rate=False) == (8 + 8) + (4 + 4) + 6 + 6


def test_the_command_says_the_sum(prepared: PreparedData, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    (reports / prepared.name).mkdir(parents=True)
    asked = Request(
        "capacity", (str(prepared.path),), tmp_path / "out", reports, given=TINY, dry_run=True, quiet=True
    )
    text = fulfil(asked)
    assert text.startswith(f"{prepared.name}:\n") and "teachers: 1 missing" in text
    assert "core-hours" in text.splitlines()[-1]
    assert list((reports / prepared.name).iterdir()) == []


def test_costs_add_up() -> None:
    costs = [Cost("fcn", 2, 30.0, 10, "guessed"), Cost("recap", 1, 60.0, 50, "guessed")]
    assert [cost.minutes for cost in costs] == [10.0, 50.0]
    assert replace(costs[0], threads=2).minutes == 20.0, "both cores are taken"
    assert "all: 3 runs are missing, 1.0 core-hours" in say_costs(costs)
