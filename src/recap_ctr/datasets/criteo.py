"""Criteo's display advertising challenge by the protocol Criteo_x4: 13 bucketed counts, 26 categories."""

from collections.abc import Sequence
from pathlib import Path

from recap_ctr.data.source import FileSource, Source
from recap_ctr.datasets.protocol import FOLDS, Figures, Protocol, Published
from recap_ctr.schema import Field, Schema

COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("Label", *COUNTS, *CATEGORIES)
SIZES = (
    *(44, 99, 122, 41, 220, 112, 80, 69, 92, 6, 27, 37, 72),
    *(1446, 554, 157339, 117822, 306, 18, 11882, 630, 5, 39530, 5131, 156656, 3176),
    *(28, 11043, 148913, 12, 4560, 2003, 5, 154564, 18, 17, 53031, 82, 40955),
)
SCHEMA = Schema(
    label="Label",
    columns=COLUMNS,  # train.txt has no header line
    fields=(
        # The protocol fills a missing count with 0 and keeps the fill value out of the vocabulary.
        *(
            Field(name=name, kind="numeric", transform="log-square", missing=("0",), min_count=10)
            for name in COUNTS
        ),
        *(Field(name=name, kind="categorical", min_count=10) for name in CATEGORIES),
    ),
)


def sources(files: Sequence[Path]) -> dict[str, Source]:
    """Return the rows of train.txt."""
    return {"all": FileSource(files, COLUMNS)}


PROTOCOL = Protocol(
    name="criteo-x4",
    title="Criteo (x4)",
    files=("train.txt",),
    homepage="https://www.kaggle.com/c/criteo-display-ad-challenge",
    licence="Kaggle competition rules",
    schema=SCHEMA,
    figures=Figures(
        rows=(36_672_493, 4_584_062, 4_584_062),
        positives=(9_396_350, 1_174_544, 1_174_544),
        sizes=dict(zip(COLUMNS[1:], SIZES, strict=True)),
    ),
    sources=sources,
    split=FOLDS,
    published=Published(
        page="https://huggingface.co/datasets/reczoo/Criteo_x4",
        columns=COLUMNS,
        md5=(
            "4a53bb7cbc0e4ee25f9d6a73ed824b1a",
            "fba5428b22895016e790e2dec623cb56",
            "cfc37da0d75c4d2d8778e76997df2976",
        ),
    ),
)
