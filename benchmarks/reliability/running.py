"""`recap serve` as a process whose log is kept, and other commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """Serves an artifact on a free port until the block ends."""

    def __init__(self, artifact: Path, *options: str, command: tuple[str, ...] | None = None) -> None:
        usual = ("-m", "recap_ctr", "serve", str(artifact), "--port", "0", "--quiet", *options)
        self._command = [sys.executable, *(command or usual)]
        self.log: list[dict[str, Any]] = []

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait("serving", seconds=120)["address"].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(json.loads(line))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what happened to workers and offers; requests that were refused have a status."""
        return [event for event in self.log if event["event"] == name and "status" not in event]

    def wait(self, name: str, count: int = 1, seconds: float = 60.0) -> dict[str, Any]:
        """The event, once it has happened so often."""
        end = time.monotonic() + seconds
        while len(events := self.events(name)) < count:
            if time.monotonic() > end or self._process.poll() is not None:
                raise SystemExit(f"no {name!r} in the server's log")
            time.sleep(0.02)
        return events[count - 1]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that were started last."""
        return [event["worker"] for event in self.events("worker ready")]


def recap(*arguments: object) -> None:
    """Run a command, which must succeed."""
    command = [sys.executable, "-m", "recap_ctr", *map(str, arguments), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def resident_mib(pid: int) -> float:
    """Memory that a process holds now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} holds no memory")
