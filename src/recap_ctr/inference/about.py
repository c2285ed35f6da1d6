"""The parts of a model card that people write, or look for first: the model's owner, its use, and where it is weak."""

from collections.abc import Mapping
from typing import Any

from recap_ctr.config import Frozen
from recap_ctr.evaluation.slices import Breakdown, Slice

NUM_SLICES = 3
MIN_SLICE_ROWS = 100  # The AUC of fewer rows says little.
Z = 1.96  # Half the width of a 95 % interval, in standard errors.


class About(Frozen):
    """What the model card says of the model's owner, use and data; nothing here changes the model."""

    owner: str | None = None
    """Who answers for the model: a person, a team or an address."""
    intended_use: str | None = None
    """What the model is for."""
    data_licence: str | None = None
    """The licence of the training rows; by default that of the public data set, where they are one."""


def weak_slices(breakdown: Breakdown) -> dict[str, Any]:
    """Return the slices with the lowest AUC, and how many were compared, as an artifact's manifest holds them."""
    named = [(entry.field, part) for entry in breakdown.fields for part in entry.slices]
    named += [("period", part) for part in breakdown.periods]
    large = [(field, part) for field, part in named if part.auc is not None and part.rows >= MIN_SLICE_ROWS]
    weakest = sorted(large, key=lambda entry: entry[1].auc or 0.0)[:NUM_SLICES]
    return {
        "slices": [_entry(field, part) for field, part in weakest],
        "num_slices": len(large),
    }


def _entry(field: str, part: Slice) -> dict[str, Any]:
    return {"field": field, **part.to_json(), "calibration_ratio": part.calibration_ratio}


def about_lines(about: Mapping[str, Any]) -> list[str]:
    """Return the card's sentences on the owner, the use and the licence of the data, as far as they are given."""
    texts = {"owner": "Owner", "intended_use": "Intended use", "data_licence": "Licence of the training rows"}
    lines = [f"- {text}: {_one_line(about[key])}" for key, text in texts.items() if about.get(key)]
    return ["", *lines] if lines else []


def slice_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the card's table of weak slices; nothing for an artifact that does not name any."""
    lines: list[str] = []
    for split, figures in metrics.items():
        if figures.get("slices"):
            lines += [
                "",
                f"The weakest of {figures['num_slices']} slices of the {split} rows, by AUC; some are weak by chance.",
                "",
                "| slice | rows | clicks | AUC | mean score / click rate |",
                "|---|---|---|---|---|",
                *map(_slice_line, figures["slices"]),
            ]
    return lines


def _slice_line(part: Mapping[str, Any]) -> str:
    name = _one_line(f"{part['field']} {part['name']}").replace("|", "\\|")
    error, ratio = part.get("auc_error"), part["calibration_ratio"]
    spread = "" if error is None else f" ± {Z * error:.4f}"
    share = "" if ratio is None else f"{ratio:.3f}"
    return f"| {name} | {part['rows']:,} | {part['base_rate']:.2%} | {part['auc']:.4f}{spread} | {share} |"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
