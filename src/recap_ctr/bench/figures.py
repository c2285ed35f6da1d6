"""Draw figures without pyplot's global state, so that equal numbers give equal bytes, and write the files of a
table."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from recap_ctr.bench.tables import write_files
from recap_ctr.pages.charts import literal
from recap_ctr.storage.files import write_json

# The colours of Okabe and Ito, which colour-blind readers can tell apart; the markers tell series apart without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, PALE = "#000000", "#999999"
WIDTH, DPI = 8.0, 200  # Inches, and dots per inch: twice as sharp as the 800 pixels that a figure is read at.
NAME_SIZE, POINT_RADIUS = 7.0, 3  # In units of 1/72 inch.
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
    "svg.fonttype": "none",  # Text stays text.
    "svg.hashsalt": "recap",  # Otherwise ids would be random.
}
Draw = Callable[[Figure], None]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def render(draw: Draw, height: float) -> dict[str, bytes]:
    """Return a figure as PNG and as SVG, by suffix."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # The settings of this machine must not show.
        matplotlib.style.use(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        images = {}
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            file = io.BytesIO()
            figure.savefig(file, format=suffix, dpi=DPI, metadata=metadata)
            images[suffix] = file.getvalue()
    return images


def series(
    axes: Axes, index: int, xs: Sequence[float], ys: Sequence[float], label: str, **style: Any
) -> None:
    """Draw one series, with the colour and the marker of its index."""
    axes.plot(xs, ys, color=COLOURS[index], marker=MARKERS[index], label=literal(label), **style)


@dataclass(frozen=True)
class Name:
    """The name of a point, with the index of its series."""

    text: str
    x: float
    y: float
    index: int


def write_names(figure: Figure, axes: Axes, names: Sequence[Name]) -> None:
    """Write each name next to its point, where it hides no point and no other name; leave out names without such a
    place.

    The first names choose first. Everything else must have been drawn before.
    """
    figure.draw_without_rendering()  # Only then is it known where the axes are.
    unit = 72 / figure.dpi
    spots = [axes.transData.transform((name.x, name.y)) * unit for name in names]
    (left, bottom), (right, _) = axes.bbox.get_points() * unit
    taken: list[Box] = [
        (x - POINT_RADIUS, y - POINT_RADIUS, x + POINT_RADIUS, y + POINT_RADIUS) for x, y in spots
    ]
    for name, (x, y) in zip(names, spots, strict=True):
        for box in _boxes(name.text, x, y):
            is_inside = left <= box[0] and box[2] <= right and bottom <= box[1]
            if is_inside and not any(_overlap(box, other) for other in taken):
                axes.annotate(
                    name.text,
                    (name.x, name.y),
                    xytext=(box[0] - x, box[1] - y),
                    textcoords="offset points",
                    fontsize=NAME_SIZE,
                    parse_math=False,
                    color=COLOURS[name.index],
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3},
                )
                taken.append(box)
                break


def _boxes(text: str, x: float, y: float) -> Iterator[Box]:
    """Yield the places for a name around its point, best first."""
    width = 0.62 * NAME_SIZE * len(text)
    for side, dx, dy in product(("left", "right", "center"), (6, 0), (3, -9, 7, -13)):
        left = x + {"left": dx, "right": -dx - width, "center": -width / 2}[side]
        yield left, y + dy, left + width, y + dy + NAME_SIZE


def _overlap(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def legend(figure: Figure, axes: Axes, *, columns: int, title: str | None = None) -> None:
    """Write the legend below all panels, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, title=title)


def band(axes: Axes, middle: float, reach: float) -> None:
    """Shade how far other seeds alone would move a point."""
    axes.axhspan(
        middle - reach, middle + reach, color=PALE, alpha=0.25, linewidth=0, label="± seed standard deviation"
    )


def parameter_axis(axes: Axes, *, log: bool) -> None:
    """Make the x axis one of stored parameters, with ticks such as 200k or 1M."""
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    axes.margins(0.1)
    axes.set_xlabel("stored parameters")


def short_count(count: float) -> str:
    """Return a count in thousands or millions.

    >>> short_count(201_760), short_count(1_500_000), short_count(50)
    ('202k', '1.5M', '50')
    """
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:g}"


def to_csv(points: Sequence[Mapping[str, Any]]) -> str:
    """Return points as CSV; several values, such as one for each run, become their mean and standard deviation.

    >>> print(to_csv([{"name": "a", "auc": (0.5, 0.75)}, {"name": "b", "auc": (0.5,)}]), end="")
    name,auc_mean,auc_sd
    a,0.625,0.1767766952966369
    b,0.5,
    """
    flat = []
    for point in points:
        columns: dict[str, Any] = {}
        for key, value in point.items():
            if isinstance(value, tuple):
                columns[f"{key}_mean"] = mean(value) if value else ""
                columns[f"{key}_sd"] = stdev(value) if len(value) > 1 else ""
            else:
                columns[key] = value
        flat.append(columns)
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
    """Write the files of a table, named as their directory: Markdown, all numbers as JSON and CSV, and the figure."""
    name = directory.name
    write_files(directory, name, {"md": text, "csv": to_csv(points), **render(draw, height)})
    write_json(directory / f"{name}.json", {"kind": name, **about, "points": list(points)})
