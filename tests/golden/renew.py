"""Write the golden losses anew: `python -m tests.golden.renew`, after a change that is meant to move them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.training.test_loop import GOLDEN, first_losses, small_data


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        data = small_data(Path(directory) / "data")
        losses = {update: first_losses(data, update) for update in ("exact", "fast")}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
