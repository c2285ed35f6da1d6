"""The race of kinds of routes: its runs, and that its figures are those of the routes it names."""

import json

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict_routes
from recap_ctr.axes.routes import columns
from recap_ctr.bench.routes import KINDS, TRAININGS, cells, routes
from recap_ctr.evaluation import metrics
from recap_ctr.inference import costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.recipe.ablation import finished_runs
from recap_ctr.training.config import ARTIFACT
from tests.support.finished_tables import Workshop


@pytest.mark.slow
def test_kinds_of_routes_are_compared_at_one_size(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "ROWS", 256)
    recipe = workshop.recipe
    text = routes(recipe, 1, workshop.reports)
    entries = json.loads((workshop.reports / "routes" / "routes.json").read_text())["entries"]
    assert [(entry["kind"], entry["training"]) for entry in entries] == [
        (kind.name, training) for training in TRAININGS.values() for kind in KINDS
    ]
    teachers = recipe.train_teachers(recipe.plan())
    wanted = cells(recipe, recipe.plan(), list(teachers), 1)
    name = next(kind.name for kind in KINDS if kind.train)
    (run,) = finished_runs(recipe, wanted[name, "ema"].config)
    model = load_artifact(run / ARTIFACT).backbone
    assert isinstance(model, Recap) and model.config.sampling == "fixed"
    logits_NK = predict_routes(model, recipe.data.test, columns(model.config, 8), torch.device("cpu"))
    entry = next(each for each in entries if each["kind"] == name)
    labels = recipe.data.test.labels
    assert entry["together"] == [pytest.approx(metrics.auc(labels, logits_NK.mean(axis=1)))]
    assert entry["alone"] == [pytest.approx(np.mean([metrics.auc(labels, column) for column in logits_NK.T]))]
    assert entry["removed"] == [pytest.approx(logits_NK.var(axis=1).mean())]
    assert f"| {name} |" in text and "corrected by Holm" in text


def test_default_routes_come_first() -> None:
    assert KINDS[0].late and not KINDS[0].settings
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        RecapConfig(**kind.settings)
