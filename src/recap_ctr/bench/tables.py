"""Tables of arms over seeds, from the reports of their runs, in Markdown and LaTeX.

An arm is one setting, trained once for each of its seeds. Arms are compared seed by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr, stdtrit  # Student's t: distribution function and its inverse

from recap_ctr.errors import InputError

METRICS = {  # where a report has them, under scores and split
    "auc": ("raw", "auc"),
    "logloss": ("raw", "logloss"),
    "calibrated_logloss": ("calibrated", "logloss"),
}
NONE = "–"
# Cells are written once, as plain text; this makes LaTeX of them and of the names that are given.
TO_LATEX = str.maketrans(
    {
        "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": "$<$", ">": "$>$", "|": "$|$",
        "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "Δ": r"$\Delta$", "✓": r"\checkmark{}", "–": "--",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One setting and its figures, one for each seed."""

    name: str
    marks: dict[str, bool]  # ticks, such as {"EMA": True, "KD": False}; may be empty
    seeds: tuple[int, ...]
    figures: dict[str, tuple[float, ...]]  # by the names in METRICS
    parameters: int | None = None
    cost: float | None = None  # of scoring a row, relative to one FCN
    conditional: bool = False  # the runs share their teachers, whose luck the seeds then don't show
    split: str = "test"

    def __post_init__(self) -> None:
        count = len(self.seeds)
        if count == 0 or len(set(self.seeds)) < count:
            raise InputError(
                f"arm {self.name!r} has the seeds {self.seeds}", fix="give each of its runs once"
            )
        for metric, values in self.figures.items():
            if metric not in METRICS:
                raise InputError(
                    f"arm {self.name!r}: no metric {metric!r}", fix=f"known are {', '.join(METRICS)}"
                )
            if len(values) != count:
                raise InputError(
                    f"arm {self.name!r} has {count} seeds, but {len(values)} values of {metric!r}"
                )


NO_TEST = "There is no test split: these rows also stopped training and fitted the calibration, so all figures flatter."


def arm_of(
    name: str,
    reports: Sequence[Mapping[str, Any]],
    *,
    marks: Mapping[str, bool] | None = None,
    cost: float | None = None,
    scores: str = "metrics",
    split: str | None = None,
) -> Arm:
    """The arm of some runs, from their reports.

    `scores` names the part of a report that holds the figures of each split. They are taken from the test
    split, or from the validation split if a report has no other; `split` says it outright.
    """
    if split is None:
        split = "test" if all("test" in report[scores] for report in reports) else "valid"
    sizes = {report["parameters"] for report in reports}
    if len(sizes) > 1:
        raise InputError(
            f"arm {name!r} has runs of {sorted(sizes)} parameters", fix="give runs of one setting"
        )
    in_order = sorted(reports, key=lambda report: int(report["train"]["seed"]))
    return Arm(
        name=name,
        marks=dict(marks or {}),
        seeds=tuple(report["train"]["seed"] for report in in_order),
        figures={
            metric: tuple(report[scores][split][kind][key] for report in in_order)
            for metric, (kind, key) in METRICS.items()
        },
        parameters=next(iter(sizes), None),
        cost=cost,
        conditional=any(report.get("teachers") for report in reports),
        split=split,
    )


@dataclass(frozen=True)
class Paired:
    """A mean difference over shared seeds. What these are too few for is None."""

    mean: float | None  # None: no seed is shared
    standard_error: float | None
    low: float | None  # 95% confidence interval
    high: float | None
    p: float | None  # two-tailed
    seeds: tuple[int, ...]


def paired(one: Arm, other: Arm, metric: str) -> Paired:
    """`other` minus `one` over the seeds that both have, by Student's t.

    If all differences are equal there is no p, except that it is 1 if they are all 0.
    """
    if one.split != other.split:
        raise InputError(
            f"{one.name!r} has figures of the {one.split} split, {other.name!r} of the {other.split} split",
            fix="compare arms on the same rows",
        )
    first, second = _by_seed(one, metric), _by_seed(other, metric)
    seeds = tuple(seed for seed in one.seeds if seed in second)
    gaps = [second[seed] - first[seed] for seed in seeds]
    if len(gaps) < 2:
        return Paired(gaps[0] if gaps else None, None, None, None, None, seeds)

    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    rounding = 1e-14 * max(abs(each[seed]) for each in (first, second) for seed in seeds)
    if error <= rounding:
        return Paired(mean, 0.0, mean, mean, 1.0 if abs(mean) <= rounding else None, seeds)
    freedom = len(gaps) - 1
    reach = error * float(stdtrit(freedom, 0.975))
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    return Paired(mean, error, mean - reach, mean + reach, p, seeds)


def _by_seed(arm: Arm, metric: str) -> dict[int, float]:
    if metric not in arm.figures:
        raise InputError(f"arm {arm.name!r} has no {metric!r}, only {', '.join(arm.figures) or 'nothing'}")
    return dict(zip(arm.seeds, arm.figures[metric], strict=True))


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


def markdown(title: str, arms: Sequence[Arm], baseline_name: str) -> str:
    """The table with its title above and its note below."""

    def write(cell: _Cell) -> str:
        text = cell.text.replace("|", r"\|")
        return f"**{text}**" if cell.best else text

    cells = _cells(arms, baseline_name)
    header, *body = (f"| {' | '.join(map(write, line))} |" for line in cells)
    under = "|---" * len(cells[0]) + "|"
    return "\n".join([f"**{title}**", "", header, under, *body, "", _note(arms, baseline_name)])


def latex(caption: str, label: str, arms: Sequence[Arm], baseline_name: str) -> str:
    """The table as a float with the note in its caption; it needs the packages booktabs and amssymb."""

    def write(cell: _Cell) -> str:
        text = cell.text.translate(TO_LATEX)
        return rf"\textbf{{{text}}}" if cell.best else text

    cells = _cells(arms, baseline_name)
    header, *body = (rf"{' & '.join(map(write, line))} \\" for line in cells)
    title = f"{caption.removesuffix('.')}.".translate(TO_LATEX)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{\textbf{{{title}}} {_note(arms, baseline_name).translate(TO_LATEX)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{l{'c' * (len(cells[0]) - 1)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _find(arms: Sequence[Arm], name: str) -> Arm:
    found = [arm for arm in arms if arm.name == name]
    if len(found) != 1:
        names = ", ".join(repr(arm.name) for arm in arms)
        raise InputError(f"{len(found)} arms have the baseline's name {name!r}", fix=f"the arms are {names}")
    return found[0]


def _note(arms: Sequence[Arm], baseline_name: str) -> str:
    note = (
        f"Figures of the {arms[0].split} split, AUC in points; ± is the standard deviation over seeds."
        f" ΔAUC is the difference from {baseline_name}, paired over seeds: 95% interval and p of a two-tailed t-test."
    )
    if any(arm.conditional for arm in arms):
        note += " Students share their teachers, so that their p-values are conditional on these teachers."
    return note


def _cells(arms: Sequence[Arm], baseline_name: str) -> list[list[_Cell]]:
    """The header and one line for each arm, as plain text."""
    baseline = _find(arms, baseline_name)
    marks = list(dict.fromkeys(mark for arm in arms for mark in arm.marks))
    with_cost = any(arm.cost is not None for arm in arms)
    header = ["arm", *marks, "seeds", "parameters", *(["cost"] if with_cost else [])]
    header += ["AUC", "logloss", "calibrated logloss", "ΔAUC", "p"]
    best = {
        metric: (max if metric == "auc" else min)(means)
        for metric in METRICS
        if (means := [statistics.mean(arm.figures[metric]) for arm in arms if metric in arm.figures])
    }
    table = [[_Cell(text) for text in header]]
    for arm in arms:
        texts = [
            arm.name,
            *("✓" if arm.marks.get(mark) else NONE for mark in marks),
            str(len(arm.seeds)),
            NONE if arm.parameters is None else f"{arm.parameters:,}",
        ]
        if with_cost:
            texts.append(NONE if arm.cost is None else f"{arm.cost:.2f}×")
        difference, p = (NONE, NONE) if arm is baseline else _difference(baseline, arm)
        table.append(
            [
                *(_Cell(text) for text in texts),
                *(_figure(arm, metric, best.get(metric)) for metric in METRICS),
                _Cell(difference),
                _Cell(p),
            ]
        )
    return table


def _figure(arm: Arm, metric: str, best: float | None) -> _Cell:
    if metric not in arm.figures:
        return _Cell(NONE)
    values = arm.figures[metric]
    scale, digits = (100, 3) if metric == "auc" else (1, 5)
    return _Cell(spread(values, digits, scale), statistics.mean(values) == best)


def spread(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """The mean, with the standard deviation where there are several values; nothing of none.

    >>> spread([0.9, 0.91], 2, 100), spread([0.5], 3), spread([], 3)
    ('90.50 ± 0.71', '0.500', '')
    """
    if not values:
        return ""
    deviation = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{deviation}"


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, as they are.

    >>> grid(["model", "AUC"], [["FCN", "90.8"]])
    ['| model | AUC |', '| --- | --- |', '| FCN | 90.8 |']
    """
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)]


def _difference(baseline: Arm, arm: Arm) -> tuple[str, str]:
    """How far the arm's AUC lies from the baseline's, in points with its interval, and p."""
    found = paired(baseline, arm, "auc")
    if found.mean is None:
        return NONE, NONE
    text = _points(found.mean)
    if found.low is not None and found.high is not None:
        text += f" [{_points(found.low)}, {_points(found.high)}]"
    if len(found.seeds) < max(len(arm.seeds), len(baseline.seeds)):
        text += f" over {len(found.seeds)} seed{'s' * (len(found.seeds) > 1)}"
    if found.p is None:
        return text, NONE
    return text, "<0.001" if found.p < 0.001 else f"{found.p:.3f}"


def _points(value: float) -> str:
    return f"{100 * value:+z.3f}".replace("-", "−")
