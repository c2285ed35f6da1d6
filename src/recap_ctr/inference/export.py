"""A trained model as ONNX graphs in its artifact, one for each setting of the dial.

Shapes: B rows, W id columns, N value columns, K routes.
"""

import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from recap_ctr.data.encode import random_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import AffineCalibration, calibration_from_dict
from recap_ctr.evaluation.sampling import sampling_weights
from recap_ctr.inference.artifact import ExportedGraph, add_graphs, read_artifact
from recap_ctr.inference.engine import EVAL_ROWS
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.onnx_backend import IDS, OUTPUTS, VALUES, open_session, run, table_names
from recap_ctr.inference.quantise import quantise
from recap_ctr.inference.setting import Setting, measured_settings, setting_quality
from recap_ctr.inference.stopwatch import interleaved_seconds
from recap_ctr.inference.torch_backend import PackedModel, TorchBackend, load_model
from recap_ctr.jobs.progress import say
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.rates import RateTable
from recap_ctr.nn.table import Table
from recap_ctr.storage.arrays import Array

OPSET = 20
TOLERANCE = 1e-5  # The largest difference of a logit from torch's; relative where the logit exceeds 1.
PARITY_ROWS = 512
LARGEST_LOSS = 1e-4  # What rounding to int8 may add to the logloss on validation rows.


class Graph(nn.Module):
    """What a graph computes. Embedding tables are inputs, so that all graphs of an artifact share them."""

    def __init__(self, packed: PackedModel, setting: Setting) -> None:
        super().__init__()
        self.model = packed.folded(setting)
        self.has_several_routes = setting.routes > 1
        self.shift, self.calibration = packed.shift, packed.calibration_of(setting)
        stored_names = {
            id(weight): name for name, weight in packed.backbone.state_dict(keep_vars=True).items()
        }
        tables = {
            f"{path}.weight": table.weight
            for path, table in self.model.named_modules()
            if isinstance(table, Table | RateTable)
        }
        self.paths = list(tables)
        """The tables' names in `model`."""
        self.names = [stored_names[id(weight)] for weight in tables.values()]
        """The tables' names in the file of weights."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs; only an affine calibration can be part of a graph.

        On the steep steps of an isotonic calibration, rounding to 32 bits would be visible.
        """
        return OUTPUTS if isinstance(self.calibration, AffineCalibration) else OUTPUTS[:2]

    def forward(self, ids_BW: Tensor, values_BN: Tensor, tables: list[Tensor]) -> tuple[Tensor, ...]:
        """Return what `outputs` names, one value per row each."""
        weights = dict(zip(self.paths, tables, strict=True))
        output = functional_call(self.model, weights, (Inputs(ids_BW, values_BN),))
        logit_B = output.logit_B + self.shift
        disagreement_B = torch.zeros_like(logit_B)
        if self.has_several_routes:
            disagreement_B = output.aux["logits_KB"].std(dim=0, correction=0)
        if not isinstance(self.calibration, AffineCalibration):
            return logit_B, disagreement_B
        limit = self.calibration.limit
        limited_B = logit_B if limit is None else logit_B.clamp(-limit, limit)
        return logit_B, disagreement_B, self.calibration.scale * limited_B + self.calibration.shift


def to_onnx(packed: PackedModel, setting: Setting) -> bytes:
    """Return the graph of a setting; the same model gives the same bytes."""
    graph = Graph(packed, setting).eval()
    rows = random_rows(packed.encoder.layout, 8)
    weights = packed.backbone.state_dict()
    tables = [weights[name] for name in graph.names]
    batch = {0: Dim("batch")}
    try:
        with silence_exporter(), torch.no_grad():
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
    except torch.onnx.OnnxExporterError as error:  # All of our own models can be exported.
        raise InputError(
            f"{packed.name} can't be exported: {error}", fix="score it by torch, or change its forward"
        ) from error
    assert program is not None
    return _without_notes(program.model_proto)


def _without_notes(proto: Any) -> bytes:
    """Return the graph without the exporter's notes, which name files and lines of code on this machine."""
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for value in (*proto.graph.input, *proto.graph.output):
        value.ClearField("metadata_props")
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Hide the exporter's warnings about its own deprecated calls and about optional packages."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def export_setting(packed: PackedModel, backend: TorchBackend, setting: Setting) -> ExportedGraph:
    """Return the graph of a setting; refuse it if its logits differ from torch's."""
    graph = to_onnx(packed, setting)
    parity = difference_from_torch(graph, packed, backend, setting)
    if not parity <= TOLERANCE:
        raise InputError(
            f"the graph for {setting} differs from torch by {parity:.1e} in a logit, where {TOLERANCE:.0e} is allowed",
            fix="score this model by torch: it has not been exported",
        )
    return ExportedGraph(setting, graph, "float32", parity)


def difference_from_torch(
    graph: bytes, packed: PackedModel, backend: TorchBackend, setting: Setting
) -> float:
    """Return the largest difference of a graph's outputs from torch's, over random rows in batches of many sizes."""
    session, tables = _open_with_tables(packed, graph)
    if any(type(value.shape[0]) is int for value in session.get_inputs() if value.name == IDS):
        raise InputError(
            f"the graph of {packed.name} takes batches of one size only",
            fix="where its forward says len(x) or int(x.shape[0]), write x.shape[0]",
        )
    rows = random_rows(packed.encoder.layout, PARITY_ROWS, seed=1)
    logit_B, disagreement_B = backend.logits(setting, rows.ids_BW, rows.values_BN)
    names = tuple(value.name for value in session.get_outputs())
    largest = 0.0
    for part in (slice(0, 1), slice(1, 8), slice(8, 71), slice(None)):
        arrays = run(session, rows.ids_BW[part], rows.values_BN[part], tables, names)
        outputs = dict(zip(names, arrays, strict=True))
        expected = {"logit": logit_B[part], "disagreement": disagreement_B[part]}
        if "calibrated" in outputs:
            expected["calibrated"] = packed.calibration_of(setting).apply(outputs["logit"])
        for name, expected_B in expected.items():
            gap_B = np.abs(outputs[name] - expected_B) / np.maximum(1.0, np.abs(expected_B))
            if not np.isfinite(gap_B).all():
                return float("inf")
            largest = max(largest, float(gap_B.max()))
    return largest


def _open_with_tables(packed: PackedModel, graph: bytes) -> tuple[Any, dict[str, Array]]:
    """Return a session of the graph, and the tables that it takes as inputs."""
    session = open_session(graph, threads=1)
    names = set(table_names(session))
    return session, {name: array for name, array in packed.weights.items() if name in names}


@dataclass(frozen=True)
class Rounding:
    """What rounding a graph to int8 changes on validation rows, and how much faster it is on this machine."""

    auc: float
    logloss: float
    speed: float
    """Rows per second relative to the graph in 32 bits, 512 rows at a time."""

    @property
    def pays(self) -> bool:
        """Return whether the graph in int8 is faster and loses little enough to be stored."""
        return self.logloss <= LARGEST_LOSS and self.speed > 1

    def __str__(self) -> str:
        reason = (
            "it is not faster" if self.speed <= 1 else f"it costs more than {LARGEST_LOSS:.4f} of logloss"
        )
        verdict = "stored" if self.pays else f"not stored, because {reason}"
        return f"AUC {self.auc:+.5f}, logloss {self.logloss:+.6f}, {self.speed:.2f} × the speed of 32 bits: {verdict}"


@dataclass(frozen=True)
class GraphReport:
    """One graph that an export stored, with its quality and the effect of rounding, where they were measured."""

    setting: Setting
    exported: ExportedGraph
    quality: dict[str, Any] | None
    rounding: Rounding | None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        size = {"file": self.setting.file, "bytes": len(self.exported.graph)}
        rounding = None if self.rounding is None else {**asdict(self.rounding), "pays": self.rounding.pays}
        return {**self.exported.to_dict(), **size, "quality": self.quality, "int8": rounding}


def export(
    path: Path,
    *,
    routes: int | None = None,
    depth: int | None = None,
    int8: bool = False,
    data: PreparedData | None = None,
    quiet: bool = False,
) -> list[GraphReport]:
    """Give the artifact a graph for each setting of its dial, or only for the setting of `routes` and `depth`.

    Graphs of other settings stay. With `data`, which must be the data of the training, each setting is measured on
    validation rows, calibrated there if it has no calibration of its own, and both go into the manifest. `int8` stores
    rounded graphs where that pays. A setting that is too poor to be offered gets no graph.
    """
    artifact = read_artifact(path)
    packed = load_model(artifact)
    if data is not None and artifact.manifest["data"]["fingerprint"] != data.fingerprint:
        raise InputError(
            f"{path} was trained on other data than {data.path}", fix="give the data it was trained on"
        )
    if int8 and data is None:
        raise InputError(
            "--int8 needs --data: what it costs is measured on validation rows", fix="add --data PREPARED"
        )
    has_choice = routes is not None or depth is not None
    if data is not None:
        packed = _with_measured_dial(packed, data, packed.named_setting(routes, depth))
    backend = TorchBackend(packed)
    kept = {
        setting: stored_graph(packed, setting)
        for setting in artifact.graphs
        if packed.shortfall(setting) is None
    }
    # The full setting is the default of every command, so its graph is always stored.
    wanted = (packed.full, packed.setting(routes, depth)) if has_choice else packed.dial
    if has_choice and packed.full in kept:
        wanted = wanted[1:]
    # A graph holds its calibration, so that of a setting which has just been calibrated is out of date.
    stale = [
        setting for setting in kept if setting in packed.calibrations.keys() - artifact.calibrations.keys()
    ]
    reports: dict[Setting, GraphReport] = {}
    for setting in dict.fromkeys((*wanted, *stale)):
        exported = export_setting(packed, backend, setting)
        reports[setting] = measure_graph(packed, exported, int8=int8, data=data)
        if not quiet:
            say(f"{setting}: {len(exported.graph):,} bytes, within {exported.parity:.1e} of torch")
    for setting, exported in kept.items():
        if setting not in reports:
            reports[setting] = measure_graph(packed, exported, int8=False, data=data)
    if not quiet:
        for setting, reason in packed.poor_settings.items():
            say(f"{setting} is not offered: {reason}")
    ordered = sorted(reports.values(), key=lambda report: _dial_order(report.setting))
    dial = None if data is None else _merged_dial(packed, ordered)
    add_graphs(artifact, [report.exported for report in ordered], dial)
    return ordered


def _with_measured_dial(packed: PackedModel, data: PreparedData, chosen: Setting) -> PackedModel:
    """Return the model with every setting measured on validation rows, and calibrated there unless it already was.

    These are the settings of the dial at every depth, those that have a graph, and the `chosen` one.
    """
    settings = {*measured_settings(packed.num_routes, packed.depths), *packed.graphs, chosen}
    entries = measure_settings(
        packed.backbone,
        packed.routes,
        sorted(settings, key=_dial_order),
        data.valid,
        torch.device("cpu"),
        calibrations={packed.full: packed.calibration, **packed.calibrations},
        kind=packed.manifest["calibration"]["kind"],
        negative_rate=math.exp(packed.shift),
    )
    calibrations = {
        Setting.from_dict(entry): calibration_from_dict(entry["calibration"]) for entry in entries
    }
    return replace(packed, calibrations=calibrations, manifest={**packed.manifest, "dial": entries})


def _merged_dial(packed: PackedModel, reports: Sequence[GraphReport]) -> list[dict[str, Any]]:
    """Return the entries of the dial; graphs that were measured themselves replace the entries that torch gave."""
    measured = {report.setting: report.quality for report in reports if report.quality is not None}
    return [measured.get(Setting.from_dict(entry), entry) for entry in packed.manifest.get("dial", [])]


def _dial_order(setting: Setting) -> tuple[int, int]:
    """Return a key that sorts settings from the most accurate to the cheapest."""
    return -(setting.depth or 0), -setting.routes


def stored_graph(packed: PackedModel, setting: Setting) -> ExportedGraph:
    """Return the graph that the artifact already holds for a setting."""
    entry = next(entry for entry in packed.manifest["graphs"] if Setting.from_dict(entry) == setting)
    return ExportedGraph(setting, packed.read_graph(setting), entry["precision"], entry["parity"])


def measure_graph(
    packed: PackedModel, exported: ExportedGraph, *, int8: bool, data: PreparedData | None
) -> GraphReport:
    """Measure a graph on validation rows; with `int8`, report its rounded version instead if that pays."""
    setting = exported.setting
    if data is None:
        return GraphReport(setting, exported, None, None)
    quality = _quality(packed, exported, data)
    if not int8:
        return GraphReport(setting, exported, quality, None)
    graph = quantise(exported.graph)
    parity = difference_from_torch(graph, packed, TorchBackend(packed), setting)
    rounded = ExportedGraph(setting, graph, "int8", parity)
    rounded_quality = _quality(packed, rounded, data)
    rounding = Rounding(
        rounded_quality["auc"] - quality["auc"],
        rounded_quality["logloss"] - quality["logloss"],
        relative_speed(packed, exported, rounded),
    )
    if rounding.pays:
        return GraphReport(setting, rounded, rounded_quality, rounding)
    return GraphReport(setting, exported, quality, rounding)


def _quality(packed: PackedModel, exported: ExportedGraph, data: PreparedData) -> dict[str, Any]:
    """Return the manifest's entry for the setting of a graph, measured with the graph on validation rows."""
    session, tables = _open_with_tables(packed, exported.graph)
    logits = [
        run(session, batch.ids_BW, batch.values_BN, tables, OUTPUTS[:1])[0]
        for batch in data.valid.batches(EVAL_ROWS)
    ]
    weights = sampling_weights(data.valid, math.exp(packed.shift))
    calibration = packed.calibration_of(exported.setting)
    return setting_quality(exported.setting, calibration, data.valid.labels, np.concatenate(logits), weights)


def relative_speed(
    packed: PackedModel, plain: ExportedGraph, rounded: ExportedGraph, rounds: int = 7
) -> float:
    """Return how many times as many rows per second the rounded graph scores, in CPU time of one thread."""
    rows = random_rows(packed.encoder.layout, EVAL_ROWS)
    calls = {}
    for exported in (plain, rounded):
        session, tables = _open_with_tables(packed, exported.graph)
        calls[exported.precision] = partial(run, session, rows.ids_BW, rows.values_BN, tables, OUTPUTS[:1])
    times = interleaved_seconds(calls, rounds=rounds, clock=time.thread_time)
    return float(np.median(times["float32"]) / np.median(times["int8"]))
