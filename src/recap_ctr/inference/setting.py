"""Settings of the dial: how many routes are averaged, and to which depth the recursion runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.metrics import auc, logloss
from recap_ctr.storage.arrays import Array

GRAPHS = "graphs"
LARGEST_EXCESS = 0.02
"""How far the logloss of an offered setting may lie above that of the full one, as a share of it.

Averaged weights, distillation and routes together gain 2.8 % over one plain FCN on ML-1M. A setting that loses 2 %
gives most of that away; a plain model of the same cost would do as well.
"""
LARGEST_LOSS_OF_GAIN = 0.5
"""How much of the full setting's gain over the base rate an offered setting may lose.

Where clicks are rare and hard to predict, the whole gain may be 2 % of the logloss. This limit keeps out a setting that
is nearer to the base rate than to the full setting. A setting that is no better than the base rate is never offered.
"""


@dataclass(frozen=True)
class Setting:
    """One position of the dial between accuracy and cost.

    >>> print(Setting(8, 4)), print(Setting(1, 2)), print(Setting(1, None))
    8 routes at depth 4
    1 route at depth 2
    the whole model
    (None, None, None)
    """

    routes: int
    """K of Eq. 15: how many of the artifact's routes are averaged."""
    depth: int | None
    """Steps of the recursion; None for models without recursion."""

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Return the setting that an entry of a manifest describes."""
        return cls(entry["routes"], entry["depth"])

    def __str__(self) -> str:
        if self.depth is None:
            return "the whole model"
        return f"{self.routes} route{'s' * (self.routes > 1)} at depth {self.depth}"

    @property
    def file(self) -> str:
        """Return the path of the setting's graph inside an artifact. It is derived, never read from a file."""
        depth = "" if self.depth is None else f"-depth-{self.depth}"
        return f"{GRAPHS}/routes-{self.routes}{depth}.onnx"


def dial_settings(num_routes: int, depths: Sequence[int]) -> tuple[Setting, ...]:
    """Return the dial, most accurate first: fewer and fewer routes, then one route at each smaller trained depth.

    >>> [(s.routes, s.depth) for s in dial_settings(8, [2, 4])]
    [(8, 4), (4, 4), (2, 4), (1, 4), (1, 2)]
    >>> [(s.routes, s.depth) for s in dial_settings(5, [3])]
    [(5, 3), (4, 3), (2, 3), (1, 3)]
    """
    if not num_routes:
        return (Setting(1, None),)
    *smaller, full = sorted(depths)
    return (
        *(Setting(count, full) for count in _route_counts(num_routes)),
        *(Setting(1, depth) for depth in reversed(smaller)),
    )


def measured_settings(num_routes: int, depths: Sequence[int]) -> tuple[Setting, ...]:
    """Return the settings that are calibrated and measured: the dial's numbers of routes at every trained depth.

    >>> [(s.routes, s.depth) for s in measured_settings(2, [2, 4])]
    [(2, 4), (1, 4), (2, 2), (1, 2)]
    """
    if not num_routes:
        return (Setting(1, None),)
    return tuple(
        Setting(count, depth) for depth in sorted(depths, reverse=True) for count in _route_counts(num_routes)
    )


def _route_counts(num_routes: int) -> list[int]:
    """Return `num_routes` and the powers of two below it, largest first."""
    powers = {1 << exponent for exponent in range(num_routes.bit_length())}
    return sorted(powers | {num_routes}, reverse=True)


def setting_quality(
    setting: Setting, calibration: Calibration, labels: Array, raw_logits: Array, weights: Array | None
) -> dict[str, Any]:
    """Return the manifest's entry for a setting: its calibration, and its AUC and logloss on these rows with it."""
    calibrated = calibration.apply(raw_logits)
    return {
        "routes": setting.routes,
        "depth": setting.depth,
        "rows": len(labels),
        "auc": auc(labels, calibrated, weights),
        "logloss": logloss(labels, calibrated, weights),
        "calibration": calibration.to_dict(),
    }


def shortfall(
    quality: Mapping[str, Any], full: Mapping[str, Any], base_rate_logloss: float | None
) -> str | None:
    """Return why a setting is too poor to be offered beside the full one, in words; None if it is good enough.

    >>> full = {"routes": 8, "depth": 4, "logloss": 0.200}
    >>> shortfall({"logloss": 0.201}, full, 0.25)
    >>> shortfall({"logloss": 0.205}, full, 0.25)
    'its logloss on validation rows is 0.20500, more than 2 % above the 0.20000 of 8 routes at depth 4'
    >>> shortfall({"logloss": 0.203}, full, 0.204).partition(", ")[2]
    'nearer to the 0.20400 of the base rate than to the 0.20000 of 8 routes at depth 4'
    >>> shortfall({"logloss": 0.203}, full, 0.203).partition(", ")[2]
    'no better than the 0.20300 of the base rate'
    """
    loss, best = quality["logloss"], full["logloss"]
    name = Setting.from_dict(full)
    start = f"its logloss on validation rows is {loss:.5f}"
    if loss > (1 + LARGEST_EXCESS) * best:
        return f"{start}, more than {100 * LARGEST_EXCESS:g} % above the {best:.5f} of {name}"
    if base_rate_logloss is None:
        return None
    if loss >= base_rate_logloss:
        return f"{start}, no better than the {base_rate_logloss:.5f} of the base rate"
    if loss - best > LARGEST_LOSS_OF_GAIN * (base_rate_logloss - best):
        return f"{start}, nearer to the {base_rate_logloss:.5f} of the base rate than to the {best:.5f} of {name}"
    return None
