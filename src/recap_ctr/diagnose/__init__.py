"""Where the variance of a family of estimators sits, and what averaging more of them would bring.

`theory` holds the paper's equations; `diagnose` applies them to the logits of a grid of estimators, block by block.
"""

from recap_ctr.diagnose.cube import Cube
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
    "Cube",
    "Floats",
    "covariance_nonshared_variance",
    "curvature",
    "decompose",
    "exact_gain",
    "expected_loss",
    "mean_variance",
    "nonshared_variance",
    "predicted_gain",
    "two_axis",
    "variance_removed",
]
