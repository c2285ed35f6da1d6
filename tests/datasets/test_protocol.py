"""What all public data sets share: published figures that agree with each other, and checks that name what differs."""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recap_ctr.data import csv as csv_module
from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import FileSource, MappedSource, RowFunction
from recap_ctr.datasets import avazu, criteo, frappe
from recap_ctr.datasets.catalogue import DATASETS, find_protocol
from recap_ctr.datasets.protocol import Figures, Protocol, published_md5
from recap_ctr.errors import InputError
from tests.support import kkbox_files, layouts

DOCUMENT = Path(__file__).parents[2] / "docs" / "datasets.md"
MD5 = tuple[str, str, str]
TOTALS = {
    "criteo-x4": 910_747,
    "avazu-x4": 3_750_999,
    "kdd12": 4_668_096,
    "kkbox-x1": 91_756,
    "kkbox-x1-words": 92_258,
    "ml-1m": 9_751,
    "frappe-x1": 5_399,
    "frappe-x1-min2": 5_383,
    "movielens-latest-x1": 90_242,
}
ROWS = {
    "criteo-x4": 45_840_617,
    "avazu-x4": 40_428_967,
    "kdd12": 141_371_038,
    "kkbox-x1": 7_377_418,
    "kkbox-x1-words": 7_377_418,
    "ml-1m": 739_012,
    "frappe-x1": 288_609,
    "frappe-x1-min2": 288_609,
    "movielens-latest-x1": 2_006_859,
}


@pytest.mark.parametrize("name", DATASETS)
def test_published_figures_agree(name: str) -> None:
    public = find_protocol(name)
    figures = public.figures
    fields = [field.name for field in public.schema.fields]
    sizes = {**figures.sizes, **{field: size for field, (size, _) in figures.near.items()}}
    assert public.name == name
    assert public.describe()["rows"] == ROWS[name]
    if figures.total is None:
        assert sorted(sizes) == sorted(fields)
        assert sum(sizes.values()) == TOTALS[name]
    else:
        assert set(sizes) < set(fields)
        assert figures.total == TOTALS[name]
    if public.published is not None:
        missing = {*fields, public.schema.label} - {*public.published.columns}
        assert missing == ({"weekday", "weekend"} if name == "avazu-x4" else set())


@pytest.mark.parametrize("name", DATASETS)
def test_the_document_lists_it(name: str) -> None:
    about = find_protocol(name).describe()
    files = ", ".join(f"`{file}`" for file in about["files"])
    line = f"| `{name}` | {about['title']} | {about['rows']:,} | {about['fields']} | {files} | {about['licence']} | "
    assert f"{line}[page]({about['homepage']})" in DOCUMENT.read_text()


def write_published(raw: Path, table: pd.DataFrame, label: str) -> MD5:
    """As the authors of the splits did it: pandas, text as it is."""
    for split, rows in zip(SPLITS, ordered(table[label].astype(int).tolist()), strict=True):
        table.iloc[rows].to_csv(raw / f"{split}.csv", index=False)
    train, valid, test = (hashlib.md5((raw / f"{name}.csv").read_bytes()).hexdigest() for name in SPLITS)
    return train, valid, test


def ordered(labels: list[int]) -> list[list[int]]:
    """Rows of train, valid and test, the training folds one after the other."""
    folds = layouts.deal(labels)
    parts = [[row for row, other in enumerate(folds) if other == fold] for fold in range(10)]
    return [list(chain(*parts[2:])), parts[1], parts[0]]


def make_criteo(raw: Path) -> tuple[str, pd.DataFrame]:
    layouts.criteo(raw)
    table = pd.read_csv(raw / "train.txt", sep="\t", header=None, names=list(criteo.COLUMNS), dtype=object)
    return "criteo-x4", table


def make_avazu(raw: Path) -> tuple[str, pd.DataFrame]:
    layouts.avazu(raw)
    return "avazu-x4", pd.read_csv(raw / "train", dtype=object)


def make_kkbox(raw: Path) -> tuple[str, pd.DataFrame]:
    return "kkbox-x1", pd.DataFrame(kkbox_files.generate(raw))


def tiny(public: Protocol, data: PreparedData, md5: MD5 | None = None) -> Protocol:
    """The protocol with the figures of small data."""
    splits = data.manifest["splits"]
    rows, positives = (tuple(splits[name][key] for name in SPLITS) for key in ("rows", "positives"))
    sizes = {field.name: field.size for field in data.layout.fields}
    published = public.published
    if md5 is not None and published is not None:
        published = replace(published, md5=md5)
    return replace(public, figures=Figures(rows, sizes, positives=positives), published=published)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_criteo, make_avazu, make_kkbox])
def test_md5_is_that_of_the_published_files(
    make: Callable[[Path], tuple[str, pd.DataFrame]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, ready = tmp_path / "raw", tmp_path / "ready"
    raw.mkdir()
    ready.mkdir()
    name, table = make(raw)
    public = find_protocol(name)
    md5 = write_published(ready, table, public.schema.label)
    data, _ = write_prepared_data(public.preparation(raw, check=False), tmp_path / "out", quiet=True)
    tiny(public, data, md5).check(data, raw, quiet=True)
    monkeypatch.setattr(csv_module, "BLOCK_BYTES", 4_000)  # rows wait for their turn over many blocks
    tiny(public, data, md5).check(data, raw, quiet=True)
    tiny(public, data, md5).check(data, ready, quiet=True)
    for i, split in enumerate(SPLITS):
        train, valid, test = ("0" * 32 if i == j else digest for j, digest in enumerate(md5))
        with pytest.raises(InputError) as error:
            tiny(public, data, (train, valid, test)).check(data, raw, quiet=True)
        message = (
            f"{name}: MD5 of {split}.csv: found {md5[i]}, the published protocol has {'0' * 32}\n  fix: "
        )
        assert str(error.value).startswith(message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw", "ready"]


def test_md5_of_libsvm_files(tmp_path: Path) -> None:
    written = layouts.libsvm(tmp_path, 10)
    expected = []
    for split in SPLITS:
        table = pd.DataFrame(written[split], columns=list(frappe.COLUMNS))
        expected.append(hashlib.md5(table.to_csv(index=False).encode()).hexdigest())
    sources = frappe.PROTOCOL.sources(frappe.PROTOCOL.raw_files(tmp_path))
    assert published_md5(sources, frappe.COLUMNS, None, tmp_path, quiet=True) == tuple(expected)


@pytest.mark.slow
def test_what_differs_is_named(tmp_path: Path) -> None:
    layouts.avazu(tmp_path)
    data, _ = write_prepared_data(
        avazu.PROTOCOL.preparation(tmp_path, check=False), tmp_path / "out", quiet=True
    )
    right = replace(tiny(avazu.PROTOCOL, data), published=None)
    right.check(data, tmp_path)
    figures = right.figures
    sizes = dict(figures.sizes)
    assert isinstance(figures.positives, tuple)
    rows, positives = figures.rows, figures.positives
    for changed, message in (
        (
            {"rows": (1, 2, 3)},
            f"rows of train, valid and test: found {rows}, the published protocol has (1, 2, 3)",
        ),
        ({"positives": (1, 2, 3)}, f"positives of train, valid and test: found {positives}, the published"),
        ({"positives": 7}, f"positives: found {sum(positives)}, the published protocol has 7"),
        (
            {"sizes": sizes | {"C1": 1}},
            f"vocabulary size of C1: found {sizes['C1']}, the published protocol has 1",
        ),
        (
            {"near": {"C1": (sizes["C1"] + 4, 3)}},
            f"vocabulary size of C1: found {sizes['C1']}, the published protocol has {sizes['C1'] + 4} ± 3",
        ),
        (
            {"total": 5},
            f"sum of the vocabulary sizes: found {sum(sizes.values())}, the published protocol has 5",
        ),
    ):
        settings: dict[str, Any] = dict(changed)
        with pytest.raises(InputError) as error:
            replace(right, figures=replace(figures, **settings)).check(data, tmp_path)
        assert str(error.value).startswith(f"avazu-x4: {message}")
        assert str(error.value).endswith("pass --no-check if they are not meant to be the published ones")
    near = replace(
        figures, near={"C1": (sizes["C1"] + 3, 3)}, total=sum(sizes.values()), positives=sum(positives)
    )
    replace(right, figures=near).check(data, tmp_path)


@pytest.mark.slow
def test_sums_are_not_taken_of_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.criteo(tmp_path)
    data, _ = write_prepared_data(criteo.PROTOCOL.preparation(tmp_path), tmp_path / "out", quiet=True)
    monkeypatch.setattr(FileSource, "blocks", lambda self: pytest.fail("read again"))
    with pytest.raises(InputError, match="criteo-x4: rows of train, valid and test: found"):
        criteo.PROTOCOL.check(data, tmp_path)


@pytest.mark.slow
def test_only_what_was_checked_bears_the_name(tmp_path: Path) -> None:
    layouts.avazu(tmp_path)
    preparation = avazu.PROTOCOL.preparation(tmp_path, check=False)
    data, _ = write_prepared_data(preparation, tmp_path / "out", quiet=True)
    right = replace(tiny(avazu.PROTOCOL, data), published=None)
    wrong = replace(right, figures=replace(right.figures, total=5))
    fingerprint = data.fingerprint
    assert data.name == "avazu-x4-unchecked"
    for public, name in ((right, "avazu-x4"), (wrong, "avazu-x4-unchecked"), (right, "avazu-x4")):
        again, done = write_prepared_data(preparation, tmp_path / "out", quiet=True)
        assert done
        with nullcontext() if public is right else pytest.raises(InputError):
            public.check(again, tmp_path)
        reopened = PreparedData(tmp_path / "out")
        assert (again.name, reopened.name, reopened.fingerprint) == (name, name, fingerprint)


def test_a_published_file_without_a_column_of_it(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click\n1\n")
    with pytest.raises(InputError, match="no column 'id' \\(of the published files\\)"):
        published_md5(
            {"train": FileSource([tmp_path / "rows.csv"])}, ("id", "click"), None, tmp_path, quiet=True
        )


def test_a_mapped_source_answers_for_all_its_files(tmp_path: Path) -> None:
    for name in ("rows.csv", "beside.csv"):
        (tmp_path / name).write_text("x\n1\n")
    started = []

    def start() -> RowFunction:
        started.append(1)
        return lambda block: block.frame.select(y=block.frame["x"] + "!")

    source = MappedSource(FileSource([tmp_path / "rows.csv"]), start, [tmp_path / "beside.csv"])
    assert [file.name for file in source.files()] == ["rows.csv", "beside.csv"]
    assert len(source.stamps()) == 2
    assert not started  # what lies beside is read when reading begins
    assert [block.frame.to_dict(as_series=False) for block, _ in source.blocks()] == [{"y": ["1!"]}]
    assert [block.first_row for block, _ in source.blocks()] == [1]
