"""The report of a run, and of a whole fit: what every table, page and command reads."""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_serializer

from recap_ctr.config import Record, TrainConfig
from recap_ctr.data.quality import FieldQuality
from recap_ctr.diagnose.results import Curve
from recap_ctr.errors import InputError
from recap_ctr.evaluation.evaluate import Metrics
from recap_ctr.evaluation.slices import Breakdown
from recap_ctr.storage.files import read_object, write_json

R = TypeVar("R", bound="RunReport")
REPORT = "report.json"
RouteChoice = Literal["late", "random", "greedy"]


class Epoch(Record):
    """One row of a run's history."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    """Mean over steps, without the regulariser, which published logs add to it: on ML-1M 0.02 in FCN's first epoch."""
    valid_auc: float
    valid_logloss: float
    beta: float | None = None
    """β of the moving average that was best on validation."""
    seconds: float
    raw_auc: float | None = None
    """Validation AUC of the weights that were averaged; None without an average."""


class SplitCount(Record):
    """How many rows a split has, and how many of them are clicks."""

    rows: int
    positives: int


class DataSummary(Record):
    """The prepared data that a run was trained and measured on."""

    name: str
    fingerprint: str
    splits: dict[str, SplitCount] = Field(default_factory=dict)
    split: str | None = None
    """How the rows were divided, in words."""
    split_note: str | None = None
    """What a user should know of that, such as gaps in the time column."""


class ModelSummary(Record):
    """A model by name, with all of its settings."""

    name: str
    config: dict[str, Any]


class RouteSummary(Record):
    """How many routes were asked for, and how they are chosen."""

    count: int | None = 1
    """None means several if their gain on validation rows is beyond chance, else one."""
    choice: RouteChoice = "late"


class RouteGain(Record):
    """What the mean of several routes gains over one route in AUC on validation rows, and how many ship."""

    routes: int
    """The number of routes that were compared with one."""
    auc: float
    standard_error: float
    """The standard error of the difference over rows (DeLong)."""
    shipped: int

    @property
    def sentence(self) -> str:
        """Return how many routes ship and why, in words."""
        shipped = "one route ships" if self.shipped == 1 else f"{self.shipped} routes ship"
        verdict = "within chance" if self.shipped == 1 else "beyond chance"
        return (
            f"{shipped}: the mean of {self.routes} changes validation AUC by {100 * self.auc:+.4f} points"
            f" (standard error {100 * self.standard_error:.4f}) compared with one, which is {verdict}"
        )


class PartGain(Record):
    """What models beside the towers gain on validation rows, and in which proportions they are there."""

    factors: dict[str, float]
    """Factors of the logits of the towers, if there are any, and of each part that ships, by name."""
    logloss: float
    """How much lower the logloss is than the towers', or the best part's without towers, on the validation rows that
    did not fit the proportions."""
    constant: float = 0.0
    """The constant that is added to the sum."""
    tower_limit: float | None = None
    """The largest logit that a tower may have before its factor, if there is a limit."""
    optimism: float = 0.0
    """How much higher the logloss is on rows that did not fit the proportions than on those that did."""

    @property
    def has_towers(self) -> bool:
        """Return whether the towers have a share in the logit that counts."""
        return self.factors.get("towers", 0.0) >= 0.01

    @property
    def sentence(self) -> str:
        """Return what is shipped beside the towers and why, in words."""
        shares = [f"{factor:.2f} of the {name}" for name, factor in self.factors.items()]
        if list(self.factors) == ["towers"]:
            return "nothing stands beside the towers: it would not lower the validation logloss"
        listed = " and ".join([", ".join(shares[:-1]), shares[-1]] if len(shares) > 1 else shares)
        return f"the shipped logit is {listed}, which changes the validation logloss by {-self.logloss:+.5f}"


class PoolSummary(Record):
    """The recombined rows that a student has learnt from, beside the training rows."""

    rows: int
    sides: list[list[str]]
    """The fields that stayed together."""
    teachers: int
    """How many teachers have scored them."""

    @property
    def sentence(self) -> str:
        """Return how many rows there were, and what they were made of, in words."""
        sides = " | ".join(" ".join(side) for side in self.sides)
        scored = "one teacher" if self.teachers == 1 else f"{self.teachers} teachers"
        return f"{self.rows:,}, scored by {scored}; made of {len(self.sides)} sides of random rows: {sides}"


class Reference(Record):
    """A reference model's figures on one split, and how far the reported model is ahead of it there."""

    auc: float
    logloss: float
    calibrated_logloss: float | None = None
    """The logloss after the same calibration as the model's; None in reports of older versions."""
    lead: float | None = None
    """The reported model's AUC minus this one's, on the same rows; `lead_error` is the standard error (DeLong)."""
    lead_error: float | None = None
    logloss_gain: float | None = None
    """This logloss minus the reported model's, on the same rows; `logloss_gain_error` is the standard error."""
    logloss_gain_error: float | None = None
    cut: bool = False
    """Whether a budget ended its training before it had converged, or stopped gaining."""


class Seconds(Record):
    """How long a run took."""

    train: float
    evaluate: float


class RunReport(Record):
    """Everything about one finished run: what decided it, how it went, and how good it is."""

    kind: Literal["report"] = "report"
    format: int = 1
    data: DataSummary
    model: ModelSummary
    train: TrainConfig
    threads: int
    device: str
    teachers: list[str] = Field(default_factory=list)
    """Checksums of the teachers' logit tables."""
    pool: PoolSummary | None = None
    """The recombined rows of a student that has learnt from some."""
    calibration: str
    negative_rate: float
    reference: dict[str, dict[str, Reference]] | None = None
    """Reference models by name, with their figures by split; None where none was trained."""
    routes: RouteSummary = RouteSummary()
    parameters: int
    calibrated_by: dict[str, Any]
    metrics: Metrics
    metrics_by_routes: dict[str, Metrics] = Field(default_factory=dict)
    """For a model with routes: its metrics on one route and on all, by the number of routes."""
    route_gain: RouteGain | None = None
    """Why this number of routes ships, where the run chose it."""
    beside: PartGain | None = None
    """What a logistic regression and click rates beside the towers gain, where that was tried."""
    strength: float | None = None
    """The strength of a converged regression that was best on validation rows, as l2 · rows."""
    fields: list[FieldQuality] | None = None
    repeated: dict[str, int] | None = None
    """Held-out rows, by split, with the values and the label of a training row; None where they were not counted."""
    breakdown: Breakdown | None = None
    """Slices, gains, thresholds and the spread of scores on the held-out rows; None in reports of older versions."""
    slices: list[str] | None = None
    """The fields that were chosen to slice by; None for those with the fewest values."""
    best_epoch: int
    cut: bool = False
    """Whether a deadline ended the training before it had converged, or stopped gaining."""
    history: list[Epoch]
    seconds: Seconds
    versions: dict[str, str]
    machine: dict[str, str | int]
    date: str
    command: str | None = None
    """The command that made the report, as it was typed."""

    @field_serializer("train")
    def _whole_config(self, train: TrainConfig) -> dict[str, Any]:
        """Write all of the training settings, whether they were set or are at their defaults."""
        return train.model_dump(mode="json")

    def on_routes(self, *, every: bool) -> "RunReport":
        """Return the report with the metrics of one route, or of the mean over every route."""
        if not self.metrics_by_routes:
            return self
        count = (max if every else min)(self.metrics_by_routes, key=int)
        return self.model_copy(update={"metrics": self.metrics_by_routes[count]})


class TeacherSummary(Record):
    """What a fit's report says of one teacher."""

    metrics: Metrics
    seed: int
    parameters: int
    epochs: int
    seconds: Seconds


class EnsembleFigures(Record):
    """The mean logit of the first teachers, calibrated and measured like a model."""

    teachers: int
    metrics: Metrics


class ArmSummary(Record):
    """What a fit's report says of one model of its race; figures are of the validation rows."""

    name: str
    auc: float
    logloss: float
    epochs: float
    seconds: float
    finished: bool
    """Whether it stopped gaining, or had all of its epochs."""
    weight: int
    """How often it counts in the mean that teaches."""


class TeachingStep(Record):
    """One member of the ensemble that teaches, in the order in which they were chosen."""

    member: str
    logloss: float
    """Logloss of the mean with this member, on the validation rows that choose."""
    confirmed: float
    """The same on the validation rows that confirm."""
    taken: bool
    """False for the last one if it was not worth adding."""


class RefitSummary(Record):
    """How the chosen model learned from all rows, after it was measured without the held-out ones."""

    directory: str
    """The directory of that training, relative to the fit's."""
    rows: int
    added: dict[str, int]
    """How many values got a vector only then, by field."""
    seconds: float
    teachers: int = 0
    """How many of its teachers have learned from all rows before it did."""


class FitReport(RunReport):
    """The report of the student that a fit ships, and of all that it was made of."""

    recipe: dict[str, Any]
    plan: dict[str, Any]
    student: str
    """The directory of the shipped run, relative to that of the fit: a student's, unless another run is better."""
    chosen_because: str | None = None
    """Why that run is shipped, in words."""
    students: dict[str, Metrics]
    teacher_runs: dict[str, TeacherSummary]
    """Teachers by the directory of their run."""
    ensembles: list[EnsembleFigures]
    """The ensembles of the first 1, 2, .. teachers."""
    recovered: float | None = None
    """The student's share of what the ensemble of all teachers gains in AUC over one of them."""
    size_against_teacher: float | None = None
    arms: list[ArmSummary] = Field(default_factory=list)
    """The models that raced to become teachers, the best on validation rows first."""
    teaching: list[TeachingStep] = Field(default_factory=list)
    """What each member of a teaching ensemble of unlike models adds."""
    interrupted: bool = False
    """Whether the fit was interrupted: then this is the best so far."""
    averaging: Curve | None = None
    """What the mean of more and more teachers gains, with what Eq. 6 predicts from their disagreement."""
    refit: RefitSummary | None = None
    """How the shipped model has learnt from all rows in the end; None: it is the very model that was measured."""


def write_report(out: Path, report: RunReport) -> None:
    """Write the report of the run or fit in the directory `out`."""
    write_json(out / REPORT, report.to_json())


def record_command(out: Path, report: R, command: str) -> R:
    """Return the report with the command that made it, and write it to `out`; a command on record stays."""
    if not command or report.command is not None:
        return report
    named = report.model_copy(update={"command": command})
    write_report(out, named)
    return named


def read_report(out: Path) -> RunReport | FitReport:
    """Return the report of the finished run or fit in the directory `out`."""
    if not (out / REPORT).is_file():
        raise InputError(
            f"{out} holds no {REPORT}", fix="name a directory that `recap fit` or `recap train` has finished"
        )
    return parse_report(read_object(out / REPORT, "a report"), str(out / REPORT))


def parse_report(values: Any, origin: str = "report") -> RunReport | FitReport:
    """Return plain JSON values as a report; one that names its recipe is the report of a fit."""
    kind = FitReport if isinstance(values, dict) and "recipe" in values else RunReport
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{origin} is not a report: {name}: {first['msg']}") from None
