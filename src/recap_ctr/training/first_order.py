"""Put a logistic regression beside a trained model's towers, in the proportion that is best on validation rows.

The two err differently: the towers learn what fields do together, and a converged regression knows best what each of
them does alone. Their weighted sum is one model, larger by one number for each value of a field.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.halves import halves
from recap_ctr.inference.artifact import WEIGHTS
from recap_ctr.models.recap import Recap
from recap_ctr.nn.weights import load_tensors
from recap_ctr.training.report import FirstOrderGain

Floats = npt.NDArray[np.float64]
_TABLE, _BIAS = "wide.embedding.table.weight", "wide.bias"


@dataclass(frozen=True)
class Mixture:
    """Weights of the towers' logit and of the regression's, and a constant."""

    towers: float
    linear: float
    constant: float

    def logits(self, towers_N: Floats, linear_N: Floats) -> Floats:
        """Return the weighted sum of two columns of logits."""
        return self.towers * towers_N + self.linear * linear_N + self.constant


def fit_mixture(
    labels_N: npt.NDArray[np.generic],
    towers_N: Floats,
    linear_N: Floats,
    weights_N: npt.NDArray[np.generic] | None = None,
) -> Mixture:
    """Return the weights with the lowest logloss; neither model's is negative."""
    labels = np.asarray(labels_N, np.float64)
    masses = np.ones(len(labels)) if weights_N is None else np.asarray(weights_N, np.float64)
    columns_3N = np.stack([towers_N, linear_N, np.ones(len(labels))])

    def loss_and_gradient(weights: Floats) -> tuple[float, Floats]:
        logits_N = weights @ columns_3N
        loss = np.average(metrics.softplus(logits_N) - labels * logits_N, weights=masses)
        residuals_N = masses * (metrics.sigmoid(logits_N) - labels)
        return float(loss), columns_3N @ residuals_N / masses.sum()

    bounds = [(0.0, None), (0.0, None), (None, None)]
    result = optimize.minimize(loss_and_gradient, [0.5, 0.5, 0.0], jac=True, method="L-BFGS-B", bounds=bounds)
    return Mixture(*map(float, result.x))


def with_first_order(
    model: Recap, linear_run: Path, data: PreparedData, device: torch.device
) -> tuple[Recap, FirstOrderGain]:
    """Return the model with the regression of `linear_run` beside its towers, if that is better; else as it is.

    One half of the validation rows fits the proportion, and the other must confirm that it lowers the logloss.
    """
    valid = data.valid
    towers_N = predict(model, valid, device).astype(np.float64)
    linear_N = np.asarray(LogitTable(linear_run / "logits" / "valid").logits_NM[:, 0], np.float64)
    first, second = halves(valid.labels)

    def part(
        values: npt.NDArray[np.generic] | None, rows: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.generic] | None:
        return None if values is None else np.asarray(values)[rows]

    labels = np.asarray(valid.labels)
    columns = labels[first], towers_N[first], linear_N[first], part(valid.weights, first)
    together = fit_mixture(*columns)
    alone = replace(fit_mixture(columns[0], columns[1], np.zeros(len(first)), columns[3]), linear=0.0)
    losses = [
        metrics.logloss(
            labels[second], mixture.logits(towers_N, linear_N)[second], part(valid.weights, second)
        )
        for mixture in (alone, together)
    ]
    mixture = fit_mixture(labels, towers_N, linear_N, valid.weights)
    gain = FirstOrderGain(
        towers=mixture.towers,
        linear=mixture.linear,
        logloss=losses[0] - losses[1],
        shipped=losses[1] < losses[0] and mixture.linear > 0,
    )
    return (_combined(model, mixture, linear_run, data) if gain.shipped else model), gain


def _combined(model: Recap, mixture: Mixture, linear_run: Path, data: PreparedData) -> Recap:
    """Return a model whose logit is the mixture: the proportions go into the heads and into the regression."""
    # The default rank depends on the model's size, which changes here; the towers stay as they are.
    changes = {"first_order": True, "lora_rank": model.exponential.bank.a_ACR.shape[-1]}
    combined = Recap(model.config.model_copy(update=changes), data.layout)
    weights = dict(model.state_dict())
    for tower in ("exponential", "linear"):
        for name in (f"{tower}.head.weight", f"{tower}.head.bias"):
            weights[name] = mixture.towers * weights[name]
    linear, _ = load_tensors(linear_run / "artifact" / WEIGHTS)
    weights["first_order.embedding.table.weight"] = mixture.linear * linear[_TABLE]
    weights["first_order.bias"] = mixture.linear * linear[_BIAS] + mixture.constant
    combined.load_state_dict(weights)
    return combined.to(next(model.parameters()).device).eval()
