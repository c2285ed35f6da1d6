"""Models, data sets and search spaces from outside this package, by dotted name: package.module:Name."""

import re
from importlib import import_module
from typing import Any

from recap_ctr.errors import InputError


def is_dotted(name: str) -> bool:
    """Whether a name is such a one; no name of our own has a colon.

    >>> is_dotted("my_ctr.nets:Pairs"), is_dotted("wide-deep")
    (True, False)
    """
    return ":" in name


def load(name: str, what: str) -> Any:
    """The object of that name; what its module raises on import, other than that it isn't there, is left to speak."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise InputError(f"{name!r} is no name of a {what}", fix="write it as package.module:Name")
    module, _, attribute = name.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise InputError(
            f"{what} {name!r}: {module} can't be imported: {error}",
            fix=f"put the directory that holds {module.partition('.')[0]} on PYTHONPATH, or install it",
        ) from error
    if not hasattr(found, attribute):
        raise InputError(f"{what} {name!r}: {module} has no {attribute}")
    return getattr(found, attribute)
