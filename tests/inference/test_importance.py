"""Permutation importance: a planted field matters, a field that says nothing does not."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import recap_ctr
from recap_ctr.config import TrainConfig
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FrameSource
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import auc, logloss
from recap_ctr.inference.scorer import Scorer
from recap_ctr.models.catalogue import parse_model
from recap_ctr.schema import Field, Schema
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.run import run

FIELDS = (
    Field(name="planted", kind="categorical"),
    Field(name="number", kind="numeric"),
    Field(name="noise", kind="categorical"),
    Field(name="tags", kind="multi", max_len=2),
)


def draw(rows: int, seed: int) -> pl.DataFrame:
    """Return rows whose clicks depend on `planted` and, less, on `number`; `noise` and `tags` say nothing."""
    rng = np.random.default_rng(seed)
    planted, number = rng.integers(0, 6, rows), rng.normal(size=rows)
    logits = -1.0 + 0.8 * (planted - 2.5) + 0.4 * number
    return pl.DataFrame(
        {
            "click": (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(int),
            "planted": [f"p{value}" for value in planted],
            "number": number,
            "noise": [f"n{value}" for value in rng.integers(0, 20, rows)],
            "tags": [f"t{a} t{b}" for a, b in rng.integers(0, 5, (rows, 2))],
            "weight": rng.integers(0, 3, rows),
        }
    )


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    out = tmp_path_factory.mktemp("planted")
    schema = Schema(label="click", weight="weight", fields=FIELDS)
    data = write_prepared_data(
        Preparation(schema, {"all": FrameSource(draw(4_000, 0))}), out / "data", quiet=True
    )[0]
    config = RunConfig(
        model="fm",
        model_config=parse_model("fm", {"dim": 4}),
        train=TrainConfig(batch_size=256, learning_rate=1e-2, max_epochs=4),
        train_baseline=False,
        report_fields=False,
    )
    run(config, data, out / "run", quiet=True)
    return Scorer.load(out / "run" / ARTIFACT, threads=1)


@pytest.fixture(scope="module")
def fresh() -> pl.DataFrame:
    return draw(3_000, 1)


@pytest.mark.slow
def test_planted_fields_matter_and_noise_does_not(scorer: Scorer, fresh: pl.DataFrame) -> None:
    importance = recap_ctr.explain(scorer, fresh, repeats=5)
    assert [field.field for field in importance.fields][:2] == ["planted", "number"]
    by_name = {field.field: field for field in importance.fields}
    for name in ("planted", "number"):
        assert by_name[name].auc_drop.low > 0 and by_name[name].logloss_rise.low > 0
    for name in ("noise", "tags"):
        change = by_name[name].auc_drop
        assert change.low < 0 < change.high and not change.is_clear
    assert by_name["planted"].auc_drop.value > 0.1
    assert importance.repeats == 5 and importance.rows == len(fresh.filter(pl.col("weight") > 0))


@pytest.mark.slow
def test_figures_are_those_of_shuffled_raw_rows(scorer: Scorer, fresh: pl.DataFrame) -> None:
    """Shuffle raw columns, score them again, and compare: both are means over many shuffles of the same rows."""
    rows = fresh.filter(pl.col("weight") > 0)
    importance = recap_ctr.explain(scorer, rows, repeats=20)
    labels, weights = rows["click"].to_numpy(), rows["weight"].to_numpy()

    def figures(frame: pl.DataFrame) -> tuple[float, float]:
        logits = recap_ctr.predict(scorer, frame)["logit"].to_numpy()
        return auc(labels, logits, weights), logloss(labels, logits, weights)

    whole = figures(rows)
    assert (importance.auc, importance.logloss) == pytest.approx(whole)
    shuffled = [
        figures(rows.with_columns(rows["planted"].sample(fraction=1.0, shuffle=True, seed=seed)))
        for seed in range(20)
    ]
    mean_auc, mean_loss = np.mean(shuffled, axis=0)
    planted = importance.fields[0]
    assert planted.auc_drop.value == pytest.approx(whole[0] - mean_auc, abs=0.01)
    assert planted.logloss_rise.value == pytest.approx(mean_loss - whole[1], rel=0.1)


def test_seed_decides_the_sample_and_the_shuffles(scorer: Scorer, fresh: pl.DataFrame) -> None:
    first, again, other = (
        recap_ctr.explain(scorer, fresh, max_rows=500, repeats=2, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again and first.rows == 500
    assert first.auc != other.auc, "another seed draws other rows"


def test_a_file_in_pieces_is_sampled_as_a_whole(scorer: Scorer, fresh: pl.DataFrame, tmp_path: Path) -> None:
    """All clicks are in the first file: a sample of both must have about the share of clicks of all rows."""
    ordered = fresh.sort("click", descending=True)
    for number in range(3):
        ordered.slice(1_000 * number, 1_000).write_parquet(tmp_path / f"{number}.parquet")
    importance = recap_ctr.explain(scorer, tmp_path / "*.parquet", max_rows=1_000, repeats=1)
    assert importance.rows == 1_000 and 0.6 < importance.auc < 0.9


def test_rows_without_both_labels_are_refused(scorer: Scorer, fresh: pl.DataFrame) -> None:
    with pytest.raises(InputError, match="two rows of each label"):
        recap_ctr.explain(scorer, fresh.filter(pl.col("click") == 0))
    with pytest.raises(InputError, match="at least 2 rows and 1 repeat"):
        recap_ctr.explain(scorer, fresh, repeats=0)
