import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.axes.logits import LogitTable
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.probe import (
    Arm,
    Found,
    ProbeConfig,
    Standing,
    advance,
    challengers,
    grid,
    is_worth_its_size,
    probe,
    survivors,
)
from recap_ctr.storage.files import read_json

pytestmark = pytest.mark.usefixtures("one_process")

SMALL: dict[str, Any] = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
SETTINGS = TrainConfig(batch_size=256, schedule="constant", ema_epochs=(2.0,), learning_rate=5e-3)


def standing(l2: float, *aucs: float) -> Standing:
    return Standing(Arm(l2, 1e-3), list(aucs), 0.3, 1.0, len(aucs))


def test_a_slow_starter_that_still_gains_outlives_a_fast_one_that_peaked() -> None:
    fast, slow, hopeless = (
        standing(1e-5, 0.88, 0.90, 0.899),
        standing(1e-2, 0.86, 0.87, 0.885),
        standing(1, 0.5),
    )
    assert [one.arm.l2 for one in survivors([fast, slow, hopeless])] == [1e-2]
    assert slow.outlook == pytest.approx(0.885 + 3 * 0.015)
    assert fast.outlook == 0.90


def test_the_lead_is_taken_at_equal_epochs_unless_the_other_had_stopped() -> None:
    best, other = standing(1e-3, 0.86, 0.87, 0.89), standing(1e-2, 0.85, 0.88)
    assert best.lead(other) == pytest.approx(0.87 - 0.88)
    assert best.lead(replace(other, asked=3)) == pytest.approx(0.89 - 0.88)


def test_half_survives_and_always_one() -> None:
    arms = [standing(10.0**-k, 0.8, 0.8 + k / 100) for k in range(5)]
    assert len(survivors(arms)) == 2
    assert len(survivors(arms[:1])) == 1


def test_the_grid_is_a_prior_against_all_rows() -> None:
    config = ProbeConfig(strengths=(10.0, 1000.0))
    assert [arm.l2 for arm in grid(config, 1_000, 1e-3)] == [0.01, 1.0]
    assert [arm.l2 for arm in grid(config, 2_000, 1e-3)] == [0.005, 0.5]


def test_the_verdict_says_how_sure_it_is() -> None:
    found = Found(0.01, 1e-3, 0.9, 1.0, "l2=1", 0.004, 0.001)
    assert found.verdict.startswith("clear: 0.400 ± 0.100 points")
    assert replace(found, margin=0.002).verdict.startswith("likely")
    assert replace(found, margin=0.0001).verdict.startswith("a toss-up")
    assert "nothing" in replace(found, runner_up=None).verdict


def test_probe_finds_records_and_replays(prepared: PreparedData, tmp_path: Path) -> None:
    config = ProbeConfig(
        strengths=(1.0, 1e5), rungs=(1, 2), refinements=(), rate_factors=(2.0,), horizon_factors=(),
        dropouts=(), dim_factors=(), max_rows=1_000,
    )  # fmt: skip
    model = parse_model("fcn", SMALL)

    def go() -> Found:
        return probe(
            config, "fcn", model, SETTINGS, prepared, tmp_path / "probe", threads=1, device="cpu", workers=2, quiet=True
        )  # fmt: skip

    found = go()

    stored = read_json(tmp_path / "probe" / "probe.json")
    assert stored["rows"] == 1_000
    best = max(stored["arms"], key=lambda arm: max(arm["valid_auc"]))
    assert found.auc == max(best["valid_auc"])
    # What 1,000 rows asked for, as strength over all rows.
    assert found.l2 == pytest.approx(best["l2"] * 1_000 / len(prepared.train), rel=1e-2)
    tables = [LogitTable(path) for path in sorted((tmp_path / "probe" / "arms").glob("*/valid"))]
    assert len(tables) == 3
    for table in tables:
        table.check(prepared)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert go() == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    with pytest.raises(InputError, match="belongs to other inputs"):
        probe(
            config, "fcn", model, SETTINGS, prepared, tmp_path / "probe", threads=2, device="cpu", quiet=True
        )


def test_an_arm_goes_on_where_it_stopped(prepared: PreparedData, tmp_path: Path) -> None:
    def go(epochs: int, out: Path) -> dict[str, Any]:
        train = SETTINGS.model_copy(update={"max_epochs": epochs}).model_dump(mode="json")
        return advance(str(prepared.path), "fcn", SMALL, train, epochs, 500, 1, "cpu", str(out))

    first = go(1, tmp_path / "one")
    second = go(3, tmp_path / "one")
    straight = go(3, tmp_path / "two")
    assert first["aucs"] == second["aucs"][:1]
    assert second["aucs"] == straight["aucs"]
    assert len(second["aucs"]) == 3


def test_a_cosine_is_one_curve_wherever_it_is_looked_at(prepared: PreparedData, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"schedule": "cosine", "max_epochs": 4, "patience": 9})
    config = ProbeConfig(
        strengths=(1.0, 1.0, 10.0), rungs=(2, 4), refinements=(), horizon_factors=(), dropouts=(), dim_factors=(),
        max_rows=500,
    )  # fmt: skip
    probe(
        config, "fcn", parse_model("fcn", SMALL), settings, prepared, tmp_path / "probe", threads=1, device="cpu",
        workers=2, probe_rate=False, quiet=True,
    )  # fmt: skip
    arms = read_json(tmp_path / "probe" / "probe.json")["arms"]
    assert len(arms) == 2  # equal candidates are one
    best = max(arms, key=lambda one: len(one["valid_auc"]))
    assert len(best["valid_auc"]) == 4
    stopped = advance(
        str(prepared.path), "fcn", SMALL,
        settings.model_copy(update={"l2": best["l2"], "seed": settings.seed}).model_dump(mode="json"),
        4, 500, 1, "cpu", str(tmp_path / "straight"),
    )  # fmt: skip
    assert stopped["aucs"] == best["valid_auc"]


def test_each_challenger_differs_from_the_best_in_one_setting() -> None:
    config, best = ProbeConfig(), Arm(1e-3, 2e-3)
    fcn, autoint = parse_model("fcn", {}), parse_model("autoint", {})

    def found(what: str, model: str = "fcn", settings: TrainConfig = SETTINGS) -> list[Arm]:
        return challengers(what, config, best, settings, model, fcn if model == "fcn" else autoint)

    assert found("learning_rate") == [replace(best, learning_rate=1e-3), replace(best, learning_rate=4e-3)]
    assert found("horizon") == [replace(best, horizon=1.0), replace(best, horizon=4.0)]
    assert found("horizon", settings=TrainConfig()) == []  # nothing is averaged
    assert found("dropout") == [replace(best, dropout=0.0), replace(best, dropout=0.2)]
    assert found("dim") == [replace(best, dim=8), replace(best, dim=32)]
    odd = parse_model("fcn", {"dim": 2})
    assert challengers("dim", config, best, SETTINGS, "fcn", odd) == [
        replace(best, dim=4)
    ]  # 1 can't be halved
    assert challengers("dropout", config, best, SETTINGS, "lr", parse_model("lr", {})) == []
    changed = replace(best, dropout=0.2, dim=8, horizon=3.0)
    assert changed.model_config("fcn", fcn) == parse_model(
        "fcn", {"dim": 8, "exponential_dropout": 0.2, "linear_dropout": 0.2}
    )
    assert changed.train_config(SETTINGS).ema_epochs == (3.0,)
    assert (
        changed.train_config(SETTINGS).ema_warmup == 9.0 * 2.0 / 3.0
    )  # else a young average would not know of it
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


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_further_settings_are_challenged_where_there_is_time(
    prepared: PreparedData, tmp_path: Path, seconds: float | None
) -> None:
    config = ProbeConfig(
        strengths=(10.0,), rungs=(1,), refinements=(), rate_factors=(2.0,), horizon_factors=(0.5,), dropouts=(0.3,),
        dim_factors=(0.5, 2.0), confirm=0, max_rows=1_000,
    )  # fmt: skip
    found = probe(
        config, "fcn", parse_model("fcn", SMALL), SETTINGS, prepared, tmp_path / "probe", threads=1, device="cpu",
        workers=2, seconds=seconds, quiet=True,
    )  # fmt: skip
    arms = read_json(tmp_path / "probe" / "probe.json")["arms"]
    if seconds == 0.0:
        assert found.skipped == ("learning_rate", "horizon", "dropout", "dim")
        assert len(arms) == 1
        return
    assert found.skipped == ()
    trained = sorted(path.name for path in (tmp_path / "probe" / "arms").iterdir())
    assert len(trained) == 6
    for setting, value in (("horizon", 1.0), ("dropout", 0.3), ("dim", 2)):
        assert any(arm[setting] == value for arm in arms)
    assert any(name.endswith("dim=8") for name in trained)
    curves = [tuple(arm["valid_auc"]) for arm in arms]
    assert len(set(curves)) == len(curves)  # every change made a difference
    best = max(arms, key=lambda arm: max(arm["valid_auc"]))
    assert (found.horizon, found.dropout, found.dim) == (best["horizon"], best["dropout"], best["dim"])
