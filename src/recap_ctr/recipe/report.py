"""The report of a fit: the shipped student's own, with its teachers, their ensembles, and what averaging them gains."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from recap_ctr.axes.logits import LogitTable, mean_logit
from recap_ctr.data.levels import levels_of
from recap_ctr.data.quality import field_quality, repeated_rows
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.diagnose import Cube, Curve, curve
from recap_ctr.evaluation.evaluate import Metrics, evaluate
from recap_ctr.evaluation.levels import calibrated
from recap_ctr.evaluation.sampling import negative_rate_shift, sampling_weights, undo_sampling
from recap_ctr.recipe.choice import Choice
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.training.config import LOGITS
from recap_ctr.training.parallel import Runs, teacher_tables
from recap_ctr.training.references import compare_with_reference, held_out_logits, was_cut
from recap_ctr.training.report import (
    ArmSummary,
    EnsembleFigures,
    FitReport,
    TeacherSummary,
    TeachingStep,
    read_report,
)


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
    student = {**students, **teachers}.get(choice.path) or read_report(choice.path)
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
    return FitReport(
        **_shared_values(config, data, out, teachers, students, choice, references),
        plan={**plan, "given_up": list(plan["given_up"])},
        ensembles=ensembles,
        **gains,
    )


def portfolio_report(
    config: RecipeConfig,
    data: PreparedData,
    out: Path,
    *,
    teachers: Runs,
    students: Runs,
    choice: Choice,
    references: Mapping[str, Path],
    members: Sequence[Path],
    plan: dict[str, Any],
    arms: list[ArmSummary],
    teaching: list[TeachingStep],
) -> FitReport:
    """Return the report of a fit by portfolio; `members` are the tables of the teaching ensemble's members in turn."""
    return FitReport(
        **_shared_values(config, data, out, teachers, students, choice, references),
        plan=plan,
        ensembles=[measure_ensemble(config, data, members)] if members else [],
        arms=arms,
        teaching=teaching,
    )


def _shared_values(
    config: RecipeConfig,
    data: PreparedData,
    out: Path,
    teachers: Runs,
    students: Runs,
    choice: Choice,
    references: Mapping[str, Path],
) -> dict[str, Any]:
    """Return what every fit's report holds: the shipped run's own report, and what it is compared with."""
    chosen = choice.path
    shipped = {**students, **teachers}.get(chosen) or read_report(chosen)
    logits = held_out_logits(chosen / LOGITS, data)
    return {
        **{name: getattr(shipped, name) for name in shipped.model_fields_set},
        "fields": field_quality(data),
        "repeated": repeated_rows(data),
        "date": datetime.now(UTC).date().isoformat(),
        "reference": {
            name: compare_with_reference(
                logits,
                held_out_logits(tables, data),
                data,
                config.negative_rate,
                calibration=config.calibration,
                is_cut=was_cut(tables),
            )
            for name, tables in references.items()
        },
        "recipe": config.model_dump(mode="json"),
        "student": str(chosen.relative_to(out)),
        "chosen_because": choice.reason,
        "students": {str(path.relative_to(out)): report.metrics for path, report in students.items()},
        "teacher_runs": {
            str(path.relative_to(out)): TeacherSummary(
                metrics=report.metrics,
                seed=report.train.seed,
                parameters=report.parameters,
                epochs=len(report.history),
                seconds=report.seconds,
            )
            for path, report in teachers.items()
        },
    }


def measure_ensembles(
    config: RecipeConfig, data: PreparedData, teachers: Sequence[Path]
) -> list[EnsembleFigures]:
    """Calibrate and measure the mean logit of the first 1, 2, .. teachers like a model."""
    tables = [teacher / LOGITS for teacher in teachers]
    return [measure_ensemble(config, data, tables[: count + 1]) for count in range(len(tables))]


def measure_ensemble(config: RecipeConfig, data: PreparedData, tables: Sequence[Path]) -> EnsembleFigures:
    """Calibrate and measure the mean logit of several logit tables like a model; one may come more than once."""
    shards = held_out_shards(data)
    predictions = {
        split: undo_sampling(
            mean_logit([LogitTable(path / split) for path in tables]), shard, config.negative_rate
        )
        for split, shard in shards.items()
    }
    levels = levels_of(data, [data.valid], config.negative_rate)
    calibration = calibrated(config.calibration, levels, data.valid.labels, *predictions["valid"])
    figures = {
        split: evaluate(shards[split].labels, logits, calibration, weights=weights)
        for split, (logits, weights) in predictions.items()
    }
    return EnsembleFigures(teachers=len(tables), metrics=Metrics(**figures))


def _averaging_curve(config: RecipeConfig, data: PreparedData, teachers: Sequence[Path], split: str) -> Curve:
    """Return what the mean of more and more teachers gains, with what Eq. 6 predicts from their disagreement."""
    shard = held_out_shards(data)[split]
    tables = [LogitTable(path) for path in teacher_tables(teachers, split)]
    cube = Cube.from_tables(tables, shift=negative_rate_shift(config.negative_rate))
    return curve(cube, shard.labels, "run", weights=sampling_weights(shard, config.negative_rate))
