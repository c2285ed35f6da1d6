"""Run one job in a process of its own: `python -m recap_ctr.jobs.worker`.

The job comes as a line of JSON on standard input; events go to standard output, one JSON object a line.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import sent_to
from recap_ctr.plugins import resolve


def main() -> int:
    """Run the job, report its progress and its result, and return the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers.
    job = json.loads(sys.stdin.buffer.readline())
    # Standard input stays open as long as the parent lives. Without a parent there is nobody to work for.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Whatever the job prints goes to standard error, and can't garble the events.

    def send(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    try:
        with sent_to(send):
            value = resolve(job["function"])(**job["arguments"])
    except InputError as error:
        send({"kind": "input error", "message": error.message, "fix": error.fix})
        return 2
    send({"kind": "result", "value": value})
    return 0


def _end_with_parent() -> None:
    while os.read(0, 1):  # Not through sys.stdin, whose lock would be held at exit.
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
