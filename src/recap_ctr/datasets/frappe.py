"""Frappe by the protocol Frappe_x1: which app was used in which context."""

from dataclasses import replace

from recap_ctr.datasets import libsvm
from recap_ctr.datasets.protocol import Figures, Protocol, Published
from recap_ctr.schema import Field, Schema

SIZES = {
    "user": 956,
    "item": 4084,
    "daytime": 9,
    "weekday": 9,
    "isweekend": 4,
    "homework": 5,
    "cost": 4,
    "weather": 11,
    "country": 82,
    "city": 235,
}
COLUMNS = ("label", *SIZES)


def schema(min_count: int) -> Schema:
    """Return the schema, with values kept from `min_count` training rows on."""
    fields = (Field(name=name, kind="categorical", min_count=min_count) for name in SIZES)
    return Schema(label="label", fields=tuple(fields))


PROTOCOL = Protocol(
    name="frappe-x1",
    title="Frappe (x1)",
    files=libsvm.FILES,
    homepage=libsvm.HOMEPAGE,
    licence="research use",
    schema=schema(1),
    figures=Figures(
        rows=(202_027, 57_722, 28_860),
        positives=(67_604, 19_063, 9_536),
        sizes=SIZES,
    ),
    sources=libsvm.sources(COLUMNS),
    published=Published(
        page="https://huggingface.co/datasets/reczoo/Frappe_x1",
        columns=COLUMNS,
        md5=(
            "ba7306e6c4fc19dd2cd84f2f0596d158",
            "88d51bf2173505436d3a8f78f2a59da8",
            "3470f6d32713dc5f7715f198ca7c612a",
        ),
    ),
)
# The encoding of QNN: values that occur only once share one vector.
MIN_COUNT_2 = replace(
    PROTOCOL,
    name="frappe-x1-min2",
    title="Frappe (x1), values seen twice",
    schema=schema(2),
    figures=replace(PROTOCOL.figures, sizes=SIZES | {"user": 942, "city": 233}),
)
