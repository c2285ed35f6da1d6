"""Work on a device: tensors arrive as they are."""

import torch
from torch import Tensor

from recap_ctr.nn import device

CPU = torch.device("cpu")


def test_tensors_are_sent_as_they_are() -> None:
    assert isinstance(device.send(torch.ones(2), CPU), Tensor)
    assert device.send(torch.ones(2), torch.device("meta")).device.type == "meta"
