"""Measure which axis the variance between estimators comes from, and what averaging more of them would gain.

`theory` holds the paper's equations. `diagnose` applies them to the logits of a grid of estimators.
"""

from recap_ctr.diagnose.cube import Cube
from recap_ctr.diagnose.diagnosis import curve, diagnose, family
from recap_ctr.diagnose.findings import findings
from recap_ctr.diagnose.measure import Estimate
from recap_ctr.diagnose.results import (
    Churn,
    Combination,
    Curve,
    CurvePoint,
    Decomposition,
    Diagnosis,
    Family,
    ForecastPoint,
)
from recap_ctr.diagnose.theory import (
    AXES,
    Floats,
    covariance_nonshared_variance,
    curvature,
    decompose,
    exact_gain,
    expected_loss,
    mean_variance,
    nonshared_variance,
    predicted_gain,
    two_axis,
    variance_removed,
)

__all__ = [
    "AXES",
    "Churn",
    "Combination",
    "Cube",
    "Curve",
    "CurvePoint",
    "Decomposition",
    "Diagnosis",
    "Estimate",
    "Family",
    "Floats",
    "ForecastPoint",
    "covariance_nonshared_variance",
    "curvature",
    "curve",
    "decompose",
    "diagnose",
    "exact_gain",
    "expected_loss",
    "family",
    "findings",
    "mean_variance",
    "nonshared_variance",
    "predicted_gain",
    "two_axis",
    "variance_removed",
]
