from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.quality import field_quality
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.schema import Field, Schema


def test_quality_is_what_counting_gives(prepared: PreparedData) -> None:
    qualities = {quality.name: quality for quality in field_quality(prepared)}
    assert list(qualities) == [field.name for field in prepared.layout.fields]
    for field in prepared.layout.fields:
        quality = qualities[field.name]
        columns = slice(field.start, field.start + field.width)
        shares = {}
        for split in ("train", "test"):
            ids = np.asarray(getattr(prepared, split).ids[:, columns]).ravel()
            ids = ids[ids != field.offset]
            values, counts = np.unique(ids, return_counts=True)
            shares[split] = dict(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))
        drift = sum(
            abs(shares["train"].get(value, 0.0) - shares["test"].get(value, 0.0))
            for value in set(shares["train"]) | set(shares["test"])
        )
        assert quality.drift["test"] == pytest.approx(drift / 2)
        assert quality.oov["test"] == pytest.approx(shares["test"].get(field.offset + field.size - 1, 0.0))
        assert 0 <= quality.drift["valid"] <= 1


def test_padding_does_not_count(tmp_path: Path) -> None:
    rows = pl.DataFrame(
        {
            "click": [0, 1] * 3,
            "tags": ["a", "b", "a c", "d", "", ""],
            "of": ["train", "train", "valid", "valid", "test", "test"],
        }
    )
    schema = Schema(label="click", fields=(Field(name="tags", kind="multi", max_len=5),))
    split = Split(kind="column", column="of")
    data, _ = write_prepared_data(
        Preparation(schema, {"all": FrameSource(rows)}, split), tmp_path / "out", quiet=True
    )
    (quality,) = field_quality(data)
    assert quality.oov == {"train": 0.0, "valid": pytest.approx(2 / 3), "test": 0.0}
