"""Our doors to other tools, tried with the tools themselves.

Those that are not part of `dev` are skipped where they are missing; the job `packages` of the workflow installs all.
"""

import json
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from recap_ctr.errors import InputError
from recap_ctr.inference.calls import load, predict
from recap_ctr.inference.pyfunc import save_model
from recap_ctr.inference.signing import sign

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana.json"
# Theirs are not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@needs("mlflow")
def test_mlflow_loads_and_scores_a_saved_model(packed: Path, click_log: pl.DataFrame, tmp_path: Path) -> None:
    save_model(packed, tmp_path / "saved")
    model = import_module("mlflow.pyfunc").load_model(str(tmp_path / "saved"))
    rows = click_log.head(20)
    frame = pd.DataFrame({name: rows[name].to_list() for name in rows.columns})
    scores = model.predict(frame)
    expected = predict(packed, rows, keep=["row"])
    for name in ("score", "logit"):
        assert scores[name].tolist() == expected[name].to_list()
    assert model.metadata.signature.inputs.input_names() == ["site", "ad", "user", "price", "tags"]


@needs("grafana_foundation_sdk")
def test_grafana_reads_all_of_the_dashboard() -> None:
    grafana = "grafana_foundation_sdk"
    import_module(f"{grafana}.cog.plugins").register_default_plugins()
    dashboard, encoder = import_module(f"{grafana}.models.dashboard"), import_module(f"{grafana}.cog.encoder")
    written = json.loads(DASHBOARD.read_text())
    read = json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(written)))
    assert _differences(written, read) == []


def _differences(written: Any, read: Any, place: str = "") -> list[str]:
    """Return where what was written is not what was read; the reader may add defaults."""
    if isinstance(written, dict) and isinstance(read, dict):
        pairs = [(key, value, read.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = [(str(at), *pair) for at, pair in enumerate(zip(written, read, strict=True))]
    else:
        return [] if written == read else [place]
    return [entry for key, left, right in pairs for entry in _differences(left, right, f"{place}/{key}")]


@needs("model_signing")
def test_a_signature_by_openssl_keys_is_verified(packed: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(packed, tmp_path / "artifact"))
    private, public, other = (tmp_path / name for name in ("key.pem", "key.pub", "other.pub"))
    for key in (other, public):  # The second one makes the first one somebody else's.
        made = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private)]
        subprocess.run(made, check=True)
        subprocess.run(
            ["openssl", "ec", "-in", private, "-pubout", "-out", key], check=True, capture_output=True
        )
    sign(artifact, private)
    load(artifact, verify_key=public)
    with pytest.raises(InputError, match="was not signed by"):
        load(artifact, verify_key=other)
    with (artifact / "MODEL_CARD.md").open("a") as card:
        card.write("better")
    with pytest.raises(InputError, match="was not signed by"):
        load(artifact, verify_key=public)
