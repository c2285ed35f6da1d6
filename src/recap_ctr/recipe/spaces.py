"""Search spaces: which settings of a model and of its training are tried, and with which values.

A space maps settings, such as model.dropout or train.l2, to a list of choices or to a range
{low, high, log?, integer?, step?}. It is read from TOML (tables [model] and [train]), from Python, or built in.
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
    """Whether factors count, not differences."""
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
            raise ValueError(f"steps of {self.step:g} from {self.low:g} don't arrive at {self.high:g}")
        return self

    def holds(self, value: Any) -> bool:
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1 if self.integer else None)
        return step is None or _is_whole((value - self.low) / step)

    def samples(self) -> list[float]:
        """Its ends, and a value between them, which shows where whole numbers are needed."""
        between = self.low + (self.step or (1 if self.integer else (self.high - self.low) / math.pi))
        return [int(value) if self.integer else value for value in (self.low, between, self.high)]


def _is_whole(ratio: float) -> bool:
    return math.isclose(ratio, round(ratio), abs_tol=1e-9)


Choices = tuple[Any, ...]
"""As JSON has them: lists for tuples."""
Space = dict[str, Choices | Range]


def parse_space(given: Mapping[str, Any], origin: str) -> Space:
    """The space that a plain mapping describes, with dotted names or with a table for each part."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        own = (
            {f"{key}.{name}": each for name, each in value.items()} if _is_part(key, value) else {key: value}
        )
        flat |= own
    if not flat:
        raise InputError(f"{origin}: the space is empty", fix="name a setting, such as train.l2")
    return {name: _setting(value, f"{origin}: {name}") for name, value in flat.items()}


def _is_part(key: str, value: Any) -> bool:
    return key in PARTS and isinstance(value, Mapping)


def _setting(value: Any, origin: str) -> Choices | Range:
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return parse(Range, dict(value), origin)
    if not isinstance(value, list | tuple):
        raise InputError(f"{origin}: {value!r} is neither a list of choices nor a range of low and high")
    choices: Choices = tuple(json.loads(json.dumps(value)))
    if not choices or any(choice in choices[:at] for at, choice in enumerate(choices)):
        raise InputError(f"{origin}: {list(choices)}: choices must be one or more, each of them once")
    return choices


def plain(space: Space) -> dict[str, Any]:
    """For JSON; `parse_space` reads it back."""
    return {
        name: each.model_dump(exclude_defaults=True) if isinstance(each, Range) else list(each)
        for name, each in space.items()
    }


def named_space(model: str, name: str | None) -> Space:
    """A space from a TOML file, by the dotted name of a mapping, or, without a name, the model's own."""
    if name is None:
        if model not in SPACES:
            raise InputError(f"there is no space of {model} here", fix="give one: --space space.toml")
        return parse_space(SPACES[model], f"the space of {model}")
    if not is_dotted(name) or Path(name).is_file():
        return parse_space(read_toml(Path(name)), name)
    found = load(name, "search space")
    if not isinstance(found, Mapping):
        raise InputError(f"search space {name!r} is no mapping of settings to values")
    return parse_space(found, name)


def check_space(
    space: Space, model: str, model_settings: Mapping[str, Any], train: Mapping[str, Any], origin: str
) -> None:
    """Refuse what no trial could be made of: settings that are not there, and values that they can't have.

    Values that only don't go together are no error: a draw that meets some is left out.
    """
    kinds: dict[str, tuple[type[Frozen], Mapping[str, Any]]] = {
        "model": (config_class(model), model_settings),
        "train": (TrainConfig, train),
    }
    for name, each in space.items():
        part, _, field = name.partition(".")
        if part not in PARTS:
            raise InputError(f"{origin}: {name}: settings are called model.NAME or train.NAME")
        kind, base = kinds[part]
        if field not in kind.model_fields or name == "train.seed":
            known = ", ".join(known for known in kind.model_fields if known != "seed")
            raise InputError(f"{origin}: {name}: no setting to search; known are {known}")
        for value in each.samples() if isinstance(each, Range) else each:
            try:
                kind.model_validate({**base, field: value})
            except ValidationError as error:
                for found in error.errors():
                    if found["loc"][:1] == (field,):
                        raise InputError(f"{origin}: {name}: {found['msg']} (given: {value!r})") from None


_DROPOUT = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
_LAYERS = {"low": 1, "high": 7, "integer": True}
_UNITS = [
    *([400] * layers for layers in (1, 2, 3)), [500] * 3, *([1000] * layers for layers in (2, 3, 4, 5)),
    *([2000] * layers for layers in (2, 3, 4)), [5000] * 2,
]  # fmt: skip
_L2 = {"train.l2": {"low": 1e-9, "high": 0.1, "log": True}}  # as good as none, up to what few values want
_RATE = {"train.learning_rate": {"low": 3e-4, "high": 0.03, "log": True}}
_DEEP = {**_L2, "model.units": _UNITS, "model.dropout": _DROPOUT, "model.batch_norm": [True, False]}
_TOWER = {
    **_L2,
    "model.num_layers": {"low": 1, "high": 6, "integer": True},
    "model.dropout": _DROPOUT,
    "model.scale_norm": [True, False],
}

SPACES: dict[str, dict[str, Any]] = {
    # They hold what was published as tuned, over all data sets; a test sees to it. Vectors have 16 numbers and the rate
    # is 0.001 in nearly all of it, so both are left alone; models without much else have their rate searched.
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
    # The space of its paper; the heads are not stated there.
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
