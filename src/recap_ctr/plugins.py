"""Objects found by their dotted name, package.module:Name, such as models and data sets outside this package."""

import re
from importlib import import_module
from typing import Any

from recap_ctr.errors import InputError


def is_dotted(name: str) -> bool:
    """Return whether `name` is a dotted name; none of our short names has a colon.

    >>> is_dotted("my_ctr.nets:Pairs"), is_dotted("wide-deep")
    (True, False)
    """
    return ":" in name


def load(name: str, what: str) -> Any:
    """Import the user's object with the dotted name `name`; `what` is the word for it in messages.

    Raises InputError if the name is malformed or the object doesn't exist. Any other error that its module raises
    on import is passed on.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise InputError(f"{name!r} is not the name of a {what}", fix="write it as package.module:Name")
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0]
        raise InputError(
            f"{what} {name!r}: {module_name} can't be imported: {error}",
            fix=f"put the directory that holds {package} on PYTHONPATH, or install it",
        ) from error
    if not hasattr(module, attribute):
        raise InputError(f"{what} {name!r}: {module_name} has no {attribute}")
    return getattr(module, attribute)


def resolve(name: str) -> Any:
    """Return the object with the dotted name `name`, which our own code wrote and which must exist."""
    module_name, _, attribute = name.partition(":")
    return getattr(import_module(module_name), attribute)
