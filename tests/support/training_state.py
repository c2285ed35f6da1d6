"""The saved state of a training as bytes, to compare two trainings bit by bit."""

import json
from pathlib import Path

import torch

from recap_ctr.nn.weights import load_tensors
from recap_ctr.training.loop import BEST, STATE


def bits(out: Path) -> dict[str, bytes]:
    """Return the file of the selected weights and every tensor of the state, without the times taken."""
    tensors, metadata = load_tensors(out / STATE)
    progress = json.loads(metadata["progress"])
    history = [{**epoch, "seconds": 0} for epoch in progress["history"]]
    state = {
        name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in tensors.items()
    }
    state["progress"] = json.dumps(progress | {"seconds": 0, "history": history}).encode()
    return state | {"best": (out / BEST).read_bytes()}
