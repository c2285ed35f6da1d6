"""The probe: how arms are ranked, what is challenged, and that a finished probe is read back."""

import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recap_ctr.axes.logits import Estimator, LogitTable, LogitWriter
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe import probe
from recap_ctr.recipe.probe import (
    Arm,
    ProbeConfig,
    ProbeResult,
    Race,
    Standing,
    finalists,
    is_worth_its_size,
    survivors,
    train_arm,
)
from recap_ctr.storage.files import read_json
from recap_ctr.training.pool import Recombination

SMALL: dict[str, Any] = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
TRAINING = TrainConfig(batch_size=256, schedule="constant", ema_epochs=(2.0,), learning_rate=5e-3)
TWO_AT_A_TIME = InThisProcess(workers=2)


def race(data: PreparedData, out: Path, config: ProbeConfig, **changes: Any) -> Race:
    defaults: dict[str, Any] = {
        "model": "fcn",
        "model_config": parse_model("fcn", SMALL),
        "training": TRAINING,
        "threads": 1,
        "device": "cpu",
    }
    return Race(config=config, data=data, out=out, **{**defaults, **changes})


def standing(l2: float, *aucs: float) -> Standing:
    return Standing(Arm(l2, 1e-3), list(aucs), 0.3, 1.0, len(aucs))


def test_a_slow_starter_that_still_gains_outlives_a_fast_one_that_peaked() -> None:
    fast, slow, hopeless = (
        standing(1e-5, 0.88, 0.90, 0.899),
        standing(1e-2, 0.86, 0.87, 0.885),
        standing(1, 0.5),
    )
    assert [survivor.arm.l2 for survivor in survivors([fast, slow, hopeless])] == [1e-2]
    assert slow.outlook == pytest.approx(0.885 + 3 * 0.015)
    assert fast.outlook == 0.90


def test_the_lead_is_taken_at_equal_epochs_unless_the_other_had_stopped() -> None:
    best, other = standing(1e-3, 0.86, 0.87, 0.89), standing(1e-2, 0.85, 0.88)
    assert best.lead(other) == pytest.approx(0.87 - 0.88)
    assert best.lead(replace(other, epochs=3)) == pytest.approx(0.89 - 0.88)


def test_half_survives_and_always_one() -> None:
    arms = [standing(10.0**-k, 0.8, 0.8 + k / 100) for k in range(5)]
    assert len(survivors(arms)) == 2
    assert len(survivors(arms[:1])) == 1


def test_the_grid_is_a_prior_against_all_rows() -> None:
    config = ProbeConfig(strengths=(10.0, 1000.0))
    assert [arm.l2 for arm in config.arms(1_000, 1e-3)] == [0.01, 1.0]
    assert [arm.l2 for arm in config.arms(2_000, 1e-3)] == [0.005, 0.5]


def test_the_verdict_says_how_sure_it_is() -> None:
    result = ProbeResult(0.01, 1e-3, 0.9, 1.0, "l2=1", 0.004, 0.001)
    assert result.verdict.startswith("clear: 0.400 ± 0.100 points")
    assert replace(result, margin=0.002).verdict.startswith("likely")
    assert replace(result, margin=0.0001).verdict.startswith("a toss-up")
    assert "no other arm" in replace(result, runner_up=None).verdict
    assert replace(result, dim=8).choices == "l2 0.01, learning rate 0.001, dim 8"


@pytest.mark.slow
def test_probe_finds_records_and_replays(prepared: PreparedData, tmp_path: Path) -> None:
    config = ProbeConfig(
        strengths=(1.0, 1e5),
        rungs=(1, 2),
        refinements=(),
        rate_factors=(2.0,),
        horizon_factors=(),
        dropouts=(),
        dim_factors=(),
        extend=0,
        max_rows=1_000,
    )
    out = tmp_path / "probe"
    result = race(prepared, out, config).run(TWO_AT_A_TIME, quiet=True)

    stored = read_json(out / "probe.json")
    assert stored["rows"] == 1_000
    best = max(stored["arms"], key=lambda arm: max(arm["valid_auc"]))
    assert result.auc == max(best["valid_auc"])
    # What 1,000 rows asked for, as strength over all rows.
    assert result.l2 == pytest.approx(best["l2"] * 1_000 / len(prepared.train), rel=1e-2)
    tables = [LogitTable(path) for path in sorted((out / "arms").glob("*/valid"))]
    assert len(tables) == 3
    for table in tables:
        table.check(prepared)
    assert [max(table.logits_NM.shape) for table in finalists(out).values()] == [len(prepared.valid)]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert race(prepared, out, config).run(TWO_AT_A_TIME, quiet=True) == result
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    with pytest.raises(InputError, match="belongs to other inputs"):
        race(prepared, out, config, threads=2).run(TWO_AT_A_TIME, quiet=True)


PLAIN_GRID: dict[str, Any] = {
    "rungs": (1,),
    "refinements": (),
    "horizon_factors": (),
    "dropouts": (),
    "dim_factors": (),
    "confirm": 0,
    "max_rows": 10**6,
}


def strengths(data: PreparedData, *l2s: float) -> tuple[float, ...]:
    """Return a grid whose arms have these strengths on all rows."""
    return tuple(len(data.train) * l2 for l2 in l2s)


def stand_in(monkeypatch: pytest.MonkeyPatch, learn: Callable[[Arm], Standing]) -> None:
    """Let arms stand as `learn` says, without any training."""

    def advance(race: Race, arms: Any, epochs: int) -> list[Standing]:
        for arm in arms:
            race.standings[arm] = replace(learn(arm), arm=arm)
        return [race.standings[arm] for arm in arms]

    monkeypatch.setattr(Race, "_advance", advance)
    monkeypatch.setattr(Race, "_difference_error", lambda race, arm, other: 0.001)


@pytest.mark.parametrize(
    ("extend", "l2", "edge", "arms"),
    [(0, 1e-4, "strongest", 3), (1, 1e-3, "strongest", 4), (2, 1e-2, "strongest", 5), (4, 1e-2, "", 6)],
)
def test_the_grid_is_extended_until_the_best_is_inside_it(
    prepared: PreparedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extend: int,
    l2: float,
    edge: str,
    arms: int,
) -> None:
    """The strength 1e-2 is the best of all; where it is not reached, or its neighbour not tried, the answer says so."""
    stand_in(monkeypatch, lambda arm: standing(arm.l2, 0.8 - abs(math.log10(arm.l2) + 2) / 100))
    config = ProbeConfig(strengths=strengths(prepared, 1e-6, 1e-5, 1e-4), extend=extend, **PLAIN_GRID)
    running = race(prepared, tmp_path, config, probe_rate=False)
    result = running.run(InThisProcess(), quiet=True)
    assert (result.l2, result.edge, len(running.standings)) == (l2, edge, arms)
    assert ("the best may lie beyond" in result.verdict) == bool(edge)
    assert race(prepared, tmp_path, config, probe_rate=False).run(InThisProcess(), quiet=True) == result


def test_the_answer_is_inside_the_grid_if_another_arm_promised_more(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weakest strength is the best at once; the one in the middle rises steeply, but gets no more epochs."""

    def learn(arm: Arm) -> Standing:
        if arm.l2 == 1e-5:
            return standing(arm.l2, 0.5, 0.7)
        return standing(arm.l2, 0.75 - abs(math.log10(arm.l2) + 7) / 100, 0.7)

    stand_in(monkeypatch, learn)
    config = ProbeConfig(strengths=strengths(prepared, 1e-6, 1e-5, 1e-4), **PLAIN_GRID)
    result = race(prepared, tmp_path, config, probe_rate=False).run(InThisProcess(), quiet=True)
    assert (result.l2, result.edge) == (1e-7, "")


def test_no_strength_is_weaker_than_none_at_all(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda arm: standing(arm.l2, 0.8 - arm.l2))
    config = ProbeConfig(strengths=strengths(prepared, 0.0, 1e-2), **PLAIN_GRID)
    result = race(prepared, tmp_path / "none", config, probe_rate=False).run(InThisProcess(), quiet=True)
    assert (result.l2, result.edge) == (0.0, "")
    stand_in(monkeypatch, lambda arm: standing(arm.l2, 0.5 + arm.l2 - arm.l2**2))
    result = race(prepared, tmp_path / "more", config, probe_rate=False).run(InThisProcess(), quiet=True)
    assert (result.l2, result.edge) == (0.1, "")


def test_strengths_beyond_the_grid_need_time(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda arm: standing(arm.l2, 0.8 - arm.l2))
    config = ProbeConfig(strengths=strengths(prepared, 1e-3, 1e-2), **PLAIN_GRID)
    result = race(prepared, tmp_path, config, probe_rate=False, seconds=0.0).run(InThisProcess(), quiet=True)
    assert (result.l2, result.edge) == (1e-3, "weakest")
    assert "l2 beyond the grid" in result.skipped


@pytest.mark.slow
def test_an_arm_goes_on_where_it_stopped(prepared: PreparedData, tmp_path: Path) -> None:
    def advance(epochs: int, out: Path) -> dict[str, Any]:
        train = TRAINING.model_copy(update={"max_epochs": epochs}).model_dump(mode="json")
        return train_arm(str(prepared.path), "fcn", SMALL, train, epochs, 500, 1, "cpu", str(out))

    first = advance(1, tmp_path / "stepwise")
    second = advance(3, tmp_path / "stepwise")
    straight = advance(3, tmp_path / "straight")
    assert first["aucs"] == second["aucs"][:1]
    assert second["aucs"] == straight["aucs"]
    assert len(second["aucs"]) == 3


def test_an_arm_on_some_rows_has_the_recombined_rows_that_stand_for_them(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recombination, teacher = Recombination(prepared, 2), tmp_path / "teacher"
    table = recombination.table_of(teacher)
    for path, split, rows in [
        (teacher / "logits" / "train", "train", prepared.train),
        (table, "recombined", recombination.rows()),
    ]:
        writer = LogitWriter(path, prepared, split, [Estimator("t")], recombination.inputs, rows)
        with writer:
            writer.write(np.asarray(rows.ids[:, :1] % 7, np.float32))
    seen: dict[str, Any] = {}

    def note(*arguments: Any, **keywords: Any) -> None:
        seen.update(keywords, rows=arguments[3])
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "train_weights", note)
    training = TRAINING.model_copy(update={"recombined": 2}).model_dump(mode="json")
    with pytest.raises(KeyboardInterrupt):
        train_arm(
            *(str(prepared.path), "fcn", SMALL, training, 1, 500, 1, "cpu", str(tmp_path / "arm")),
            teachers=[str(teacher / "logits" / "train")],
            pool=[str(table)],
        )
    drawn, pool = seen["rows"].train, seen["pool"]
    assert len(drawn) == 500 and len(pool.rows) == 1_000
    np.testing.assert_array_equal(pool.rows.ids[:500, 0], drawn.ids[:, 0])  # The first side stays in its row.
    np.testing.assert_allclose(pool.targets, sigmoid(pool.rows.ids[:, 0] % 7), rtol=1e-5)


@pytest.mark.slow
def test_a_cosine_is_one_curve_wherever_it_is_looked_at(prepared: PreparedData, tmp_path: Path) -> None:
    training = TRAINING.model_copy(update={"schedule": "cosine", "max_epochs": 4, "patience": 9})
    config = ProbeConfig(
        strengths=(1.0, 1.0, 10.0),
        rungs=(2, 4),
        refinements=(),
        horizon_factors=(),
        dropouts=(),
        dim_factors=(),
        extend=0,
        max_rows=500,
    )
    probed = race(prepared, tmp_path / "probe", config, training=training, probe_rate=False)
    probed.run(TWO_AT_A_TIME, quiet=True)
    arms = read_json(tmp_path / "probe" / "probe.json")["arms"]
    assert len(arms) == 2  # equal candidates are one
    best = max(arms, key=lambda arm: len(arm["valid_auc"]))
    assert len(best["valid_auc"]) == 4
    stopped = train_arm(
        str(prepared.path),
        "fcn",
        SMALL,
        training.model_copy(update={"l2": best["l2"]}).model_dump(mode="json"),
        4,
        500,
        1,
        "cpu",
        str(tmp_path / "straight"),
    )
    assert stopped["aucs"] == best["valid_auc"]


def test_each_challenger_differs_from_the_best_in_one_setting(prepared: PreparedData, tmp_path: Path) -> None:
    best, fcn = Arm(1e-3, 2e-3), parse_model("fcn", {})

    def challengers(setting: str, model: str = "fcn", **changes: Any) -> list[Arm]:
        defaults = {"model": model, "model_config": parse_model(model, {})}
        return race(prepared, tmp_path, ProbeConfig(), **{**defaults, **changes}).challengers(setting, best)

    rates = [replace(best, learning_rate=1e-3), replace(best, learning_rate=4e-3)]
    assert challengers("learning_rate") == rates
    assert challengers("horizon") == [replace(best, horizon=1.0), replace(best, horizon=4.0)]
    assert challengers("horizon", training=TrainConfig()) == []  # nothing is averaged
    assert challengers("dropout") == [replace(best, dropout=0.0), replace(best, dropout=0.2)]
    assert challengers("dim") == [replace(best, dim=8), replace(best, dim=32)]
    small = parse_model("fcn", {"dim": 2})
    assert challengers("dim", model_config=small) == [replace(best, dim=4)]  # 1 can't be halved
    assert challengers("dropout", "lr") == []
    changed = replace(best, dropout=0.2, dim=8, horizon=3.0)
    assert changed.model_config("fcn", fcn) == parse_model(
        "fcn", {"dim": 8, "exponential_dropout": 0.2, "linear_dropout": 0.2}
    )
    assert changed.train_config(TRAINING).ema_epochs == (3.0,)
    # Without it, a young average would not have the other horizon.
    assert changed.train_config(TRAINING).ema_warmup == 9.0 * 2.0 / 3.0
    assert changed.train_config(TrainConfig()).ema_epochs == ()
    assert changed.name == "l2=0.001,learning_rate=0.002,horizon=3,dropout=0.2,dim=8"


def test_what_is_not_challenged_leaves_no_trace() -> None:
    none = ProbeConfig(horizon_factors=(), dropouts=(), dim_factors=())
    assert none.identity().keys() & {"horizon_factors", "dropouts", "dim_factors"} == set()
    assert ProbeConfig(dropouts=(0.3,)).identity()["dropouts"] == [0.3]
    assert ProbeConfig.model_validate(tomllib.loads(none.to_toml())) == none


def test_larger_vectors_must_win_clearly() -> None:
    base, better = standing(1e-3, 0.86, 0.87), standing(1e-2, 0.86, 0.873)
    assert is_worth_its_size(better, base, 0.001, larger=True)
    assert not is_worth_its_size(better, base, 0.002, larger=True)
    assert is_worth_its_size(better, base, 0.002, larger=False)
    assert not is_worth_its_size(base, better, 0.002, larger=False)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 0.0])
def test_further_settings_are_challenged_where_there_is_time(
    prepared: PreparedData, tmp_path: Path, seconds: float | None
) -> None:
    config = ProbeConfig(
        strengths=(10.0,),
        rungs=(1,),
        refinements=(),
        rate_factors=(2.0,),
        horizon_factors=(0.5,),
        dropouts=(0.3,),
        dim_factors=(0.5, 2.0),
        confirm=0,
        max_rows=1_000,
    )
    result = race(prepared, tmp_path / "probe", config, seconds=seconds).run(TWO_AT_A_TIME, quiet=True)
    arms = read_json(tmp_path / "probe" / "probe.json")["arms"]
    if seconds == 0.0:
        assert result.skipped == ("learning_rate", "horizon", "dropout", "dim")
        assert len(arms) == 1
        return
    assert result.skipped == ()
    trained = sorted(path.name for path in (tmp_path / "probe" / "arms").iterdir())
    assert len(trained) == 6
    for setting, value in (("horizon", 1.0), ("dropout", 0.3), ("dim", 2)):
        assert any(arm[setting] == value for arm in arms)
    assert any(name.endswith("dim=8") for name in trained)
    curves = [tuple(arm["valid_auc"]) for arm in arms]
    assert len(set(curves)) == len(curves)  # every change made a difference
    best = max(arms, key=lambda arm: max(arm["valid_auc"]))
    assert (result.horizon, result.dropout, result.dim) == (best["horizon"], best["dropout"], best["dim"])
