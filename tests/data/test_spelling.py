"""Values in another spelling: every kind is recognised from either side, and new values are not."""

import polars as pl
import pytest

from recap_ctr.data.spelling import ambiguous_share, find_respelling


@pytest.mark.parametrize(
    ("values", "vocabulary", "kind"),
    [
        (["SITE", "OTHER"], ["Site", "other"], "case"),
        (["site", "other"], ["SITE", "Other"], "case"),
        (["00017", "00018"], ["17", "18"], "zero padding"),
        (["17", "18"], ["00017", "00018"], "zero padding"),
        ([" a", "b "], ["a", "b"], "blanks"),
        (["123456789012345678.0", "1.2345678901234568e17"], ["123456789012345678"], "floats"),
        (['"a"', '"b"'], ["a", "b"], "quotes"),
        ([" A ", " B "], ["a", "b"], "several spellings"),
        (["NULL", "null"], ["a", "b"], "a word for missing"),
    ],
)
def test_kinds(values: list[str], vocabulary: list[str], kind: str) -> None:
    respelling = find_respelling(pl.Series(values), pl.Series([2, 1]), pl.Series(vocabulary))
    assert respelling is not None
    assert (respelling.kind, respelling.count, respelling.value) == (kind, 3, values[0])


def test_new_values_are_no_respellings() -> None:
    assert find_respelling(pl.Series(["x1", "x2"]), pl.Series([5, 5]), pl.Series(["a", "b"])) is None


def test_vocabularies_with_two_spellings_of_a_value() -> None:
    assert ambiguous_share(pl.Series(["a", "A", "b"]), pl.Series([2, 1, 7])) == pytest.approx(0.3)
    assert ambiguous_share(pl.Series([], dtype=pl.String), pl.Series([], dtype=pl.Int64)) == 0.0
