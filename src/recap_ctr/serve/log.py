"""What the server does, one JSON object a line on standard output. Nothing of any row is ever in it."""

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

_PER_SECOND = 20
_window, _count = 0.0, 0


def log(event: str, *, level: str = "info", **details: object) -> None:
    """One line, written in one call, so that the lines of several processes don't mix."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = msgspec.json.encode({"time": now, "level": level, "event": event, "pid": os.getpid(), **details})
    with suppress(OSError):  # whoever reads the log has gone; serving goes on
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), line + b"\n")


class Relay(logging.Handler):
    """What libraries have to say, as lines of ours; of an exception its type alone, as its words may quote a row."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = record.exc_info[0] if record.exc_info else None
        log(record.getMessage()[:500], level=record.levelname.lower(), reason=kind.__name__ if kind else None)


def log_refusal(**details: object) -> None:
    """Of requests that are turned away so many lines a second: under attack the log must not fill the disk."""
    global _window, _count
    now = time.monotonic()
    if now - _window >= 1.0:
        if _count > _PER_SECOND:
            log("more refusals, not listed", count=_count - _PER_SECOND)
        _window, _count = now, 0
    _count += 1
    if _count <= _PER_SECOND:
        log("refused", level="warning", **details)
