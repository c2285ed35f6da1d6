"""The public data sets by name."""

from typing import TYPE_CHECKING

from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.plugins import is_dotted, load, resolve

if TYPE_CHECKING:  # Completion reads the names, and must not wait for polars.
    from recap_ctr.datasets.protocol import Protocol

DATASETS = {
    "criteo-x4": "recap_ctr.datasets.criteo:PROTOCOL",
    "avazu-x4": "recap_ctr.datasets.avazu:PROTOCOL",
    "kdd12": "recap_ctr.datasets.kdd12:PROTOCOL",
    "kkbox-x1": "recap_ctr.datasets.kkbox:PROTOCOL",
    "kkbox-x1-words": "recap_ctr.datasets.kkbox:WORDS",
    "ml-1m": "recap_ctr.datasets.ml_1m:PROTOCOL",
    "frappe-x1": "recap_ctr.datasets.frappe:PROTOCOL",
    "frappe-x1-min2": "recap_ctr.datasets.frappe:MIN_COUNT_2",
    "movielens-latest-x1": "recap_ctr.datasets.movielens_latest:PROTOCOL",
}


def find_protocol(name: str) -> "Protocol":
    """Return the public data set with this name, or one from outside the package by its dotted name."""
    from recap_ctr.datasets.protocol import Protocol

    if is_dotted(name):
        protocol = load(name, "data set")
        if not isinstance(protocol, Protocol):
            raise InputError(f"data set {name!r} is not a recap_ctr.datasets.protocol.Protocol")
        return protocol
    if name not in DATASETS:
        raise InputError(
            f"no data set {name!r}{did_you_mean(name, DATASETS)}", fix=f"choose from {', '.join(DATASETS)}"
        )
    protocol = resolve(DATASETS[name])
    assert isinstance(protocol, Protocol)
    return protocol
