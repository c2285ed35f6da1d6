"""The bearer token that a server requires and a client sends."""

import os
from pathlib import Path

from recap_ctr.errors import InputError

TOKEN = "RECAP_TOKEN"  # environment variable
MIN_TOKEN = 16  # characters


def read_token(file: Path | None) -> str | None:
    """Return the token in `file`, else the one in the environment, else None; refuse a weak or malformed one."""
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise InputError(f"{file} is not UTF-8 text", fix="write the token as its only line") from None
        origin = str(file)
    elif TOKEN in os.environ:
        token, origin = os.environ[TOKEN].strip(), f"the environment variable {TOKEN}"
    else:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"the token in {origin} must have {MIN_TOKEN} or more printable ASCII characters and no spaces",
            fix="create one with: openssl rand -hex 32",
        )
    return token
