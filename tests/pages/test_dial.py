"""The table, the sentence and the page about the dial."""

from recap_ctr.inference.dial import Position
from recap_ctr.inference.setting import Setting
from recap_ctr.pages.dial import cells, dial_page, in_words

TOP, BOTTOM = Setting(4, 2), Setting(1, 1)


def position(setting: Setting, microseconds: float, auc: float | None = None) -> Position:
    costs = (20 * microseconds, 2 * microseconds, microseconds)
    return Position(setting, costs, auc, None if auc is None else 1 - auc)


def test_how_many_rows_a_millisecond_scores() -> None:
    dial = [position(TOP, 100.0, 0.8), position(BOTTOM, 25.0, 0.79)]
    assert in_words(dial) == (
        "A millisecond scores 10.0 rows with 4 routes at depth 2, and 40.0 with 1 route at depth 1,"
        " which on validation rows changes AUC by -1.000 points and logloss by +0.01000."
    )
    expected = ["1 route at depth 1", "0.79000", "0.21000", "500.0", "50.0", "25.0", "40.0"]
    assert cells(dial[1]) == expected


def test_quality_that_was_not_measured_is_left_out() -> None:
    dial = [position(TOP, 100.0), position(BOTTOM, 25.0, 0.79)]
    assert "To measure it: recap export ARTIFACT --data PREPARED" in in_words(dial)
    assert cells(dial[0])[1:3] == ["", ""]
    assert [len(series.x) for series in dial_page("x", dial, 1).charts[0].series] == [1]
    assert dial_page("x", dial[:1], 1).charts == []


def test_a_model_with_one_setting() -> None:
    assert in_words([position(Setting(1, None), 50.0, 0.8)]).endswith("; the model has no other setting.")
