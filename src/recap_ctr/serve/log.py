"""The server's log: one JSON object per line on standard output, never with the content of a row."""

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

_MAX_REFUSALS = 20  # lines per second
_window_start, _num_refusals = 0.0, 0


def log(event: str, *, level: str = "info", **details: object) -> None:
    """Write one line with one system call, so that lines of several processes don't mix."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = msgspec.json.encode({"time": now, "level": level, "event": event, "pid": os.getpid(), **details})
    with suppress(OSError):  # Serving goes on even if nobody reads the log any more.
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), line + b"\n")


class JsonHandler(logging.Handler):
    """Writes the log records of libraries in our format.

    Of an exception it keeps only the type, because the message may quote a row.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        kind = record.exc_info[0] if record.exc_info else None
        log(record.getMessage()[:500], level=record.levelname.lower(), reason=kind.__name__ if kind else None)


def log_refusal(**details: object) -> None:
    """Log a refusal, at most 20 a second, so that an attack can't fill the disk."""
    global _window_start, _num_refusals
    now = time.monotonic()
    if now - _window_start >= 1.0:
        if _num_refusals > _MAX_REFUSALS:
            log("more refusals, not listed", count=_num_refusals - _MAX_REFUSALS)
        _window_start, _num_refusals = now, 0
    _num_refusals += 1
    if _num_refusals <= _MAX_REFUSALS:
        log("refused", level="warning", **details)
