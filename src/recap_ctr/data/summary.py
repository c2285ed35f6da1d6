"""What the rows of a table say about one column, collected block by block."""

import re
from collections import Counter
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.text import NO_CATEGORIES, as_text

MAX_VALUES = 2_000_000
MISSING_WORDS = {
    *("na", "n/a", "#n/a", "null", "nil", "none", "undefined", "unknown", "missing"),
    *("\\n", "?", "-", "--"),
}
ID_WORDS = {
    *("id", "ids", "uid", "gid", "pid", "uuid", "guid", "hash", "md5", "code", "key", "token", "ip", "url"),
    *("zip", "zipcode", "postcode", "postal", "isbn", "sku", "asin"),
}
ENTITIES = {
    *(
        "user",
        "member",
        "customer",
        "visitor",
        "item",
        "product",
        "article",
        "movie",
        "video",
        "song",
        "book",
    ),
    *(
        "ad",
        "advert",
        "creative",
        "campaign",
        "advertiser",
        "publisher",
        "site",
        "page",
        "app",
        "device",
        "query",
    ),
    *(
        "author",
        "artist",
        "brand",
        "shop",
        "store",
        "seller",
        "merchant",
        "category",
        "city",
        "region",
        "country",
    ),
}
"""Columns that are named like this, and nothing else, hold ids."""
NUMBER_WITH_COMMA = (
    r"^[+-]?(?:\d+|\d{1,3}(?:[. ]\d{3})+)(?:,\d+)?$"  # 1,5 and 1.234,5
    r"|^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$"  # 1,234.5
)
_SIGN = r"(?:[\p{Sc}%]|USD|EUR|GBP|JPY|CNY|INR|CHF)"
_DIGITS = r"(?:\d+(?:[.,]\d+)?|\d{1,3}(?:[.,\s']\d{3})+(?:[.,]\d+)?)"
NUMBER_WITH_SIGN = (
    rf"(?i)^[+-]?{_SIGN}\s*[+-]?{_DIGITS}$"  # $12.30, EUR 1.234,50
    rf"|^[+-]?{_DIGITS}\s*{_SIGN}$"  # 12,30 €, 5%
)
LIST_AS_TEXT = r"^\s*\[.*\]\s*$"
_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE_AS_TEXT = (
    r"(?i)^\s*(?:[a-z]{3,9},? )?(?:"
    r"\d{1,2}[./-]\d{1,2}[./-](?:19|20)\d{2}"  # 31.01.2026, 1/31/2026
    r"|\d{1,2}[./-]\d{1,2}[./-]\d{2} \d{1,2}:\d{2}"  # 1/31/26 23:59
    r"|(?:19|20)\d{2}[/-]\d{1,2}[/-]\d{1,2}"  # 2026-1-31
    r"|(?:19|20)\d{6}T\d{4,6}"  # 20260131T2359
    rf"|\d{{1,2}}[ /-]{_MONTH}[ /-]\d{{2,4}}"  # 31/Jan/2026
    rf"|{_MONTH} \d{{1,2}},? \d"  # Jan 31, 2026
    r")"
)
COMMON_SHARE = 0.95
PRIOR_ROWS = (2.0, 10.0, 50.0, 250.0, 1250.0)
NUM_NEIGHBOURHOODS = 64
MAX_UNEVENNESS = 0.1
ID_EVIDENCE = (
    10.0  # Single values must predict better than neighbourhoods by so many nats: odds of e^10 to 1.
)
ORDER_SHARE = 0.9  # Of what single numbers tell, neighbourhoods must tell so much if their order counts.
ID_ENDINGS = re.compile(
    r"(?:user|item|movie|song|ad|app|site|device|product|session|campaign|query|page|shop)id"
)


class ColumnSummary:
    """The distinct values of a column with their counts and clicks, up to `MAX_VALUES`, and how they follow the rows.

    Values of a list column are counted one by one. The properties are meant to be read once all rows are added.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.type: pl.DataType = pl.Null()
        self.num_missing = self.missing_clicks = 0
        self.is_capped = False
        """Whether there were more values than `MAX_VALUES`, of which the rarest were dropped."""
        self.lengths: Counter[int] = Counter()
        """Rows by the length of their list."""
        self.has_lists_of_fractions = False
        """Whether there are lists of numbers that are not whole, such as embeddings."""
        self._rises = self._falls = 0
        self._last: pl.Series | None = None
        self._counts = pl.DataFrame(schema={"value": pl.String, "count": pl.Int64, "clicks": pl.Int64})

    def add(self, series: pl.Series, clicked: pl.Series) -> None:
        """Add the rows of a block; `clicked` holds their labels."""
        if self.type == pl.Null:
            self.type = series.dtype
        if not self.is_readable or self.has_lists_of_fractions:
            return
        if isinstance(series.dtype, (pl.List, pl.Array)):
            lists = series.cast(pl.List(series.dtype.inner))
            lengths = lists.list.len().fill_null(0)
            self.lengths.update(dict(lengths.value_counts().iter_rows()))
            self._add_missing(lengths == 0, clicked)
            clicked = pl.Series(np.repeat(clicked.to_numpy(), lengths.to_numpy()))
            values = lists.filter(lengths > 0).explode()
            if values.dtype.is_float() and (values != values.floor()).any():
                self.has_lists_of_fractions = True
                return
            text = as_text(values)
        else:
            text = as_text(series)
            self._add_missing(text.is_null(), clicked)
            self._add_order(text)
        self._add_counts(text, clicked)

    def _add_missing(self, is_missing: pl.Series, clicked: pl.Series) -> None:
        self.num_missing += int(is_missing.sum())
        self.missing_clicks += int(clicked.filter(is_missing).sum())

    def _add_order(self, text: pl.Series) -> None:
        """Count how often the values rise and fall: ids given in order, and times, rise with the rows."""
        numbers = text.cast(pl.Float64, strict=False)
        values = (numbers if numbers.count() else text).drop_nulls()
        if self._last is not None and self._last.dtype == values.dtype:
            values = pl.concat([self._last, values])
        self._rises += int((values > values.shift()).sum())
        self._falls += int((values < values.shift()).sum())
        self._last = values.tail(1)

    def _add_counts(self, text: pl.Series, clicked: pl.Series) -> None:
        counts = (
            pl.DataFrame({"value": text, "clicks": clicked})
            .drop_nulls()
            .group_by("value")
            .agg(count=pl.len().cast(pl.Int64), clicks=pl.col("clicks").cast(pl.Int64).sum())
        )
        merged = pl.concat([self._counts, counts.select(self._counts.columns)])
        self._counts = merged.group_by("value").agg(pl.col("count", "clicks").sum())
        if self._counts.height > MAX_VALUES:
            self.is_capped = True
            self._counts = self._sorted().head(MAX_VALUES)

    def _sorted(self) -> pl.DataFrame:
        return self._counts.sort(["count", "value"], descending=[True, False])

    @cached_property
    def counts(self) -> pl.DataFrame:
        """Return the columns value, count and clicks, most frequent value first."""
        return self._sorted()

    @property
    def num_distinct(self) -> int:
        """Return the number of distinct values, missing not counted."""
        return self._counts.height

    @cached_property
    def num_singletons(self) -> int:
        """Return the number of values that occur once."""
        return int((self.counts["count"] == 1).sum())

    @property
    def is_readable(self) -> bool:
        """Return whether the column's type, or the type inside its lists, can hold categories."""
        inner = self.type.inner if isinstance(self.type, (pl.List, pl.Array)) else self.type
        return inner not in NO_CATEGORIES

    @property
    def is_list(self) -> bool:
        """Return whether the column holds lists."""
        return bool(self.lengths)

    @cached_property
    def _parsed(self) -> tuple[pl.Series | None, tuple[str, ...]]:
        """Return the numbers, and the words among them that mean a missing value."""
        text = self.counts["value"].str.strip_chars()
        numbers = text.cast(pl.Float64, strict=False)
        words = text.filter(numbers.is_null()).unique().to_list() if self.type != pl.Boolean else []
        present = numbers.drop_nulls().drop_nans()
        has_codes = text.str.contains(
            r"^[+-]?0\d"
        ).any()  # 00501 is a code, however much it looks like a number
        other_words = {word.lower() for word in words} - MISSING_WORDS
        if self.is_list or has_codes or not len(present) or other_words:
            return None, ()
        return present, tuple(sorted(words))

    @property
    def numbers(self) -> pl.Series | None:
        """Return the distinct values as numbers; None if the column does not hold numbers."""
        return self._parsed[0]

    @cached_property
    def comma_number(self) -> str | None:
        """Return a value such as 1,5 or 1,234, if the column holds numbers that are written with commas."""
        if self.numbers is not None or self.kind != "text":
            return None
        values = pl.col("value").str.strip_chars()
        present = self.counts.filter(~values.str.to_lowercase().is_in(MISSING_WORDS))
        is_number = present.select(values.str.contains(NUMBER_WITH_COMMA))["value"]
        has_comma = present["value"].str.contains(",", literal=True)
        # Three pieces or more, such as 1,2,3, are a list.
        if (has_comma & ~is_number).any() or not self._is_common(present, is_number):
            return None
        return next(iter(present["value"].filter(has_comma)), None)

    @cached_property
    def signed_number(self) -> str | None:
        """Return a value such as $12.30 or 5%, if the column holds numbers with a sign of currency or a per cent."""
        if self.kind != "text":
            return None
        values = pl.col("value").str.strip_chars()
        present = self.counts.filter(~values.str.to_lowercase().is_in(MISSING_WORDS))
        is_number = present.select(values.str.contains(NUMBER_WITH_SIGN))["value"]
        return present["value"].filter(is_number)[0] if self._is_common(present, is_number) else None

    @cached_property
    def list_text(self) -> str | None:
        """Return a value such as ['a', 'b'], if the column holds lists that were written as text."""
        if self.kind != "text":
            return None
        is_list = self.counts["value"].str.contains(LIST_AS_TEXT)
        return self.counts["value"].filter(is_list)[0] if self._is_common(self.counts, is_list) else None

    @cached_property
    def date_text(self) -> str | None:
        """Return a value such as 31.01.2026 23:59, if the column holds dates, in whatever spelling."""
        if self.kind != "text":
            return None
        is_date = self.counts["value"].str.contains(DATE_AS_TEXT)
        return self.counts["value"].filter(is_date)[0] if self._is_common(self.counts, is_date) else None

    def _is_common(self, counts: pl.DataFrame, is_match: pl.Series) -> bool:
        """Return whether the values that match are in nearly all rows."""
        total = int(counts["count"].sum())
        return total > 0 and int(counts["count"].filter(is_match).sum()) >= COMMON_SHARE * total

    @property
    def missing_words(self) -> tuple[str, ...]:
        """Return the words in a column of numbers that mean a missing value, such as NA."""
        return self._parsed[1]

    @cached_property
    def is_integer(self) -> bool:
        """Return whether all values are whole numbers."""
        return self.numbers is not None and bool((self.numbers == self.numbers.floor()).all())

    @property
    def is_ordered(self) -> bool:
        """Return whether the values rise with the rows, or fall with them, in 95% of the steps, and don't start over.

        The minutes of a day start over: in a log in time order they rise from 0 again every day.
        """
        steps = self._rises + self._falls
        begins_again = not self.is_capped and steps > 2 * self.num_distinct
        return steps > 0 and min(self._rises, self._falls) <= 0.05 * steps and not begins_again

    @property
    def name_words(self) -> set[str]:
        """Return the words in the name: user_id, UserID and user-id are `user` and `id`."""
        return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*", self.name)}

    @property
    def is_id(self) -> bool:
        """Return whether the values are ids, by the column's name or because they are too long for a measurement."""
        words = self.name_words
        has_id_name = bool(ID_ENDINGS.search(self.name.lower()) or words & ID_WORDS)
        has_id_name = has_id_name or (len(words) == 1 and words <= ENTITIES)
        # Measurements beyond 2^53 have lost their last digits, so numbers that long are ids.
        return has_id_name or (self.numbers is not None and bool((self.numbers.abs() > 2.0**53).any()))

    @cached_property
    def acts_like_id(self) -> bool:
        """Return whether whole numbers behave like ids: evenly spread, each a better predictor than its neighbours."""
        if self.numbers is None or not self.is_integer or self.missing_words:
            return False
        values = self._in_order["value"].to_numpy()
        evenness = np.linspace(values[0], values[-1], len(values))
        if np.abs(values - evenness).max() > MAX_UNEVENNESS * (values[-1] - values[0]):
            return False
        alone, together = self._gains
        return alone > 2 * together + ID_EVIDENCE

    @property
    def has_order(self) -> bool:
        """Return whether neighbourhoods of numbers predict clicks nearly as well as single values do, as ages do."""
        if self.numbers is None:
            return False
        alone, together = self._gains
        return together > ID_EVIDENCE and together > ORDER_SHARE * alone

    @cached_property
    def _in_order(self) -> pl.DataFrame:
        """Return the numbers in their order, with their counts and clicks."""
        numbers = pl.col("value").str.strip_chars().cast(pl.Float64, strict=False)
        return self.counts.with_columns(numbers).drop_nulls("value").sort("value")

    @cached_property
    def _gains(self) -> tuple[float, float]:
        """Return what single numbers, and neighbourhoods of equally many rows, tell about clicks."""
        counts, clicks = (self._in_order[name].to_numpy().astype(np.float64) for name in ("count", "clicks"))
        middles = (np.cumsum(counts) - counts / 2) / counts.sum()
        # A neighbourhood of one number would tell what that number does; it has three or more on average.
        num_neighbourhoods = min(NUM_NEIGHBOURHOODS, max(len(counts) // 3, 1))
        places = (middles * num_neighbourhoods).astype(np.int64)
        together = [np.bincount(places, column).astype(np.float64) for column in (counts, clicks)]
        return predictive_gain(counts, clicks), predictive_gain(*together)

    @property
    def kind(self) -> str:
        """Return what the values are, in a user's words."""
        if self.is_list:
            return "list"
        if self.type.is_temporal():
            return "date or time"
        if self.type == pl.Boolean:
            return "true/false"
        return "text" if self.numbers is None else "integer" if self.is_integer else "number"


def predictive_gain(counts: npt.NDArray[np.float64], clicks: npt.NDArray[np.float64]) -> float:
    """Return how much better the click rates of groups predict than the overall rate, in nats of log-likelihood.

    Each row is predicted from the other rows of its group, shrunk to the overall rate as if by some more rows of that
    rate; as many as predict best. The result is 0 if the groups predict nothing.

    >>> round(predictive_gain(np.array([50.0, 50.0]), np.array([45.0, 5.0])), 1)
    34.8
    >>> predictive_gain(np.array([50.0, 50.0]), np.array([25.0, 25.0]))
    0.0
    """
    rows, num_clicks = counts.sum(), clicks.sum()
    if not 0 < num_clicks < rows:
        return 0.0
    rate = num_clicks / rows
    others = np.maximum(counts - 1, 0)
    best = num_clicks * np.log(rate) + (rows - num_clicks) * np.log1p(-rate)
    base = best
    for prior in PRIOR_ROWS:
        clicked = (np.maximum(clicks - 1, 0) + prior * rate) / (others + prior)
        unclicked = (np.maximum(counts - clicks - 1, 0) + prior * (1 - rate)) / (others + prior)
        best = max(best, float((clicks * np.log(clicked) + (counts - clicks) * np.log(unclicked)).sum()))
    return float(best - base)
