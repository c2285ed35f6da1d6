"""The exported graphs of an artifact, run by ONNX Runtime: without torch, in any number of threads at once.

The inputs of a graph are `ids`, `values`, and each embedding table under its name in the file of weights. Tables are
by far the largest part of a model, and all graphs share one copy of them (docs/decisions/0015).
Shapes: B rows, W id columns, N value columns.
"""

from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from recap_ctr.data.encode import Floats as Values
from recap_ctr.data.encode import Ints
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import Artifact
from recap_ctr.inference.manifest import WEIGHTS, mismatch
from recap_ctr.inference.operators import check_operators
from recap_ctr.inference.setting import Setting
from recap_ctr.storage.arrays import Array, load_arrays

IDS, VALUES = "ids", "values"
OUTPUTS = ("logit", "disagreement", "calibrated")
"""The outputs of a graph: the raw logit, corrected for sampled negatives; its standard deviation over routes; and the
calibrated logit, for those who run a graph by other means than ours."""
# ONNX refers to files and memory outside of a graph by this key. Text is stored as it is, so a graph without these
# letters can't refer to anything.
_EXTERNAL_DATA_KEY = b"location"
MAX_MEMORY = 1 << 30
"""How many bytes all graphs of a process may take together for what they compute; a graph that needs more fails."""


def open_session(graph: bytes, threads: int) -> Any:
    """Return a session that waits without spinning, logs nothing, and reads nothing but these bytes.

    It runs only operators on our list, in bounded memory.
    """
    import onnxruntime as ort

    if _EXTERNAL_DATA_KEY in graph:
        raise ValueError("a graph refers to data outside of itself")
    check_operators(graph)
    _bound_memory()
    options = ort.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Threads that spin while they wait take the cores from those that work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@cache
def _bound_memory() -> None:
    """Give the graphs of this process one bounded store of memory."""
    import onnxruntime as ort

    store = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with suppress(Exception):  # The program around us has registered its own.
        ort.create_and_register_allocator(store, ort.OrtArenaCfg({"max_mem": MAX_MEMORY}))


def table_names(session: Any) -> list[str]:
    """Return the names of the weights that a graph takes as inputs."""
    return [value.name for value in session.get_inputs() if value.name not in (IDS, VALUES)]


def run(
    session: Any,
    ids_BW: Ints,
    values_BN: Values,
    tables: dict[str, Array],
    outputs: tuple[str, ...] = OUTPUTS[:2],
) -> list[Array]:
    """Return some outputs of a graph for some rows."""
    inputs = {IDS: ids_BW, VALUES: values_BN, **tables}
    arrays: list[Array] = session.run(
        outputs, {value.name: inputs[value.name] for value in session.get_inputs()}
    )
    return arrays


class OnnxBackend:
    """Runs every offered setting of an artifact that has a graph, by ONNX Runtime."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self.settings = tuple(setting for setting in artifact.graphs if artifact.shortfall(setting) is None)
        self.threads = threads
        self._sessions: dict[Setting, Any] = {}
        for setting in self.settings:
            graph = artifact.read_graph(setting)
            try:
                self._sessions[setting] = open_session(graph, threads)
            except (
                Exception
            ) as error:  # The parser of ONNX Runtime raises many kinds on a file that isn't ours.
                raise InputError(
                    f"{artifact.path / setting.file} can't be loaded: {str(error).splitlines()[0]}",
                    fix="export the artifact again, or upgrade onnxruntime",
                ) from None
        names = {name for session in self._sessions.values() for name in table_names(session)}
        self._tables = load_arrays(artifact.path / WEIGHTS, sorted(names))
        artifact.check_unchanged()
        for name, table in self._tables.items():
            if not np.isfinite(table).all():
                raise InputError(
                    f"{artifact.path / WEIGHTS}: {name} holds NaN or infinity", fix="train the model again"
                )
        self._refuse_other_graphs(artifact)

    def _refuse_other_graphs(self, artifact: Artifact) -> None:
        """Refuse graphs that don't give one logit per row for the first and last value of every field."""
        ids_2W, values_2N = _extreme_rows(artifact.encoder.layout)
        for setting in self.settings:
            for count in (1, 2):
                try:
                    outputs = self.logits(setting, ids_2W[:count], values_2N[:count])
                except Exception as error:
                    raise InputError(
                        f"{mismatch(artifact.path)}: {setting.file}: {str(error).splitlines()[0]}"
                    ) from None
                if any(output.shape != (count,) or output.dtype != np.float32 for output in outputs):
                    raise InputError(
                        f"{mismatch(artifact.path)}: {setting.file} does not give one logit per row"
                    )

    def logits(self, setting: Setting, ids_BW: Ints, values_BN: Values) -> tuple[Array, Array]:
        """Return the raw logits, corrected for sampled negatives, and their standard deviation over routes."""
        if setting not in self._sessions:
            stored = ", ".join(map(str, self.settings))
            depth = "" if setting.depth is None else f" --depth {setting.depth}"
            raise InputError(
                f"the artifact holds no graph for {setting}; it holds: {stored}",
                fix=f"recap export ARTIFACT --routes {setting.routes}{depth}, or pip install 'recap-ctr[train]'",
            )
        logit_B, disagreement_B = run(self._sessions[setting], ids_BW, values_BN, self._tables)
        return logit_B, disagreement_B


def _extreme_rows(layout: Layout) -> tuple[Ints, Values]:
    """Return two encoded rows: one with the first value of every field, one with the last."""
    ids_2W = np.concatenate(
        [
            np.repeat([[field.offset], [field.offset + field.size - 1]], field.width, axis=1)
            for field in layout.fields
        ],
        axis=1,
    )
    return ids_2W.astype(np.int32), np.ones((2, layout.num_values), np.float32)
