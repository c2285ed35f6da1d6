"""Kill commands at random instants and start them again: in the end all that they wrote is as if nothing had happened.

    python -m benchmarks.reliability.kills [--kills 500] [--seconds 540] [--only train fit] [--work DIR]

Every command that writes is killed in turns, with all its processes, once to three times; then it runs to its end.
What two undisturbed runs agree in, file by file and value by value, must be the same, and no partial file may be left.
Times differ from run to run and are not compared. `--work` keeps inputs and the count so far: the same command goes on
until `--kills` is reached, and stops after `--seconds` at the latest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recap_ctr.jobs.machine import machine, versions
from recap_ctr.storage.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(__file__).parent / ".work" / "kills"
MOST_KILLS = 3  # of one command before it may end
CPU = ("--set", "train.batch_size=256", "--threads", "1", "--device", "cpu")
TRAIN = (
    "--model",
    "recap",
    "--max-epochs",
    "2",
    "--routes",
    "2",
    "--l2",
    "0.01",
    "--set",
    "model.dim=4",
    *CPU,
)
FIT = (
    *("--model", "fcn", "--teachers", "1", "--set", "l2=0.01", "--set", "train.max_epochs=2", *CPU),
    *(
        "--set",
        "teacher_train.max_epochs=2",
        "--set",
        "model_settings.dim=4",
        "--set",
        "teacher_settings.dim=4",
    ),
)
TUNE = ("--trials", "2", "--set", "train.max_epochs=1", *CPU)
UPDATE = ("--confidence", "0.5", "--max-churn", "9", "--max-calibration-error", "9", "--min-ranking", "0")


@dataclass(frozen=True)
class Case:
    """A command with {out}, and inputs of other names in braces; `copied` is the input that stands at {out} before."""

    arguments: tuple[str, ...]
    suffix: str = ""
    copied: str = ""


INPUTS = {
    "clicks.csv": ("synthetic", "--rows", "3000", "--order", "1", "--out", "{clicks.csv}"),
    "later.csv": ("synthetic", "--rows", "2000", "--order", "1", "--seed", "2", "--out", "{later.csv}"),
    "schema.toml": ("schema", "infer", "{clicks.csv}", "--label", "click", "--out", "{schema.toml}"),
    "data": ("prepare", "{clicks.csv}", "--schema", "{schema.toml}", "--out", "{data}"),
    "run": ("train", "{data}", *TRAIN, "--out", "{run}"),
    "fit": ("fit", "{data}", *FIT, "--keep-state", "--out", "{fit}"),
    "new": ("update", "{fit}", "{later.csv}", *UPDATE, "--delta", "{delta}", "--out", "{new}"),
    "hub": ("push", "{run}", "{hub}"),
    "old hub": ("push", "{fit}", "{old hub}"),
}
"""What commands read, in the order in which it is made."""

CASES = {
    "synthetic": Case(("synthetic", "--rows", "20000", "--out", "{out}"), ".csv"),
    "schema infer": Case(("schema", "infer", "{clicks.csv}", "--label", "click", "--out", "{out}"), ".toml"),
    "prepare": Case(("prepare", "{clicks.csv}", "--schema", "{schema.toml}", "--out", "{out}")),
    "train": Case(("train", "{data}", *TRAIN, "--out", "{out}")),
    "fit": Case(("fit", "{data}", *FIT, "--out", "{out}")),
    "tune": Case(("tune", "{data}", *TUNE, "--out", "{out}")),
    "logits": Case(("logits", "{run}", "{data}", "--split", "valid", "--out", "{out}")),
    "predict": Case(("predict", "{run}", "{clicks.csv}", "--out", "{out}"), ".csv"),
    "export": Case(("export", "{out}", "--data", "{data}"), copied="run"),
    "update": Case(("update", "{fit}", "{later.csv}", *UPDATE, "--out", "{out}")),
    "apply": Case(("apply", "{fit}", "{delta}", "--out", "{out}")),
    "drift": Case(("drift", "{run}", "{later.csv}", "--out", "{out}")),
    "report": Case(("report", "{run}", "--out", "{out}")),
    "push": Case(("push", "{run}", "{out}")),
    "pull": Case(("pull", "{hub}", "{out}")),
}
ENDS = {"drift": (0, 3)}  # Other exit codes than 0 that are an answer.


class Place:
    """A directory with the inputs and the outputs."""

    def __init__(self, work: Path) -> None:
        self.work = work.resolve()
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def path(self, name: str) -> Path:
        return self.work / "inputs" / name

    def start(
        self, arguments: tuple[str, ...], out: Path | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own, after a prefix such as strace."""
        names = {"out": out, "delta": self.path("delta"), **{name: self.path(name) for name in INPUTS}}
        filled = [str(names[part[1:-1]]) if part.startswith("{") else part for part in arguments]
        command = [*prefix, sys.executable, "-m", "recap_ctr", *filled, "--quiet"]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self._environment, start_new_session=True, **pipes)

    def make_inputs(self) -> None:
        self.path("").mkdir(parents=True, exist_ok=True)
        for name, arguments in INPUTS.items():
            if not self.path(name).exists():
                must_end(self.start(arguments), (0,))

    def fresh(self, name: str) -> Path:
        """Return the place of a command's output, with what stands there before."""
        out = self.work / "outputs" / f"{name.replace(' ', '-')}{CASES[name].suffix}"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        if CASES[name].copied:
            shutil.copytree(self.path(CASES[name].copied), out)
        return out


def must_end(process: subprocess.Popen[bytes], codes: tuple[int, ...]) -> None:
    _, errors = process.communicate()
    if process.returncode not in codes:
        raise SystemExit(f"{' '.join(map(str, process.args))}\n{errors.decode()}")  # type: ignore[arg-type]


def killed(process: subprocess.Popen[bytes], after: float) -> bool:
    """Kill a command and its processes some seconds after its start; return whether it was still there."""
    try:
        process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    return False


def contents(out: Path) -> dict[str, Any]:
    """Return all that an output holds: the leaves of JSON, the hashes of all else, and the names of all files."""
    top = out.parent
    found: dict[str, Any] = {}
    for path in sorted(path for path in top.rglob("*") if path.is_file()):
        name, content = path.relative_to(top).as_posix(), path.read_bytes()
        found[name] = None
        if path.suffix == ".json":
            found |= {f"{name}:{at}": leaf for at, leaf in leaves(json.loads(content), "")}
            continue
        if path.name == "state.safetensors":  # Its header has the seconds so far.
            content = content[8 + int.from_bytes(content[:8], "little") :]
        found[f"{name}:bytes"] = hashlib.sha256(content).hexdigest()
    return found


def leaves(value: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in leaves(part, f"{at}/{key}")]
    if isinstance(value, list):
        return [leaf for i, part in enumerate(value) for leaf in leaves(part, f"{at}/{i}")]
    return [(at, value)]


@dataclass(frozen=True)
class Whole:
    """What undisturbed runs of a command write, and how long they take."""

    values: dict[str, Any]
    seconds: float


def undisturbed(place: Place, name: str) -> Whole:
    """Run a command twice; return what both runs agree in."""
    both, seconds = [], 0.0
    for _ in range(2):
        out, start = place.fresh(name), time.monotonic()
        must_end(place.start(CASES[name].arguments, out), ENDS.get(name, (0,)))
        seconds = time.monotonic() - start
        both.append(contents(out))
    first, second = both
    same = {key: value for key, value in first.items() if key in second and second[key] == value}
    return Whole(same, seconds)


def differences(whole: Whole, got: dict[str, Any]) -> list[str]:
    """Return what is missing, other than it should be, or left over."""
    missing = [key for key, value in whole.values.items() if key not in got or got[key] != value]
    left = [name for name in got if ":" not in name and name.rpartition("/")[2].endswith(".partial")]
    return missing + left


@dataclass
class Count:
    """Kills so far, and what was not as it should be after them."""

    kills: Counter[str] = field(default_factory=Counter)
    trials: Counter[str] = field(default_factory=Counter)
    different: list[list[str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Count:
        if not path.exists():
            return cls()
        values = read_json(path)
        return cls(Counter(values["kills"]), Counter(values["trials"]), values["different"])

    def to_dict(self) -> dict[str, Any]:
        return {"kills": dict(self.kills), "trials": dict(self.trials), "different": self.different}


def trial(place: Place, name: str, whole: Whole, count: Count, rng: random.Random) -> None:
    """Kill a command once or several times, let it end, and compare what it wrote."""
    out, kills = place.fresh(name), 0
    for _ in range(rng.randint(1, MOST_KILLS)):
        kills += killed(place.start(CASES[name].arguments, out), rng.uniform(0, whole.seconds))
    must_end(place.start(CASES[name].arguments, out), ENDS.get(name, (0,)))
    count.kills[name] += kills
    count.trials[name] += 1
    if different := differences(whole, contents(out)):
        count.different.append([name, *different[:5]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, help="in all, over all commands")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    place, record = Place(args.work), args.work / "count.json"
    place.make_inputs()
    count = Count.read(record)
    if count.kills.total() >= args.kills:
        count = Count()
    wholes: dict[str, Whole] = {}
    while count.kills.total() < args.kills and time.monotonic() < end:
        name = min(args.only, key=lambda name: (count.trials[name], args.only.index(name)))
        if name not in wholes:
            wholes[name] = undisturbed(place, name)
        trial(place, name, wholes[name], count, random.Random(f"{name} {count.trials[name]}"))
        write_json(record, count.to_dict())
        print(f"{count.kills.total()} kills, {name}", file=sys.stderr)
    result = {
        "kills": count.kills.total(),
        "wanted": args.kills,
        "commands": len(count.trials),
        "kills_by_command": dict(count.kills),
        "different": count.different,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    if count.different:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
