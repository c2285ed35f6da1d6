"""The last stage of a fit: train the chosen model again on all rows, including the held-out ones.

Its settings, length, proportions of parts and routes stay as they were best on the held-out rows. Where there is time,
a student's teachers learn from all rows first, so that they don't hold it to what they thought of rows that they had
not learned from. Its calibration is
fitted on the scores that the measured model gives to all held-out rows: that model has not learned from them, and the
newest rows are among them. The report's figures are measured before, because no rows are left to measure the new model
on. One check is possible: the new model must be as good on the held-out rows, which it has now learned from, as the
model that had not. If it isn't, the earlier model ships.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.axes.routes import Routed
from recap_ctr.data.grow import changes
from recap_ctr.data.levels import levels_of
from recap_ctr.data.shards import PreparedData, held_out_shards, joined
from recap_ctr.data.split import Split
from recap_ctr.data.table import Table
from recap_ctr.data.whole import MAX_ROWS, WholeLog, base_of, holds_the_same_rows
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration, calibration_from_dict
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import PackedModel, load_artifact
from recap_ctr.jobs.executor import Job
from recap_ctr.models.recap import Recap
from recap_ctr.nn.weights import to_arrays
from recap_ctr.recipe.pool import FORWARD
from recap_ctr.recipe.work import Work
from recap_ctr.storage.files import read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.beside import BLEND, blended, combined, name_of
from recap_ctr.training.boosted import BOOSTED
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.refit import Refit, config_of, length_of, train_again
from recap_ctr.training.report import PartGain, RefitSummary, read_report

ALL_ROWS = "learning from all rows"
SUMMARY, ROWS = "refit.json", "rows"  # In the stage's directory: the summary comes last.
GROWTH_SHARE = 0.05
"""Vocabularies grow only if preparing the rows once more takes at most this share of the time."""
SLACK, PACK_SECONDS = (
    1.15,
    2.0,
)  # Time that it takes beyond what the runs have shown, and to load, compare and pack.
CALIBRATING = 1.5  # How much longer it takes to score all held-out rows at every setting than to pack a run.
ONE_STRENGTH = 0.5  # The share of a regression's time that goes into its best strength, from the start.
SMALLEST_SHARE = 0.7  # A network may be trained for so much of its length if the time is short, but no less.
WORTH_OF_ROWS = 0.01
"""What learning from all rows is taken to be worth, in AUC: a model that may gain more by training longer does so."""
TOLERANCE = 1.005  # Of the logloss on the rows that were held out.


@dataclass(frozen=True)
class RawRows:
    """The raw table that a fit has prepared, to be prepared once more with vocabularies that grow."""

    table: Table
    rule: Split
    seconds: float
    """How long preparing took the first time."""


class LastStage:
    """Trains a chosen run on all rows, in directories of the fit that are named after what they are made from."""

    def __init__(self, work: Work, raw: RawRows | None, configs: dict[Path, RunConfig]) -> None:
        """Set up the stage; `configs` are those of all runs of the fit, and may still grow."""
        self.work, self.data, self.raw, self.configs = work, work.data, raw, configs
        self.num_rows = sum(len(shard) for shard in (work.data.train, *held_out_shards(work.data).values()))

    @property
    def is_wanted(self) -> bool:
        """Return whether the recipe wants this stage, and validation rows steer nothing in its training."""
        training = self.work.student_training
        return (
            self.work.config.refit
            and self.num_rows <= MAX_ROWS
            and training.schedule != "plateau"
            and training.kd_from == "mean"
        )

    def seconds(self, runs: list[Path]) -> float:
        """Return how long these runs will take, side by side as far as there are workers."""
        growth = self.raw.seconds if self.raw is not None and self._grows else 0.0
        training = self._side_by_side([self._run_seconds(path) for path in runs])
        return training + growth + PACK_SECONDS + CALIBRATING * self.work.pack_seconds

    def teacher_seconds(self, teachers: Sequence[Path]) -> float:
        """Return how long the runs of these teachers will take, and their scores of all and of recombined rows."""
        passes = 1 + (self.work.journal.recombined or 0)
        rows = self.num_rows / len(self.data.train)

        def scoring(path: Path) -> float:
            report = read_report(path)
            steps_per_epoch = -(-len(self.data.train) // self.configs[path].train.batch_size)
            epoch_seconds = report.seconds.train * steps_per_epoch / report.history[-1].step
            return rows * passes * FORWARD * epoch_seconds

        return self._side_by_side([self._run_seconds(path) + scoring(path) for path in teachers])

    def _side_by_side(self, seconds: list[float]) -> float:
        """Return how long jobs of so many seconds will take at most."""
        return SLACK * max([*seconds, sum(seconds) / self.work.executor.workers], default=0.0)

    def _run_seconds(self, path: Path) -> float:
        report = read_report(path)
        needed = report.history[report.best_epoch - 1].step / report.history[-1].step
        if report.strength is not None:
            needed = ONE_STRENGTH
        return report.seconds.train * needed * self.num_rows / len(self.data.train)

    @property
    def _grows(self) -> bool:
        """Return whether there is time to give vectors to values that only held-out rows have; decided once."""
        journal = self.work.journal
        if self.raw is None:
            return False
        if journal.grows is None:
            journal.grows = self.raw.seconds <= GROWTH_SHARE * self.work.clock.seconds
        return journal.grows

    def runs_of(self, chosen: Path) -> list[Path]:
        """Return the runs to train again for a chosen one: itself, if it was trained, and the parts beside it."""
        config, report = self.configs[chosen], read_report(chosen)
        parts = [] if report.beside is None else list(report.beside.factors)
        kept = [path for path in config.beside if self._part_name(path) in parts]
        if config.on_top is not None and config.on_top not in kept:
            kept.append(config.on_top)
        return kept if config.model == BLEND else [chosen, *kept]

    def teachers_of(self, chosen: Path) -> list[Path]:
        """Return the networks of the fit that teach a run; trees, and scores that the user has, stay as they are."""
        directories = [table.parent.parent for table in self.configs[chosen].teachers]
        return [path for path in dict.fromkeys(directories) if path in self.configs]

    def teachers_learn(self, chosen: Path) -> bool:
        """Return whether there is time for a student's teachers to learn from all rows, too, before it does; decided
        once."""
        journal = self.work.journal
        if journal.teachers_learn is None:
            teachers = self.teachers_of(chosen)
            needed = self.teacher_seconds(teachers) + self.seconds(self.runs_of(chosen))
            left = self.work.clock.until(1.0, self.work.report_seconds)
            journal.teachers_learn = bool(teachers) and needed <= left
            self.work.record()
        return journal.teachers_learn

    def _part_name(self, path: Path) -> str:
        return name_of(load_artifact(path / ARTIFACT).model)

    def directory(self, chosen: Path) -> Path:
        """Return the directory of the result, which is named after what the result is made from."""
        inputs = {
            "runs": [
                self.configs[path].training_inputs(self.data) for path in (chosen, *self.runs_of(chosen))
            ],
            "grows": self._grows,
            "share": self.work.journal.last_share,
            **({"teachers": "learn"} if self.work.journal.teachers_learn else {}),
        }
        return self.work.out / f"all-rows-{fingerprint(inputs)[:10]}"

    def is_done(self, chosen: Path) -> bool:
        """Return whether an earlier call has finished it for this choice."""
        return self.is_wanted and (self.directory(chosen) / SUMMARY).is_file()

    def share_in_time(self, chosen: Path) -> float:
        """Return the share of the training that there is time for now; 0 if that would not be nearly all of it."""
        left = self.work.clock.until(1.0, self.work.report_seconds)
        share = min(left / self.seconds(self.runs_of(chosen)), 1.0)
        return share if share >= SMALLEST_SHARE else 0.0

    def has_time(self, chosen: Path) -> bool:
        """Return whether there is time for it, or for nearly all of it, and note it if not; decided once."""
        journal = self.work.journal
        if journal.last_share is None:
            journal.last_share = self.share_in_time(chosen)
            if journal.last_share == 0:
                needed = self.seconds(self.runs_of(chosen))
                self.work.give_up(f"{ALL_ROWS}: it would take {needed:.0f} seconds, more than were left")
            self.work.record()
        return journal.last_share > 0

    def run(self, chosen: Path) -> RefitSummary | None:
        """Train the chosen run on all rows and pack it; None if it can't be done in time, or comes out worse."""
        out, started = self.directory(chosen), time.monotonic()
        if self.is_done(chosen):
            return RefitSummary.model_validate(read_object(out / SUMMARY, "a summary"))
        data = self._whole_log(out)
        refits, teachers = self._refits(chosen, out), self._teachers(chosen, out)
        if not self._train(refits, teachers, data):
            self.work.give_up(f"{ALL_ROWS}: the time was over")
            return None
        packed = load_artifact(chosen / ARTIFACT)
        dial = self._calibrated_dial(packed)
        calibration = calibration_from_dict(dial[0]["calibration"])
        model = self._assemble(refits, chosen, data)
        if not self._knows_its_rows(model, packed, calibration, chosen, data):
            self.work.give_up(f"{ALL_ROWS}: the model did not get better on the rows that were held out")
            return None
        self._pack(out, model, packed, data, calibration, dial)
        added, _ = changes(packed.encoder, data.encoder)
        summary = RefitSummary(
            directory=out.name,
            rows=len(data.train),
            added=added,
            seconds=time.monotonic() - started,
            teachers=len(teachers),
        )
        write_json(out / SUMMARY, summary.to_json())
        return summary

    def _whole_log(self, out: Path) -> WholeLog:
        """Return all rows, with vocabularies that know the values of the held-out ones, if there is time for that."""
        if self.raw is None or not self._grows:
            return WholeLog(self.data.path, verify=False)
        prepared = self.raw.table.prepared_with(base_of(self.data), out / ROWS, self.raw.rule)
        assert holds_the_same_rows(prepared, self.data)
        return WholeLog(prepared.path, verify=False)

    def _refits(self, chosen: Path, out: Path) -> dict[Path, Refit]:
        """Return what is to be trained, by the run that it repeats."""
        teachers = self._teachers(chosen, out)
        refits: dict[Path, Refit] = {}
        for path in reversed(self.runs_of(chosen)):  # What others are trained on top of comes first.
            config = self.configs[path]
            refits[path] = Refit(
                self._taught(self._config_of(path), teachers) if path == chosen else self._config_of(path),
                self._length(path, config),
                out / path.name,
                None if config.on_top is None else refits[config.on_top].out,
            )
        return refits

    def _teachers(self, chosen: Path, out: Path) -> dict[Path, Refit]:
        """Return the teachers that are to be trained, by the run that they repeat."""
        if not self.work.journal.teachers_learn:
            return {}
        ratio = self.configs[chosen].train.recombined
        return {
            path: Refit(
                self._config_of(path),
                length_of(self.configs[path], read_report(path), len(self.data.train)),
                out / f"teacher-{path.name}",
                recombined=ratio,
            )
            for path in self.teachers_of(chosen)
        }

    def _config_of(self, path: Path) -> RunConfig:
        return config_of(self.configs[path], path, len(self.data.train), self.num_rows)

    def _taught(self, config: RunConfig, teachers: dict[Path, Refit]) -> RunConfig:
        """Return the run as one whose teachers have learned from all rows, as far as they do."""

        def table_of(table: Path) -> Path:
            again = teachers.get(table.parent.parent)
            return table if again is None else again.logits.with_name(table.name)

        return replace(
            config,
            teachers=tuple(map(table_of, config.teachers)),
            pool=tuple(map(table_of, config.pool)),
        )

    def _length(self, path: Path, config: RunConfig) -> float:
        """Return how long to train: as long as was best, or a little less if there is no time for more."""
        length = length_of(config, read_report(path), len(self.data.train))
        is_network = config.train.update != "convex" and config.model != BOOSTED
        return length * (self.work.journal.last_share or 1.0) if is_network else length

    def _train(self, refits: dict[Path, Refit], teachers: dict[Path, Refit], data: WholeLog) -> bool:
        """Train all of them, and return whether each got to its end in time."""
        deadline = self.work.clock.deadline(
            self.work.clock.until(1.0, self.work.report_seconds + PACK_SECONDS)
        )
        taught = [refit for refit in refits.values() if teachers and refit.config.teachers]
        waiting = [refit for refit in refits.values() if refit.rates is not None or refit in taught]
        # The longest first, so that no worker waits for it in the end.
        first = [*teachers.values(), *(refit for refit in reversed(refits.values()) if refit not in waiting)]
        done: list[bool] = []
        for wave in (first, waiting):
            jobs = [
                Job(refit.out.name, train_again, refit.arguments(data, self.data, deadline)) for refit in wave
            ]
            if jobs and all(done):
                done += self.work.executor.run(jobs, title=ALL_ROWS, quiet=self.work.quiet)
        return len(done) == len(refits) + len(teachers) and all(done)

    def _assemble(self, refits: dict[Path, Refit], chosen: Path, data: WholeLog) -> nn.Module:
        """Return the trained parts as one model, in the proportions that are known."""
        models = {path: refit.model(data) for path, refit in refits.items()}
        gain = read_report(chosen).beside
        parts = self._parts_in_order(models, chosen, gain)
        if self.configs[chosen].model == BLEND:
            assert gain is not None
            return blended(gain, parts, data.layout)
        model = models[chosen]
        if gain is None:
            return model
        assert isinstance(model, Recap)
        model.limit_towers(gain.tower_limit)
        if not parts:
            return model
        return combined(model, gain, parts, data.layout)

    def _parts_in_order(
        self, models: dict[Path, nn.Module], chosen: Path, gain: PartGain | None
    ) -> list[nn.Module]:
        beside = [models[path] for path in self.configs[chosen].beside if path in models]
        return [part for part in beside if gain is not None and name_of(part) in gain.factors]

    def _calibrated_dial(self, packed: PackedModel) -> list[dict[str, Any]]:
        """Return every setting of the measured model as it was, calibrated on all rows that it has not learned from.

        The validation rows alone may be few, or of days unlike those before and after.
        """
        entries, held_out = packed.manifest["dial"], list(held_out_shards(self.data).values())
        negative_rate = self.work.config.negative_rate
        calibrated = measure_settings(
            packed.model,
            packed.routes,
            [Setting.from_dict(entry) for entry in entries],
            joined(held_out),
            torch.device(self.work.device),
            calibrations={},
            kind=self.work.config.calibration,
            negative_rate=negative_rate,
            levels=levels_of(self.data, held_out, negative_rate),
        )
        return [
            {**entry, "calibration": again["calibration"]}
            for entry, again in zip(entries, calibrated, strict=True)
        ]

    def _knows_its_rows(
        self,
        model: nn.Module,
        packed: PackedModel,
        calibration: Calibration,
        chosen: Path,
        data: WholeLog,
    ) -> bool:
        """Return whether the new model is no worse than the one before on the rows that were held out then."""
        device, rate = torch.device(self.work.device), self.work.config.negative_rate
        routed = Routed(model, packed.routes) if isinstance(model, Recap) else model
        losses = np.zeros(2)
        for split, shard in held_out_shards(data).items():
            before = np.asarray(LogitTable(chosen / LOGITS / split).logits_NM[:, 0])
            for at, logits in enumerate((before, predict(routed.to(device), shard, device))):
                corrected, weights = undo_sampling(logits, shard, rate)
                calibrated = calibration.apply(corrected)
                losses[at] += len(shard) * metrics.logloss(shard.labels, calibrated, weights)
        return bool(losses[1] <= TOLERANCE * losses[0])

    def _pack(
        self,
        out: Path,
        model: nn.Module,
        packed: PackedModel,
        data: WholeLog,
        calibration: Calibration,
        dial: list[dict[str, Any]],
    ) -> None:
        """Write the artifact: weights, vocabularies and calibration are new, all else is that of the chosen run."""
        recorded = packed.manifest
        clicks = int(np.sum(np.asarray(data.train.labels)))
        write_artifact(
            out / ARTIFACT,
            name=packed.name,
            config=model.config,  # type: ignore[arg-type]
            weights=to_arrays(model.state_dict()),
            encoder=data.encoder,
            calibration=calibration,
            shift=packed.shift,
            metrics=recorded["metrics"],
            dial=dial,
            routes=packed.routes,
            data={**recorded["data"], "rows": len(data.train), "clicks": clicks},
            training={**recorded["training"], "all_rows": True},
            profile=data.profile,
        )


def whole_log(fit: Path, summary: RefitSummary, data: PreparedData) -> WholeLog:
    """Return the rows that a fit's shipped model has learned from; `data` are those that it was measured on."""
    grown = fit / summary.directory / ROWS
    return WholeLog(grown if grown.is_dir() else data.path, verify=False)
