"""The race of kinds of routes: its figures are those of the routes it names, and which kind it accepts."""

import json
import math
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import columns, late_routes
from recap_ctr.bench import routes as module
from recap_ctr.bench.margin import Margin
from recap_ctr.bench.routes import (
    HEADER,
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
from recap_ctr.data.shards import Shard
from recap_ctr.evaluation import halves as halving
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
@pytest.mark.parametrize("choice", [None, next(kind.name for kind in KINDS if kind.train)])
def test_halves_of_validation_choose_and_confirm(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, choice: str | None
) -> None:
    """The figures are those of the routes, and only what is chosen is scored on test rows."""
    monkeypatch.setattr(costs, "ROWS", 256)
    monkeypatch.setattr(module, "accepted", lambda entries: choice)
    recipe = workshop.recipe
    first = KINDS[0].name
    name = choice or next(kind.name for kind in KINDS if kind.train)
    monkeypatch.setattr(halving, "MIN_OF_A_CLASS", 20)
    text = routes(recipe, 2, workshop.reports)
    entries = json.loads((workshop.reports / "routes" / "routes.json").read_text())["entries"]
    assert [(entry["kind"], entry["training"]) for entry in entries] == [
        (kind.name, training) for training in TRAININGS.values() for kind in KINDS
    ]
    wanted = cells(recipe, recipe.plan(), list(recipe.train_teachers(recipe.plan())), 2)

    def logits(kind: str, shard: Shard) -> list[np.ndarray]:
        """Return the logits of each seed's routes."""
        of_seeds = []
        for run in finished_runs(recipe, wanted[kind, "ema"].config):
            model = load_artifact(run / ARTIFACT).backbone
            assert isinstance(model, Recap)
            chosen = late_routes(model.config, 4) if kind == first else columns(model.config, 8)
            of_seeds.append(predict_routes(model, shard, chosen, torch.device("cpu")))
        return of_seeds

    def check(figures: dict[str, list[float]], lead: dict[str, float], shard: Shard) -> None:
        logits_SNK = logits(name, shard)
        together = [metrics.auc(shard.labels, logits_NK.mean(axis=1)) for logits_NK in logits_SNK]
        if figures:
            assert figures["together"] == pytest.approx(together)
            for logits_NK, alone, removed in zip(
                logits_SNK, figures["alone"], figures["removed"], strict=True
            ):
                columns_K = [metrics.auc(shard.labels, column) for column in logits_NK.T]
                assert alone == pytest.approx(np.mean(columns_K))
                assert removed == pytest.approx(logits_NK.var(axis=1).mean())
        gaps = [
            ours - metrics.auc(shard.labels, other.mean(axis=1))
            for ours, other in zip(together, logits(first, shard), strict=True)
        ]
        assert lead["mean"] == pytest.approx(mean(gaps))
        assert lead["seeds"] == pytest.approx(stdev(gaps) / math.sqrt(2))
        assert lead["rows"] > 0

    entry = next(each for each in entries if each["kind"] == name)
    valid, test = recipe.data.valid, recipe.data.test
    choosing, confirming = (valid.take(np.sort(rows)) for rows in halving.halves(valid.labels))
    assert len(choosing) + len(confirming) == len(valid)
    check(entry["choosing"], entry["ahead"], choosing)
    check({}, entry["confirmed"], confirming)
    scored = [each["kind"] for each in entries if each["test"] is not None]
    assert scored == [choice or first] * len(TRAININGS)
    if choice:
        check(entry["test"], entry["ahead_on_test"], test)
    assert f"| {name} |" in text


def test_default_routes_come_first() -> None:
    assert KINDS[0].late and RecapConfig(**KINDS[0].settings) == RecapConfig()
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_kinds_are_what_they_are_called_in_any_recipe() -> None:
    """The paper's preset has free adapters, and a rank of its own."""
    of_preset = {"binding": "free", "max_rank": 96, "sampling": "batch"}
    for kind in KINDS:
        config = RecapConfig(**{**of_preset, **kind.settings})
        assert kind.name.split(",")[0].removeprefix("four ").startswith(config.binding)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_outgrows_fcn_where_vectors_are_small(kind: Kind) -> None:
    """The default's rank is at least 4, which is too large here: no kind has it."""
    layout, first = layout_of_total(20, 2), RecapConfig(dim=8)
    config = of_equal_size(RecapConfig(dim=8, **kind.settings), first, layout)
    limit = SIZE_LIMIT * parameters_of_fcn(first, layout)
    assert parameters_of_rank(first, layout, default_rank(first, layout)) > limit
    assert parameters_of_rank(config, layout, config.lora_rank or 1) <= limit


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
    kind: str,
    lead: float,
    size: float = 1.0,
    seeds: float | None = 0.0001,
    confirmed: float | None = None,
) -> Entry:
    """Return an entry of three seeds, `lead` ahead of the first kind on one half, `confirmed` on the other."""
    on_other_half = lead if confirmed is None else confirmed
    return Entry(
        kind=kind,
        training="teachers",
        seeds=(1, 2, 3),
        parameters=1_000,
        size=size,
        routes=8,
        choosing=Figures((0.01,), (0.8,), (0.8 + lead,)),
        ahead=Margin(lead, 0.0001, seeds, None, 3, 1) if lead else None,
        confirmed=Margin(on_other_half, 0.0001, seeds, None, 3, 1) if lead else None,
        cost=1.0,
    )


FIRST = entry("default", 0.0)


def verdicts(*entries: Entry) -> dict[str, str]:
    """Return what the table says of each kind."""
    lines = [line.split("|") for line in table_text(entries).splitlines() if line.startswith("| ")]
    at = HEADER.index("accepted") + 1
    return {line[1].strip(): line[at].strip() for line in lines[2:]}


def test_one_half_chooses_and_the_other_confirms() -> None:
    better, best = entry("better", 0.003, confirmed=0.009), entry("best", 0.004)
    assert accepted([FIRST, better, best]) == "best", "the other half does not choose"
    assert verdicts(FIRST, better, best) == {"default": "", "better": "", "best": "✓"}
    assert "learning from teachers, best." in table_text([FIRST, better, best])


def test_what_the_other_half_does_not_confirm_is_not_accepted() -> None:
    """Nor is then what it would have confirmed: that was not chosen."""
    lucky, steady = entry("lucky", 0.004, confirmed=0.0001), entry("steady", 0.003, confirmed=0.003)
    assert accepted([FIRST, lucky, steady]) is None
    assert verdicts(FIRST, lucky, steady) == {"default": "", "lucky": "not confirmed", "steady": ""}
    assert accepted([FIRST, entry("reverse", 0.004, confirmed=-0.004)]) is None


def test_a_larger_model_is_refused() -> None:
    small, large = entry("small", 0.003), entry("large", 0.004, size=1.06)
    assert accepted([FIRST, small, large]) == "small"
    assert accepted([FIRST, large]) is None
    assert verdicts(FIRST, small, large) == {"default": "", "small": "✓", "large": "too large"}


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
