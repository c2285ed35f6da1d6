"""A chart is described once; it becomes interactive SVG for the page, a PNG beside it, and its numbers as CSV."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Kind = Literal["line", "points", "bars"]
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 12, 46
# Okabe and Ito's colours, which colour-blind readers tell apart; the page's dark theme lightens some.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#555555")
MARKS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Series:
    """Points that belong together; bars have names instead of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Lower and upper ends of intervals, where there are any."""
    high: tuple[float, ...] = ()
    kind: Kind = "line"
    labels: tuple[str, ...] = ()
    """What a point is, if x and y don't say it."""
    dashed: bool = False

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "labels"):
            values = getattr(self, name)
            if len(values) != len(self.x) and (values or name == "y"):
                raise ValueError(f"series {self.name!r} has {len(self.x)} points and {len(values)} of {name}")

    def tip(self, at: int, digits: int) -> str:
        """What hovering over a point says."""
        name = self.labels[at] if self.labels else self.name
        text = f"{name}: {_number(self.x[at])}, {self.y[at]:.{digits}f}"
        if self.low:
            text += f" [{self.low[at]:.{digits}f}, {self.high[at]:.{digits}f}]"
        return text


@dataclass(frozen=True)
class Chart:
    """Some series over common axes."""

    name: str
    """Of its files, and of its place on the page."""
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    log_x: bool = False
    diagonal: bool = False
    """Draw y = x: where the theory, or perfect calibration, would be."""
    digits: int = 4
    """Of y, in what hovering shows."""


def to_csv(chart: Chart) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["series", "label", chart.x_label, chart.y_label, "low", "high"])
    for series in chart.series:
        for at in range(len(series.x)):
            ends = [series.low[at], series.high[at]] if series.low else ["", ""]
            label = series.labels[at] if series.labels else ""
            writer.writerow([series.name, label, series.x[at], series.y[at], *ends])
    return text.getvalue()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range, about `count` of them.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(90.41, 91.27)
    [90.4, 90.6, 90.8, 91.0, 91.2]
    """
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda one: abs(one - rough))
    first = math.floor(low / step + 1e-9)
    found = [round((first + i) * step, 12) for i in range(count * 3)]
    return [value for value in found if low - 0.51 * step <= value <= high + 1e-6 * step]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Only whole numbers are marked: there is nothing between one epoch and the next."""

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            found = [tick for tick in ticks(self.low, self.high) if self.low <= tick <= self.high]
            return [tick for tick in found if tick == round(tick)] if self.whole else found
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
        return found if len(found) <= 8 else [value for value in found if f"{value:e}"[0] == "1"]


def _span(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Their range with a little room, so that no mark sits on an axis."""
    low, high = min(values), max(values)
    if log:
        return low / 1.15, high * 1.15
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    return low - room, high + room


def _axes(chart: Chart) -> tuple[_Axis, _Axis]:
    xs = [x for series in chart.series for x in series.x]
    ys = [y for series in chart.series for y in (*series.y, *series.low, *series.high)]
    if any(series.kind == "bars" for series in chart.series):
        ys.append(0.0)
    if chart.diagonal:
        both = [*xs, *ys]
        xs, ys = both, both
    x, y = _span(xs, log=chart.log_x), _span(ys)
    whole = all(value == round(value) for value in xs) and max(xs) - min(xs) >= 1
    return _Axis(*x, LEFT, WIDTH - RIGHT, chart.log_x, whole), _Axis(*y, HEIGHT - BOTTOM, TOP)


def _number(value: float) -> str:
    """Short and readable, as for an axis.

    >>> [_number(x) for x in (0.25, 1000.0, 201538.0, 90.6)]
    ['0.25', '1,000', '201,538', '90.6']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def to_svg(chart: Chart) -> str:
    """The chart as SVG whose colours follow the page, and whose points say what they are."""
    if not any(series.x for series in chart.series):
        raise ValueError(f"chart {chart.name!r} has no points")
    bars = [series for series in chart.series if series.kind == "bars"]
    body = _bars(chart, bars) if bars else _plot(chart)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}"'
        f' xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _plot(chart: Chart) -> str:
    x_axis, y_axis = _axes(chart)
    parts = [_grid(chart, x_axis, y_axis)]
    if chart.diagonal:
        ends = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
        (x1, y1), (x2, y2) = ((x_axis.at(v), y_axis.at(v)) for v in ends)
        parts.append(f'<line class="theory" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for number, series in enumerate(chart.series):
        spots = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(series.x, series.y, strict=True)]
        style = f"s{number % len(COLOURS)}"
        if series.low and series.kind == "line":
            above = [
                f"{x_axis.at(x):.1f},{y_axis.at(v):.1f}" for x, v in zip(series.x, series.high, strict=True)
            ]
            below = [
                f"{x_axis.at(x):.1f},{y_axis.at(v):.1f}" for x, v in zip(series.x, series.low, strict=True)
            ]
            parts.append(f'<polygon class="band {style}" points="{" ".join(above + below[::-1])}"/>')
        elif series.low:
            parts += [
                f'<line class="whisker {style}" x1="{x:.1f}" x2="{x:.1f}"'
                f' y1="{y_axis.at(low):.1f}" y2="{y_axis.at(high):.1f}"/>'
                for (x, _), low, high in zip(spots, series.low, series.high, strict=True)
            ]
        if series.kind == "line" and len(spots) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            dashed = " dashed" if series.dashed else ""
            parts.append(f'<polyline class="line {style}{dashed}" points="{path}"/>')
        parts += [
            mark(MARKS[number % len(MARKS)], x, y, style, series.tip(at, chart.digits))
            for at, (x, y) in enumerate(spots)
        ]
    return "".join(parts)


def mark(shape: str, x: float, y: float, style: str, tip: str = "") -> str:
    """One of MARKS, centred there; hovering over it says the tip."""
    tag, place = {
        "circle": ("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="4"'),
        "square": ("rect", f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'),
        "triangle": ("path", f'd="M{x:.1f} {y - 5:.1f}l4.6 8h-9.2z"'),
        "diamond": ("path", f'd="M{x:.1f} {y - 5:.1f}l4.6 5l-4.6 5l-4.6 -5z"'),
    }[shape]
    said = f' data-tip="{escape(tip)}"' if tip else ""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<{tag} {place} class="mark {style}"{said}>{title}</{tag}>'


def _grid(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(f'<line class="grid" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="{x:.1f}" x2="{x:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(tick)}</text>'
        )
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="14" y="{middle:.0f}" text-anchor="middle"'
        f' transform="rotate(-90 14 {middle:.0f})">{escape(chart.y_label)}</text>'
    )
    return "".join(parts)


def _bars(chart: Chart, series: Sequence[Series]) -> str:
    """Horizontal bars, each series a colour, names at their left."""
    names = series[0].labels
    left = min(max(70, 16 + 7 * max(map(len, names))), WIDTH // 2)
    low = min(0.0, *(v for one in series for v in (*one.y, *one.low)))
    high = max(0.0, *(v for one in series for v in (*one.y, *one.high)))
    axis = _Axis(low, high * 1.05 or 1.0, left, WIDTH - RIGHT)
    room = (HEIGHT - BOTTOM - TOP) / max(len(names), 1)
    thick = min(0.8 * room / len(series), 26.0)
    parts = []
    for tick in axis.ticks():
        x = axis.at(tick)
        parts.append(f'<line class="grid" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="{x:.1f}" x2="{x:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(tick)}</text>'
        )
    for at, name in enumerate(names):
        middle = TOP + (at + 0.5) * room
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for number, one in enumerate(series):
            y = middle - thick * len(series) / 2 + number * thick
            x1, x2 = sorted((axis.at(0.0), axis.at(one.y[at])))
            tip = escape(f"{name}, {one.name}: {one.y[at]:.{chart.digits}f}")
            parts.append(
                f'<rect class="mark s{number}" x="{x1:.1f}" y="{y:.1f}" width="{max(x2 - x1, 0.5):.1f}"'
                f' height="{thick - 1:.1f}" data-tip="{tip}"><title>{tip}</title></rect>'
            )
            if one.low:
                ends = axis.at(one.low[at]), axis.at(one.high[at])
                parts.append(
                    f'<line class="whisker" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + thick / 2:.1f}"'
                    f' y2="{y + thick / 2:.1f}"/>'
                )
    parts.append(
        f'<text class="axis" x="{(left + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return "".join(parts)


def to_png(chart: Chart) -> bytes:
    """The same chart as an image, for slides and for Markdown; the same chart gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = [series for series in chart.series if series.kind == "bars"]
    for number, series in enumerate(chart.series):
        colour = COLOURS[number % len(COLOURS)]
        if series.kind == "bars":
            height = 0.8 / len(bars)
            spots = [i + (number - (len(bars) - 1) / 2) * height for i in range(len(series.y))]
            axes.barh(spots, series.y, height=0.95 * height, color=colour, label=literal(series.name))
            continue
        mark = "os^D"[number % 4]
        line = ("--" if series.dashed else "-") if series.kind == "line" else ""
        axes.plot(
            series.x, series.y, line, marker=mark, markersize=4, color=colour, label=literal(series.name)
        )
        if series.low and series.kind == "line":
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
        elif series.low:
            axes.vlines(series.x, series.low, series.high, color=colour)
    if bars:
        axes.set_yticks(range(len(bars[0].labels)), [*map(literal, bars[0].labels)])
        axes.invert_yaxis()
        axes.set_xlabel(literal(chart.y_label))
    else:
        if chart.log_x:
            axes.set_xscale("log")
        axes.set_xlabel(literal(chart.x_label))
        axes.set_ylabel(literal(chart.y_label))
    if chart.diagonal:
        axes.axline((0, 0), slope=1, color="0.5", linestyle=":", linewidth=1)
    axes.set_title(literal(chart.title), fontsize=10)
    axes.grid(alpha=0.25)
    if len(chart.series) > 1:
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def literal(text: str) -> str:
    """For matplotlib, which takes what stands between two dollars for mathematics.

    >>> literal("$_per_$")
    '\\\\$_per_\\\\$'
    """
    return text.replace("$", r"\$")
