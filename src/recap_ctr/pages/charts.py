"""Charts, described once: as SVG for the page, as PNG for slides, and their numbers as CSV."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["line", "points", "bars", "columns"]
Z = 1.96  # Half the width of a 95 % interval, in standard errors.
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 34, 56
# Units per character of text on a narrow screen, where the page's style makes letters larger, and per bar.
CHARACTER, BAR = 12, 24
# The colours of Okabe and Ito, which colour-blind readers can tell apart; the page's dark theme lightens some.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#555555")
MARKS = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Series:
    """Points of one colour. For bars, `labels` name the bars and `x` only counts them.

    Columns stand on the horizontal axis and have no gaps, as in a histogram; `x` are the middles of equal ranges.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Lower ends of the points' intervals; empty if they have none."""
    high: tuple[float, ...] = ()
    """Upper ends of the points' intervals; empty if they have none."""
    kind: Kind = "line"
    labels: tuple[str, ...] = ()
    """A name for each point, where the series' name does not say enough."""
    dashed: bool = False

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "labels"):
            values = getattr(self, name)
            if len(values) != len(self.x) and (values or name == "y"):
                raise ValueError(
                    f"series {self.name!r} has {len(self.x)} values of x, but {len(values)} of {name}"
                )

    def tip(self, index: int, digits: int) -> str:
        """Return the text that hovering over a point shows; `digits` are the decimals of y."""
        name = self.labels[index] if self.labels else self.name
        text = f"{name}: {_number(self.x[index])}, {self.y[index]:.{digits}f}"
        if self.low:
            text += f" [{self.low[index]:.{digits}f}, {self.high[index]:.{digits}f}]"
        return text


@dataclass(frozen=True)
class Chart:
    """One or more series over the same two axes."""

    name: str
    """The name of the chart's files and its anchor on the page."""
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    log_x: bool = False
    diagonal: bool = False
    """Draw y = x, where the theory or perfect calibration would put the points."""
    digits: int = 4
    """Decimals of y in the text that hovering shows."""


def share_intervals(
    shares: Sequence[float], counts: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lower and the upper ends of the 95 % intervals (Wilson) of shares, each of a number of rows.

    >>> low, high = share_intervals([0.0, 0.5], [20, 20])
    >>> [round(end, 2) for end in (*low, *high)]
    [0.0, 0.3, 0.16, 0.7]
    """
    lows, highs = [], []
    for share, count in zip(shares, counts, strict=True):
        extra = Z**2 / count
        middle = (share + extra / 2) / (1 + extra)
        half = Z / (1 + extra) * math.sqrt(share * (1 - share) / count + extra / (4 * count))
        lows.append(max(middle - half, 0.0))
        highs.append(min(middle + half, 1.0))
    return tuple(lows), tuple(highs)


def to_csv(chart: Chart) -> str:
    """Return the numbers of a chart as CSV, one row per point."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["series", "label", chart.x_label, chart.y_label, "low", "high"])
    for series in chart.series:
        for index in range(len(series.x)):
            ends = [series.low[index], series.high[index]] if series.low else ["", ""]
            label = series.labels[index] if series.labels else ""
            writer.writerow([series.name, label, series.x[index], series.y[index], *ends])
    return text.getvalue()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover the range from `low` to `high`.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(90.41, 91.27)
    [90.4, 90.6, 90.8, 91.0, 91.2]
    """
    if high <= low:
        return [low]
    ideal_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(ideal_step))
    round_steps = (factor * power for factor in (1, 2, 2.5, 5, 10))
    step = min(round_steps, key=lambda round_step: abs(round_step - ideal_step))
    first = math.floor(low / step + 1e-9)
    values = [round((first + i) * step, 12) for i in range(count * 3)]
    return [value for value in values if low - 0.51 * step <= value <= high + 1e-6 * step]


@dataclass(frozen=True)
class _Axis:
    """A range of values, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Mark whole numbers only: there is nothing between one epoch and the next."""

    def pixel(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            values = [tick for tick in ticks(self.low, self.high) if self.low <= tick <= self.high]
            return [tick for tick in values if tick == round(tick)] if self.whole else values
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
        if len(values) < 3:  # Less than a decade: round numbers between those of 1, 2 and 5.
            values = [tick for tick in ticks(self.low, self.high, 3) if self.low <= tick <= self.high]
        # Over many decades, only the powers of ten are marked.
        return values if len(values) <= 8 else [value for value in values if f"{value:e}"[0] == "1"]


def _range_with_margin(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Return the range of `values`, widened a little so that no mark sits on an axis."""
    low, high = min(values), max(values)
    if log:
        return low / 1.15, high * 1.15
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def _axes(chart: Chart) -> tuple[_Axis, _Axis]:
    xs = [x for series in chart.series for x in series.x]
    ys = [y for series in chart.series for y in (*series.y, *series.low, *series.high)]
    columns = [series for series in chart.series if series.kind == "columns"]
    if columns:
        ys.append(0.0)
        xs += [
            x + side * _column_width(series) / 2 for series in columns for x in series.x for side in (-1, 1)
        ]
    if chart.diagonal:
        both = [*xs, *ys]
        xs, ys = both, both
    x_range, y_range = _range_with_margin(xs, log=chart.log_x), _range_with_margin(ys)
    whole = all(value == round(value) for value in xs) and max(xs) - min(xs) >= 1
    y_axis = _Axis(*y_range, HEIGHT - BOTTOM, TOP)
    left = max(LEFT, 16 + CHARACTER * max((len(_number(tick)) for tick in y_axis.ticks()), default=0))
    return _Axis(*x_range, left, WIDTH - RIGHT, chart.log_x, whole), y_axis


def _number(value: float) -> str:
    """Return a number as short, readable text.

    >>> [_number(x) for x in (0.25, 1000.0, 201538.0, 90.6)]
    ['0.25', '1,000', '201,538', '90.6']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def to_svg(chart: Chart) -> str:
    """Return the chart as SVG that takes its colours from the page and whose points carry their text."""
    if not any(series.x for series in chart.series):
        raise ValueError(f"chart {chart.name!r} has no points")
    bars = [series for series in chart.series if series.kind == "bars"]
    body = _bars(chart, bars) if bars else _plot(chart)
    height = _bars_height(bars) if bars else HEIGHT
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}"'
        f' xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _plot(chart: Chart) -> str:
    """Return lines and points over a grid."""
    x_axis, y_axis = _axes(chart)
    parts = [_grid(chart, x_axis, y_axis)]
    if chart.diagonal:
        ends = max(x_axis.low, y_axis.low), min(x_axis.high, y_axis.high)
        (x1, y1), (x2, y2) = ((x_axis.pixel(end), y_axis.pixel(end)) for end in ends)
        parts.append(f'<line class="theory" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for number, series in enumerate(chart.series):
        style = f"s{number % len(COLOURS)}"
        if series.kind == "columns":
            parts += _columns(series, x_axis, y_axis, style, chart.digits)
            continue
        points = [(x_axis.pixel(x), y_axis.pixel(y)) for x, y in zip(series.x, series.y, strict=True)]
        parts += _intervals(series, x_axis, y_axis, style)
        if series.kind == "line" and len(points) > 1:
            dashed = " dashed" if series.dashed else ""
            parts.append(f'<polyline class="line {style}{dashed}" points="{_path(points)}"/>')
        parts += [
            mark_svg(MARKS[number % len(MARKS)], x, y, style, series.tip(index, chart.digits))
            for index, (x, y) in enumerate(points)
        ]
    return "".join(parts)


def _column_width(series: Series) -> float:
    return (series.x[-1] - series.x[0]) / (len(series.x) - 1) if len(series.x) > 1 else 1.0


def _columns(series: Series, x_axis: _Axis, y_axis: _Axis, style: str, digits: int) -> list[str]:
    """Return columns on the horizontal axis."""
    half = _column_width(series) / 2
    parts = []
    for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        left, right, top = x_axis.pixel(x - half), x_axis.pixel(x + half), y_axis.pixel(y)
        tip = escape(series.tip(index, digits))
        parts.append(
            f'<rect class="mark {style} column" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}"'
            f' height="{y_axis.pixel(0.0) - top:.1f}" data-tip="{tip}"><title>{tip}</title></rect>'
        )
    return parts


def _intervals(series: Series, x_axis: _Axis, y_axis: _Axis, style: str) -> list[str]:
    """Return the intervals of a series: a band around a line, or a whisker through each point."""
    if not series.low:
        return []
    xs = [x_axis.pixel(x) for x in series.x]
    lows, highs = ([y_axis.pixel(y) for y in ends] for ends in (series.low, series.high))
    if series.kind == "line":
        outline = [*zip(xs, highs, strict=True), *reversed([*zip(xs, lows, strict=True)])]
        return [f'<polygon class="band {style}" points="{_path(outline)}"/>']
    return [
        f'<line class="whisker {style}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        for x, low, high in zip(xs, lows, highs, strict=True)
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def mark_svg(shape: str, x: float, y: float, style: str, tip: str = "") -> str:
    """Return a mark, whose shape is one of MARKS, centred at (x, y); hovering over it shows `tip`."""
    tag, place = {
        "circle": ("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="4"'),
        "square": ("rect", f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'),
        "triangle": ("path", f'd="M{x:.1f} {y - 5:.1f}l4.6 8h-9.2z"'),
        "diamond": ("path", f'd="M{x:.1f} {y - 5:.1f}l4.6 5l-4.6 5l-4.6 -5z"'),
    }[shape]
    tip_attribute = f' data-tip="{escape(tip)}"' if tip else ""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<{tag} {place} class="mark {style}"{tip_attribute}>{title}</{tag}>'


def _grid(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.pixel(tick)
        parts.append(
            f'<line class="grid" x1="{x_axis.start}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{x_axis.start - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    parts += _vertical_grid(x_axis)
    parts.append(_bottom_label(chart.x_label, HEIGHT))
    # The label stands above the numbers, not beside them: turned text is hard to read, and takes their room.
    parts.append(f'<text class="axis" x="8" y="20">{escape(chart.y_label)}</text>')
    return "".join(parts)


def _vertical_grid(axis: _Axis, height: int = HEIGHT) -> list[str]:
    """Return the grid lines and numbers of the horizontal axis."""
    parts = []
    for tick in axis.ticks():
        x = axis.pixel(tick)
        parts.append(f'<line class="grid" y1="{TOP}" y2="{height - BOTTOM}" x1="{x:.1f}" x2="{x:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 21}" text-anchor="middle">{_number(tick)}</text>'
        )
    return parts


def _bottom_label(text: str, height: int) -> str:
    """Return the label of the horizontal axis."""
    return f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 9}" text-anchor="end">{escape(text)}</text>'


def _bars_height(series: Sequence[Series]) -> int:
    """Return a height with room for the names of all bars."""
    return max(HEIGHT, TOP + BOTTOM + BAR * len(series[0].labels))


def _bars(chart: Chart, series: Sequence[Series]) -> str:
    """Return horizontal bars with their names on the left, one colour per series."""
    names, height = series[0].labels, _bars_height(series)
    left = min(max(70, 16 + CHARACTER * max(map(len, names))), WIDTH // 2)
    longest = (left - 16) // CHARACTER
    low = min(0.0, *(value for bars in series for value in (*bars.y, *bars.low)))
    high = max(0.0, *(value for bars in series for value in (*bars.y, *bars.high)))
    axis = _Axis(low, high * 1.05 or 1.0, left, WIDTH - RIGHT)
    group_height = (height - BOTTOM - TOP) / max(len(names), 1)
    bar_height = min(0.8 * group_height / len(series), 26.0)
    parts = _vertical_grid(axis, height)
    for index, name in enumerate(names):
        middle = TOP + (index + 0.5) * group_height
        shown = name if len(name) <= longest else name[: longest - 1] + "…"
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
        )
        for number, bars in enumerate(series):
            y = middle - bar_height * len(series) / 2 + number * bar_height
            x1, x2 = sorted((axis.pixel(0.0), axis.pixel(bars.y[index])))
            tip = escape(f"{name}, {bars.name}: {bars.y[index]:.{chart.digits}f}")
            parts.append(
                f'<rect class="mark s{number}" x="{x1:.1f}" y="{y:.1f}" width="{max(x2 - x1, 0.5):.1f}"'
                f' height="{bar_height - 1:.1f}" data-tip="{tip}"><title>{tip}</title></rect>'
            )
            if bars.low:
                ends = axis.pixel(bars.low[index]), axis.pixel(bars.high[index])
                parts.append(
                    f'<line class="whisker" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y + bar_height / 2:.1f}"'
                    f' y2="{y + bar_height / 2:.1f}"/>'
                )
    parts.append(_bottom_label(chart.y_label, height))
    return "".join(parts)


def to_png(chart: Chart) -> bytes:
    """Return the chart as a PNG image, for slides and Markdown; the same chart gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=125, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = [series for series in chart.series if series.kind == "bars"]
    for number, series in enumerate(chart.series):
        if series.kind == "bars":
            _draw_bars(axes, series, number, len(bars))
        else:
            _draw_points(axes, series, number)
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
    # `savefig` would draw the same twice.
    canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def _draw_bars(axes: "Axes", series: Series, number: int, num_series: int) -> None:
    height = 0.8 / num_series
    middles = [index + (number - (num_series - 1) / 2) * height for index in range(len(series.y))]
    colour = COLOURS[number % len(COLOURS)]
    axes.barh(middles, series.y, height=0.95 * height, color=colour, label=literal(series.name))


def _draw_points(axes: "Axes", series: Series, number: int) -> None:
    if series.kind == "columns":
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(
            series.x, series.y, _column_width(series), color=colour, alpha=0.6, label=literal(series.name)
        )
        return
    colour, marker = COLOURS[number % len(COLOURS)], "os^D"[number % 4]
    line = ("--" if series.dashed else "-") if series.kind == "line" else ""
    label = literal(series.name)
    axes.plot(series.x, series.y, line, marker=marker, markersize=4, color=colour, label=label)
    if series.low and series.kind == "line":
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    elif series.low:
        axes.vlines(series.x, series.low, series.high, color=colour)


def literal(text: str) -> str:
    r"""Return `text` with its dollars escaped, since matplotlib reads text between two dollars as mathematics.

    >>> print(literal("$_per_$"))
    \$_per_\$
    """
    return text.replace("$", r"\$")
