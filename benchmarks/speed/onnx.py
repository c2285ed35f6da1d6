"""What the exported graphs bring: ONNX Runtime against torch eager, and RECAP with eight routes against five FCNs.

    python -m benchmarks.speed.onnx [--threads 1] [--rounds 9]

Criteo's shape: 39 fields of 16, 910,747 table rows, rank 96, eight adapters a tower, depth 4. All take turns in each
round, in one process; a ratio is the median over rounds of the times of the same round, which for one thread are CPU
time. `where` sets apart the three places for the table of vectors: in the graph, an input of it, and looked up by numpy
before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from recap_ctr.axes.routes import Routed, late_routes
from recap_ctr.data.encode import Encoded, random_rows
from recap_ctr.data.layout import Layout
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.inference.export import OPSET, silence_exporter, to_onnx
from recap_ctr.inference.onnx_backend import open_session, run, table_names
from recap_ctr.inference.quantise import quantise
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import PackedModel, TorchBackend
from recap_ctr.jobs.machine import machine
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.nn.interface import Inputs

SIZES = (1, 64, 4096)
FIELDS, TABLE_ROWS = 39, 910_747
ROUTES = 8
MEMBERS = 5
BATCH = 512  # Rows that the engine scores at a time.
Run = Callable[[Encoded], object]


def packed(name: str, settings: dict[str, Any], layout: Layout, routes: int = 0) -> PackedModel:
    """Return a model with random weights as if it came from an artifact."""
    torch.manual_seed(0)
    config = parse_model(name, settings)
    model = build(name, config, layout)
    manifest: dict[str, Any] = {
        "model": {"name": name, "config": config.model_dump(mode="json")},
        "routes": [],
    }
    if isinstance(model, Recap) and isinstance(config, RecapConfig) and routes:
        chosen = late_routes(config, routes)
        manifest["routes"] = [route.model_dump(mode="json") for route in chosen]
        model = Routed(model, chosen)
    encoder: Any = type("Layouts", (), {"layout": layout})()
    return PackedModel(Path(), encoder, AffineCalibration(1.0, 0.0), {}, 0.0, manifest, config, model.eval())


def by_graph(model: PackedModel, graph: bytes, threads: int) -> Run:
    session = open_session(graph, threads)
    tables = {name: model.weights[name] for name in table_names(session)}
    return lambda rows: run(session, rows.ids_BW, rows.values_BN, tables)


def in_chunks(score: Run) -> Run:
    """Return a run that scores as the engine does: no more rows at a time than fit the cache."""

    def chunked(rows: Encoded) -> None:
        for start in range(0, len(rows.ids_BW), BATCH):
            part = slice(start, start + BATCH)
            score(Encoded(rows.ids_BW[part], rows.values_BN[part], rows.num_missing, rows.num_unseen))

    return chunked


class Vectors(nn.Module):
    """Replaces the table where its vectors come from outside."""

    def forward(self, vectors_BWd: Tensor) -> Tensor:
        return vectors_BWd


def elsewhere(model: PackedModel, threads: int) -> dict[str, tuple[Run, int]]:
    """Return the graph with its table inside, and the graph that takes vectors, with the bytes of each."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.folded(model.dial[0])

        def forward(self, first: Tensor, values_BN: Tensor) -> Tensor:
            logit_B: Tensor = self.model(Inputs(first, values_BN)).logit_B
            return logit_B

    def exported(first: Tensor, values: Tensor) -> bytes:
        batch = {0: Dim("batch")}
        with silence_exporter(), torch.no_grad():
            program = torch.onnx.export(
                Whole().eval(),
                (first, values),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=["first", "values"],
                dynamic_shapes=(batch, batch),
            )
        assert program is not None
        with tempfile.TemporaryDirectory() as directory:
            program.save(Path(directory, "graph.onnx"), external_data=False)
            return Path(directory, "graph.onnx").read_bytes()

    rows = random_rows(model.encoder.layout, 8)
    ids, values = torch.from_numpy(rows.ids_BW), torch.from_numpy(rows.values_BN)
    inside = exported(ids, values)
    backbone = model.backbone
    assert isinstance(backbone, Recap)
    table = backbone.embedding.table
    array = table.weight.detach().numpy()
    backbone.embedding.table = Vectors()  # type: ignore[assignment]
    outside = exported(table(ids).detach(), values)
    backbone.embedding.table = table
    sessions = open_session(inside, threads), open_session(outside, threads)

    def look_up(rows: Encoded) -> object:
        vectors = array.take(rows.ids_BW, axis=0)
        return sessions[1].run(None, {"first": vectors, "values": rows.values_BN})

    return {
        "in the graph": (
            lambda rows: sessions[0].run(None, {"first": rows.ids_BW, "values": rows.values_BN}),
            len(inside),
        ),
        "by numpy": (look_up, len(outside)),
    }


def times(
    runs: Mapping[str, Run], rows: Encoded, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each run, round by round; the first round warms up."""
    seconds_by_run: dict[str, list[float]] = {name: [] for name in runs}
    repeats = max(1, 256 // len(rows.ids_BW))
    for number in range(rounds + 1):
        for name, score in runs.items():
            start = clock()
            for _ in range(repeats):
                score(rows)
            if number:
                seconds_by_run[name].append((clock() - start) / repeats)
    return seconds_by_run


def ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # One thread works all the time that it has a core: its CPU time is what it would take on an idle one.
    clock = time.process_time if args.threads == 1 else time.perf_counter
    sizes = [TABLE_ROWS // FIELDS] * (FIELDS - 1)
    layout = Layout.of_sizes([*sizes, TABLE_ROWS - sum(sizes)])
    recap = packed("recap", {"lora_rank": 96}, layout, ROUTES)
    fcn = packed("fcn", {}, layout)
    models = {
        f"recap, {ROUTES} routes": (recap, recap.dial[0]),
        "recap, 1 route": (recap, Setting(1, recap.dial[0].depth)),
        "fcn": (fcn, Setting(1, None)),
    }
    runs: dict[str, Run] = {}
    graphs: dict[str, bytes] = {}
    for name, (model, setting) in models.items():
        graphs[name] = to_onnx(model, setting)
        backend = TorchBackend(model)
        runs[f"{name}, onnx"] = by_graph(model, graphs[name], args.threads)
        runs[f"{name}, int8"] = by_graph(model, quantise(graphs[name]), args.threads)
        runs[f"{name}, torch"] = lambda rows, backend=backend, setting=setting: backend.logits(  # type: ignore[misc]
            setting, rows.ids_BW, rows.values_BN
        )
    places = elsewhere(recap, args.threads)
    top = f"recap, {ROUTES} routes"
    result: dict[str, Any] = {
        "threads": args.threads,
        "rounds": args.rounds,
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "onnxruntime")},
        "graph_bytes": {name: len(graph) for name, graph in graphs.items()},
        "microseconds_per_row": {},
        "torch_over_onnx": {},
        "onnx_over_int8": {},
        "where": {"bytes": {name: size for name, (_, size) in places.items()}, "over_input": {}},
    }
    with torch.inference_mode():
        for size in SIZES:
            rows = random_rows(layout, size)
            taken = times(
                {**runs, **{name: score for name, (score, _) in places.items()}}, rows, args.rounds, clock
            )
            key = str(size)
            result["microseconds_per_row"][key] = {
                name: round(1e6 * statistics.median(seconds) / size, 1) for name, seconds in taken.items()
            }
            for name in models:
                torch_times, onnx_times, int8_times = [
                    taken[f"{name}, {kind}"] for kind in ("torch", "onnx", "int8")
                ]
                result["torch_over_onnx"].setdefault(name, {})[key] = ratio(torch_times, onnx_times)
                result["onnx_over_int8"].setdefault(name, {})[key] = ratio(onnx_times, int8_times)
            for name in places:
                over = ratio(taken[name], taken[f"{top}, onnx"])
                result["where"]["over_input"].setdefault(name, {})[key] = over
        single, deployed = in_chunks(runs["fcn, onnx"]), in_chunks(runs[f"{top}, onnx"])
        ensemble: Run = lambda rows: [single(rows) for _ in range(MEMBERS)]  # noqa: E731
        taken = times(
            {"five": ensemble, "one": single, "ours": deployed},
            random_rows(layout, SIZES[-1]),
            args.rounds,
            clock,
        )
    result["recap_rows_per_second_over_five_fcns"] = ratio(taken["five"], taken["ours"])
    result["recap_cost_over_one_fcn"] = ratio(taken["ours"], taken["one"])
    result["rows_per_second"] = {
        name: round(SIZES[-1] / statistics.median(seconds)) for name, seconds in taken.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
