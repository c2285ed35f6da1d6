"""The page of a replayed log: updating against refitting against neither, period by period."""

from collections.abc import Callable

from recap_ctr.evaluation.backtest import STRATEGIES, Backtest, PeriodFigures
from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.page import Page, Section, Table

Figure = Callable[[PeriodFigures], float]
FIGURES: tuple[tuple[str, str, Figure], ...] = (
    ("auc", "AUC, points", lambda figures: 100 * figures.auc),
    ("logloss", "logloss", lambda figures: figures.logloss),
    ("calibration-error", "calibration error", lambda figures: figures.calibration_error),
    ("churn", "churn, % of the mean score", lambda figures: 100 * figures.churn),
    ("cpu", "CPU seconds", lambda figures: figures.cpu_seconds),
)
HEADER = ("mean of all periods", *(label for _, label, _ in FIGURES), "oldest rows: logloss")


def summary(report: Backtest) -> str:
    """Return in one sentence what updating keeps of what refitting gains, and at what cost."""
    shares = {
        name: report.kept(figure)
        for name, figure in (("AUC", lambda day: day.auc), ("logloss", lambda day: day.logloss))
    }
    kept = " and ".join(
        f"{100 * share:.0f} % of the gain in {name}" for name, share in shares.items() if share is not None
    )
    refused = sum(not period.figures["update"].shipped for period in report.periods[1:])
    text = f"Updating has {kept or 'nothing to keep'} that refitting has over never updating"
    text += f", for {100 * report.cpu_share:.1f} % of its CPU time, over {len(report.periods)} periods"
    text += f"; the gate refused {refused} updates, whose rows then wait for the next one."
    if report.forgotten:
        others = {"never": "the first fit", "refit": "the last refit"}
        gaps = " and ".join(f"{gap} from {others[name]}" for name, gap in report.forgotten.items())
        text += f" On the oldest rows the logloss of the updated model differs by {gaps}."
    return text


def cells(report: Backtest, strategy: str) -> tuple[str, ...]:
    """Return a strategy's row of the table under `HEADER`."""
    digits = (3, 5, 4, 1, 1)
    means = (
        f"{report.mean(strategy, figure):.{places}f}"  # type: ignore[arg-type]
        for (_, _, figure), places in zip(FIGURES, digits, strict=True)
    )
    return strategy, *means, f"{report.oldest[strategy]:.5f}"  # type: ignore[index]


def page(report: Backtest) -> Page:
    """Return the page of a replayed log."""
    rows = tuple(cells(report, strategy) for strategy in STRATEGIES)
    note = (
        "Each model is judged on the period after the rows that it has seen."
        f" The first fit had {report.first_rows:,} rows and took {report.first_cpu_seconds:.0f} CPU seconds."
    )
    charts = tuple(_chart(report, name, label, figure) for name, label, figure in FIGURES)
    return Page(
        "A log, replayed",
        summary(report),
        (
            Section("Result", tables=(Table(HEADER, rows, 1, note),)),
            Section("Periods", charts=charts, tables=(_periods(report),)),
        ),
    )


def _chart(report: Backtest, name: str, label: str, figure: Figure) -> Chart:
    numbers = tuple(float(number) for number in range(1, len(report.periods) + 1))
    series = tuple(
        Series(
            strategy,
            numbers,
            tuple(figure(period.figures[strategy]) for period in report.periods),
            labels=tuple(f"{strategy}, {period.start}" for period in report.periods),
        )
        for strategy in STRATEGIES
    )
    return Chart(f"backtest-{name}", label, "period", label, series)


def _periods(report: Backtest) -> Table:
    header = ("from", "rows", *(f"{strategy}: logloss" for strategy in STRATEGIES), "update shipped")
    rows = tuple(
        (
            period.start,
            f"{period.rows:,}",
            *(f"{period.figures[strategy].logloss:.5f}" for strategy in STRATEGIES),
            "yes" if period.figures["update"].shipped else "; ".join(period.figures["update"].reasons),
        )
        for period in report.periods
    )
    return Table(header, rows)
