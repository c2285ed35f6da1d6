"""The report of a fit: the shipped student's own, with its teachers, their ensembles, and what averaging them gains."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from recap_ctr.axes.logits import LogitTable, mean_logit
from recap_ctr.data.quality import field_quality, repeated_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, Curve, curve
from recap_ctr.evaluation.calibrate import fitting
from recap_ctr.evaluation.evaluate import Metrics, evaluate
from recap_ctr.evaluation.sampling import negative_rate_shift, sampling_weights, undo_sampling
from recap_ctr.recipe.choice import Choice
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.training.parallel import Runs, teacher_tables
from recap_ctr.training.references import compare_with_reference, held_out_logits
from recap_ctr.training.report import EnsembleFigures, FitReport, TeacherSummary, read_report
from recap_ctr.training.run import LOGITS, held_out_shards


def fit_report(
    config: RecipeConfig,
    plan: dict[str, Any],
    data: PreparedData,
    out: Path,
    teachers: Runs,
    students: Runs,
    choice: Choice,
    references: Mapping[str, Path],
) -> FitReport:
    """Return the report of a fit in `out` that ships `choice`; `references` are directories of logit tables by name."""
    chosen = choice.path
    student = {**students, **teachers}.get(chosen) or read_report(chosen)
    split = student.metrics.split
    ensembles = measure_ensembles(config, data, list(teachers))
    gains: dict[str, Any] = {"recovered": None}
    if len(teachers) > 1:
        alone = mean(report.metrics.on(split).raw.auc for report in teachers.values())
        together = ensembles[-1].metrics.on(split).raw.auc
        gain = student.metrics.on(split).raw.auc - alone
        gains = {
            "recovered": gain / (together - alone) if together > alone else None,
            "size_against_teacher": student.parameters / next(iter(teachers.values())).parameters,
            "averaging": _averaging_curve(config, data, list(teachers), split),
        }
    values = {name: getattr(student, name) for name in student.model_fields_set}
    values |= {"fields": field_quality(data), "repeated": repeated_rows(data)}
    values |= {"date": datetime.now(UTC).date().isoformat()}
    logits = held_out_logits(chosen / LOGITS, data)
    values["reference"] = {
        name: compare_with_reference(logits, held_out_logits(tables, data), data, config.negative_rate)
        for name, tables in references.items()
    }
    return FitReport(
        **values,
        recipe=config.model_dump(mode="json"),
        plan={**plan, "given_up": list(plan["given_up"])},
        student=str(chosen.relative_to(out)),
        chosen_because=choice.reason,
        students={str(path.relative_to(out)): report.metrics for path, report in students.items()},
        teacher_runs={
            str(path.relative_to(out)): TeacherSummary(
                metrics=report.metrics,
                seed=report.train.seed,
                parameters=report.parameters,
                epochs=len(report.history),
                seconds=report.seconds,
            )
            for path, report in teachers.items()
        },
        ensembles=ensembles,
        **gains,
    )


def measure_ensembles(
    config: RecipeConfig, data: PreparedData, teachers: Sequence[Path]
) -> list[EnsembleFigures]:
    """Calibrate and measure the mean logit of the first 1, 2, .. teachers like a model."""
    calibrate, shards = fitting(config.calibration), held_out_shards(data)
    ensembles = []
    for count in range(1, len(teachers) + 1):
        predictions = {
            split: undo_sampling(
                mean_logit([LogitTable(path) for path in teacher_tables(teachers[:count], split)]),
                shard,
                config.negative_rate,
            )
            for split, shard in shards.items()
        }
        calibration = calibrate(data.valid.labels, *predictions["valid"])
        figures = {
            split: evaluate(shards[split].labels, logits, calibration, weights=weights)
            for split, (logits, weights) in predictions.items()
        }
        ensembles.append(EnsembleFigures(teachers=count, metrics=Metrics(**figures)))
    return ensembles


def _averaging_curve(config: RecipeConfig, data: PreparedData, teachers: Sequence[Path], split: str) -> Curve:
    """Return what the mean of more and more teachers gains, with what Eq. 6 predicts from their disagreement."""
    shard = held_out_shards(data)[split]
    tables = [LogitTable(path) for path in teacher_tables(teachers, split)]
    cube = Cube.from_tables(tables, shift=negative_rate_shift(config.negative_rate))
    return curve(cube, shard.labels, "run", weights=sampling_weights(shard, config.negative_rate))
