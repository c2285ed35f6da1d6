"""Damage a small artifact in every way there is: flipped bits, cut and swapped files. It must be refused each time.

    python -m benchmarks.reliability.flips [--every 1] [--seconds 540] [--work DIR]

All bits of all files are flipped one by one (`--every N`: each N-th), all files are cut at every length, and each file
is put in the place of each other one. `accepted` lists what was loaded nevertheless. `--work` keeps the place that was
reached: the same command goes on there, and stops after `--seconds` at the latest; `over` says whether all is done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.reliability.small_artifact import write_small
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.storage.files import read_json, write_json

WORK = Path(__file__).parent / ".work"


def damages(contents: dict[Path, bytes], every: int) -> Iterator[tuple[str, Path, bytes]]:
    """Yield every damage: its kind, the file, and what the file then holds."""
    for path, content in contents.items():
        for bit in range(0, 8 * len(content), every):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            yield "flipped bits", path, bytes(changed)
        for length in range(0, len(content), every):
            yield "cut files", path, content[:length]
        for theirs in contents.values():
            if theirs != content:
                yield "swapped files", path, theirs


def damage(artifact: Path, state: dict[str, Any], every: int, seconds: float) -> Iterator[None]:
    """Go on from the place in `state`; yield now and then, so that it can be kept."""
    contents = {path: path.read_bytes() for path in sorted(artifact.rglob("*")) if path.is_file()}
    end = time.monotonic() + seconds
    for number, (kind, path, content) in enumerate(damages(contents, every)):
        if number < state["done"]:
            continue
        if time.monotonic() > end:
            return
        path.write_bytes(content)
        try:
            load_artifact(artifact)
            state["accepted"].append(f"{kind}, {path.relative_to(artifact)}, number {number}")
        except InputError:
            state["refused"][kind] = state["refused"].get(kind, 0) + 1
        finally:
            path.write_bytes(contents[path])
        state["done"] = number + 1
        if number % 1000 == 0:
            yield
    load_artifact(artifact)  # It is whole again.
    state["over"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="flip and cut at each N-th place only")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    record = args.work / f"flips-{args.every}.json"
    state: dict[str, Any] = {"done": 0, "refused": {}, "accepted": [], "over": False}
    args.work.mkdir(parents=True, exist_ok=True)
    if record.exists() and not (before := read_json(record))["over"]:
        state = before
    with TemporaryDirectory() as directory:
        write_small(Path(directory) / "artifact", num_values=4)
        for _ in damage(Path(directory) / "artifact", state, args.every, args.seconds):
            write_json(record, state)
    write_json(record, state)
    names = ("over", "refused", "accepted")
    result = {"every": args.every, **{name: state[name] for name in names}}
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))
    if state["accepted"]:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
