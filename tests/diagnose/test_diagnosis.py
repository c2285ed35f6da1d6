"""The diagnosis against brute force.

Shape suffixes: N rows, S runs, T points of the trajectory, R routes, M estimators.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.diagnose import (
    AXES,
    Cube,
    Diagnosis,
    Floats,
    curve,
    decompose,
    diagnose,
    exact_gain,
    findings,
    nonshared_variance,
    predicted_gain,
    two_axis,
)
from recap_ctr.diagnose import (
    family as family_of,
)
from recap_ctr.diagnose.diagnosis import decomposition_figures
from recap_ctr.diagnose.figures import Grid
from recap_ctr.diagnose.measure import measure
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from tests.support.simulated_logits import N, R, S, T, estimates, simulated


def averaged_over(logits_NSTR: Floats, averaged: tuple[str, ...], axis: str) -> Iterator[Floats]:
    """Rows × estimators along `axis` at each point of the other axes, some of which are averaged."""
    kept = logits_NSTR.mean(axis=tuple(1 + AXES.index(other) for other in averaged), keepdims=True)
    moved = np.moveaxis(kept, 1 + AXES.index(axis), -1)
    for point in np.ndindex(moved.shape[1:3]):
        yield moved[:, point[0], point[1]]


def test_families_of_all_combinations_are_those_of_the_theory(
    data: tuple[Floats, Floats], diagnosis: Diagnosis
) -> None:
    logits_NSTR, labels_N = data
    assert [combination.averaged for combination in diagnosis.combinations][:2] == [(), ("run",)]
    assert len(diagnosis.combinations) == 8
    for combination in diagnosis.combinations:
        assert {family.axis for family in combination.families} == set(AXES) - set(combination.averaged)
        for family in combination.families:
            points = list(averaged_over(logits_NSTR, family.averaged, family.axis))

            def mean(of: Callable[[Floats], Any], points: list[Floats] = points) -> float:
                return float(np.mean([of(logits_NM) for logits_NM in points]))

            def alone(metric: Callable[[Floats, Floats], float]) -> float:
                return mean(
                    lambda logits_NM: np.mean([metric(labels_N, column_N) for column_N in logits_NM.T])
                )

            def together(metric: Callable[[Floats, Floats], float]) -> float:
                return mean(lambda logits_NM: metric(labels_N, logits_NM.mean(axis=1)))

            assert family.count == points[0].shape[1]
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
                assert getattr(family, name).value == pytest.approx(value, rel=1e-9), (
                    family.axis,
                    family.averaged,
                    name,
                )
            # Labels cancel: the exact gap is the measured gain.
            assert family.gain.value == pytest.approx(
                family.loss_alone.value - family.loss_together.value, rel=1e-9
            )
            assert family.loss_alone.value == pytest.approx(combination.loss.value, rel=1e-12)


def test_mean_of_a_trajectory_over_its_last_checkpoint(
    data: tuple[Floats, Floats], diagnosis: Diagnosis
) -> None:
    logits_NSTR, labels_N = data
    family = diagnosis.family("trajectory")
    assert family is not None
    assert family.over_last is not None
    expected = np.mean(
        [
            metrics.logloss(labels_N, logits_NSTR[:, s, -1, r])
            - metrics.logloss(labels_N, logits_NSTR[:, s, :, r].mean(axis=1))
            for s, r in itertools.product(range(S), range(R))
        ]
    )
    assert family.over_last.value == pytest.approx(expected, rel=1e-9)
    assert diagnosis.family("run") is not None
    assert diagnosis.family("run", {"run"}) is None


def test_equicorrelated_figures_are_the_intraclass_correlation(
    data: tuple[Floats, Floats], diagnosis: Diagnosis
) -> None:
    logits_NSTR, _ = data
    family = diagnosis.family("route", ("trajectory",))
    assert family is not None
    assert family.rho is not None
    assert family.tau2 is not None
    logits_NSR = logits_NSTR.mean(axis=2)
    separate = logits_NSR.var(axis=2, ddof=1).mean()
    shared = logits_NSR.mean(axis=2).var(axis=1, ddof=1).mean() - separate / R
    assert family.tau2.value == pytest.approx(separate + shared, rel=1e-9)
    assert family.rho.value == pytest.approx(shared / (separate + shared), rel=1e-9)
    assert family.tau2.value * (1 - family.rho.value) == pytest.approx(family.variance.value, rel=1e-9)
    for axis, averaged in (("run", ()), ("route", ("run",)), ("trajectory", ("run", "route"))):
        other = diagnosis.family(axis, averaged)
        assert other is not None
        assert other.rho is None


@pytest.mark.slow
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

    decompositions = measure(
        Cube.from_array(logits_NSTR),
        labels_N,
        lambda estimate: [
            decomposition_figures(estimate, Grid(shape), order)
            for k in (2, 3)
            for order in itertools.permutations(AXES, k)
        ],
    )

    orders = decompose(logits_NSTR)
    for decomposition in decompositions:
        summed = sum(share.value for share in decomposition.shares)
        assert summed == pytest.approx(decomposition.total.value, rel=1e-9)
        if len(decomposition.order) == 3:
            assert decomposition.total.value == pytest.approx(
                logits_NSTR.reshape(40, -1).var(axis=1).mean(), rel=1e-9
            )
            expected = [orders[decomposition.order][axis].mean() for axis in decomposition.order]
        else:
            at = [1 + AXES.index(axis) for axis in decomposition.order]
            moved_N3AB = np.moveaxis(logits_NSTR, at, (2, 3))
            expected = [
                np.mean([share.mean() for share in shares])
                for shares in zip(
                    *(two_axis(moved_N3AB[:, k]) for k in range(moved_N3AB.shape[1])), strict=True
                )
            ]
        assert [share.value for share in decomposition.shares] == pytest.approx(
            expected, rel=1e-9, abs=1e-15 * spread**2
        )


def test_weights_count_rows() -> None:
    logits_NSTR, labels_N = simulated(3, (2, 2, 1), 200)
    weights_N = np.random.default_rng(4).integers(0, 4, 200)
    at = np.repeat(np.arange(200), weights_N)

    weighted = diagnose(Cube.from_array(logits_NSTR), labels_N, weights_N)
    repeated = diagnose(Cube.from_array(logits_NSTR[at]), labels_N[at])

    # Whether AUC is forecast depends on its interval, which knows how many rows there are.
    counted, copied = (
        [part["value"] for part in estimates(replace(diagnosis, curves=()))]
        for diagnosis in (weighted, repeated)
    )
    assert len(counted) > 50
    np.testing.assert_allclose(counted, copied, rtol=1e-9, atol=1e-15)


def test_curves_are_means_over_all_subsets(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR)
    cases = {
        (): {"trajectory": 1, "run": 2},
        ("trajectory", "run"): {},
        ("trajectory",): {},  # each run in turn
    }
    for averaged, held in cases.items():
        measured = curve(cube, labels_N, "route", averaged, held)
        families_FNM = {
            (): [logits_NSTR[:, 2, 1]],
            ("trajectory", "run"): [logits_NSTR.mean(axis=(1, 2))],
            ("trajectory",): list(np.moveaxis(logits_NSTR.mean(axis=2), 1, 0)),
        }[averaged]
        assert [point.count for point in measured.points] == [1, 2, 3, 4]
        for point in measured.points:
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


def test_curve_with_drawn_subsets_agrees_with_all() -> None:
    logits_NSTR, labels_N = simulated(5, (9, 1, 1), 300)
    measured = curve(Cube.from_array(logits_NSTR), labels_N, "run")
    logits_NM = logits_NSTR[:, :, 0, 0]
    every = [exact_gain(logits_NM[:, chosen]) for chosen in itertools.combinations(range(9), 4)]
    assert measured.points[3].gain.value == pytest.approx(np.mean(every), rel=0.02)
    assert measured.points[8].gain.value == pytest.approx(exact_gain(logits_NM), rel=1e-9)
    assert all(point.gain.runs_low is not None for point in measured.points)


def test_routes_that_share_leaves_are_forecast_from_their_tree() -> None:
    rng = np.random.default_rng(3)
    rows, leaves = 4_000, 3
    labels_N = (rng.random(rows) < 0.3).astype(float)
    towers = rng.normal(-1, 0.3, (2, leaves, rows))
    pairs = sorted(itertools.product(range(leaves), repeat=2), key=lambda pair: (max(pair), pair))
    logits_NK = np.stack([(towers[0, i] + towers[1, j]) / 2 for i, j in pairs], axis=1)
    shares = tuple(
        float(np.mean([((i != k) + (j != m)) / 2 for i, j in pairs[:count] for k, m in pairs[:count]]))
        for count in range(1, 10)
    )
    four = replace(Cube.from_array(logits_NK[:, None, None, :4]), route_shares=shares)
    by_tree = curve(four, labels_N, "route").forecast[8].gain.value
    as_if_exchangeable = curve(replace(four, route_shares=()), labels_N, "route").forecast[8].gain.value
    measured = predicted_gain(logits_NK)
    assert by_tree == pytest.approx(measured, rel=0.05)
    assert as_if_exchangeable < 0.92 * measured
    with_shares = diagnose(four, labels_N)
    assert "4 routes" in " ".join(findings(with_shares))


def test_many_routes_are_forecast_from_their_tree_too() -> None:
    """Leaves are exhausted at sixteen routes here, so that as many again would save nothing."""
    rng = np.random.default_rng(4)
    rows, leaves = 400, 4
    labels_N = (rng.random(rows) < 0.3).astype(float)
    towers = rng.normal(-1, 0.3, (2, leaves, rows))
    pairs = sorted(itertools.product(range(leaves), repeat=2), key=lambda pair: (max(pair), pair))
    logits_NK = np.stack([(towers[0, i] + towers[1, j]) / 2 for i, j in pairs], axis=1)
    shares = (0.0, *(1 - 1 / leaves for _ in range(31)))
    diagnosis = diagnose(replace(Cube.from_array(logits_NK[:, None, None]), route_shares=shares), labels_N)
    (sentence,) = (sentence for sentence in findings(diagnosis) if "32 routes instead of 16" in sentence)
    assert "would save a further 0 (" in sentence


def test_churn_by_hand(data: tuple[Floats, Floats], diagnosis: Diagnosis) -> None:
    logits_NSTR, _ = data
    scores = {
        (): logits_NSTR[:, :, -1, 0],
        ("trajectory",): logits_NSTR.mean(axis=2)[:, :, 0],
        ("route",): logits_NSTR.mean(axis=3)[:, :, -1],
        ("trajectory", "route"): logits_NSTR.mean(axis=(2, 3)),
    }
    assert [churn.averaged for churn in diagnosis.churn] == list(scores)
    for churn in diagnosis.churn:
        logits_NS = scores[churn.averaged]
        pairs = list(itertools.combinations(range(S), 2))
        tenth_NS = np.argsort(np.argsort(logits_NS, axis=0), axis=0) * 10 // N
        change = [logits_NS[:, a] - logits_NS[:, b] for a, b in pairs]
        moved = [metrics.sigmoid(logits_NS[:, a]) - metrics.sigmoid(logits_NS[:, b]) for a, b in pairs]
        assert churn.logit_mean.value == pytest.approx(np.mean(np.abs(change)))
        assert churn.logit_rms.value == pytest.approx(np.sqrt(np.mean(np.square(change))))
        assert churn.logit_rms.value**2 == pytest.approx(2 * logits_NS.var(axis=1, ddof=1).mean())
        assert churn.probability_mean.value == pytest.approx(np.mean(np.abs(moved)))
        assert churn.probability_rms.value == pytest.approx(np.sqrt(np.mean(np.square(moved))))
        share = np.mean([(tenth_NS[:, a] != tenth_NS[:, b]).mean() for a, b in pairs])
        assert churn.decile_changes.value == pytest.approx(share)


def test_any_estimators_make_a_family(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR)
    members = [(0, 0, 0), (2, 1, 3), (1, 0, 2)]
    measured = family_of(cube, labels_N, members)
    logits_NM = np.stack([logits_NSTR[:, s, t, r] for s, t, r in members], axis=1)
    assert measured.count == 3
    assert measured.predicted.value == pytest.approx(predicted_gain(logits_NM))
    assert measured.gain.value == pytest.approx(exact_gain(logits_NM))
    assert measured.gain.runs_low is not None
    assert family_of(cube, labels_N, members[:2]).gain.runs_low is None
    for wrong in ([(0, 0, 0)], [(0, 0, 0), (0, 0, 0)], [(0, 0, 0), (0, 0, R)]):
        with pytest.raises(InputError):
            family_of(cube, labels_N, wrong)


def test_wrong_axes_points_and_labels_are_refused(data: tuple[Floats, Floats]) -> None:
    logits_NSTR, labels_N = data
    cube = Cube.from_array(logits_NSTR[:, :, :, :1])
    with pytest.raises(InputError, match="the axis 'route' has no two points"):
        curve(cube, labels_N, "route")
    with pytest.raises(InputError, match="outside the grid"):
        curve(cube, labels_N, "run", held={"trajectory": T})
    with pytest.raises(InputError, match="labels of shape"):
        diagnose(cube, labels_N[:-1])
    with pytest.raises(InputError, match="both classes"):
        diagnose(cube, np.zeros(N))
    with pytest.raises(InputError, match="weight"):
        diagnose(cube, labels_N, np.full(N, -1.0))


def test_json_holds_it_all(diagnosis: Diagnosis) -> None:
    text = json.dumps(diagnosis.to_json(), allow_nan=False)
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
