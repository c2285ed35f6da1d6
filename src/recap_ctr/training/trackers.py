"""How to log to each tracker, and what is logged. A tracker's package is imported only when a run is logged to it."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from recap_ctr.inference.manifest import CARD
from recap_ctr.inference.pyfunc import log_model
from recap_ctr.storage.files import atomic_directory
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.report import REPORT, Epoch

Tracker = Literal["mlflow", "tensorboard", "wandb"]
Value = str | int | float | bool
Figures = dict[str, float]
EVENTS, RESULT = "tensorboard", "result"
PROJECT = "recap"
MAX_METRICS, MAX_PARAMETERS = 1000, 100  # MLflow's servers take no more in one call.


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker shows of one run: its settings, and its figures after each epoch."""

    parameters: dict[str, Value]
    epochs: list[Epoch]


@dataclass(frozen=True)
class Tracked:
    """What a tracker shows of a finished run or fit in the directory `out`."""

    out: Path
    parameters: dict[str, Value]
    figures: Figures
    runs: dict[str, TrackedRun]
    """The runs that a fit ships or learns from, by directory; of a run, itself."""

    @property
    def artifact(self) -> Path:
        """Return the directory of the deployable model."""
        return self.out / ARTIFACT

    @property
    def files(self) -> list[Path]:
        """Return what to read: the model card, the report, and its page if there is one."""
        files = (self.artifact / CARD, self.out / REPORT, self.out / "report.html")
        return [file for file in files if file.is_file()]


@dataclass
class Logged:
    """What a tracker already has of one run or fit."""

    place: str
    """A checksum of the place that it was logged to; if the place changes, everything is logged again."""
    run: str = ""
    """The tracker's name of the run, under which a resumed one goes on."""
    children: dict[str, str] = field(default_factory=dict)
    """The tracker's names of the training runs, if it keeps them apart."""
    epochs: dict[str, int] = field(default_factory=dict)
    """How many epochs of each training run it has."""
    report: str = ""
    """A checksum of the report, once that is logged."""


class Log(Protocol):
    """An open run of a tracker."""

    def log_epochs(self, run: str, epochs: list[Epoch]) -> None:
        """Log some epochs of a training run."""
        ...

    def log_result(self, tracked: Tracked) -> str:
        """Log settings, figures, files and artifact, and return where to look at them."""
        ...

    def close(self, *, finished: bool) -> None:
        """End the tracker's run; one that is not finished can be resumed."""
        ...


def epoch_figures(epoch: Epoch) -> Figures:
    """Return the figures of an epoch under the names that trackers show."""
    return {
        "epoch": epoch.epoch,
        "train/loss": epoch.train_loss,
        "valid/auc": epoch.valid_auc,
        "valid/logloss": epoch.valid_logloss,
        "learning_rate": epoch.learning_rate,
    }


class MlflowLog:
    """A run with a child for each training run, and the artifact as a model that MLflow can load."""

    def __init__(self, out: Path, logged: Logged) -> None:
        import mlflow

        self._mlflow, self._client, self._logged = mlflow, mlflow.MlflowClient(), logged
        nested = mlflow.active_run() is not None
        self._run = mlflow.start_run(run_id=logged.run or None, run_name=out.name, nested=nested)
        logged.run = str(self._run.info.run_id)

    def log_epochs(self, run: str, epochs: list[Epoch]) -> None:
        """Log some epochs to the child of that name."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(name, value, now, epoch.step)
            for epoch in epochs
            for name, value in epoch_figures(epoch).items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._child(run), metrics=metrics[start : start + MAX_METRICS])

    def log_result(self, tracked: Tracked) -> str:
        """Log settings, figures, files and the model, and end the children."""
        self._log_parameters(self._logged.run, tracked.parameters)
        self._mlflow.log_metrics(tracked.figures)
        for file in tracked.files:
            self._mlflow.log_artifact(str(file))
        for name, run in tracked.runs.items():
            self._log_parameters(self._child(name), run.parameters)
        for child in self._logged.children.values():
            self._client.set_terminated(child)
        model = log_model(tracked.artifact)
        return f"run {self._logged.run}; load the model by mlflow.pyfunc.load_model({model!r})"

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._mlflow.end_run("FINISHED" if finished else "KILLED")

    def _child(self, name: str) -> str:
        """Return the id of a training run's child; create it at the first call."""
        if name not in self._logged.children:
            child = self._client.create_run(
                self._run.info.experiment_id, run_name=name, tags={"mlflow.parentRunId": self._logged.run}
            )
            self._logged.children[name] = str(child.info.run_id)
        return self._logged.children[name]

    def _log_parameters(self, run_id: str, parameters: Mapping[str, Value]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)) for name, value in parameters.items()]
        for start in range(0, len(params), MAX_PARAMETERS):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMETERS])


class TensorBoardLog:
    """Event files inside the run or fit: a directory for each training run, and one for the result."""

    def __init__(self, out: Path, logged: Logged) -> None:
        self._events = out / EVENTS
        self._writers: dict[str, Any] = {}

    def log_epochs(self, run: str, epochs: list[Epoch]) -> None:
        """Append some epochs to the events of a training run."""
        for epoch in epochs:
            for name, value in epoch_figures(epoch).items():
                self._writer(run).add_scalar(name, value, epoch.step)
        self._writer(run).flush()

    def log_result(self, tracked: Tracked) -> str:
        """Write settings, figures and the card; those of an earlier result are replaced."""
        from torch.utils.tensorboard import SummaryWriter

        for name, run in tracked.runs.items():
            self._writer(name).add_text("parameters", _as_table(run.parameters))
        with atomic_directory(self._events / RESULT) as partial, SummaryWriter(str(partial)) as writer:
            for name, value in tracked.figures.items():
                writer.add_scalar(f"final/{name}", value)
            writer.add_text("parameters", _as_table(tracked.parameters))
            writer.add_text("model card", (tracked.artifact / CARD).read_text(encoding="utf-8"))
            writer.add_text("artifact", str(tracked.artifact.resolve()))
        return f"tensorboard --logdir {self._events}"

    def close(self, *, finished: bool) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, run: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if run not in self._writers:
            self._writers[run] = SummaryWriter(str(self._events / "runs" / run))
        return self._writers[run]


class WandbLog:
    """One W&B run, whose curves are named after the training runs, with the artifact as a model."""

    def __init__(self, out: Path, logged: Logged) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=wandb_project(),
            name=out.name,
            id=logged.run or None,
            resume="allow" if logged.run else None,
            mode=wandb_mode(),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )
        logged.run = str(self._run.id)
        self._defined: set[str] = set()

    def log_epochs(self, run: str, epochs: list[Epoch]) -> None:
        """Log some epochs, drawn over the steps of their training run."""
        if run not in self._defined:
            self._run.define_metric(f"{run}/step")
            self._run.define_metric(f"{run}/*", step_metric=f"{run}/step")
            self._defined.add(run)
        for epoch in epochs:
            figures = {f"{run}/{name}": value for name, value in epoch_figures(epoch).items()}
            self._run.log({f"{run}/step": epoch.step, **figures})

    def log_result(self, tracked: Tracked) -> str:
        """Log settings, figures and the artifact with its report."""
        runs = {name: run.parameters for name, run in tracked.runs.items()}
        self._run.config.update({**tracked.parameters, "runs": runs})
        self._run.summary.update(tracked.figures)
        model = self._wandb.Artifact("model", type="model", metadata=tracked.figures)
        model.add_dir(str(tracked.artifact))
        for file in tracked.files:
            model.add_file(str(file), name=f"report/{file.name}")
        self._run.log_artifact(model)
        if self._run.offline:
            return f"offline run; send it by `wandb sync {Path(self._run.dir).parent}`"
        return str(self._run.url)

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if finished else 1)


def wandb_mode() -> Literal["online", "offline"] | None:
    """Return None, where W&B decides by WANDB_MODE; otherwise send nothing without a key in the environment."""
    if "WANDB_MODE" in os.environ:
        return None
    return "online" if "WANDB_API_KEY" in os.environ else "offline"


def wandb_project() -> str:
    """Return the W&B project to log to."""
    return os.environ.get("WANDB_PROJECT", PROJECT)


def _as_table(parameters: Mapping[str, Value]) -> str:
    lines = (f"| {name} | {value} |" for name, value in parameters.items())
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def _mlflow_place() -> str:
    import mlflow

    return str(mlflow.get_tracking_uri())


def _events_place() -> str:
    return EVENTS


def _wandb_place() -> str:
    return f"{wandb_project()} {wandb_mode() or os.environ['WANDB_MODE']}"


LOGS: dict[Tracker, Callable[[Path, Logged], Log]] = {
    "mlflow": MlflowLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
}
"""What begins or resumes a tracker's run."""
PLACES: dict[Tracker, Callable[[], str]] = {
    "mlflow": _mlflow_place,
    "tensorboard": _events_place,
    "wandb": _wandb_place,
}
"""What names the place that a tracker logs to."""
