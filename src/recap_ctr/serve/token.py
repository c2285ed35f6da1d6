"""The bearer token that a server asks for and a client shows."""

import os
from pathlib import Path

from recap_ctr.errors import InputError

TOKEN = "RECAP_TOKEN"  # environment variable
MIN_TOKEN = 16


def read_token(file: Path | None) -> str | None:
    """The bearer token, from a file or else from the environment; None if neither is given."""
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise InputError(f"{file} is not text", fix="put the token on its only line") from None
        origin = str(file)
    elif TOKEN in os.environ:
        token, origin = os.environ[TOKEN].strip(), f"the environment variable {TOKEN}"
    else:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"the token in {origin} is no token: {MIN_TOKEN} or more printable ASCII characters, no blanks",
            fix="make one with: openssl rand -hex 32",
        )
    return token
