"""Settings of the dial: how many routes are averaged, and to which depth the recursion runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from recap_ctr.evaluation.metrics import auc, logloss
from recap_ctr.storage.arrays import Array

GRAPHS = "graphs"


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
    powers = {1 << exponent for exponent in range(num_routes.bit_length())}
    counts = sorted(powers | {num_routes}, reverse=True)
    return (
        *(Setting(count, full) for count in counts),
        *(Setting(1, depth) for depth in reversed(smaller)),
    )


def setting_quality(
    setting: Setting, labels: Array, calibrated_logits: Array, weights: Array | None
) -> dict[str, Any]:
    """Return the manifest's entry for a setting: its AUC and logloss on these rows."""
    return {
        "routes": setting.routes,
        "depth": setting.depth,
        "rows": len(labels),
        "auc": auc(labels, calibrated_logits, weights),
        "logloss": logloss(labels, calibrated_logits, weights),
    }
