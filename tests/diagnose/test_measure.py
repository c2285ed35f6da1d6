"""Intervals: by their definition, and in simulations they contain the truth as often as they promise.

Shape suffixes: N rows, S runs, T points of the trajectory, R routes, M estimators, F random features.
"""

from collections.abc import Iterable

import numpy as np
import pytest

from recap_ctr.diagnose import (
    Cube,
    Diagnosis,
    Estimate,
    Family,
    Floats,
    covariance_nonshared_variance,
    curve,
    diagnose,
    mean_variance,
    nonshared_variance,
    variance_removed,
)
from recap_ctr.diagnose.diagnosis import family_figures
from recap_ctr.diagnose.figures import Grid, among
from recap_ctr.diagnose.measure import EstimateFigure, Figure, jackknife, measure
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.metrics import logloss, sigmoid, softplus
from tests.support.simulated_logits import S, estimates, simulated

CASES = 200


@pytest.mark.slow
def test_interval_over_runs_is_the_jackknife(data: tuple[Floats, Floats], diagnosis: Diagnosis) -> None:
    logits_NSTR, labels_N = data
    without_a_run = [diagnose(Cube.from_array(np.delete(logits_NSTR, s, axis=1)), labels_N) for s in range(S)]
    grown = (1 - 1 / S) / (1 - 1 / (S - 1))  # families of runs lack one
    for axis, averaged, name, positive in [
        ("run", (), "gain", True),
        ("run", ("route",), "removed", True),
        ("run", (), "predicted", True),
        ("run", (), "auc_gain", False),
        ("run", (), "loss_together", False),
        ("trajectory", (), "gain", True),
        ("trajectory", ("run",), "removed", True),
        ("trajectory", (), "rho", False),
        ("route", ("run", "trajectory"), "auc_gain", False),
        ("route", (), "loss_alone", False),
    ]:

        def figure(diagnosis: Diagnosis) -> Estimate:
            estimate = getattr(diagnosis.family(axis, averaged), name)  # noqa: B023
            assert isinstance(estimate, Estimate)
            return estimate

        scale = grown if axis == "run" and name != "loss_together" else 1.0
        expected = jackknife(
            figure(diagnosis).value,
            [scale * figure(smaller).value for smaller in without_a_run],
            positive=positive,
        )
        assert (figure(diagnosis).runs_low, figure(diagnosis).runs_high) == pytest.approx(
            expected, rel=1e-9
        ), name
    for k, variant in enumerate(diagnosis.churn):
        expected = jackknife(
            variant.logit_rms.value,
            [smaller.churn[k].logit_rms.value for smaller in without_a_run],
            positive=True,
        )
        assert (variant.logit_rms.runs_low, variant.logit_rms.runs_high) == pytest.approx(expected, rel=1e-9)


def test_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.array([1.0, 2.0, 4.0, 3.5])
    low, high = jackknife(values.mean(), [np.delete(values, s).mean() for s in range(4)])
    reach = 3.182446305284263 * values.std(ddof=1) / 2  # t(3) at 97.5 %
    assert (low, high) == pytest.approx((values.mean() - reach, values.mean() + reach))


def test_two_runs_tell_nothing_of_how_other_runs_would_differ(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    diagnosis = diagnose(Cube.from_array(logits_NSTR[:, :2]), labels_N)
    run, route = diagnosis.family("run"), diagnosis.family("route")
    assert run is not None
    assert route is not None
    assert run.gain.runs_low is None
    assert route.gain.runs_low is not None  # a mean over two runs
    single = diagnose(Cube.from_array(logits_NSTR[:, :1]), labels_N)
    assert all(estimate["runs_low"] is None for estimate in estimates(single))
    assert not single.churn


def test_interval_of_an_auc_is_delongs() -> None:
    logits_NSTR, labels_N = simulated(6, (2, 1, 1), 4_000)
    family = diagnose(Cube.from_array(logits_NSTR), labels_N).family("run")
    assert family is not None
    mean_N = logits_NSTR[:, :, 0, 0].mean(axis=1)
    error = metrics.auc_error(labels_N, mean_N)
    assert error is not None
    assert family.auc_together.high - family.auc_together.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    logits_NSTR, labels_N = simulated(7, (2, 1, 1), 4_000)
    family = diagnose(Cube.from_array(logits_NSTR), labels_N).family("run")
    assert family is not None
    variance_N = nonshared_variance(logits_NSTR[:, :, 0, 0])
    error = variance_N.std() / np.sqrt(len(variance_N))
    assert family.removed.high - family.removed.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert family.removed.low < family.removed.value < family.removed.high


def covered(hits: Iterable[bool]) -> float:
    return float(np.mean(list(hits)))


def rows_hold(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def runs_hold(estimate: Estimate, truth: float) -> bool:
    assert estimate.runs_low is not None
    assert estimate.runs_high is not None
    return estimate.runs_low <= truth <= estimate.runs_high


def along(axis: str, logits_NSTR: Floats, labels_N: Floats) -> Family:
    grid = Grid((logits_NSTR.shape[1], logits_NSTR.shape[2], logits_NSTR.shape[3]))
    families = grid.families((axis,))
    cube = Cube.from_array(logits_NSTR)
    return measure(cube, labels_N, lambda estimate: family_figures(estimate, grid, families, axis))


def signal(rng: np.random.Generator, rows: int) -> tuple[Floats, Floats]:
    mean_N = rng.normal(-1.0, 1.0, rows)
    return mean_N, (rng.random(rows) < sigmoid(mean_N)).astype(np.float64)


def gaps(rng: np.random.Generator, spread: float, counts: Iterable[int]) -> dict[int, float]:
    """Return the expected loss that the mean of M independent estimators saves around such a signal."""
    mean_N, _ = signal(rng, 1_000_000)
    loss = {
        count: softplus(mean_N + rng.normal(0, spread / np.sqrt(count), len(mean_N))).mean()
        for count in {1, *counts}
    }
    return {count: float(loss[1] - mean_loss) for count, mean_loss in loss.items()}


@pytest.mark.slow
def test_rows_of_equicorrelated_estimators() -> None:
    tau2, rho, M, N = 0.3, 0.6, 4, 500
    separate = np.sqrt(tau2 * (1 - rho))
    rng = np.random.default_rng(0)
    families = []
    for _ in range(CASES):
        mean_N, labels_N = signal(rng, N)
        shared_N1 = rng.normal(0, np.sqrt(tau2 * rho), (N, 1))
        logits_NM = mean_N[:, None] + shared_N1 + rng.normal(0, separate, (N, M))
        families.append(along("run", logits_NM[:, :, None, None], labels_N))

    removed = variance_removed(tau2, rho, M)
    assert removed == pytest.approx(tau2 - mean_variance(tau2, rho, M))
    assert 0.90 <= covered(rows_hold(family.removed, removed) for family in families) <= 0.99
    assert 0.90 <= covered(rows_hold(family.variance, tau2 * (1 - rho)) for family in families) <= 0.99
    # Gains vary over rows around those of a signal that includes what the estimators share.
    mean_N = np.random.default_rng(1).normal(-1.0, np.sqrt(1 + tau2 * rho), 1_000_000)
    noise_NM = np.random.default_rng(2).normal(0, separate, (1_000_000, M))
    exact = float(np.mean(softplus(mean_N + noise_NM[:, 0]) - softplus(mean_N + noise_NM.mean(axis=1))))
    assert 0.90 <= covered(rows_hold(family.gain, exact) for family in families) <= 0.99


@pytest.mark.slow
def test_rows_of_routes_within_runs() -> None:
    """Here the family is drawn once per run, so that its correlation shows."""
    tau2, rho, N, S, R = 0.2, 0.7, 500, 3, 3
    rng = np.random.default_rng(3)
    families = []
    for _ in range(CASES):
        mean_N, labels_N = signal(rng, N)
        shared_NS1 = rng.normal(0, np.sqrt(tau2 * rho), (N, S, 1))
        logits_NSR = mean_N[:, None, None] + shared_NS1 + rng.normal(0, np.sqrt(tau2 * (1 - rho)), (N, S, R))
        families.append(along("route", logits_NSR[:, :, None, :], labels_N))
    assert (
        0.90
        <= covered(family.tau2 is not None and rows_hold(family.tau2, tau2) for family in families)
        <= 0.99
    )
    assert (
        0.90 <= covered(family.rho is not None and rows_hold(family.rho, rho) for family in families) <= 0.99
    )
    assert (
        0.90
        <= covered(rows_hold(family.removed, variance_removed(tau2, rho, R)) for family in families)
        <= 0.99
    )


@pytest.mark.slow
def test_rows_of_estimators_with_any_covariance() -> None:
    M, N = 5, 500
    rng = np.random.default_rng(4)
    root_MM = rng.normal(0, 0.3, (M, M))
    truth = covariance_nonshared_variance(root_MM @ root_MM.T)
    hits = []
    for _ in range(CASES):
        mean_N, labels_N = signal(rng, N)
        logits_NM = mean_N[:, None] + rng.normal(size=(N, M)) @ root_MM.T
        family = along("run", logits_NM[:, :, None, None], labels_N)
        hits.append(rows_hold(family.removed, truth))
    assert 0.90 <= covered(hits) <= 0.99


@pytest.mark.slow
def test_rows_of_three_additive_axes() -> None:
    """z = signal + run + checkpoint + route + rest, with a variance each: what each step removes is known."""
    parts = {"run": 0.09, "trajectory": 0.04, "route": 0.02}
    rest, N, shape = 0.03, 400, (3, 2, 4)
    grid = Grid(shape)
    steps = [
        (axis, averaged)
        for averaged in (
            (),
            ("run",),
            ("trajectory",),
            ("route",),
            ("run", "route"),
            ("run", "trajectory"),
            ("trajectory", "route"),
        )
        for axis in parts
        if axis not in averaged
    ]
    assert len(steps) == 12

    def build(estimate: EstimateFigure) -> list[Estimate]:
        return [
            estimate(Figure((grid.families((axis,), averaged).mean(among("variance")),)))
            for axis, averaged in steps
        ]

    rng = np.random.default_rng(5)
    hits = []
    for _ in range(CASES):
        mean_N, labels_N = signal(rng, N)
        logits_NSTR = mean_N[:, None, None, None] + rng.normal(0, np.sqrt(rest), (N, *shape))
        for k, variance in enumerate(parts.values()):
            size = [N, 1, 1, 1]
            size[k + 1] = shape[k]
            logits_NSTR += rng.normal(0, np.sqrt(variance), size)
        estimates_of_steps = measure(Cube.from_array(logits_NSTR), labels_N, build)
        truths = [
            (parts[axis] + rest / np.prod([grid.size[other] for other in averaged]))
            * (1 - 1 / grid.size[axis])
            for axis, averaged in steps
        ]
        hits.append(
            [rows_hold(estimate, truth) for estimate, truth in zip(estimates_of_steps, truths, strict=True)]
        )
    shares = np.mean(hits, axis=0)
    assert ((shares >= 0.90) & (shares <= 0.99)).all(), shares


class RandomFunctions:
    """Runs whose noise is a random function of a row: close rows get similar noise, however many rows there are."""

    def __init__(self, rows: int = 250, features: int = 30, spread: float = 0.3) -> None:
        rng = np.random.default_rng(6)
        points_N3, waves_F3 = rng.normal(size=(rows, 3)), rng.normal(size=(features, 3))
        self.features_NF = (
            spread * np.sqrt(2 / features) * np.cos(points_N3 @ waves_F3.T + rng.uniform(0, 7, features))
        )
        self.variance_N = (self.features_NF**2).sum(axis=1)
        self.mean_N, self.labels_N = signal(rng, rows)

    def runs(self, rng: np.random.Generator, count: int) -> Floats:
        drawn_FM = rng.normal(size=(self.features_NF.shape[1], count))
        return np.asarray(self.mean_N[:, None] + self.features_NF @ drawn_FM)

    def loss(self, count: int) -> float:
        """Return the expected loss of the mean of `count` runs, over all runs that could be drawn."""
        drawn = self.runs(np.random.default_rng(7), 5_000) - self.mean_N[:, None]
        return float(
            np.mean([logloss(self.labels_N, self.mean_N + noise_N / np.sqrt(count)) for noise_N in drawn.T])
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "most"), [(3, 1.0), (4, 0.99), (6, 0.99)]
)  # of three runs it is wider than it need be
def test_runs_whose_noise_is_shared_by_rows(S: int, most: float) -> None:
    world, rng = RandomFunctions(), np.random.default_rng(8)
    cubes = [world.runs(rng, S)[:, :, None, None] for _ in range(CASES)]
    families = [along("run", cube, world.labels_N) for cube in cubes]

    variance, alone, together = world.variance_N.mean(), world.loss(1), world.loss(S)
    for name, truth in {
        "variance": variance,
        "removed": variance * (1 - 1 / S),
        "gain": alone - together,
        "loss_alone": alone,
        "loss_together": together,
    }.items():
        share = covered(runs_hold(getattr(family, name), truth) for family in families)
        assert 0.90 <= share <= most, (name, share)
    # Rows alone would promise too much.
    assert covered(rows_hold(family.variance, variance) for family in families) < 0.9


@pytest.mark.slow
def test_forecast_for_five_from_two_runs() -> None:
    spread, N = 0.3, 1_000
    truth = gaps(np.random.default_rng(9), spread, [5])[5]
    rng = np.random.default_rng(10)
    hits, realised = [], []
    for _ in range(CASES):
        mean_N, labels_N = signal(rng, N)
        logits_NM = mean_N[:, None] + rng.normal(0, spread, (N, 5))
        cube = Cube.from_array(logits_NM[:, :2, None, None])
        point = curve(cube, labels_N, "run").forecast[4]
        assert point.count == 5
        assert point.gain.runs_low is None
        hits.append(rows_hold(point.gain, truth))
        realised.append(rows_hold(point.loss, logloss(labels_N, logits_NM.mean(axis=1))))
    assert 0.90 <= covered(hits) <= 0.99
    assert covered(realised) >= 0.95  # on the same rows, so that the noise of labels is shared


@pytest.mark.slow
def test_forecast_for_five_from_three_runs_whose_noise_is_shared_by_rows() -> None:
    world, rng = RandomFunctions(), np.random.default_rng(11)
    alone, five = world.loss(1), world.loss(5)
    points = []
    for _ in range(CASES):
        cube = Cube.from_array(world.runs(rng, 3)[:, :, None, None])
        points.append(curve(cube, world.labels_N, "run").forecast[4])
    assert 0.90 <= covered(runs_hold(point.gain, alone - five) for point in points) <= 0.99
    assert 0.90 <= covered(runs_hold(point.loss, five) for point in points) <= 0.99
