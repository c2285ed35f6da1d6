"""Time of a training step of FCN with one thread, with two that spin while waiting, and with two that sleep.

    python -m benchmarks.speed.threads DATA [--load 2]    # DATA from `recap prepare`; --load: other busy processes

Prints wall milliseconds a step, the median over rounds. The three take turns, each time in a new process, because
OpenMP reads its wait policy only once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

MODES = {"one": (1, "PASSIVE"), "two spinning": (2, "ACTIVE"), "two sleeping": (2, "PASSIVE")}
STEP = """
import sys, time, torch
from pathlib import Path
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.loop import Trainer
torch.set_num_threads(int(sys.argv[2]))
data = PreparedData(Path(sys.argv[1]), verify=False)
trainer = Trainer("fcn", parse_model("fcn", {}), TrainConfig(), data, torch.device("cpu"))
for _ in range(3):
    trainer.step()
start = time.perf_counter()
for _ in range(10):
    trainer.step()
print((time.perf_counter() - start) * 100)
"""


def main() -> None:
    """Measure all three modes in turn, and print the medians as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--load", type=int, default=0, help="busy processes that run at the same time")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    milliseconds: dict[str, list[float]] = {name: [] for name in MODES}
    with ExitStack() as stack:
        for _ in range(args.load):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        for _ in range(args.rounds):
            for name, (threads, policy) in MODES.items():
                environment = {**os.environ, "OMP_WAIT_POLICY": policy}
                command = [sys.executable, "-c", STEP, str(args.data), str(threads)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                milliseconds[name].append(float(done.stdout))
    medians = {name: round(statistics.median(times), 1) for name, times in milliseconds.items()}
    print(json.dumps({"load": args.load, "rounds": args.rounds, "milliseconds_a_step": medians}))


if __name__ == "__main__":
    main()
