"""Settings are calibrated for later rows, and measured at the level of the rows that calibrate them."""

import pytest
import torch

from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation.levels import Levels, level
from recap_ctr.inference.measure import measure_settings
from recap_ctr.inference.setting import Setting
from recap_ctr.models.catalogue import build, parse_model


def test_a_setting_is_not_blamed_for_a_level_that_will_pass(prepared: PreparedData) -> None:
    torch.manual_seed(1)
    model = build("fcn", parse_model("fcn", {"dim": 4}), prepared.layout)
    usual = Levels(level(prepared.valid.labels) + 1.0, 0.25)
    own, later = (
        measure_settings(
            model,
            (),
            [Setting(1, None)],
            prepared.valid,
            torch.device("cpu"),
            calibrations={},
            kind="affine",
            negative_rate=1.0,
            levels=levels,
        )[0]
        for levels in (None, usual)
    )
    assert later["logloss"] == pytest.approx(own["logloss"], abs=1e-9) and later["auc"] == own["auc"]
    shifts = [entry["calibration"]["shift"] for entry in (own, later)]
    assert shifts[1] > shifts[0] and later["calibration"]["scale"] == own["calibration"]["scale"]
