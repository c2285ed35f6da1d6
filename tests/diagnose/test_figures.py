"""Figures against brute force, whatever the blocks.

Shape suffixes: N rows, S runs, T points of the trajectory, R routes, M estimators.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.diagnose import (
    AXES,
    Cube,
    Diagnosis,
    Estimate,
    Floats,
    curve,
    decompose,
    diagnose,
    exact_gain,
    family,
    nonshared_variance,
    predicted_gain,
    two_axis,
)
from recap_ctr.diagnose.diagnosis import _churn, _decomposition, _family
from recap_ctr.diagnose.figures import Grid
from recap_ctr.diagnose.measure import Ask, jackknife, measure
from recap_ctr.diagnose.terms import GROUPS, Rows, decile
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics

N, S, T, R = 400, 3, 2, 4


def simulated(seed: int = 0, shape: tuple[int, int, int] = (S, T, R), rows: int = N) -> tuple[Floats, Floats]:
    """Logits with disagreement on each axis, and labels."""
    rng = np.random.default_rng(seed)
    runs, steps, routes = shape
    mean_N111 = rng.normal(-1.0, 1.0, (rows, 1, 1, 1))
    logits_NSTR = (
        mean_N111
        + rng.normal(0, 0.3, (rows, runs, 1, 1))
        + rng.normal(0, 0.2, (rows, 1, steps, 1))
        + rng.normal(0, 0.1, (rows, runs, steps, routes))
    )
    labels_N = (rng.random(rows) < metrics.sigmoid(mean_N111[:, 0, 0, 0])).astype(np.float64)
    return logits_NSTR, labels_N


@pytest.fixture(scope="module")
def data() -> tuple[Floats, Floats]:
    return simulated()


@pytest.fixture(scope="module")
def found(data: tuple[Floats, Floats]) -> Diagnosis:
    return diagnose(Cube.from_array(data[0]), data[1])


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, (int, float)):
        yield float(value)


def averaged_over(logits_NSTR: Floats, averaged: tuple[str, ...], axis: str) -> Iterator[Floats]:
    """Rows × estimators along `axis` at each point of the other axes, some of which are averaged."""
    kept = logits_NSTR.mean(axis=tuple(1 + AXES.index(one) for one in averaged), keepdims=True)
    moved = np.moveaxis(kept, 1 + AXES.index(axis), -1)
    for point in np.ndindex(moved.shape[1:3]):
        yield moved[:, point[0], point[1]]


def test_families_of_all_combinations_are_those_of_the_theory(
    data: tuple[Floats, Floats], found: Diagnosis
) -> None:
    logits_NSTR, labels_N = data
    assert [one.averaged for one in found.combinations][:2] == [(), ("run",)]
    assert len(found.combinations) == 8
    for combination in found.combinations:
        assert {one.axis for one in combination.families} == set(AXES) - set(combination.averaged)
        for one in combination.families:
            points = list(averaged_over(logits_NSTR, one.averaged, one.axis))

            def mean(of: Callable[[Floats], Any], points: list[Floats] = points) -> float:
                return float(np.mean([of(logits_NM) for logits_NM in points]))

            def alone(metric: Callable[[Floats, Floats], float]) -> float:
                return mean(
                    lambda logits_NM: np.mean([metric(labels_N, column_N) for column_N in logits_NM.T])
                )

            def together(metric: Callable[[Floats, Floats], float]) -> float:
                return mean(lambda logits_NM: metric(labels_N, logits_NM.mean(axis=1)))

            assert one.count == points[0].shape[1]
            expected = {
                "removed": mean(lambda logits_NM: nonshared_variance(logits_NM).mean()),
                "variance": mean(lambda logits_NM: logits_NM.var(axis=1, ddof=1).mean()),
                "predicted": mean(predicted_gain),
                "gain": mean(exact_gain),
                "loss_alone": alone(metrics.logloss),
                "loss_together": together(metrics.logloss),
                "auc_alone": alone(metrics.auc),
                "auc_together": together(metrics.auc),
                "auc_gain": together(metrics.auc) - alone(metrics.auc),
            }
            for name, value in expected.items():
                assert getattr(one, name).value == pytest.approx(value, rel=1e-9), (
                    one.axis,
                    one.averaged,
                    name,
                )
            # Labels cancel: the exact gap is the measured gain.
            assert one.gain.value == pytest.approx(one.loss_alone.value - one.loss_together.value, rel=1e-9)
            assert one.loss_alone.value == pytest.approx(combination.loss.value, rel=1e-12)


def test_mean_of_a_trajectory_over_its_last_checkpoint(data: tuple[Floats, Floats], found: Diagnosis) -> None:
    logits_NSTR, labels_N = data
    one = found.family("trajectory")
    assert one is not None
    assert one.over_last is not None
    expected = np.mean(
        [
            metrics.logloss(labels_N, logits_NSTR[:, s, -1, r])
            - metrics.logloss(labels_N, logits_NSTR[:, s, :, r].mean(axis=1))
            for s, r in itertools.product(range(S), range(R))
        ]
    )
    assert one.over_last.value == pytest.approx(expected, rel=1e-9)
    assert found.family("run") is not None
    assert found.family("run", {"run"}) is None


def test_equicorrelated_figures_are_the_intraclass_correlation(
    data: tuple[Floats, Floats], found: Diagnosis
) -> None:
    logits_NSTR, _ = data
    one = found.family("route", ("trajectory",))
    assert one is not None
    assert one.rho is not None
    assert one.tau2 is not None
    logits_NSR = logits_NSTR.mean(axis=2)
    own = logits_NSR.var(axis=2, ddof=1).mean()
    shared = logits_NSR.mean(axis=2).var(axis=1, ddof=1).mean() - own / R
    assert one.tau2.value == pytest.approx(own + shared, rel=1e-9)
    assert one.rho.value == pytest.approx(shared / (own + shared), rel=1e-9)
    assert one.tau2.value * (1 - one.rho.value) == pytest.approx(one.variance.value, rel=1e-9)
    for axis, averaged in (("run", ()), ("route", ("run",)), ("trajectory", ("run", "route"))):
        other = found.family(axis, averaged)
        assert other is not None
        assert other.rho is None


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    spread=st.floats(1e-6, 10),
    seed=st.integers(0, 99),
)
def test_decompositions_sum_to_the_total_and_match_the_theory(
    shape: tuple[int, int, int], spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits_NSTR = rng.normal(-1, 1, (40, 1, 1, 1)) + spread * rng.normal(size=(40, *shape))
    labels_N = np.arange(40) % 2

    found = measure(
        Cube.from_array(logits_NSTR),
        labels_N,
        lambda ask: [
            _decomposition(ask, Grid(shape), order)
            for k in (2, 3)
            for order in itertools.permutations(AXES, k)
        ],
    )

    orders = decompose(logits_NSTR)
    for one in found:
        summed = sum(share.value for share in one.shares)
        assert summed == pytest.approx(one.total.value, rel=1e-9)
        if len(one.order) == 3:
            assert one.total.value == pytest.approx(logits_NSTR.reshape(40, -1).var(axis=1).mean(), rel=1e-9)
            expected = [orders[one.order][axis].mean() for axis in one.order]
        else:
            at = [1 + AXES.index(axis) for axis in one.order]
            moved_N3AB = np.moveaxis(logits_NSTR, at, (2, 3))
            expected = [
                np.mean([share.mean() for share in shares])
                for shares in zip(
                    *(two_axis(moved_N3AB[:, k]) for k in range(moved_N3AB.shape[1])), strict=True
                )
            ]
        assert [share.value for share in one.shares] == pytest.approx(
            expected, rel=1e-9, abs=1e-15 * spread**2
        )


@settings(max_examples=12, deadline=None)
@given(block_rows=st.integers(1, 120), weighted=st.booleans())
def test_any_blocks_give_the_same_numbers(block_rows: int, weighted: bool) -> None:
    logits_NSTR, labels_N = simulated(1, (3, 2, 1), 100)
    weights_N = np.random.default_rng(2).integers(0, 4, 100).astype(np.float64) if weighted else None
    cube, grid = Cube.from_array(logits_NSTR), Grid((3, 2, 1))

    def build(ask: Ask) -> list[Any]:
        family = _family(ask, grid, grid.families(("run",)), "run")
        return [family, _churn(ask, grid, ("trajectory",), {"trajectory": 1, "route": 0}, 0)]

    def found(rows: int) -> list[float]:
        made = measure(cube, labels_N, build, weights=weights_N, block_rows=rows)
        return list(numbers([asdict(one) for one in made]))

    np.testing.assert_allclose(found(block_rows), found(10_000), rtol=1e-12, atol=1e-15)


def test_weights_count_rows() -> None:
    logits_NSTR, labels_N = simulated(3, (2, 2, 1), 200)
    weights_N = np.random.default_rng(4).integers(0, 4, 200)
    at = np.repeat(np.arange(200), weights_N)

    weighted = diagnose(Cube.from_array(logits_NSTR), labels_N, weights_N)
    repeated = diagnose(Cube.from_array(logits_NSTR[at]), labels_N[at])

    # Whether AUC is forecast depends on its interval, which knows how many rows there are.
    one, other = (
        [part["value"] for part in estimates(replace(found, curves=()))] for found in (weighted, repeated)
    )
    assert len(one) > 50
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


def estimates(diagnosis: Diagnosis) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and "runs_low" in value:
            found.append(value)
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)

    walk(diagnosis.to_json())
    return found


def test_curves_are_means_over_all_subsets(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR)
    cases = {
        (): {"trajectory": 1, "run": 2},
        ("trajectory", "run"): {},
        ("trajectory",): {},  # each run in turn
    }
    for averaged, held in cases.items():
        found = curve(cube, labels_N, "route", averaged, held)
        families_FNM = {
            (): [logits_NSTR[:, 2, 1]],
            ("trajectory", "run"): [logits_NSTR.mean(axis=(1, 2))],
            ("trajectory",): list(np.moveaxis(logits_NSTR.mean(axis=2), 1, 0)),
        }[averaged]
        assert [point.count for point in found.points] == [1, 2, 3, 4]
        for point in found.points:
            losses, aucs = [], []
            for logits_NM in families_FNM:
                for chosen in itertools.combinations(range(R), point.count):
                    mean_N = logits_NM[:, chosen].mean(axis=1)
                    losses.append(metrics.logloss(labels_N, mean_N))
                    aucs.append(metrics.auc(labels_N, mean_N))
            alone = np.mean([metrics.logloss(labels_N, z_N) for z_NM in families_FNM for z_N in z_NM.T])
            auc_alone = np.mean([metrics.auc(labels_N, z_N) for z_NM in families_FNM for z_N in z_NM.T])
            assert point.loss.value == pytest.approx(np.mean(losses), rel=1e-12)
            assert point.gain.value == pytest.approx(alone - np.mean(losses), rel=1e-9, abs=1e-15)
            assert point.auc.value == pytest.approx(np.mean(aucs), rel=1e-12)
            assert point.auc_gain.value == pytest.approx(np.mean(aucs) - auc_alone, rel=1e-9, abs=1e-15)
            full = np.mean([predicted_gain(logits_NM) for logits_NM in families_FNM])
            assert point.predicted.value == pytest.approx(
                full * (1 - 1 / point.count) / (1 - 1 / R), rel=1e-9
            )


def test_many_subsets_are_drawn_from_a_seed_and_few_are_all_taken() -> None:
    families = Grid((9, 1, 2)).families(("run",))
    for size in (2, 5, 8, 9):
        drawn, again, other = (
            families.subsets(size, np.random.default_rng(seed)).members for seed in (1, 1, 2)
        )
        every = 2 * comb(9, size)
        assert len(set(drawn)) == len(drawn) == min(every, 64)
        assert all(len(set(subset)) == size for subset in drawn)
        assert drawn == again
        assert (set(drawn) == set(other)) == (every <= 64)
        # Both families give as many.
        assert sum(subset[0][0] % 2 for subset in drawn) == len(drawn) / 2


def test_curve_with_drawn_subsets_agrees_with_all() -> None:
    logits_NSTR, labels_N = simulated(5, (9, 1, 1), 300)
    found = curve(Cube.from_array(logits_NSTR), labels_N, "run")
    logits_NM = logits_NSTR[:, :, 0, 0]
    every = [exact_gain(logits_NM[:, chosen]) for chosen in itertools.combinations(range(9), 4)]
    assert found.points[3].gain.value == pytest.approx(np.mean(every), rel=0.02)
    assert found.points[8].gain.value == pytest.approx(exact_gain(logits_NM), rel=1e-9)
    assert all(point.gain.runs_low is not None for point in found.points)


def test_interval_over_runs_is_the_jackknife(data: tuple[Floats, Floats], found: Diagnosis) -> None:
    logits_NSTR, labels_N = data
    less = [diagnose(Cube.from_array(np.delete(logits_NSTR, s, axis=1)), labels_N) for s in range(S)]
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

        def figure(one: Diagnosis) -> Estimate:
            estimate = getattr(one.family(axis, averaged), name)  # noqa: B023
            assert isinstance(estimate, Estimate)
            return estimate

        scale = grown if axis == "run" and name != "loss_together" else 1.0
        expected = jackknife(
            figure(found).value, [scale * figure(one).value for one in less], positive=positive
        )
        assert (figure(found).runs_low, figure(found).runs_high) == pytest.approx(expected, rel=1e-9), name
    for k, variant in enumerate(found.churn):
        expected = jackknife(
            variant.logit_rms.value, [one.churn[k].logit_rms.value for one in less], positive=True
        )
        assert (variant.logit_rms.runs_low, variant.logit_rms.runs_high) == pytest.approx(expected, rel=1e-9)


def test_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.array([1.0, 2.0, 4.0, 3.5])
    low, high = jackknife(values.mean(), [np.delete(values, s).mean() for s in range(4)])
    reach = 3.182446305284263 * values.std(ddof=1) / 2  # t(3) at 97.5 %
    assert (low, high) == pytest.approx((values.mean() - reach, values.mean() + reach))


def test_two_runs_tell_nothing_of_how_other_runs_would_differ(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    found = diagnose(Cube.from_array(logits_NSTR[:, :2]), labels_N)
    run, route = found.family("run"), found.family("route")
    assert run is not None
    assert route is not None
    assert run.gain.runs_low is None
    assert route.gain.runs_low is not None  # a mean over two runs
    single = diagnose(Cube.from_array(logits_NSTR[:, :1]), labels_N)
    assert all(estimate["runs_low"] is None for estimate in estimates(single))
    assert not single.churn


def test_interval_of_an_auc_is_delongs() -> None:
    logits_NSTR, labels_N = simulated(6, (2, 1, 1), 4_000)
    one = diagnose(Cube.from_array(logits_NSTR), labels_N).family("run")
    assert one is not None
    mean_N = logits_NSTR[:, :, 0, 0].mean(axis=1)
    error = metrics.auc_error(labels_N, mean_N)
    assert error is not None
    assert one.auc_together.high - one.auc_together.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_auc_is_taken_from_evenly_spaced_rows(
    data: tuple[Floats, Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_NSTR, labels_N = data
    monkeypatch.setattr("recap_ctr.diagnose.terms.RANKED_ROWS", 150)
    members = [(0, 0, 0), (1, 1, 1)]
    found = family(Cube.from_array(logits_NSTR), labels_N, members)
    at = np.arange(150) * N // 150
    assert len(set(at.tolist())) == 150
    mean_N = (logits_NSTR[:, 0, 0, 0] + logits_NSTR[:, 1, 1, 1]) / 2
    assert found.auc_together.value == pytest.approx(metrics.auc(labels_N[at], mean_N[at]))
    assert found.loss_together.value == pytest.approx(metrics.logloss(labels_N, mean_N))


def test_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    logits_NSTR, labels_N = simulated(7, (2, 1, 1), 4_000)
    one = diagnose(Cube.from_array(logits_NSTR), labels_N).family("run")
    assert one is not None
    variance_N = nonshared_variance(logits_NSTR[:, :, 0, 0])
    error = variance_N.std() / np.sqrt(len(variance_N))
    assert one.removed.high - one.removed.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert one.removed.low < one.removed.value < one.removed.high


def test_churn_by_hand(data: tuple[Floats, Floats], found: Diagnosis) -> None:
    logits_NSTR, _ = data
    scores = {
        (): logits_NSTR[:, :, -1, 0],
        ("trajectory",): logits_NSTR.mean(axis=2)[:, :, 0],
        ("route",): logits_NSTR.mean(axis=3)[:, :, -1],
        ("trajectory", "route"): logits_NSTR.mean(axis=(2, 3)),
    }
    assert [one.averaged for one in found.churn] == list(scores)
    for one in found.churn:
        logits_NS = scores[one.averaged]
        pairs = list(itertools.combinations(range(S), 2))
        tenth_NS = np.argsort(np.argsort(logits_NS, axis=0), axis=0) * 10 // N
        change = [logits_NS[:, a] - logits_NS[:, b] for a, b in pairs]
        moved = [metrics.sigmoid(logits_NS[:, a]) - metrics.sigmoid(logits_NS[:, b]) for a, b in pairs]
        assert one.logit_mean.value == pytest.approx(np.mean(np.abs(change)))
        assert one.logit_rms.value == pytest.approx(np.sqrt(np.mean(np.square(change))))
        assert one.logit_rms.value**2 == pytest.approx(2 * logits_NS.var(axis=1, ddof=1).mean())
        assert one.probability_mean.value == pytest.approx(np.mean(np.abs(moved)))
        assert one.probability_rms.value == pytest.approx(np.sqrt(np.mean(np.square(moved))))
        share = np.mean([(tenth_NS[:, a] != tenth_NS[:, b]).mean() for a, b in pairs])
        assert one.decile_changes.value == pytest.approx(share)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-3, 3), st.integers(0, 3)), min_size=2, max_size=30).filter(
        lambda rows: {positive for positive, _, mass in rows if mass} == {True, False}
    )
)
def test_pairs_won_and_deciles_by_counting(rows: list[tuple[bool, int, int]]) -> None:
    positive_N, scores_N, masses_N = (
        np.array([row[k] for row in rows], kind) for k, kind in enumerate((bool, float, float))
    )
    won_N = metrics.pairs_won(positive_N, scores_N, masses_N)
    for n, (positive, score, _) in enumerate(rows):
        against = [(other, mass) for label, other, mass in rows if label != positive]
        right = sum(
            mass * (0.5 + 0.5 * np.sign(score - other) * (1 if positive else -1)) for other, mass in against
        )
        assert won_N[n] == pytest.approx(right / sum(mass for _, mass in against))
        below = sum(mass for _, other, mass in rows if other < score)
        tied = sum(mass for _, other, mass in rows if other == score)
        assert decile(scores_N, masses_N)[n] == min(9, int(10 * (below + tied / 2) / masses_N.sum()))
    assert won_N[positive_N] @ masses_N[positive_N] / masses_N[positive_N].sum() == pytest.approx(
        metrics.auc(positive_N, scores_N, masses_N)
    )


def test_rows_fall_into_groups_by_their_number_alone() -> None:
    rows = Rows(np.zeros(100_000, bool), None, seed=3)
    groups_N = rows.groups(np.arange(100_000))
    assert np.array_equal(groups_N[500:600], rows.groups(np.arange(500, 600)))
    counts_G = np.bincount(groups_N, minlength=GROUPS)
    assert ((counts_G - 100_000 / GROUPS) ** 2 / (100_000 / GROUPS)).sum() < 350  # chi² of 255 degrees
    assert (groups_N != Rows(rows.positive_N, None, seed=4).groups(np.arange(100_000))).mean() > 0.98


def test_any_estimators_make_a_family(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR)
    members = [(0, 0, 0), (2, 1, 3), (1, 0, 2)]
    found = family(cube, labels_N, members)
    logits_NM = np.stack([logits_NSTR[:, s, t, r] for s, t, r in members], axis=1)
    assert found.count == 3
    assert found.predicted.value == pytest.approx(predicted_gain(logits_NM))
    assert found.gain.value == pytest.approx(exact_gain(logits_NM))
    assert found.gain.runs_low is not None
    assert family(cube, labels_N, members[:2]).gain.runs_low is None
    for wrong in ([(0, 0, 0)], [(0, 0, 0), (0, 0, 0)], [(0, 0, 0), (0, 0, R)]):
        with pytest.raises(InputError):
            family(cube, labels_N, wrong)


def test_wrong_axes_points_and_labels_are_refused(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR[:, :, :, :1])
    with pytest.raises(InputError, match="no two points on the axis 'route'"):
        curve(cube, labels_N, "route")
    with pytest.raises(InputError, match="outside the grid"):
        curve(cube, labels_N, "run", held={"trajectory": T})
    with pytest.raises(InputError, match="labels of shape"):
        diagnose(cube, labels_N[:-1])
    with pytest.raises(InputError, match="both classes"):
        diagnose(cube, np.zeros(N))
    with pytest.raises(InputError, match="weight"):
        diagnose(cube, labels_N, np.full(N, -1.0))


def test_json_holds_it_all(found: Diagnosis) -> None:
    text = json.dumps(found.to_json(), allow_nan=False)
    back = json.loads(text)
    assert back["kind"] == "diagnosis"
    assert len(back["combinations"]) == 8
    assert set(back["combinations"][0]["families"][0]["gain"]) == {
        "value",
        "low",
        "high",
        "runs_low",
        "runs_high",
    }
