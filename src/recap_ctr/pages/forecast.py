"""The sentences that say what a forecast of teachers, routes and averaging means, and how good it was."""

from recap_ctr.diagnose.measure import Estimate
from recap_ctr.diagnose.results import MIN_TEACHER_GAIN, AxisChoice, Forecast, ProbeArms

STUDENT_NOTE = (
    "The figures of teachers are those of their ensemble; what a student keeps of its gain is not known before the"
    " student is trained."
)


def forecast_notes(runs: int, directions: int) -> tuple[str, ...]:
    """Return what to keep in mind about a forecast from `runs` runs.

    `directions` is the number of independent directions in which two runs are assumed to differ.
    """
    if runs > 2:
        return (STUDENT_NOTE,)
    return (
        "Two runs can't show how much others would disagree: the intervals assume that runs differ in"
        f" {directions} independent directions, and take the level of one run from these two alone.",
        STUDENT_NOTE,
    )


def forecast_sentences(forecast: Forecast) -> list[str]:
    """Return what a forecast means, the notes on it included."""
    # With fewer than two teachers recommended, the smallest ensemble shows what teachers would gain.
    ensemble = forecast.teachers[max(forecast.choice["teachers"], 2) - 1]
    arms = forecast.arms
    return [
        _about_teachers(forecast, ensemble),
        *([_about_arms(arms, ensemble)] if arms is not None and arms.forecast else []),
        _about_auc(forecast.teachers[0], ensemble),
        _about_averaging(*forecast.averaging),
        *([_about_routes(forecast)] if len(forecast.routes) > 1 else []),
        _recommendation(forecast),
        *forecast.notes,
    ]


def check_sentence(metric: str, teachers: int, runs: int, expected: Estimate, measured: float) -> str:
    """Return how good the forecast of a metric, logloss or AUC, was for the mean of `teachers` teachers."""
    digits, scale = (3, 100.0) if metric == "AUC" else (5, 1.0)
    low, high = (expected.value if end is None else end for end in (expected.runs_low, expected.runs_high))
    return (
        f"{metric} of {teachers} teachers, on validation: forecast from {runs} runs"
        f" {with_interval_over_runs(expected, digits, scale)}, measured {scale * measured:.{digits}f}:"
        f" {'inside' if low <= measured <= high else 'outside'}."
    )


def with_interval_over_runs(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    """Return an estimate, multiplied by `scale`, with its 95 % interval over runs.

    >>> with_interval_over_runs(Estimate(0.9, 0.8, 1.0, runs_low=0.85, runs_high=0.95), 1, scale=100)
    '90.0 (85.0 to 95.0 with other runs)'
    """
    ends = (estimate.value if end is None else end for end in (estimate.runs_low, estimate.runs_high))
    value, low, high = (f"{scale * number:.{digits}f}" for number in (estimate.value, *ends))
    return f"{value} ({low} to {high} with other runs)"


def _about_teachers(forecast: Forecast, ensemble: AxisChoice) -> str:
    alone, largest = forecast.teachers[0], forecast.teachers[-1]
    return (
        f"From {forecast.runs} runs: one teacher has a logloss of {alone.loss.value:.5f} on {forecast.rows:,}"
        f" validation rows. The mean of {ensemble.count} teachers is forecast to save"
        f" {with_interval_over_runs(ensemble.gain, 5)}, which gives {with_interval_over_runs(ensemble.loss, 5)};"
        f" {largest.count} teachers would reach {largest.loss.value:.5f}."
    )


def _about_arms(arms: ProbeArms, ensemble: AxisChoice) -> str:
    """Return what the probe's arms say about averaging, next to the forecast for teachers."""
    best, mean = arms.means[0], arms.means[-1]
    verb = "saves" if mean.gain.value > 0 else "costs"
    forecast = arms.forecast[ensemble.count - 1]
    return (
        f"The {mean.count} better arms of the probe, each trained on {arms.rows:,} rows, are estimators too. Their mean"
        f" {verb} {abs(mean.gain.value):.5f} of logloss compared with the best arm ({best.loss.value:.5f} to"
        f" {mean.loss.value:.5f}). {ensemble.count} runs that disagree as much as the arms do would save"
        f" {forecast.gain.value:.5f}, where {ensemble.gain.value:.5f} is forecast for teachers."
    )


def _about_auc(alone: AxisChoice, ensemble: AxisChoice) -> str:
    if alone.auc is None or ensemble.auc is None:
        return "The gain in AUC is within the noise of the validation rows, so no AUC is forecast."
    return (
        f"AUC in points: {100 * alone.auc.value:.3f} for one teacher,"
        f" {with_interval_over_runs(ensemble.auc, 3, 100)} for the mean of {ensemble.count}."
    )


def _about_averaging(raw: AxisChoice, averaged: AxisChoice) -> str:
    saved = raw.loss.value - averaged.loss.value
    change = f"{abs(saved):.5f} ({raw.loss.value:.5f} to {averaged.loss.value:.5f})"
    if saved > 0:
        return f"Averaging the weights lowers logloss by {change} and makes scoring no slower."
    return f"Averaging the weights raises logloss by {change}: check the learning rate schedule."


def _about_routes(forecast: Forecast) -> str:
    routes = forecast.routes
    best = max(routes, key=lambda choice: choice.gain.value)
    if best.gain.low <= 0:
        return f"No number of routes up to {routes[-1].count} saves more logloss than chance would."
    slowdown = best.microseconds / routes[0].microseconds
    return (
        f"{best.count} routes save {best.gain.value:.6f} of logloss compared with one route ({best.gain.low:.6f} to"
        f" {best.gain.high:.6f} with other rows) and take {slowdown:.1f} times as long to score."
    )


def _recommendation(forecast: Forecast) -> str:
    num_teachers, num_routes = forecast.choice["teachers"], forecast.choice["routes"]
    teachers = f"{num_teachers} teachers" if num_teachers else "no teachers"
    routes = "one route" if num_routes == 1 else f"{num_routes} routes"
    return (
        f"Recommended: {teachers} and {routes}, which takes about {forecast.choice['minutes']:.0f} minutes of training"
        f" after the probe. One more teacher must save {MIN_TEACHER_GAIN:g} of logloss to be worth its time."
    )
