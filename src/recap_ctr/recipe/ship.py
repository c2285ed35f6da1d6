"""Put a run's artifact where users of a fit look for it."""

import shutil
from pathlib import Path

from recap_ctr.inference.artifact import is_same_model
from recap_ctr.storage.files import atomic_directory
from recap_ctr.training.run import ARTIFACT


def ship(run: Path, out: Path) -> None:
    """Copy the artifact of a finished run to the fit in `out`, in one step."""
    # The same model is left in place: it may have exported graphs by now.
    if not is_same_model(run / ARTIFACT, out / ARTIFACT):
        with atomic_directory(out / ARTIFACT) as partial:
            shutil.copytree(run / ARTIFACT, partial, dirs_exist_ok=True)
