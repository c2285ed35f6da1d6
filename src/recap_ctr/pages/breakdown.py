"""Sections about slices of the held-out rows, and about what the scores are good for."""

from recap_ctr.evaluation.slices import Breakdown, Slice
from recap_ctr.pages.charts import Chart, Series, share_intervals
from recap_ctr.pages.page import Section, Table

Z = 1.96  # Half the width of a 95 % interval, in standard errors.
FEWEST = 10  # Clicks that a slice needs for an AUC and a ratio, and other rows that an AUC needs.
FIGURES = ("rows", "clicks", "AUC", "logloss", "mean score / click rate")


def breakdown_sections(breakdown: Breakdown, *, with_intervals: bool = False) -> list[Section]:
    """Return the sections of a breakdown; those without figures are left out.

    Click rates have intervals on request: those of rows with weights are not known.
    """
    sections = (_slices(breakdown, with_intervals), _ranking(breakdown), _scores(breakdown))
    return [section for section in sections if section is not None]


def _slices(breakdown: Breakdown, with_intervals: bool) -> Section | None:
    """Return the tables of slices by field and by time, and the chart of AUC over time."""
    tables = [_table(entry.field, entry.slices) for entry in breakdown.fields]
    charts: tuple[Chart, ...] = ()
    if breakdown.periods:
        tables.append(_table("period", breakdown.periods))
        chart = _calibration_chart(breakdown.periods, with_intervals)
        charts = () if chart is None else (chart,)
    if not tables:
        return None
    text = (
        f"The same figures on parts of the {breakdown.rows:,} {breakdown.split} rows: by the most frequent values of"
        " some fields (--set slices chooses them), and by ten equally long periods where the rows have times. A mean"
        " score above the click rate means that scores are too high for these rows; below it, too low. Figures that"
        f" fewer than {FEWEST} clicks, or other rows, say nothing about are left out."
    )
    return Section("Slices", text, tables=tuple(tables), charts=charts)


def _table(name: str, slices: list[Slice]) -> Table:
    return Table((name, *FIGURES), tuple(_row(part) for part in slices))


def _row(part: Slice) -> tuple[str, ...]:
    clicks = part.rows * part.base_rate
    error = "" if part.auc_error is None else f" ± {100 * Z * part.auc_error:.2f}"
    auc = part.auc if min(clicks, part.rows - clicks) >= FEWEST else None
    ratio = part.calibration_ratio if clicks >= FEWEST else None
    return (
        part.name,
        f"{part.rows:,}",
        f"{part.base_rate:.2%}",
        "" if auc is None else f"{100 * auc:.2f}{error}",
        f"{part.logloss:.4f}",
        "" if ratio is None else f"{ratio:.3f}",
    )


def _calibration_chart(periods: list[Slice], with_intervals: bool) -> Chart | None:
    """Return the chart of click rate and mean score over time; a single period needs none."""
    if len(periods) < 2:
        return None
    numbers = tuple(float(number) for number in range(1, len(periods) + 1))
    names = tuple(part.name for part in periods)
    rates = tuple(part.base_rate for part in periods)
    low, high = share_intervals(rates, [part.rows for part in periods]) if with_intervals else ((), ())
    note = f"The first period is {names[0]}, the last {names[-1]}."
    if with_intervals:
        note += " The band is the 95 % interval of the click rate, over rows."
    return Chart(
        "periods",
        "Click rate and mean score over time",
        "period",
        "share",
        (
            Series("click rate", numbers, rates, low, high, labels=names),
            Series("mean score", numbers, tuple(part.mean_prediction for part in periods), labels=names),
        ),
        note=note,
    )


def _ranking(breakdown: Breakdown) -> Section | None:
    """Return the gain curve, the lift by deciles, and the table of thresholds."""
    if not breakdown.gains:
        return None
    shares = tuple(100 * gain.rows for gain in breakdown.gains)
    first = breakdown.gains[0]
    gain = Chart(
        "gain",
        "Gain: how many of the clicks the highest scores hold",
        "share of rows, highest scores first (%)",
        "share of clicks (%)",
        (Series("the model", (0.0, *shares), (0.0, *(100 * gain.clicks for gain in breakdown.gains))),),
        note="The dotted line is a random order.",
        diagonal=True,
        digits=1,
    )
    lift = Chart(
        "lift",
        "Lift: clicks among the highest scores, compared with a random order",
        "share of rows, highest scores first (%)",
        "times as many clicks",
        (Series("the model", shares, tuple(gain.lift for gain in breakdown.gains)),),
        digits=2,
    )
    rows = tuple(
        (
            f"{threshold.score:.4f}",
            f"{threshold.rows:.1%}",
            f"{threshold.precision:.2%}",
            f"{threshold.recall:.1%}",
        )
        for threshold in breakdown.thresholds
    )
    table = Table(("score of at least", "share of rows", "clicks among them", "share of all clicks"), rows)
    text = (
        f"The tenth of the rows with the highest scores holds {first.clicks:.1%} of the clicks, {first.lift:.2f} times"
        " as many as a random tenth. The table says what a rule selects that acts from a score on: the share of clicks"
        " among the selected rows is its precision, their share of all clicks its recall."
    )
    return Section("Ranking", text, tables=(table,), charts=(gain, lift))


def _scores(breakdown: Breakdown) -> Section | None:
    """Return the histogram of scores, of all rows and of clicks."""
    bins = breakdown.histogram
    if not bins:
        return None
    middles = tuple((part.low + part.high) / 2 for part in bins)
    labels = tuple(f"{part.low:.4f} to {part.high:.4f}" for part in bins)
    chart = Chart(
        "scores",
        "Histogram of the calibrated scores",
        "score",
        "share (%)",
        tuple(
            Series(
                name, middles, shares, kind="columns", labels=tuple(f"{name}, {label}" for label in labels)
            )
            for name, shares in (
                ("all rows", tuple(100 * part.rows for part in bins)),
                ("clicks", tuple(100 * part.clicks for part in bins)),
            )
        ),
        digits=2,
    )
    return Section("Scores", f"The scores of the {breakdown.rows:,} {breakdown.split} rows.", charts=(chart,))
