"""Write the golden losses again, after a change that is meant to move them: `python -m tests.golden.renew`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.support.golden import GOLDEN, first_losses, small_data


def main() -> None:
    """Train with both kinds of update and write the losses of their first steps."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        data = small_data(Path(directory) / "data")
        losses = {update: first_losses(data, update) for update in ("exact", "fast")}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
