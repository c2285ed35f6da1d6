"""The model card: what a model is, its training data, and how good it was, for people to read."""

from datetime import UTC, datetime
from typing import Any

from recap_ctr.data.encode import has_vocabulary
from recap_ctr.data.layout import Layout
from recap_ctr.data.profile import Profile
from recap_ctr.inference.about import about_lines, slice_lines
from recap_ctr.inference.manifest import ABOUT, dial_entries, shortfall_of, whole_dial_of
from recap_ctr.models.catalogue import short_name
from recap_ctr.schema import Schema

MEASURED_BEFORE = (
    "These figures are from before the model learnt from the held-out rows, too, with the same settings."
)


def model_card(
    manifest: dict[str, Any], layout: Layout, schema: Schema, profile: Profile | None = None
) -> str:
    """Return the text of the model card: what the model is, its training data, and how good it was."""
    lines = [
        f"# {short_name(manifest['model']['name']).upper()} click model",
        "",
        f"{manifest['parameters']:,} parameters over {layout.num_fields} fields"
        f" and {layout.num_rows:,} vocabulary entries.",
        f"Trained on {manifest['data']['rows']:,} rows of {manifest['data']['name']}"
        f" (fingerprint {manifest['data']['fingerprint']}), seed {manifest['training']['seed']}.",
        *_describe_data(manifest["data"], schema, profile, manifest["training"].get("updates", 0)),
        *about_lines(manifest["training"].get(ABOUT, {})),
        "",
        "| rows | AUC | logloss | calibrated logloss | base rate logloss |",
        "|---|---|---|---|---|",
    ]
    for split, figures in manifest["metrics"].items():
        lines.append(
            f"| {split}, {figures['rows']:,} | {figures['raw']['auc']:.5f} | {figures['raw']['logloss']:.5f} |"
            f" {figures['calibrated']['logloss']:.5f} | {figures['base_rate_logloss']:.5f} |"
        )
    if manifest["training"].get("all_rows"):
        lines += ["", MEASURED_BEFORE]
    lines += slice_lines(manifest["metrics"])
    if len(manifest.get("dial", [])) > 1:
        lines += ["", "| setting | AUC on validation rows | logloss, calibrated |", "|---|---|---|"]
        qualities = {
            setting: quality
            for setting, quality in dial_entries(manifest).items()
            if setting in whole_dial_of(manifest)
        }
        lines += [
            f"| {setting} | {quality['auc']:.5f} | {quality['logloss']:.5f} |"
            for setting, quality in qualities.items()
        ]
        poor = [str(setting) for setting in qualities if shortfall_of(manifest, setting) is not None]
        if poor:
            lines += ["", f"Not offered, because they lose too much: {', '.join(poor)}."]
    stored = [field.name for field in schema.fields if has_vocabulary(field)]
    lines += [
        "",
        "`score` is the calibrated probability of a click;"
        " unseen and missing values are scored through a shared vector.",
        f"Raw values are stored for: {', '.join(stored) or 'none'}.",
        "",
        "Not for decisions about people (credit, housing, employment);"
        " scores drift as the traffic does: evaluate often.",
        "",
    ]
    return "\n".join(lines)


def _describe_data(data: dict[str, Any], schema: Schema, profile: Profile | None, updates: int) -> list[str]:
    """Return sentences on the training rows: label, base rate, split and dates, as far as they are known."""
    means = f"; {schema.positive!r} means a click" if schema.positive is not None else ""
    lines = [f"The label is {schema.label}{means}."]
    if data["rows"] and "clicks" in data:
        lines.append(f"The base rate is {data['clicks'] / data['rows']:.4f}.")
    if "split" in data:
        which = "The rows of the first fit" if updates else "Rows"
        lines.append(f"{which} were divided {data['split']}.")
    if updates:
        lines.append(f"{updates} update{'s' * (updates != 1)} trained it further.")
    if profile is not None and profile.starts:
        first, last = (
            datetime.fromtimestamp(start, UTC).date() for start in (profile.starts[0], profile.starts[-1])
        )
        # The profile of an updated model holds the newest periods only.
        lines.append(
            f"{'The newest training' if updates else 'Training'} rows are from {first} to {last} (UTC)."
        )
    return lines
