"""Reports of a run and of a fit with two teachers, as plain JSON values."""

from typing import Any


def metrics(auc: float) -> dict[str, Any]:
    """Return metrics on 1,000 validation and 2,000 test rows."""
    figures = {"auc": auc, "auc_error": 0.001, "logloss": 1 - auc, "calibration_error": 0.02}

    def bins(rows: int) -> list[dict[str, float]]:
        return [
            {
                "low": low,
                "high": low + 0.5,
                "rows": rows / 2,
                "mean_prediction": low + 0.2,
                "mean_label": low + 0.3,
            }
            for low in (0.0, 0.5)
        ]

    return {
        split: {
            "rows": rows,
            "base_rate": 0.2,
            "base_rate_logloss": 0.5,
            "raw": figures,
            "calibrated": {**figures, "logloss": 0.3},
            "reliability": bins(rows),
            "reliability_raw": bins(rows),
        }
        for split, rows in (("valid", 1_000), ("test", 2_000))
    }


def run_values() -> dict[str, Any]:
    """Return the report of a RECAP run as plain JSON values."""
    epoch = {"step": 10, "learning_rate": 0.001, "valid_logloss": 0.3, "seconds": 1.0, "beta": 0.99}
    return {
        "data": {
            "name": "toy",
            "fingerprint": "1" * 32,
            "splits": {"train": {"rows": 8_000, "positives": 1_600}},
        },
        "model": {"name": "recap", "config": {"dim": 4}},
        "train": {"max_epochs": 2},
        "threads": 1,
        "device": "cpu",
        "calibration": "affine",
        "negative_rate": 1.0,
        "parameters": 110,
        "calibrated_by": {"kind": "affine", "scale": 1.0, "shift": 0.0},
        "metrics": metrics(0.81),
        "best_epoch": 2,
        "history": [
            {**epoch, "epoch": 1, "train_loss": 0.4, "valid_auc": 0.79, "raw_auc": 0.78},
            {**epoch, "epoch": 2, "train_loss": 0.3, "valid_auc": 0.80, "raw_auc": 0.79},
        ],
        "seconds": {"train": 1.0, "evaluate": 1.0},
        "versions": {"torch": "2"},
        "machine": {"processor": "A processor", "cores": 2},
        "date": "2026-01-01",
    }


def fit_values() -> dict[str, Any]:
    """Return the report of a fit with two teachers as plain JSON values."""

    def estimate(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.001, "high": value + 0.001}

    names = ("loss", "auc", "predicted", "gain", "auc_gain")
    points = [{"count": count, **{name: estimate(0.01) for name in names}} for count in (1, 2)]
    teacher = {"parameters": 100, "epochs": 2, "seconds": {"train": 1.0, "evaluate": 1.0}}
    return {
        **run_values(),
        "reference": {"lr": {"test": {"auc": 0.7, "logloss": 0.45}}},
        "fields": [
            {"name": name, "values": 30, "oov": {"train": 0.0, "test": oov}, "drift": {"test": 0.1}}
            for name, oov in (("site", 0.01), ("ad", 0.05))
        ],
        "recipe": {},
        "plan": {},
        "student": "students/recap",
        "students": {"students/recap": metrics(0.81)},
        "teacher_runs": {
            f"teachers/teacher-{seed}": {**teacher, "seed": seed, "metrics": metrics(0.80)} for seed in (1, 2)
        },
        "ensembles": [{"teachers": count, "metrics": metrics(auc)} for count, auc in ((1, 0.80), (2, 0.82))],
        "recovered": 0.5,
        "size_against_teacher": 1.1,
        "averaging": {"axis": "run", "averaged": [], "held": {}, "points": points, "forecast": []},
    }
