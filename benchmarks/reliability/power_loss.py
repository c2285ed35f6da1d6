"""Cut the power after every change that a writer makes on disk: the old output stands there, or the new one, whole.

python -m benchmarks.reliability.power_loss [--seeds 8] [--only NAME]
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.reliability.disk import Disk, crashes, recorded
from benchmarks.reliability.small_artifact import write_small
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.inference.delta import apply_delta, write_delta
from recap_ctr.inference.manifest import WEIGHTS
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.arrays import check_arrays, load_arrays, save_arrays
from recap_ctr.storage.claims import claim, is_made
from recap_ctr.storage.files import atomic_directory, new_file, read_json, write_json


@dataclass(frozen=True)
class Case:
    """A writer of some version, and how to read the version that is there; None if there is none."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], int | None]


def _write_data(root: Path, version: int) -> None:
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 20, 400) for name in ("a", "b", "x")}
    frame = pl.DataFrame({"y": rng.integers(0, 2, 400), **columns})
    kinds = {"a": "categorical", "b": "categorical", "x": "numeric"}
    schema = Schema(label="y", fields=tuple(Field(name=name, kind=kind) for name, kind in kinds.items()))
    preparation = Preparation(schema, {"all": FrameSource(frame)}, Split(seed=version))
    write_prepared_data(preparation, root / "deep" / "data", force=True, quiet=True)


def _read_data(root: Path) -> int | None:
    path = root / "deep" / "data"
    return int(PreparedData(path).manifest["inputs"]["split"]["seed"]) if path.exists() else None


def _write_rows(root: Path, version: int) -> None:
    with open_sink(root / "rows.parquet", {"version": version}) as sink:
        for _ in range(3):
            sink.write(pl.DataFrame({"version": [version] * 50}))


def _read_rows(root: Path) -> int | None:
    path = root / "rows.parquet"
    if not path.exists():
        return None
    (version,) = pl.read_parquet(path)["version"].unique()
    if version > 1:  # The record of a file that is about to be replaced is lost first.
        assert is_made(path, {"version": version}, force=False)
    return int(version)


def _write_state(root: Path, version: int) -> None:
    arrays = {"w": np.full((40, 5), version, np.float32)}
    save_arrays(root / "state.safetensors", arrays, {"step": str(version)}, checksum=True)


def _read_state(root: Path) -> int | None:
    path = root / "state.safetensors"
    if not path.exists():
        return None
    check_arrays(path)
    return int(load_arrays(path)["w"].max())


def _write_record(root: Path, version: int) -> None:
    claim(root / "new" / "run", {"seed": 1}, finished="report.json", force=False)
    write_json(root / "new" / "run" / "report.json", {"version": version})


def _read_record(root: Path) -> int | None:
    path = root / "new" / "run" / "report.json"
    return int(read_json(path)["version"]) if path.exists() else None


def _write_directory(root: Path, version: int) -> None:
    with atomic_directory(root / "deep" / "directory") as partial:
        for name in ("a", "b"):
            with new_file(partial / name) as file:
                file.write(str(version).encode())


def _read_directory(root: Path) -> int | None:
    path = root / "deep" / "directory"
    if not path.exists():
        return None
    (version,) = {int((path / name).read_bytes()) for name in ("a", "b")}
    return version


DELTA_VERSIONS = range(4)


@cache
def _artifacts() -> Path:
    """Return a directory with an artifact of each version, and the deltas that lead to them from version 0."""
    directory = Path(_scratch().name)
    for version in DELTA_VERSIONS:
        write_small(directory / f"whole-{version}", version=version)
        write_delta(directory / "whole-0", directory / f"whole-{version}", directory / f"delta-{version}")
    return directory


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="recap-power-artifacts-")


def _apply_delta(root: Path, version: int) -> None:
    made = _artifacts()
    apply_delta(made / "whole-0", made / f"delta-{version}", root / "deep" / "artifact")


def _read_artifact(root: Path) -> int | None:
    path = root / "deep" / "artifact"
    if not path.exists():
        return None
    artifact = read_artifact(path)  # Every file has its checksum.
    weights = load_arrays(artifact.path / WEIGHTS)
    (version,) = {int(array[3, 0]) for name, array in weights.items() if name.endswith("table.weight")}
    assert version == artifact.manifest["training"]["version"]
    return version


CASES = {
    "a directory": Case(_write_directory, _read_directory),
    "prepared data": Case(_write_data, _read_data),
    "scored rows": Case(_write_rows, _read_rows),
    "training state": Case(_write_state, _read_state),
    "report of a run": Case(_write_record, _read_record),
    "a delta applied": Case(_apply_delta, _read_artifact),
}


def replay(case: Case, work: Path, seeds: int, *, replaces: bool) -> dict[str, Any]:
    """Cut the power after every change of a writer; return how often the old and the new version were there."""
    root = work / "disk"
    root.mkdir()
    if replaces:
        case.write(root, 1)
    old = case.read(root)
    before = Disk(root.resolve())
    with recorded(root) as log:
        case.write(root, 2)
    left: Counter[str] = Counter()
    for done, crashed in crashes(before, log, work / "crashed", seeds):
        version = case.read(crashed)
        assert version in (old, 2), f"after {done} of {len(log)} changes: {version}"
        assert done < len(log) or version == 2, "the writer ended, and its output is not safe"
        left["new" if version == 2 else "old"] += 1
        case.write(crashed, 3)  # The next writer is not held up by what is left, and leaves nothing of it.
        assert case.read(crashed) == 3
        assert not [path for path in crashed.rglob(".*") if path.name.endswith((".partial", ".scratch"))]
    return {"changes": len(log), **left}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="mixed crashes after each change")
    parser.add_argument("--only", choices=CASES)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if arguments.only in (None, name):
            for replaces in (False, True):
                with tempfile.TemporaryDirectory(prefix="recap-power-") as work:
                    result = replay(case, Path(work), arguments.seeds, replaces=replaces)
                results[f"{name}, {'replaced' if replaces else 'new'}"] = result
    print(json.dumps({"crashes": results}))


if __name__ == "__main__":
    main()
