"""A logistic regression beside the towers: the proportion, and that the combined model is the weighted sum."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.axes.routes import late_routes
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.training import first_order
from recap_ctr.training.first_order import fit_mixture, with_first_order
from recap_ctr.training.parallel import run_and_write_logits
from recap_ctr.training.references import CONVERGED
from recap_ctr.training.run import RunConfig, run
from tests.support.tiny_recipe import TINY

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def linear_run(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("linear") / "lr"
    config = RunConfig("lr", parse_model("lr", {}), CONVERGED, train_baseline=False, report_fields=False)
    run_and_write_logits(str(prepared.path), config.to_json(), str(out))
    return out


def test_the_proportion_is_that_of_the_lowest_logloss() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 20_000))
    truth = 0.7 * first + 1.3 * second - 1.0
    labels = (rng.random(20_000) < metrics.sigmoid(truth)).astype(np.float64)
    mixture = fit_mixture(labels, first, second)
    assert [mixture.towers, mixture.linear, mixture.constant] == pytest.approx([0.7, 1.3, -1.0], abs=0.08)


def test_a_harmful_part_has_no_weight() -> None:
    rng = np.random.default_rng(0)
    good = rng.normal(size=5_000)
    labels = (rng.random(5_000) < metrics.sigmoid(good)).astype(np.float64)
    assert fit_mixture(labels, -good, good).towers == 0


def test_row_weights_count() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5_000))
    labels = (rng.random(5_000) < metrics.sigmoid(np.where(np.arange(5_000) < 2_500, first, second))).astype(
        float
    )
    weights = (np.arange(5_000) < 2_500).astype(float)
    mixture = fit_mixture(labels, first, second, weights)
    assert mixture.towers > 0.8 and mixture.linear < 0.2


def test_the_combined_model_is_the_weighted_sum_at_every_depth_and_route(
    prepared: PreparedData, linear_run: Path
) -> None:
    config = RecapConfig(dim=4, depth=2, train_depths=(1, 2), depth_weights=(0.5, 0.5), num_adapters=4)
    torch.manual_seed(1)
    model = Recap(config, prepared.layout).eval()  # Untrained: the regression must be worth adding.
    combined, gain = with_first_order(model, linear_run, prepared, CPU)
    assert gain.shipped and gain.linear > 0 and gain.logloss > 0 and "stands beside" in gain.sentence
    regression = predict(load_artifact(linear_run / "artifact").model, prepared.test, CPU)
    routes = late_routes(config, 4)
    for depth in (1, 2):
        towers_NK = predict_routes(model, prepared.test, routes, CPU, depth)
        shift_NK = predict_routes(combined, prepared.test, routes, CPU, depth) - gain.towers * towers_NK
        constant = shift_NK - gain.linear * regression[:, None]
        assert np.ptp(constant) < 1e-5
    home = predict(combined, prepared.test, CPU)
    assert np.allclose(home, predict_routes(combined, prepared.test, routes[:1], CPU)[:, 0], atol=1e-6)


def test_a_run_ships_it_and_its_size_is_counted(
    prepared: PreparedData, linear_run: Path, tmp_path: Path
) -> None:
    settings = parse_model("recap", TINY["model_settings"])
    config = RunConfig(
        "recap",
        settings,
        TrainConfig(batch_size=256, max_epochs=1),
        train_baseline=False,
        report_fields=False,
        first_order=linear_run,
    )
    assert RunConfig.from_json(config.to_json()) == config
    report = run(config, prepared, tmp_path / "run", quiet=True)
    assert report.first_order is not None and report.first_order.shipped
    plain = count_parameters("recap", settings, prepared.layout)
    packed = load_artifact(tmp_path / "run" / "artifact")
    assert report.parameters > plain and packed.manifest["parameters"] == report.parameters
    without = replace(config, first_order=None)
    assert run(without, prepared, tmp_path / "run", quiet=True).first_order is None


def test_the_gain_is_against_the_calibrated_towers_alone(
    prepared: PreparedData, linear_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.asarray(prepared.valid.labels, np.float64)
    towers = 2 * (labels - 0.5) + np.random.default_rng(1).normal(size=len(labels))
    monkeypatch.setattr(first_order, "predict", lambda *_: towers.astype(np.float32))
    config = RecapConfig(dim=4, depth=2, train_depths=(2,), depth_weights=(1.0,), num_adapters=4)
    _, gain = with_first_order(Recap(config, prepared.layout), linear_run, prepared, CPU)
    regression = predict(load_artifact(linear_run / "artifact").model, prepared.valid, CPU)
    best = [
        metrics.logloss(labels, fit_mixture(labels, towers, other).logits(towers, other))
        for other in (np.zeros(len(labels)), regression.astype(np.float64))
    ]
    assert gain.logloss == pytest.approx(best[0] - best[1], abs=1e-5)
