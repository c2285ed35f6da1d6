"""Table 4: which settings its arms have, what they share, and that the ablation's runs are not made again."""

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

from recap_ctr.bench.scaling import run_of
from recap_ctr.bench.sensitivity import beyond_chance, sensitivity, variants
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.recap import RecapConfig, default_rank
from recap_ctr.recipe.stages import Plan, Recipe, recipe_config
from recap_ctr.training.run import RunConfig, read_report
from tests.bench.conftest import Kitchen
from tests.bench.test_figures import check
from tests.bench.test_scaling import recipe

STEPS = 100
TEACHERS = [Path(f"teacher-{at}") for at in range(1, 6)]
PLAN = Plan(l2=0.01, learning_rate=1e-3, teachers=5, max_epochs=None, given_up=())


def arms(
    data: PreparedData, preset: str = "default", **changes: Any
) -> tuple[RunConfig, RunConfig, dict[str, dict[float, RunConfig]]]:
    """The recipe's student, the same without teachers, and all arms by setting and value."""
    own = Recipe(recipe_config(preset, changes, "test"), data, Path("unused"))
    base, untaught = (run_of(own, PLAN, "recap", training, TEACHERS) for training in ("ema-kd", "ema"))
    found: dict[str, dict[float, RunConfig]] = {}
    for arm in variants(base, untaught, data.layout, STEPS):
        found.setdefault(arm.setting, {})[arm.value] = arm.config
    return base, untaught, found


def test_one_setting_at_a_time_around_the_recipes_own(prepared: PreparedData) -> None:
    base, untaught, found = arms(prepared)
    model = base.model_config
    assert isinstance(model, RecapConfig)
    rank = default_rank(model, prepared.layout)
    assert {setting: list(values) for setting, values in found.items()} == {
        "EMA horizon (epochs)": [2, 4, 8],
        "KD weight λ": [0, 0.5, 1, 2],
        "teachers": [1, 2, 5],
        "LoRA rank": [rank // 2, rank, 2 * rank],
        "adapters": [4, 8, 16],
    }
    own = {"EMA horizon (epochs)": 4, "KD weight λ": 1, "teachers": 5, "LoRA rank": rank, "adapters": 8}
    for setting, values in found.items():
        assert [value for value, config in values.items() if config == base] == [own[setting]]
        assert len(set(map(str, values.values()))) == len(values)
    assert found["EMA horizon (epochs)"][2].train.ema_epochs == (2.0,)
    assert found["KD weight λ"][0] == untaught and not untaught.teachers
    assert found["teachers"][2].teachers == base.teachers[:2]
    for config in found["adapters"].values():
        assert isinstance(config.model_config, RecapConfig)
        assert config is base or config.model_config.lora_rank == rank, "else it would shrink"
        RecapConfig.model_validate(config.model_config.model_dump())
    for setting, names in (
        ("KD weight λ", ["kd_weight"]),
        ("EMA horizon (epochs)", ["ema_epochs", "ema_warmup"]),
    ):
        for config in found[setting].values():
            if config.teachers:
                own_values = {name: getattr(base.train, name) for name in names}
                assert config.train.model_copy(update=own_values) == base.train


def test_the_papers_preset_is_varied_in_its_own_terms(prepared: PreparedData) -> None:
    """A β becomes a horizon, free adapters need be no multiple of the depth, no rank exceeds what a matrix has."""
    base, _, found = arms(prepared, "paper", model_settings={"lora_rank": 40})
    assert base.train.ema == 0.9995
    assert list(found["EMA horizon (epochs)"]) == pytest.approx([10, 20, 40])
    assert list(found["EMA horizon (epochs)"].values())[1] == base
    assert list(found["adapters"]) == [4, 8, 16]
    width = prepared.layout.num_fields * 16
    assert list(found["LoRA rank"]) == [20, 40] and width // 2 == 40


def test_what_the_recipe_lacks_is_not_varied(prepared: PreparedData) -> None:
    _, _, found = arms(prepared, train={"ema_epochs": [], "kd_weight": 3.0})
    assert "EMA horizon (epochs)" not in found
    assert list(found["KD weight λ"]) == [0, 0.5, 1, 2, 3]


def test_table_comes_from_its_runs_and_reuses_the_ablations(kitchen: Kitchen) -> None:
    before = kitchen.trained()
    text = sensitivity(kitchen.recipe, 1, kitchen.reports)
    after = kitchen.trained()

    assert {path: after[path] for path in before} == before, "nothing is trained twice"
    new = [path for path in after if path not in before]
    stored = json.loads((kitchen.reports / "sensitivity" / "sensitivity.json").read_text())
    points, split = stored["points"], stored["split"]
    assert split == "test"
    # All but the recipe's own, in each of five settings, and weight 0: the ablation has them.
    assert len(new) == len(points) - 5 - 1
    assert sum(point["default"] for point in points) == 5

    ablation = {
        training: [
            json.loads(
                (
                    kitchen.reports / "recipe" / f"recap-{training}" / f"seed-{seed}" / "report.json"
                ).read_text()
            )
            for seed in (1, 2)
        ]
        for training in ("ema-kd", "ema")
    }
    own, none = (
        [report["metrics"][split]["raw"]["auc"] for report in ablation[training]]
        for training in ("ema-kd", "ema")
    )
    assert all(point["auc"] == own[:1] and point["gain"] == 0 for point in points if point["default"])
    (untaught,) = (point for point in points if (point["setting"], point["value"]) == ("KD weight λ", 0))
    assert untaught["auc"] == none[:1] and untaught["gain"] == pytest.approx(none[0] - own[0])
    trained = [read_report(path)["metrics"][split]["raw"]["auc"] for path in new]
    others = [point["auc"][0] for point in points if not point["default"] and point is not untaught]
    assert sorted(trained) == sorted(others)

    assert stored["default_auc"] == own and stored["seed_noise"] == pytest.approx(stdev(own))
    assert f"± {100 * stdev(own):.3f} points (standard deviation over 2 runs" in text
    assert f"| teachers | **3** | **1** | **{ablation['ema-kd'][0]['parameters']:,}**" in text
    assert (kitchen.reports / "sensitivity" / "sensitivity.md").read_text() == text

    files = {path: path.read_bytes() for path in (kitchen.reports / "sensitivity").iterdir()}
    check(kitchen.reports / "sensitivity")
    assert sensitivity(kitchen.recipe, 1, kitchen.reports) == text
    assert {path: path.read_bytes() for path in files} == files
    assert kitchen.trained() == after


def test_it_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one teacher"):
        sensitivity(recipe(prepared, tmp_path, teachers=0), 1, tmp_path)


def test_chance_alone_is_reported_one_table_in_twenty_at_most() -> None:
    """Simulated: values that differ from the recipe's own in their seed alone, all compared with one run of it."""
    rng = np.random.default_rng(0)
    tables, values = 20_000, 14
    for known in (2, 3, 5):
        runs = rng.normal(size=(tables, known))
        others = rng.normal(size=(tables, values))
        largest = np.abs(others - runs[:, :1]).max(axis=1)
        unit = beyond_chance(1.0, known, values, 1)
        assert (largest > unit * runs.std(axis=1, ddof=1)).mean() < 0.06
