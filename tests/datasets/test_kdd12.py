"""KDD12_x10 on generated files."""

import gzip
import math
from pathlib import Path

import pytest

from recap_ctr.data import csv as csv_module
from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.split import Split
from recap_ctr.datasets import kdd12
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts


def prepared(raw: Path) -> PreparedData:
    return write_prepared_data(find_protocol("kdd12").preparation(raw, check=False), raw / "out", quiet=True)[
        0
    ]


def bucket(number: int) -> str:
    return str(math.floor(math.log(number) ** 2) if number > 2 else number)


@pytest.mark.slow
def test_fields_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_module, "BLOCK_BYTES", 2_000)  # users are joined block by block
    lines, profiles = layouts.kdd12(tmp_path)
    data = prepared(tmp_path)
    rows = [dict(zip(kdd12.COLUMNS, line, strict=True)) for line in lines if line[-1] in profiles]
    assert 0 < len(rows) < len(lines)
    assert Split().sizes(len(rows)) == (len(data.train), len(data.valid), len(data.test))
    names = [field.name for field in data.layout.fields]
    assert names == [
        "Depth",
        "Position",
        "Impression",
        "DisplayURL",
        "AdID",
        "AdvertiserID",
        "QueryID",
        "KeywordID",
        "TitleID",
        "DescriptionID",
        "UserID",
        "Gender",
        "Age",
    ]
    train = data.train.rows.tolist()
    for shard in (data.train, data.valid, data.test):
        assert shard.labels.tolist() == [int(rows[row]["Click"] > 0) for row in shard.rows]
    for name in names:
        if name in kdd12.BUCKETED:
            read = [bucket(row[name]) for row in rows]
        elif name in ("Gender", "Age"):
            read = [str(profiles[row["UserID"]][name == "Age"]) for row in rows]
        else:
            read = [str(row[name]) for row in rows]
        values = layouts.kept(list(read), train, 10)
        for shard in (data.train, data.valid, data.test):
            assert layouts.decoded(data, shard)[name] == [values[row] for row in shard.rows]
    sizes = {field.name: field.size for field in data.layout.fields}
    assert (sizes["Depth"], sizes["Position"], sizes["Gender"], sizes["Age"]) == (4, 4, 5, 9)
    assert "0" in data.encoder.fields[names.index("Gender")].values  # an ordinary value here


def test_the_label_is_whether_there_were_clicks(tmp_path: Path) -> None:
    lines, profiles = layouts.kdd12(tmp_path)
    clicks = [line[0] for line in lines if line[-1] in profiles]
    assert max(clicks) > 1
    data = prepared(tmp_path)
    positives = sum(split["positives"] for split in data.manifest["splits"].values())
    assert positives == sum(click > 0 for click in clicks)


def test_bad_files(tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(InputError) as error:
            prepared(tmp_path)
        assert message in str(error.value)

    fails(
        "lacks training.txt, userid_profile.txt of KDD Cup 2012, track 2\n  fix: get the raw files from https://"
    )
    lines, profiles = layouts.kdd12(tmp_path)
    lines_of_profiles = [(user, *rest) for user, rest in profiles.items()]
    for at, value, message in (
        (0, "many", "training.txt: row 41, column 'Click': 'many' is not a whole number"),
        (5, "deep", "training.txt: row 41, column 'Depth': 'deep' is not a whole number"),
        (11, "", "training.txt: row 41, column 'UserID': None is not a whole number"),
    ):
        bad: list[list[object]] = [list(line) for line in lines]
        bad[40][at] = value
        layouts.write(tmp_path / "training.txt", bad, "\t")
        fails(message)
    layouts.write(tmp_path / "training.txt", [lines[0], lines[1][1:]], "\t")
    fails("training.txt: row 2 has 11 fields, expected 12")
    layouts.write(tmp_path / "training.txt", lines, "\t")
    layouts.write(tmp_path / "userid_profile.txt", [*lines_of_profiles, lines_of_profiles[3]], "\t")
    fails(f"user {lines_of_profiles[3][0]} has two profiles")
    layouts.write(tmp_path / "userid_profile.txt", [*lines_of_profiles, (99, 1, 1000)], "\t")
    fails("a number is too large, or below 0")
    layouts.write(tmp_path / "userid_profile.txt", [*lines_of_profiles, (99, 1)], "\t")
    fails(f"userid_profile.txt: row {len(lines_of_profiles) + 1} has 2 fields, expected 3")
    (tmp_path / "userid_profile.txt").unlink()
    layouts.write(tmp_path / "rest", lines_of_profiles, "\t")
    packed = gzip.compress((tmp_path / "rest").read_bytes())
    (tmp_path / "userid_profile.txt.gz").write_bytes(packed[:-9])
    fails("userid_profile.txt.gz can't be read: Compressed file ended")
    (tmp_path / "userid_profile.txt.gz").write_bytes(packed)
    prepared(tmp_path)


def test_a_changed_profile_is_another_source(tmp_path: Path) -> None:
    _, profiles = layouts.kdd12(tmp_path)
    data = prepared(tmp_path)
    files = [file["name"] for file in data.manifest["inputs"]["sources"]["all"]]
    assert files == ["training.txt", "userid_profile.txt"]
    layouts.write(tmp_path / "userid_profile.txt", [(user, 1, 1) for user in profiles], "\t")
    with pytest.raises(InputError, match=r"prepared from other inputs \(changed: sources\)"):
        prepared(tmp_path)
