"""An artifact that is ready to score encoded rows. If it holds exported graphs, no torch is needed.

Shapes: B rows, W id columns, N value columns.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoded, Ints
from recap_ctr.data.encode import Floats as Values
from recap_ctr.data.few_rows import FEW_ROWS, Columns, FewRows
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.artifact import Artifact, read_artifact
from recap_ctr.inference.onnx_backend import OnnxBackend
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.machine import num_cores

if TYPE_CHECKING:
    from recap_ctr.inference.torch_backend import PackedModel

EVAL_ROWS = 512  # Rows scored at a time: everything between inputs and logits stays in the processor's cache.
EVAL_IDS = 1 << 20  # Ids scored at a time: very wide rows take no more memory than narrow ones.
Floats = npt.NDArray[np.float64]
BackendName = Literal["onnx", "torch"]


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of some rows, in their order."""

    probability_B: Floats
    """Calibrated probability of a click."""
    logit_B: Floats
    """Calibrated logit."""
    raw_logit_B: Floats
    """The model's logit before calibration, corrected for sampled negatives."""
    disagreement_B: Floats
    """Standard deviation of the raw logit over routes: how unsure the model is. Zero for one route."""


class Backend(Protocol):
    """What runs a model: from encoded rows to raw logits and the disagreement of routes."""

    settings: tuple[Setting, ...]
    threads: int

    def logits(
        self, setting: Setting, ids_BW: Ints, values_BN: Values
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the raw logits, corrected for sampled negatives, and their standard deviation over routes."""
        ...


class Engine:
    """An artifact ready to score, in any number of threads at once.

    A row's score does not depend on the rows that are scored with it.
    """

    def __init__(self, artifact: Artifact, backend: Backend) -> None:
        self.artifact, self.backend = artifact, backend
        self.manifest, self.encoder = artifact.manifest, artifact.encoder
        self.profile = artifact.profile
        self.settings = backend.settings
        """The settings on offer, most accurate and most costly first; the first is the default."""
        self.threads = backend.threads
        """How many threads work on one call."""
        self._few_rows = FewRows(self.encoder)
        # Vocabularies are sorted at their first use; do it now, not at the first request.
        names = list(self.encoder.schema.input_columns)
        frame = pl.DataFrame({name: [None] for name in names}, dict.fromkeys(names, pl.String))
        self.encoder.encode(Block(frame, 1, "a row without values"))

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        backend: Literal["auto", "onnx", "torch"] = "auto",
        threads: int | None = None,
    ) -> "Engine":
        """Load the artifact in `path`; `auto` runs its graphs if it has any, else torch.

        `threads` work on one call, by default as many as there are cores.
        """
        artifact = read_artifact(path)
        if _choose_backend(path, artifact, backend) == "onnx":
            return cls(artifact, OnnxBackend(artifact, threads or num_cores()))
        from recap_ctr.inference.torch_backend import load_model, set_threads

        set_threads(threads)
        return cls.of(load_model(artifact))

    @classmethod
    def of(cls, model: "PackedModel") -> "Engine":
        """Return an engine that runs a model in memory by torch."""
        from recap_ctr.inference.torch_backend import TorchBackend

        return cls(model, TorchBackend(model))

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """Return the setting with `routes` (default: all) and `depth` (default: full); refuse a poor one.

        A setting that has no graph is returned, too.
        """
        return self.settings[0] if routes is None and depth is None else self.artifact.setting(routes, depth)

    def encode(self, rows: pl.DataFrame | Block) -> Encoded:
        """Encode raw rows, which may hold unseen and missing values; errors name a block's origin and row."""
        block = rows if isinstance(rows, Block) else Block(rows, 1, "the rows")
        few = self._few_rows.encode_frame(block.frame) if block.frame.height <= FEW_ROWS else None
        return self.encoder.encode(block) if few is None else few

    def encode_few(self, columns: Columns, height: int) -> Encoded | None:
        """Encode few rows that are no data frame yet; None if they must become one, for `encode`."""
        return self._few_rows.encode(columns, height) if height <= FEW_ROWS else None

    def score(
        self,
        encoded: Encoded,
        setting: Setting | None = None,
        *,
        origin: str = "the rows",
        first_row: int = 1,
    ) -> Scores:
        """Score encoded rows at `setting`, by default the most accurate one.

        If a row can't be scored, the error names it by `origin` and by its number, counted from `first_row`.
        """
        setting = setting or self.settings[0]
        raw_B, disagreement_B = np.empty((2, len(encoded.ids_BW)))
        num_rows = min(EVAL_ROWS, max(EVAL_IDS // max(encoded.ids_BW.shape[1], 1), 1))
        for start in range(0, len(raw_B), num_rows):
            part = slice(start, start + num_rows)
            raw_B[part], disagreement_B[part] = self.backend.logits(
                setting, encoded.ids_BW[part], encoded.values_BN[part]
            )
        bad = np.flatnonzero(~np.isfinite(raw_B))
        if len(bad):
            raise InputError(
                f"{origin}: row {first_row + bad[0]}: the model's logit is {raw_B[bad[0]]}",
                fix="look for extreme numbers in the row; if there are none, train the model again",
            )
        logit_B = self.artifact.calibration_of(setting).apply(raw_B)
        return Scores(sigmoid(logit_B), logit_B, raw_B, disagreement_B)


def _choose_backend(path: Path, artifact: Artifact, wanted: Literal["auto", "onnx", "torch"]) -> BackendName:
    """Return the backend to load; refuse one whose package or graphs are missing."""
    has_graphs = bool(artifact.graphs)
    has_runtime, has_torch = is_installed("onnxruntime"), is_installed("torch")
    if wanted == "auto":
        wanted = "onnx" if has_graphs and (has_runtime or not has_torch) else "torch"
        if wanted == "torch" and not has_torch:
            raise InputError(
                f"{path} holds no exported graphs, and without them PyTorch is needed",
                fix="run `recap export` where the model was trained, or pip install 'recap-ctr[train]'",
            )
    if wanted == "torch" and not has_torch:
        raise InputError("this needs PyTorch", fix="pip install 'recap-ctr[train]'")
    if wanted == "onnx" and not has_graphs:
        raise InputError(f"{path} holds no exported graphs", fix=f"recap export {path}")
    if wanted == "onnx" and not has_runtime:
        raise InputError("exported graphs need ONNX Runtime", fix="pip install onnxruntime")
    return wanted


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None
