"""Tables of arms over seeds, in Markdown and LaTeX, and the files that tables are written to.

An arm is one config, trained once for each of its seeds. Arms are compared seed by seed.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recap_ctr.bench.arms import METRICS, Arm
from recap_ctr.bench.significance import Difference, holm, paired_difference
from recap_ctr.errors import InputError
from recap_ctr.storage.files import atomic_file, make_directory

NONE = "–"
NO_TEST = "There is no test split: these rows also stopped training and fitted the calibration, so all figures flatter."
# Cells are written once, as plain text; this makes LaTeX of them, and of names that users chose.
TO_LATEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "±": r"$\pm$",
        "×": r"$\times$",
        "−": "$-$",
        "Δ": r"$\Delta$",
        "✓": r"\checkmark{}",
        "–": "--",
        "†": r"$^\dagger$",
    }
)


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


def markdown(title: str, arms: Sequence[Arm], baseline_name: str, note: str = "") -> str:
    """Return the table in Markdown, with its title above and its notes below, the last of them `note`."""

    def write(cell: _Cell) -> str:
        text = cell.text.replace("|", r"\|")
        return f"**{text}**" if cell.best else text

    cells = _cells(arms, baseline_name)
    header, *body = (f"| {' | '.join(map(write, line))} |" for line in cells)
    under = "|---" * len(cells[0]) + "|"
    return "\n".join([f"**{title}**", "", header, under, *body, "", _note(arms, baseline_name, note)])


def latex(caption: str, label: str, arms: Sequence[Arm], baseline_name: str, note: str = "") -> str:
    """Return the table as a LaTeX float with the notes in its caption; it needs the packages booktabs and amssymb."""

    def write(cell: _Cell) -> str:
        text = cell.text.translate(TO_LATEX)
        return rf"\textbf{{{text}}}" if cell.best else text

    cells = _cells(arms, baseline_name)
    header, *body = (rf"{' & '.join(map(write, line))} \\" for line in cells)
    title = f"{caption.removesuffix('.')}.".translate(TO_LATEX)
    return latex_float(
        rf"\textbf{{{title}}} {_note(arms, baseline_name, note).translate(TO_LATEX)}",
        label,
        f"l{'c' * (len(cells[0]) - 1)}",
        [header],
        body,
    )


def latex_float(caption: str, label: str, columns: str, header: Sequence[str], body: Sequence[str]) -> str:
    """Return a LaTeX table of lines that are LaTeX already; `columns` are their alignments."""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *header,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _find(arms: Sequence[Arm], name: str) -> Arm:
    matches = [arm for arm in arms if arm.name == name]
    if len(matches) != 1:
        names = ", ".join(repr(arm.name) for arm in arms)
        raise InputError(
            f"{len(matches)} arms have the baseline's name {name!r}", fix=f"the arms are {names}"
        )
    return matches[0]


def _note(arms: Sequence[Arm], baseline_name: str, last: str) -> str:
    note = (
        f"Figures of the {arms[0].split} split, AUC in points; ± is the standard deviation over seeds."
        f" ΔAUC is the difference from {baseline_name}, paired over seeds, which share initial weights and the order of"
        " rows: 95% interval and p of a two-tailed t-test, p corrected by Holm for all arms."
    )
    if any(arm.conditional for arm in arms):
        note += " Students share their teachers, so that their p-values are conditional on these teachers."
    return f"{note} {last}".rstrip()


def _cells(arms: Sequence[Arm], baseline_name: str) -> list[list[_Cell]]:
    """Return the header and the cells of each arm, as plain text."""
    baseline = _find(arms, baseline_name)
    marks = list(dict.fromkeys(mark for arm in arms for mark in arm.marks))
    header = ["arm", *marks, "seeds", "parameters", "AUC", "logloss", "calibrated logloss", "ΔAUC", "p"]
    best = {
        metric: (max if metric == "auc" else min)(means)
        for metric in METRICS
        if (means := [statistics.mean(arm.figures[metric]) for arm in arms if metric in arm.figures])
    }
    differences = {
        index: paired_difference(baseline, arm, "auc")
        for index, arm in enumerate(arms)
        if arm is not baseline
    }
    corrected = holm(
        {str(at): gap.p for at, gap in differences.items() if gap is not None and gap.p is not None}
    )
    table = [[_Cell(text) for text in header]]
    for index, arm in enumerate(arms):
        ticks = ["✓" if arm.marks.get(mark) else NONE for mark in marks]
        size = NONE if arm.parameters is None else f"{arm.parameters:,}"
        gap = differences.get(index)
        seeds = max(len(arm.seeds), len(baseline.seeds))
        difference = (NONE, NONE) if gap is None else _difference_text(gap, seeds, corrected.get(str(index)))
        table.append(
            [
                *(_Cell(text) for text in (arm.name, *ticks, str(len(arm.seeds)), size)),
                *(_figure(arm, metric, best.get(metric)) for metric in METRICS),
                *(_Cell(text) for text in difference),
            ]
        )
    return table


def _figure(arm: Arm, metric: str, best: float | None) -> _Cell:
    if metric not in arm.figures:
        return _Cell(NONE)
    values = arm.figures[metric]
    scale, digits = (100, 3) if metric == "auc" else (1, 5)
    return _Cell(spread(values, digits, scale), statistics.mean(values) == best)


def _difference_text(difference: Difference, seeds: int, p: float | None) -> tuple[str, str]:
    """Return a difference in points with its interval, and p; and of how many seeds it is, if there are more."""
    text = _points(difference.mean)
    if difference.low is not None and difference.high is not None:
        text += f" [{_points(difference.low)}, {_points(difference.high)}]"
    shared = len(difference.seeds)
    if shared < seeds:
        text += f" over {shared} seed{'s' * (shared > 1)}"
    return text, NONE if p is None else p_text(p)


def _points(value: float) -> str:
    return f"{100 * value:+z.3f}".replace("-", "−")


def p_text(p: float) -> str:
    """Return a p-value as text.

    >>> p_text(0.0123), p_text(0.0000123)
    ('0.012', '<0.001')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Return the mean, with the standard deviation where there are several values; no text for no values.

    >>> spread([0.9, 0.91], 2, 100), spread([0.5], 3), spread([], 3)
    ('90.50 ± 0.71', '0.500', '')
    """
    if not values:
        return ""
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{deviation}"


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose cells are Markdown already.

    >>> grid(["model", "AUC"], [["FCN", "90.8"]])
    ['| model | AUC |', '| --- | --- |', '| FCN | 90.8 |']
    """
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *body)]


def write_files(directory: Path, name: str, contents: Mapping[str, str | bytes]) -> None:
    """Write `contents` as files NAME.SUFFIX, by suffix; each file appears whole or not at all."""
    make_directory(directory)
    for suffix, content in contents.items():
        with atomic_file(directory / f"{name}.{suffix}") as file:
            file.write(content.encode() if isinstance(content, str) else content)
