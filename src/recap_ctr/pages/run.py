"""The page of one run, or of a whole recipe, from its report."""

from statistics import mean
from typing import Any

from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.diagnosis import decomposition_section, decompositions_of
from recap_ctr.pages.page import Page, Section, Table

Report = dict[str, Any]
Z = 1.96  # of a 95 % interval


def page(report: Report, command: str = "", diagnosis: dict[str, Any] | None = None) -> Page:
    """`command` is what would make the report again; `diagnosis` the file of one, where it was made, too."""
    split = held_out(report)
    name = report["data"]["name"]
    sections = [
        _figures(report, split),
        _frontier(report, split),
        _reliability(report, split),
        _theory(report),
        decomposition_section(decompositions_of(diagnosis)) if diagnosis else None,
        _curves(report),
        _fields(report),
        _groups(report, split),
        _settings(report, command),
    ]
    return Page(
        f"{title(report)} on {name}",
        lead(report, split),
        tuple(section for section in sections if section is not None),
    )


def held_out(report: Report) -> str:
    return "test" if "test" in report["metrics"] else "valid"


def title(report: Report) -> str:
    return str(report["model"]["name"]).upper()


def lead(report: Report, split: str) -> str:
    """The answer in one sentence, with its numbers."""
    own = report["metrics"][split]
    figures = own["raw"]
    start = (
        f"{title(report)} ranks {100 * figures['auc']:.2f} % of the pairs of a click and no click rightly"
        f" (AUC{_interval(figures)}) on {own['rows']:,} {split} rows"
    )
    if report.get("recovered") is not None:
        one, together = _alone(report, split), _together(report, split)
        count = len(report["teacher_runs"])
        return (
            f"{start}: {100 * (figures['auc'] - one):+.2f} points beside one of its teachers, where the ensemble of all"
            f" {count} gains {100 * (together - one):+.2f}, at {report['size_against_teacher']:.2f} of the size of one."
        )
    gain = 1 - own["calibrated"]["logloss"] / own["base_rate_logloss"]
    return f"{start}, and explains {gain:.1%} of the base rate's logloss."


def _interval(figures: dict[str, Any]) -> str:
    error = figures.get("auc_error")
    return "" if error is None else f" {100 * figures['auc']:.2f} ± {100 * Z * error:.2f}"


def _alone(report: Report, split: str) -> float:
    return float(mean(one["metrics"][split]["raw"]["auc"] for one in report["teacher_runs"].values()))


def _together(report: Report, split: str) -> float:
    return float(report["ensembles"][-1]["metrics"][split]["raw"]["auc"])


def figures_line(name: str, parameters: int | None, found: dict[str, Any]) -> tuple[str, ...]:
    raw, error = found["raw"], found["raw"].get("auc_error")
    return (
        name,
        "" if parameters is None else f"{parameters:,}",
        f"{100 * raw['auc']:.3f}" + ("" if error is None else f" ± {100 * Z * error:.3f}"),
        f"{raw['logloss']:.5f}",
        f"{found['calibrated']['logloss']:.5f}",
        f"{found['calibrated']['calibration_error']:.4f}",
    )


def _figures(report: Report, split: str) -> Section:
    own = report["metrics"][split]
    rows: list[tuple[str, ...]] = [("base rate", "", "50.000", f"{own['base_rate_logloss']:.5f}", "", "")]
    for name, found in (report.get("reference") or {}).items():
        line = found[split]
        rows.append((name, "", f"{100 * line['auc']:.3f}", f"{line['logloss']:.5f}", "", ""))
    teachers = report.get("teacher_runs") or {}
    for path, one in teachers.items():
        rows.append(figures_line(path.rpartition("/")[2], one["parameters"], one["metrics"][split]))
    if len(teachers) > 1:
        size = sum(one["parameters"] for one in teachers.values())
        rows.append(
            figures_line(f"ensemble of {len(teachers)}", size, report["ensembles"][-1]["metrics"][split])
        )
    rows.append(figures_line(title(report), report["parameters"], own))
    header = ("model", "parameters", "AUC", "logloss", "calibrated logloss", "calibration error")
    note = (
        f"On {own['rows']:,} {split} rows; AUC in points, ± half a 95 % interval over rows (DeLong). Calibrated: after"
        " an affine map that was fitted on validation rows."
    )
    return Section("Figures", tables=(Table(header, tuple(rows), len(rows) - 1, note),))


def _frontier(report: Report, split: str) -> Section | None:
    teachers = report.get("teacher_runs") or {}
    if len(teachers) < 2:
        return None
    one = next(iter(teachers.values()))["parameters"]
    own = report["metrics"][split]["raw"]["auc"]
    ensembles = report["ensembles"]
    chart = Chart(
        "frontier",
        "Accuracy against stored parameters",
        "stored parameters",
        f"{split} AUC (points)",
        (
            Series(
                "ensembles of the first 1, 2, .. teachers",
                tuple(float(one * entry["teachers"]) for entry in ensembles),
                tuple(100 * entry["metrics"][split]["raw"]["auc"] for entry in ensembles),
                labels=tuple(f"{entry['teachers']} teachers" for entry in ensembles),
            ),
            Series(title(report), (float(report["parameters"]),), (100 * own,), kind="points"),
        ),
        note="Up and to the left is better: more accurate, smaller to ship.",
        log_x=True,
        digits=3,
    )
    return Section("Frontier", charts=(chart,))


def reliability_series(name: str, table: list[dict[str, float]] | None) -> Series | None:
    parts = [part for part in table or () if part["rows"]]
    if not parts:
        return None
    return Series(
        name,
        tuple(part["mean_prediction"] for part in parts),
        tuple(part["mean_label"] for part in parts),
        labels=tuple(f"{name}, {part['rows']:,.0f} rows" for part in parts),
    )


def _reliability(report: Report, split: str) -> Section | None:
    own = report["metrics"][split]
    known = [("as trained", own.get("reliability_raw")), ("calibrated", own.get("reliability"))]
    found = [reliability_series(name, table) for name, table in known]
    series = tuple(one for one in found if one is not None)
    if not series:
        return None
    raw, after = own["raw"], own["calibrated"]
    text = (
        f"Where the score says 10 %, about 10 % should have clicked: points on the dotted line. The mean gap is"
        f" {raw['calibration_error']:.4f} as trained and {after['calibration_error']:.4f} calibrated."
    )
    chart = Chart(
        "reliability", "Reliability before and after calibration", "mean score", "share that clicked", series,
        diagonal=True,
    )  # fmt: skip
    return Section("Reliability", text, charts=(chart,))


def _theory(report: Report) -> Section | None:
    """Gain of averaging teachers against the one that follows from their disagreement."""
    known = report.get("averaging")
    if not known:
        return None
    points = [point for point in known["points"] if point["count"] > 1]
    last = points[-1]
    text = (
        f"The mean of {last['count']} teachers saves {last['gain']['value']:.5f} of logloss over one of them; from"
        f" their disagreement alone, Eq. 6 predicts {last['predicted']['value']:.5f}."
    )
    chart = Chart(
        "theory", "Measured gain against the theory's", "predicted gain in logloss (Eq. 6)", "measured gain in logloss",
        (
            Series(
                "means of teachers",
                tuple(point["predicted"]["value"] for point in points),
                tuple(point["gain"]["value"] for point in points),
                tuple(point["gain"]["low"] for point in points),
                tuple(point["gain"]["high"] for point in points),
                kind="points",
                labels=tuple(f"{point['count']} teachers" for point in points),
            ),
        ),
        diagonal=True, digits=6,
    )  # fmt: skip
    return Section("Theory", text, charts=(chart,))


def _curves(report: Report) -> Section:
    history = report["history"]
    epochs = tuple(float(line["epoch"]) for line in history)
    averaged = any(line.get("beta") is not None for line in history)
    series = [
        Series(
            "averaged weights" if averaged else "weights",
            epochs,
            tuple(100 * line["valid_auc"] for line in history),
        )
    ]
    raw = [line.get("raw_auc") for line in history]
    if all(value is not None for value in raw) and averaged:
        series.append(
            Series(
                "the weights themselves", epochs, tuple(100 * value for value in raw if value), dashed=True
            )
        )
    best = report["best_epoch"]
    text = f"Epoch {best} of {len(history)} was best on validation rows and is what was kept."
    chart = Chart(
        "training", "Validation AUC while training", "epoch", "validation AUC (points)", tuple(series), digits=3
    )  # fmt: skip
    loss = Chart(
        "loss", "Training loss", "epoch", "training loss",
        (Series("training loss", epochs, tuple(line["train_loss"] for line in history)),),
    )  # fmt: skip
    return Section("Training", text, charts=(chart, loss))


def _fields(report: Report) -> Section | None:
    fields = report.get("fields")
    if not fields:
        return None
    splits = list(fields[0]["drift"])
    names = tuple(one["name"] for one in fields)
    drift = Chart(
        "drift", "Drift of the fields' values from the training rows", "field", "total variation distance",
        tuple(
            Series(split, tuple(float(i) for i in range(len(names))), tuple(one["drift"][split] for one in fields),
                   kind="bars", labels=names)
            for split in splits
        ),
        note="Fields with many rare values differ by chance too; what matters is test beyond valid.",
    )  # fmt: skip
    rows = tuple(
        (one["name"], f"{one['values']:,}", *(f"{one['oov'][split]:.2%}" for split in one["oov"]))
        for one in fields
    )
    header = ("field", "values kept", *(f"unknown in {split}" for split in fields[0]["oov"]))
    worst = max(fields, key=lambda one: one["oov"][splits[-1]])
    text = (
        f"Most unknown values are in {worst['name']}: {worst['oov'][splits[-1]]:.2%} of the {splits[-1]} rows' values"
        " were too rare or absent in training rows, and share one vector."
    )
    return Section("Fields", text, tables=(Table(header, rows),), charts=(drift,))


def _groups(report: Report, split: str) -> Section | None:
    found = report["metrics"][split]["raw"].get("group_auc")
    if not found:
        return None
    rows = tuple((name.replace("_", " "), f"{value:,.4f}") for name, value in found.items())
    return Section("Groups", "AUC inside each group, averaged.", tables=(Table(("figure", "value"), rows),))


def _settings(report: Report, command: str) -> Section:
    data, train = report["data"], report["train"]
    rows = [
        ("data", f"{data['name']}, fingerprint {data['fingerprint']}"),
        *((f"rows of {name}", f"{found['rows']:,}") for name, found in data["splits"].items()),
        *((f"model: {key}", str(value)) for key, value in report["model"]["config"].items()),
        *((f"training: {key}", str(value)) for key, value in train.items()),
        *((f"version of {key}", str(value)) for key, value in report["versions"].items()),
        ("machine", f"{report['machine']['processor']}, {report['machine']['cores']} cores"),
        ("date", str(report["date"])),
    ]
    text = (
        "Everything that decided the result; the same command on the same data gives the same bits on the same machine"
        " with the same number of threads."
    )
    return Section("Settings", text, tables=(Table(("setting", "value"), tuple(rows)),), code=command)
