"""Table 1 as text: marks, stars, and what is shown beside our figures."""

import csv
import io

import pytest

from recap_ctr.bench.arms import Arm
from recap_ctr.bench.significance import compare, detectable_difference
from recap_ctr.bench.table1_text import best_two, latex, markdown, to_csv


def arm(name: str, *aucs: float) -> Arm:
    """Return an arm whose logloss is what its AUC lacks of 1."""
    rest = tuple(1 - auc for auc in aucs)
    figures = {"auc": aucs, "logloss": rest, "calibrated_logloss": rest}
    return Arm(name, {}, tuple(range(1, len(aucs) + 1)), figures, parameters=100)


ARMS = {
    "lr": arm("LR", 0.70),
    "qnn": arm("QNN", 0.80, 0.802, 0.801),
    "fcn": arm("FCN", 0.79, 0.795, 0.792),
    "recap": arm("RECAP", 0.82, 0.823, 0.8205),
}


ORIGINS = {"lr": "ours", "qnn": "published", "fcn": "published", "recap": "tuned"}


def test_gap_and_p_are_of_all_seeds() -> None:
    fcn = arm("FCN", 0.79, 0.792, 0.791)
    ours = arm("RECAP", 0.80, 0.8021)
    comparison = compare({"fcn": fcn, "recap": ours}, "recap")["fcn"]
    assert comparison.gap == pytest.approx(0.01005)
    assert comparison.p is not None and comparison.p < 0.05
    text = markdown("toy", {"fcn": fcn, "recap": ours}, "", ORIGINS)
    line = next(line for line in text.splitlines() if "FCN" in line)
    assert "+1.005" in line


def test_the_star_is_of_the_single_test_against_the_best_baseline() -> None:
    """Its p needs no correction for the comparisons with other models: the paper makes none."""
    arms = {f"m{i}": arm(f"m{i}", 0.6, 0.7, 0.5) for i in range(30)}
    arms |= {"fcn": arm("FCN", 0.79, 0.79, 0.79), "recap": arm("RECAP", 0.80, 0.8021, 0.8012)}
    comparison = compare(arms, "recap")["fcn"]
    assert comparison.uncorrected_p is not None and comparison.p is not None
    assert comparison.uncorrected_p < 0.01 < comparison.p
    assert "80.11*" in latex({"toy": arms}, "", {"toy": dict.fromkeys(arms, "ours")})


def test_no_model_that_takes_a_mark_is_left_out() -> None:
    arms = {"lcn": arm("LCN", 0.9), "recap": arm("RECAP", 0.8)}
    text = latex({"toy": arms}, "", {"toy": dict.fromkeys(arms, "ours")})
    assert r"LCN & \textbf{0.1000} & \textbf{90.00}" in text and r"\underline{80.00}" in text


def test_best_is_bold_second_underlined_and_published_figures_are_beside() -> None:
    text = markdown("ml-1m", ARMS, "A title", ORIGINS)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "**82.117" in lines["RECAP"] and "<u>80.100" in lines["QNN"]
    assert lines["FCN"].endswith("| 90.74 | 0.3001 | 90.76 | 0.3015 |")
    assert (
        "Public log: what a run by the published settings printed" in text
        and "on another random split" in text
    )
    unpublished = markdown("my-clicks", ARMS, "A title", ORIGINS)
    assert "Published:" not in unpublished and "Public log:" not in unpublished
    assert "could detect" in text and "conditional" in text
    assert best_two(ARMS, "logloss") == ("recap", "qnn")


def test_the_detectable_difference_is_that_of_the_tables_test() -> None:
    """The best baseline has the smaller p of two here, so that Holm tests it at half of the level."""
    qnn, fcn = arm("QNN", 0.80, 0.802, 0.801), arm("FCN", 0.77, 0.80, 0.79)
    recap = arm("RECAP", 0.82, 0.823, 0.8205)
    least = detectable_difference(recap, qnn, 0.025)
    assert least is not None
    text = markdown("toy", {"qnn": qnn, "fcn": fcn, "recap": recap}, "", dict.fromkeys(ARMS, "ours"))
    assert (
        "Smallest difference from the best baseline, QNN, that these seeds could detect by the table's test"
        in text
    )
    assert f"5 % / 2; power 80 %): {100 * least:.3f} points." in text
    alone = markdown("toy", {"qnn": qnn, "recap": recap}, "", dict.fromkeys(ARMS, "ours"))
    assert "leaves it, 5 %; power" in alone


def test_latex_has_all_data_sets_side_by_side() -> None:
    text = latex(
        {"one": ARMS, "two_2": {"fcn": ARMS["fcn"]}}, "A caption.", {"one": ORIGINS, "two_2": {"fcn": "ours"}}
    )
    row = next(line for line in text.splitlines() if line.startswith("RECAP"))
    assert row.count("&") == 4 and row.count("--") == 2
    assert r"two\_2" in text and r"\underline{80.10}" in text


def test_models_at_their_defaults_are_marked_in_every_form() -> None:
    """They are no fair rivals of a model whose settings were found for these data."""
    origins = {"toy": {**ORIGINS, "qnn": "defaults"}}
    text = latex({"toy": ARMS}, "A caption.", origins)
    lines = {line.split(" &")[0]: line for line in text.splitlines() if " &" in line}
    assert lines["QNN"].count(r"}$^\dagger$") == 2 and "dagger" not in lines["FCN"] + lines["RECAP"]
    assert r"$^\dagger$: by default settings" in text
    assert "dagger" not in latex({"toy": ARMS}, "A caption.", {"toy": ORIGINS})
    rows = csv.DictReader(io.StringIO(to_csv({"toy": ARMS}, origins)))
    assert {row["model"]: row["settings"] for row in rows} == origins["toy"]


def test_csv_has_a_line_for_each_model() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv({"toy": ARMS}, {"toy": ORIGINS}))))
    assert [row["model"] for row in rows] == list(ARMS)
    assert float(rows[2]["auc_mean"]) == pytest.approx(0.7923333)
    assert rows[0]["auc_sd"] == ""
