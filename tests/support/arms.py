"""Arms of a table, and reports to make them of."""

from recap_ctr.bench.arms import Arm
from recap_ctr.training.report import RunReport
from tests.support.bench_files import report_of, split_figures


def arm(name: str, *aucs: float, first_seed: int = 1) -> Arm:
    """Return an arm with one AUC for each seed."""
    return Arm(name, {}, tuple(range(first_seed, first_seed + len(aucs))), {"auc": aucs})


def report(
    seed: int,
    auc: float,
    logloss: float,
    calibrated: float,
    split: str = "test",
    teachers: tuple[str, ...] = (),
) -> RunReport:
    """Return a report with these figures on one split; those of the validation rows are worse, if that is another."""
    metrics = {"valid": split_figures(0.5, 1.0, 1.0), split: split_figures(auc, logloss, calibrated)}
    return report_of(seed, metrics=metrics, parameters=201_760, teachers=list(teachers))
