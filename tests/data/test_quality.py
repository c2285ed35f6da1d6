import numpy as np
import pytest

from recap_ctr.data.quality import field_quality
from recap_ctr.data.shards import PreparedData


def test_quality_is_what_counting_gives(prepared: PreparedData) -> None:
    found = {one["name"]: one for one in field_quality(prepared)}
    assert list(found) == [field.name for field in prepared.layout.fields]
    for field in prepared.layout.fields:
        one = found[field.name]
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
        assert one["drift"]["test"] == pytest.approx(drift / 2)
        unknown = np.asarray(prepared.test.ids[:, columns]) == field.offset + field.size - 1
        assert one["oov"]["test"] == pytest.approx(unknown.mean())
        assert 0 <= one["drift"]["valid"] <= 1
