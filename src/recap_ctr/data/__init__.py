"""From raw tables to memory-mapped shards."""

from importlib import import_module

from recap_ctr.data.protocol import Protocol
from recap_ctr.errors import InputError
from recap_ctr.plugins import is_dotted, load

DATASETS = {
    "ml-1m": "recap_ctr.data.ml_1m",
}


def protocol(name: str) -> Protocol:
    """The public data set of that name, or one of somebody else's by its dotted name."""
    if is_dotted(name):
        outside = load(name, "data set")
        if not isinstance(outside, Protocol):
            raise InputError(f"data set {name!r} is no recap_ctr.data.protocol.Protocol")
        return outside
    if name not in DATASETS:
        raise InputError(f"no data set {name!r}", fix=f"known are {', '.join(DATASETS)}")
    found = import_module(DATASETS[name]).PROTOCOL
    assert isinstance(found, Protocol)
    return found
