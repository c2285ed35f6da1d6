"""How a model stands against the references, in words: first what it is not ahead of."""

from recap_ctr.training.report import Reference, RunReport

Z = 1.96  # Half the width of a 95 % interval, in standard errors.


def lead_text(reference: Reference) -> str:
    """Return how far the model is ahead of a reference in AUC, with its 95 % interval; empty if it was not measured."""
    if reference.lead is None or reference.lead_error is None:
        return ""
    return f"{100 * reference.lead:+.3f} ± {100 * Z * reference.lead_error:.3f}"


def logloss_gain_text(reference: Reference) -> str:
    """Return how much lower the model's logloss is, with its 95 % interval; empty if it was not measured."""
    if reference.logloss_gain is None or reference.logloss_gain_error is None:
        return ""
    return f"{reference.logloss_gain:+.5f} ± {Z * reference.logloss_gain_error:.5f}"


def reference_sentence(report: RunReport) -> str:
    """Return which references the model is not ahead of beyond chance; empty if it is ahead of all of them."""
    split = report.metrics.split
    equals = []
    for name, by_split in (report.reference or {}).items():
        reference = by_split.get(split)
        if reference is None or reference.lead is None or reference.lead_error is None:
            continue
        if reference.lead <= Z * reference.lead_error:
            equals.append(f"{name} ({lead_text(reference)} points of AUC)")
    if not equals:
        return ""
    return f"The model is NOT ahead of {' and '.join(equals)} beyond chance on the {split} rows."
