"""A trained model as ONNX graphs, one for each setting of the dial, which go into its artifact.

Shapes: B rows, K routes.
"""

import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from recap_ctr.data.encode import Encoded, random_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.evaluation.sampling import sampling_weights
from recap_ctr.inference.artifact import Exported, Setting, add_graphs, read_artifact, setting_quality
from recap_ctr.inference.onnx_backend import IDS, OUTPUTS, VALUES, open_session, run
from recap_ctr.inference.quantise import quantise
from recap_ctr.inference.scorer import EVAL_ROWS
from recap_ctr.inference.torch_backend import Eager, PackedModel, with_model
from recap_ctr.jobs.progress import say
from recap_ctr.nn.embedding import Table
from recap_ctr.nn.interface import Inputs
from recap_ctr.storage.arrays import Array

OPSET = 20
TOLERANCE = 1e-5  # of a logit; relative where it exceeds 1
PARITY_ROWS = 512
LARGEST_LOSS = 1e-4  # that rounding to int8 may add to the logloss on validation rows


class Graph(nn.Module):
    """What a graph computes. Tables are inputs, so that all graphs of an artifact share them."""

    def __init__(self, packed: PackedModel, setting: Setting) -> None:
        super().__init__()
        self.model = packed.ready(setting)
        self.several = setting.routes > 1
        self.shift, self.calibration = packed.shift, packed.calibration
        stored = {id(weight): name for name, weight in packed.backbone.named_parameters()}
        tables = {
            f"{path}.weight": table.weight
            for path, table in self.model.named_modules()
            if isinstance(table, Table)
        }
        self.paths = list(tables)
        self.names = [stored[id(weight)] for weight in tables.values()]
        """Of the tables, as the file of weights has them."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Only an affine calibration can be part of a graph: on a steep step of an isotonic one the rounding of 32 bits
        would show."""
        return OUTPUTS if isinstance(self.calibration, AffineCalibration) else OUTPUTS[:2]

    def forward(self, ids_BW: Tensor, values_BN: Tensor, tables: list[Tensor]) -> tuple[Tensor, ...]:
        given = dict(zip(self.paths, tables, strict=True))
        output = functional_call(self.model, given, (Inputs(ids_BW, values_BN),))
        logit_B = output.logit_B + self.shift
        disagreement_B = torch.zeros_like(logit_B)
        if self.several:
            disagreement_B = output.aux["logits_KB"].std(dim=0, correction=0)
        if not isinstance(self.calibration, AffineCalibration):
            return logit_B, disagreement_B
        return logit_B, disagreement_B, self.calibration.scale * logit_B + self.calibration.shift


def to_onnx(packed: PackedModel, setting: Setting) -> bytes:
    """The graph of a setting; the same model gives the same bytes."""
    graph = Graph(packed, setting).eval()
    rows = random_rows(packed.encoder.layout, 8)
    weights = dict(packed.backbone.named_parameters())
    tables = [weights[name].detach() for name in graph.names]
    batch = {0: Dim("batch")}
    try:
        with silence(), torch.no_grad():
            program = torch.onnx.export(
                graph,
                (torch.from_numpy(rows.ids_BW), torch.from_numpy(rows.values_BN), tables),
                dynamo=True,
                opset_version=OPSET,
                input_names=[IDS, VALUES, *graph.names],
                output_names=graph.outputs,
                dynamic_shapes=(batch, batch, [None] * len(tables)),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:  # of our own models none does
        raise InputError(
            f"{packed.name} can't be exported: {error}", fix="score it by torch, or change its forward"
        ) from error
    assert program is not None
    return _plain(program.model_proto)


def _plain(proto: Any) -> bytes:
    """The graph without what its maker noted on it: names of files and lines of code on this machine."""
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for value in (*proto.graph.input, *proto.graph.output):
        value.ClearField("metadata_props")
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


@contextmanager
def silence() -> Iterator[None]:
    """The exporter warns of its own deprecated calls, and of packages that it could use but needn't."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def export_setting(packed: PackedModel, eager: Eager, setting: Setting) -> Exported:
    """The graph of a setting, after it has been held to torch."""
    graph = to_onnx(packed, setting)
    parity = difference(graph, packed, eager, setting)
    if not parity <= TOLERANCE:
        raise InputError(
            f"the graph for {setting} differs from torch by {parity:.1e} in a logit, where {TOLERANCE:.0e} is allowed",
            fix="score this model by torch: it has not been exported",
        )
    return Exported(setting, graph, "float32", parity)


def difference(graph: bytes, packed: PackedModel, eager: Eager, setting: Setting) -> float:
    """The largest difference of a graph from torch, over rows of every kind, in batches of one, of some, and of all."""
    session = open_session(graph, threads=1)
    if any(type(one.shape[0]) is int for one in session.get_inputs() if one.name == IDS):
        raise InputError(
            f"the graph of {packed.name} takes batches of one size only",
            fix="where its forward says len(x) or int(x.shape[0]), write x.shape[0]",
        )
    rows = random_rows(packed.encoder.layout, PARITY_ROWS, seed=1)
    tables = {name: array for name, array in packed.weights.items() if name in _inputs(session)}
    logit_B, disagreement_B = eager.logits(setting, rows.ids_BW, rows.values_BN)
    outputs = tuple(one.name for one in session.get_outputs())
    largest = 0.0
    for part in (slice(0, 1), slice(1, 8), slice(8, 71), slice(None)):
        found = dict(zip(outputs, run(session, *_part(rows, part), tables, outputs), strict=True))
        wanted = {"logit": logit_B[part], "disagreement": disagreement_B[part]}
        if "calibrated" in found:
            wanted["calibrated"] = packed.calibration.apply(found["logit"])
        for name, expected in wanted.items():
            gap_B = np.abs(found[name] - expected) / np.maximum(1.0, np.abs(expected))
            largest = max(largest, float(gap_B.max()))  # NaN stays NaN, and is not small
            if not np.isfinite(gap_B).all():
                return float("inf")
    return largest


def _inputs(session: Any) -> set[str]:
    return {one.name for one in session.get_inputs()}


def _part(rows: Encoded, part: slice) -> tuple[Array, Array]:
    return rows.ids_BW[part], rows.values_BN[part]


@dataclass(frozen=True)
class Rounding:
    """What a graph in int8 changes, on validation rows, and how much faster it is here."""

    auc: float
    logloss: float
    speed: float
    """Rows a second relative to the graph in 32 bits, 512 rows at a time."""

    @property
    def pays(self) -> bool:
        return self.logloss <= LARGEST_LOSS and self.speed > 1

    def __str__(self) -> str:
        reason = "it is no faster" if self.speed <= 1 else f"that is more than {LARGEST_LOSS:.4f} of logloss"
        verdict = "stored" if self.pays else f"left out, as {reason}"
        return f"AUC {self.auc:+.5f}, logloss {self.logloss:+.6f}, {self.speed:.2f} of the speed in 32 bits: {verdict}"


@dataclass(frozen=True)
class Line:
    """What is said of one graph."""

    setting: Setting
    exported: Exported
    quality: dict[str, Any] | None
    rounding: Rounding | None

    def to_dict(self) -> dict[str, Any]:
        about = {**self.exported.to_dict(), "file": self.setting.file, "bytes": len(self.exported.graph)}
        rounding = None if self.rounding is None else {**asdict(self.rounding), "pays": self.rounding.pays}
        return {**about, "quality": self.quality, "int8": rounding}


def export(
    path: Path,
    *,
    routes: int | None = None,
    depth: int | None = None,
    int8: bool = False,
    data: PreparedData | None = None,
    quiet: bool = False,
) -> list[Line]:
    """Give the artifact a graph for each setting of its dial, or for one more; the rest of it stays as it is.

    With `data`, how good each setting is on validation rows goes into the manifest, too.
    """
    artifact = read_artifact(path)
    packed = with_model(artifact)
    if data is not None and artifact.manifest["data"]["fingerprint"] != data.fingerprint:
        raise InputError(
            f"{path} was trained on other data than {data.path}", fix="give the data it was trained on"
        )
    if int8 and data is None:
        raise InputError(
            "--int8 needs --data: what it costs is measured on validation rows", fix="add --data PREPARED"
        )
    eager = Eager(packed)
    kept = {entry: _stored(packed, entry) for entry in artifact.graphs}
    wanted = packed.dial
    if routes is not None or depth is not None:
        asked = packed.setting(routes, depth)
        # Whoever asks for nothing gets the full setting, so its graph is always there.
        wanted = (asked,) if packed.dial[0] in kept else tuple(dict.fromkeys((packed.dial[0], asked)))
    lines: dict[Setting, Line] = {}
    for setting in wanted:
        exported = export_setting(packed, eager, setting)
        lines[setting] = _line(packed, exported, int8=int8, data=data)
        if not quiet:
            say(f"{setting}: {len(exported.graph):,} bytes, within {exported.parity:.1e} of torch")
    for setting, exported in kept.items():
        if setting not in lines:
            lines[setting] = _line(packed, exported, int8=False, data=data)
    ordered = sorted(lines.values(), key=lambda line: (-(line.setting.depth or 0), -line.setting.routes))
    dial = [line.quality for line in ordered if line.quality is not None] if data is not None else None
    add_graphs(artifact, [line.exported for line in ordered], dial)
    return ordered


def _stored(packed: PackedModel, setting: Setting) -> Exported:
    entry = next(one for one in packed.manifest["graphs"] if Setting(one["routes"], one["depth"]) == setting)
    return Exported(setting, packed.read_graph(setting), entry["precision"], entry["parity"])


def _line(packed: PackedModel, exported: Exported, *, int8: bool, data: PreparedData | None) -> Line:
    """The graph to store: in int8 if that is wanted and pays."""
    setting = exported.setting
    if data is None:
        return Line(setting, exported, None, None)
    quality = _quality(packed, exported, data)
    if not int8:
        return Line(setting, exported, quality, None)
    graph = quantise(exported.graph)
    small = Exported(setting, graph, "int8", difference(graph, packed, Eager(packed), setting))
    rounded = _quality(packed, small, data)
    rounding = Rounding(
        rounded["auc"] - quality["auc"],
        rounded["logloss"] - quality["logloss"],
        _speed(packed, exported, small),
    )
    chosen = (small, rounded) if rounding.pays else (exported, quality)
    return Line(setting, *chosen, rounding)


def _quality(packed: PackedModel, exported: Exported, data: PreparedData) -> dict[str, Any]:
    session, tables = _ready(packed, exported)
    parts = [
        run(session, batch.ids_BW, batch.values_BN, tables, OUTPUTS[:1])[0]
        for batch in data.valid.batches(EVAL_ROWS)
    ]
    calibrated = packed.calibration.apply(np.concatenate(parts))
    weights = sampling_weights(data.valid, math.exp(packed.shift))
    return setting_quality(exported.setting, data.valid.labels, calibrated, weights)


def _ready(packed: PackedModel, exported: Exported) -> tuple[Any, dict[str, Array]]:
    session = open_session(exported.graph, threads=1)
    return session, {name: array for name, array in packed.weights.items() if name in _inputs(session)}


def _speed(packed: PackedModel, plain: Exported, small: Exported, rounds: int = 7) -> float:
    """By turns, and in CPU time, as the machine has other work to do as well."""
    rows = random_rows(packed.encoder.layout, EVAL_ROWS)
    seconds: dict[str, list[float]] = {"float32": [], "int8": []}
    ready = {exported.precision: _ready(packed, exported) for exported in (plain, small)}
    for _ in range(rounds):
        for precision, (session, tables) in ready.items():
            start = time.thread_time()
            run(session, rows.ids_BW, rows.values_BN, tables, OUTPUTS[:1])
            seconds[precision].append(time.thread_time() - start)
    return float(np.median(seconds["float32"]) / np.median(seconds["int8"]))
