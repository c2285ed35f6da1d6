"""Tables of arms: their text against golden strings."""

import pytest

from recap_ctr.bench.arms import Arm, arm_of
from recap_ctr.bench.tables import latex, markdown
from recap_ctr.errors import InputError
from tests.support.arms import arm, report


def ablation() -> list[Arm]:
    alone = [
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
        arm_of("FCN", alone, marks={"EMA": False, "KD": False}),
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
ΔAUC is the difference from FCN, paired over seeds, which share initial weights and the order of rows: 95% interval \
and p of a two-tailed t-test, p corrected by Holm for all arms. \
Students share their teachers, so that their p-values are conditional on these teachers."""

LATEX = r"""\begin{table}
\centering
\caption{\textbf{Estimator scaling, 100\%.} Figures of the test split, AUC in points; @
$\pm$ is the standard deviation over seeds. @
$\Delta$AUC is the difference from FCN, paired over seeds, which share initial weights and the order of rows: @
95\% interval and p of a two-tailed t-test, p corrected by Holm for all arms. @
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
    """Return the Markdown table by arm and column."""
    lines = [
        line[2:-2].split(" | ") for line in markdown("t", arms, baseline).splitlines() if line[:2] == "| "
    ]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


def test_parameters_are_shown_where_they_are_counted() -> None:
    table = cells([arm("a", 0.8), Arm("b", {}, (1,), {"auc": (0.9,)}, parameters=1_000)], "a")
    assert [table[name]["parameters"] for name in "ab"] == ["–", "1,000"]


def test_figures_that_an_arm_lacks_are_dashes() -> None:
    table = cells([arm("published", 0.8162), ablation()[0]], "FCN")
    assert [table["published"][name] for name in ("logloss", "calibrated logloss")] == ["–", "–"]
    assert table["FCN"]["logloss"].startswith("**")


def test_low_logloss_is_best_and_ties_are_all_bold() -> None:
    arms = [
        Arm(name, {}, (1,), {"auc": (0.5,), "logloss": (loss,)}) for name, loss in (("a", 0.4), ("b", 0.3))
    ]
    table = cells(arms, "a")
    assert [table[name]["logloss"] for name in "ab"] == ["0.40000", "**0.30000**"]
    assert [table[name]["AUC"] for name in "ab"] == ["**50.000**"] * 2


def test_differences_say_what_they_rest_on() -> None:
    baseline = arm("base", 0.80, 0.81, 0.82)
    table = cells(
        [
            baseline,
            arm("some", 0.80, 0.82, 0.9, first_seed=2),
            arm("none", 0.9, first_seed=9),
            arm("same", 0.80, 0.81, 0.82),
            arm("sure", 0.70001, 0.71002, 0.72003),
        ],
        "base",
    )
    assert table["some"]["ΔAUC"] == "−0.500 [−6.853, +5.853] over 2 seeds"
    assert (table["none"]["ΔAUC"], table["none"]["p"]) == ("–", "–")
    assert (table["same"]["ΔAUC"], table["same"]["p"]) == ("+0.000 [+0.000, +0.000]", "1.000")
    assert (table["sure"]["ΔAUC"], table["sure"]["p"]) == ("−9.998 [−10.000, −9.996]", "<0.001")


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


def test_the_baseline_must_be_one_arm() -> None:
    with pytest.raises(InputError, match="0 arms have the baseline's name 'c'"):
        markdown("t", [arm("a", 0.5), arm("b", 0.5)], "c")
    with pytest.raises(InputError, match="2 arms have the baseline's name 'a'"):
        latex("c", "l", [arm("a", 0.5), arm("a", 0.5)], "a")
