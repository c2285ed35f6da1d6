"""Put a run's artifact where users of a fit will look for it."""

import math
import shutil
from pathlib import Path

from recap_ctr.data.shards import PreparedData
from recap_ctr.datasets.catalogue import DATASETS, find_protocol
from recap_ctr.inference.about import About
from recap_ctr.inference.artifact import is_same_model, set_about
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.storage.files import atomic_directory, copy_file, read_object
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import REPORT, FitReport, read_report

INTERRUPTED = "interrupted: packing the best so far; the same command goes on from here"


def ship(run: Path, out: Path) -> None:
    """Copy the artifact of a finished run to the fit in `out`, in one step."""
    # The same model is left in place: it may have exported graphs by now.
    if not is_same_model(run / ARTIFACT, out / ARTIFACT):
        with atomic_directory(out / ARTIFACT) as partial:
            shutil.copytree(run / ARTIFACT, partial, dirs_exist_ok=True, copy_function=copy_file)


def ship_best(runs: Runs, out: Path, data: PreparedData) -> None:
    """Ship the best of the runs on validation rows, unless a better model of the same data is shipped already."""
    best = max(runs, key=lambda path: runs[path].metrics.valid.raw.auc)
    if runs[best].metrics.valid.raw.auc > shipped_auc(out, data):
        ship(best, out)


def has_finished_fit(out: Path, data: PreparedData) -> bool:
    """Return whether `out` holds the report and the artifact of a fit of these data that was not interrupted."""
    if not (out / REPORT).is_file() or not (out / ARTIFACT / MANIFEST).is_file():
        return False
    report = read_report(out)
    is_of_data = report.data.fingerprint == data.fingerprint
    return isinstance(report, FitReport) and is_of_data and not report.interrupted


def write_about(out: Path, about: About, data: PreparedData) -> None:
    """Put owner, use and licence into the card of the artifact in `out`; a public data set has a licence of its own."""
    public = data.manifest["inputs"].get("dataset")
    if about.data_licence is None and public in DATASETS:
        about = about.model_copy(update={"data_licence": find_protocol(public).licence})
    set_about(out / ARTIFACT, about)


def shipped_auc(out: Path, data: PreparedData) -> float:
    """Return the validation AUC of the artifact of the fit in `out`; minus infinity if there is none of these data."""
    manifest = out / ARTIFACT / MANIFEST
    if not manifest.is_file():
        return -math.inf
    values = read_object(manifest, "a manifest")
    if values["data"]["fingerprint"] != data.fingerprint:
        return -math.inf
    return float(values["metrics"]["valid"]["raw"]["auc"])
