"""How a model stands against the references, in words: first what it is not ahead of."""

import math
from collections.abc import Mapping

from recap_ctr.training.report import Reference, RunReport

CUT = "cut by the budget"
ITSELF = "the shipped model itself"
Z = 1.96  # Half the width of a 95 % interval, in standard errors.


def reference_name(name: str, by_split: Mapping[str, Reference]) -> str:
    """Return the name of a reference as tables show it: with a remark if the budget cut its training."""
    return f"{name} ({CUT})" if any(reference.cut for reference in by_split.values()) else name


def lead_text(reference: Reference) -> str:
    """Return how far the model is ahead of a reference in AUC, with its 95 % interval; empty if it was not measured."""
    if reference.lead is None or reference.lead_error is None:
        return ""
    if _is_itself(reference):
        return ITSELF
    return f"{100 * reference.lead:+.3f} ± {100 * Z * reference.lead_error:.3f}"


def logloss_gain_text(reference: Reference) -> str:
    """Return how much lower the model's logloss is, with its 95 % interval; empty if it was not measured."""
    if reference.logloss_gain is None or reference.logloss_gain_error is None:
        return ""
    if _is_itself(reference):
        return ITSELF
    return f"{reference.logloss_gain:+.5f} ± {Z * reference.logloss_gain_error:.5f}"


def calibrated_text(reference: Reference) -> str:
    """Return a reference's logloss after calibration; empty in reports of older versions."""
    return "" if reference.calibrated_logloss is None else f"{reference.calibrated_logloss:.5f}"


def reference_sentence(report: RunReport) -> str:
    """Return which references the model is not ahead of beyond chance, in AUC and logloss; empty if there are none."""
    split = report.metrics.split
    compared = {
        name: by_split[split]
        for name, by_split in (report.reference or {}).items()
        if split in by_split and by_split[split].lead is not None
    }
    itself = [name for name, reference in compared.items() if _is_itself(reference)]
    sentences = [f"What is shipped is the {name} itself." for name in itself]
    rivals = {name: reference for name, reference in compared.items() if name not in itself}
    equals = [
        f"{name} ({_remark(reference)}{lead_text(reference)} points of AUC)"
        for name, reference in rivals.items()
        if (reference.lead or 0.0) <= Z * (reference.lead_error or 0.0)
    ]
    if equals:
        sentences.append(
            f"The model is NOT ahead of {' and '.join(equals)} beyond chance on the {split} rows."
        )
    loss = report.metrics.on(split).calibrated.logloss
    lower = [
        f"{name} ({_remark(reference)}{_shipped_logloss(reference):.5f})"
        for name, reference in rivals.items()
        if loss > _shipped_logloss(reference) + Z * (reference.logloss_gain_error or math.inf)
    ]
    if lower:
        sentences.append(
            f"Its calibrated logloss there, {loss:.5f}, is HIGHER than that of {' and '.join(lower)}: the click rate"
            " may have moved since the validation rows."
        )
    return " ".join(sentences)


def _shipped_logloss(reference: Reference) -> float:
    """Return the logloss that the reference would have if it shipped, as calibrated as the model is."""
    return reference.logloss if reference.calibrated_logloss is None else reference.calibrated_logloss


def _remark(reference: Reference) -> str:
    return f"{CUT}; " if reference.cut else ""


def _is_itself(reference: Reference) -> bool:
    """Return whether the reference has the model's own logits."""
    differences = (reference.lead, reference.lead_error, reference.logloss_gain)
    return all(difference == 0.0 for difference in differences)
