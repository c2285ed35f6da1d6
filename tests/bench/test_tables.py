"""Tables of arms: their numbers against scipy, their text against golden strings."""

import statistics
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from recap_ctr.bench.tables import Arm, arm_of, latex, markdown, paired
from recap_ctr.errors import InputError


def arm(name: str, *aucs: float, first_seed: int = 1) -> Arm:
    return Arm(name, {}, tuple(range(first_seed, first_seed + len(aucs))), {"auc": aucs})


def report(
    seed: int,
    auc: float,
    logloss: float,
    calibrated: float,
    split: str = "test",
    teachers: tuple[str, ...] = (),
) -> dict[str, Any]:
    figures = {"raw": {"auc": auc, "logloss": logloss}, "calibrated": {"auc": auc, "logloss": calibrated}}
    worse = {"raw": {"auc": 0.5, "logloss": 1.0}, "calibrated": {"auc": 0.5, "logloss": 1.0}}
    return {
        "train": {"seed": seed},
        "metrics": {"valid": worse, split: figures},
        "parameters": 201_760,
        "teachers": list(teachers),
    }


def test_paired_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.8, 0.001, 5), rng.normal(0.801, 0.001, 5)
    found = paired(arm("a", *first), arm("b", *second), "auc")
    expected = ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)

    assert found.mean == pytest.approx((second - first).mean(), rel=1e-12)
    assert found.standard_error == pytest.approx((second - first).std(ddof=1) / 5**0.5, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.seeds == (1, 2, 3, 4, 5)


def test_paired_by_hand() -> None:
    """Differences 1 and 3: mean 2, error 1; with one degree of freedom t is Cauchy's, its 97.5% point 12.706."""
    found = paired(arm("a", 0.0, 0.0), arm("b", 1.0, 3.0), "auc")
    assert (found.mean, found.standard_error) == pytest.approx((2.0, 1.0))
    assert (found.low, found.high) == pytest.approx((2 - 12.7062047, 2 + 12.7062047))
    assert found.p == pytest.approx(1 - 2 * np.arctan(2) / np.pi)


def test_paired_turns_its_sign_with_the_arms() -> None:
    a, b = arm("a", 0.1, 0.2, 0.4), arm("b", 0.3, 0.3, 0.3)
    there, back = paired(a, b, "auc"), paired(b, a, "auc")
    assert there.p == back.p
    assert (there.low, there.high) == (-float(back.high or 0), -float(back.low or 0))


def test_paired_takes_the_shared_seeds_whatever_their_order() -> None:
    one = Arm("a", {}, (3, 1, 2), {"auc": (0.3, 0.1, 0.2)})
    other = Arm("b", {}, (2, 3, 4), {"auc": (0.5, 0.7, 9.0)})
    found = paired(one, other, "auc")
    assert found.seeds == (3, 2)
    assert found.mean == pytest.approx(statistics.mean([0.7 - 0.3, 0.5 - 0.2]))


def test_too_few_seeds_give_a_difference_at_most() -> None:
    found = paired(arm("a", 0.5, 0.6), arm("b", 0.7, 0.9, first_seed=2), "auc")
    assert found.mean == pytest.approx(0.1)
    assert (found.standard_error, found.low, found.high, found.p, found.seeds) == (
        None,
        None,
        None,
        None,
        (2,),
    )
    assert paired(arm("a", 0.5), arm("b", 0.7, first_seed=2), "auc").mean is None


def test_equal_differences_have_no_p_unless_they_are_zero() -> None:
    a = arm("a", 0.1, 0.2, 0.3)
    same = paired(a, a, "auc")
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    shifted = paired(
        a, arm("b", *(value + 0.1 for value in (0.1, 0.2, 0.3))), "auc"
    )  # equal but for rounding
    assert (shifted.standard_error, shifted.p) == (0.0, None)
    assert shifted.low == shifted.high == shifted.mean == pytest.approx(0.1)


def test_arm_of_reports() -> None:
    made = arm_of(
        "student", [report(2, 0.9, 0.3, 0.29, teachers=("sum",)), report(1, 0.8, 0.4, 0.39)], cost=1.9
    )
    assert made == Arm(
        name="student",
        marks={},
        seeds=(1, 2),
        figures={"auc": (0.8, 0.9), "logloss": (0.4, 0.3), "calibrated_logloss": (0.39, 0.29)},
        parameters=201_760,
        cost=1.9,
        conditional=True,
        split="test",
    )
    older = report(1, 0.8, 0.4, 0.39)
    del older["teachers"]
    assert not arm_of("teacher", [older, report(2, 0.9, 0.3, 0.29)]).conditional


def test_arm_of_other_scores_and_splits() -> None:
    one = report(1, 0.8, 0.4, 0.39)
    one["routes"] = {"test": {"raw": {"auc": 0.81, "logloss": 0.38}, "calibrated": {"logloss": 0.37}}}
    assert arm_of("routes", [one], scores="routes").figures["auc"] == (0.81,)
    assert arm_of("valid", [one], split="valid").figures["auc"] == (0.5,)
    without = [report(1, 0.7, 0.4, 0.39, split="valid"), report(2, 0.9, 0.4, 0.39)]
    assert arm_of("mixed", without).split == "valid"
    assert arm_of("mixed", without).figures["auc"] == (0.7, 0.5)


def ablation() -> list[Arm]:
    both = [
        report(1, 0.8162, 0.4381, 0.438),
        report(2, 0.8164, 0.4379, 0.438),
        report(3, 0.8163, 0.438, 0.4382),
    ]
    ema = [
        report(1, 0.8167, 0.4376, 0.4375),
        report(2, 0.8168, 0.4375, 0.4374),
        report(3, 0.8169, 0.4374, 0.4373),
    ]
    student = [report(1, 0.8172, 0.4371, 0.437, teachers=("a", "b"))]
    return [
        arm_of("FCN", both, marks={"EMA": False, "KD": False}),
        arm_of("+ EMA", ema, marks={"EMA": True, "KD": False}),
        arm_of("+ EMA & KD_5", student, marks={"EMA": True, "KD": True}),
    ]


MARKDOWN = """\
**Estimator scaling, 100%**

| arm | EMA | KD | seeds | parameters | AUC | logloss | calibrated logloss | ΔAUC | p |
|---|---|---|---|---|---|---|---|---|---|
| FCN | – | – | 3 | 201,760 | 81.630 ± 0.010 | 0.43800 ± 0.00010 | 0.43807 ± 0.00012 | – | – |
| + EMA | ✓ | – | 3 | 201,760 | 81.680 ± 0.010 | 0.43750 ± 0.00010 | \
0.43740 ± 0.00010 | +0.050 [+0.025, +0.075] | 0.013 |
| + EMA & KD_5 | ✓ | ✓ | 1 | 201,760 | **81.720** | **0.43710** | **0.43700** | +0.100 over 1 seed | – |

Figures of the test split, AUC in points; ± is the standard deviation over seeds. \
ΔAUC is the difference from FCN, paired over seeds: 95% interval and p of a two-tailed t-test. \
Students share their teachers, so that their p-values are conditional on these teachers."""

LATEX = r"""\begin{table}
\centering
\caption{\textbf{Estimator scaling, 100\%.} Figures of the test split, AUC in points; @
$\pm$ is the standard deviation over seeds. @
$\Delta$AUC is the difference from FCN, paired over seeds: 95\% interval and p of a two-tailed t-test. @
Students share their teachers, so that their p-values are conditional on these teachers.}
\label{tab:fcn_scaling}
\begin{tabular}{lccccccccc}
\toprule
arm & EMA & KD & seeds & parameters & AUC & logloss & calibrated logloss & $\Delta$AUC & p \\
\midrule
FCN & -- & -- & 3 & 201,760 & 81.630 $\pm$ 0.010 & 0.43800 $\pm$ 0.00010 & 0.43807 $\pm$ 0.00012 & -- & -- \\
+ EMA & \checkmark{} & -- & 3 & 201,760 & 81.680 $\pm$ 0.010 & 0.43750 $\pm$ 0.00010 & @
0.43740 $\pm$ 0.00010 & +0.050 [+0.025, +0.075] & 0.013 \\
+ EMA \& KD\_5 & \checkmark{} & \checkmark{} & 1 & 201,760 & \textbf{81.720} & \textbf{0.43710} & @
\textbf{0.43700} & +0.100 over 1 seed & -- \\
\bottomrule
\end{tabular}
\end{table}""".replace("@\n", "")


def test_markdown_is_golden() -> None:
    assert markdown("Estimator scaling, 100%", ablation(), "FCN") == MARKDOWN


@pytest.mark.parametrize("caption", ["Estimator scaling, 100%", "Estimator scaling, 100%."])
def test_latex_is_golden(caption: str) -> None:
    assert latex(caption, "tab:fcn_scaling", ablation(), "FCN") == LATEX


def cells(arms: list[Arm], baseline: str) -> dict[str, dict[str, str]]:
    """The Markdown table by arm and column."""
    lines = [
        line[2:-2].split(" | ") for line in markdown("t", arms, baseline).splitlines() if line[:2] == "| "
    ]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


def test_cost_is_shown_where_one_is_known() -> None:
    assert "cost" not in cells(ablation(), "FCN")["FCN"]
    found = cells([arm("a", 0.8), Arm("b", {}, (1,), {"auc": (0.9,)}, parameters=1_000, cost=1.9)], "a")
    assert [found[name]["cost"] for name in "ab"] == ["–", "1.90×"]
    assert [found[name]["parameters"] for name in "ab"] == ["–", "1,000"]


def test_figures_that_an_arm_lacks_are_dashes() -> None:
    found = cells([arm("published", 0.8162), ablation()[0]], "FCN")
    assert [found["published"][name] for name in ("logloss", "calibrated logloss")] == ["–", "–"]
    assert found["FCN"]["logloss"].startswith("**")


def test_low_logloss_is_best_and_ties_are_all_bold() -> None:
    arms = [
        Arm(name, {}, (1,), {"auc": (0.5,), "logloss": (loss,)}) for name, loss in (("a", 0.4), ("b", 0.3))
    ]
    found = cells(arms, "a")
    assert [found[name]["logloss"] for name in "ab"] == ["0.40000", "**0.30000**"]
    assert [found[name]["AUC"] for name in "ab"] == ["**50.000**"] * 2


def test_differences_say_what_they_rest_on() -> None:
    baseline = arm("base", 0.80, 0.81, 0.82)
    found = cells(
        [
            baseline,
            arm("some", 0.80, 0.82, 0.9, first_seed=2),
            arm("none", 0.9, first_seed=9),
            arm("same", 0.80, 0.81, 0.82),
            arm("sure", 0.70001, 0.71002, 0.72003),
        ],
        "base",
    )
    assert found["some"]["ΔAUC"] == "−0.500 [−6.853, +5.853] over 2 seeds"
    assert (found["none"]["ΔAUC"], found["none"]["p"]) == ("–", "–")
    assert (found["same"]["ΔAUC"], found["same"]["p"]) == ("+0.000 [+0.000, +0.000]", "1.000")
    assert (found["sure"]["ΔAUC"], found["sure"]["p"]) == ("−9.998 [−10.000, −9.996]", "<0.001")


def test_signs_become_math_in_latex() -> None:
    text = latex("c", "l", [arm("5 × a|b", 0.80, 0.81), arm("{x}\\~^$#", 0.79, 0.8001)], "5 × a|b")
    assert r"5 $\times$ a$|$b &" in text
    assert r"\{x\}\textbackslash{}\textasciitilde{}\textasciicircum{}\$\# &" in text
    assert "$-$0.995 [$-$1.059, $-$0.931]" in text
    assert r"| 5 × a\|b |" in markdown("t", [arm("5 × a|b", 0.8)], "5 × a|b")


def test_validation_figures_are_called_so() -> None:
    made = arm_of("FCN", [report(1, 0.8, 0.4, 0.39, split="valid")])
    assert "Figures of the valid split" in markdown("t", [made], "FCN")
    assert "Figures of the valid split" in latex("c", "l", [made], "FCN")
    with pytest.raises(InputError, match="of the valid split, 'b' of the test split"):
        markdown("t", [made, arm("b", 0.8)], "FCN")


def test_only_students_are_conditional() -> None:
    assert "teachers" not in markdown("t", ablation()[:2], "FCN")


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
        arm_of("a", [report(1, 0.8, 0.4, 0.4), {**report(2, 0.8, 0.4, 0.4), "parameters": 7}])
    with pytest.raises(InputError, match="'a' has no 'logloss', only auc"):
        paired(arm("a", 0.5), arm("b", 0.5), "logloss")
    with pytest.raises(InputError, match="0 arms have the baseline's name 'c'"):
        markdown("t", [arm("a", 0.5), arm("b", 0.5)], "c")
    with pytest.raises(InputError, match="2 arms have the baseline's name 'a'"):
        latex("c", "l", [arm("a", 0.5), arm("a", 0.5)], "a")
