"""Models beside the towers: their proportions, and that the combined model is the weighted sum."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pytest
import torch

from recap_ctr.axes.predict import predict, predict_routes, to_inputs
from recap_ctr.axes.routes import late_routes
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.export import export
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import count_parameters, parse_model
from recap_ctr.models.rates import Rates
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.nn.interface import Inputs
from recap_ctr.training import beside
from recap_ctr.training.beside import fit_mixture, put_beside
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import run_and_write_logits
from recap_ctr.training.references import CONVERGED
from recap_ctr.training.report import PartGain, read_report
from recap_ctr.training.run import is_finished, run
from tests.support.tiny_recipe import TINY

CPU = torch.device("cpu")


def test_a_mixture_keeps_the_level_of_the_rows_that_its_parts_know(prepared: PreparedData) -> None:
    """On rows of a busy month its constant makes up for the month; how much of that lasts is not its business."""
    valid, rng = prepared.valid, np.random.default_rng(0)
    busy = metrics.logit(np.clip(np.mean(valid.labels), 0.01, 0.99))
    parts = np.stack([np.asarray(valid.labels, np.float64) + rng.normal(size=len(valid)) for _ in range(2)])
    parts += busy - 1.5 - parts.mean()  # They expect fewer clicks than these rows have.
    fitted = beside._choose(valid, parts, always=(0,)).mixture
    usual = beside._choose(valid, parts, always=(0,), usual=float(busy) - 1.0).mixture
    same = beside._choose(valid, parts, always=(0,), usual=float(busy)).mixture
    assert usual.factors == same.factors == fitted.factors
    assert fitted.constant - usual.constant == pytest.approx(1.0, abs=0.05)
    assert same.constant == pytest.approx(fitted.constant, abs=0.05)


@pytest.fixture(scope="module")
def counted_runs(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return finished runs of lr and of rates."""
    return _runs(prepared, tmp_path_factory, "lr", "rates")


@pytest.fixture(scope="module")
def boosted_run(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of boosted trees."""
    return _runs(prepared, tmp_path_factory, "boosted", "boosted")[0]


def _runs(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory, *names: str) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("counted")
    for name in dict.fromkeys(names):
        training = CONVERGED if name == "lr" else TrainConfig(batch_size=256, max_epochs=2)
        config = RunConfig(name, parse_model(name, {}), training, train_baseline=False, report_fields=False)
        run_and_write_logits(str(prepared.path), config.to_json(), str(base / name))
    return base / names[0], base / names[1]


def test_the_proportions_are_those_of_the_lowest_logloss() -> None:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(3, 20_000))
    truth = np.array([0.7, 1.3, 0.4]) @ parts - 1.0
    labels = (rng.random(20_000) < metrics.sigmoid(truth)).astype(np.float64)
    mixture = fit_mixture(labels, parts)
    assert [*mixture.factors, mixture.constant] == pytest.approx([0.7, 1.3, 0.4, -1.0], abs=0.08)


def test_a_harmful_part_has_no_weight() -> None:
    rng = np.random.default_rng(0)
    good = rng.normal(size=5_000)
    labels = (rng.random(5_000) < metrics.sigmoid(good)).astype(np.float64)
    assert fit_mixture(labels, np.stack([-good, good])).factors[0] == 0


def test_row_weights_count() -> None:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, 5_000))
    is_first = np.arange(5_000) < 2_500
    labels = (rng.random(5_000) < metrics.sigmoid(np.where(is_first, *parts))).astype(float)
    first, second = fit_mixture(labels, parts, is_first.astype(float)).factors
    assert first > 0.8 and second < 0.2


@pytest.mark.slow
def test_the_combined_model_is_the_weighted_sum_at_every_depth_and_route(
    prepared: PreparedData, counted_runs: tuple[Path, Path], boosted_run: Path
) -> None:
    config = RecapConfig(dim=4, depth=2, train_depths=(1, 2), depth_weights=(0.5, 0.5), num_adapters=4)
    torch.manual_seed(1)
    model = Recap(config, prepared.layout).eval()  # Untrained: something must be worth adding.
    routes = late_routes(config, 4)
    for runs in (
        counted_runs[:1],
        counted_runs[1:],
        counted_runs,
        [boosted_run],
        [*counted_runs, boosted_run],
    ):
        combined, gain = put_beside(model, runs, prepared, CPU)
        assert gain.logloss > 0 and len(gain.factors) > 1 and "validation logloss by -" in gain.sentence
        named = {"regression": counted_runs[0], "rates": counted_runs[1], "trees": boosted_run}
        added_N = sum(
            factor * predict(load_artifact(named[name] / "artifact").model, prepared.test, CPU)
            for name, factor in gain.factors.items()
            if name != "towers"
        )
        assert isinstance(added_N, np.ndarray)
        for depth in (1, 2):
            towers_NK = gain.factors["towers"] * predict_routes(model, prepared.test, routes, CPU, depth)
            rest_NK = predict_routes(combined, prepared.test, routes, CPU, depth) - towers_NK
            assert np.ptp(rest_NK - added_N[:, None]) < 1e-5, "what is left is the constant"
        home = predict(combined, prepared.test, CPU)
        assert np.allclose(home, predict_routes(combined, prepared.test, routes[:1], CPU)[:, 0], atol=1e-6)


@pytest.mark.slow
def test_a_blend_is_the_weighted_sum_of_parts_without_towers(
    prepared: PreparedData, counted_runs: tuple[Path, Path], boosted_run: Path, tmp_path: Path
) -> None:
    runs = (*counted_runs, boosted_run)
    config = RunConfig(
        "blend",
        parse_model("blend", {}),
        TrainConfig(),
        train_baseline=False,
        report_fields=False,
        beside=runs,
    )
    assert config.training_inputs(prepared) != replace(config, beside=runs[:2]).training_inputs(prepared)
    run_and_write_logits(str(prepared.path), config.to_json(), str(tmp_path / "run"), teach=False)
    assert not (tmp_path / "run" / "logits" / "train").exists(), "nothing learns from a blend"
    report = read_report(tmp_path / "run")
    assert is_finished(tmp_path / "run", config) and report.beside is not None and report.beside.logloss >= 0
    parts = {"regression": runs[0], "rates": runs[1], "trees": runs[2]}
    sum_N = sum(
        factor * predict(load_artifact(parts[name] / "artifact").model, prepared.test, CPU)
        for name, factor in report.beside.factors.items()
    )
    rest_N = predict(load_artifact(tmp_path / "run" / "artifact").model, prepared.test, CPU) - sum_N
    assert np.ptp(rest_N) < 1e-5, "what is left is the constant"
    for path in runs:
        assert report.metrics.valid.raw.logloss <= read_report(path).metrics.valid.raw.logloss


@pytest.mark.slow
@pytest.mark.usefixtures("one_registry")
def test_a_network_is_added_to_what_counts(
    prepared: PreparedData, counted_runs: tuple[Path, Path], click_log: pl.DataFrame, tmp_path: Path
) -> None:
    """Any model, in its proportion; the same by torch and in the exported graph."""
    quick = TrainConfig(batch_size=256, max_epochs=2)
    network = RunConfig(
        "dcnv2", parse_model("dcnv2", {"dim": 4}), quick, train_baseline=False, report_fields=False
    )
    run_and_write_logits(str(prepared.path), network.to_json(), str(tmp_path / "dcnv2"))
    config = RunConfig(
        "blend",
        parse_model("blend", {}),
        quick,
        train_baseline=False,
        report_fields=False,
        beside=(*counted_runs, tmp_path / "dcnv2"),
    )
    parts = {"regression": counted_runs[0], "rates": counted_runs[1], "network": tmp_path / "dcnv2"}
    models = [load_artifact(path / "artifact").model for path in parts.values()]
    gain = PartGain(factors={"regression": 0.5, "rates": 0.25, "network": 2.0}, logloss=0.0, constant=0.125)
    whole = beside.blended(gain, models, prepared.layout)
    sum_N = sum(
        factor * predict(load_artifact(parts[name] / "artifact").model, prepared.test, CPU)
        for name, factor in gain.factors.items()
    )
    np.testing.assert_allclose(predict(whole, prepared.test, CPU), sum_N + 0.125, atol=1e-5)

    report = run(config, prepared, tmp_path / "blend", quiet=True)
    assert report.beside is not None and report.beside.factors.keys() <= gain.factors.keys()
    artifact = tmp_path / "blend" / "artifact"
    export(artifact, data=prepared, quiet=True)
    backends: tuple[Literal["onnx", "torch"], ...] = ("onnx", "torch")
    scored = []
    for backend in backends:
        engine = Engine.load(artifact, backend=backend, threads=1)
        scored.append(engine.score(engine.encode(click_log)).logit_B)
    np.testing.assert_allclose(scored[0], scored[1], atol=1e-5)


def test_a_part_without_weight_is_left_out(prepared: PreparedData) -> None:
    rng = np.random.default_rng(0)
    labels = np.asarray(prepared.valid.labels, np.float64)
    good = 2 * labels - 1 + rng.normal(size=len(labels))
    chosen = beside._choose(prepared.valid, np.stack([good, -good, 0.5 * good]), always=())
    assert 1 not in chosen.parts and min(chosen.mixture.factors) >= beside.SMALLEST_FACTOR


def test_parts_that_fit_the_validation_rows_by_chance_are_left_out(prepared: PreparedData) -> None:
    """On the rows that fit the proportions more parts are never worse; on other rows noise is."""
    labels = np.asarray(prepared.valid.labels, np.float64)
    taken = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        good = 2 * labels - 1 + rng.normal(size=len(labels))
        noise = rng.normal(size=(2, len(labels)))
        chosen = beside._choose(prepared.valid, np.stack([good, *noise]), always=())
        assert 0 in chosen.parts
        assert chosen.optimism >= 0
        taken.append(len(chosen.parts) - 1)
    assert np.mean(taken) < 0.7, "by chance half of the noise helps on the rows that it is fitted to"


@pytest.mark.slow
def test_towers_are_trained_beside_rates_that_know_no_rows_own_click(
    prepared: PreparedData, counted_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    linear, rates = counted_runs
    config = RunConfig(
        "recap",
        parse_model("recap", TINY["model_settings"]),
        TrainConfig(batch_size=256, max_epochs=1),
        train_baseline=False,
        report_fields=False,
        beside=(linear,),
        on_top=rates,
    )
    assert RunConfig.from_json(config.to_json()) == config
    assert config.training_inputs(prepared) != replace(config, on_top=None).training_inputs(prepared)
    report = run(config, prepared, tmp_path / "run", quiet=True)
    model = load_artifact(tmp_path / "run" / "artifact").backbone
    assert isinstance(model, Recap) and model.rates is not None
    alone = load_artifact(rates / "artifact").model
    assert isinstance(alone, Rates)
    assert torch.equal(model.rates.table.weight, alone.table.weight), "what was counted is not trained"
    assert report.beside is not None and "rates" not in report.beside.factors
    inputs = to_inputs(prepared.valid.batch(slice(0, 20)), CPU)
    coded = model.rates.table(inputs.ids_BW).flatten(1).float()
    with torch.no_grad():
        by_ids = model(inputs).logit_B
        by_codes = model(Inputs(inputs.ids_BW, torch.cat([inputs.values_BN, coded], dim=1))).logit_B
    torch.testing.assert_close(by_ids, by_codes)


@pytest.mark.slow
@pytest.mark.usefixtures("one_registry")
def test_a_run_ships_them_and_their_size_is_counted(
    prepared: PreparedData,
    click_log: pl.DataFrame,
    counted_runs: tuple[Path, Path],
    boosted_run: Path,
    tmp_path: Path,
) -> None:
    settings = parse_model("recap", TINY["model_settings"])
    config = RunConfig(
        "recap",
        settings,
        TrainConfig(batch_size=256, max_epochs=1),
        train_baseline=False,
        report_fields=False,
        beside=(*counted_runs, boosted_run),
    )
    assert RunConfig.from_json(config.to_json()) == config
    report = run(config, prepared, tmp_path / "run", quiet=True)
    assert report.beside is not None and len(report.beside.factors) > 1
    plain = count_parameters("recap", settings, prepared.layout)
    packed = load_artifact(tmp_path / "run" / "artifact")
    stored = sum(weight.size for weight in packed.weights.values())
    assert plain < report.parameters == packed.manifest["parameters"] <= stored
    scored = []
    export(tmp_path / "run" / "artifact", routes=1, depth=2, data=prepared, quiet=True)
    backends: tuple[Literal["onnx", "torch"], ...] = ("onnx", "torch")
    for backend in backends:
        engine = Engine.load(tmp_path / "run" / "artifact", backend=backend, threads=1)
        scored.append(engine.score(engine.encode(click_log), Setting(1, 2)).logit_B)
    np.testing.assert_allclose(scored[0], scored[1], atol=1e-5)
    without = replace(config, beside=())
    assert run(without, prepared, tmp_path / "run", quiet=True).beside is None


@pytest.mark.slow
def test_the_gain_is_against_the_calibrated_towers_alone(
    prepared: PreparedData, counted_runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towers that know the labels gain nothing from others, however wrong their scale is."""
    labels = np.asarray(prepared.valid.labels, np.float64)
    towers = 40 * (labels - 0.5) + np.random.default_rng(1).normal(size=len(labels))
    monkeypatch.setattr(beside, "predict", lambda *_: towers.astype(np.float32))
    config = RecapConfig(dim=4, depth=2, train_depths=(2,), depth_weights=(1.0,), num_adapters=4)
    _, gain = put_beside(Recap(config, prepared.layout), counted_runs, prepared, CPU)
    assert gain.logloss == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_towers_that_explode_on_a_few_rows_are_limited(
    prepared: PreparedData, counted_runs: tuple[Path, Path]
) -> None:
    config = RecapConfig(dim=4, depth=2, train_depths=(2,), depth_weights=(1.0,), num_adapters=4)
    torch.manual_seed(1)
    model = Recap(config, prepared.layout).eval()
    first = int(prepared.valid.ids[0, 0])
    with torch.no_grad():
        model.embedding.table.weight[first] = 1e3  # As rare values sometimes end.
    plain_N = predict(model, prepared.valid, CPU)
    assert np.abs(plain_N).max() > 1e3
    combined, gain = put_beside(model, counted_runs, prepared, CPU)
    assert gain.tower_limit in beside.LIMITS
    towers_N = predict(model, prepared.valid, CPU)
    assert np.abs(towers_N).max() < 1.01 * gain.tower_limit
    usual = prepared.valid.ids[:, 0] != first
    np.testing.assert_array_equal(towers_N[usual], plain_N[usual])
    parts = {"regression": counted_runs[0], "rates": counted_runs[1]}
    expected_N = gain.constant + gain.factors["towers"] * towers_N
    for name, run_of_part in parts.items():
        if name in gain.factors:
            part = load_artifact(run_of_part / "artifact").model
            expected_N = expected_N + gain.factors[name] * predict(part, prepared.valid, CPU)
    np.testing.assert_allclose(predict(combined, prepared.valid, CPU), expected_N, atol=1e-4)
