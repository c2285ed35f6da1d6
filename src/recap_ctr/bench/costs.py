"""What a table would still take: its missing runs, counted and timed, without training any."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from recap_ctr.axes.logits import LogitTable, is_table
from recap_ctr.bench.scaling import Repeated, train_cells
from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs import machine as environment
from recap_ctr.recipe.probe import RESULT, Found, ProbeConfig, most_epochs, read_found
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.run import REPORT, RunConfig, epoch_seconds, read_report

STAGE = re.compile(r"-[0-9a-f]{10}$")  # what a stage's name ends in
GUESSED_EPOCHS = 24  # of a run that no other tells about
Cells = Callable[[Recipe, Plan, Sequence[Path], int], Mapping[Any, Repeated]]


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
        """Of all cores that they use."""
        return self.runs * self.epochs * self.seconds_per_epoch * self.threads / 60

    def to_text(self) -> str:
        return (
            f"{self.label}: {self.runs} missing, {self.seconds_per_epoch:.1f} s an epoch, {self.epochs} epochs"
            f" ({self.origin}): {self.minutes:.0f} core-minutes"
        )


def cost_of(
    label: str, runs: int, config: RunConfig, data: PreparedData, known: Sequence[dict[str, Any]]
) -> Cost:
    """Timed by a few steps, with as many epochs as `known` reports of others took on average, else by a guess."""
    epochs = round(mean(len(report["history"]) for report in known)) if known else GUESSED_EPOCHS
    origin = "as finished runs took" if known else "guessed"
    return Cost(
        label, runs, epoch_seconds(config, data), min(epochs, config.train.max_epochs), origin, config.threads
    )


def say_costs(costs: Sequence[Cost]) -> str:
    """One line a kind of run, and the sum."""
    total, cores = sum(cost.minutes for cost in costs), environment.num_cores()
    return "\n".join(
        [
            *(cost.to_text() for cost in costs),
            f"all: {sum(cost.runs for cost in costs)} runs are missing, {total / 60:.1f} core-hours,"
            f" {total / 60 / cores:.1f} hours on {cores} cores",
        ]
    )


class Rehearsal(Recipe):
    """A recipe that trains nothing: what is there it finds, what is missing it counts, and what depends on that is
    missing too."""

    costs: list[Cost]

    def rehearse(self, cells: Cells, seeds: int) -> list[Cost]:
        """What a table of these cells would still take, in the order of its stages."""
        self.costs = []
        plan = self.plan()
        train_cells(self, cells(self, plan, list(self.teachers(plan)), seeds), title="")
        return self.costs

    def record(self, plan: Plan) -> None:
        """It may rest on a guess, which nobody must read back."""

    def _race(
        self,
        directory: Path,
        race: ProbeConfig,
        model: str,
        model_config: Frozen,
        settings: TrainConfig,
        *,
        probe_rate: bool = False,
        teachers: tuple[Path, ...] = (),
        seconds: float | None = None,
    ) -> Found:
        if (directory / RESULT).is_file():
            return read_found(directory)
        rows = len(self.data.train)
        timed = epoch_seconds(
            RunConfig(model, model_config, settings, threads=self.threads, device=self.device), self.data
        )
        part, epochs = timed * min(race.max_rows, rows) / rows, most_epochs(race, probe_rate=probe_rate)
        label = f"probe of {model}{', taught' if teachers else ''}"
        self.costs.append(Cost(label, 1, part, epochs, "at most, on its rows", self.threads))
        return Found(settings.l2, settings.learning_rate, 0.0, timed, None, 0.0, 0.0)

    def _checksums(self, tables: Sequence[Path]) -> list[str]:
        return [LogitTable(path).checksum if is_table(path) else str(path) for path in tables]

    def place(self, stage: str, config: RunConfig) -> Path:
        if all(is_table(path) for path in config.teachers):
            return super().place(stage, config)
        # Its name is unknown, but it is not there.
        return self.out / f"{stage}-{fingerprint(config.to_json())[:10]}"

    def train(self, configs: dict[Path, RunConfig], title: str) -> dict[Path, dict[str, Any]]:
        missing: dict[tuple[str, str], list[RunConfig]] = {}
        for path, config in configs.items():
            if not (path / REPORT).is_file():  # one that is only to be packed anew takes no time to speak of
                label = STAGE.sub("", path.parent.name)
                missing.setdefault((label, config.model_config.model_dump_json()), []).append(config)
        for (label, _), own in missing.items():
            stages = (
                path for path in self.out.glob(f"{label}-*") if STAGE.fullmatch(path.name.removeprefix(label))
            )
            known = [read_report(path.parent) for stage in stages for path in stage.glob(f"*/{REPORT}")]
            like = [one for one in known if one["model"]["name"] == own[0].model]
            self.costs.append(cost_of(label, len(own), own[0], self.data, like))
        return {path: {} for path in configs}
