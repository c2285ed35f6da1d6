"""The planted model keeps its promises: same rows, known optimum, three real orders."""

import hashlib
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from recap_ctr.data.synthetic import BLOCK_ROWS, ORDER_SHARES, Bayes, SyntheticConfig, SyntheticData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import auc, logloss, reliability_table, sigmoid

CONFIG = SyntheticConfig(rows=150_000)


@pytest.fixture(scope="module")
def data() -> SyntheticData:
    return SyntheticData(CONFIG)


@pytest.fixture(scope="module")
def frame(data: SyntheticData) -> pl.DataFrame:
    return data.frame()


@pytest.fixture(scope="module")
def bayes(data: SyntheticData) -> Bayes:
    return data.bayes()


@pytest.mark.slow
def test_columns(frame: pl.DataFrame) -> None:
    assert frame.schema == {
        "row": pl.Int64,
        "click": pl.Int8,
        **{f"f{field}": pl.String for field in range(1, 8)},
        "bayes_logit": pl.Float64,
    }
    assert frame["row"].to_list() == list(range(CONFIG.rows))
    assert sorted(frame["click"].unique()) == [0, 1]
    assert sorted(frame["f1"].unique()) == ["f1_1", "f1_2", "f1_3", "f1_4", "f1_5"]
    assert frame.null_count().sum_horizontal().item() == 0


@pytest.mark.slow
def test_same_config_same_rows(frame: pl.DataFrame) -> None:
    assert SyntheticData(CONFIG).frame().equals(frame)
    assert not SyntheticData(replace(CONFIG, seed=2, rows=1_000)).frame().equals(frame.head(1_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "digest"),
    [
        (SyntheticConfig(rows=2_000), "89a7c9b3594e940e607d5596fc05fafdb88ed8851c2ccdd51ee7cbbd5dac2035"),
        (
            SyntheticConfig(rows=500, num_fields=4, seed=7),
            "96f34fc98cedba2824da70b31d551f176821ac6d217c08c2d61edb714f6d777d",
        ),
    ],
)
def test_rows_of_older_versions_are_drawn_again(config: SyntheticConfig, digest: str) -> None:
    text = SyntheticData(config).frame().drop("bayes_logit").write_csv()
    assert hashlib.sha256(text.encode()).hexdigest() == digest


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [2, 1_000, BLOCK_ROWS, BLOCK_ROWS + 1])
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(frame: pl.DataFrame, num_rows: int) -> None:
    assert SyntheticData(replace(CONFIG, rows=num_rows)).frame().equals(frame.head(num_rows))


@pytest.mark.slow
def test_blocks_are_bounded_and_differ(data: SyntheticData) -> None:
    blocks = list(data.blocks())
    assert [block.height for block in blocks] == [BLOCK_ROWS, BLOCK_ROWS, CONFIG.rows - 2 * BLOCK_ROWS]
    assert not blocks[0].drop("row").equals(blocks[1].drop("row"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_fields", "seed"), [(3, 0), (3, 1), (4, 2), (5, 3), (7, 4), (7, 5), (24, 6)])
def test_bayes_auc_and_order_shares_hold_for_every_seed(num_fields: int, seed: int) -> None:
    optimum = SyntheticData(SyntheticConfig(rows=BLOCK_ROWS, num_fields=num_fields, seed=seed)).bayes()
    assert 0.78 < optimum.auc < 0.82
    assert optimum.base_rate == pytest.approx(0.2, abs=0.01)
    assert min(optimum.order_shares) > 0.10
    assert optimum.order_shares == pytest.approx(ORDER_SHARES, abs=0.02)
    assert sum(optimum.order_shares) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SyntheticConfig(num_fields=3, max_values=5, rank=1),
        SyntheticConfig(base_rate=0.01, zipf_exponent=0.0),
        SyntheticConfig(base_rate=0.9, zipf_exponent=2.0, rank=8, max_values=20_000),
    ],
)
def test_other_settings_reach_their_targets_too(config: SyntheticConfig) -> None:
    optimum = SyntheticData(config).bayes()
    assert 0.78 < optimum.auc < 0.82
    assert optimum.base_rate == pytest.approx(config.base_rate, rel=0.05)
    assert min(optimum.order_shares) > 0.10


def test_clicks_follow_the_bayes_probabilities(frame: pl.DataFrame) -> None:
    """z-tests of click counts, over all rows and in 20 bins of prediction; the seed is fixed."""
    labels, probabilities = frame["click"].to_numpy(), sigmoid(frame["bayes_logit"].to_numpy())
    z = (labels - probabilities).sum() / np.sqrt((probabilities * (1 - probabilities)).sum())
    assert abs(z) < 3
    for part in reliability_table(labels, probabilities):
        deviation = np.sqrt(part.mean_prediction * (1 - part.mean_prediction) / part.rows)
        assert abs(part.mean_label - part.mean_prediction) < 4 * deviation


def test_bayes_figures_are_expectations(frame: pl.DataFrame, bayes: Bayes) -> None:
    labels, logits = frame["click"].to_numpy(), frame["bayes_logit"].to_numpy()
    p = sigmoid(logits)
    assert bayes.logloss == pytest.approx(float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean()), abs=1e-12)
    assert bayes.base_rate == pytest.approx(p.mean(), abs=1e-12)
    rate = bayes.base_rate
    assert bayes.base_logloss == pytest.approx(
        -rate * np.log(rate) - (1 - rate) * np.log(1 - rate), abs=1e-12
    )
    # What the labels realise: the variance of a row's loss is E[p (1 - p) logit^2].
    deviation = np.sqrt((p * (1 - p) * logits**2).mean() / CONFIG.rows)
    assert logloss(labels, logits) == pytest.approx(bayes.logloss, abs=4 * deviation)
    # Hanley and McNeil's standard error of an AUC of 0.8 on 30,000 clicks is 0.0016.
    assert auc(labels, logits) == pytest.approx(bayes.auc, abs=4 * 0.0016)


def test_expected_auc_counts_every_pair_of_different_rows() -> None:
    data = SyntheticData(SyntheticConfig(rows=300, num_fields=3, max_values=5))  # 125 cells: many ties
    logits = data.frame()["bayes_logit"].to_numpy()
    p = sigmoid(logits)
    pairs_NN = p[:, None] * (1 - p)
    np.fill_diagonal(pairs_NN, 0.0)
    won_NN = (logits[:, None] > logits) + 0.5 * (logits[:, None] == logits)
    assert data.bayes().auc == pytest.approx(float((pairs_NN * won_NN).sum() / pairs_NN.sum()), abs=1e-12)


def explained(
    codes_FN: list[NDArray[np.int64]], sets: list[list[int]], target_N: NDArray[np.float64]
) -> float:
    """Share of the target's variance that least squares on one-hot cells of these field sets explains."""
    cells = [np.ravel_multi_index([codes_FN[f] for f in fields], [6] * len(fields)) for fields in sets]
    design_NC = np.concatenate([np.eye(cell_N.max() + 1)[cell_N] for cell_N in cells], axis=1)
    fitted_N = design_NC @ np.linalg.lstsq(design_NC.T @ design_NC, design_NC.T @ target_N)[0]
    return float(1 - (target_N - fitted_N).var() / target_N.var())


@pytest.mark.slow
def test_interactions_are_of_their_order() -> None:
    """Additive models see half of the variance, models of all pairs 80 %, and only whole triples see all."""
    frame = SyntheticData(SyntheticConfig(rows=20_000, num_fields=3, max_values=6)).frame()
    codes_FN = [frame[f].str.slice(3).cast(pl.Int64).to_numpy() - 1 for f in ("f1", "f2", "f3")]
    target_N = frame["bayes_logit"].to_numpy()
    # Shares on 20,000 rows move by about 0.007; 108 cells explain 108 / 20,000 of what is left by chance.
    assert explained(codes_FN, [[0], [1], [2]], target_N) == pytest.approx(0.5, abs=0.03)
    assert explained(codes_FN, [[0, 1], [1, 2], [0, 2]], target_N) == pytest.approx(0.8, abs=0.03)
    assert explained(codes_FN, [[0, 1, 2]], target_N) == pytest.approx(1.0, abs=1e-9)


def test_values_are_zipf_distributed_and_seen_often_enough_to_be_learnt(frame: pl.DataFrame) -> None:
    often = 1.0
    for field, size in enumerate(CONFIG.num_values, start=1):
        mass_V = np.arange(1, size + 1) ** -CONFIG.zipf_exponent
        mass_V /= mass_V.sum()
        head = float((frame[f"f{field}"] == f"f{field}_1").mean())  # type: ignore[arg-type]
        assert head == pytest.approx(mass_V[0], abs=4 * 0.5 / np.sqrt(CONFIG.rows))
        often *= mass_V[mass_V * 1_000_000 >= 50].sum()
    assert often > 0.99  # share of rows whose every value is expected 50 times or more in a million rows


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rows", 1),
        ("num_fields", 2),
        ("max_values", 4),
        ("zipf_exponent", -0.1),
        ("zipf_exponent", 9.0),
        ("base_rate", 0.0),
        ("base_rate", 1.0),
        ("rank", 0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_impossible_settings_are_named(setting: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{setting} is {value}"):
        replace(CONFIG, **{setting: value})  # type: ignore[arg-type]
