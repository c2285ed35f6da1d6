"""Raw rows to scores: the same row scores the same in any file format and in any batch."""

import dataclasses
import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from recap_ctr.bench.synthetic import synthetic_schema
from recap_ctr.config import TrainConfig
from recap_ctr.data import csv as csv_module
from recap_ctr.data import source as source_module
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import Block, FileSource, FrameSource, Source
from recap_ctr.data.split import Split
from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference import engine as engine_module
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.scorer import Scorer, Tally, evaluate_rows, score
from recap_ctr.inference.torch_backend import PackedModel, load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import RunReport
from recap_ctr.training.run import run

RATE = 0.25  # The share of negatives that the sampled log has kept.
WRITE: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    ".csv": lambda frame, path: frame.write_csv(path),
    ".tsv": lambda frame, path: frame.write_csv(path, separator="\t"),
    ".csv.gz": lambda frame, path: path.write_bytes(gzip.compress(frame.write_csv().encode())),
    ".csv.zst": lambda frame, path: path.write_bytes(
        zstandard.ZstdCompressor().compress(frame.write_csv().encode())
    ),
    ".parquet": lambda frame, path: frame.write_parquet(path),
    ".arrow": lambda frame, path: frame.write_ipc(path),
}


@pytest.fixture(scope="module")
def artifact(packed: Path) -> PackedModel:
    torch.set_num_threads(1)
    return load_artifact(packed)


@pytest.fixture(scope="module")
def rows(click_log: pl.DataFrame) -> pl.DataFrame:
    """Return rows with unseen and missing values, and with a column that is not a field."""
    return (
        click_log.head(200)
        .with_columns(
            pl.when(pl.col("row") % 17 == 0).then(pl.lit("new, site")).otherwise("site").alias("site"),
            pl.when(pl.col("row") % 13 == 0).then(None).otherwise("ad").alias("ad"),
            pl.when(pl.col("row") % 11 == 0).then(None).otherwise("user").alias("user"),
        )
        .with_columns(pl.lit('a "note"').alias("note"))
    )


def logits(artifact: PackedModel, frame: pl.DataFrame) -> np.ndarray[Any, Any]:
    return Scorer(Engine.of(artifact)).logits(Block(frame, 1, "rows"))


def run_score(artifact: PackedModel, source: Source, out: Path) -> tuple[pl.DataFrame, Tally]:
    with open_sink(out) as sink:
        tally = score(Scorer(Engine.of(artifact)), source, sink, quiet=True)
    return pl.read_parquet(out), tally


def as_text(frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows as a text file gives them back; the empty string stays, because it is quoted there."""
    return frame.with_columns(pl.all().cast(pl.String))


class TestFormats:
    @pytest.mark.parametrize("suffix", WRITE)
    def test_every_format_scores_alike(
        self, artifact: PackedModel, rows: pl.DataFrame, suffix: str, tmp_path: Path
    ) -> None:
        WRITE[suffix](rows, path := tmp_path / f"rows{suffix}")

        scored, tally = run_score(artifact, FileSource([path]), tmp_path / "out.parquet")

        assert scored.columns == [*rows.columns, "score", "logit"]
        kept = scored.select(rows.columns)
        assert kept.equals(rows if suffix in (".parquet", ".arrow") else as_text(rows))
        assert scored["logit"].to_list() == logits(artifact, rows).tolist()
        assert scored["score"].to_list() == sigmoid(scored["logit"].to_numpy()).tolist()
        counts = {
            name: len(rows.filter(pl.col("row") % step == 0)) for name, step in (("ad", 13), ("user", 11))
        }
        assert {name: tally.missing[name] for name in counts} == counts
        assert tally.rows == 200
        assert tally.unseen["site"] == len(rows.filter(pl.col("row") % 17 == 0))
        assert tally.unseen["price"] == tally.unseen["tags"] == 0

    @pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow"])
    def test_standard_input(
        self,
        artifact: PackedModel,
        rows: pl.DataFrame,
        kind: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        WRITE[f".{kind}"](rows, tmp_path / "rows")
        piped = SimpleNamespace(buffer=io.BytesIO((tmp_path / "rows").read_bytes()))
        monkeypatch.setattr(sys, "stdin", piped)

        scored, _ = run_score(artifact, FileSource(["-"]), tmp_path / "out.parquet")

        assert scored["logit"].to_list() == logits(artifact, rows).tolist()

    def test_several_files_are_scored_in_order(
        self, artifact: PackedModel, rows: pl.DataFrame, tmp_path: Path
    ) -> None:
        rows.head(150).write_csv(tmp_path / "1.csv")
        rows.tail(50).select(reversed(rows.columns)).write_csv(tmp_path / "2.csv")

        scored, _ = run_score(artifact, FileSource([tmp_path / "*.csv"]), tmp_path / "out.parquet")

        assert scored["row"].to_list() == [str(row) for row in range(200)]
        assert scored["logit"].to_numpy() == pytest.approx(logits(artifact, rows), abs=1e-6)

    @pytest.mark.slow
    def test_files_larger_than_a_block(
        self, artifact: PackedModel, rows: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = logits(artifact, rows)
        monkeypatch.setattr(csv_module, "BLOCK_BYTES", 300)
        monkeypatch.setattr(source_module, "BLOCK_ROWS", 7)
        monkeypatch.setattr(engine_module, "EVAL_ROWS", 5)
        for suffix in (".csv", ".csv.gz", ".parquet"):
            WRITE[suffix](rows, path := tmp_path / f"rows{suffix}")
            assert sum(1 for _ in FileSource([path]).blocks()) > 20

            scored, tally = run_score(artifact, FileSource([path]), tmp_path / "out.parquet")

            assert scored["row"].cast(pl.Int64).to_list() == rows["row"].to_list()
            assert scored["logit"].to_numpy() == pytest.approx(whole, abs=1e-6)
            assert tally.rows == 200


class TestValues:
    """The score of a row does not depend on how its columns are stored."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda frame: frame.select(reversed(frame.columns)),
            lambda frame: frame.drop("row", "click", "note"),
            lambda frame: frame.with_columns(extra=pl.lit(None), other=pl.lit([1])),
            lambda frame: frame.with_columns(pl.col("user", "price", "tags").cast(pl.String)),
            lambda frame: frame.with_columns(pl.col("user").cast(pl.UInt64)),
            lambda frame: frame.with_columns(pl.col("site", "ad").cast(pl.Categorical)),
            lambda frame: frame.with_columns(pl.col("tags").str.split(" ")),
            lambda frame: frame.with_columns(pl.col("ad", "tags").fill_null("")),
            lambda frame: frame.with_columns(pl.col("price").fill_null(float("nan"))),
        ],
        ids=[
            "reordered",
            "without extras",
            "more extras",
            "text",
            "unsigned",
            "categories",
            "lists",
            "empty",
            "nan",
        ],
    )
    def test_storage_does_not_matter(
        self, artifact: PackedModel, rows: pl.DataFrame, change: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> None:
        assert logits(artifact, change(rows)).tolist() == logits(artifact, rows).tolist()

    def test_unseen_and_missing_score_alike(self, artifact: PackedModel, rows: pl.DataFrame) -> None:
        for field, unseen in (("site", "nobody knows"), ("ad", "-"), ("user", 7)):
            as_unseen, as_missing = (
                logits(artifact, rows.with_columns(pl.lit(value, rows.schema[field]).alias(field)))
                for value in (unseen, None)
            )
            assert as_unseen.tolist() == as_missing.tolist()
            assert as_unseen.tolist() != logits(artifact, rows).tolist()

    def test_all_values_unseen_or_missing(self, artifact: PackedModel) -> None:
        empty = dict.fromkeys(["site", "ad", "user", "price", "tags"], "")
        odd = {"site": "🦆", "ad": "\x00", "user": "-1", "price": "-1e300", "tags": "z z z z z z"}
        scorer = Scorer(Engine.of(artifact))

        scores = scorer.score_frame(pl.DataFrame([empty, odd]))

        assert ((scores >= 0) & (scores <= 1)).all()  # NaN would fail this.
        assert scorer.tally.missing == dict.fromkeys(empty, 1)
        assert scorer.tally.unseen == {"site": 1, "ad": 1, "user": 1, "price": 0, "tags": 3}

    def test_no_rows_no_scores(self, artifact: PackedModel, rows: pl.DataFrame) -> None:
        assert Scorer(Engine.of(artifact)).score_frame(rows.head(0)).tolist() == []


@pytest.mark.slow
@settings(deadline=None, max_examples=40, derandomize=True)
@given(chosen=st.lists(st.integers(0, 199), min_size=1, max_size=64))
def test_a_row_scores_the_same_in_any_batch(
    chosen: list[int], artifact: PackedModel, rows: pl.DataFrame
) -> None:
    in_this_batch = Scorer(Engine.of(artifact)).score_frame(rows[chosen])
    assert in_this_batch == pytest.approx(Scorer(Engine.of(artifact)).score_frame(rows)[chosen], abs=1e-6)


class TestMap:
    def test_fields_from_other_columns(self, artifact: PackedModel, rows: pl.DataFrame) -> None:
        renamed = rows.rename({"ad": "advert", "price": "cost"})
        scorer = Scorer(Engine.of(artifact), {"ad": "advert", "price": "cost"})
        assert scorer.score_frame(renamed).tolist() == Scorer(Engine.of(artifact)).score_frame(rows).tolist()

    def test_a_mapped_column_wins_over_one_of_the_field_s_name(
        self, artifact: PackedModel, rows: pl.DataFrame
    ) -> None:
        both = rows.with_columns(pl.col("ad").alias("advert"), pl.lit("wrong").alias("ad"))
        scorer = Scorer(Engine.of(artifact), {"ad": "advert"})
        assert scorer.score_frame(both).tolist() == Scorer(Engine.of(artifact)).score_frame(rows).tolist()

    def test_two_fields_can_be_swapped_or_share_a_column(
        self, artifact: PackedModel, rows: pl.DataFrame
    ) -> None:
        swapped = rows.rename({"ad": "site", "site": "ad"})
        scorer = Scorer(Engine.of(artifact), {"ad": "site", "site": "ad"})
        assert scorer.score_frame(swapped).tolist() == Scorer(Engine.of(artifact)).score_frame(rows).tolist()

        shared = Scorer(Engine.of(artifact), {"ad": "site"}).score_frame(rows)
        by_hand = Scorer(Engine.of(artifact)).score_frame(rows.with_columns(pl.col("site").alias("ad")))
        assert shared.tolist() == by_hand.tolist()

    def test_the_output_keeps_the_names_of_the_input(
        self, artifact: PackedModel, rows: pl.DataFrame, tmp_path: Path
    ) -> None:
        renamed = rows.rename({"ad": "advert"})
        with open_sink(tmp_path / "out.parquet") as sink:
            score(Scorer(Engine.of(artifact), {"ad": "advert"}), FrameSource(renamed), sink, quiet=True)
        assert pl.read_parquet(tmp_path / "out.parquet").columns == [*renamed.columns, "score", "logit"]

    def test_only_a_column_without_a_role_is_suggested(
        self, artifact: PackedModel, rows: pl.DataFrame
    ) -> None:
        scorer = Scorer(Engine.of(artifact), {"site": "place"})
        without_ad = rows.rename({"ad": "advert", "site": "place"}).select(
            "click", "row", "place", "advert", "user"
        )
        with pytest.raises(InputError, match=r"no column 'ad' \(field 2 of 5") as error:
            scorer.score_frame(without_ad)
        assert "unused: 'advert'\n  fix: rename the column, or pass --map ad=advert" in str(error.value)
        with pytest.raises(
            InputError, match=r"unused: none\n  fix: rename the column, or pass --map ad=COLUMN"
        ):
            scorer.score_frame(without_ad.drop("advert"))

    def test_wrong_names_are_refused(self, artifact: PackedModel, rows: pl.DataFrame) -> None:
        with pytest.raises(InputError, match="no field 'adverts'"):
            Scorer(Engine.of(artifact), {"adverts": "ad"})
        with pytest.raises(InputError, match="no column 'nowhere'"):
            Scorer(Engine.of(artifact), {"ad": "nowhere"}).score_frame(rows)


class TestRefused:
    @pytest.mark.parametrize("name", ["score", "logit"])
    def test_a_column_with_the_name_of_an_output(
        self, artifact: PackedModel, rows: pl.DataFrame, name: str, tmp_path: Path
    ) -> None:
        source = FrameSource(rows.with_columns(pl.lit(1).alias(name)))
        with pytest.raises(InputError, match=f"column '{name}' already"):
            run_score(artifact, source, tmp_path / "out.parquet")
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_column(self, artifact: PackedModel, rows: pl.DataFrame) -> None:
        with pytest.raises(InputError, match=r"no column 'ad'.*\n.*present: 'row'"):
            logits(artifact, rows.drop("ad"))

    @pytest.mark.parametrize("value", ["inf", "-Infinity", "ten"])
    def test_a_value_that_is_not_a_number(
        self, artifact: PackedModel, rows: pl.DataFrame, value: str
    ) -> None:
        bad = as_text(rows).with_columns(
            pl.when(pl.col("row") == "41").then(pl.lit(value)).otherwise("price").alias("price")
        )
        with pytest.raises(InputError, match="row 42, field 'price'"):
            logits(artifact, bad)

    def test_a_logit_that_is_not_a_number(self, packed: Path, rows: pl.DataFrame) -> None:
        """Finite weights may overflow, but a score is never NaN."""
        broken = load_artifact(packed)
        with torch.no_grad():
            for weight in broken.model.parameters():
                weight.fill_(1e38)
        with pytest.raises(InputError, match="row 1: the model's logit is"):
            logits(broken, rows)


@pytest.fixture(scope="module")
def fresh(click_log: pl.DataFrame) -> pl.DataFrame:
    return click_log.tail(1_000)


class TestEvaluate:
    def test_figures_are_those_of_scikit_learn(self, artifact: PackedModel, fresh: pl.DataFrame) -> None:
        result = evaluate_rows(Scorer(Engine.of(artifact)), FrameSource(fresh), quiet=True)

        label = fresh["click"].to_numpy()
        calibrated = Scorer(Engine.of(artifact)).score_frame(fresh)
        raw = sigmoid(Scorer(Engine.of(artifact)).raw_logits(Block(fresh, 1, "rows")))
        for figures, scores in ((result.raw, raw), (result.calibrated, calibrated)):
            assert figures.auc == pytest.approx(roc_auc_score(label, scores), abs=1e-12)
            assert figures.logloss == pytest.approx(log_loss(label, scores), abs=1e-9)
            assert figures.mean_prediction == pytest.approx(scores.mean(), abs=1e-12)
        rate = label.mean()
        assert result.base_rate == pytest.approx(rate)
        assert result.base_rate_logloss == pytest.approx(log_loss(label, np.full(1_000, rate)))
        entropy = result.calibrated.logloss / result.base_rate_logloss
        assert result.calibrated.normalised_entropy == pytest.approx(entropy)
        bins = np.array_split(np.argsort(calibrated), 20)
        error = sum(abs(calibrated[part].mean() - label[part].mean()) * len(part) for part in bins) / 1_000
        # Our bins keep ties together, numpy's cut through them.
        assert result.calibrated.calibration_error == pytest.approx(error, abs=0.01)
        assert result.reliability is not None
        assert sum(part.rows for part in result.reliability) == result.rows == 1_000
        assert result.values.rows == 1_000

    def test_result_as_json(self, artifact: PackedModel, fresh: pl.DataFrame) -> None:
        result = evaluate_rows(Scorer(Engine.of(artifact)), FrameSource(fresh), quiet=True).to_json()

        assert list(result) == [
            *("rows", "base_rate", "base_rate_logloss", "raw", "calibrated"),
            *("reliability", "reliability_raw", "values", "unlabelled"),
        ]
        assert result["raw"].keys() == {
            *("auc", "auc_error", "logloss", "normalised_entropy", "calibration_error", "mean_prediction"),
        }
        assert result["values"].keys() == {"rows", "missing", "unseen"}

    def test_groups_and_weights(self, artifact: PackedModel, fresh: pl.DataFrame) -> None:
        schema = artifact.encoder.schema.model_copy(update={"group": "site", "weight": "times"})
        encoder = type(artifact.encoder)(schema, artifact.encoder.fields)
        with_roles = dataclasses.replace(artifact, encoder=encoder)
        weighted = fresh.with_columns((pl.col("row") % 3).alias("times"))
        repeated = weighted.select(pl.all().repeat_by("times")).explode(weighted.columns).drop("times")

        by_weight = evaluate_rows(Scorer(Engine.of(with_roles)), FrameSource(weighted), quiet=True)

        by_copies = evaluate_rows(Scorer(Engine.of(with_roles)), FrameSource(repeated), quiet=True)
        for figures, expected in (
            (by_weight.raw, by_copies.raw),
            (by_weight.calibrated, by_copies.calibrated),
        ):
            for figure in ("auc", "logloss", "mean_prediction"):
                assert getattr(figures, figure) == pytest.approx(getattr(expected, figure), abs=1e-9)
            parts = [
                (roc_auc_score(part["click"], Scorer(Engine.of(artifact)).score_frame(part)), part.height)
                for part in repeated.partition_by("site")
                if part["click"].n_unique() == 2
            ]
            mean = np.average([auc for auc, _ in parts], weights=[height for _, height in parts])
            assert figures.group_auc is not None
            assert figures.group_auc.auc == pytest.approx(mean, abs=1e-9)
        one_group = evaluate_rows(
            Scorer(Engine.of(with_roles)), FrameSource(fresh.drop("site").with_columns(site=1)), quiet=True
        )
        assert one_group.raw.group_auc is not None and one_group.raw.group_auc.num_groups == 1

    def test_groups_of_one_class_only_have_no_auc(self, artifact: PackedModel, fresh: pl.DataFrame) -> None:
        schema = artifact.encoder.schema.model_copy(update={"group": "row"})
        encoder = type(artifact.encoder)(schema, artifact.encoder.fields)
        scorer = Scorer(Engine.of(dataclasses.replace(artifact, encoder=encoder)))
        assert evaluate_rows(scorer, FrameSource(fresh), quiet=True).raw.group_auc is None

    def test_a_role_must_be_in_all_files_or_none(
        self, artifact: PackedModel, fresh: pl.DataFrame, tmp_path: Path
    ) -> None:
        schema = artifact.encoder.schema.model_copy(update={"weight": "times"})
        encoder = type(artifact.encoder)(schema, artifact.encoder.fields)
        scorer = Scorer(Engine.of(dataclasses.replace(artifact, encoder=encoder)))
        fresh.with_columns(times=1).write_csv(tmp_path / "1.csv")
        fresh.write_csv(tmp_path / "2.csv")
        with pytest.raises(InputError, match=r"2.csv has no column 'times'"):
            evaluate_rows(scorer, FileSource([tmp_path / "*.csv"]), quiet=True)
        zero = FrameSource(fresh.with_columns(times=0))
        with pytest.raises(InputError, match="every row has weight 0"):
            evaluate_rows(scorer, zero, quiet=True)

    def test_one_class_only(self, artifact: PackedModel, fresh: pl.DataFrame) -> None:
        with pytest.raises(InputError, match="label 0: one class only"):
            evaluate_rows(
                Scorer(Engine.of(artifact)), FrameSource(fresh.filter(pl.col("click") == 0)), quiet=True
            )

    @pytest.mark.parametrize(("label", "message"), [(None, "is missing"), (2, "is '2', neither 0 nor 1")])
    def test_bad_labels(
        self, artifact: PackedModel, fresh: pl.DataFrame, label: int | None, message: str
    ) -> None:
        bad = fresh.with_columns(
            pl.when(pl.col("row") == 2_009).then(label).otherwise("click").alias("click")
        )
        with pytest.raises(InputError, match=f"row 10: the label 'click' {message}"):
            evaluate_rows(Scorer(Engine.of(artifact)), FrameSource(bad), quiet=True)


@pytest.fixture(scope="module")
def full() -> pl.DataFrame:
    config = SyntheticConfig(rows=24_000, num_fields=3, max_values=20, base_rate=0.1)
    return SyntheticData(config).frame().drop("bayes_logit")


@pytest.fixture(scope="module")
def sampled(full: pl.DataFrame) -> pl.DataFrame:
    kept = np.random.default_rng(99).random(full.height) < RATE
    return full.filter((pl.col("click") == 1) | pl.Series(kept))


@pytest.fixture(scope="module")
def data(sampled: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    rows: dict[str, Source] = {
        "train": FrameSource(sampled.head(3_000)),
        "valid": FrameSource(sampled.slice(3_000)),
    }
    preparation = Preparation(synthetic_schema(3), rows, Split(kind="files"))
    return write_prepared_data(preparation, tmp_path_factory.mktemp("sampled") / "data", quiet=True)[0]


class TestSampledNegatives:
    """A log that kept a quarter of its negatives, compared with the log it was sampled from."""

    def train(self, data: PreparedData, out: Path, **options: Any) -> RunReport:
        config = RunConfig(
            model="lr",
            model_config=parse_model("lr", {}),
            train=TrainConfig(batch_size=256, learning_rate=0.02, update="fast", max_epochs=4),
            train_baseline=False,
            report_fields=False,
            **options,
        )
        return run(config, data, out, quiet=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("calibration", ["affine", "isotonic"])
    def test_predictions_are_those_of_the_unsampled_log(
        self, full: pl.DataFrame, sampled: pl.DataFrame, data: PreparedData, calibration: str, tmp_path: Path
    ) -> None:
        report = self.train(data, tmp_path / "run", negative_rate=RATE, calibration=calibration)
        artifact = load_artifact(tmp_path / "run")

        assert artifact.shift == pytest.approx(np.log(RATE))
        # On validation rows, weighted as in the unsampled log, the calibration makes it exact.
        valid = report.metrics.valid
        label = data.valid.labels
        rate = label.sum() / (label.sum() + (label == 0).sum() / RATE)
        assert valid.base_rate == pytest.approx(rate)
        assert valid.calibrated.mean_prediction == pytest.approx(rate, abs=2e-4)
        # On all rows of the unsampled log, a rate of 0.1 from about 1,400 sampled clicks has an error of 0.003.
        whole = evaluate_rows(Scorer(Engine.of(artifact)), FrameSource(full), quiet=True)
        assert whole.calibrated.mean_prediction == pytest.approx(whole.base_rate, abs=0.01)
        assert whole.raw.mean_prediction == pytest.approx(whole.base_rate, abs=0.02)
        # The sampled rows, corrected, give the same figures.
        part = evaluate_rows(
            Scorer(Engine.of(artifact)), FrameSource(sampled), negative_rate=RATE, quiet=True
        )
        assert part.base_rate == pytest.approx(whole.base_rate, abs=0.004)
        assert part.calibrated.logloss == pytest.approx(whole.calibrated.logloss, abs=0.01)
        assert part.calibrated.auc == pytest.approx(whole.calibrated.auc, abs=0.01)

    @pytest.mark.slow
    def test_without_correction_predictions_are_too_high(
        self, full: pl.DataFrame, data: PreparedData, tmp_path: Path
    ) -> None:
        self.train(data, tmp_path / "run")
        result = evaluate_rows(Scorer.load(tmp_path / "run"), FrameSource(full), quiet=True)
        assert result.calibrated.mean_prediction is not None and result.base_rate is not None
        assert result.calibrated.mean_prediction > 2 * result.base_rate

    @pytest.mark.slow
    def test_weights_are_those_of_scikit_learn(
        self, sampled: pl.DataFrame, data: PreparedData, tmp_path: Path
    ) -> None:
        self.train(data, tmp_path / "run", negative_rate=RATE)
        scorer = Scorer.load(tmp_path / "run")
        result = evaluate_rows(scorer, FrameSource(sampled), negative_rate=RATE, quiet=True)
        label, scores = sampled["click"].to_numpy(), scorer.score_frame(sampled)
        weights = np.where(label == 1, 1.0, 1 / RATE)
        assert result.calibrated.logloss == pytest.approx(log_loss(label, scores, sample_weight=weights))
        assert result.calibrated.auc == pytest.approx(roc_auc_score(label, scores, sample_weight=weights))
        assert result.calibrated.mean_prediction == pytest.approx(np.average(scores, weights=weights))


def test_calibration_is_applied_after_the_shift(artifact: PackedModel, rows: pl.DataFrame) -> None:
    changed = dataclasses.replace(artifact, calibration=AffineCalibration(2.0, 0.5), shift=-1.0)
    plain = dataclasses.replace(artifact, calibration=AffineCalibration(1.0, 0.0), shift=0.0)
    assert logits(changed, rows) == pytest.approx(2.0 * (logits(plain, rows) - 1.0) + 0.5)
