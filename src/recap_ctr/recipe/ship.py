"""Put a run's artifact where users of a fit look for it."""

import math
import shutil
from pathlib import Path

from recap_ctr.data.shards import PreparedData
from recap_ctr.inference.artifact import is_same_model
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.storage.files import atomic_directory, copy_file, read_object
from recap_ctr.training.config import ARTIFACT


def ship(run: Path, out: Path) -> None:
    """Copy the artifact of a finished run to the fit in `out`, in one step."""
    # The same model is left in place: it may have exported graphs by now.
    if not is_same_model(run / ARTIFACT, out / ARTIFACT):
        with atomic_directory(out / ARTIFACT) as partial:
            shutil.copytree(run / ARTIFACT, partial, dirs_exist_ok=True, copy_function=copy_file)


def shipped_auc(out: Path, data: PreparedData) -> float:
    """Return the validation AUC of the artifact of the fit in `out`; minus infinity if there is none of these data."""
    manifest = out / ARTIFACT / MANIFEST
    if not manifest.is_file():
        return -math.inf
    values = read_object(manifest, "a manifest")
    if values["data"]["fingerprint"] != data.fingerprint:
        return -math.inf
    return float(values["metrics"]["valid"]["raw"]["auc"])
