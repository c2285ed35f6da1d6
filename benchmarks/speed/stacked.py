"""What stacking five small networks along a leading dimension would gain, in CPU time of a step.

    python -m benchmarks.speed.stacked

Five multilayer perceptrons with batch norm and dropout take a step each, one after the other; then one network whose
weights have a leading dimension of five does the same products at once. Tables are left out: they are the same work.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

NETWORKS = 5
CASES = ((64, (112, 64, 64, 1)), (512, (112, 64, 64, 1)), (4096, (112, 64, 64, 1)), (512, (112, 400, 400, 1)))


@dataclass
class Network:
    """One network, or several whose weights have a leading dimension."""

    weights: list[Tensor]
    biases: list[Tensor]
    inputs: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, rows: int, widths: tuple[int, ...], stacked: int) -> Network:
        leading = (stacked,) if stacked else ()
        pairs = list(pairwise(widths))
        weights = [(0.1 * torch.randn(*leading, *pair)).requires_grad_() for pair in pairs]
        biases = [torch.zeros(*leading, 1, width, requires_grad=True) for _, width in pairs]
        labels = (torch.rand(*leading, rows, 1) < 0.3).float()
        return cls(weights, biases, torch.randn(*leading, rows, widths[0]), labels)

    def loss(self) -> Tensor:
        """Return the mean loss, with batch statistics over the rows and dropout."""
        x = self.inputs
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = x @ weight + bias
            x = x - x.mean(-2, keepdim=True)
            x = F.relu(x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-5))
            x = x * (torch.rand_like(x) >= 0.1)
        return F.binary_cross_entropy_with_logits(x @ self.weights[-1] + self.biases[-1], self.labels)


def step_ms(networks: list[Network], steps: int) -> float:
    """Return the CPU milliseconds in which all networks take a step."""
    updates = [Adam([*network.weights, *network.biases], fused=True) for network in networks]

    def step() -> None:
        for network, update in zip(networks, updates, strict=True):
            network.loss().backward()  # type: ignore[no-untyped-call]
            update.step()
            update.zero_grad()

    step()
    started = time.process_time()
    for _ in range(steps):
        step()
    return 1e3 * (time.process_time() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for rows, widths in CASES:
        rounds = []
        for _ in range(args.rounds):
            alone = step_ms([Network.draw(rows, widths, 0) for _ in range(NETWORKS)], args.steps)
            rounds.append(alone / step_ms([Network.draw(rows, widths, NETWORKS)], args.steps))
        entry = {"rows": rows, "widths": widths, "gain": [round(gain, 2) for gain in sorted(rounds)]}
        results.append(entry)
    print(json.dumps({"networks": NETWORKS, "gains": results}))


if __name__ == "__main__":
    main()
