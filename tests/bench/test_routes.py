"""The race of kinds of routes: its figures are those of the routes it names, and which kind it accepts."""

import json
import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import columns, late_routes
from recap_ctr.bench.margin import Margin
from recap_ctr.bench.routes import (
    KINDS,
    TRAININGS,
    Entry,
    Figures,
    Kind,
    accepted,
    cells,
    corrected_p,
    of_equal_size,
    routes,
    table_text,
)
from recap_ctr.evaluation import metrics
from recap_ctr.inference import costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.recap import (
    SIZE_LIMIT,
    Recap,
    RecapConfig,
    default_rank,
    parameters_of_fcn,
    parameters_of_rank,
)
from recap_ctr.recipe.ablation import finished_runs
from recap_ctr.training.config import ARTIFACT
from tests.support.finished_tables import Workshop
from tests.support.published import layout_of_total


@pytest.mark.slow
def test_kinds_of_routes_are_compared_on_validation(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "ROWS", 256)
    recipe = workshop.recipe
    text = routes(recipe, 2, workshop.reports)
    record = json.loads((workshop.reports / "routes" / "routes.json").read_text())
    entries = record["entries"]
    assert [(entry["kind"], entry["training"]) for entry in entries] == [
        (kind.name, training) for training in TRAININGS.values() for kind in KINDS
    ]
    wanted = cells(recipe, recipe.plan(), list(recipe.train_teachers(recipe.plan())), 2)

    def logits(kind: str, split: str) -> list[np.ndarray]:
        """Return the logits of each seed's routes."""
        found = []
        for run in finished_runs(recipe, wanted[kind, "ema"].config):
            model = load_artifact(run / ARTIFACT).backbone
            assert isinstance(model, Recap)
            chosen = late_routes(model.config, 4) if kind == KINDS[0].name else columns(model.config, 8)
            found.append(predict_routes(model, getattr(recipe.data, split), chosen, torch.device("cpu")))
        return found

    name = next(kind.name for kind in KINDS if kind.train)
    entry = next(each for each in entries if each["kind"] == name)
    together = {}
    for split in ("valid", "test"):
        labels, figures = getattr(recipe.data, split).labels, entry[split]
        logits_SNK = logits(name, split)
        together[split] = [metrics.auc(labels, logits_NK.mean(axis=1)) for logits_NK in logits_SNK]
        assert figures["together"] == pytest.approx(together[split])
        for logits_NK, alone, removed in zip(logits_SNK, figures["alone"], figures["removed"], strict=True):
            assert alone == pytest.approx(np.mean([metrics.auc(labels, column) for column in logits_NK.T]))
            assert removed == pytest.approx(logits_NK.var(axis=1).mean())
    labels = recipe.data.valid.labels
    gaps = [
        ours - metrics.auc(labels, other.mean(axis=1))
        for ours, other in zip(together["valid"], logits(KINDS[0].name, "valid"), strict=True)
    ]
    assert entry["ahead"]["mean"] == pytest.approx(mean(gaps))
    assert entry["ahead"]["seeds"] == pytest.approx(stdev(gaps) / math.sqrt(2))
    assert entry["ahead"]["rows"] > 0
    assert f"| {name} |" in text and "test rows have no say" in text
    assert set(record["accepted"]) == set(TRAININGS.values())


def test_default_routes_come_first() -> None:
    assert KINDS[0].late and RecapConfig(**KINDS[0].settings) == RecapConfig()
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_kinds_are_what_they_are_called_in_any_recipe() -> None:
    """The paper's preset has free adapters, and a rank of its own."""
    of_preset = {"binding": "free", "max_rank": 96, "sampling": "batch"}
    for kind in KINDS:
        config = RecapConfig(**{**of_preset, **kind.settings})
        assert kind.name.split(",")[0].removeprefix("four ").startswith(config.binding)


@pytest.mark.parametrize(("values", "num_fields"), [(9_751, 7), (910_747, 39), (20, 2)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kinds_have_the_size_of_the_first(kind: Kind, values: int, num_fields: int) -> None:
    layout, first = layout_of_total(values, num_fields), RecapConfig()
    config = of_equal_size(RecapConfig(**kind.settings), first, layout)
    rank = config.lora_rank or default_rank(config, layout)
    size = parameters_of_rank(first, layout, default_rank(first, layout))
    assert parameters_of_rank(config, layout, rank) <= size <= SIZE_LIMIT * parameters_of_fcn(first, layout)
    assert config.form == "signs" or parameters_of_rank(config, layout, rank + 1) > size
    assert (config.lora_rank is None) == (kind.name != "free, four of a larger rank" or values == 20)


def entry(
    kind: str, lead: float, size: float = 1.0, test: float = 0.9, seeds: float | None = 0.0001
) -> Entry:
    """Return an entry of three seeds, `lead` ahead of the first kind on validation."""
    figures = Figures((0.01,), (0.8,), (0.8 + lead,))
    return Entry(
        kind=kind,
        training="teachers",
        seeds=(1, 2, 3),
        parameters=1_000,
        size=size,
        routes=8,
        valid=figures,
        test=replace(figures, together=(test,)),
        ahead=Margin(lead, 0.0001, seeds, None, 3, 1) if lead else None,
        cost=1.0,
    )


FIRST = entry("default", 0.0, test=0.1)


def test_the_best_on_validation_is_accepted_whatever_test_rows_say() -> None:
    better, best = entry("better", 0.003, test=0.99), entry("best", 0.004, test=0.0)
    assert accepted([FIRST, better, best]) == "best"
    text = table_text([FIRST, better, best])
    assert [line.split("|")[1].strip() for line in text.splitlines() if "✓" in line] == ["best"]
    assert "learning from teachers, best." in text


def test_a_larger_model_is_refused() -> None:
    assert accepted([FIRST, entry("small", 0.003), entry("large", 0.004, size=1.06)]) == "small"
    assert accepted([FIRST, entry("large", 0.004, size=1.06)]) is None
    assert "| too large |" in table_text([FIRST, entry("large", 0.004, size=1.06)])


def test_chance_is_not_accepted() -> None:
    """Not one that is better at one seed alone, and not the largest of many differences of that size."""
    lead = 0.0004
    assert accepted([FIRST, entry("one", lead)]) == "one"
    many = [FIRST, *(entry(f"kind {number}", lead) for number in range(8))]
    assert corrected_p(many)["kind 0"] == pytest.approx(8 * corrected_p(many[:2])["kind 0"])
    assert accepted(many) is None
    assert accepted([FIRST, entry("one", lead, seeds=None)]) is None
    assert accepted([FIRST, entry("worse", -0.004)]) is None
    assert "learning from teachers, none." in table_text([FIRST, entry("worse", -0.004)])
