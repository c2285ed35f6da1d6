"""An artifact as an MLflow model: no pickle, the scores of `predict`, and errors that name the column."""

import importlib
import json
from pathlib import Path

import pandas as pd
import polars as pl
import pytest

from recap_ctr.errors import InputError
from recap_ctr.inference.calls import load, predict
from recap_ctr.inference.pyfunc import ArtifactModel, save_model
from tests.support.trackers import FakeMlflow


def as_pandas(rows: pl.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: rows[name].to_list() for name in rows.columns})


def test_scores_are_those_of_predict(packed: Path, click_log: pl.DataFrame) -> None:
    model, rows = ArtifactModel(load(packed)), click_log.head(20)
    expected = predict(packed, rows, keep=["row"])
    frame = as_pandas(rows).set_index(pd.RangeIndex(7, 27))
    scores = model.predict(frame)
    for name in ("score", "logit"):
        assert scores[name].tolist() == expected[name].to_list()
    assert scores.index.equals(frame.index)
    with pytest.raises(InputError, match="the data frame has no column 'site'"):
        model.predict(as_pandas(rows.drop("site")))


def test_a_saved_model_is_the_artifact_and_the_name_of_its_loader(
    packed: Path, click_log: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeMlflow(monkeypatch)
    save_model(packed.parent, tmp_path / "saved")  # The run that holds it will do.
    described = json.loads((tmp_path / "saved" / "MLmodel").read_text())
    assert described["pip_requirements"][0].startswith("recap-ctr[train]")  # It has no exported graphs.
    assert described["signature"]["inputs"] == ["site", "ad", "user", "price", "tags"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pickle", ".joblib")]

    data = tmp_path / "saved" / "data" / "artifact"
    loader = importlib.import_module(described["loader_module"])
    rows = click_log.head(20)
    expected = predict(packed, rows, keep=["row"])["score"].to_list()
    assert loader._load_pyfunc(str(data)).predict(as_pandas(rows))["score"].tolist() == expected
    (data / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="differs from its checksum"):
        loader._load_pyfunc(str(data))
