"""Errors that a user can put right, with the words to do so."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """Bad input or usage: one clear message and, if there is one, its fix. The command ends with exit code 2."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"


class DataWarning(UserWarning):
    """Something is not usual in rows, given the training rows of the model that scored them."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of a message that suggests the choice most like `word`; nothing if none is alike.

    >>> did_you_mean("recp", ["fcn", "recap"]), did_you_mean("gpt", ["fcn", "recap"])
    ("; did you mean 'recap'?", '')
    """
    matches = get_close_matches(word, list(choices), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
