"""Forecast the cost of a table: a rehearsal counts and times the runs that are missing, and trains none."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from recap_ctr.axes.logits import is_table, table_checksum
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs import machine
from recap_ctr.jobs.executor import Job
from recap_ctr.recipe.ablation import Cell, train_cells
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.probe import RESULT, ProbeResult, Race, read_result
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import Runs
from recap_ctr.training.report import REPORT, RunReport, read_report
from recap_ctr.training.run import epoch_seconds

FINGERPRINT = re.compile(r"-[0-9a-f]{10}$")  # The end of the name of a stage's directory.
GUESSED_EPOCHS = 24  # For a run where no finished run of its kind tells more.
Cells = Callable[[Recipe, Plan, Sequence[Path], int], Mapping[Any, Cell]]
"""What a table is made of apart from its teachers: a function of recipe, plan, the teachers' runs and the seeds."""


@dataclass(frozen=True)
class Cost:
    """An estimate for the missing runs of one kind."""

    label: str
    runs: int
    seconds_per_epoch: float
    epochs: int
    origin: str
    """Where the number of epochs comes from."""
    threads: int = 1

    @property
    def minutes(self) -> float:
        """Return the minutes of all cores that the runs use, added up."""
        return self.runs * self.epochs * self.seconds_per_epoch * self.threads / 60

    def to_text(self) -> str:
        """Return the estimate in words."""
        return (
            f"{self.label}: {self.runs} missing, {self.seconds_per_epoch:.1f} s an epoch, {self.epochs} epochs"
            f" ({self.origin}): {self.minutes:.0f} core-minutes"
        )


def cost_of(
    label: str, runs: int, config: RunConfig, data: PreparedData, finished: Sequence[RunReport]
) -> Cost:
    """Estimate what `runs` runs of a config cost, by timing a few steps of one.

    They are expected to take as many epochs as the `finished` runs took on average.
    """
    epochs = round(mean(len(report.history) for report in finished)) if finished else GUESSED_EPOCHS
    origin = "as finished runs took" if finished else "guessed"
    return Cost(
        label, runs, epoch_seconds(config, data), min(epochs, config.train.max_epochs), origin, config.threads
    )


def costs_text(costs: Sequence[Cost]) -> str:
    """Return a line for each kind of run, and one for the sum."""
    minutes, cores = sum(cost.minutes for cost in costs), machine.num_cores()
    total = (
        f"all: {sum(cost.runs for cost in costs)} runs are missing, {minutes / 60:.1f} core-hours,"
        f" {minutes / 60 / cores:.1f} hours on {cores} cores"
    )
    return "\n".join([*(cost.to_text() for cost in costs), total])


@dataclass
class Rehearsal:
    """A runner of a recipe's stages that trains nothing.

    It finds stages that are finished and counts those that are missing. What depends on a missing stage is missing too.
    """

    workers: int = 1
    keeps_plans: bool = False
    costs: list[Cost] = field(default_factory=list)
    """The missing runs, in the order of the stages."""

    def probe(self, race: Race) -> ProbeResult:
        """Return the answer of a finished probe; count a missing one, and return the defaults."""
        if (race.out / RESULT).is_file():
            return read_result(race.out)
        config = RunConfig(
            race.model, race.model_config, race.training, threads=race.threads, device=race.device
        )
        seconds = epoch_seconds(config, race.data)
        self.costs.append(
            Cost(
                label=f"probe of {race.model}{', taught' if race.teachers else ''}",
                runs=1,
                seconds_per_epoch=seconds * race.rows / len(race.data.train),
                epochs=race.config.most_epochs(probe_rate=race.probe_rate),
                origin="at most, on its rows",
                threads=race.threads,
            )
        )
        return ProbeResult(
            l2=race.training.l2,
            learning_rate=race.training.learning_rate,
            auc=0.0,
            seconds_per_epoch=seconds,
            runner_up=None,
            margin=0.0,
            margin_error=0.0,
        )

    def train(
        self, configs: dict[Path, RunConfig], data: PreparedData, title: str, deadline: float | None = None
    ) -> Runs:
        """Count the runs that are missing. The reports of those are empty: a rehearsal reads none."""
        missing: dict[tuple[str, str], dict[Path, RunConfig]] = {}
        for path, config in configs.items():
            # A run that only has to be packed again takes hardly any time.
            if not (path / REPORT).is_file():
                kind = FINGERPRINT.sub("", path.parent.name), config.model_config.model_dump_json()
                missing.setdefault(kind, {})[path] = config
        for (label, _), runs in missing.items():
            path, config = next(iter(runs.items()))
            finished = [
                report for report in _reports(path.parents[1], label) if report.model.name == config.model
            ]
            self.costs.append(cost_of(label, len(runs), config, data, finished))
        return {path: read_report(path) if (path / REPORT).is_file() else _empty_report() for path in configs}

    def run(self, jobs: Sequence[Job], title: str) -> list[Any]:
        """Do nothing: other jobs than runs take hardly any time."""
        return [None for _ in jobs]

    def checksum(self, table: Path) -> str:
        """Return the checksum of a table; for a missing one its path, which names a stage that is missing too."""
        return table_checksum(table) if is_table(table) else str(table)


def missing_costs(
    config: RecipeConfig,
    data: PreparedData,
    out: Path,
    cells: Cells,
    seeds: int,
    *,
    threads: int | None = None,
    device: str = "cpu",
) -> list[Cost]:
    """Return what a table of these cells would still cost, in the order of its stages."""
    rehearsal = Rehearsal()
    recipe = Recipe(config, data, out, threads=threads, device=device, runner=rehearsal, quiet=True)
    plan = recipe.plan()
    train_cells(recipe, cells(recipe, plan, list(recipe.train_teachers(plan)), seeds), title="rehearsal")
    return rehearsal.costs


def _reports(out: Path, label: str) -> list[RunReport]:
    """Return the reports of all finished runs in stages that are named `label`, whatever their fingerprints."""
    stages = (path for path in out.glob(f"{label}-*") if FINGERPRINT.fullmatch(path.name.removeprefix(label)))
    return [read_report(path.parent) for stage in stages for path in stage.glob(f"*/{REPORT}")]


def _empty_report() -> RunReport:
    """Return a report without any figure: reading one would be an error in the rehearsal."""
    nothing: dict[str, Any] = {}
    return RunReport.model_construct(**nothing)
