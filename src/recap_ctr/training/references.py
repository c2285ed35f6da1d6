"""Models to compare with, each trained to its best on the same encoded rows: what a result must beat.

They are kept as logit tables, like any estimator, so that they can be compared with a model row by row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import BLOCK_ROWS, Estimator, LogitTable, LogitWriter, is_table
from recap_ctr.config import TrainConfig
from recap_ctr.data.levels import levels_of
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.levels import calibrated
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.storage.files import make_directory, read_object, write_json
from recap_ctr.training.config import LOGITS
from recap_ctr.training.report import REPORT, Reference, read_report
from recap_ctr.training.trees import fit_trees

LOGISTIC, TREES = "logistic regression", "LightGBM"
HOW_IT_ENDED = "ended.json"  # Beside the logit tables of the trees.
Array = npt.NDArray[Any]
CONVERGED = TrainConfig(update="convex")


def write_tree_logits(
    data: str, out: str, threads: int, deadline: float | None = None, quiet: bool = False
) -> None:
    """Fit boosted trees and write their logits over all rows to tables in `out`, unless they are there.

    The arguments are plain, for a job. At the `deadline`, a time of `time.time`, the trees so far are taken, and a file
    beside the tables says so.
    """
    prepared, directory = PreparedData(Path(data)), Path(out)
    splits = [split for split in ("train", "valid", "test") if len(getattr(prepared, split))]
    if all(is_table(directory / split) for split in splits):
        return
    fitted = fit_trees(prepared, threads=threads, deadline=deadline, quiet=quiet)
    make_directory(directory)
    write_json(directory / HOW_IT_ENDED, {"cut": fitted.is_cut})
    for split in splits:
        shard: Shard = getattr(prepared, split)
        with LogitWriter(directory / split, prepared, split, [Estimator(TREES)]) as writer:
            for start in range(0, len(shard), BLOCK_ROWS):
                block = shard.take(np.arange(start, min(start + BLOCK_ROWS, len(shard))))
                writer.write(fitted.logits(block)[:, None])


def was_cut(tables: Path) -> bool:
    """Return whether a deadline ended the training of the reference with these logit tables; False if nobody knows."""
    if (tables / HOW_IT_ENDED).is_file():
        return bool(read_object(tables / HOW_IT_ENDED, "a note")["cut"])
    run = tables.parent
    return tables.name == LOGITS and (run / REPORT).is_file() and read_report(run).cut


def held_out_logits(tables: Path, data: PreparedData) -> dict[str, Array]:
    """Return the logits of the held-out rows from the tables of one estimator."""
    splits = [split for split in ("valid", "test") if len(getattr(data, split))]
    return {split: np.asarray(LogitTable(tables / split).logits_NM[:, 0]) for split in splits}


def compare_with_reference(
    model: Mapping[str, Array],
    reference: Mapping[str, Array],
    data: PreparedData,
    negative_rate: float,
    *,
    calibration: str = "affine",
    is_cut: bool = False,
) -> dict[str, Reference]:
    """Return a reference's figures by split, and how far the model is ahead; both are raw logits by split.

    The reference is calibrated as the model is, by the `calibration` of that name. `is_cut` says that a budget ended
    the reference's training early.
    """
    logits, weights = undo_sampling(reference["valid"], data.valid, negative_rate)
    levels = levels_of(data, [data.valid], negative_rate)
    calibrate = calibrated(calibration, levels, data.valid.labels, logits, weights)
    compared = {
        split: _compare(model[split], reference[split], getattr(data, split), negative_rate, calibrate)
        for split in reference
    }
    return {
        split: each.model_copy(update={"cut": True}) if is_cut else each for split, each in compared.items()
    }


def _compare(
    model: Array, reference: Array, shard: Shard, negative_rate: float, calibration: Calibration
) -> Reference:
    labels = shard.labels
    model_logits, weights = undo_sampling(model, shard, negative_rate)
    reference_logits, _ = undo_sampling(reference, shard, negative_rate)
    figures = {
        "auc": metrics.auc(labels, reference_logits, weights),
        "logloss": metrics.logloss(labels, reference_logits, weights),
        "calibrated_logloss": metrics.logloss(labels, calibration.apply(reference_logits), weights),
    }
    if not metrics.are_comparable(labels):
        return Reference(**figures)
    lead = metrics.auc_difference(labels, model_logits, reference_logits, weights)
    gain = metrics.logloss_difference(labels, reference_logits, model_logits, weights)
    return Reference(
        **figures,
        lead=lead.difference,
        lead_error=lead.standard_error,
        logloss_gain=gain.difference,
        logloss_gain_error=gain.standard_error,
    )
