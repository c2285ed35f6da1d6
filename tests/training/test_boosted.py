"""Boosted trees on click rates: what they see, that they learn steps of numbers, and that no row sees its own click."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recap_ctr.axes.predict import predict, to_inputs
from recap_ctr.config import TrainConfig
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.rates import NEUTRAL, encode_rates
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block, FrameSource
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.inference.export import TOLERANCE, export_setting
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import PackedModel, TorchBackend
from recap_ctr.jobs import progress
from recap_ctr.models.boosted import MISSING, Boosted, BoostedConfig
from recap_ctr.models.rates import Rates, RatesConfig
from recap_ctr.nn.interface import Inputs
from recap_ctr.schema import Field, Schema
from recap_ctr.training import trees
from recap_ctr.training.beside import blended
from recap_ctr.training.boosted import MOST_RANKED, train_boosted, with_codes
from recap_ctr.training.loop import Trained
from recap_ctr.training.rates import count_rates, train_rates
from recap_ctr.training.report import PartGain
from tests.support.preparing import EVERY_KIND, every_kind, prepared

CPU = torch.device("cpu")
FIELDS = (
    Field(name="site", kind="categorical"),
    Field(name="price", kind="numeric", transform="quantiles"),
    Field(name="size", kind="numeric", transform="value"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Return rows whose clicks depend on a range of prices, on the site, and on whether a size is missing."""
    rng = np.random.default_rng(0)
    count = 6_000
    price, size = rng.lognormal(size=count).round(3), rng.normal(size=count)
    site, is_missing = rng.integers(0, 30, count), rng.random(count) < 0.2
    logits = -2 + 2.0 * ((price > 0.6) & (price < 1.5)) + 1.5 * (site % 3 == 0) + 1.0 * is_missing
    rows = pl.DataFrame(
        {
            "click": (rng.random(count) < metrics.sigmoid(logits)).astype(int),
            "site": [f"s{value}" for value in site],
            "price": price,
            "size": pl.Series(size).set(pl.Series(is_missing), None),
        }
    )
    preparation = Preparation(Schema(label="click", fields=FIELDS), {"all": FrameSource(rows)})
    return write_prepared_data(preparation, tmp_path_factory.mktemp("boosted") / "data", quiet=True)[0]


def train(data: PreparedData, deadline: float | None = None) -> Trained:
    return train_boosted(BoostedConfig(), data, CPU, threads=1, seed=1, deadline=deadline)


@pytest.fixture(scope="module")
def trained(data: PreparedData) -> Trained:
    return train(data)


def test_it_learns_ranges_sites_and_holes(data: PreparedData, trained: Trained) -> None:
    logits = predict(trained.model, data.valid, CPU)
    auc = metrics.auc(data.valid.labels, logits)
    assert auc > 0.7
    assert auc == pytest.approx(trained.history[0].valid_auc, abs=1e-4)
    assert metrics.logloss(data.valid.labels, logits) == pytest.approx(
        trained.history[0].valid_logloss, abs=1e-6
    )


def test_trees_see_rates_of_categories_the_order_of_buckets_and_numbers(
    data: PreparedData, trained: Trained
) -> None:
    model = trained.model
    assert isinstance(model, Boosted) and model.config.crosses == (("site",),)
    inputs = to_inputs(data.valid.batch(slice(0, 400)), CPU)
    columns = model.columns(inputs).numpy()
    place = data.layout.fields[0]
    labels, sites = np.asarray(data.train.labels), np.asarray(data.train.ids)[:, place.start]
    for row in range(0, 400, 41):
        same = sites == inputs.ids_BW[row, place.start].item()
        counts = np.array([float(labels[same].sum())]), np.array([float(same.sum())])
        assert columns[row, :2].tolist() == encode_rates(*counts, labels.mean())[0].tolist()
    buckets, sizes = columns[:, 2], columns[:, 3]
    assert len(np.unique(buckets)) > 10 and buckets.min() >= 0
    is_missing = sizes == MISSING
    assert 0.1 < is_missing.mean() < 0.3
    assert sizes[~is_missing].tolist() == inputs.values_BN[~is_missing, 0].tolist()


def test_trees_see_the_place_of_a_number_among_its_edges(tmp_path: Path) -> None:
    """The same for training and for scoring, by torch and in the exported graph; a missing number is told apart."""
    rng = np.random.default_rng(3)
    price = rng.lognormal(size=4_000)
    is_missing = rng.random(4_000) < 0.2
    logits = -2 + 3.0 * ((price > 0.9) & (price < 1.1)) + 1.0 * is_missing  # Less than a quantile of eight.
    rows = pl.DataFrame(
        {
            "click": (rng.random(4_000) < metrics.sigmoid(logits)).astype(int),
            "price": pl.Series(price).set(pl.Series(is_missing), None),
            "size": rng.normal(size=4_000),
            "site": [f"s{value}" for value in rng.integers(0, 9, 4_000)],
        }
    )
    fields = (
        Field(name="price", kind="numeric", transform="linear", num_buckets=8),
        Field(name="site", kind="categorical"),
        Field(name="size", kind="numeric", transform="value"),
    )
    preparation = Preparation(Schema(label="click", fields=fields), {"all": FrameSource(rows)})
    data = write_prepared_data(preparation, tmp_path / "data", quiet=True)[0]
    trained = train(data)
    model = trained.model
    assert isinstance(model, Boosted) and model.config.crosses == (("site",),)
    columns = model.columns(to_inputs(data.valid.batch(slice(None)), CPU)).numpy()[:, -2]
    raw = rows["price"].to_numpy()[data.valid.rows]
    edges = data.encoder.fields[0].edges
    expected = np.where(np.isnan(raw), MISSING, np.interp(raw, edges, np.arange(len(edges))))
    np.testing.assert_allclose(columns, expected, atol=1e-5)

    logits = predict(model, data.valid, CPU)
    assert metrics.auc(data.valid.labels, logits) > 0.6
    assert metrics.logloss(data.valid.labels, logits) == pytest.approx(
        trained.history[0].valid_logloss, abs=1e-6
    ), "LightGBM has the same logits"


def test_trees_see_the_order_of_categories_that_are_numbers(tmp_path: Path) -> None:
    """Ranks beside the rates; none for words, for ids, and for values that the training rows lack."""
    rng = np.random.default_rng(4)
    rows, values = 6_000, np.array([-2.5, 0, 1, 10, 30, 200, 1000])
    level = rng.integers(0, len(values), rows)
    frame = pl.DataFrame(
        {
            "click": (rng.random(rows) < metrics.sigmoid(level - 4.0)).astype(int),
            "level": [f"{values[at]:g}" for at in level],
            "word": [f"w{at}" for at in level],
            "visit": rng.integers(0, 10 * MOST_RANKED, rows).astype(str),
        }
    )
    fields = tuple(Field(name=name, kind="categorical") for name in ("level", "word", "visit"))
    preparation = Preparation(Schema(label="click", fields=fields), {"all": FrameSource(frame)})
    data = write_prepared_data(preparation, tmp_path / "data", quiet=True)[0]
    trained = train(data)
    model = trained.model
    assert isinstance(model, Boosted) and model.config.orders == ("level",)
    known = data.encoder.encode(Block(frame.drop("click").head(500), 1, ""))
    ranks = model.columns(Inputs(*map(torch.from_numpy, (known.ids_BW, known.values_BN)))).numpy()[:, -1]
    assert ranks.tolist() == (level[:500] + 1.0).tolist()
    later = Block(pl.DataFrame({"level": ["7", None], "word": ["w1"] * 2, "visit": ["1"] * 2}), 1, "")
    unseen = data.encoder.encode(later)
    ranks = model.columns(Inputs(*map(torch.from_numpy, (unseen.ids_BW, unseen.values_BN)))).numpy()[:, -1]
    assert ranks.tolist() == [MISSING] * 2
    logits = predict(model, data.valid, CPU)
    assert metrics.logloss(data.valid.labels, logits) == pytest.approx(
        trained.history[0].valid_logloss, abs=1e-6
    ), "LightGBM has the same logits"


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Return rows that are clicked if a user and a shop suit each other, which neither says alone."""
    rng = np.random.default_rng(0)
    user, shop = rng.integers(0, 40, 12_000), rng.integers(0, 40, 12_000)
    logits = np.where((user * 7 + shop * 3) % 5 < 2, 1.5, -1.5)
    rows = pl.DataFrame(
        {
            "click": (rng.random(len(user)) < metrics.sigmoid(logits)).astype(int),
            "user": [f"u{value}" for value in user],
            "shop": [f"s{value}" for value in shop],
        }
    )
    fields = tuple(Field(name=name, kind="categorical") for name in ("user", "shop"))
    preparation = Preparation(Schema(label="click", fields=fields), {"all": FrameSource(rows)})
    return write_prepared_data(preparation, tmp_path_factory.mktemp("paired") / "data", quiet=True)[0]


def test_trees_see_what_pairs_of_values_did_before(paired: PreparedData) -> None:
    trained = train(paired)
    model = trained.model
    assert isinstance(model, Boosted) and model.config.pairs == (("user", "shop"),)
    logits = predict(model, paired.test, CPU)
    assert metrics.auc(paired.test.labels, logits) > 0.75
    valid = predict(model, paired.valid, CPU)
    assert metrics.logloss(paired.valid.labels, valid) == pytest.approx(
        trained.history[0].valid_logloss, abs=1e-3
    ), "but for the few entries that found their bucket full"
    rows = with_codes(model.config, paired)
    assert metrics.auc(paired.train.labels, predict(model, rows, CPU)) < 0.9, "no row knows its own click"


def test_with_a_network_on_rates_trees_look_at_its_table(paired: PreparedData, tmp_path: Path) -> None:
    (tmp_path / "rates").mkdir()
    training = TrainConfig(batch_size=256, max_epochs=2, l2=0.0)
    rates = train_rates(
        RatesConfig(units=(8,), heads=3, loss="members-bce"),
        training,
        paired,
        tmp_path / "rates",
        device=CPU,
        quiet=True,
    ).model
    boosted = train(paired).model
    expected = 0.5 * predict(rates, paired.test, CPU) + 2.0 * predict(boosted, paired.test, CPU) - 1.0
    gain = PartGain(factors={"rates": 0.5, "trees": 2.0}, logloss=0.0, constant=-1.0)
    blend = blended(gain, [rates, boosted], paired.layout)
    ids = to_inputs(paired.test.batch(slice(None)), CPU).ids_BW
    assert isinstance(rates, Rates) and isinstance(boosted, Boosted)
    of_both = [codes.detach().float().numpy()[:, -2:] for codes in (rates.codes(ids), boosted.codes(ids))]
    same = (of_both[0] == of_both[1]).all(axis=1)  # Few pairs find their bucket full in one of the tables.
    assert same.mean() > 0.9
    np.testing.assert_allclose(predict(blend, paired.test, CPU)[same], expected[same], atol=1e-5)
    assert "rates.table.weight" in blend.state_dict()
    assert "boosted.table.weight" not in blend.state_dict(), "one table is enough"
    alone = blended(PartGain(factors={"trees": 2.0}, logloss=0.0, constant=0.0), [boosted], paired.layout)
    assert "boosted.table.weight" in alone.state_dict()
    np.testing.assert_allclose(
        predict(alone, paired.test, CPU), predict(boosted, paired.test, CPU), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_registry")
def test_trees_on_every_kind_of_field_can_be_exported(tmp_path: Path) -> None:
    data = prepared(every_kind(2_000), tmp_path / "data", EVERY_KIND)
    model = train(data).model
    assert isinstance(model, Boosted)
    manifest: dict[str, Any] = {"model": {"name": "boosted", "config": {}}}
    packed = PackedModel(
        tmp_path, data.encoder, AffineCalibration(1.0, 0.0), {}, 0.0, manifest, model.config, model.eval()
    )
    exported = export_setting(packed, TorchBackend(packed), Setting(1, None))
    assert exported.parity <= TOLERANCE


def test_training_rows_bring_codes_along_that_lack_their_own_click(
    data: PreparedData, trained: Trained
) -> None:
    model = trained.model
    assert isinstance(model, Boosted)
    rows = with_codes(model.config, data)
    assert rows.values.shape[1] == data.layout.num_values + 2
    labels = np.array(data.train.labels, np.uint8)
    labels[5] ^= 1
    rates = count_rates(data)
    flipped = type(rates)(replace(data.train, labels=labels), data.layout)
    flipped.rate = rates.rate
    assert flipped.training_codes([("site",)])[5].tolist() == rows.values[5, -2:].tolist()
    assert not np.array_equal(predict(model, rows, CPU), predict(model, data.train, CPU))


def test_codes_of_unseen_values_have_the_mean_odds(data: PreparedData, trained: Trained) -> None:
    model = trained.model
    assert isinstance(model, Boosted)
    place = data.layout.fields[0]
    batch = data.valid.batch(slice(0, 1))
    ids = np.array(batch.ids_BW)
    ids[0, place.start] = place.offset  # PAD: no row has it.
    unseen = Inputs(torch.from_numpy(ids), torch.from_numpy(batch.values_BN))
    coded = model.columns(unseen, torch.zeros(1, 2))
    assert model.columns(unseen).tolist() == coded.tolist() and coded[0, :2].tolist() == [NEUTRAL, 0]


def test_scaled_trees_have_scaled_logits(data: PreparedData) -> None:
    model = train(data, deadline=1.0).model
    assert isinstance(model, Boosted) and model.config.trees == 1, "the deadline was long ago"
    before = predict(model, data.valid, CPU)
    model.scale(0.25)
    np.testing.assert_allclose(predict(model, data.valid, CPU), 0.25 * before, rtol=1e-5)


def test_of_too_many_rows_a_sample_is_taken(data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap_ctr.training.boosted.MAX_CELLS", 5_000)
    assert train(data).history[0].valid_auc > 0.6


def test_each_round_is_shown(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    train(data, deadline=1.0)
    assert re.fullmatch(
        r"boosted trees: 4,800 rows, [\d,]+ rows/s, round 1, valid logloss 0\.\d{5}\n",
        capsys.readouterr().err,
    )


def test_a_deadline_that_cuts_it_is_on_record(data: PreparedData, trained: Trained) -> None:
    assert trained.finished and not train(data, deadline=1.0).finished


def test_without_lightgbm_the_error_says_what_to_install(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "is_installed", lambda: False)
    with pytest.raises(InputError, match="LightGBM"):
        train(data)


def test_rows_without_categories_have_trees_too(data: PreparedData, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = pl.DataFrame({"click": rng.integers(0, 2, 500), "size": rng.normal(size=500)})
    schema = Schema(label="click", fields=(Field(name="size", kind="numeric", transform="value"),))
    numbers, _ = write_prepared_data(
        Preparation(schema, {"all": FrameSource(rows)}), tmp_path / "data", quiet=True
    )
    model = train(numbers).model
    assert isinstance(model, Boosted) and model.config.crosses == ()
    assert with_codes(model.config, numbers) is numbers.train
    assert np.isfinite(predict(model, numbers.test, CPU)).all()
