"""MovieLens tags by the protocol MovielensLatest_x1: whether a user gave a film a tag."""

from recap_ctr.datasets import libsvm
from recap_ctr.datasets.protocol import Figures, Protocol, Published
from recap_ctr.schema import Field, Schema

SIZES = {"user_id": 16977, "item_id": 23606, "tag_id": 49659}
COLUMNS = ("label", *SIZES)

PROTOCOL = Protocol(
    name="movielens-latest-x1",
    title="MovieLens tags (x1)",
    files=libsvm.FILES,
    homepage=libsvm.HOMEPAGE,
    licence="research use, no redistribution (GroupLens)",
    schema=Schema(label="label", fields=tuple(Field(name=name, kind="categorical") for name in SIZES)),
    figures=Figures(
        rows=(1_404_801, 401_372, 200_686),
        positives=(467_878, 134_225, 66_850),
        sizes=SIZES,
    ),
    sources=libsvm.sources(COLUMNS),
    published=Published(
        page="https://huggingface.co/datasets/reczoo/MovielensLatest_x1",
        columns=COLUMNS,
        md5=(
            "efc8bceeaa0e895d566470fc99f3f271",
            "e1930223a5026e910ed5a48687de8af1",
            "54e8c6baff2e059fe067fb9b69e692d0",
        ),
    ),
)
