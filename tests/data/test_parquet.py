"""What a Parquet file unpacks to is known before it is unpacked."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.parquet import unpacked_size


@pytest.mark.parametrize("rows", [0, 1, 1000, 300_000])
def test_the_pages_of_our_own_files(rows: int, tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"value": pl.Series(np.arange(rows)).cast(pl.String), "count": np.ones(rows, np.int64)}
    )
    frame.write_parquet(tmp_path / "v", statistics=False)
    unpacked = unpacked_size(tmp_path / "v")
    assert unpacked.values == 2 * rows
    assert unpacked.bytes >= 5 * rows


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path: Path) -> None:
    pl.DataFrame({"value": ["a" * 1000] * 100_000}).write_parquet(tmp_path / "v", use_pyarrow=False)
    assert unpacked_size(tmp_path / "v").values == 100_000
    words = pl.Series([f"{number:04d}" * 250_000 for number in range(8)])
    pl.DataFrame({"value": words}).write_parquet(tmp_path / "w", statistics=False)
    assert (tmp_path / "w").stat().st_size < 100_000
    assert unpacked_size(tmp_path / "w").bytes > 8_000_000


@pytest.mark.slow
def test_damage_is_a_value_error(tmp_path: Path) -> None:
    frame = pl.DataFrame({"value": [str(number) for number in range(50)], "count": range(50)})
    frame.write_parquet(tmp_path / "v", statistics=False)
    whole = (tmp_path / "v").read_bytes()
    rng = np.random.default_rng(0)
    for at, mask in zip(rng.integers(0, len(whole), 400), rng.integers(1, 256, 400), strict=True):
        (tmp_path / "v").write_bytes(whole[:at] + bytes([whole[at] ^ int(mask)]) + whole[at + 1 :])
        try:
            unpacked_size(tmp_path / "v")
        except ValueError:
            continue
    for raw in (b"", b"PAR1", b"PAR1" + b"\xff" * 30 + b"PAR1", whole[:-9] + whole[-8:]):
        (tmp_path / "v").write_bytes(raw)
        with pytest.raises(ValueError):
            unpacked_size(tmp_path / "v")
