"""The commands update, apply and backtest, and synthetic logs that drift: what they print and refuse."""

from pathlib import Path

import polars as pl
import pytest

from tests.conftest import Recap, in_process


def test_what_is_no_artifact_is_refused(recap: Recap, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click,ad\n0,a\n1,b\n")
    done = recap("update", tmp_path, tmp_path / "rows.csv", "--out", tmp_path / "new")
    assert done.code == 2 and "holds no artifact" in done.err
    done = recap("apply", tmp_path, tmp_path, "--out", tmp_path / "new")
    assert done.code == 2 and "holds no artifact" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--every", "fortnight"), "--every fortnight: not a period"),
        (("--every", "1d"), "--time COLUMN"),
    ],
)
def test_a_replay_needs_periods_and_times(
    recap: Recap, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    log = tmp_path / "log.csv"
    pl.DataFrame({"click": [0, 1] * 30, "ad": ["a", "b", "c"] * 20}).write_csv(log)
    done = recap("backtest", log, "--label", "click", "--out", tmp_path / "replay", *options)
    assert done.code == 2 and words in done.err


@pytest.mark.slow
def test_a_log_is_replayed(recap: Recap, tmp_path: Path) -> None:
    """The command needs no more than a log: its fits run where those of `recap fit` do."""
    log = tmp_path / "log.parquet"
    settings = (
        "teachers=0",
        "train.max_epochs=1",
        "train.batch_size=256",
        "model_settings.dim=4",
        "routes=2",
    )
    options = ("--rows", "600", "--fields", "3", "--days", "3", "--out", log, "--quiet")
    assert recap("synthetic", *options).code == 0
    replay = ("--label", "click", "--time", "ts", "--out", tmp_path / "replay", "--max-unknown", "0.9")
    with in_process():
        done = recap("backtest", log, *replay, *(f"--set={text}" for text in settings), "--quiet")
    assert done.code == 0, done.err
    assert done.out.startswith("mean of all periods") and "Updating has" in done.out
    assert (tmp_path / "replay" / "report.html").is_file()


def test_a_log_that_drifts_is_drawn(recap: Recap, tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"
    options = ("--rows", "600", "--fields", "3", "--out", log, "--quiet")
    assert recap("synthetic", "--days", "3", "--drift", "0.5", *options).code == 0
    frame = pl.read_parquet(log)
    assert frame.columns == ["row", "ts", "click", "f1", "f2", "f3"]
    assert (frame["ts"] // 86_400).n_unique() == 3
    refused = recap("synthetic", "--drift", "0.5", *options)
    assert refused.code == 2 and "add --days 14" in refused.err
    refused = recap("synthetic", "--order", "1", "--days", "3", "--rows", "600", "--out", log, "--force")
    assert refused.code == 2 and "--days does not go with --order 1" in refused.err
