"""Add models that need no gradient steps to a trained model's towers, in the proportions that are best on validation
rows.

Such models err in other ways than towers do. The towers learn what fields do together. A converged regression knows
best what each value does alone, a network on click rates knows what a pair of values did before, and boosted trees know
where numbers have steps. The weighted sum of all is one model, which is larger by three or four numbers for each value
of a field, by the table of rates, and by the trees.

Shapes: N rows, P parts: the towers first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.evaluation.levels import level, unusual_level
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.blend import Blend, BlendConfig, Parts
from recap_ctr.models.boosted import Boosted
from recap_ctr.models.catalogue import model_name
from recap_ctr.models.lr import LR
from recap_ctr.models.rates import Rates
from recap_ctr.models.recap import Recap
from recap_ctr.training.loop import Trained
from recap_ctr.training.report import Epoch, PartGain

Floats = npt.NDArray[np.float64]
BLEND, TOWERS, NETWORK = "blend", "towers", "network"
SMALLEST_FACTOR = 0.01  # A part whose logit counts with a smaller factor is left out.
FOLDS, SEED = 5, 1
MAX_COMPARED = 200_000  # Sets of parts are compared by cross-validation on so many rows at most.
USUAL_LOGIT = 12.0  # Towers that give a validation row a larger logit are limited,
LIMITS = (4.0, 6.0, 8.0, 12.0)  # to what of these gives the validation rows the lowest logloss.
NAMES: dict[type[torch.nn.Module], str] = {LR: "regression", Rates: "rates", Boosted: "trees"}


@dataclass(frozen=True)
class Mixture:
    """A factor for the logit of each part, and a constant."""

    factors: tuple[float, ...]
    constant: float

    def at_usual_level(self, usual: float, valid: Shard, parts_PN: Floats) -> "Mixture":
        """Return the mixture without what its constant makes up for because the validation rows are unusual.

        How much of that lasts, calibration decides; `usual` is the level that the parts know.
        """
        mean_N = np.average(parts_PN, axis=0, weights=self.factors) if any(self.factors) else 0 * parts_PN[0]
        unusual = unusual_level(usual, valid.labels, mean_N, valid.weights)
        return replace(self, constant=self.constant - unusual)

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

    from scipy import optimize  # Every worker process would wait for it.

    start = [1.0 / count] * count + [0.0]
    bounds = [(0.0, None)] * count + [(None, None)]
    result = optimize.minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return Mixture(tuple(map(float, result.x[:-1])), float(result.x[-1]))


def put_beside(
    model: Recap, runs: Sequence[Path], data: PreparedData, device: torch.device
) -> tuple[Recap, PartGain]:
    """Return the model with those parts beside its towers that make it better, or unchanged if none does.

    `runs` are finished runs of lr, rates and boosted, with logit tables.
    """
    towers_N = limit_outliers(model, data.valid, device)
    chosen = _choose(data.valid, np.stack([towers_N, *_tables(runs)]), always=(0,), usual=_usual_level(data))
    parts = [load_artifact(runs[at - 1] / "artifact").model for at in chosen.parts[1:]]
    gain = chosen.as_gain([TOWERS, *map(name_of, parts)], model.config.tower_limit)
    return (combined(model, gain, parts, data.layout) if parts else model), gain


def limit_outliers(model: Recap, valid: Shard, device: torch.device) -> Floats:
    """Limit the model's towers if they give some rows logits far beyond all others; return the logits of all rows.

    A few such rows would otherwise decide what the towers count for.
    """
    logits_N = predict(model, valid, device).astype(np.float64)
    if np.abs(logits_N).max() <= USUAL_LOGIT:
        return logits_N
    limited: dict[float, Floats] = {}
    for limit in LIMITS:
        model.limit_towers(limit)
        limited[limit] = predict(model, valid, device).astype(np.float64)

    def loss(limit: float) -> float:
        calibration = fit_affine(valid.labels, limited[limit], valid.weights)
        return metrics.logloss(valid.labels, calibration.apply(limited[limit]), valid.weights)

    best = min(LIMITS, key=loss)
    model.limit_towers(best)
    return limited[best]


def blend_runs(runs: Sequence[Path], data: PreparedData, device: torch.device) -> tuple[Blend, PartGain]:
    """Return the model that consists of the best set of parts and of no towers, with its proportions.

    `runs` are finished runs of lr, rates, boosted, and of one network at most.
    """
    chosen = _choose(data.valid, np.stack(_tables(runs)), always=(), usual=_usual_level(data))
    parts = [load_artifact(runs[at] / "artifact").model for at in chosen.parts]
    gain = chosen.as_gain(list(map(name_of, parts)))
    return blended(gain, parts, data.layout).to(device), gain


def _usual_level(data: PreparedData) -> float | None:
    """Return the level of the training rows, if the validation rows are later and may have another; else None."""
    return level(data.train.labels, data.train.weights) if data.is_in_time_order else None


def name_of(part: torch.nn.Module) -> str:
    """Return the name of a part among the proportions."""
    return NAMES.get(type(part), NETWORK)


def blended(gain: PartGain, parts: Sequence[torch.nn.Module], layout: Layout) -> Blend:
    """Return the model that consists of parts and of no towers, in the given proportions."""
    changes, weights = _scaled(parts, [gain.factors[name_of(part)] for part in parts])
    blend = Blend(BlendConfig.model_validate(changes), layout)
    _fill(blend, {**weights, "constant": torch.tensor([gain.constant])})
    return blend.eval()


def train_blend(runs: Sequence[Path], data: PreparedData, device: torch.device) -> Trained:
    """Fit the model `blend` to the validation rows; its history is a single epoch."""
    started = time.monotonic()
    model, gain = blend_runs(runs, data, device)
    logits_N = predict(model, data.valid, device)
    loss = metrics.logloss(data.valid.labels, logits_N, data.valid.weights)
    epoch = Epoch(
        epoch=1,
        step=1,
        learning_rate=0.0,
        train_loss=loss,  # It is fitted to the validation rows.
        valid_auc=metrics.auc(data.valid.labels, logits_N, data.valid.weights),
        valid_logloss=loss,
        seconds=time.monotonic() - started,
    )
    return Trained(model, [epoch], 1, epoch.seconds, parts=gain)


def _tables(runs: Sequence[Path]) -> list[Floats]:
    """Return the logits of the validation rows from the runs' tables."""
    return [np.asarray(LogitTable(run / "logits" / "valid").logits_NM[:, 0], np.float64) for run in runs]


@dataclass(frozen=True)
class _Chosen:
    """The best set of parts, with its proportions, and how much it gains over the best single part."""

    parts: tuple[int, ...]
    mixture: Mixture
    gain: float
    optimism: float
    """How much higher the logloss is on rows that did not fit the proportions than on those that did."""

    def as_gain(self, names: Sequence[str], tower_limit: float | None = None) -> PartGain:
        """Return the choice as reports show it; `names` are those of the parts."""
        factors = dict(zip(names, self.mixture.factors, strict=True))
        limited = {} if tower_limit is None else {"tower_limit": tower_limit}
        return PartGain(
            factors=factors,
            logloss=self.gain,
            constant=self.mixture.constant,
            optimism=self.optimism,
            **limited,
        )


def _choose(valid: Shard, parts_PN: Floats, always: tuple[int, ...], usual: float | None = None) -> _Chosen:
    """Choose among all sets of parts that contain `always`, by cross-validation on the validation rows.

    `usual` is the level of the rows before these, if they are later.
    """
    others = [part for part in range(len(parts_PN)) if part not in always]
    sets = [(*always, *chosen) for count in range(len(others) + 1) for chosen in combinations(others, count)]
    rows = _Rows(valid, parts_PN)
    losses = {parts: rows.cross_validated_loss(parts) for parts in sets if parts}
    best = min(losses, key=lambda parts: losses[parts])
    alone = min(loss for parts, loss in losses.items() if len(parts) == 1)
    mixture = rows.fit(best)
    counting = tuple(
        part
        for part, factor in zip(best, mixture.factors, strict=True)
        if part in always or factor >= SMALLEST_FACTOR
    )
    if counting and counting != best:  # A part without weight would only cost time and bytes.
        mixture = rows.fit(counting)
    else:
        counting = best
    if usual is not None:
        mixture = mixture.at_usual_level(usual, valid, parts_PN[list(counting)])
    return _Chosen(counting, mixture, alone - losses[best], max(rows.optimism(counting), 0.0))


class _Rows:
    """The validation rows with the logits of all parts."""

    def __init__(self, valid: Shard, parts_PN: Floats) -> None:
        """Divide at most `MAX_COMPARED` random rows into folds, for comparisons."""
        self._labels, self._parts_PN = np.asarray(valid.labels), parts_PN
        self._weights = np.ones(len(valid)) if valid.weights is None else np.asarray(valid.weights)
        order = np.random.default_rng(SEED).permutation(np.flatnonzero(self._weights > 0))[:MAX_COMPARED]
        self._compared = order
        numbers = np.arange(len(order)) % FOLDS
        self._folds = [(order[numbers == fold], order[numbers != fold]) for fold in range(FOLDS)]

    def fit(self, parts: tuple[int, ...]) -> Mixture:
        """Return the best proportions on all rows."""
        return self._fit(parts, np.arange(len(self._labels)))

    def cross_validated_loss(self, parts: tuple[int, ...]) -> float:
        """Return the logloss of the compared rows, each by proportions that other folds have fitted."""
        logits_N = np.empty(len(self._labels))
        for fold, others in self._folds:
            logits_N[fold] = self._logits(self._fit(parts, others), parts, fold)
        return self._loss(logits_N[self._compared])

    def optimism(self, parts: tuple[int, ...]) -> float:
        """Return how much higher the logloss is on rows that did not fit the proportions than on those that did."""
        logits_N = self._logits(self._fit(parts, self._compared), parts, self._compared)
        return self.cross_validated_loss(parts) - self._loss(logits_N)

    def _fit(self, parts: tuple[int, ...], rows: npt.NDArray[np.intp]) -> Mixture:
        return fit_mixture(
            self._labels[rows], self._parts_PN[np.ix_(np.asarray(parts), rows)], self._weights[rows]
        )

    def _logits(self, mixture: Mixture, parts: tuple[int, ...], rows: npt.NDArray[np.intp]) -> Floats:
        return mixture.logits(self._parts_PN[np.ix_(np.asarray(parts), rows)])

    def _loss(self, logits_N: Floats) -> float:
        """Return the logloss of the compared rows' logits."""
        labels, weights = self._labels[self._compared], self._weights[self._compared]
        return metrics.logloss(labels, logits_N, weights)


def combined(model: Recap, gain: PartGain, parts: Sequence[torch.nn.Module], layout: Layout) -> Recap:
    """Return a model whose logit is the mixture: the factors go into the heads and into the parts."""
    # The default rank depends on the model's size, which changes here; the towers stay as they are.
    changes: dict[str, object] = {"lora_rank": model.exponential.bank.rank}
    if gain.tower_limit is not None:
        changes["tower_limit"] = gain.factors[TOWERS] * gain.tower_limit
    weights = dict(model.state_dict())
    towers, factors = gain.factors[TOWERS], [gain.factors[name_of(part)] for part in parts]
    for tower in ("exponential", "linear"):
        weights[f"{tower}.head.weight"] = towers * weights[f"{tower}.head.weight"]
        # Both heads get all of the constant, as the towers' logits are averaged.
        weights[f"{tower}.head.bias"] = towers * weights[f"{tower}.head.bias"] + gain.constant
    if model.rates is not None:  # Rates that the towers were trained with belong to them.
        for name in ("rates.deep.head.weight", "rates.deep.head.bias"):
            weights[name] = towers * weights[name]
    part_changes, part_weights = _scaled(parts, factors)
    whole = Recap(model.config.model_copy(update={**changes, **part_changes}), layout)
    _fill(whole, {**weights, **part_weights})
    return whole.to(next(model.parameters()).device).eval()


def _scaled(
    parts: Sequence[torch.nn.Module], factors: Sequence[float]
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Return the settings and weights of parts in a larger model, with their logits times the factors."""
    changes: dict[str, object] = {}
    weights: dict[str, torch.Tensor] = {}
    for part, factor in zip(parts, factors, strict=True):
        if isinstance(part, LR):
            assert part.wide.bias is not None
            changes["first_order"] = True
            weights["first_order.embedding.table.weight"] = factor * part.wide.embedding.table.weight.detach()
            weights["first_order.bias"] = factor * part.wide.bias.detach()
        elif name_of(part) == NETWORK:
            settings = part.config.model_dump(mode="json")  # type: ignore[operator, union-attr]
            changes[NETWORK] = {"name": model_name(type(part)), "settings": settings}
            weights |= {f"{NETWORK}.{key}": value for key, value in part.state_dict().items()}
            weights["factor"] = torch.tensor([factor])
        else:
            assert isinstance(part, Rates | Boosted)
            name = "rates" if isinstance(part, Rates) else "boosted"
            part.scale(factor)
            changes[name] = part.config
            weights |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
    return changes, weights


def _fill(whole: Parts, weights: dict[str, torch.Tensor]) -> None:
    """Load the weights of all parts; trees look at the rates of pairs in the table of the network on rates."""
    if whole.rates is not None:
        weights.pop("boosted.table.weight", None)
    whole.load_state_dict(weights)
