"""Converged logistic regression: against scikit-learn, against the model `lr`, and as a run."""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import progress
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.lr import LR, LRConfig
from recap_ctr.schema import Field, Schema
from recap_ctr.training.config import RunConfig
from recap_ctr.training.linear import STRENGTHS, design_matrix, fit_logistic, train_linear
from recap_ctr.training.run import run
from tests.support.preparing import EVERY_KIND, every_kind, simple
from tests.support.preparing import prepared as prepare


def test_the_answer_is_that_of_scikit_learn(prepared: PreparedData) -> None:
    strength = 3.0
    fit = fit_logistic(prepared, strengths=[strength])
    matrix = design_matrix(prepared.train, prepared.layout)
    oracle = LogisticRegression(C=1 / strength, tol=1e-8, max_iter=10_000).fit(matrix, prepared.train.labels)

    def loss(weights: npt.NDArray[np.float64], bias: float) -> float:
        logits = matrix @ weights + bias
        penalty = float(strength / 2 * weights @ weights)
        return metrics.logloss(prepared.train.labels, logits) + penalty / len(logits)

    assert loss(fit.weights_V, fit.bias) == pytest.approx(
        loss(oracle.coef_[0], oracle.intercept_[0]), rel=1e-5
    )
    assert np.abs(fit.weights_V - oracle.coef_[0]).max() < 0.02


def test_the_model_lr_computes_the_same_logits(prepared: PreparedData) -> None:
    """Numbers, several values a row and padding included."""
    fit = fit_logistic(prepared)
    trained = train_linear(parse_model("lr", {}), prepared, torch.device("cpu"), seed=1)
    expected = design_matrix(prepared.test, prepared.layout) @ fit.weights_V + fit.bias
    assert np.abs(predict(trained.model, prepared.test, torch.device("cpu")) - expected).max() < 1e-4


def test_every_kind_of_field_has_the_logits_of_the_model_lr(tmp_path: Path) -> None:
    """Linear fields included: at an edge, between two, at the last one, missing."""
    data = prepare(every_kind(400), tmp_path / "data", EVERY_KIND)
    model = LR(LRConfig(), data.layout).eval()
    weights = np.random.default_rng(0).normal(size=data.layout.num_rows)
    with torch.no_grad():
        model.wide.embedding.table.weight.copy_(torch.from_numpy(weights).unsqueeze(1))
        for field in data.layout.fields:
            model.wide.embedding.table.weight[field.offset] = 0.0
    place = data.layout.fields[-1]
    shares, ids = data.train.values[:, place.number_column], data.train.ids[:, place.start] - place.offset
    assert place.is_linear and {*ids} == {*range(1, place.oov - 1), place.oov}
    assert (shares == 0).any() and ((shares > 0) & (shares < 1)).any()
    matrix = design_matrix(data.train, data.layout)
    assert matrix.shape[1] == data.layout.num_rows
    expected = predict(model, data.train, torch.device("cpu"))
    np.testing.assert_allclose(matrix @ weights, expected, atol=1e-5)


def test_validation_chooses_the_strength(prepared: PreparedData) -> None:
    by_strength = {strength: fit_logistic(prepared, strengths=[strength]) for strength in (300.0, 10.0, 0.1)}
    best = min(by_strength.values(), key=lambda fit: fit.valid_logloss)
    chosen = fit_logistic(prepared, strengths=list(by_strength))
    assert chosen.strength == best.strength
    assert chosen.valid_logloss == pytest.approx(best.valid_logloss, abs=1e-4)


def test_rows_beyond_the_limit_are_sampled(prepared: PreparedData) -> None:
    fit = fit_logistic(prepared, max_entries=500 * prepared.layout.num_columns)
    assert fit.rows == 500


def test_a_row_of_a_linear_field_has_two_entries(tmp_path: Path) -> None:
    schema = Schema(label="y", fields=(Field(name="x", kind="numeric", transform="linear"),))
    data = prepare(simple(400, x=np.random.default_rng(0).random(400).tolist()), tmp_path / "d", schema)
    assert fit_logistic(data, max_entries=200).rows == 100


def test_a_convex_run_is_a_run_like_any_other(prepared: PreparedData, tmp_path: Path) -> None:
    config = RunConfig("lr", parse_model("lr", {}), TrainConfig(update="convex"), train_baseline=False)
    report = run(config, prepared, tmp_path / "run", quiet=True)
    assert report.metrics.valid.raw.auc == pytest.approx(report.history[0].valid_auc, abs=1e-6)
    assert run(config, prepared, tmp_path / "run", quiet=True) == report


def test_other_models_are_not_convex() -> None:
    with pytest.raises(InputError, match="the loss of fcn is not"):
        RunConfig("fcn", parse_model("fcn", {}), TrainConfig(update="convex"))


def test_at_a_deadline_it_ends_with_the_weights_that_it_has(prepared: PreparedData) -> None:
    cut, whole = fit_logistic(prepared, deadline=1.0), fit_logistic(prepared)
    assert cut.steps == 1 and cut.strength == STRENGTHS[0] and whole.steps > 1
    assert cut.is_cut and not whole.is_cut
    assert np.isfinite(cut.weights_V).all() and cut.valid_logloss > whole.valid_logloss


def test_each_step_is_shown(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    train_linear(parse_model("lr", {}), prepared, torch.device("cpu"), seed=1, deadline=1.0)
    assert re.fullmatch(
        r"logistic regression: 2,400 rows, [\d,]+ rows/s, strength 300\n", capsys.readouterr().err
    )
    train_linear(parse_model("lr", {}), prepared, torch.device("cpu"), seed=1, deadline=1.0, quiet=True)
    assert capsys.readouterr().err == ""
