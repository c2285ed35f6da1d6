"""Put models that count beside a trained model's towers, in the proportions that are best on validation rows.

They err differently: the towers learn what fields do together; a converged regression knows best what each value does
alone, and a network on click rates what a pair of values did before. Their weighted sum is one model, larger by one
number for each value of a field and by the table of rates.

Shapes: N rows, P parts: the towers first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.halves import halves
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.lr import LR
from recap_ctr.models.rates import Rates
from recap_ctr.models.recap import Recap
from recap_ctr.training.report import PartGain

Floats = npt.NDArray[np.float64]
TOWERS = "towers"


@dataclass(frozen=True)
class Mixture:
    """A factor for the logit of each part, and a constant."""

    factors: tuple[float, ...]
    constant: float

    def logits(self, parts_PN: Floats) -> Floats:
        """Return the weighted sum of the parts' logits."""
        return np.asarray(self.factors) @ parts_PN + self.constant


def fit_mixture(
    labels_N: npt.NDArray[np.generic], parts_PN: Floats, weights_N: npt.NDArray[np.generic] | None = None
) -> Mixture:
    """Return the factors with the lowest logloss; none is negative."""
    labels = np.asarray(labels_N, np.float64)
    masses = np.ones(len(labels)) if weights_N is None else np.asarray(weights_N, np.float64)
    columns = np.vstack([parts_PN, np.ones(len(labels))])
    count = len(parts_PN)

    def loss_and_gradient(weights: Floats) -> tuple[float, Floats]:
        logits_N = weights @ columns
        loss = np.average(metrics.softplus(logits_N) - labels * logits_N, weights=masses)
        residuals_N = masses * (metrics.sigmoid(logits_N) - labels)
        return float(loss), columns @ residuals_N / masses.sum()

    start = [1.0 / count] * count + [0.0]
    bounds = [(0.0, None)] * count + [(None, None)]
    result = optimize.minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return Mixture(tuple(map(float, result.x[:-1])), float(result.x[-1]))


def put_beside(
    model: Recap, runs: Sequence[Path], data: PreparedData, device: torch.device
) -> tuple[Recap, PartGain]:
    """Return the model with those parts beside its towers that make it better; as it is if none does.

    `runs` are finished runs of lr and of rates, with logit tables. One half of the validation rows fits the proportions
    of each choice of parts, and the other half says which choice has the lowest logloss.
    """
    valid = data.valid
    towers_N = predict(model, valid, device).astype(np.float64)
    others = [np.asarray(LogitTable(run / "logits" / "valid").logits_NM[:, 0], np.float64) for run in runs]
    parts_PN = np.stack([towers_N, *others])
    losses = {
        chosen: _confirmed_loss(valid, parts_PN[[0, *chosen]])
        for count in range(len(parts_PN))
        for chosen in combinations(range(1, len(parts_PN)), count)
    }
    best = min(losses, key=lambda chosen: losses[chosen])
    mixture = fit_mixture(valid.labels, parts_PN[[0, *best]], valid.weights)
    parts = [load_artifact(runs[at - 1] / "artifact").model for at in best]
    names = [TOWERS, *("regression" if isinstance(part, LR) else "rates" for part in parts)]
    gain = PartGain(factors=dict(zip(names, mixture.factors, strict=True)), logloss=losses[()] - losses[best])
    return (_combined(model, mixture, parts, data) if best else model), gain


def _confirmed_loss(valid: Shard, parts_PN: Floats) -> float:
    """Return the logloss on one half of the rows of the proportions that are best on the other."""
    first, second = halves(valid.labels)

    def weights(rows: npt.NDArray[np.intp]) -> npt.NDArray[np.generic] | None:
        return None if valid.weights is None else np.asarray(valid.weights)[rows]

    labels = np.asarray(valid.labels)
    mixture = fit_mixture(labels[first], parts_PN[:, first], weights(first))
    return metrics.logloss(labels[second], mixture.logits(parts_PN[:, second]), weights(second))


def _combined(model: Recap, mixture: Mixture, parts: Sequence[torch.nn.Module], data: PreparedData) -> Recap:
    """Return a model whose logit is the mixture: the factors go into the heads and into the parts."""
    # The default rank depends on the model's size, which changes here; the towers stay as they are.
    changes: dict[str, object] = {"lora_rank": model.exponential.bank.rank}
    weights = dict(model.state_dict())
    towers, *factors = mixture.factors
    for tower in ("exponential", "linear"):
        weights[f"{tower}.head.weight"] = towers * weights[f"{tower}.head.weight"]
        # Both heads get all of the constant, as the towers' logits are averaged.
        weights[f"{tower}.head.bias"] = towers * weights[f"{tower}.head.bias"] + mixture.constant
    if model.rates is not None:  # Rates that the towers were trained with belong to them.
        for name in ("rates.deep.head.weight", "rates.deep.head.bias"):
            weights[name] = towers * weights[name]
    for part, factor in zip(parts, factors, strict=True):
        if isinstance(part, LR):
            assert part.wide.bias is not None
            changes["first_order"] = True
            weights["first_order.embedding.table.weight"] = factor * part.wide.embedding.table.weight.detach()
            weights["first_order.bias"] = factor * part.wide.bias.detach()
        else:
            assert isinstance(part, Rates) and model.rates is None
            part.scale(factor)
            changes["rates"] = part.config
            weights |= {f"rates.{name}": value for name, value in part.state_dict().items()}
    combined = Recap(model.config.model_copy(update=changes), data.layout)
    combined.load_state_dict(weights)
    return combined.to(next(model.parameters()).device).eval()
