"""Deltas: applied they are the whole artifact bit for bit, and only to their base."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl
import pytest

from recap_ctr.data.grow import Base, row_map
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.rare import load_rare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.errors import InputError
from recap_ctr.inference import delta as deltas
from recap_ctr.inference.artifact import read_artifact, write_artifact
from recap_ctr.inference.delta import apply_delta, is_delta, write_delta
from recap_ctr.inference.manifest import WEIGHTS
from recap_ctr.models.catalogue import parse_model
from recap_ctr.serve.check import Check, Verdict
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.snapshots import Snapshots, complete, remove
from recap_ctr.storage.arrays import load_arrays
from recap_ctr.storage.files import read_json, write_json
from tests.conftest import Recap, contents


@dataclass(frozen=True)
class Pair:
    """An artifact, one that grew out of it, and the delta between them."""

    base: Path
    whole: Path
    delta: Path


def bits(directory: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in contents(directory).items()}


@pytest.fixture(scope="module")
def pair(
    packed: Path, prepared: PreparedData, click_log: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """Rows with a new site, of which three weights of the table and one of the towers have changed."""
    out = tmp_path_factory.mktemp("delta")
    old = read_artifact(packed)
    rows = click_log.head(400).with_columns(site=pl.lit("somewhere else"))
    base = Base("base", old.encoder, load_rare(prepared.path, old.encoder))
    preparation = Preparation(old.encoder.schema, {"all": FrameSource(rows)}, base=base)
    new = write_prepared_data(preparation, out / "rows", quiet=True)[0].encoder
    weights = {name: value.copy() for name, value in load_arrays(packed / WEIGHTS).items()}
    (table,) = [name for name in weights if name.endswith("table.weight")]
    weights[table] = row_map(old.encoder, new).grow(weights[table])
    weights[table][[3, 20, -1]] += 0.5
    manifest = old.manifest
    write_artifact(
        out / "whole",
        name=old.name,
        config=parse_model(old.name, manifest["model"]["config"]),
        weights=weights,
        encoder=new,
        calibration=old.calibration,
        shift=old.shift,
        metrics=manifest["metrics"],
        data=manifest["data"],
        training=manifest["training"],
        dial=manifest["dial"],
    )
    write_delta(packed, out / "whole", out / "delta")
    return Pair(packed, out / "whole", out / "delta")


def test_applied_it_is_the_whole_artifact(pair: Pair, tmp_path: Path, recap: Recap) -> None:
    assert recap("apply", pair.base, pair.delta, "--out", tmp_path / "new", "--quiet").code == 0
    assert bits(tmp_path / "new") == bits(pair.whole)
    assert is_delta(pair.delta) and not is_delta(pair.whole)
    assert recap("apply", pair.base, pair.delta, "--out", tmp_path / "new").code == 2  # It exists.
    places = load_arrays(pair.delta / "places.safetensors")
    rows = read_artifact(pair.whole).encoder.layout.num_rows
    assert next(value for name, value in places.items() if name.endswith("table.weight")).tolist() == [
        3,
        20,
        rows - 1,
    ]
    assert all(len(value) == 0 for name, value in places.items() if not name.endswith("table.weight"))


def test_another_base_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it was made from another artifact"):
        apply_delta(pair.whole, pair.delta, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="holds no delta"):
        apply_delta(pair.base, pair.whole, tmp_path / "new")


@pytest.mark.parametrize("name", ["changes.safetensors", "vocabulary/0000.parquet", "schema.toml"])
def test_a_damaged_delta_is_refused(pair: Pair, tmp_path: Path, name: str) -> None:
    damaged = tmp_path / "delta"
    shutil.copytree(pair.delta, damaged)
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        apply_delta(pair.base, damaged, tmp_path / "new")


def test_interrupted_the_old_artifact_is_whole(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "artifact"
    shutil.copytree(pair.base, out)

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deltas, "save_arrays", cut)
        with pytest.raises(KeyboardInterrupt):
            apply_delta(out, pair.delta, out)
    assert bits(out) == bits(pair.base)
    apply_delta(out, pair.delta, out)
    assert bits(out) == bits(pair.whole)


def test_the_server_takes_a_delta_as_a_version(pair: Pair, tmp_path: Path) -> None:
    path, state = tmp_path / "served", tmp_path / "state"
    state.mkdir()
    shutil.copytree(pair.delta, path)
    snapshots = Snapshots(str(path), state)
    with pytest.raises(InputError, match="start the server with a whole artifact"):
        snapshots.take()
    taken = snapshots.take(pair.base)
    assert not taken.exists()  # The supervisor leaves the work to a process with limits.
    complete(taken, pair.base)
    assert bits(taken) == bits(pair.whole)
    again = snapshots.take(taken)
    with pytest.raises(InputError, match="made from another artifact"):
        complete(again, taken)
    remove(again)
    assert [entry.name for entry in state.iterdir()] == [taken.name]


@pytest.mark.slow
@pytest.mark.parametrize("added", [None, 10**10])
def test_a_hostile_delta_ends_with_its_check(pair: Pair, added: int | None, tmp_path: Path) -> None:
    served, state = tmp_path / "served", tmp_path / "state"
    state.mkdir()
    shutil.copytree(pair.delta, served)
    manifest = read_json(served / "manifest.json")
    manifest["target"] = manifest["target"] if added else {}
    if added:
        manifest["target"]["fields"][0]["added"] = added
    write_json(served / "manifest.json", manifest)
    snapshot = Snapshots(str(served), state).take(pair.base)
    wanted = Check(ServeConfig(str(served), offer_mib=1024), str(state), str(snapshot), str(pair.base))
    command = [sys.executable, "-m", "recap_ctr.serve.check"]
    done = subprocess.run(command, input=msgspec.json.encode(wanted), capture_output=True, check=True)
    verdict = msgspec.json.decode(done.stdout, type=Verdict)
    assert not verdict.model and ("too much memory" if added else "is damaged") in verdict.reason


def test_a_manifest_of_countless_values_is_no_delta(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"kind": "delta", "x": [' + b"[]," * 2_000_000 + b"[]]}")
    assert not is_delta(tmp_path)
