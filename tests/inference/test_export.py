"""An exported artifact scores as torch does, in any batch and without torch, and is refused if anything is wrong."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

from recap_ctr.config import TrainConfig
from recap_ctr.data.encode import Encoded, random_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.inference import engine as engine_module
from recap_ctr.inference import export as export_module
from recap_ctr.inference.artifact import add_graphs, read_artifact
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.export import (
    GraphReport,
    Rounding,
    export,
    measure_graph,
    stored_graph,
    to_onnx,
)
from recap_ctr.inference.manifest import CARD, MANIFEST, WEIGHTS
from recap_ctr.inference.onnx_backend import OUTPUTS, OnnxBackend, open_session, run
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import TorchBackend, load_artifact, load_model
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.run import run as run_training
from tests.conftest import Recap, contents
from tests.support.forged_artifact import forge, refused_with_a_flipped_bit, swap_directories
from tests.support.running_server import serve_in_thread

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_registry")]

BACKBONE = {"dim": 8, "depth": 2, "train_depths": [1, 2], "num_adapters": 6, "lora_rank": 4}
FULL, HOME, SHALLOW = Setting(2, 2), Setting(1, 2), Setting(1, 1)
WIDE_SHALLOW = Setting(2, 1)
HIDDEN = ("torch", "scipy", "sklearn", "matplotlib", "onnx", "onnxscript")


@pytest.fixture(scope="module")
def trained(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a run on two routes, without graphs."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("trained") / "run"
    train = TrainConfig(batch_size=256, learning_rate=3e-2, l2=1e-4, max_epochs=2)
    config = RunConfig(
        "recap",
        parse_model("recap", BACKBONE),
        train,
        train_baseline=False,
        report_fields=False,
        routes=2,
    )
    run_training(config, prepared, out, quiet=True)
    return out / ARTIFACT


@pytest.fixture(scope="module")
def exported(trained: Path, prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same artifact with graphs. Copy it before changing anything."""
    out = Path(shutil.copytree(trained, tmp_path_factory.mktemp("exported") / "artifact"))
    export(out, data=prepared, quiet=True)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.fixture(scope="module")
def engines(exported: Path) -> dict[str, Engine]:
    return {name: Engine.load(exported, backend=name, threads=1) for name in ("onnx", "torch")}


@pytest.fixture(scope="module")
def odd_rows(click_log: pl.DataFrame) -> pl.DataFrame:
    """Return 10,000 raw rows with unseen, missing and multi values."""
    rng = np.random.default_rng(7)
    rows = click_log.sample(10_000, with_replacement=True, seed=1)

    def some(share: float) -> pl.Series:
        return pl.Series(rng.random(rows.height) < share)

    return rows.with_columns(
        pl.when(some(0.1)).then(pl.lit("nobody knows")).otherwise("site").alias("site"),
        pl.when(some(0.1)).then(None).otherwise("ad").alias("ad"),
        pl.when(some(0.1)).then(7).otherwise("user").alias("user"),
        pl.when(some(0.2)).then(pl.col("price") + 0.123).otherwise("price").alias("price"),
        pl.when(some(0.2)).then(pl.lit("t1 new t2 t3 t4 t5")).otherwise("tags").alias("tags"),
    )


def take(encoded: Encoded, at: list[int]) -> Encoded:
    return Encoded(encoded.ids_BW[at], encoded.values_BN[at], encoded.num_missing, encoded.num_unseen)


def node_types(graph: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(graph).graph.node]


class TestContents:
    def test_graphs_are_added_and_nothing_else_changes(self, trained: Path, exported: Path) -> None:
        before, after = contents(trained), contents(exported)
        names = {setting.file for setting in (FULL, HOME, SHALLOW)}
        assert after.keys() - before.keys() == names
        for name in before.keys() - {MANIFEST, CARD}:
            assert before[name][0] == after[name][0], name
        manifest = read_artifact(exported).manifest
        assert names <= manifest["files"].keys()
        assert [Setting.from_dict(entry) for entry in manifest["graphs"]] == [FULL, HOME, SHALLOW]
        assert {entry["precision"] for entry in manifest["graphs"]} == {"float32"}
        assert all(0 <= entry["parity"] <= 1e-5 for entry in manifest["graphs"])

    def test_nothing_names_the_machine_or_its_code(self, exported: Path) -> None:
        for path in exported.rglob("*.onnx"):
            for private in (b"recap_ctr", str(Path.home()).encode(), b".py", b"site-packages"):
                assert private not in path.read_bytes()

    def test_a_graph_holds_no_table_and_one_route_no_adapter(self, exported: Path) -> None:
        artifact = read_artifact(exported)
        table = load_file(exported / WEIGHTS)["embedding.table.weight"]
        for setting in artifact.graphs:
            model = onnx.load_from_string(artifact.read_graph(setting))
            assert [value.name for value in model.graph.input] == ["ids", "values", "embedding.table.weight"]
            assert [value.name for value in model.graph.output] == list(OUTPUTS)
            shapes = [tuple(constant.dims) for constant in model.graph.initializer]
            assert table.shape not in shapes
            # D = 40: products are of 20 × 40, heads of 40 × 1; only routes that branch have products of rank 4.
            assert any(4 in shape for shape in shapes) == (setting.routes > 1)
            if setting.routes == 1:
                products = node_types(artifact.read_graph(setting)).count("MatMul")
                assert products == 2 * (setting.depth or 0) + 2

    def test_the_same_model_gives_the_same_bytes(self, exported: Path) -> None:
        assert to_onnx(load_artifact(exported), SHALLOW) == read_artifact(exported).read_graph(SHALLOW)

    def test_the_dial_is_in_manifest_and_card(
        self, trained: Path, exported: Path, prepared: PreparedData, engines: dict[str, Engine]
    ) -> None:
        """It is written with the model; the graphs, measured later, give the same figures up to rounding."""
        packed, measured = (read_artifact(path).manifest["dial"] for path in (trained, exported))
        batch = prepared.valid.batch(slice(None))
        encoded = Encoded(batch.ids_BW, batch.values_BN, *np.zeros((2, 0), np.int64))
        for before, after, setting in zip(packed, measured, (FULL, HOME, WIDE_SHALLOW, SHALLOW), strict=True):
            assert Setting.from_dict(before) == Setting.from_dict(after) == setting
            logits = engines["torch"].score(encoded, setting).logit_B
            assert before["rows"] == after["rows"] == len(prepared.valid)
            for figure in ("auc", "logloss"):
                assert before[figure] == pytest.approx(after[figure], abs=1e-5)
                expected = getattr(metrics, figure)(prepared.valid.labels, logits)
                assert before[figure] == pytest.approx(expected, abs=1e-5)
        valid = read_artifact(trained).metrics.valid.calibrated
        assert packed[0]["auc"] == pytest.approx(valid.auc, abs=1e-9)
        assert f"| 1 route at depth 1 | {measured[3]['auc']:.5f} |" in (exported / CARD).read_text()
        assert "2 routes at depth 1" not in (exported / CARD).read_text(), "it is not on the dial"

    def test_the_command_adds_a_graph_through_a_link(
        self, copy: Path, odd_rows: pl.DataFrame, prepared: PreparedData, recap: Recap, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(copy)
        before = contents(copy)
        done = recap("export", tmp_path / "link", "--depth", 1, "--data", prepared.path, "--threads", 1)
        assert done.code == 0, done.err
        assert "2 routes at depth 1  float32" in done.out
        assert f"Next: recap dial {tmp_path / 'link'}" in done.err
        assert (tmp_path / "link").is_symlink()
        assert {path.name for path in tmp_path.iterdir()} == {"copy", "link"}
        after = contents(copy)
        assert all(after[setting.file][0] == before[setting.file][0] for setting in (FULL, HOME, SHALLOW))
        by_graph, by_torch = Engine.load(copy, threads=1), Engine.load(copy, backend="torch", threads=1)
        assert by_graph.settings == (FULL, HOME, Setting(2, 1), SHALLOW)
        assert [entry["depth"] for entry in by_graph.manifest["dial"]] == [2, 2, 1, 1]
        rows = by_graph.encode(odd_rows.head(50))
        np.testing.assert_allclose(
            by_graph.score(rows, Setting(2, 1)).logit_B,
            by_torch.score(rows, Setting(2, 1)).logit_B,
            atol=1e-5,
        )


class TestEquality:
    def test_with_torch_on_10_000_raw_rows(self, engines: dict[str, Engine], odd_rows: pl.DataFrame) -> None:
        rows = engines["onnx"].encode(odd_rows)
        assert (rows.num_missing[[1, 3, 4]] > 0).all() and (rows.num_unseen[[0, 2, 4]] > 0).all()
        for setting in (FULL, HOME, SHALLOW):
            by_graph, by_torch = (engines[name].score(rows, setting) for name in ("onnx", "torch"))
            np.testing.assert_allclose(by_graph.probability_B, by_torch.probability_B, atol=1e-5)
            np.testing.assert_allclose(by_graph.raw_logit_B, by_torch.raw_logit_B, atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(by_graph.disagreement_B, by_torch.disagreement_B, atol=1e-5)
            assert (by_graph.disagreement_B > 0).any() == (setting.routes > 1)
            calibration = engines["onnx"].artifact.calibration_of(setting)
            calibrated = calibration.apply(by_graph.raw_logit_B)
            np.testing.assert_array_equal(by_graph.logit_B, calibrated)

    def test_the_third_output_is_the_calibrated_logit(
        self, exported: Path, engines: dict[str, Engine], odd_rows: pl.DataFrame
    ) -> None:
        session = open_session(read_artifact(exported).read_graph(FULL), threads=1)
        rows = engines["onnx"].encode(odd_rows)
        tables = {"embedding.table.weight": load_file(exported / WEIGHTS)["embedding.table.weight"]}
        (calibrated,) = run(session, rows.ids_BW, rows.values_BN, tables, OUTPUTS[2:])
        np.testing.assert_allclose(calibrated, engines["torch"].score(rows).logit_B, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("backend", ["onnx", "torch"])
    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(cuts=st.lists(st.integers(0, 300), max_size=8), order=st.randoms(use_true_random=False))
    def test_a_row_scores_the_same_in_any_batch(
        self, backend: str, cuts: list[int], order: Any, engines: dict[str, Engine], odd_rows: pl.DataFrame
    ) -> None:
        engine = engines[backend]
        rows = engine.encode(odd_rows.head(300))
        at = list(range(300))
        order.shuffle(at)
        ends = sorted({0, 300, *cuts})
        for setting in (FULL, SHALLOW):
            whole = engine.score(rows, setting)
            for start, end in pairwise(ends):
                part = engine.score(take(rows, at[start:end]), setting)
                np.testing.assert_allclose(part.probability_B, whole.probability_B[at[start:end]], atol=1e-6)
                np.testing.assert_allclose(
                    part.disagreement_B, whole.disagreement_B[at[start:end]], atol=1e-6, rtol=1e-5
                )

    @pytest.mark.parametrize("backend", ["onnx", "torch"])
    def test_many_threads_at_once(
        self, backend: str, engines: dict[str, Engine], odd_rows: pl.DataFrame
    ) -> None:
        engine = engines[backend]
        parts = [odd_rows.slice(97 * i, 97) for i in range(40)]
        jobs = [(part, (FULL, HOME, SHALLOW)[i % 3]) for i, part in enumerate(parts)]

        def work(job: tuple[pl.DataFrame, Setting]) -> list[float]:
            scores = engine.score(engine.encode(job[0]), job[1])
            return [*scores.probability_B.tolist(), *scores.disagreement_B.tolist()]

        alone = [work(job) for job in jobs]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, jobs)) == alone

    def test_no_rows(self, engines: dict[str, Engine], odd_rows: pl.DataFrame) -> None:
        for engine in engines.values():
            scores = engine.score(engine.encode(odd_rows.head(0)))
            assert len(scores.probability_B) == len(scores.disagreement_B) == 0


class TestCalibration:
    def test_every_way_to_score_gives_the_same_probabilities_at_every_setting(
        self, exported: Path, engines: dict[str, Engine], odd_rows: pl.DataFrame, recap: Recap, tmp_path: Path
    ) -> None:
        rows = odd_rows.head(60)
        rows.write_parquet(tmp_path / "rows.parquet")
        fields = [fitted.field.name for fitted in engines["onnx"].encoder.fields]
        encoded = engines["torch"].encode(rows)
        tables = {"embedding.table.weight": load_file(exported / WEIGHTS)["embedding.table.weight"]}
        probabilities = []
        with serve_in_thread(engines["onnx"]) as server:
            assert len(engines["onnx"].settings) == 3
            for setting in engines["onnx"].settings:
                expected = engines["torch"].score(encoded, setting)
                probabilities.append(expected.probability_B.mean())
                asked: dict[str, Any] = {"columns": rows.select(fields).to_dict(as_series=False)}
                answer = server.score({**asked, "routes": setting.routes, "depth": setting.depth}).json()
                options = ("--routes", setting.routes, "--depth", setting.depth, "--threads", 1)
                done = recap(
                    "predict",
                    exported,
                    tmp_path / "rows.parquet",
                    "--out",
                    tmp_path / "x.csv",
                    "--force",
                    *options,
                )
                assert done.code == 0, done.err
                session = open_session(read_artifact(exported).read_graph(setting), threads=1)
                (third,) = run(session, encoded.ids_BW, encoded.values_BN, tables, OUTPUTS[2:])
                for scored in (
                    engines["onnx"].score(encoded, setting).probability_B,
                    answer["columns"]["probability"],
                    pl.read_csv(tmp_path / "x.csv")["score"],
                    metrics.sigmoid(third),
                ):
                    np.testing.assert_allclose(scored, expected.probability_B, atol=1e-5)
                done = recap("evaluate", exported, tmp_path / "rows.parquet", "--json", *options)
                figures = json.loads(done.out)["calibrated"]
                assert figures["mean_prediction"] == pytest.approx(probabilities[-1], abs=1e-5)
                loss = metrics.logloss(rows["click"].to_numpy(), expected.logit_B)
                assert figures["logloss"] == pytest.approx(loss, abs=1e-5)

    def test_the_mean_prediction_is_the_click_rate_at_every_setting(
        self, engines: dict[str, Engine], prepared: PreparedData
    ) -> None:
        """Under the full setting's calibration, less depth predicts far more clicks than there are."""
        batch = prepared.valid.batch(slice(None))
        encoded = Encoded(batch.ids_BW, batch.values_BN, *np.zeros((2, 0), np.int64))
        rate = prepared.valid.labels.mean()
        for setting in (FULL, HOME, WIDE_SHALLOW, SHALLOW):
            scores = engines["torch"].score(encoded, setting)
            assert scores.probability_B.mean() == pytest.approx(rate, rel=1e-4)
        shared = metrics.sigmoid(engines["torch"].artifact.calibration.apply(scores.raw_logit_B))
        assert shared.mean() > 1.2 * rate

    def test_an_older_artifact_has_one_calibration_until_its_settings_are_measured(
        self, copy: Path, exported: Path, prepared: PreparedData
    ) -> None:
        forge(copy, lambda manifest: [entry.pop("calibration") for entry in manifest["dial"]])
        old, new = read_artifact(copy), read_artifact(exported)
        assert old.calibration_of(SHALLOW) == old.calibration_of(FULL) == new.calibration
        export(copy, routes=1, depth=2, data=prepared, quiet=True)
        again = read_artifact(copy)
        assert again.calibrations.keys() == new.calibrations.keys()
        for setting in new.graphs:
            calibrations = [artifact.calibration_of(setting) for artifact in (again, new)]
            assert [
                value for key, value in calibrations[0].to_dict().items() if key != "kind"
            ] == pytest.approx(
                [value for key, value in calibrations[1].to_dict().items() if key != "kind"], rel=1e-4
            )
            rows = random_rows(new.encoder.layout, 20)
            tables = {"embedding.table.weight": load_file(copy / WEIGHTS)["embedding.table.weight"]}
            session = open_session(again.read_graph(setting), threads=1)
            logits, calibrated = run(session, rows.ids_BW, rows.values_BN, tables, (OUTPUTS[0], OUTPUTS[2]))
            np.testing.assert_allclose(calibrated, calibrations[0].apply(logits), atol=1e-5)


def spoil(manifest: dict[str, Any], setting: Setting, loss: float) -> None:
    """Make a setting look as if it had a logloss of `loss` times that of the full one."""
    entries = {Setting.from_dict(entry): entry for entry in manifest["dial"]}
    entries[setting]["logloss"] = loss * entries[FULL]["logloss"]


class TestPoorSettings:
    def test_one_is_not_offered_by_any_command_or_server(
        self, copy: Path, odd_rows: pl.DataFrame, recap: Recap, tmp_path: Path
    ) -> None:
        forge(copy, lambda manifest: spoil(manifest, SHALLOW, 1.021))
        odd_rows.head(20).write_parquet(tmp_path / "rows.parquet")
        named = "1 route at depth 1 is not offered: its logloss on validation rows is"
        for backend in ("onnx", "torch"):
            engine = Engine.load(copy, backend=backend, threads=1)
            assert engine.settings == (FULL, HOME)
        with serve_in_thread(Engine.load(copy, threads=1)) as server:
            assert [setting["depth"] for setting in server.ask("GET", "/model").json()["settings"]] == [2, 2]
            answer = server.score({"rows": [{}], "routes": 1, "depth": 1})
            assert answer.status == 400 and named in answer.json()["error"]
            assert "routes 1, depth 2" in answer.json()["fix"]
        for command in ("predict", "evaluate"):
            done = recap(command, copy, tmp_path / "rows.parquet", "--routes", 1, "--depth", 1)
            assert done.code == 2 and named in done.err and "more than 2 % above" in done.err
            assert "choose one of: 2 routes at depth 2; 1 route at depth 2" in done.err
        done = recap("dial", copy, "--seconds", 0, "--threads", 1)
        assert named in done.out and "1 route at depth 1  0." not in done.out
        done = recap("export", copy, "--routes", 1, "--depth", 1)
        assert done.code == 2 and named in done.err

    def test_one_that_proves_good_when_it_is_measured_again_is_offered(
        self, copy: Path, exported: Path, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forge(copy, lambda manifest: spoil(manifest, SHALLOW, 1.5))
        graphs = read_artifact(exported)  # The same model gives the same bytes, as is shown above.
        monkeypatch.setattr(export_module, "to_onnx", lambda _, setting: graphs.read_graph(setting))
        export(copy, routes=1, depth=1, data=prepared, quiet=True)
        assert Engine.load(copy, threads=1).settings == (FULL, HOME, SHALLOW)

    def test_the_full_setting_is_always_offered(self, copy: Path) -> None:
        def spoil_all(manifest: dict[str, Any]) -> None:
            for entry in manifest["dial"]:
                entry["logloss"] = 9.0

        forge(copy, spoil_all)
        assert Engine.load(copy, threads=1).settings == (FULL,), "all are worse than the base rate"
        forge(copy)
        assert "Not offered" not in (copy / CARD).read_text()
        add_graphs(read_artifact(copy), [])
        assert "lose too much: 1 route at depth 2, 1 route at depth 1." in (copy / CARD).read_text()


def without(hidden: tuple[str, ...], script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in its own process, in which the `hidden` packages can't be imported."""
    hide = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
    source = Path(engine_module.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", hide + script],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )


COMMANDS = """
from recap_ctr.cli.main import main
for command in COMMANDS:
    sys.argv = ["recap", *command]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code)
"""


class TestBaseInstall:
    def test_predict_evaluate_inspect_and_dial_without_torch(
        self, exported: Path, odd_rows: pl.DataFrame, engines: dict[str, Engine], tmp_path: Path
    ) -> None:
        odd_rows.write_csv(tmp_path / "rows.csv")
        artifact = str(exported)
        commands = [
            ["predict", artifact, "rows.csv", "--out", "all.parquet"],
            ["predict", artifact, "rows.csv", "--routes", "1", "--depth", "1", "--out", "fast.parquet"],
            ["evaluate", artifact, "rows.csv", "--json"],
            ["inspect", artifact],
            ["dial", artifact, "--seconds", "0", "--out", "dial"],
            ["predict", artifact, "rows.csv", "--depth", "1", "--out", "none.parquet"],
        ]
        done = without(HIDDEN, f"COMMANDS = {commands!r}\n{COMMANDS}", tmp_path)
        assert done.stdout.count("exit code 0") == 5, done.stderr
        assert "exit code 2" in done.stdout
        assert "no graph for 2 routes at depth 1; it holds: 2 routes at depth 2, 1 route" in done.stderr
        assert "recap export ARTIFACT --routes 2 --depth 1" in done.stderr
        for name, setting in (("all", FULL), ("fast", SHALLOW)):
            expected = engines["torch"].score(engines["torch"].encode(odd_rows), setting)
            scored = pl.read_parquet(tmp_path / f"{name}.parquet")
            np.testing.assert_allclose(scored["score"], expected.probability_B, atol=1e-5)
            np.testing.assert_allclose(scored["logit"], expected.logit_B, atol=1e-5, rtol=1e-5)
        figures = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        expected_auc = metrics.auc(
            odd_rows["click"].to_numpy(), pl.read_parquet(tmp_path / "all.parquet")["logit"]
        )
        assert figures["calibrated"]["auc"] == pytest.approx(expected_auc, abs=1e-9)
        assert (tmp_path / "dial" / "report.html").is_file()

    def test_errors_name_what_is_missing(self, trained: Path, exported: Path, tmp_path: Path) -> None:
        script = """
from pathlib import Path
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Engine
for path, backend, hidden in (CASES):
    sys.modules.update(dict.fromkeys(hidden))
    try:
        Engine.load(Path(path), backend=backend)
    except InputError as error:
        print(error)
"""
        runtime = ("onnxruntime",)
        cases = [
            *((str(trained), "auto", ()), (str(exported), "torch", ())),
            *((str(exported), "auto", runtime), (str(trained), "onnx", runtime)),
        ]
        done = without(HIDDEN, script.replace("CASES", repr(cases)), tmp_path)
        assert (
            "holds no exported graphs, and without them PyTorch is needed\n  fix: run `recap export`"
            in done.stdout
        )
        assert "this needs PyTorch\n  fix: pip install 'recap-ctr[train]'" in done.stdout
        assert "graphs need ONNX Runtime\n  fix: pip install onnxruntime" in done.stdout
        assert "holds no exported graphs\n  fix: recap export" in done.stdout

    def test_auto_prefers_graphs(
        self, trained: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert isinstance(Engine.load(trained, threads=1).backend, TorchBackend)
        assert isinstance(Engine.load(exported, threads=1).backend, OnnxBackend)
        monkeypatch.setattr(engine_module, "is_installed", lambda package: package != "onnxruntime")
        assert isinstance(Engine.load(exported, threads=1).backend, TorchBackend)

    def test_a_setting_without_a_graph_is_scored_by_torch(
        self, exported: Path, odd_rows: pl.DataFrame, engines: dict[str, Engine]
    ) -> None:
        scorer = Scorer.load(exported, depth=1, threads=1)
        expected = engines["torch"].score(engines["torch"].encode(odd_rows), Setting(2, 1))
        np.testing.assert_allclose(scorer.score_frame(odd_rows), expected.probability_B, atol=1e-6)

    def test_code_of_a_model_from_outside_is_not_needed(self, copy: Path, odd_rows: pl.DataFrame) -> None:
        """It is not imported either: the graph has everything to compute."""
        forge(copy, lambda manifest: manifest["model"].update(name="antigravity:Net"))
        engine = Engine.load(copy, threads=1)
        assert np.isfinite(engine.score(engine.encode(odd_rows.head(5))).logit_B).all()
        with pytest.raises(InputError, match="is code from outside this package"):
            Engine.load(copy, backend="torch")
        assert "antigravity" not in sys.modules


def refused(path: Path, message: str = ".") -> None:
    with pytest.raises(InputError, match=message):
        Engine.load(path, backend="onnx", threads=1)


def swap(path: Path, setting: Setting, graph: bytes) -> None:
    (path / setting.file).write_bytes(graph)
    forge(path)


class TestDamage:
    def test_flipped_bits_of_graphs(self, copy: Path) -> None:
        rng = np.random.default_rng(0)
        for setting in (FULL, SHALLOW):
            whole = (copy / setting.file).read_bytes()
            for at in rng.integers(0, len(whole), 25):
                refused_with_a_flipped_bit(copy, setting.file, whole, int(at), int(rng.integers(8)))
        Engine.load(copy, threads=1)

    @pytest.mark.parametrize("harm", ["missing", "link", "linked folder", "pipe", "cut"])
    def test_files_that_are_not_what_they_should_be(self, copy: Path, exported: Path, harm: str) -> None:
        file = copy / FULL.file
        if harm == "linked folder":
            shutil.rmtree(file.parent)
            file.parent.symlink_to(exported / "graphs")
        elif harm == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        else:
            file.unlink()
        if harm == "link":
            file.symlink_to(exported / FULL.file)
        elif harm == "pipe":
            os.mkfifo(file)
        refused(copy, "damaged" if harm == "cut" else "is missing")

    def test_a_file_that_changes_after_it_was_verified(self, copy: Path) -> None:
        artifact = read_artifact(copy)
        (copy / FULL.file).write_bytes((copy / HOME.file).read_bytes())
        with pytest.raises(InputError, match="is damaged"):
            artifact.read_graph(FULL)

    def test_an_artifact_that_is_replaced_while_it_is_read(self, copy: Path) -> None:
        """The weights of one must not be combined with the calibration of the other, though both are whole."""
        other = Path(shutil.copytree(copy, copy.with_name("other")))
        forge(other, lambda manifest: manifest.update(shift=manifest["shift"] + 1.0))
        artifact = read_artifact(copy)
        swap_directories(other, copy)
        for load in (lambda: OnnxBackend(artifact, 1), lambda: load_model(artifact)):
            with pytest.raises(InputError, match=r"copy was replaced while it was read\n  fix: run"):
                load()
        assert Engine.load(copy, threads=1).manifest["shift"] == artifact.shift + 1.0


class TestMalice:
    """Attacks by someone who can compute checksums."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda manifest: manifest["graphs"].append(manifest["graphs"][0]),
            lambda manifest: manifest["graphs"][0].update(routes=3),
            lambda manifest: manifest["graphs"][0].update(depth=3),
            lambda manifest: manifest["graphs"][0].update(depth=None),
            lambda manifest: manifest["graphs"][0].update(routes=-1),
            lambda manifest: manifest["graphs"][0].update(routes="../x"),
            lambda manifest: manifest["graphs"][0].update(file="/etc/passwd"),
            lambda manifest: manifest["graphs"].pop(),
            lambda manifest: manifest["files"].pop(FULL.file),
            lambda manifest: manifest["files"].update({"graphs/x.onnx": manifest["files"][FULL.file]}),
            lambda manifest: manifest["dial"][0].update(routes=9),
            lambda manifest: manifest["model"]["config"].update(train_depths="12"),
            lambda manifest: manifest["model"]["config"].pop("train_depths"),
        ],
    )
    def test_manifest(self, copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
        forge(copy, change)
        refused(copy)

    @pytest.mark.parametrize("graph", [b"", b"\x80\x04\x95.", b"\xff" * 64, b"\x08\x0a" * 100])
    def test_bytes_that_are_not_a_graph(
        self, copy: Path, graph: bytes, capfd: pytest.CaptureFixture[str]
    ) -> None:
        swap(copy, FULL, graph)
        refused(copy, "can't be loaded|don't fit together")
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize("place", ["secret.bin", "/etc/passwd", "../secret.bin", "*/_ORT_MEM_ADDR_/*"])
    def test_a_graph_that_refers_to_other_files(self, copy: Path, place: str) -> None:
        (copy / "secret.bin").write_bytes(b"\0" * 6400)
        model = onnx.load_from_string((copy / FULL.file).read_bytes())
        tensor = model.graph.initializer[0]
        for key, value in (("location", place), ("offset", "0"), ("length", str(len(tensor.raw_data)))):
            tensor.external_data.add(key=key, value=value)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        swap(copy, FULL, model.SerializeToString())
        refused(copy, "refers to data outside of itself")

    def test_graphs_of_another_model(self, copy: Path) -> None:
        """Other inputs, tables and outputs are refused at loading, not when the first row is scored."""
        x, y = (
            helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["b", 1]) for n in ("values", "logit")
        )
        ids = helper.make_tensor_value_info("ids", onnx.TensorProto.INT32, ["b", 3])
        table = helper.make_tensor_value_info("nothing.weight", onnx.TensorProto.FLOAT, [2, 2])
        sd = helper.make_tensor_value_info("disagreement", onnx.TensorProto.FLOAT, ["b", 1])
        copies = [helper.make_node("Identity", ["values"], [name]) for name in ("logit", "disagreement")]
        for inputs in ([x], [ids, x], [x, table]):
            made = helper.make_graph(copies, "g", inputs, [y, sd])
            opset = [helper.make_opsetid("", 20)]
            swap(copy, FULL, helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString())
            refused(copy, "don't fit together|holds no 'nothing.weight'")

    def test_tables_that_are_not_finite_or_too_small(self, copy: Path) -> None:
        tensors = load_file(copy / WEIGHTS)
        for change in ("nan", "small"):
            table = tensors["embedding.table.weight"].copy()
            if change == "nan":
                table[-1, -1] = np.nan
            save_file(
                {**tensors, "embedding.table.weight": table if change == "nan" else table[:-1]},
                copy / WEIGHTS,
            )
            forge(copy)
            refused(copy, "NaN or infinity" if change == "nan" else "don't fit together")

    def test_weights_of_a_graph_that_are_not_finite(self, copy: Path, odd_rows: pl.DataFrame) -> None:
        """A score is never NaN."""
        model = onnx.load_from_string((copy / FULL.file).read_bytes())
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                array = np.full(tuple(tensor.dims), np.nan, np.float32)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        swap(copy, FULL, model.SerializeToString())
        engine = Engine.load(copy, threads=1)
        with pytest.raises(InputError, match="row 1: the model's logit is nan"):
            engine.score(engine.encode(odd_rows.head(2)))


class TestRefusal:
    def test_a_graph_that_differs_from_torch_is_not_stored(
        self, trained: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = Path(shutil.copytree(trained, tmp_path / "copy"))
        before = contents(copy)

        def biased(_: object, setting: Setting) -> bytes:
            """Return the graph with 5e-5 added to its logit."""
            model = onnx.load_from_string(read_artifact(exported).read_graph(setting))
            node = next(node for node in model.graph.node if "logit" in node.output)
            node.output[0] = "right"
            model.graph.node.append(helper.make_node("Add", ["right", "bias"], ["logit"]))
            model.graph.initializer.append(numpy_helper.from_array(np.array(5e-5, np.float32), "bias"))
            return bytes(model.SerializeToString())

        monkeypatch.setattr(export_module, "to_onnx", biased)
        with pytest.raises(InputError, match=r"2 routes at depth 2 differs from torch by .*e-05 in a logit"):
            export(copy, quiet=True)
        assert contents(copy) == before

    def test_a_full_disk_leaves_the_artifact_as_it_was(
        self, exported: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        artifact = read_artifact(copy)
        graphs = [stored_graph(load_artifact(copy), setting) for setting in (FULL, HOME)]
        before, real, calls_left = contents(copy.parent), os.fsync, 0

        def failing(fd: int) -> None:
            nonlocal calls_left
            calls_left -= 1
            if calls_left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd)

        monkeypatch.setattr(os, "fsync", failing)
        for failing_at in range(1, 100):
            calls_left = failing_at
            try:
                add_graphs(artifact, graphs)
            except OSError:
                assert contents(copy.parent) == before or read_artifact(copy).graphs == (FULL, HOME)
                assert [path.name for path in copy.parent.iterdir()] == ["copy"]
                continue
            break
        assert failing_at > 5
        assert Engine.load(copy, threads=1).settings == (FULL, HOME)

    def test_wrong_options(self, trained: Path, prepared: PreparedData, recap: Recap) -> None:
        done = recap("export", trained, "--int8")
        assert done.code == 2 and "--int8 needs --data" in done.err
        done = recap("export", trained, "--format", "pmml")
        assert done.code == 2 and "onnx" in done.err
        for arguments, words in (
            (("--routes", 3), "3 routes are wanted, but the artifact has 2"),
            (("--depth", 3), "depth 3 was not trained"),
        ):
            done = recap("export", trained, *arguments)
            assert done.code == 2 and words in done.err

    def test_data_it_was_not_trained_on(self, copy: Path, prepared: PreparedData) -> None:
        forge(copy, lambda manifest: manifest["data"].update(fingerprint="0" * 32))
        with pytest.raises(InputError, match="was trained on other data than"):
            export(copy, data=prepared)


@pytest.fixture(scope="module")
def report(exported: Path, prepared: PreparedData) -> GraphReport:
    """Return the report on a graph in int8 that is as fast and as good as it must be to be stored."""
    packed = load_artifact(exported)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "relative_speed", lambda *_: 1.3)
        patch.setattr(export_module, "LARGEST_LOSS", 1e-2)
        return measure_graph(packed, stored_graph(packed, FULL), int8=True, data=prepared)


@pytest.fixture
def rounded(report: GraphReport, copy: Path) -> Engine:
    add_graphs(read_artifact(copy), [report.exported])
    return Engine.load(copy, threads=1)


class TestInt8:
    def test_what_is_stored(
        self, report: GraphReport, rounded: Engine, engines: dict[str, Engine], odd_rows: pl.DataFrame
    ) -> None:
        assert rounded.manifest["graphs"][0]["precision"] == "int8"
        # These are the steps of both towers, two of them branching; heads and thin products are too small.
        assert node_types(report.exported.graph).count("MatMulInteger") == 4
        rows = rounded.encode(odd_rows)
        gap = np.abs(rounded.score(rows).raw_logit_B - engines["onnx"].score(rows).raw_logit_B)
        assert 0 < gap.mean() < 0.02
        assert report.exported.parity > 1e-5

    def test_the_change_is_measured_on_validation_rows(
        self, report: GraphReport, rounded: Engine, engines: dict[str, Engine], prepared: PreparedData
    ) -> None:
        batch = prepared.valid.batch(slice(None))
        encoded = Encoded(batch.ids_BW, batch.values_BN, *np.zeros((2, 0), np.int64))
        assert report.rounding is not None
        for figure in ("auc", "logloss"):
            in_8_bits, in_32_bits = (
                getattr(metrics, figure)(prepared.valid.labels, engine.score(encoded).logit_B)
                for engine in (rounded, engines["onnx"])
            )
            assert getattr(report.rounding, figure) == pytest.approx(in_8_bits - in_32_bits, abs=1e-6)

    def test_a_row_scores_the_same_in_any_batch(self, rounded: Engine, odd_rows: pl.DataFrame) -> None:
        """Each row has its own scale, even next to a row a thousand times as large."""
        rows = rounded.encode(odd_rows.head(200))
        rows.values_BN[10] *= 1e3
        whole = rounded.score(rows).probability_B
        for at in ([0], [7, 3], [10, 11], list(range(50, 117))):
            np.testing.assert_allclose(rounded.score(take(rows, at)).probability_B, whole[at], atol=1e-6)

    def test_rows_of_zeros(self, report: GraphReport, exported: Path) -> None:
        """Their scale would be 0, by which nothing can be divided."""
        session = open_session(report.exported.graph, threads=1)
        table = np.zeros_like(load_file(exported / WEIGHTS)["embedding.table.weight"])
        layout = read_artifact(exported).encoder.layout
        rows = np.zeros((3, layout.num_columns), np.int32), np.ones((3, layout.num_values), np.float32)
        plain = open_session(read_artifact(exported).read_graph(FULL), threads=1)
        in_8_bits, in_32_bits = (
            run(opened, *rows, {"embedding.table.weight": table})[0] for opened in (session, plain)
        )
        np.testing.assert_allclose(in_8_bits, in_32_bits, atol=1e-6)

    @pytest.mark.parametrize(
        ("loss", "speed", "reason"),
        [(2e-4, 1.3, "more than 0.0001 of logloss"), (5e-5, 0.9, "it is not faster")],
    )
    def test_not_stored_where_it_costs_too_much_or_is_not_faster(
        self, loss: float, speed: float, reason: str
    ) -> None:
        rounding = Rounding(auc=0.0, logloss=loss, speed=speed)
        assert not rounding.pays and str(rounding).endswith(reason)
        assert Rounding(0.0, 1e-4, 1.3).pays and str(Rounding(0.0, -1e-5, 1.3)).endswith(": stored")

    def test_the_graph_in_32_bits_stays_where_rounding_does_not_pay(
        self, exported: Path, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packed = load_artifact(exported)
        plain = stored_graph(packed, FULL)
        monkeypatch.setattr(export_module, "LARGEST_LOSS", -1.0)
        report = measure_graph(packed, plain, int8=True, data=prepared)
        assert report.exported is plain and report.rounding is not None and not report.rounding.pays
