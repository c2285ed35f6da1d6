"""One job in a process of its own: `python -m recap_ctr.jobs.worker`.

The job comes as a line of JSON on standard input; events go to standard output, one JSON object a line.
"""

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs import progress


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    job = json.loads(sys.stdin.buffer.readline())
    # Standard input stays open as long as the parent lives. Without it there is nobody to work for.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints goes to standard error, and can't garble the events

    def send(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    progress.send_to(send)
    module, _, name = job["function"].partition(":")
    if not module.startswith("recap_ctr."):
        raise ValueError(f"{module} is not a module of this package")
    try:
        value = getattr(importlib.import_module(module), name)(**job["arguments"])
    except InputError as error:
        send({"kind": "input error", "message": error.message, "fix": error.fix})
        return 2
    send({"kind": "result", "value": value})
    return 0


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held at exit
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
