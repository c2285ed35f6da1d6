"""Log a run or fit to the tracker that its user looks at: MLflow, TensorBoard or Weights & Biases.

Epochs are logged as they end, from whichever process trains them (`jobs.progress.announce_epoch`); settings, figures
and the artifact at the end, from the reports, with every epoch that was missed. A tracker that fails costs a warning,
never the model.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.jobs.progress import heard_by, say
from recap_ctr.storage.files import read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.report import REPORT, Epoch, FitReport, RunReport, read_report
from recap_ctr.training.trackers import (
    LOGS,
    PLACES,
    Figures,
    Log,
    Logged,
    Tracked,
    TrackedRun,
    Tracker,
    Value,
)

RECORD = "tracking.json"
"""The file beside a report that says what trackers have: a command that is repeated or resumed logs nothing twice."""


def check_tracker(name: str | None) -> Tracker | None:
    """Return the tracker of that name; refuse one that is unknown or not installed, before hours of training."""
    choices = get_args(Tracker)
    if name is None:
        return None
    if name not in choices:
        raise InputError(
            f"no tracker {name!r}{did_you_mean(name, choices)}", fix=f"choose from {', '.join(choices)}"
        )
    if find_spec(name) is None:
        raise InputError(f"{name} is not installed", fix="pip install 'recap-ctr[track]'")
    return cast(Tracker, name)


@contextmanager
def tracked_by(
    tracker: Tracker | None, out: Path, *, quiet: bool = False
) -> Iterator[Callable[[RunReport], None]]:
    """Log the epochs of all runs of the fit or run in `out` while this context is open.

    It yields what logs the report at the end. Without a tracker, nothing is logged.
    """
    if tracker is None:
        yield lambda report: None
        return
    session = Session(tracker, out, quiet=quiet)
    try:
        with heard_by(session.hear):
            yield session.finish
    finally:
        session.close()


class Session:
    """What follows one run or fit for a tracker."""

    def __init__(self, tracker: Tracker, out: Path, *, quiet: bool = False) -> None:
        self.tracker, self.out, self.quiet = tracker, out, quiet
        self._log: Log | None = None
        self._logged: Logged | None = None
        self._has_failed = self._is_finished = False

    def hear(self, directory: str, figures: Mapping[str, Any]) -> None:
        """Log an epoch of the run in `directory`, unless the tracker has it already."""
        epoch, run = Epoch.model_validate(figures), _run_name(Path(directory), self.out)
        if not self._has_failed:
            with self._without_harm("the epochs"):
                if epoch.epoch > self.logged.epochs.get(run, 0):
                    if self.logged.report:  # It was finished, and goes on with other settings.
                        self._logged = Logged(self.logged.place)
                    self._log_epochs(run, [epoch])

    def finish(self, report: RunReport) -> None:
        """Log what the report says, with all epochs that the tracker lacks."""
        self._has_failed = False  # It may answer again.
        with self._without_harm("the report"):
            checksum = _checksum(report)
            if self.logged.report == checksum:
                where = f"up to date; remove {self.out / RECORD} to log it again"
            else:
                if self.logged.report:
                    self._logged = Logged(self.logged.place)
                tracked = describe(report, self.out)
                for name, run in tracked.runs.items():
                    count = self.logged.epochs.get(name, 0)
                    self._log_epochs(name, [epoch for epoch in run.epochs if epoch.epoch > count])
                where = self._open().log_result(tracked)
                self.logged.report = checksum
                self._remember()
            self._is_finished = True
            if not self.quiet:
                say(f"{self.tracker}: {where}")

    def close(self) -> None:
        """End the tracker's run; what was not finished can be resumed."""
        if self._log is not None:
            with self._without_harm("the end of the run"):
                self._log.close(finished=self._is_finished)

    @property
    def logged(self) -> Logged:
        """Return what the tracker has: nothing yet, if it was another place that was logged to."""
        if self._logged is None:
            place = fingerprint({"place": PLACES[self.tracker]()})
            entry = _recorded(self.out).get(self.tracker, {})
            self._logged = Logged(**entry) if entry.get("place") == place else Logged(place)
        return self._logged

    def _log_epochs(self, run: str, epochs: list[Epoch]) -> None:
        if epochs:
            self._open().log_epochs(run, epochs)
            self.logged.epochs[run] = epochs[-1].epoch
            self._remember()

    def _open(self) -> Log:
        """Return the open run of the tracker, which the first call begins or resumes."""
        if self._log is None:
            self._log = LOGS[self.tracker](self.out, self.logged)
        return self._log

    def _remember(self) -> None:
        write_json(self.out / RECORD, {**_recorded(self.out), self.tracker: asdict(self.logged)})

    @contextmanager
    def _without_harm(self, part: str) -> Iterator[None]:
        """Turn every error of a tracker into one warning, even if `quiet`, because what was trained is on disk all the
        same."""
        try:
            with warnings.catch_warnings():  # Those of other packages about themselves tell our user nothing.
                warnings.simplefilter("ignore")
                yield
        except Exception as error:  # A tracker may raise anything, and none of it may cost the model.
            self._has_failed = True
            say(f"Warning: {self.tracker} did not take {part} of {self.out}: {_without_secrets(error)}")


def describe(report: RunReport, out: Path) -> Tracked:
    """Return what trackers show of a report; the runs of a fit are read from their directories."""
    if isinstance(report, FitReport):
        names = dict.fromkeys([report.student, *report.students, *report.teacher_runs])
        reports = {name: read_report(out / name) for name in names if (out / name / REPORT).is_file()}
        parameters = _flat(report.recipe)
    else:
        reports, parameters = {out.name: report}, _run_parameters(report)
    return Tracked(
        out=out,
        parameters={**parameters, "data.name": report.data.name, "data.fingerprint": report.data.fingerprint},
        figures=_figures(report),
        runs={name: TrackedRun(_run_parameters(run), run.history) for name, run in reports.items()},
    )


def _run_name(directory: Path, out: Path) -> str:
    """Return the name of a training run: its directory within the fit, or its own name."""
    return str(directory.relative_to(out)) if out in directory.parents else directory.name


def _run_parameters(report: RunReport) -> dict[str, Value]:
    train = report.train.model_dump(mode="json")
    return {"model": report.model.name, **_flat({"model": report.model.config, "train": train})}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return nested settings under dotted names; lists become text, and settings that are not set are left out."""
    flat: dict[str, Value] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value if isinstance(value, Value) else json.dumps(value)
    return flat


def _figures(report: RunReport) -> Figures:
    """Return the final figures by split, calibrated ones beside raw ones, and what the model costs."""
    figures: Figures = {"parameters": report.parameters, "train_seconds": report.seconds.train}
    for split, measured in report.metrics.items():
        figures |= {
            f"{split}/auc": measured.raw.auc,
            f"{split}/logloss": measured.raw.logloss,
            f"{split}/calibrated_logloss": measured.calibrated.logloss,
            f"{split}/base_rate_logloss": measured.base_rate_logloss,
        }
        if measured.calibrated.calibration_error is not None:
            figures[f"{split}/calibration_error"] = measured.calibrated.calibration_error
    return figures


def _checksum(report: RunReport) -> str:
    """Return a checksum of the report but for what changes at every repetition."""
    return fingerprint(
        {key: value for key, value in report.to_json().items() if key not in ("date", "command")}
    )


def _recorded(out: Path) -> dict[str, Any]:
    return read_object(out / RECORD, "a record of trackers") if (out / RECORD).is_file() else {}


def _without_secrets(error: Exception) -> str:
    """Return the first line of an error, without user and password of the URLs in it."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"//[^/@\s]+@", "//", first)
