"""Table 4: which settings its variants have, what they share, and that the ablation's runs are not made again."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from recap_ctr.bench.sensitivity import cells, sensitivity, variants
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.recap import RecapConfig, default_rank
from recap_ctr.recipe.ablation import student_run
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import teacher_tables
from recap_ctr.training.report import read_report
from tests.support.bench_files import check_figure_files
from tests.support.finished_tables import Workshop
from tests.support.tiny_recipe import tiny_recipe

STEPS = 100
TEACHERS = [Path(f"teacher-{number}") for number in range(1, 6)]
PLAN = Plan(l2=0.01, learning_rate=1e-3, teachers=5, max_epochs=None, given_up=())


def variants_of(
    data: PreparedData, preset: str = "default", **changes: Any
) -> tuple[RunConfig, RunConfig, dict[str, dict[float, RunConfig]]]:
    """Return the recipe's student, the same without teachers, and all variants by setting and value."""
    recipe = Recipe(recipe_config(preset, changes, "test"), data, Path("unused"))
    base, untaught = (
        student_run(recipe, PLAN, "recap", training, TEACHERS) for training in ("ema-kd", "ema")
    )
    by_setting: dict[str, dict[float, RunConfig]] = {}
    for variant in variants(base, untaught, data.layout, STEPS):
        by_setting.setdefault(variant.setting, {})[variant.value] = variant.config
    return base, untaught, by_setting


def test_one_setting_at_a_time_around_the_recipes_value(prepared: PreparedData) -> None:
    base, untaught, by_setting = variants_of(prepared)
    model = base.model_config
    assert isinstance(model, RecapConfig)
    rank = default_rank(model, prepared.layout)
    assert {setting: list(values) for setting, values in by_setting.items()} == {
        "EMA horizon (epochs)": [2, 4, 8],
        "KD weight λ": [0, 0.5, 1, 2],
        "teachers": [1, 2, 5],
        "LoRA rank": [rank // 2, rank, 2 * rank],
        "adapters": [4, 8, 16],
    }
    defaults = {"EMA horizon (epochs)": 4, "KD weight λ": 1, "teachers": 5, "LoRA rank": rank, "adapters": 8}
    for setting, values in by_setting.items():
        assert [value for value, config in values.items() if config == base] == [defaults[setting]]
        assert len(set(map(str, values.values()))) == len(values)
    assert by_setting["EMA horizon (epochs)"][2].train.ema_epochs == (2.0,)
    assert by_setting["KD weight λ"][0] == untaught and not untaught.teachers
    assert by_setting["teachers"][2].teachers == base.teachers[:2]
    for config in by_setting["adapters"].values():
        assert isinstance(config.model_config, RecapConfig)
        assert config is base or config.model_config.lora_rank == rank, "else it would shrink"
        RecapConfig.model_validate(config.model_config.model_dump())
    for setting, names in (
        ("KD weight λ", ["kd_weight"]),
        ("EMA horizon (epochs)", ["ema_epochs", "ema_warmup"]),
    ):
        for config in by_setting[setting].values():
            if config.teachers:
                base_values = {name: getattr(base.train, name) for name in names}
                assert config.train.model_copy(update=base_values) == base.train


def test_the_papers_preset_is_varied_in_its_own_terms(prepared: PreparedData) -> None:
    """A β becomes a horizon, free adapters need be no multiple of the depth, no rank exceeds what a matrix has."""
    base, _, by_setting = variants_of(prepared, "paper", model_settings={"lora_rank": 40})
    assert base.train.ema == 0.9995
    assert list(by_setting["EMA horizon (epochs)"]) == pytest.approx([10, 20, 40])
    assert list(by_setting["EMA horizon (epochs)"].values())[1] == base
    assert list(by_setting["adapters"]) == [4, 8, 16]
    width = prepared.layout.num_fields * 16
    assert list(by_setting["LoRA rank"]) == [20, 40] and width // 2 == 40


def test_what_the_recipe_lacks_is_not_varied(prepared: PreparedData) -> None:
    _, _, by_setting = variants_of(prepared, train={"ema_epochs": [], "kd_weight": 3.0})
    assert "EMA horizon (epochs)" not in by_setting
    assert list(by_setting["KD weight λ"]) == [0, 0.5, 1, 2, 3]


def test_students_of_one_teacher_have_each_of_them(prepared: PreparedData, tmp_path: Path) -> None:
    """Even where every other line has a single run."""
    recipe = tiny_recipe(prepared, tmp_path, teachers=3)
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    wanted, tables = cells(recipe, plan, teachers, 1), teacher_tables(teachers, "train")
    for count in (1, 2):
        cell = wanted["teachers", count]
        taught_by = [cell.run(seed).teachers for seed in cell.seeds]
        assert taught_by == [tuple(tables[(first + at) % 3] for at in range(count)) for first in range(3)]
    others = {key: cell for key, cell in wanted.items() if key not in (("teachers", 1), ("teachers", 2))}
    assert all(list(cell.seeds) == [1] for cell in others.values())
    assert len(cells(recipe, plan, teachers, 5)["teachers", 1].seeds) == 5


@pytest.mark.slow
def test_table_comes_from_its_runs_and_reuses_the_ablations(workshop: Workshop) -> None:
    before = workshop.trained()
    text = sensitivity(workshop.recipe, 1, workshop.reports)
    after = workshop.trained()

    assert {path: after[path] for path in before} == before, "nothing is trained twice"
    new = [path for path in after if path not in before]
    stored = json.loads((workshop.reports / "sensitivity" / "sensitivity.json").read_text())
    points, split = stored["points"], stored["split"]
    assert split == "test"
    # All but the recipe's value, in each of five settings, and weight 0: the ablation has them.
    # One teacher and two have a run for each of the three.
    assert len(new) == len(points) - 5 - 1 + 2 * 2
    assert sum(point["default"] for point in points) == 5
    fewer = [point for point in points if point["setting"] == "teachers" and not point["default"]]
    assert [point["runs"] for point in fewer] == [3, 3]

    ablation = {
        training: [
            json.loads(
                (
                    workshop.reports
                    / "ablation"
                    / "runs"
                    / f"recap-{training}"
                    / f"seed-{seed}"
                    / "report.json"
                ).read_text()
            )
            for seed in (1, 2)
        ]
        for training in ("ema-kd", "ema")
    }
    taught_aucs, untaught_aucs = (
        [report["metrics"][split]["raw"]["auc"] for report in ablation[training]]
        for training in ("ema-kd", "ema")
    )
    assert all(point["auc"] == taught_aucs[:1] and point["gain"] == 0 for point in points if point["default"])
    (untaught,) = (point for point in points if (point["setting"], point["value"]) == ("KD weight λ", 0))
    assert untaught["auc"] == untaught_aucs[:1]
    assert untaught["gain"] == pytest.approx(untaught_aucs[0] - taught_aucs[0])
    trained = [read_report(path).metrics.on(split).raw.auc for path in new]
    others = [
        auc for point in points if not point["default"] and point is not untaught for auc in point["auc"]
    ]
    for point in fewer:
        assert point["gain"] == pytest.approx(mean(point["auc"]) - mean(taught_aucs))
    assert sorted(trained) == sorted(others)

    assert stored["default_auc"] == taught_aucs
    assert stored["seed_noise"] == pytest.approx(stdev(taught_aucs))
    assert f"± {100 * stdev(taught_aucs):.3f} points (standard deviation over 2 runs" in text
    assert f"| teachers | **3** | **1** | **{ablation['ema-kd'][0]['parameters']:,}**" in text
    assert (workshop.reports / "sensitivity" / "sensitivity.md").read_text() == text

    files = {path: path.read_bytes() for path in (workshop.reports / "sensitivity").iterdir()}
    check_figure_files(workshop.reports / "sensitivity")
    assert sensitivity(workshop.recipe, 1, workshop.reports) == text
    assert {path: path.read_bytes() for path in files} == files
    assert workshop.trained() == after


def test_it_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one teacher"):
        sensitivity(tiny_recipe(prepared, tmp_path, teachers=0), 1, tmp_path)
