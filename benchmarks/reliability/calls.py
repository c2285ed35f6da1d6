"""Let system calls fail: a full disk, a broken one, too many open files, no memory, at one call or from one on.

    python -m benchmarks.reliability.calls [--cases 400] [--seconds 540] [--only predict] [--work DIR]

Needs strace. A command is to replace an output that stands there, and its k-th call of a kind fails, once or from
then on, k at random over all that an undisturbed run makes. Then the new output must be there, whole, with exit code 0,
or the old one, untouched, with another. `left` counts partial files of commands that had the chance to remove them.
`--work` keeps inputs and the count so far: the same command goes on, and stops after `--seconds` at the latest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from benchmarks.reliability.kills import Place, contents
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.storage.files import read_json, write_json

WORK = Path(__file__).parent / ".work" / "kills"
FAULTS = (
    ("write", "ENOSPC"),
    ("write", "EIO"),
    ("read", "EIO"),
    ("fsync", "EIO"),
    ("openat", "EMFILE"),
    ("openat", "ENOSPC"),
    ("rename", "EIO"),
    ("renameat2", "EIO"),
    ("mkdir", "ENOSPC"),
    ("mmap", "ENOMEM"),
)
COMMANDS = {
    "prepare": ("prepare", "{later.csv}", "--schema", "{schema.toml}", "--force", "--out", "{out}"),
    "predict": ("predict", "{run}", "{later.csv}", "--force", "--out", "{out}"),
    "apply": ("apply", "{fit}", "{delta}", "--force", "--out", "{out}"),
    "pull": ("pull", "{hub}", "{out}", "--force"),
}
OLD = {
    "prepare": ("prepare", "{clicks.csv}", "--schema", "{schema.toml}", "--out", "{out}"),
    "predict": ("predict", "{run}", "{clicks.csv}", "--out", "{out}"),
    "apply": ("pull", "{old hub}", "{out}"),
    "pull": ("pull", "{old hub}", "{out}"),
}
"""What made the output that stands there."""
SUFFIX = {"predict": ".csv"}
HANGS, HUNG = 600.0, -1000  # Seconds after which a command hangs, and what stands for its exit code.


@dataclass(frozen=True)
class Outputs:
    """An output before and after a command, and how many calls of each kind the command makes."""

    stored: Path
    old: dict[str, Any]
    new: dict[str, Any]
    calls: Counter[str]


class Injected:
    """Runs commands whose calls fail."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.top = place.work / "failing"

    def out(self, name: str) -> Path:
        return self.top / "out" / f"{name}{SUFFIX.get(name, '')}"

    def run(self, arguments: tuple[str, ...], out: Path, *strace: str) -> tuple[int, str]:
        """Run a command, under strace if options are given; return its exit code and its errors."""
        prefix = ["strace", "-f", "-qq", *strace] if strace else []
        process = self.place.start(arguments, out, prefix)
        try:
            _, errors = process.communicate(timeout=HANGS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return HUNG, ""
        return process.returncode, errors.decode(errors="replace")

    def prepare(self, name: str) -> Outputs:
        """Make the old and the new output, and count the calls that lead from one to the other."""
        shutil.rmtree(self.top, ignore_errors=True)
        out = self.out(name)
        out.parent.mkdir(parents=True)
        self._must(self.run(OLD[name], out))
        stored = shutil.copytree(out.parent, self.top / "old")
        old = contents(out)
        kinds = ",".join(sorted({kind for kind, _ in FAULTS}))
        with NamedTemporaryFile("r") as log:
            self._must(self.run(COMMANDS[name], out, "-e", f"trace={kinds}", "-o", log.name))
            calls = Counter(re.findall(r"^\d+ +(\w+)\(", log.read(), re.MULTILINE))
        return Outputs(stored, old, contents(out), calls)

    @staticmethod
    def _must(ended: tuple[int, str]) -> None:
        if ended[0]:
            raise SystemExit(ended[1])

    def fail(self, name: str, outputs: Outputs, rng: random.Random) -> tuple[str, list[str]]:
        """Let a call fail; return the outcome, and what was not as promised."""
        out = self.out(name)
        shutil.rmtree(out.parent)
        shutil.copytree(outputs.stored, out.parent)
        kind, error = rng.choice([fault for fault in FAULTS if outputs.calls[fault[0]]])
        at = rng.randint(1, outputs.calls[kind])
        when = f"{at}{rng.choice(('', '+'))}"
        inject = f"inject={kind}:error={error}:when={when}"
        code, errors = self.run(COMMANDS[name], out, "-e", f"trace={kind}", "-e", inject, "-o", "/dev/null")
        got = contents(out)
        left = [path for path in got if path.rpartition("/")[2].endswith((".partial", ".scratch"))]
        whole = {path: value for path, value in got.items() if path.partition(":")[0] not in left}
        is_old, is_new = _same(whole, outputs.old), _same(whole, outputs.new)
        wrong = []
        if not (is_new if code == 0 else is_old or is_new):
            wrong.append(f"{name}: {inject}: exit code {code}, and neither output is whole\n{errors[-300:]}")
        if code == HUNG:
            wrong.append(f"{name}: {inject}: it did not end within {HANGS:.0f} s")
        if left and code > 0:
            wrong.append(f"{name}: {inject}: exit code {code}, and {left[0]} is left")
        if "Traceback" in errors:
            print(f"{inject}: {errors[-600:]}", file=sys.stderr)
        outcome = (
            "hung"
            if code == HUNG
            else "made"
            if code == 0
            else "died by a signal"
            if code < 0 or code > 128
            else "refused"
        )
        return f"{outcome}, with a traceback" if "Traceback" in errors else outcome, wrong


def _same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether all files are there and equal, but for what a clock writes."""
    clocks = re.compile(r"seconds|date|checksum|\.html:|\.lock")
    first, second = (
        {key: value for key, value in values.items() if not clocks.search(key)} for values in (got, wanted)
    )
    return first == second


def num_cases(state: dict[str, Any]) -> int:
    return sum(sum(counts.values()) for counts in state["outcomes"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=400, help="in all, over all commands")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed")
    end = time.monotonic() + args.seconds
    place, record = Place(args.work), args.work / "calls.json"
    place.make_inputs()
    state: dict[str, Any] = {"outcomes": {}, "wrong": []}
    if record.exists() and num_cases(before := read_json(record)) < args.cases:
        state = before
    injected = Injected(place)
    for number, name in enumerate(args.only):
        share = args.cases // len(args.only)
        if sum(state["outcomes"].get(name, {}).values()) >= share or time.monotonic() > end:
            continue
        outputs = injected.prepare(name)
        begun = time.monotonic()
        span = (end - begun) / (len(args.only) - number)
        while (done := sum(state["outcomes"].get(name, {}).values())) < share:
            if time.monotonic() > begun + span:
                break
            outcome, wrong = injected.fail(name, outputs, random.Random(f"{name} {done}"))
            counts = state["outcomes"].setdefault(name, {})
            counts[outcome] = counts.get(outcome, 0) + 1
            state["wrong"] += wrong
            write_json(record, state)
            print(f"{name}: {outcome}", *wrong, file=sys.stderr)
    result = {"cases": num_cases(state), "outcomes": state["outcomes"], "wrong": state["wrong"]}
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))
    if state["wrong"]:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
