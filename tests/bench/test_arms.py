"""Arms: what they take of reports, and what they refuse."""

import pytest

from recap_ctr.bench.arms import Arm, arm_of
from recap_ctr.errors import InputError
from tests.support.arms import arm, report
from tests.support.bench_files import report_of


def test_arm_of_reports() -> None:
    student = arm_of(
        "student",
        [report(2, 0.9, 0.3, 0.29, teachers=("sum",)), report(1, 0.8, 0.4, 0.39, teachers=("sum",))],
    )
    assert student == Arm(
        name="student",
        marks={},
        seeds=(1, 2),
        figures={"auc": (0.8, 0.9), "logloss": (0.4, 0.3), "calibrated_logloss": (0.39, 0.29)},
        parameters=201_760,
        conditional=True,
        split="test",
    )
    apart = arm_of("apart", [report(seed, 0.9, 0.3, 0.29, teachers=(f"teacher {seed}",)) for seed in (1, 2)])
    assert not apart.conditional, "each has a teacher of its own"
    shared = arm_of("shared", [report(seed, 0.9, 0.3, 0.29, teachers=("sum",)) for seed in (1, 2)])
    assert shared.conditional and arm_of("one", [report(1, 0.9, 0.3, 0.29, teachers=("sum",))]).conditional
    older = report_of(1, parameters=201_760)
    assert "teachers" not in older.model_fields_set
    assert not arm_of("teacher", [older, report(2, 0.9, 0.3, 0.29)]).conditional


def test_without_test_rows_of_every_run_figures_are_of_validation() -> None:
    mixed = arm_of("mixed", [report(1, 0.7, 0.4, 0.39, split="valid"), report(2, 0.9, 0.4, 0.39)])
    assert mixed.split == "valid"
    assert mixed.figures["auc"] == (0.7, 0.5)


def test_bad_arms_are_named() -> None:
    with pytest.raises(InputError, match=r"arm 'a' has the seeds \(\)"):
        arm_of("a", [])
    with pytest.raises(InputError, match=r"arm 'a' has the seeds \(1, 1\)"):
        arm_of("a", [report(1, 0.8, 0.4, 0.4)] * 2)
    with pytest.raises(InputError, match="2 seeds, but 1 values of 'auc'"):
        Arm("a", {}, (1, 2), {"auc": (0.5,)})
    with pytest.raises(InputError, match="no metric 'acu'"):
        Arm("a", {}, (1,), {"acu": (0.5,)})
    with pytest.raises(InputError, match=r"runs of \[7, 201760\] parameters"):
        arm_of("a", [report(1, 0.8, 0.4, 0.4), report_of(2, parameters=7)])
    with pytest.raises(InputError, match="'a' has no 'logloss', only auc"):
        arm("a", 0.5).by_seed("logloss")
