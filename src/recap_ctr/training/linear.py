"""Logistic regression, trained to convergence at the strength of regularisation that is best on validation rows.

The loss is convex, so there is one answer for each strength of the regulariser, and L-BFGS finds it. Strengths are
tried from strong to weak, each from the weights of the one before, until validation gets worse.

Shapes: N rows, V table rows, L linear fields.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation import metrics
from recap_ctr.jobs.progress import Meter, meter
from recap_ctr.models.lr import LR, LRConfig
from recap_ctr.training.loop import Trained
from recap_ctr.training.report import Epoch

if TYPE_CHECKING:  # Every worker process would wait for it.
    from scipy import sparse

Floats = npt.NDArray[np.float64]
STRENGTHS = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1)
"""Strengths of the regulariser to try, as l2 · rows: the weight of the prior against all rows."""
PATIENCE = 2  # Strengths in a row that may be worse on validation before the search ends.
MAX_ENTRIES = 100_000_000  # A design matrix of this many entries takes about 2 GB with its transpose.
MAX_STEPS = 300
ALONE, BESIDE = 3.0, 300.0
"""Strength of the prior of every weight when a regression goes on, alone and as a part beside others: there its weights
count for a fifth to a third, so the strength that it was fitted with stands for ten to thirty times as much."""
TOLERANCE = 1e-7  # Relative gain of a step below which the loss has converged.


@dataclass(frozen=True, eq=False)
class LinearFit:
    """A converged logistic regression: a weight for each table row, and a bias."""

    weights_V: Floats
    bias: float
    strength: float
    """The strength that was best on validation, as l2 · rows."""
    rows: int
    """Training rows that it was fitted to: all, or a random sample if they would not fit in memory."""
    steps: int
    """Steps of L-BFGS, over all strengths."""
    train_loss: float
    valid_auc: float
    valid_logloss: float
    is_cut: bool = False
    """Whether the deadline came before the search had ended."""


def train_linear(
    config: Frozen,
    data: PreparedData,
    device: torch.device,
    seed: int,
    *,
    strength: float | None = None,
    deadline: float | None = None,
    quiet: bool = False,
) -> Trained:
    """Fit the model `lr` to convergence, at one strength or at that which is best on the validation rows.

    Its history is a single epoch.
    """
    assert isinstance(config, LRConfig)
    started = time.monotonic()
    with meter("logistic regression", None, "rows", quiet=quiet) as shown:
        strengths = STRENGTHS if strength is None else (strength,)
        fit = fit_logistic(data, strengths=strengths, seed=seed, deadline=deadline, shown=shown)
    model = LR(config, data.layout).to(device)
    with torch.no_grad():
        model.wide.embedding.table.weight.copy_(torch.from_numpy(fit.weights_V).unsqueeze(1))
        assert model.wide.bias is not None
        model.wide.bias.fill_(fit.bias)
    seconds = time.monotonic() - started
    epoch = Epoch(
        epoch=1,
        step=fit.steps,
        learning_rate=0.0,
        train_loss=fit.train_loss,
        valid_auc=fit.valid_auc,
        valid_logloss=fit.valid_logloss,
        seconds=seconds,
    )
    return Trained(model.eval(), [epoch], 1, seconds, finished=not fit.is_cut, strength=fit.strength)


def design_matrix(shard: Shard, layout: Layout) -> "sparse.csr_matrix":
    """Return the rows as a sparse matrix whose product with the weights is what the model `lr` computes."""
    linear = [field for field in layout.fields if field.is_linear]
    ids = np.asarray(shard.ids)
    factors = np.ones((len(ids), ids.shape[1] + len(linear)), np.float32)
    for field in layout.fields:
        columns = slice(field.start, field.start + field.width)
        if field.is_factor:
            factors[:, field.start] = shard.values[:, field.value_column]
        elif field.pooling is not None:
            factors[:, columns] = ids[:, columns] != field.offset  # Padding has no weight.
    if linear:  # Their second entry is the next edge's.
        columns_L = [field.start for field in linear]
        ids_NL, shares_NL = ids[:, columns_L], shard.values[:, [field.number_column for field in linear]]
        factors[:, columns_L] = 1 - shares_NL
        factors[:, ids.shape[1] :] = shares_NL
        next_NL = ids_NL + (ids_NL < np.array([field.last for field in linear]))
        ids = np.concatenate([ids, next_NL], axis=1)
    starts = np.arange(0, ids.size + 1, ids.shape[1])
    from scipy import sparse

    return sparse.csr_matrix((factors.ravel(), ids.ravel(), starts), shape=(len(ids), layout.num_rows))


def fit_logistic(
    data: PreparedData,
    *,
    strengths: Sequence[float] = STRENGTHS,
    max_entries: int = MAX_ENTRIES,
    seed: int = 1,
    deadline: float | None = None,
    shown: Meter | None = None,
) -> LinearFit:
    """Fit a logistic regression with the strength that has the lowest logloss on the validation rows.

    At the `deadline`, a time of `time.time`, it ends with the weights that it has. Each step is shown on `shown`.
    """
    entries = data.layout.num_columns + sum(field.is_linear for field in data.layout.fields)
    train = _sample(data.train, max_entries // entries, seed)
    problem = _Problem(design_matrix(train, data.layout), train)
    valid, labels, masses = design_matrix(data.valid, data.layout), data.valid.labels, data.valid.weights
    solution = problem.start
    best: LinearFit | None = None
    worse, is_cut = 0, False

    def after_step(note: str) -> None:
        nonlocal is_cut
        if shown is not None:
            shown.advance(len(train), 1, note)
        is_cut = deadline is not None and time.time() > deadline
        if is_cut:
            raise StopIteration

    for strength in strengths:
        solution = problem.solve(strength, solution, partial(after_step, f"strength {strength:g}"))
        logits = valid @ solution[:-1] + solution[-1]
        loss = metrics.logloss(labels, logits, masses)
        if best is None or loss < best.valid_logloss:
            worse = 0
            best = LinearFit(
                weights_V=solution[:-1],
                bias=float(solution[-1]),
                strength=strength,
                rows=len(train),
                steps=problem.steps,
                train_loss=problem.loss(solution),
                valid_auc=metrics.auc(labels, logits, masses),
                valid_logloss=loss,
            )
        else:
            worse += 1
            if worse == PATIENCE:
                break
        if is_cut:
            break
    assert best is not None
    return replace(best, is_cut=is_cut)


def _sample(shard: Shard, rows: int, seed: int) -> Shard:
    """Return the shard, or `rows` of its rows at random if it has more."""
    if len(shard) <= rows:
        return shard
    return shard.take(np.sort(np.random.default_rng(seed).choice(len(shard), rows, replace=False)))


class _Problem:
    """The loss of all rows with its gradient, in variables that are scaled by their curvature.

    Frequent values have a curvature thousands of times that of rare ones; without the scaling, L-BFGS needs several
    times the steps. The last variable is the bias, which is not regularised.
    """

    def __init__(self, matrix: "sparse.csr_matrix", rows: Shard, beside_N: Floats | None = None) -> None:
        self._matrix, self._transposed = matrix, matrix.T.tocsr()
        self._beside_N = np.zeros(len(rows)) if beside_N is None else beside_N
        self._labels = np.asarray(rows.labels, np.float64)
        self._masses = np.ones(len(rows)) if rows.weights is None else np.asarray(rows.weights, np.float64)
        rate = float(np.average(self._labels, weights=self._masses))
        self.start: Floats = np.append(np.zeros(matrix.shape[1]), metrics.logit(rate))
        self.steps = 0
        squares = self._transposed.multiply(self._transposed)
        self._curvature = rate * (1 - rate) * np.append(squares @ self._masses, self._masses.sum())

    def loss(self, solution: Floats) -> float:
        """Return the mean loss of the rows, without the regulariser."""
        logits = self._matrix @ solution[:-1] + solution[-1] + self._beside_N
        return float(np.average(metrics.softplus(logits) - self._labels * logits, weights=self._masses))

    def solve(self, strength: float, start: Floats, after_step: Callable[[], None]) -> Floats:
        """Return the weights and bias that minimise the loss plus strength / 2 · ||weights||².

        Where `after_step` raises StopIteration, they are as that step left them.
        """
        return self._minimise(np.full(len(start) - 1, strength), np.zeros(len(start) - 1), start, after_step)

    def move(self, weights_V: Floats, bias: float, seen_V: Floats, strength: float) -> tuple[Floats, float]:
        """Return the weights and bias near those of earlier rows, which hold each weight as strongly as they would."""
        rate = float(np.average(self._labels, weights=self._masses))
        held_V = rate * (1 - rate) * seen_V + strength
        solution = self._minimise(held_V, weights_V, np.append(weights_V, bias))
        return solution[:-1], float(solution[-1])

    def _minimise(
        self,
        strength_V: Floats,
        centre_V: Floats,
        start: Floats,
        after_step: Callable[[], None] = lambda: None,
    ) -> Floats:
        """Return the minimum of the loss plus strength / 2 · (weights - centre)², summed over all weights."""
        scale = 1 / np.sqrt(self._curvature + np.append(strength_V, strength_V.min()))
        total = self._masses.sum()

        def loss_and_gradient(scaled: Floats) -> tuple[float, Floats]:
            weights, bias = scaled[:-1] * scale[:-1], scaled[-1] * scale[-1]
            logits = self._matrix @ weights + bias + self._beside_N
            loss = self._masses @ (metrics.softplus(logits) - self._labels * logits)
            residuals = self._masses * (metrics.sigmoid(logits) - self._labels)
            moved = weights - centre_V
            gradient = np.append(self._transposed @ residuals + strength_V * moved, residuals.sum())
            penalty = float((strength_V * moved) @ moved) / 2
            return float(loss + penalty) / total, gradient * scale / total

        from scipy import optimize

        result = optimize.minimize(
            loss_and_gradient,
            start / scale,
            jac=True,
            method="L-BFGS-B",
            callback=lambda _: after_step(),
            options={"maxiter": MAX_STEPS, "ftol": TOLERANCE, "gtol": 0.0},
        )
        self.steps += int(result.nit)
        return np.asarray(result.x * scale)


def go_on(
    weights_V: Floats,
    bias: float,
    seen_V: Floats,
    rows: Shard,
    layout: Layout,
    *,
    beside_N: Floats,
    strength: float,
) -> tuple[Floats, float]:
    """Return the weights and bias of a regression after further rows, without reading the rows that it was fitted to
    before.

    The earlier rows act as a prior: they hold a weight as strongly as if the `seen_V` rows that it came from were
    there, and `strength` holds a weight without rows. `beside_N` are the logits of the parts beside the regression.
    """
    problem = _Problem(design_matrix(rows, layout), rows, beside_N)
    return problem.move(weights_V, bias, seen_V, strength)
