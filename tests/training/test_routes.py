"""A run that ships several routes: what its artifact holds, how it scores, and what is refused."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
import torch

from recap_ctr.axes.predict import predict, predict_routes, to_inputs
from recap_ctr.axes.routes import Routed, greedy_choice, late_routes, random_routes
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.recap import Recap, RecapConfig, Route
from recap_ctr.nn.weights import load_tensors
from recap_ctr.sklearn.classifier import CTRClassifier
from recap_ctr.training import routes as routes_module
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.report import RunReport, read_report
from recap_ctr.training.routes import GREEDY_CANDIDATES, ROUTE_SEED
from recap_ctr.training.run import run
from tests.conftest import contents
from tests.support.forged_artifact import forge, refused

CPU = torch.device("cpu")
# Two steps with three adapters each give nine ways through a tower, and 81 routes.
BACKBONE: dict[str, Any] = {
    "dim": 4,
    "depth": 2,
    "train_depths": [1, 2],
    "num_adapters": 6,
    "lora_rank": 2,
}
Choice = Literal["late", "random", "greedy"]


def backbone() -> RecapConfig:
    config = parse_model("recap", BACKBONE)
    assert isinstance(config, RecapConfig)
    return config


def routed_config(choice: Choice = "late", routes: int = 4) -> RunConfig:
    train = TrainConfig(batch_size=256, learning_rate=3e-2, l2=1e-4, max_epochs=2, ema_epochs=(0.5,))
    return RunConfig(
        "recap",
        backbone(),
        train,
        train_baseline=False,
        report_fields=False,
        routes=routes,
        route_choice=choice,
    )


@pytest.fixture(scope="module")
def shipped(
    prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Choice, int], Path]:
    """Return a function that gives the directory of a finished run. Copy it before changing anything."""
    base = tmp_path_factory.mktemp("shipped")

    def run_once(choice: Choice, routes: int) -> Path:
        out = base / f"{choice}-{routes}"
        if not out.exists():
            run(routed_config(choice, routes), prepared, out, quiet=True)
        return out

    return run_once


@pytest.fixture(scope="module")
def four(shipped: Callable[[Choice, int], Path]) -> Path:
    return shipped("late", 4)


@pytest.fixture
def copy(four: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(four / ARTIFACT, tmp_path / "copy"))


def trained(out: Path, data: PreparedData) -> Recap:
    """Return the backbone, built from the weights of the run without the code of the artifact."""
    model = build("recap", backbone(), data.layout)
    model.load_state_dict(load_tensors(out / "best.safetensors")[0])
    assert isinstance(model, Recap)
    return model.eval()


def mean_of(model: Recap, routes: list[Route], shard: Shard) -> np.ndarray:
    """Return the mean of the routes' logits, each from its own forward pass."""
    inputs = to_inputs(shard.batch(slice(None)), CPU)
    with torch.no_grad():
        logits_KB = torch.stack([model(inputs, route).logit_B for route in routes])
    assert len(routes) == 1 or logits_KB.std(0).max() > 1e-4
    return logits_KB.mean(0).numpy()


def stored_routes(out: Path) -> list[Route]:
    manifest = load_artifact(out).manifest
    return [Route(**route) for route in manifest["routes"]]


@pytest.mark.slow
def test_an_artifact_holds_its_routes_and_gives_their_mean(
    four: Path, prepared: PreparedData, click_log: pl.DataFrame
) -> None:
    artifact = load_artifact(four)
    assert isinstance(artifact.model, Routed)
    assert stored_routes(four) == late_routes(backbone(), 4) == list(artifact.model.routes)
    assert not artifact.model.training

    expected = mean_of(trained(four, prepared), late_routes(backbone(), 4), prepared.test)
    np.testing.assert_allclose(predict(artifact.model, prepared.test, CPU), expected, atol=1e-6, rtol=1e-5)

    scores = Scorer(Engine.of(artifact)).score_frame(click_log[prepared.test.rows.tolist()])
    np.testing.assert_allclose(scores, sigmoid(artifact.calibration.apply(expected)), atol=1e-6)
    weights = artifact.model.model.state_dict()
    assert artifact.manifest["parameters"] == sum(p.numel() for p in artifact.model.parameters())
    assert weights.keys() == trained(four, prepared).state_dict().keys()


def test_the_report_has_the_figures_of_one_route_and_of_all(four: Path, prepared: PreparedData) -> None:
    report, model = read_report(four), trained(four, prepared)
    assert (report.routes.count, report.routes.choice) == (4, "late")
    by_routes = report.metrics_by_routes
    assert list(by_routes) == ["1", "4"]
    assert by_routes["4"] == report.metrics.without_reliability()
    for split, shard in (("valid", prepared.valid), ("test", prepared.test)):
        for count in (1, 4):
            logits = mean_of(model, late_routes(backbone(), count), shard)
            figures = by_routes[str(count)].on(split).raw
            assert figures.auc == pytest.approx(metrics.auc(shard.labels, logits), abs=1e-4)
            assert figures.logloss == pytest.approx(metrics.logloss(shard.labels, logits), abs=1e-6)
    # One route has its own calibration.
    home = mean_of(model, [backbone().home], prepared.valid)
    calibrated = fit_affine(prepared.valid.labels, home, None).apply(home)
    expected = metrics.logloss(prepared.valid.labels, calibrated)
    assert by_routes["1"].valid.calibrated.logloss == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_one_route_is_the_home_route(shipped: Callable[[Choice, int], Path], prepared: PreparedData) -> None:
    out = shipped("late", 1)
    assert stored_routes(out) == [backbone().home]
    assert list(read_report(out).metrics_by_routes) == ["1"]
    shipped_logits = predict(load_artifact(out).model, prepared.test, CPU)
    home_logits = predict(trained(out, prepared), prepared.test, CPU)
    np.testing.assert_allclose(shipped_logits, home_logits, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_random_routes_follow_the_seed(shipped: Callable[[Choice, int], Path]) -> None:
    assert stored_routes(shipped("random", 4)) == random_routes(backbone(), 4, ROUTE_SEED)


@pytest.mark.slow
def test_greedy_routes_are_the_best_on_validation(
    shipped: Callable[[Choice, int], Path], prepared: PreparedData
) -> None:
    out = shipped("greedy", 3)
    model, candidates = trained(out, prepared), late_routes(backbone(), 3 * GREEDY_CANDIDATES)
    logits_NK = predict_routes(model, prepared.valid, candidates, CPU)
    chosen = greedy_choice(prepared.valid.labels, logits_NK, 3)

    assert stored_routes(out) == [candidates[at] for at in chosen]
    labels = prepared.valid.labels
    best = min(metrics.logloss(labels, logits_NK[:, at]) for at in range(len(candidates)))
    assert metrics.logloss(labels, logits_NK[:, chosen[0]]) == best
    assert list(read_report(out).metrics_by_routes) == ["1", "3"]


@pytest.mark.slow
def test_the_weights_do_not_depend_on_the_routes(four: Path, shipped: Callable[[Choice, int], Path]) -> None:
    for other in (shipped("random", 4), shipped("greedy", 3), shipped("late", 1)):
        assert (other / "best.safetensors").read_bytes() == (four / "best.safetensors").read_bytes()


def auto(out: Path, data: PreparedData, **changes: Any) -> RunReport:
    return run(replace(routed_config(), routes=None, **changes), data, out, quiet=True)


class TestChosenNumberOfRoutes:
    @pytest.mark.slow
    def test_one_route_ships_where_the_gain_of_several_is_within_chance(
        self, prepared: PreparedData, tmp_path: Path, shipped: Callable[[Choice, int], Path]
    ) -> None:
        report = auto(tmp_path / "run", prepared)
        assert stored_routes(tmp_path / "run") == [backbone().home]
        assert list(report.metrics_by_routes) == ["1", "8"]
        assert report.metrics.without_reliability() == report.metrics_by_routes["1"]
        gain = report.route_gain
        assert gain is not None and (gain.routes, gain.shipped) == (8, 1)
        model = trained(tmp_path / "run", prepared)
        logits = [mean_of(model, late_routes(backbone(), count), prepared.valid) for count in (8, 1)]
        expected = metrics.auc_difference(prepared.valid.labels, *logits)
        assert gain.auc == pytest.approx(expected.difference, abs=1e-6)
        assert gain.standard_error == pytest.approx(expected.standard_error, rel=1e-3)
        assert gain.auc <= 2 * gain.standard_error
        assert "one route ships: the mean of 8 changes validation AUC by" in gain.sentence
        assert "which is within chance" in gain.sentence
        # It is the same artifact as that of a run which was told to ship one route.
        files = [load_artifact(path).manifest["files"] for path in (tmp_path / "run", shipped("late", 1))]
        assert files[0] == files[1]
        dial = [Setting.from_dict(entry) for entry in load_artifact(tmp_path / "run").manifest["dial"]]
        assert dial == [Setting(1, 2), Setting(1, 1)]

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", ["late", "greedy"])
    def test_all_ship_where_their_gain_is_beyond_chance(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Choice
    ) -> None:
        monkeypatch.setattr(routes_module, "CHANCE", -1e9)  # Every difference counts as a gain.
        report = auto(tmp_path / "run", prepared, route_choice=choice)
        assert len(stored_routes(tmp_path / "run")) == 8 and list(report.metrics_by_routes) == ["1", "8"]
        assert report.route_gain is not None and "8 routes ship" in report.route_gain.sentence

    @pytest.mark.slow
    def test_the_choice_is_made_again_without_training_where_other_numbers_were_asked_for(
        self, four: Path, prepared: PreparedData, tmp_path: Path
    ) -> None:
        copy = Path(shutil.copytree(four, tmp_path / "run"))
        state = (copy / "state.safetensors").read_bytes()
        assert len(load_artifact(copy).routes) == 4
        first = auto(copy, prepared)
        assert len(load_artifact(copy).routes) == 1 and (copy / "state.safetensors").read_bytes() == state
        assert auto(copy, prepared) == first == read_report(copy), "it is up to date"

    def test_a_run_that_was_told_a_number_makes_no_choice(self, four: Path) -> None:
        assert read_report(four).route_gain is None

    def test_a_model_without_routes_makes_no_choice(self, prepared: PreparedData, tmp_path: Path) -> None:
        settings = parse_model("lr", {})
        train = TrainConfig(batch_size=256, max_epochs=1)
        config = RunConfig("lr", settings, train, train_baseline=False, report_fields=False, routes=None)
        report = run(config, prepared, tmp_path / "run", quiet=True)
        assert report.route_gain is None and report.metrics_by_routes == {}


def test_a_number_of_routes_between_two_measured_ones_is_calibrated_like_the_smaller(four: Path) -> None:
    artifact = load_artifact(four)
    assert artifact.calibrations.keys() == {Setting(k, depth) for k in (1, 2, 4) for depth in (1, 2)}
    assert artifact.calibration_of(Setting(3, 2)) == artifact.calibrations[Setting(2, 2)]
    assert artifact.calibration_of(Setting(4, 2)) == artifact.calibration
    assert artifact.calibration_of(Setting(2, 2)) != artifact.calibration


def test_a_model_without_routes_ships_none(finished: Path) -> None:
    assert load_artifact(finished).manifest["routes"] == []
    assert read_report(finished).metrics_by_routes == {}


HOME = {"exponential": [0, 1], "linear": [0, 1]}


class TestForgedRoutes:
    """The checksums are right, but the routes are not."""

    @pytest.mark.parametrize(
        ("route", "message"),
        [
            ({"exponential": [0, 1, 2], "linear": [0, 1]}, "a route has 3 steps, but the model has depth 2"),
            ({"exponential": [0, 1], "linear": [0]}, "a route has 1 steps"),
            ({"exponential": [], "linear": []}, "a route has 0 steps"),
            ({"exponential": [1, 1], "linear": [0, 1]}, "uses adapter 1 at step 1"),
            ({"exponential": [0, 1], "linear": [0, 2]}, "uses adapter 2 at step 2"),
            ({"exponential": [0, 1], "linear": [0, 7]}, "uses adapter 7 at step 2"),
            ({"exponential": [-2, 1], "linear": [0, 1]}, "uses adapter -2 at step 1"),
            ({"exponential": [0, 1]}, "linear"),
            (HOME | {"cubic": [0, 1]}, "cubic: unknown setting"),
        ],
    )
    def test_impossible_routes(self, copy: Path, route: dict[str, Any], message: str) -> None:
        forge(copy, lambda manifest: manifest["routes"].append(route))
        refused(copy, rf"the parts of the artifact don't fit together: .*{message}")

    @pytest.mark.parametrize(
        "routes",
        [
            None,
            "late",
            4,
            HOME,
            [None],
            [[0, 1]],
            [{"exponential": "01", "linear": "01"}],
            [{"exponential": [0, 1.0], "linear": [0, 1]}],
            [{"exponential": [False, True], "linear": [0, 1]}],
            [{"exponential": [0, "1"], "linear": [0, 1]}],
        ],
    )
    def test_values_that_are_not_a_list_of_routes(self, copy: Path, routes: Any) -> None:
        forge(copy, lambda manifest: manifest.update(routes=routes))
        refused(copy, rf"{MANIFEST}: routes")

    def test_routes_of_a_model_that_has_none(self, packed: Path, tmp_path: Path) -> None:
        other = Path(shutil.copytree(packed, tmp_path / "fcn"))
        forge(other, lambda manifest: manifest.update(routes=[HOME]))
        refused(other, "fcn has no routes")

    def test_other_possible_routes_are_accepted(self, copy: Path) -> None:
        forge(copy, lambda manifest: manifest.update(routes=[HOME], dial=[]))
        assert stored_routes(copy) == [backbone().home]


def test_a_classifier_keeps_the_routes_of_what_it_loads_and_saves(four: Path, tmp_path: Path) -> None:
    CTRClassifier.load(four).save(tmp_path / "again")
    old, new = (contents(path) for path in (four / ARTIFACT, tmp_path / "again"))
    assert {name: data for name, (data, _) in old.items()} == {name: data for name, (data, _) in new.items()}


def test_fewer_routes_or_less_depth(four: Path, prepared: PreparedData) -> None:
    artifact, model = load_artifact(four), trained(four, prepared)
    assert artifact.with_setting() is artifact
    for count in (1, 3, 4):
        logits = predict(artifact.with_setting(routes=count).model, prepared.test, CPU)
        expected = mean_of(model, late_routes(backbone(), count), prepared.test)
        np.testing.assert_allclose(logits, expected, atol=1e-6, rtol=1e-5)
    shallow = predict_routes(model, prepared.test, late_routes(backbone(), 4), CPU, depth=1).mean(axis=1)
    logits = predict(artifact.with_setting(depth=1).model, prepared.test, CPU)
    np.testing.assert_allclose(logits, shallow, atol=1e-6, rtol=1e-5)
    for routes in (0, 5):
        with pytest.raises(InputError, match=f"{routes} routes are wanted, but the artifact has 4"):
            artifact.with_setting(routes=routes)
    with pytest.raises(InputError, match="depth 3 was not trained"):
        artifact.with_setting(depth=3)


def test_old_artifacts_without_routes_use_the_home_route(
    copy: Path, packed: Path, prepared: PreparedData, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(packed, tmp_path / "fcn"))
    for path in (copy, old):
        expected = load_artifact(path).model
        forge(path, lambda manifest: [manifest.pop(part) for part in ("routes", "dial")])
        model = load_artifact(path).model
        if isinstance(expected, Routed):
            assert isinstance(model, Recap)
            expected = Routed(expected.model, [backbone().home])
        np.testing.assert_allclose(
            predict(model, prepared.test, CPU), predict(expected, prepared.test, CPU), atol=1e-6, rtol=1e-5
        )


def test_other_routes_are_packed_without_training_again(
    four: Path, prepared: PreparedData, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(four, tmp_path / "run"))
    state = (copy / "state.safetensors").read_bytes()
    (copy / "logits").mkdir(exist_ok=True)  # As if four routes had written logits there.
    report = run(routed_config(routes=3), prepared, copy, quiet=True)
    assert len(load_artifact(copy).routes) == 3 and "3" in report.metrics_by_routes
    assert (copy / "state.safetensors").read_bytes() == state
    assert not (copy / "logits").exists()
    before, after = (load_artifact(path).manifest["files"] for path in (four, copy))
    assert after["model.safetensors"] == before["model.safetensors"]
