"""Measure (b): training speed of FCN, ours against the same model on FuxiCTR's trainer, in turns.

    python -m benchmarks.speed.train --shape criteo [--rounds 10] [--steps 5] [--threads 1] [--peer DIR] [--work DIR]

Needs the peer (`peer_install`). Four programs take turns: the peer, ours with the `exact` and with the `fast` update,
and the bare matrix products of one step. In each round every program has one turn; while it runs, the others are
stopped. A ratio is the peer's time divided by ours in the same round, the median over rounds; `times_products` is a
step's time as a multiple of that round's bare products.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from pathlib import Path

from benchmarks.speed.measure import WORK, make
from benchmarks.speed.peer_install import PEER, interpreter
from benchmarks.speed.steps import Stepper

Times = dict[str, list[float]]
"""Seconds a step in each round, by program."""
WANTED = {"criteo": {"exact": 1.3, "fast": 2.0}, "avazu": {"exact": 2.0, "fast": 4.0}}


def main() -> None:
    """Measure, and print one JSON object."""
    args = parse_arguments()
    commands = commands_of(args)
    # Without a handler, a terminated run would leave stopped processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wall, cpu, counts = measure(commands, args)
    if len(set(counts.values())) > 1:
        raise SystemExit(f"not the same model: {counts} parameters")
    updates, models = ("exact", "fast"), ("peer", "exact", "fast")
    wall_ratios = {name: ratios(wall, "peer", name) for name in updates}
    result = {
        "shape": args.shape,
        "batch": args.batch,
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "parameters": counts["peer"],
        "ratio": {name: median(values) for name, values in wall_ratios.items()},
        "ratio_range": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in wall_ratios.items()
        },
        "wanted": WANTED[args.shape],
        "cpu_ratio": {name: median(ratios(cpu, "peer", name)) for name in updates},
        "rows_per_second": {name: round(args.batch / median(wall[name], 6)) for name in models},
        "times_products": {name: median(ratios(wall, name, "products")) for name in models},
        "seconds": {name: median(wall[name], 4) for name in commands},
        "cpu_seconds": {name: median(cpu[name], 4) for name in commands},
    }
    print(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=WANTED, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of one turn")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first round")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--peer", type=Path, default=PEER)
    parser.add_argument("--work", type=Path, default=WORK)
    return parser.parse_args()


def commands_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each program; the data that they train on is generated first."""
    rows = str(args.rows)
    data = make(
        args.work.resolve() / f"{args.shape}-{rows}-encoded",
        "generate",
        args.shape,
        "--rows",
        rows,
        "--encoded",
    )
    common = ["--shape", args.shape, "--batch", str(args.batch), "--threads", str(args.threads)]
    ours = [sys.executable, "-m", "benchmarks.speed.ours_train", *common, "--data", str(data), "--update"]
    peer = [str(interpreter(args.peer)), "-m", "benchmarks.speed.peer_train", *common, "--data", str(data)]
    return {
        "peer": peer,
        "exact": [*ours, "exact"],
        "fast": [*ours, "fast"],
        "products": [sys.executable, "-m", "benchmarks.speed.matmuls", *common],
    }


def measure(commands: dict[str, list[str]], args: argparse.Namespace) -> tuple[Times, Times, dict[str, int]]:
    """Return wall and CPU seconds a step of each program, and how many parameters each model has."""
    programs: dict[str, Stepper] = {}
    wall: Times = {name: [] for name in commands}
    cpu: Times = {name: [] for name in commands}
    try:
        for name, command in commands.items():
            programs[name] = Stepper(command, args.threads)
            programs[name].run(args.warm_up)
        names = list(commands)
        for number in range(args.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                answer = programs[name].run(args.steps)
                wall[name].append(answer["seconds"] / args.steps)
                cpu[name].append(answer["cpu_seconds"] / args.steps)
            seconds = ", ".join(f"{name} {wall[name][-1]:.3f}" for name in names)
            print(f"round {number + 1}, seconds a step: {seconds}", file=sys.stderr)
        counts = {name: programs[name].facts["parameters"] for name in ("peer", "exact", "fast")}
    finally:
        for program in programs.values():
            program.close()
    return wall, cpu, counts


def ratios(times: Times, above: str, below: str) -> list[float]:
    """Return the time of one program divided by that of another, round by round."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]


def median(values: list[float], digits: int = 3) -> float:
    """Return the rounded median."""
    return round(statistics.median(values), digits)


if __name__ == "__main__":
    main()
