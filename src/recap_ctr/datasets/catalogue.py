"""From raw tables to memory-mapped shards."""

from importlib import import_module

from recap_ctr.datasets.protocol import Protocol
from recap_ctr.errors import InputError
from recap_ctr.plugins import is_dotted, load

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


def protocol(name: str) -> Protocol:
    """The public data set of that name, or one of somebody else's by its dotted name."""
    if is_dotted(name):
        outside = load(name, "data set")
        if not isinstance(outside, Protocol):
            raise InputError(f"data set {name!r} is no recap_ctr.datasets.protocol.Protocol")
        return outside
    if name not in DATASETS:
        raise InputError(f"no data set {name!r}", fix=f"known are {', '.join(DATASETS)}")
    module, _, attribute = DATASETS[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Protocol)
    return found
