"""A dry run: it counts what a table lacks, and trains nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from recap_ctr.bench.costs import Cells, Cost, costs_text, missing_costs
from recap_ctr.bench.request import ONE_RECIPE, Request, fulfil
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe.ablation import ablation_cells
from recap_ctr.recipe.config import RecipeConfig, recipe_config
from recap_ctr.recipe.probe import ProbeConfig
from tests.support.finished_tables import Workshop
from tests.support.tiny_recipe import TINY


def rehearse(workshop: Workshop, cells: Cells, seeds: int, config: RecipeConfig | None = None) -> list[Cost]:
    """Return what is missing in the workshop."""
    recipe = workshop.recipe
    return missing_costs(
        config or recipe.config, recipe.data, recipe.out, cells, seeds, threads=recipe.threads
    )


def num_runs(costs: Iterable[Cost]) -> Counter[str]:
    """Return the number of missing runs by label."""
    counts: Counter[str] = Counter()
    for cost in costs:
        counts[cost.label] += cost.runs
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("table", ONE_RECIPE)
def test_where_nothing_is_done_all_stages_count(table: str, prepared: PreparedData, tmp_path: Path) -> None:
    config = recipe_config("default", {**TINY, "teachers": 2, "l2": None}, "test")
    costs = missing_costs(config, prepared, tmp_path / "out", ONE_RECIPE[table].cells, 2)
    runs = num_runs(costs)
    probes = {"fcn-scaling": 4, "overview": 2, "variance": 2, "estimators": 2}
    assert runs["probe of fcn"] == probes.get(table, 1), "each training has a probe of its own"
    assert runs["teachers"] == 2
    assert sum("taught" in label for label in runs) == (table != "capacity")
    expected = {
        "overview": {
            "recap-ema-kd": 2,
            "recap-plain": 2,
            "recap-ema": 2,
            "recap-raw": 2,
            "recap-raw-kd": 2,
            "fcn-plain": 2,
        },
        "ablation": {"recap-ema-kd": 2, "recap-plain": 2, "recap-ema": 2, "recap-raw-kd": 2, "recap-raw": 4},
        "fcn-scaling": {"fcn-ema-kd": 2, "fcn-plain": 2, "fcn-ema": 2, "fcn-raw-kd": 2, "fcn-raw": 2},
        "teachers": {"recap-ema": 2, "recap-ema-kd": 4},
        "estimators": {"recap-ema-kd": 2, "fcn-plain": 2, "recap-ema": 2},
        "frontier": {"recap-ema-kd": 2, "fcn-ema": 6},
    }
    for label, count in expected.get(table, {}).items():
        assert runs[label] == count
    assert all(cost.minutes > 0 for cost in costs)
    assert not (tmp_path / "out").exists(), "nothing is written, a guessed plan least of all"


@pytest.mark.slow
def test_only_what_a_finished_table_lacks_counts(workshop: Workshop) -> None:
    before, cells = workshop.trained(), ONE_RECIPE["ablation"].cells
    assert rehearse(workshop, cells, 2) == []
    missing = dict.fromkeys(("recap-ema-kd", "recap-ema", "recap-raw-kd", "recap-plain"), 1)
    assert num_runs(rehearse(workshop, cells, 3)) == {**missing, "recap-raw": 2}, (
        "one of them on a fixed route"
    )
    (cost,) = rehearse(
        workshop,
        lambda recipe, plan, teachers, seeds: ablation_cells(recipe, plan, "recap", ["ema"], [7], teachers),
        1,
    )
    assert cost.origin == "as finished runs took" and cost.epochs == 3
    repacked = workshop.recipe.config.model_copy(update={"routes": 2, "calibration": "isotonic"})
    assert rehearse(workshop, cells, 2, repacked) == [], "to pack runs again takes no time"
    assert workshop.trained() == before


def test_probe_is_as_long_as_its_arms_together() -> None:
    config = ProbeConfig(
        strengths=(1.0, 2.0, 3.0, 4.0),
        rungs=(2, 6),
        refinements=(0.5,),
        rate_factors=(0.5, 2.0),
        horizon_factors=(),
        dropouts=(0.0,),
        dim_factors=(2.0,),
    )
    # Four to epoch 2, two of them to 6; two and one of them; the same for rates; one all along, twice.
    assert config.most_epochs(probe_rate=True) == (8 + 8) + 2 * (4 + 4) + 6 + 6
    assert config.most_epochs(probe_rate=False) == (8 + 8) + (4 + 4) + 6 + 6


@pytest.mark.slow
def test_the_command_prints_the_sum(prepared: PreparedData, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    (reports / prepared.name).mkdir(parents=True)
    text = fulfil(
        Request(
            "capacity",
            (str(prepared.path),),
            tmp_path / "out",
            reports,
            settings=TINY,
            dry_run=True,
            quiet=True,
        )
    )
    assert text.startswith(f"{prepared.name}:\n") and "teachers: 1 missing" in text
    assert "core-hours" in text.splitlines()[-1]
    assert list((reports / prepared.name).iterdir()) == []


def test_costs_add_up() -> None:
    costs = [Cost("fcn", 2, 30.0, 10, "guessed"), Cost("recap", 1, 60.0, 50, "guessed")]
    assert [cost.minutes for cost in costs] == [10.0, 50.0]
    assert replace(costs[0], threads=2).minutes == 20.0, "both cores are taken"
    assert "all: 3 runs are missing, 1.0 core-hours" in costs_text(costs)
