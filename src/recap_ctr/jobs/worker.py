"""A process that takes jobs for another one: `python -m recap_ctr.jobs.worker`.

Each job comes as a line of JSON on standard input; events go to standard output, one JSON object a line. A result, or
an error of the input, ends the job, and the next one may come.
"""

import json
import os
import signal
import threading
from queue import SimpleQueue
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import LostWorkerError
from recap_ctr.jobs.progress import sent_to
from recap_ctr.plugins import resolve


def main() -> None:
    """Do the jobs that come, and report their progress and their results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers.
    jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Whatever a job prints goes to standard error, and can't garble the events.

    def send(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    with sent_to(send):
        while True:
            job = jobs.get()
            try:
                send({"kind": "result", "value": resolve(job["function"])(**job["arguments"])})
            except InputError as error:
                send({"kind": "input error", "message": error.message, "fix": error.fix})
            except LostWorkerError as error:
                send({"kind": "lost worker", "message": str(error)})


def _read_jobs(jobs: "SimpleQueue[dict[str, Any]]") -> None:
    """Read jobs as long as the parent lives. When the parent is gone, end at once."""
    text = b""
    while read := os.read(0, 1 << 16):  # Not through sys.stdin, whose lock would be held at exit.
        *lines, text = (text + read).split(b"\n")
        for line in lines:
            jobs.put(json.loads(line))
    os._exit(1)


if __name__ == "__main__":
    main()
