"""A small RECAP model in which every part changes the logit, and rows for it."""

import torch

from recap_ctr.data.layout import Layout
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.lora import AdapterBank

LAYOUT = Layout.of_sizes([5, 4, 6])


def recap_config(**settings: object) -> RecapConfig:
    config = parse_model("recap", {"dim": 4, "lora_rank": 3, "num_adapters": 8, **settings})
    assert isinstance(config, RecapConfig)
    return config


def recap_model(config: RecapConfig, seed: int = 0) -> Recap:
    """Return a model with large embeddings and adapters, and statistics away from their start."""
    torch.manual_seed(seed)
    model = Recap(config, LAYOUT)
    with torch.no_grad():
        model.embedding.table.weight.normal_()
        for tower in (model.exponential, model.linear):
            if isinstance(tower.bank, AdapterBank):
                tower.bank.a_ACR.normal_(std=0.5)
    model.train()
    for _ in range(3):
        model(recap_rows())
    return model.eval()


def recap_rows(count: int = 6) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    columns = [
        torch.randint(field.offset + 1, field.offset + field.size, (count,), generator=generator)
        for field in LAYOUT.fields
    ]
    return Inputs(torch.stack(columns, 1).int(), torch.empty(count, 0))
