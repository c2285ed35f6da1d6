"""Stand-ins for MLflow, TensorBoard and W&B, with as much of each as we call: the packages are not in `dev`."""

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install(patch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """Let `import name` return a module with that content."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)
    return module


class FakeMlflow:
    """MLflow's store in memory: what was logged to each run, by the name of the run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.models: list[Path] = []
        self.active: list[str] = []
        self.store = Path()
        names = ("start_run", "active_run", "end_run", "log_metrics", "log_artifact", "get_tracking_uri")
        pyfunc = install(patch, "mlflow.pyfunc", save_model=self.save_model, log_model=self.log_model)
        content = {name: getattr(self, name) for name in names}
        install(patch, "mlflow", MlflowClient=lambda: self, pyfunc=pyfunc, **content)
        entities = {"Metric": lambda *values: values, "Param": lambda *values: values}
        install(patch, "mlflow.entities", **entities)
        described = {"ModelSignature": SimpleNamespace}
        install(patch, "mlflow.models", **described)
        double = SimpleNamespace(double="double")
        install(
            patch, "mlflow.types", ColSpec=lambda *values, **more: values[1], DataType=double, Schema=list
        )
        install(patch, "mlflow.types.schema", AnyType=object)

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = {
            "name": run_name,
            "experiment": experiment,
            "parent": tags.get("mlflow.parentRunId"),
            "status": "RUNNING",
            "metrics": [],
            "params": {},
            "files": [],
        }
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, experiment_id=experiment))

    def start_run(self, run_id: str | None, run_name: str, nested: bool) -> Any:
        assert nested == bool(self.active)
        run_id = run_id or self.create_run("experiment", run_name, {}).info.run_id
        self.runs[run_id]["status"] = "RUNNING"
        self.active.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, experiment_id="experiment"))

    def active_run(self) -> str | None:
        return self.active[-1] if self.active else None

    def end_run(self, status: str) -> None:
        self.runs[self.active.pop()]["status"] = status

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.runs[self.active[-1]]["metrics"] += [(name, value, 0, 0) for name, value in metrics.items()]

    def log_artifact(self, path: str) -> None:
        self.runs[self.active[-1]]["files"].append(Path(path).name)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[run_id]["metrics"] += metrics
        for name, value in params:  # Those of a run can't be changed.
            assert self.runs[run_id]["params"].setdefault(name, value) == value

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"

    def get_tracking_uri(self) -> str:
        return "https://me:secret@tracker.example/api"

    def save_model(self, path: str, *, loader_module: str, data_path: str, **description: Any) -> None:
        shutil.copytree(data_path, Path(path) / "data" / Path(data_path).name)
        text = json.dumps({"loader_module": loader_module, **description}, default=vars)
        Path(path, "MLmodel").write_text(text)

    def log_model(self, name: str, **description: Any) -> Any:
        self.models.append(Path(description["data_path"]))
        return SimpleNamespace(model_uri=f"models:/{name}")

    def curve(self, run_name: str, metric: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric of the run of that name."""
        (run,) = (run for run in self.runs.values() if run["name"] == run_name)
        return [(step, value) for name, value, _, step in run["metrics"] if name == metric]


class FakeWriter:
    """TensorBoard's writer, whose event files are lines of JSON."""

    def __init__(self, directory: str) -> None:
        self.file = Path(directory) / "events.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "FakeWriter":
        return self

    def __exit__(self, *_: object) -> None: ...

    def _add(self, *values: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def add_scalar(self, name: str, value: float, step: int = 0) -> None:
        self._add(name, step, value)

    def add_text(self, name: str, text: str) -> None:
        self._add(name, 0, text)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def events(directory: Path, name: str) -> list[tuple[int, Any]]:
    """Return the steps and values under a name in the event file of a directory."""
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [(step, value) for tag, step, value in lines if tag == name]


def install_tensorboard(patch: pytest.MonkeyPatch) -> None:
    install(patch, "tensorboard")
    install(patch, "torch.utils.tensorboard", SummaryWriter=FakeWriter)


class FakeWandb:
    """W&B's runs in memory, in the order in which they were begun or resumed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs: list[FakeWandbRun] = []
        install(patch, "wandb", init=self.init, Settings=lambda **_: None, Artifact=FakeWandbArtifact)

    def init(self, **options: Any) -> "FakeWandbRun":
        self.runs.append(FakeWandbRun(options))
        return self.runs[-1]


class FakeWandbRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.id = options, options["id"] or "new"
        self.offline, self.dir = True, "wandb/offline-run/files"
        self.exit_code: int | None = None
        self.logged: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.artifacts: list[FakeWandbArtifact] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)

    def log_artifact(self, artifact: "FakeWandbArtifact") -> None:
        self.artifacts.append(artifact)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandbArtifact:
    def __init__(self, name: str, **_: Any) -> None:
        self.directory, self.files = "", list[str]()

    def add_dir(self, directory: str) -> None:
        self.directory = directory

    def add_file(self, path: str, name: str) -> None:
        self.files.append(name)
