"""The config of a run: it survives JSON, refuses what can't be, and keeps all but the seed for another run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import RunConfig

BACKBONE: dict[str, Any] = {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 6, "lora_rank": 2}


def routed_config(**settings: Any) -> RunConfig:
    return RunConfig(
        "recap", parse_model("recap", BACKBONE), TrainConfig(l2=1e-4), **{"routes": 4, **settings}
    )


@pytest.mark.parametrize(
    "config",
    [
        routed_config(route_choice="greedy"),
        replace(routed_config(), teachers=(Path("a/logits/train"), Path("b")), routes=1),
        RunConfig(
            "fcn",
            parse_model("fcn", {"dim": 6, "scale_norm": False}),
            TrainConfig(ema=0.99, seed=7, checkpoints=3, schedule="cosine"),
            calibration="isotonic",
            negative_rate=0.25,
            train_baseline=False,
            report_fields=False,
            threads=3,
        ),
        RunConfig("lr", parse_model("lr", {}), TrainConfig(ema_epochs=(0.1, 1 / 3))),
    ],
    ids=lambda config: config.model,
)
def test_round_trip_through_json(config: RunConfig) -> None:
    text = json.dumps(config.to_json(), allow_nan=False)
    again = RunConfig.from_json(json.loads(text))
    assert again == config
    assert type(again.model_config) is type(config.model_config)
    assert json.dumps(again.to_json()) == text


def test_only_models_with_routes_may_have_several() -> None:
    others: list[tuple[str, Frozen]] = [(name, parse_model(name, {})) for name in ("fcn", "ecn", "lr")]
    for name, config in others:
        RunConfig(name, config, TrainConfig(), routes=1)
        with pytest.raises(InputError, match=rf"{name} has no routes\n  fix: remove --routes"):
            RunConfig(name, config, TrainConfig(), routes=2)


@pytest.mark.parametrize("routes", [0, -1])
def test_at_least_one(routes: int) -> None:
    with pytest.raises(InputError, match="at least one"):
        routed_config(routes=routes)


def test_the_same_from_another_seed() -> None:
    config = replace(routed_config(route_choice="random", routes=2), teachers=(Path("t"),))
    other = config.with_seed(9)
    assert (other.train.seed, other.teachers, other.routes) == (9, (Path("t"),), 2)
    assert other.route_choice == "random"
    assert other.with_seed(config.train.seed) == config
