"""Search spaces: which settings of a model and of its training to tune, and the values to try.

A space maps the name of a setting, such as model.dropout or train.l2, to a list of choices or to a range
{low, high, log?, integer?, step?}. It comes from a TOML file (tables [model] and [train]), from a mapping in Python,
or from `SPACES`, which has one for each model.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import PositiveFloat, ValidationError, model_validator

from recap_ctr.config import Frozen, TrainConfig, parse, read_toml
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import config_class
from recap_ctr.plugins import is_dotted, load

PARTS = ("model", "train")


class Range(Frozen):
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Whether to draw evenly by ratio instead of by difference."""
    integer: bool = False
    step: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        if self.log and self.low <= 0:
            raise ValueError(f"a log range starts above 0, not at {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("a log range has no step")
        if self.integer and any(number % 1 for number in (self.low, self.high, self.step or 1)):
            raise ValueError("a range of integers needs whole numbers")
        if self.step is not None and not _is_whole((self.high - self.low) / self.step):
            raise ValueError(f"steps of {self.step:g} from {self.low:g} don't end at {self.high:g}")
        return self

    def holds(self, value: Any) -> bool:
        """Return whether `value` is a number of the range."""
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1 if self.integer else None)
        return step is None or _is_whole((value - self.low) / step)

    def samples(self) -> list[float]:
        """Return both ends and a value between them; that value shows whether a setting needs whole numbers."""
        between = self.low + (self.step or (1 if self.integer else (self.high - self.low) / math.pi))
        return [int(value) if self.integer else value for value in (self.low, between, self.high)]


def _is_whole(ratio: float) -> bool:
    return math.isclose(ratio, round(ratio), abs_tol=1e-9)


Choices = tuple[Any, ...]
"""Values as JSON has them: lists instead of tuples."""
Space = dict[str, Choices | Range]
"""What to try, by the name of the setting, such as model.dropout."""


def parse_space(mapping: Mapping[str, Any], origin: str) -> Space:
    """Return the space that `mapping` describes, with dotted names or with a table for each part.

    `origin` is where the mapping came from; error messages begin with it.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in PARTS and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": values for name, values in value.items()}
        else:
            flat[key] = value
    if not flat:
        raise InputError(f"{origin}: the space is empty", fix="name a setting, such as train.l2")
    return {name: _parse_values(values, f"{origin}: {name}") for name, values in flat.items()}


def _parse_values(values: Any, origin: str) -> Choices | Range:
    if isinstance(values, Range):
        return values
    if isinstance(values, Mapping):
        return parse(Range, dict(values), origin)
    if not isinstance(values, list | tuple):
        raise InputError(f"{origin}: {values!r} is neither a list of choices nor a range of low and high")
    choices: Choices = tuple(json.loads(json.dumps(values)))
    if not choices:
        raise InputError(f"{origin}: the list of choices is empty", fix="add a choice, or remove the setting")
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            raise InputError(f"{origin}: the choice {choice!r} is there twice", fix="remove one of them")
    return choices


def space_to_json(space: Space) -> dict[str, Any]:
    """Return the space as plain JSON values, which `parse_space` reads back."""
    return {
        name: values.model_dump(exclude_defaults=True) if isinstance(values, Range) else list(values)
        for name, values in space.items()
    }


def named_space(model: str, name: str | None) -> Space:
    """Return the space in the TOML file `name`, or the mapping with that dotted name; None: the model's own space."""
    if name is None:
        if model not in SPACES:
            raise InputError(f"there is no built-in space for {model}", fix="name one: --space space.toml")
        return parse_space(SPACES[model], f"the space of {model}")
    if not is_dotted(name) or Path(name).is_file():
        return parse_space(read_toml(Path(name)), name)
    mapping = load(name, "search space")
    if not isinstance(mapping, Mapping):
        raise InputError(f"search space {name!r} is not a mapping from settings to values")
    return parse_space(mapping, name)


def check_space(
    space: Space, model: str, model_settings: Mapping[str, Any], train: Mapping[str, Any], origin: str
) -> None:
    """Refuse settings that do not exist, and values that no trial could have.

    `model_settings` and `train` are what the space leaves alone. A value that is only refused together with the value
    of another setting is not an error: a draw that combines the two is skipped.
    """
    kinds: dict[str, tuple[type[Frozen], Mapping[str, Any]]] = {
        "model": (config_class(model), model_settings),
        "train": (TrainConfig, train),
    }
    for name, values in space.items():
        part, _, field = name.partition(".")
        if part not in PARTS:
            raise InputError(f"{origin}: {name}: the name of a setting begins with model. or train.")
        kind, base = kinds[part]
        if field not in kind.model_fields or name == "train.seed":
            choices = ", ".join(choice for choice in kind.model_fields if choice != "seed")
            raise InputError(f"{origin}: {name} can't be searched; choose from {choices}")
        for value in values.samples() if isinstance(values, Range) else values:
            try:
                kind.model_validate({**base, field: value})
            except ValidationError as refusal:
                for error in refusal.errors():
                    if error["loc"][:1] == (field,):
                        raise InputError(f"{origin}: {name}: {error['msg']} (value: {value!r})") from None


_DROPOUT = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
_LAYERS = {"low": 1, "high": 7, "integer": True}
_UNITS = [
    *([400] * layers for layers in (1, 2, 3)),
    [500] * 3,
    *([1000] * layers for layers in (2, 3, 4, 5)),
    *([2000] * layers for layers in (2, 3, 4)),
    [5000] * 2,
]
# The low end is as good as no regulariser; the high end suits data with few values per field.
_L2 = {"train.l2": {"low": 1e-9, "high": 0.1, "log": True}}
_RATE = {"train.learning_rate": {"low": 3e-4, "high": 0.03, "log": True}}
_DEEP = {**_L2, "model.units": _UNITS, "model.dropout": _DROPOUT, "model.batch_norm": [True, False]}
_TOWER = {
    **_L2,
    "model.num_layers": {"low": 1, "high": 6, "integer": True},
    "model.dropout": _DROPOUT,
    "model.scale_norm": [True, False],
}

SPACES: dict[str, dict[str, Any]] = {
    # Each space includes the settings that were published as tuned on any data set; a test checks it. Nearly all of
    # them have embeddings of 16 numbers and a learning rate of 0.001, so neither is searched, except for the learning
    # rate of models that have little else to tune.
    "lr": {**_L2, **_RATE},
    "fm": {**_L2, **_RATE},
    "dnn": _DEEP,
    "pnn": _DEEP,
    "wide-deep": _DEEP,
    "deepfm": _DEEP,
    "dcn": {**_DEEP, "model.num_layers": _LAYERS},
    "dcnv2": {**_DEEP, "model.num_layers": _LAYERS, "model.structure": ["parallel", "stacked"]},
    "xdeepfm": {**_DEEP, "model.cin_sizes": [[16], [16, 16], [16, 16, 16], [64], [64, 64, 64], [276]]},
    "autoint": {
        **_DEEP,
        "model.units": [[], *_UNITS],
        "model.num_layers": _LAYERS,
        "model.num_heads": [1, 2, 4],
        "model.attention_dim": [32, 64, 128, 256],
        "model.residual": [True, False],
        "model.wide": [False, True],
    },
    "afn": {
        **_DEEP,
        "model.num_neurons": [100, 400, 800, 1000, 1200, 1500],
        "model.log_units": [[200], [400], [400] * 2, [400] * 3, [1000] * 2, [1000] * 3, [1000] * 4],
        "model.log_dropout": _DROPOUT,
    },
    "edcn": {
        **_L2,
        "model.num_layers": _LAYERS,
        "model.dropout": _DROPOUT,
        "model.batch_norm": [True, False],
        "model.regulation": [True, False],
        "model.temperature": [1.0, 2.0, 5.0],
    },
    "masknet": {
        **_L2,
        "model.form": ["parallel", "serial"],
        "model.units": _UNITS,
        "model.num_blocks": {"low": 1, "high": 6, "integer": True},
        "model.block_dim": [50, 64, 128, 500],
        "model.ratio": [0.1, 0.8, 1.0, 2.0, 4.0],
        "model.dropout": _DROPOUT,
        "model.embedding_norm": [True, False],
        "model.block_norm": [True, False],
    },
    "eulernet": {
        **_L2,
        "model.neurons": [[26], [26, 26], [52], [52, 52], [104]],
        "model.explicit_dropout": _DROPOUT,
        "model.implicit_dropout": _DROPOUT,
        "model.layer_norm": [True, False],
    },
    "finalmlp": {
        **_L2,
        "model.units1": _UNITS,
        "model.dropout1": _DROPOUT,
        "model.units2": [[100], [400], [500], [800], [400, 400, 400]],
        "model.dropout2": _DROPOUT,
        "model.num_heads": [1, 5, 10, 20, 50],
        "model.feature_selection": [True, False],
    },
    "final": {
        **_L2,
        "model.units1": _UNITS,
        "model.dropout1": _DROPOUT,
        "model.units2": [[400], [500], [512], [400, 400]],
        "model.dropout2": _DROPOUT,
        "model.gating": [True, False],
    },
    # The space that its paper searched, which does not state the number of heads.
    "rfm": {
        **_L2,
        "model.width": [16, 32, 48, 64, 80],
        "model.num_layers": {"low": 1, "high": 3, "integer": True},
        "model.num_heads": [1, 2, 4],
        "model.attention_dropout": _DROPOUT,
        "model.amplification_dropout": _DROPOUT,
        "model.residual": [True, False],
        "model.group": [2, 4, 8, 10, 16],
        "model.units": [[], [48], [128]],
    },
    "qnn": {
        **_L2,
        "model.num_layers": _LAYERS,
        "model.num_products": {"low": 2, "high": 6, "integer": True},
        "model.num_heads": [1, 2, 4],
        "model.dropout": _DROPOUT,
        "model.batch_norm": [True, False],
    },
    "ecn": _TOWER,
    "lcn": _TOWER,
    "fcn": {
        **_L2,
        "model.num_exponential_layers": {"low": 1, "high": 5, "integer": True},
        "model.num_linear_layers": {"low": 1, "high": 5, "integer": True},
        "model.exponential_dropout": _DROPOUT,
        "model.linear_dropout": _DROPOUT,
        "model.scale_norm": [True, False],
    },
    "recap": {
        **_L2,
        "model.exponential_dropout": _DROPOUT,
        "model.linear_dropout": _DROPOUT,
        "model.num_adapters": [4, 8, 16],
        "model.lora_rank": [None, 4, 8, 16, 32],
        "model.binding": ["tied", "free"],
        "model.depth_weights": [[0.1, 0.9], [0.3, 0.7], [0.5, 0.5]],
        "model.fuse": ["mean", "gate"],
    },
}
