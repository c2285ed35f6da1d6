"""Logits over a split, on disk and in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recap_ctr.axes import predict as predict_module
from recap_ctr.axes.logits import Estimator, LogitTable
from recap_ctr.axes.predict import predict, write_logits
from recap_ctr.axes.routes import Routed, late_routes
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.recap import Recap
from recap_ctr.nn.table import Table

CPU = torch.device("cpu")


def models(data: PreparedData) -> dict[Estimator, nn.Module]:
    """Return different models in training mode, with large weights."""
    models_by_estimator: dict[Estimator, nn.Module] = {}
    for seed, name in enumerate(("fcn", "recap", "lr", "fcn")):
        torch.manual_seed(seed)
        model = build(name, parse_model(name, {} if name == "lr" else {"dim": 4}), data.layout)
        for weight in (module.weight for module in model.modules() if isinstance(module, Table)):
            nn.init.normal_(weight)
        models_by_estimator[Estimator(name, step=seed)] = model.train()
    recap = models_by_estimator[Estimator("recap", step=1)]
    assert isinstance(recap, Recap)
    routed = Routed(recap, late_routes(recap.config, 3))
    models_by_estimator[Estimator("recap", step=1, route="mean of 3")] = routed
    return models_by_estimator


@pytest.mark.parametrize(
    ("split", "block", "batch"),
    [("valid", 1 << 16, 8192), ("valid", 128, 128), ("train", 1024, 512), ("train", 1200, 400)],
)
def test_tables_of_several_estimators_are_their_predictions_bit_for_bit(
    split: str,
    block: int,
    batch: int,
    prepared: PreparedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows may come in one batch or in many, and the last one may be short."""
    monkeypatch.setattr(predict_module, "BLOCK_ROWS", block)
    monkeypatch.setattr(predict_module, "EVAL_ROWS", batch)
    estimators = models(prepared)

    write_logits(tmp_path / "table", estimators, prepared, split, CPU)

    table, shard = LogitTable(tmp_path / "table"), getattr(prepared, split)
    assert table.estimators == tuple(estimators)
    assert table.logits_NM.shape == (len(shard), 5)
    for at, model in enumerate(estimators.values()):
        assert not model.training
        assert table.logits_NM[:, at].tobytes() == predict(model, shard, CPU).tobytes()
    assert len(np.unique(table.logits_NM[0])) == 5


def test_how_rows_are_batched_hardly_matters(prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in models(prepared).values():
        whole = predict(model, prepared.valid, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(predict_module, "EVAL_ROWS", 37)
            np.testing.assert_allclose(predict(model, prepared.valid, CPU), whole, atol=1e-5, rtol=1e-5)


def test_a_logit_that_is_not_finite_leaves_no_table(prepared: PreparedData, tmp_path: Path) -> None:
    estimators = models(prepared)
    bad = estimators[Estimator("lr", step=2)]
    with torch.no_grad():
        next(bad.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="a logit of row 0 is not finite"):
        write_logits(tmp_path / "table", estimators, prepared, "valid", CPU)
    assert list(tmp_path.iterdir()) == []
