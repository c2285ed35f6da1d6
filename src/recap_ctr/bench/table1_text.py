"""Table 1 as text, made of reports alone: in Markdown for each data set, in LaTeX and CSV for all of them."""

import csv
import io
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import mean, stdev

from recap_ctr.bench.arms import METRICS, Arm
from recap_ctr.bench.published import PAPER_ORDER, SAME_SPLIT, Published, logged, published
from recap_ctr.bench.significance import Comparison, compare, detectable_difference
from recap_ctr.bench.table1 import OURS, Treatment, read_arms, settings_of
from recap_ctr.bench.tables import (
    NO_TEST,
    NONE,
    TO_LATEX,
    grid,
    latex_float,
    p_text,
    spread,
    write_files,
)
from recap_ctr.errors import InputError

LEVEL = 0.01  # The significance that earns a star, as in the paper.
HEADER = [
    "model",
    "settings",
    "seeds",
    "parameters",
    "AUC",
    "logloss",
    "calibrated logloss",
    "RECAP minus it",
    "p",
    "published AUC",
    "published logloss",
    "public log: AUC",
    "public log: logloss",
]
DEFAULTS = "defaults"
"""The origin of settings that nobody has chosen for the data, which a table marks."""
Arms = Mapping[str, Arm]
"""Arms by model."""
Origins = Mapping[str, str]
"""Where each model's settings come from, in a word."""


TITLES = {
    Treatment.AS_PUBLISHED: "Baselines by their own training protocol, and RECAP",
    Treatment.AVERAGED: "Baselines with averaged weights, and RECAP",
    Treatment.TUNED: "Baselines with averaged weights, tuned as RECAP is",
}


def write_tables(
    reports_by_dataset: Mapping[str, Path],
    directory: Path,
    treatment: Treatment = Treatment.AS_PUBLISHED,
) -> str:
    """Write the tables of all data sets' reports to one directory; return the one in Markdown."""
    arms = {dataset: read_arms(reports, treatment) for dataset, reports in reports_by_dataset.items()}
    empty = [dataset for dataset, read in arms.items() if not read]
    if empty:
        raise InputError(f"no reports of {', '.join(empty)}", fix="run the table's cells first")
    origins = {
        dataset: {model: origin_of(model, reports, treatment) for model in arms[dataset]}
        for dataset, reports in reports_by_dataset.items()
    }
    sections = [
        markdown(dataset, arms[dataset], f"{TITLES[treatment]}, on {dataset}", origins[dataset])
        for dataset in reports_by_dataset
    ]
    contents = {
        "md": "\n\n".join(sections) + "\n",
        "tex": latex(arms, f"{TITLES[treatment]}.", origins),
        "csv": to_csv(arms, origins),
    }
    write_files(directory, "table1" + treatment.value, contents)
    return contents["md"]


def origin_of(model: str, reports: Path, treatment: Treatment) -> str:
    """Return where the settings of a model come from, in a word."""
    if model == OURS or treatment is Treatment.TUNED:
        return "tuned"
    return settings_of(model, reports).origin or "a file"


def best_two(arms: Arms, metric: str) -> tuple[str | None, str | None]:
    """Return the best model and the second best by their means; None where there is no such model."""
    in_order = sorted(arms, key=lambda name: mean(arms[name].figures[metric]), reverse=metric == "auc")
    return in_order[0] if in_order else None, in_order[1] if len(in_order) > 1 else None


def _best_baseline(arms: Arms) -> str:
    return max((name for name in arms if name != OURS), key=lambda name: mean(arms[name].figures["auc"]))


def markdown(dataset: str, arms: Arms, title: str, origins: Origins) -> str:
    """Return the table of one data set: best bold, second underlined, published figures beside ours."""
    comparisons = compare(arms, OURS)
    marks = {metric: best_two(arms, metric) for metric in METRICS}

    def figure(name: str, metric: str) -> str:
        scale, digits = (100, 3) if metric == "auc" else (1, 4)
        text = spread(arms[name].figures[metric], digits, scale)
        best, second = marks[metric]
        return f"**{text}**" if name == best else f"<u>{text}</u>" if name == second else text

    body = []
    for name, arm in arms.items():
        comparison = comparisons.get(name)
        difference = [NONE, NONE]
        if comparison is not None:
            p = NONE if comparison.p is None else p_text(comparison.p)
            difference = [f"{100 * comparison.gap:+.3f}", p]
        body.append(
            [
                arm.name,
                origins[name],
                str(len(arm.seeds)),
                NONE if arm.parameters is None else f"{arm.parameters:,}",
                *(figure(name, metric) for metric in METRICS),
                *difference,
                *_published_cells(published(dataset, name)),
                *_published_cells(logged(dataset, name)),
            ]
        )
    note = _note(dataset, arms, comparisons, set(origins.values()))
    return "\n".join([f"**{title}**", "", *grid(HEADER, body), "", note])


def _published_cells(figures: Published | None) -> tuple[str, str]:
    return (NONE, NONE) if figures is None else (f"{figures.auc:.2f}", f"{figures.logloss:.4f}")


ORIGINS = {
    "published": "published: by its authors for these data, or by a public run log",
    "ours": "ours: of this project",
    DEFAULTS: "defaults: none of its own were published; no fair rival, since RECAP's are found on validation",
    "tuned": "tuned: regulariser and what else the recipe probes, found on validation",
}


def _note(dataset: str, arms: Arms, comparisons: Mapping[str, Comparison], origins: Collection[str]) -> str:
    splits = sorted({arm.split for arm in arms.values()})
    sentences = [
        f"On {' and '.join(splits)} rows; AUC in points, mean ± standard deviation over seeds; best bold, second"
        " underlined.",
        *([NO_TEST] if "valid" in splits else []),
        *_sentences_on_published(dataset, arms),
    ]
    explained = [text for origin, text in ORIGINS.items() if origin in origins]
    if explained:
        sentences.append(f"Settings: {'; '.join(explained)}.")
    tested = sum(comparison.p is not None for comparison in comparisons.values())
    if tested:
        sentences.append(
            f"p: two-tailed Welch's t-test on AUC over seeds, corrected by Holm for the {tested} comparisons. RECAP's"
            " students share their teachers, so p is conditional on these."
        )
    if comparisons:
        sentences += _sentence_on_power(arms, comparisons)
    return " ".join(sentences)


def _sentence_on_power(arms: Arms, comparisons: Mapping[str, Comparison]) -> list[str]:
    """Return which difference from the best baseline the table's own test could detect, if it has one."""
    best = _best_baseline(arms)
    p = comparisons[best].uncorrected_p
    if p is None:
        return []
    # Holm tests the smallest p first; each is one of those that are not smaller.
    remaining = sum(
        other.uncorrected_p is not None and other.uncorrected_p >= p for other in comparisons.values()
    )
    least = detectable_difference(arms[OURS], arms[best], 0.05 / remaining)
    if least is None:
        return []
    level = "5 %" if remaining == 1 else f"5 % / {remaining}"
    return [
        f"Smallest difference from the best baseline, {arms[best].name}, that these seeds could detect by the table's"
        f" test (Welch's, at the level that Holm's correction leaves it, {level}; power 80 %): {100 * least:.3f}"
        " points."
    ]


def _sentences_on_published(dataset: str, arms: Arms) -> list[str]:
    """Return where published figures come from, if there are any of these models."""
    origins = {
        "Published": ("the figures of the RECAP paper and, for ECN, of FCN's", published),
        "Public log": ("what a run by the published settings printed, by its authors or BARS", logged),
    }
    split = "on the same folds" if dataset in SAME_SPLIT else "on another random split"
    return [
        f"{word}: {origin}, {split}; for reference only."
        for word, (origin, figures_of) in origins.items()
        if any(figures_of(dataset, name) for name in arms)
    ]


def latex(arms_by_dataset: Mapping[str, Arms], caption: str, origins: Mapping[str, Origins]) -> str:
    """Return all data sets side by side, as in the paper; a star where RECAP beats the best baseline at 1 %."""
    caption += " Best bold, second underlined; *: RECAP beats the best baseline, Welch's two-tailed t-test, p < 0.01."
    if any(DEFAULTS in of_models.values() for of_models in origins.values()):
        caption += (
            " †: by default settings, as none were published; no fair rival of settings that were probed."
        )
    titles = {name: arm.name for arms in arms_by_dataset.values() for name, arm in arms.items()}
    others = [name for name in titles if name not in PAPER_ORDER]
    models = [name for name in (*PAPER_ORDER[:-1], *others, PAPER_ORDER[-1]) if name in titles]
    columns = {
        (dataset, metric): _latex_column(arms, metric, origins[dataset])
        for dataset, arms in arms_by_dataset.items()
        for metric in ("logloss", "auc")
    }
    body = [
        " & ".join([titles[name].translate(TO_LATEX), *(cells.get(name, "--") for cells in columns.values())])
        + r" \\"
        for name in models
    ]
    datasets = [rf"\multicolumn{{2}}{{c}}{{{dataset.translate(TO_LATEX)}}}" for dataset in arms_by_dataset]
    metrics = ["", *["Logloss", r"AUC (\%)"] * len(datasets)]
    return (
        latex_float(
            caption.translate(TO_LATEX),
            "tab:main_results",
            f"l{'cc' * len(datasets)}",
            [rf"Models & {' & '.join(datasets)} \\", rf"{' & '.join(metrics)} \\"],
            body,
        )
        + "\n"
    )


def _latex_column(arms: Arms, metric: str, origins: Origins) -> dict[str, str]:
    """Return the cells of one metric by model, marked where they are best or second, or of default settings."""
    best, second = best_two(arms, metric)
    cells = {}
    for name, arm in arms.items():
        value = mean(arm.figures[metric])
        text = f"{100 * value:.2f}" if metric == "auc" else f"{value:.4f}"
        if metric == "auc" and name == OURS and _beats_best_baseline(arms):
            text += "*"
        mark = {best: r"\textbf{%s}", second: r"\underline{%s}"}.get(name, "%s")
        cells[name] = mark % text + ("†".translate(TO_LATEX) if origins[name] == DEFAULTS else "")
    return cells


def _beats_best_baseline(arms: Arms) -> bool:
    """Return whether RECAP is better than the best baseline, and significantly.

    This is a single test, so that its p needs no correction.
    """
    comparisons = compare(arms, OURS)
    if not comparisons:
        return False
    comparison = comparisons[_best_baseline(arms)]
    p = comparison.uncorrected_p
    return comparison.gap > 0 and p is not None and p < LEVEL


def to_csv(arms_by_dataset: Mapping[str, Arms], origins: Mapping[str, Origins]) -> str:
    """Return one line for each data set and model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ["data", "model", "settings", "seeds", "parameters"]
    writer.writerow([*columns, *(f"{metric}_{kind}" for metric in METRICS for kind in ("mean", "sd"))])
    for dataset, arms in arms_by_dataset.items():
        for name, arm in arms.items():
            figures: list[float | str] = []
            for metric in METRICS:
                values = arm.figures[metric]
                figures += [mean(values), stdev(values) if len(values) > 1 else ""]
            writer.writerow([dataset, name, origins[dataset][name], len(arm.seeds), arm.parameters, *figures])
    return text.getvalue()
