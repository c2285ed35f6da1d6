"""The estimators of one run: the whole model, its routes, its checkpoints, and every route of every checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.estimators import load_estimators
from recap_ctr.training.loop import checkpoints
from recap_ctr.training.run import run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def routed(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of RECAP on two routes that has kept two checkpoints."""
    model = parse_model("recap", {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 4})
    train = TrainConfig(batch_size=512, learning_rate=1e-2, max_epochs=2, checkpoints=2)
    out = tmp_path_factory.mktemp("routed") / "run"
    config = RunConfig("recap", model, train, train_baseline=False, report_fields=False, routes=2)
    run(config, prepared, out, quiet=True)
    return out


@pytest.mark.slow
def test_the_whole_model_is_what_the_artifact_holds(routed: Path, prepared: PreparedData) -> None:
    ((estimator, model),) = load_estimators(routed, None, "model").items()
    assert (estimator.run, estimator.step, estimator.route) == ("recap-seed-1", None, None)
    expected = predict(load_artifact(routed / ARTIFACT).model, prepared.valid, CPU)
    assert np.array_equal(predict(model, prepared.valid, CPU), expected)


def test_the_mean_over_routes_is_the_whole_model(routed: Path, prepared: PreparedData) -> None:
    columns = load_estimators(routed, "mine", "route")
    assert len(columns) == 2 and {estimator.run for estimator in columns} == {"mine"}
    # Adapters of the exponential tower, then of the linear one.
    assert all(estimator.route and estimator.route.count("/") == 1 for estimator in columns)
    mean = np.mean([predict(model, prepared.valid, CPU) for model in columns.values()], axis=0)
    whole = predict(load_artifact(routed).model, prepared.valid, CPU)
    assert mean == pytest.approx(whole, abs=1e-5)


def test_checkpoints_and_the_grid_have_the_steps_of_the_files(routed: Path) -> None:
    steps = [step for step, _ in checkpoints(routed)]
    assert len(steps) == 2
    by_step = load_estimators(routed, None, "checkpoint")
    assert [(estimator.step, estimator.route) for estimator in by_step] == [(step, None) for step in steps]
    routes = [estimator.route for estimator in load_estimators(routed, None, "route")]
    grid = load_estimators(routed, None, "grid")
    expected = [(step, route) for step in steps for route in routes]
    assert [(estimator.step, estimator.route) for estimator in grid] == expected


def test_what_a_run_does_not_hold_is_an_error(finished: Path) -> None:
    for per in ("route", "grid"):
        with pytest.raises(InputError, match=f"has no routes\n  fix: remove --per {per}"):
            load_estimators(finished, None, "route" if per == "route" else "grid")
    with pytest.raises(InputError, match=r"holds no checkpoints\n  fix: .*checkpoints = N"):
        load_estimators(finished, None, "checkpoint")
