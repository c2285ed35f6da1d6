"""CTRClassifier keeps scikit-learn's contract, and is the command line's training and artifact behind it."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from recap_ctr.config import TrainConfig
from recap_ctr.data.infer import infer
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.evaluation.metrics import logit
from recap_ctr.inference.manifest import WEIGHTS
from recap_ctr.inference.scorer import Scorer
from recap_ctr.models.catalogue import parse_model
from recap_ctr.schema import Field, Schema
from recap_ctr.sklearn.classifier import CTRClassifier
from recap_ctr.sklearn.training import TRAINING
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import FitReport
from recap_ctr.training.run import run

Labels = np.ndarray[Any, Any]
SMALL = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}


def small(**parameters: Any) -> CTRClassifier:
    defaults = {"model_settings": SMALL, "learning_rate": 0.05, "batch_size": 64, "max_epochs": 3}
    return CTRClassifier(**{**defaults, "random_state": 1, **parameters})


def clicks(rows: int = 300, seed: int = 0) -> tuple[pl.DataFrame, Labels]:
    """Return rows with an ad that is clicked, a price that matters when it is low, and an hour that doesn't."""
    rng = np.random.default_rng(seed)
    frame = pl.DataFrame(
        {
            "ad": rng.choice(["shoes", "books", "soap"], rows),
            "hour": rng.integers(0, 24, rows),
            "price": rng.normal(size=rows),
        }
    )
    chance = 0.05 + 0.6 * (frame["ad"] == "shoes").to_numpy() + 0.3 * (frame["price"] < -0.5).to_numpy()
    return frame, (rng.random(rows) < chance).astype(int)


X, y = clicks()
PANDAS = pd.DataFrame(X.to_dict(as_series=False))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Scoring takes the process's threads, and on a busy machine two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fitted() -> CTRClassifier:
    return small().fit(X, y)


# scikit-learn's own checks.

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "rows are held out at random, and a row given twice may end up"
    " on both sides where a row of weight 2 can't; weight 0 alone is exact, see test_weight_zero_is_absence",
    "check_methods_subset_invariance": "matrix products in 32 bits round differently for batches of other sizes;"
    " the check asks for 7 digits of a logit that perfectly separated rows have calibrated up to 50",
}


@pytest.mark.slow
@parametrize_with_checks(
    [CTRClassifier(model_settings=SMALL, learning_rate=0.05, batch_size=64, max_epochs=3)],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
    xfail_strict=False,  # rounding differs between processors
)  # type: ignore[untyped-decorator]
def test_scikit_learn_check(estimator: CTRClassifier, check: Callable[[CTRClassifier], None]) -> None:
    check(estimator)


# What goes in.


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [PANDAS, PANDAS.astype({"ad": "category"}), X.to_numpy(), X.to_numpy().tolist(), X.lazy()],
    ids=["pandas", "categories", "objects", "lists", "lazy"],
)
def test_every_container_gives_the_same_model(fitted: CTRClassifier, table: Any) -> None:
    np.testing.assert_array_equal(small().fit(table, y).predict_proba(table), fitted.predict_proba(X))


@pytest.mark.slow
def test_names_are_kept_only_where_there_are_any(fitted: CTRClassifier) -> None:
    unnamed = small(max_epochs=1).fit(X.to_numpy(), y)
    numbered = small(max_epochs=1).fit(pd.DataFrame(X.to_numpy()), y)

    assert fitted.feature_names_in_.tolist() == ["ad", "hour", "price"]
    assert not hasattr(unnamed, "feature_names_in_")
    assert unnamed.n_features_in_ == numbered.n_features_in_ == 3
    np.testing.assert_array_equal(
        numbered.decision_function(X.to_numpy()), unnamed.decision_function(X.to_numpy())
    )
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(X.select("hour", "ad", "price"))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        from_array = fitted.predict(X.to_numpy())
    np.testing.assert_array_equal(from_array, fitted.predict(X))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.where(y, "yes", "no"), ["no", "yes"]),
        (pd.Series(np.where(y, "yes", "no")), ["no", "yes"]),
        (pl.Series(y == 1), [False, True]),
        (np.where(y, 7, -7), [-7, 7]),
    ],
    ids=["strings", "pandas", "booleans", "integers"],
)
def test_any_two_classes(fitted: CTRClassifier, tmp_path: Path, labels: Any, classes: list[Any]) -> None:
    model = small().fit(X, labels)
    model.save(tmp_path / "artifact")
    loaded = CTRClassifier.load(tmp_path / "artifact")

    assert model.classes_.tolist() == loaded.classes_.tolist() == classes
    np.testing.assert_array_equal(model.predict_proba(X), fitted.predict_proba(X))
    np.testing.assert_array_equal(model.predict(X), np.array(classes)[fitted.predict(X)])
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


@pytest.mark.slow
def test_columns_become_fields_by_their_values() -> None:
    frame = X.with_columns(label=pl.col("ad"), few=(pl.col("hour") % 20) / 2, many=(pl.col("hour") % 21) / 2)

    schema = small(max_epochs=1).fit(frame, y, np.ones(len(y))).artifact_.encoder.schema
    named = small(max_epochs=1).fit(X, pl.Series("click", y)).artifact_.encoder.schema

    assert (schema.label, schema.weight, named.label) == ("_label", "weight", "click")
    numeric = {field.name for field in schema.fields if field.transform == "linear"}
    categorical = {field.name for field in schema.fields if field.kind == "categorical"}
    assert (numeric, categorical) == ({"price", "many"}, {"ad", "hour", "label", "few"})


def log(rows: int = 300) -> tuple[pl.DataFrame, Labels]:
    """Return rows as a log has them: an id and a moment for each, a constant, a copy of the label, and lists."""
    frame, clicked = clicks(rows, seed=3)
    rng = np.random.default_rng(0)
    tags = [[f"t{tag}" for tag in rng.integers(0, 9, rng.integers(1, 4))] for _ in range(rows)]
    return frame.with_columns(
        impression=pl.Series([f"{i:06x}" for i in range(rows)]),
        timestamp=1_700_000_000 + 7 * pl.int_range(rows),
        country=pl.lit("de"),
        bought=pl.Series(clicked),
        tags=pl.Series(tags),
    ), clicked


@pytest.mark.slow
def test_columns_have_the_roles_that_the_commands_infer(tmp_path: Path) -> None:
    frame, clicked = log()
    inferred = infer(FrameSource(frame.with_columns(label=pl.Series(clicked))), "label")

    model = small(max_epochs=1).fit(frame, clicked)
    model.save(tmp_path / "artifact")
    loaded = CTRClassifier.load(tmp_path / "artifact")

    assert model.schema_ == model.artifact_.encoder.schema == inferred.schema
    assert (model.schema_.row_id, model.schema_.time) == ("impression", "timestamp")
    kinds = {field.name: field.kind for field in model.schema_.fields}
    assert kinds == {"ad": "categorical", "hour": "categorical", "price": "numeric", "tags": "multi"}
    reasons = {column: reason.partition(":")[0] for column, reason in model.dropped_columns_.items()}
    assert reasons == {
        "impression": "row_id",
        "timestamp": "time",
        "country": "constant",
        "bought": "COPIES THE LABEL",
    }
    assert (loaded.schema_, loaded.dropped_columns_) == (model.schema_, model.dropped_columns_)
    assert loaded.n_features_in_ == model.n_features_in_ == frame.width
    np.testing.assert_array_equal(loaded.predict_proba(frame), model.predict_proba(frame))
    assert small(schema=model.schema_, max_epochs=1).fit(frame, clicked).dropped_columns_ == {}


@pytest.mark.slow
def test_lists_are_multi_fields_in_every_frame() -> None:
    frame, clicked = log()
    frame = frame.select("ad", "tags")
    objects = pd.DataFrame({"ad": frame["ad"].to_list(), "tags": frame["tags"].to_list()})

    model = small().fit(frame, clicked)

    np.testing.assert_array_equal(
        small().fit(objects, clicked).predict_proba(objects), model.predict_proba(frame)
    )
    without = model.predict_proba(frame.with_columns(tags=pl.lit([], pl.List(pl.String))))
    assert not np.allclose(without, model.predict_proba(frame))


def test_a_table_without_features_is_refused_with_the_reasons() -> None:
    frame, clicked = log()

    with pytest.raises(
        ValueError, match=r"no column can serve as a field\n  'impression': row_id, text, 300"
    ):
        small().fit(frame.select("impression", "country"), clicked)


@pytest.mark.slow
def test_what_is_dropped_is_said_where_it_is_wanted(capfd: Any) -> None:
    frame, clicked = log()

    small(max_epochs=1, verbose=True).fit(frame, clicked)

    assert "column 'country' is not a field: constant: text, 1 value" in capfd.readouterr().err


@pytest.mark.slow
def test_schema_decides_where_it_is_given() -> None:
    fields = Field(name="ad", kind="multi", separator="o"), Field(name="price", kind="numeric")
    schema = Schema(label="click", weight="hour", fields=fields)

    model = small(schema=schema).fit(X, y)

    assert model.artifact_.encoder.schema == schema
    assert model.n_features_in_ == 3
    with pytest.raises(ValueError, match="no column 'hour'"):
        small(schema=schema).fit(X.drop("hour"), y)


def test_missing_and_unseen_values_are_scored(fitted: CTRClassifier) -> None:
    rows = pd.DataFrame({"ad": [None, "hats"], "hour": [np.nan, 99.0], "price": [np.nan, 1e9]})

    assert np.isfinite(fitted.decision_function(rows)).all()


# What is learnt.


@pytest.mark.slow
def test_learns_and_is_calibrated() -> None:
    train, labels = clicks(3_000, seed=1)
    fresh, truth = clicks(3_000, seed=2)

    model = small(max_epochs=20, validation_fraction=0.3).fit(train, labels)

    probabilities = model.predict_proba(fresh)
    assert model.score(fresh, truth) > 0.75 > max(truth.mean(), 1 - truth.mean())
    assert probabilities[:, 1].mean() == pytest.approx(truth.mean(), abs=0.03)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    np.testing.assert_allclose(logit(probabilities[:, 1]), model.decision_function(fresh))


@pytest.mark.slow
def test_same_seed_same_model_and_another_another(fitted: CTRClassifier) -> None:
    again = clone(fitted).fit(X, y)
    other = small(random_state=np.random.RandomState(0)).fit(X, y)

    np.testing.assert_array_equal(again.decision_function(X), fitted.decision_function(X))
    assert not np.array_equal(other.decision_function(X), fitted.decision_function(X))


@pytest.mark.slow
def test_weight_zero_is_absence_and_weights_count() -> None:
    weights = np.where(np.arange(len(y)) % 3, 1.0, 0.0)
    present = weights > 0

    without = small().fit(X.filter(present), y[present], np.ones(present.sum()))
    zero = small().fit(X, y, weights)
    heavy = small().fit(X, y, np.where(y, 10.0, 1.0))

    np.testing.assert_array_equal(zero.decision_function(X), without.decision_function(X))
    assert heavy.predict_proba(X)[:, 1].mean() > without.predict_proba(X)[:, 1].mean() + 0.2


@pytest.mark.slow
def test_a_model_fitted_with_weights_can_be_fitted_without(tmp_path: Path) -> None:
    weights = np.where(y, 2.0, 1.0)
    small().fit(X, y, weights).save(tmp_path / "weighted")
    loaded = CTRClassifier.load(tmp_path / "weighted")

    plain, again = clone(loaded).fit(X, y), clone(loaded).fit(X, y, weights)

    assert plain.artifact_.encoder.schema.weight is None
    np.testing.assert_array_equal(plain.decision_function(X), small().fit(X, y).decision_function(X))
    np.testing.assert_array_equal(again.decision_function(X), loaded.decision_function(X))


@pytest.mark.slow
def test_held_out_rows_are_a_share_of_each_class() -> None:
    manifest = small(validation_fraction=0.25, max_epochs=1).fit(X, y).artifact_.manifest

    valid = manifest["metrics"]["valid"]
    assert valid["rows"] == round(0.25 * y.sum()) + round(0.25 * (1 - y).sum())
    assert valid["base_rate"] == pytest.approx(y.mean(), abs=0.01)
    assert manifest["data"]["rows"] == len(y) - valid["rows"]


@pytest.mark.slow
def test_validation_rows_may_be_given_with_weights() -> None:
    fresh, truth = clicks(100, seed=2)

    plain = small().fit(X, y, validation=(fresh, truth))
    weighted = small().fit(X, y, validation=(fresh, truth, np.where(truth, 10.0, 1.0)))

    assert plain.artifact_.manifest["metrics"]["valid"]["rows"] == 100
    assert weighted.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean() + 0.2


# The recipe.

STUDENT = {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4}


@pytest.mark.slow
def test_teachers_make_it_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Train two teachers and one student in real processes, save and load; nothing is left behind."""
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "work"))
    labels = np.where(y, "yes", "no")

    model = small(
        model_settings=STUDENT,
        teacher_settings=SMALL,
        teachers=np.int64(2),
        routes=4,
        max_epochs=1,
        l2=1e-3,
        random_state=2007,
    ).fit(X, labels)
    model.save(tmp_path / "artifact")
    loaded = CTRClassifier.load(tmp_path / "artifact")

    assert (model.artifact_.name, len(model.artifact_.routes)) == ("recap", 4)
    report = model.report_
    assert isinstance(report, FitReport)
    assert (len(report.teacher_runs), report.model.name, report.train.seed) == (2, "recap", 7)
    assert (report.train.schedule, report.train.ema_epochs) == ("constant", (4.0,))
    assert (report.train.l2, report.train.learning_rate) == (1e-3, 0.05)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(
        Scorer.load(tmp_path / "artifact").score_frame(X), model.predict_proba(X)[:, 1]
    )
    expected = {
        "model": "recap",
        "teachers": 2,
        "teacher_model": "fcn",
        "teacher_settings": SMALL,
        "routes": 4,
        "l2": 1e-3,
        "ema_epochs": [4.0],
        "schedule": "constant",
        "random_state": 7,
    }
    assert {name: loaded.get_params()[name] for name in expected} == expected
    assert list((tmp_path / "work").iterdir()) == []
    assert capfd.readouterr() == ("", "")


# The artifact is the command line's.


@pytest.mark.slow
def test_trains_what_a_run_trains_and_loads_its_artifact(tmp_path: Path) -> None:
    fresh, truth = clicks(100, seed=2)
    model = small(calibration="isotonic", negative_rate=0.5).fit(X, y, validation=(fresh, truth))
    schema = model.artifact_.encoder.schema
    tables = {"train": X.with_columns(label=y), "valid": fresh.with_columns(label=truth)}
    sources = {name: FrameSource(table) for name, table in tables.items()}
    data, _ = write_prepared_data(
        Preparation(schema, {**sources}, Split(kind="files")), tmp_path / "data", quiet=True
    )
    training = TrainConfig(learning_rate=0.05, batch_size=64, max_epochs=3, seed=1)
    settings = RunConfig("fcn", parse_model("fcn", SMALL), training, "isotonic", 0.5)
    run(settings, data, tmp_path / "run", quiet=True)

    loaded = CTRClassifier.load(tmp_path / "run")

    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert loaded.classes_.tolist() == [0, 1]
    assert loaded.feature_names_in_.tolist() == X.columns
    assert loaded.get_params() == model.get_params() | {
        **{name: training.model_dump(mode="json")[name] for name in TRAINING},
        "model": "fcn",
        "schema": schema,
        "model_settings": parse_model("fcn", SMALL).model_dump(),
    }


@pytest.mark.slow
def test_saved_artifact_scores_and_is_written_again_byte_for_byte(
    fitted: CTRClassifier, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    fitted.save(str(first))
    fitted.save(first)  # an artifact makes way for an artifact
    loaded = CTRClassifier.load(first)
    loaded.save(second)

    np.testing.assert_array_equal(Scorer.load(first).score_frame(X), fitted.predict_proba(X)[:, 1])
    np.testing.assert_array_equal(loaded.decision_function(X), fitted.decision_function(X))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert Path(WEIGHTS) in files
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()
    refitted = clone(loaded).fit(X, y)
    np.testing.assert_array_equal(refitted.decision_function(X), fitted.decision_function(X))


@pytest.mark.slow
def test_unnamed_columns_stay_unnamed_after_loading(tmp_path: Path) -> None:
    model = small(max_epochs=1).fit(X.to_numpy(), y)
    model.save(tmp_path / "artifact")

    loaded = CTRClassifier.load(tmp_path / "artifact")

    assert not hasattr(loaded, "feature_names_in_")
    np.testing.assert_array_equal(loaded.predict_proba(X.to_numpy()), model.predict_proba(X.to_numpy()))


def test_save_replaces_nothing_but_artifacts(fitted: CTRClassifier, tmp_path: Path) -> None:
    (tmp_path / "run" / "artifact").mkdir(parents=True)
    fitted.save(tmp_path / "run" / "artifact")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text('{"kind": "prepared data"}')
    (tmp_path / "file").touch()

    for name in (".", "run", "data", "file"):
        with pytest.raises(ValueError, match=r"no artifact"):
            fitted.save(tmp_path / name)
    assert (tmp_path / "run" / "artifact" / "manifest.json").is_file()
    with pytest.raises(ValueError, match="holds no artifact"):
        CTRClassifier.load(tmp_path / "data")


# Company.


@pytest.mark.slow
@pytest.mark.parametrize("table", [X, PANDAS, X.to_numpy()], ids=["polars", "pandas", "objects"])
def test_cross_validation(table: Any) -> None:
    scores = cross_val_score(small(max_epochs=2), table, y, cv=2, scoring="roc_auc")

    assert scores.mean() > 0.7


@pytest.mark.slow
def test_search_within_a_pipeline() -> None:
    piped = Pipeline([("drop", FunctionTransformer(lambda rows: rows.drop("hour"))), ("ctr", small())])
    search = GridSearchCV(piped, {"ctr__max_epochs": np.array([1, 2])}, cv=2, scoring="neg_log_loss")

    search.fit(X, y)

    assert search.best_params_["ctr__max_epochs"] in (1, 2)
    assert search.predict_proba(X).shape == (len(y), 2)
    assert search.best_estimator_["ctr"].feature_names_in_.tolist() == ["ad", "price"]


@pytest.mark.slow
def test_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    torch.set_num_threads(2)

    small(threads=1, max_epochs=1).fit(X, y)
    with pytest.raises(ValueError, match=r"row 8, field 'price': infinity"):
        small().fit(X.with_columns(price=pl.col("price").replace(X["price"][7], np.inf)), y)

    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert capfd.readouterr() == ("", "")
    small(max_epochs=1, verbose=True).fit(X, y)
    assert "epoch 1" in capfd.readouterr().err


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gpt"}, "no model 'gpt'"),
        ({"model_settings": {"dims": 4}}, "dims: unknown setting"),
        ({"schema": {"label": "click"}}, "not a recap_ctr.Schema"),
        ({"learning_rate": -1.0}, "CTRClassifier: learning_rate: .* greater than 0"),
        ({"random_state": -1}, "CTRClassifier: seed"),
        ({"calibration": "platt"}, "CTRClassifier: calibration"),
        ({"validation_fraction": 1.0}, "CTRClassifier: validation_fraction"),
        ({"negative_rate": 0.0}, "CTRClassifier: negative_rate"),
        ({"threads": 0}, "CTRClassifier: threads"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"l2": "weak"}, "CTRClassifier: l2"),
        ({"routes": 2}, "fcn has no routes"),
        ({"teachers": -1}, "CTRClassifier: teachers"),
        ({"teachers": 2, "budget": 0}, "CTRClassifier: budget"),
        ({"teachers": 2, "model": "recap", "model_settings": None, "routes": 0}, "CTRClassifier: routes"),
        ({"teachers": 2, "model_settings": {"depth": 0}}, "depth"),
        ({"teachers": 2, "model_settings": None, "teacher_model": "gpt"}, "no model 'gpt'"),
        ({"teachers": 2, "model_settings": None, "schedule": "wild"}, "CTRClassifier: schedule"),
    ],
    ids=str,
)
def test_bad_settings_are_named_in_fit(settings: dict[str, Any], message: str) -> None:
    model = small().set_params(**settings)

    with pytest.raises(ValueError, match=message):
        model.fit(X, y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small().fit(X, np.zeros(len(y))), "y holds 1 class, but two are needed"),
        (lambda: small().fit(X.head(0), []), "y holds no class"),
        (lambda: small().fit(X, np.arange(len(y)) == 3), "class True has one row only"),
        (lambda: small().fit(X, np.arange(len(y)) % 3), "target is multiclass"),
        (lambda: small().fit(X, y[1:]), "inconsistent numbers of samples"),
        (lambda: small().fit(X, y, -np.ones(len(y))), "it must be 0 or more"),
        (lambda: small().fit(X, y, validation=(X,)), "validation has 1 entries"),
        (lambda: small().fit(X, y, validation=(X, y + 1)), "validation has label 2"),
        (lambda: small().fit(X, y, validation=(X.drop("ad"), y)), "feature names should match"),
        (lambda: small().fit(X, y, validation=(X, y * 0)), "valid rows have label 0"),
        (lambda: small().fit(pd.concat([PANDAS] * 2, axis=1), y), "'ad'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_rows_are_value_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of many classes
        call()


@pytest.mark.parametrize("method", ["predict", "predict_proba", "decision_function", "save"])
def test_unfitted_says_so(method: str) -> None:
    with pytest.raises(NotFittedError):
        getattr(CTRClassifier(), method)(X)


@pytest.mark.slow
def test_the_raw_column_of_moments_is_taken(tmp_path: Path) -> None:
    """The hour decides the clicks, and only the timestamp shows it."""
    rng = np.random.default_rng(0)
    moments = 1_700_000_000 + 3_607 * np.arange(600)
    evening = moments // 3_600 % 24 >= 18
    labels = (rng.random(600) < np.where(evening, 0.9, 0.1)).astype(int)
    frame = pl.DataFrame({"ad": rng.choice(["a", "b"], 600), "ts": moments})
    model = small(max_epochs=10).fit(frame, labels)
    assert [field.name for field in model.schema_.fields] == ["ad", "ts_hour", "ts_weekday"]
    assert model.dropped_columns_ == {}
    scores = model.predict_proba(frame)[:, 1]
    assert scores[evening].mean() > 2 * scores[~evening].mean()
    model.save(tmp_path / "artifact")
    loaded = CTRClassifier.load(tmp_path / "artifact")
    np.testing.assert_array_equal(loaded.predict_proba(frame)[:, 1], scores)
    assert list(loaded.feature_names_in_) == ["ad", "ts"]
