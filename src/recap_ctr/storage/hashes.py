"""Name content by its hash: of files, and of any JSON value."""

import hashlib
import json
from pathlib import Path

CHUNK_BYTES = 1 << 20


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, in bounded memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(value: object) -> str:
    """Return a short name for a JSON value, which equal values share and no others."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
