"""Frappe_x1 and MovielensLatest_x1, which share a layout, on generated libsvm files."""

import gzip
from pathlib import Path

import pytest

from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.datasets import frappe, movielens_latest
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts

COLUMNS = {
    "frappe-x1": frappe.COLUMNS,
    "frappe-x1-min2": frappe.COLUMNS,
    "movielens-latest-x1": movielens_latest.COLUMNS,
}


def prepared(name: str, raw: Path) -> PreparedData:
    return write_prepared_data(
        find_protocol(name).preparation(raw, check=False), raw / f"out-{name}", quiet=True
    )[0]


def test_columns() -> None:
    assert ",".join(frappe.COLUMNS) == (
        "label,user,item,daytime,weekday,isweekend,homework,cost,weather,country,city"
    )
    assert ",".join(movielens_latest.COLUMNS) == "label,user_id,item_id,tag_id"


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_fields_and_tokens(name: str, tmp_path: Path) -> None:
    columns = COLUMNS[name]
    written = layouts.libsvm(tmp_path, len(columns) - 1)
    data = prepared(name, tmp_path)
    assert ["label", *(field.name for field in data.layout.fields)] == list(columns)
    lines = [line for split in SPLITS for line in written[split]]
    assert [len(data.train), len(data.valid), len(data.test)] == [80, 20, 20]
    for i, field in enumerate(columns[1:], start=1):
        values = layouts.kept([line[i] for line in lines], range(80), 2 if name.endswith("min2") else 1)
        assert data.layout.fields[i - 1].size == len(set(values[:80]) - {layouts.OOV}) + 2
        for shard in (data.train, data.valid, data.test):
            assert layouts.decoded(data, shard)[field] == [values[row] for row in shard.rows]
    assert data.test.labels.tolist() == [int(line[0]) for line in written["test"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_published_files_give_the_same_rows(name: str, tmp_path: Path) -> None:
    written = layouts.libsvm(tmp_path, len(COLUMNS[name]) - 1)
    (tmp_path / "ready").mkdir()
    for split in SPLITS:
        layouts.write(tmp_path / "ready" / f"{split}.csv", [COLUMNS[name], *written[split]], ",")
    ready = prepared(name, tmp_path / "ready")
    assert ready.fingerprint == prepared(name, tmp_path).fingerprint


@pytest.mark.slow
def test_packed_files(tmp_path: Path) -> None:
    layouts.libsvm(tmp_path, 10)
    plain = prepared("frappe-x1", tmp_path)
    (tmp_path / "gz").mkdir()
    for split in SPLITS:
        packed = gzip.compress((tmp_path / f"{split}.libsvm").read_bytes())
        (tmp_path / "gz" / f"{split}.libsvm.gz").write_bytes(packed)
    assert prepared("frappe-x1", tmp_path / "gz").fingerprint == plain.fingerprint
    (tmp_path / "gz" / "test.libsvm.gz").write_bytes(packed[:-20])
    with pytest.raises(InputError, match=r"test.libsvm.gz can't be read: Compressed file ended"):
        prepared("frappe-x1-min2", tmp_path / "gz")


def test_bad_files(tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(InputError) as error:
            prepared("frappe-x1", tmp_path)
        assert message in str(error.value)

    fails("lacks train.libsvm, valid.libsvm, test.libsvm of Frappe (x1)")
    layouts.libsvm(tmp_path, 10)
    lines = (tmp_path / "valid.libsvm").read_text().splitlines()
    for bad, message in (
        (lines[4].replace(":1 ", ":2 ", 1), "valid.libsvm: row 5, field 'user': "),
        (lines[4].replace(":1 ", " ", 2), "valid.libsvm: row 5, field 'user': "),
        (lines[4].rpartition(" ")[0], "valid.libsvm: row 5 has 10 fields, expected 11"),
        (f"-{lines[4]}", "valid.libsvm: row 5: the label 'label' is '-"),
    ):
        (tmp_path / "valid.libsvm").write_text("\n".join([*lines[:4], bad, *lines[5:]]) + "\n")
        fails(message)
