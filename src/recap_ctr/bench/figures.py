"""Figures and the files of a table: drawn without pyplot's global state, and the same numbers give the same bytes."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from recap_ctr.pages.charts import literal
from recap_ctr.storage.files import atomic_file, write_json

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)  # Okabe and Ito's, safe for all eyes
MARKERS = ("o", "s", "^", "D", "v", "P")  # so that no line is known by its colour alone
INK, PALE = "#000000", "#999999"
WIDTH, DPI = 8.0, 200  # inches; twice as sharp as the 800 pixels it is read at
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 11,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "lines.markersize": 5,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "recap",  # else ids are random
}
Draw = Callable[[Figure], None]


def render(draw: Draw, height: float) -> dict[str, bytes]:
    """A figure as PNG and as SVG, by suffix."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever this machine's own settings are
        matplotlib.style.use(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        found = {}
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            file = io.BytesIO()
            figure.savefig(file, format=suffix, dpi=DPI, metadata=metadata)
            found[suffix] = file.getvalue()
    return found


def series(axes: Axes, at: int, xs: Sequence[float], ys: Sequence[float], label: str, **style: Any) -> None:
    """One line in the colour and with the marker of its place."""
    axes.plot(xs, ys, color=COLOURS[at], marker=MARKERS[at], label=literal(label), **style)


@dataclass(frozen=True)
class Name:
    """What a point is called, and the colour it has."""

    text: str
    x: float
    y: float
    at: int


def names(figure: Figure, axes: Axes, wanted: Sequence[Name]) -> None:
    """Write each name beside its point where it hides no point and no other name; if there is no such place, nowhere.

    The first names choose first. All else must have been drawn.
    """
    figure.draw_without_rendering()  # from here on the axes' place is known
    size, inch = 7.0, 72 / figure.dpi
    spots = [axes.transData.transform((name.x, name.y)) * inch for name in wanted]
    frame = axes.bbox.get_points() * inch
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in spots]
    for name, (x, y) in zip(wanted, spots, strict=True):
        width = 0.62 * size * len(name.text)
        for side, dx, dy in product(("left", "right", "center"), (6, 0), (3, -9, 7, -13)):
            left = x + {"left": dx, "right": -dx - width, "center": -width / 2}[side]
            box = left, y + dy, left + width, y + dy + size
            clear = all(
                box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]
                for other in taken
            )
            if clear and frame[0][0] <= box[0] and box[2] <= frame[1][0] and frame[0][1] <= box[1]:
                axes.annotate(
                    name.text, (name.x, name.y), xytext=(left - x, dy), textcoords="offset points", fontsize=size,
                    parse_math=False, color=COLOURS[name.at],
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3},
                )  # fmt: skip
                taken.append(box)
                break


def legend(figure: Figure, axes: Axes, *, columns: int, title: str | None = None) -> None:
    """Below all panels, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, title=title)


def band(axes: Axes, middle: float, reach: float) -> None:
    """How far seeds alone would carry a point."""
    axes.axhspan(
        middle - reach, middle + reach, color=PALE, alpha=0.25, linewidth=0, label="± seed standard deviation"
    )


def sizes(axes: Axes, *, log: bool) -> None:
    """An axis of parameters, marked 200k or 1M."""
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.margins(0.1)
    axes.set_xlabel("stored parameters")


def short(count: float) -> str:
    """
    >>> short(201_760), short(1_500_000), short(50)
    ('202k', '1.5M', '50')
    """
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:g}"


def to_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """One line each; of several values, as of runs, their mean and standard deviation.

    >>> print(to_csv([{"name": "a", "auc": (0.5, 0.75)}, {"name": "b", "auc": (0.5,)}]), end="")
    name,auc_mean,auc_sd
    a,0.625,0.1767766952966369
    b,0.5,
    """
    flat = []
    for line in lines:
        row: dict[str, Any] = {}
        for key, value in line.items():
            if isinstance(value, tuple):
                row[f"{key}_mean"], row[f"{key}_sd"] = mean(value), stdev(value) if len(value) > 1 else ""
            else:
                row[key] = value
        flat.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def publish(
    directory: Path,
    text: str,
    about: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    draw: Draw,
    *,
    height: float,
) -> None:
    """A table's files, named as their directory: Markdown, all numbers as JSON and CSV, and the figure."""
    name = directory.name
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", {"kind": name, **about, "points": list(points)})
    files = {"md": text.encode(), "csv": to_csv(points).encode(), **render(draw, height)}
    for suffix, content in files.items():
        with atomic_file(directory / f"{name}.{suffix}") as file:
            file.write(content)
