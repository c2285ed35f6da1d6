"""Calibrate and measure every setting of a torch model on the validation rows.

Shapes: N rows, K routes.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.predict import predict, predict_routes
from recap_ctr.data.shards import Shard
from recap_ctr.evaluation.calibrate import Calibration, level_shift, shifted
from recap_ctr.evaluation.levels import Levels, calibrated
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.inference.setting import Setting, setting_quality
from recap_ctr.models.recap import Recap, Route


def measure_settings(
    model: nn.Module,
    routes: Sequence[Route],
    settings: Sequence[Setting],
    valid: Shard,
    device: torch.device,
    *,
    calibrations: Mapping[Setting, Calibration],
    kind: str,
    negative_rate: float,
    levels: Levels | None = None,
) -> list[dict[str, Any]]:
    """Return the manifest's entry for each setting, with its calibration and its quality on the validation rows.

    A setting in `calibrations` keeps its calibration; the others get one of `kind`, fitted on their own logits, as far
    as the level of these rows lasts (`levels`). A setting's quality is that at these rows' own level.
    Settings of the same depth must follow each other, so that their routes are scored in one pass.
    """
    entries = []
    for depth, same_depth in groupby(settings, key=lambda setting: setting.depth):
        if isinstance(model, Recap):
            logits_NK = predict_routes(model, valid, routes, device, depth)
        else:
            logits_NK = predict(model, valid, device).astype(np.float64)[:, None]
        logits_NK, weights_N = undo_sampling(logits_NK, valid, negative_rate)
        for setting in same_depth:
            logits_N = logits_NK[:, : setting.routes].mean(axis=1)
            calibration = calibrations.get(setting)
            if calibration is None:
                calibration = calibrated(kind, levels, valid.labels, logits_N, weights_N)
            shown = calibration
            if levels is not None:
                shown = shifted(
                    calibration, level_shift(valid.labels, calibration.apply(logits_N), weights_N)
                )
            entry = setting_quality(setting, shown, valid.labels, logits_N, weights_N)
            entries.append({**entry, "calibration": calibration.to_dict()})
    return entries
