"""A recipe that takes seconds: one teacher, one epoch, vectors of four numbers."""

from pathlib import Path
from typing import Any

from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.runner import Runner
from recap_ctr.recipe.stages import Recipe

TINY: dict[str, Any] = {
    "model_settings": {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4},
    "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "teachers": 1,
    "routes": 4,
    "l2": 0.01,
    "train": {"batch_size": 256, "max_epochs": 1},
}


def tiny_recipe(data: PreparedData, out: Path, **changes: Any) -> Recipe:
    """Return the recipe with some settings changed; its jobs run in this process."""
    config = recipe_config("default", {**TINY, **changes}, "test")
    return Recipe(config, data, out, runner=Runner(InThisProcess(), quiet=True), quiet=True)
