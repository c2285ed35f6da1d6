"""The sentences about a forecast."""

from dataclasses import replace

from recap_ctr.diagnose.measure import Estimate
from recap_ctr.diagnose.results import AxisChoice, Forecast, ProbeArms, Worth
from recap_ctr.pages.forecast import check_sentence, forecast_notes, forecast_sentences


def choice(count: int, loss: float, gain: float = 0.0, *, microseconds: float = 1.0) -> AxisChoice:
    """Return a choice whose figures have no noise."""
    loss_estimate, gain_estimate = Estimate(loss, loss, loss), Estimate(gain, gain, gain)
    return AxisChoice(
        count, loss_estimate, None, gain_estimate, minutes=1.0, parameters=10, microseconds=microseconds
    )


FORECAST = Forecast(
    runs=2,
    rows=1_000,
    teachers=tuple(choice(count, 0.3 + 0.0021 / count, 0.0021 - 0.0021 / count) for count in range(1, 17)),
    routes=(choice(1, 0.3),),
    averaging=(choice(1, 0.31), choice(1, 0.3)),
    arms=None,
    choice={"teachers": 5, "routes": 1, "minutes": 3.0},
    notes=("A note.",),
)


def test_sentences_begin_with_the_teachers_and_end_with_the_recommendation_and_notes() -> None:
    assert forecast_sentences(FORECAST) == [
        "From 2 runs: one teacher has a logloss of 0.30210 on 1,000 validation rows. The mean of 5 teachers is forecast"
        " to save 0.00168 (0.00168 to 0.00168 with other runs), which gives 0.30042 (0.30042 to 0.30042 with other"
        " runs); 16 teachers would reach 0.30013.",
        "The gain in AUC is within the noise of the validation rows, so no AUC is forecast.",
        "Averaging the weights lowers logloss by 0.01000 (0.31000 to 0.30000) and makes scoring no slower.",
        "Recommended: 5 teachers and one route, which takes about 3 minutes of training after the probe. One more"
        " teacher must save 0.0001 of logloss to be worth its time.",
        "A note.",
    ]


def test_auc_is_forecast_where_the_rows_can_tell() -> None:
    auc = Estimate(0.9, 0.89, 0.91, runs_low=0.895, runs_high=0.905)
    teachers = tuple(replace(teacher, auc=auc) for teacher in FORECAST.teachers)
    assert forecast_sentences(replace(FORECAST, teachers=teachers))[1] == (
        "AUC in points: 90.000 for one teacher, 90.000 (89.500 to 90.500 with other runs) for the mean of 5."
    )


def test_averaging_that_raises_the_loss_is_a_warning() -> None:
    averaging = (choice(1, 0.30), choice(1, 0.31))
    sentence = forecast_sentences(replace(FORECAST, averaging=averaging))[2]
    assert sentence == (
        "Averaging the weights raises logloss by 0.01000 (0.30000 to 0.31000): check the learning rate schedule."
    )


def test_routes_are_praised_only_for_a_gain_beyond_chance() -> None:
    clear = choice(8, 0.2998, 0.0002, microseconds=3.0)
    noisy = replace(clear, gain=Estimate(0.0002, -0.0001, 0.0005))
    routes = [
        forecast_sentences(replace(FORECAST, routes=(choice(1, 0.3), best)))[3] for best in (clear, noisy)
    ]
    assert routes == [
        "8 routes save 0.000200 of logloss compared with one route (0.000200 to 0.000200 with other rows) and take 3.0"
        " times as long to score.",
        "No number of routes up to 8 saves more logloss than chance would.",
    ]


def test_no_teachers_and_several_routes_can_be_recommended() -> None:
    forecast = replace(FORECAST, choice={"teachers": 0, "routes": 4, "minutes": 3.0})
    assert "The mean of 2 teachers" in forecast_sentences(forecast)[0]
    assert forecast_sentences(forecast)[-2].startswith("Recommended: no teachers and 4 routes")


def test_the_probe_is_set_next_to_the_teachers() -> None:
    def arms(saved: float) -> ProbeArms:
        best = Worth(1, Estimate(0.32, 0.32, 0.32), None, Estimate(0.0, 0.0, 0.0))
        return ProbeArms(
            names=("a", "b", "c"),
            rows=300_000,
            means=(best, choice(3, 0.32 - saved, saved)),
            forecast=(choice(1, 0.3, 0.004),) * 5,
        )

    assert not any("probe," in sentence for sentence in forecast_sentences(FORECAST))
    for saved, verb in ((0.001, "saves 0.00100"), (-0.002, "costs 0.00200")):
        sentence = forecast_sentences(replace(FORECAST, arms=arms(saved)))[1]
        assert sentence.startswith(
            "The 3 better arms of the probe, each trained on 300,000 rows, are estimators too."
        )
        assert f"Their mean {verb} of logloss" in sentence
        assert sentence.endswith("would save 0.00400, where 0.00168 is forecast for teachers.")


def test_a_forecast_from_two_runs_has_a_note_more() -> None:
    two_runs, student = forecast_notes(2, 20)
    assert "20 independent directions" in two_runs
    assert "not known before the student is trained" in student
    assert forecast_notes(3, 20) == (student,)


def test_a_check_says_whether_the_forecast_held() -> None:
    expected = Estimate(0.31, 0.30, 0.32, runs_low=0.305, runs_high=0.315)
    inside = "logloss of 5 teachers, on validation: forecast from 2 runs 0.31000 (0.30500 to 0.31500 with other runs)"
    assert check_sentence("logloss", 5, 2, expected, 0.312) == f"{inside}, measured 0.31200: inside."
    assert check_sentence("logloss", 5, 2, expected, 0.302).endswith("measured 0.30200: outside.")
    assert check_sentence("AUC", 5, 2, expected, 0.312).endswith("measured 31.200: inside.")
