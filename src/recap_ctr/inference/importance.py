"""How much a model relies on each field: what shuffling its values between rows costs (permutation importance).

Shapes: N rows, R repeats.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recap_ctr.config import Record
from recap_ctr.data.encode import Encoded
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.roles import drop_unlabelled, read_labels, read_weights
from recap_ctr.data.source import Source
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import Bools, Floats, auc, check_rows, delong, logloss, pairs_won, softplus
from recap_ctr.inference.explain import with_field_of
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.progress import meter

Z = 1.96  # Half the width of a 95 % interval, in standard errors.


class Change(Record):
    """A change of a figure with its 95 % interval over rows and over repeats of the shuffle."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


class FieldImportance(Record):
    """What shuffling one field costs."""

    field: str
    auc_drop: Change
    logloss_rise: Change
    """Of the calibrated scores."""


class Importance(Record):
    """The importance of each field on some labelled rows, the most important first."""

    rows: int
    """How many rows were scored: all, or a random sample of them."""
    repeats: int
    seed: int
    auc: float
    logloss: float
    fields: list[FieldImportance]
    unlabelled: int = 0
    """Rows without a label, which were left out."""


def explain_rows(
    scorer: Scorer,
    source: Source,
    *,
    max_rows: int = 50_000,
    repeats: int = 5,
    seed: int = 1,
    labelled_only: bool = False,
    quiet: bool = False,
) -> Importance:
    """Return the permutation importance of each field on labelled rows, at most `max_rows` of them, drawn at random.

    With `labelled_only` rows without a label are left out and counted; otherwise they are an error.
    """
    if max_rows < 2 or repeats < 1:
        raise InputError(f"{max_rows} rows and {repeats} repeats: at least 2 rows and 1 repeat are needed")
    rng = np.random.default_rng(seed)
    sample, unlabelled = _draw(scorer, source, max_rows, rng, labelled_only, quiet)
    clicks = int(sample.labels_N.sum())
    if min(clicks, len(sample.labels_N) - clicks) < 2:
        raise InputError(
            f"{clicks:,} of {len(sample.labels_N):,} rows are clicks: two rows of each label are needed",
            fix="explain on more rows",
        )
    shuffler = _Shuffler(scorer, sample)
    fields = scorer.engine.encoder.layout.fields
    importances = []
    with meter("explaining", len(fields) * repeats, "rows", quiet=quiet) as progress:
        for number, field in enumerate(fields, 1):
            drops_RN, rises_RN = np.empty((2, repeats, shuffler.num_rows))
            for repeat in range(repeats):
                drops_RN[repeat], rises_RN[repeat] = shuffler.changes(field, rng)
                progress.advance(shuffler.num_rows, 1, f"field {number} of {len(fields)}")
            importances.append(shuffler.importance(field.name, drops_RN, rises_RN))
    return Importance(
        rows=shuffler.num_rows,
        repeats=repeats,
        seed=seed,
        auc=shuffler.auc,
        logloss=shuffler.logloss,
        fields=sorted(importances, key=lambda entry: -entry.auc_drop.value),
        unlabelled=unlabelled,
    )


@dataclass(frozen=True, eq=False)
class _Sample:
    encoded: Encoded
    labels_N: npt.NDArray[np.uint8]
    weights_N: Floats
    """Ones where the rows have no weights."""

    def take(self, at: npt.NDArray[np.intp]) -> "_Sample":
        encoded = replace(self.encoded, ids_BW=self.encoded.ids_BW[at], values_BN=self.encoded.values_BN[at])
        return _Sample(encoded, self.labels_N[at], self.weights_N[at])

    def joined(self, other: "_Sample") -> "_Sample":
        encoded = replace(
            self.encoded,
            ids_BW=np.concatenate([self.encoded.ids_BW, other.encoded.ids_BW]),
            values_BN=np.concatenate([self.encoded.values_BN, other.encoded.values_BN]),
        )
        labels_N = np.concatenate([self.labels_N, other.labels_N])
        return _Sample(encoded, labels_N, np.concatenate([self.weights_N, other.weights_N]))


def _draw(
    scorer: Scorer, source: Source, count: int, rng: np.random.Generator, labelled_only: bool, quiet: bool
) -> tuple[_Sample, int]:
    """Return `count` rows drawn at random, or all if there are fewer, and how many were left out without a label.

    Rows of weight 0 are not drawn. Every row gets a random key, and the rows with the smallest keys are kept, so that
    a pipe can be sampled, too.
    """
    schema = scorer.engine.encoder.schema
    sample: _Sample | None = None
    unlabelled = 0
    keys_N = np.empty(0)
    with meter("reading", source.total_bytes or None, "rows", quiet=quiet) as progress:
        for block, size in source.blocks():
            whole = scorer.renamed(block)
            renamed = drop_unlabelled(whole, schema.label) if labelled_only else whole
            unlabelled += whole.frame.height - renamed.frame.height
            progress.advance(whole.frame.height, size)
            if not renamed.frame.height:
                continue
            has_weights = schema.weight is not None and schema.weight in renamed.frame.columns
            weights = read_weights(renamed, schema.weight) if schema.weight and has_weights else None
            labels = read_labels(renamed, schema.label, schema.positive, schema.negative)
            masses = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
            part = _Sample(scorer.engine.encoder.encode(renamed), labels, masses)
            keys = rng.random(len(labels))
            keys[masses == 0] = np.inf
            sample = part if sample is None else sample.joined(part)
            keys_N = np.concatenate([keys_N, keys])
            kept = np.argsort(keys_N, kind="stable")[:count]
            kept = np.sort(kept[np.isfinite(keys_N[kept])])
            sample, keys_N = sample.take(kept), keys_N[kept]
    if sample is None or not len(keys_N):
        raise InputError("there are no rows to explain")
    return sample, unlabelled


class _Shuffler:
    """Shuffles fields of a sample, and compares the scores with those of the rows as they are."""

    def __init__(self, scorer: Scorer, sample: _Sample) -> None:
        self._scorer, self._sample = scorer, sample
        raw_N, logit_N = self._logits(sample.encoded)
        weights = None if (sample.weights_N == 1).all() else sample.weights_N
        self._positive_N: Bools = check_rows(sample.labels_N, raw_N, weights).positive
        self.auc, self.logloss = (
            auc(sample.labels_N, raw_N, weights),
            logloss(sample.labels_N, logit_N, weights),
        )
        self._won_N, self._loss_N = self._won_and_loss(raw_N, logit_N)

    @property
    def num_rows(self) -> int:
        return len(self._sample.labels_N)

    def _logits(self, encoded: Encoded) -> tuple[Floats, Floats]:
        """Return the raw and the calibrated logits: calibration may tie rows, which would blur the AUC."""
        scores = self._scorer.engine.score(encoded, self._scorer.setting)
        return scores.raw_logit_B, scores.logit_B

    def _won_and_loss(self, raw_N: Floats, logit_N: Floats) -> tuple[Floats, Floats]:
        """Return each row's share of pairs won, whose mean is the AUC, and its logloss."""
        loss_N = softplus(np.where(self._positive_N, -logit_N, logit_N))
        return pairs_won(self._positive_N, raw_N, self._sample.weights_N), loss_N

    def changes(self, field: FieldLayout, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Shuffle a field once; return what each row loses in pairs won and gains in logloss."""
        encoded = self._sample.encoded
        shuffled = with_field_of(encoded, field, encoded, rng.permutation(self.num_rows))
        won_N, loss_N = self._won_and_loss(*self._logits(shuffled))
        return self._won_N - won_N, loss_N - self._loss_N

    def importance(self, name: str, drops_RN: Floats, rises_RN: Floats) -> FieldImportance:
        """Return the mean changes with intervals from their spread over rows and over repeats."""
        weights_N = self._sample.weights_N
        drop, drop_error = delong(self._positive_N, drops_RN.mean(axis=0), weights_N)
        rise_N = rises_RN.mean(axis=0)
        share_N = weights_N / weights_N.sum()
        rise = float(share_N @ rise_N)
        rise_error = math.sqrt(float(share_N**2 @ (rise_N - rise) ** 2))
        clicks_N = share_N * self._positive_N
        return FieldImportance(
            field=name,
            auc_drop=_change(drop, drop_error, drops_RN @ (clicks_N / clicks_N.sum())),
            logloss_rise=_change(rise, rise_error, rises_RN @ share_N),
        )


def _change(value: float, rows_error: float, repeats_R: Floats) -> Change:
    """Return a change with its interval, whose error combines that over rows and that over repeats."""
    repeats_error = repeats_R.std(ddof=1) / math.sqrt(len(repeats_R)) if len(repeats_R) > 1 else 0.0
    half = Z * math.hypot(rows_error, repeats_error)
    return Change(value=value, low=value - half, high=value + half)
