"""The exported graphs of an artifact, run by ONNX Runtime: no torch, any number of threads at once.

A graph's inputs are `ids` and `values`, and each table of vectors under its name in the file of weights: tables are by
far the largest part of a model, and all graphs share one copy of them (docs/decisions/0015).
Shapes: B rows, W id columns, N value columns, V table rows, d vector size.
"""

from typing import Any

import numpy as np

from recap_ctr.data.encode import Encoded, Ints
from recap_ctr.data.encode import Floats as Values
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import WEIGHTS, Artifact, Setting, misfit
from recap_ctr.storage.arrays import Array, load_arrays

IDS, VALUES = "ids", "values"
OUTPUTS = ("logit", "disagreement", "calibrated")
"""Of every graph: the raw logit with the correction for sampled negatives, the standard deviation over routes, and the
calibrated logit, for those who run a graph by other means than ours."""
# The key by which ONNX refers to files and to memory outside of a graph: text is stored as it is, so that a graph
# without these letters can't refer to anything.
_ELSEWHERE = b"location"


def open_session(graph: bytes, threads: int) -> Any:
    """A session that waits without spinning, says nothing, and reads nothing but these bytes."""
    import onnxruntime as ort

    if _ELSEWHERE in graph:
        raise ValueError("a graph refers to data outside of itself")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Threads that spin while they wait take the cores from those who work.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def table_names(session: Any) -> list[str]:
    """The weights that a graph wants as inputs."""
    return [one.name for one in session.get_inputs() if one.name not in (IDS, VALUES)]


def run(
    session: Any,
    ids_BW: Ints,
    values_BN: Values,
    tables: dict[str, Array],
    outputs: tuple[str, ...] = OUTPUTS[:2],
) -> list[Array]:
    """Some outputs of a graph for some rows."""
    given = {IDS: ids_BW, VALUES: values_BN, **tables}
    found: list[Array] = session.run(outputs, {one.name: given[one.name] for one in session.get_inputs()})
    return found


class Graphs:
    """All settings of an artifact that have a graph, ready to run."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self.settings, self.threads = artifact.graphs, threads
        self._sessions: dict[Setting, Any] = {}
        for setting in self.settings:
            graph = artifact.read_graph(setting)
            try:
                self._sessions[setting] = open_session(graph, threads)
            except Exception as error:  # whatever its parser says of a file that isn't ours
                raise InputError(
                    f"{artifact.path / setting.file} can't be loaded: {str(error).splitlines()[0]}",
                    fix="export the artifact anew, or upgrade onnxruntime",
                ) from None
        names = {name for session in self._sessions.values() for name in table_names(session)}
        self._tables = load_arrays(artifact.path / WEIGHTS, sorted(names))
        artifact.check_unchanged()
        for name, table in self._tables.items():
            if not np.isfinite(table).all():
                raise InputError(
                    f"{artifact.path / WEIGHTS}: {name} holds NaN or infinity", fix="train the model anew"
                )
        self._check(artifact)

    def _check(self, artifact: Artifact) -> None:
        """Each graph gives its outputs for rows at both ends of every field's part of a table."""
        ends_2W = np.concatenate(
            [
                np.repeat([[at.offset], [at.offset + at.size - 1]], at.width, axis=1)
                for at in artifact.encoder.layout.fields
            ],
            axis=1,
        ).astype(np.int32)
        ends = Encoded(
            ends_2W, np.ones((2, artifact.encoder.layout.num_values), np.float32), *np.zeros((2, 0), int)
        )
        for setting in self.settings:
            for count in (1, 2):
                try:
                    found = self.logits(setting, ends.ids_BW[:count], ends.values_BN[:count])
                    fits = all(part.shape == (count,) and part.dtype == np.float32 for part in found)
                except Exception as error:
                    raise InputError(
                        f"{misfit(artifact.path)}: {setting.file}: {str(error).splitlines()[0]}"
                    ) from None
                if not fits:
                    raise InputError(f"{misfit(artifact.path)}: {setting.file} gives no logit for each row")

    def logits(self, setting: Setting, ids_BW: Ints, values_BN: Values) -> tuple[Array, Array]:
        """Raw logits, the correction for sampled negatives included, and the routes' disagreement."""
        if setting not in self._sessions:
            stored = ", ".join(map(str, self.settings))
            depth = "" if setting.depth is None else f" --depth {setting.depth}"
            raise InputError(
                f"the artifact holds no graph for {setting}; it holds: {stored}",
                fix=f"recap export ARTIFACT --routes {setting.routes}{depth}, or pip install 'recap-ctr[train]'",
            )
        logit_B, disagreement_B = run(self._sessions[setting], ids_BW, values_BN, self._tables)
        return logit_B, disagreement_B
