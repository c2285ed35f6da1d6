"""Values that a vocabulary has in another spelling: in other case, padded with zeros, with blanks, as floats."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from recap_ctr.data.summary import MISSING_WORDS

Fold = Callable[[pl.Series], pl.Series]


def _strip(values: pl.Series) -> pl.Series:
    return values.str.strip_chars().str.replace_all(r"\s+", " ")


def _lower(values: pl.Series) -> pl.Series:
    return values.str.to_lowercase()


def _unpad(values: pl.Series) -> pl.Series:
    return values.str.replace(r"^0+([0-9])", "$1")


def _as_float(values: pl.Series) -> pl.Series:
    """Write numbers as a float would be; other values stay as they are."""
    return values.cast(pl.Float64, strict=False).cast(pl.String).fill_null(values)


def _unquote(values: pl.Series) -> pl.Series:
    return values.str.strip_chars("\"'")


def _all(values: pl.Series) -> pl.Series:
    return _as_float(_unpad(_lower(_strip(_unquote(values)))))


FOLDS: dict[str, tuple[Fold, str]] = {
    "blanks": (_strip, "strip the blanks around it"),
    "case": (_lower, "write it in the case of the training rows"),
    "zero padding": (_unpad, "write as many leading zeros as the training rows do"),
    "floats": (_as_float, "write whole numbers as integers or text, not as floats"),
    "quotes": (_unquote, "take off the quotes"),
    "several spellings": (_all, "compare blanks, case, leading zeros and decimals with the training rows"),
}
"""What makes two spellings alike, by the name of the difference, and how to undo it."""
MISSING_WORD = "a word for missing"


@dataclass(frozen=True)
class Respelling:
    """A way to spell that differs from the vocabulary's."""

    kind: str
    count: int
    """Rows, or values, with a value that the vocabulary has in another spelling."""
    value: str
    """The commonest such value."""
    vocabulary_value: str | None
    """The same value as the vocabulary spells it; None for a word that means a missing value."""
    fix: str


def find_respelling(values: pl.Series, counts: pl.Series, vocabulary: pl.Series) -> Respelling | None:
    """Return the difference in spelling that explains most `values` that the vocabulary lacks; None without one.

    >>> unseen = pl.Series(["0017", "0018", "x"])
    >>> respelling = find_respelling(unseen, pl.Series([3, 2, 9]), pl.Series(["17", "18"]))
    >>> respelling.kind, respelling.count, respelling.value, respelling.vocabulary_value
    ('zero padding', 5, '0017', '17')
    """
    candidates = [_missing_words(values, counts)]
    for kind, (fold, fix) in FOLDS.items():
        spelt = pl.DataFrame({"folded": fold(vocabulary), "known": vocabulary}).unique(
            "folded", keep="first", maintain_order=True
        )
        respelt = pl.DataFrame({"folded": fold(values), "value": values, "count": counts}).join(
            spelt, "folded"
        )
        if respelt.height:
            top = respelt.sort("count", "value", descending=[True, False]).row(0, named=True)
            total = int(respelt["count"].sum())
            candidates.append(Respelling(kind, total, top["value"], top["known"], fix))
    present = [candidate for candidate in candidates if candidate is not None]
    # The simplest explanation of nearly as many rows wins: folds that do more come last.
    most = max((candidate.count for candidate in present), default=0)
    return next((candidate for candidate in present if candidate.count >= 0.9 * most), None)


def _missing_words(values: pl.Series, counts: pl.Series) -> Respelling | None:
    is_word = values.str.strip_chars().str.to_lowercase().is_in([*MISSING_WORDS, "nan"])
    words = pl.DataFrame({"value": values, "count": counts}).filter(is_word)
    if not words.height:
        return None
    top = words.sort("count", descending=True).row(0, named=True)
    fix = "leave the cell empty, or list the word under missing = [...] in the schema and fit again"
    return Respelling(MISSING_WORD, int(words["count"].sum()), top["value"], None, fix)


def ambiguous_share(vocabulary: pl.Series, counts: pl.Series) -> float:
    """Return the share of training values that the vocabulary also has in another spelling."""
    total = int(counts.sum())
    if not total:
        return 0.0
    table = pl.DataFrame({"folded": _all(vocabulary), "count": counts})
    several = table.filter(pl.col("folded").is_duplicated())
    return int(several["count"].sum()) / total
