"""Settings and results as frozen records: settings are read strictly from TOML, results leniently from JSON."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from recap_ctr.errors import InputError, did_you_mean

F = TypeVar("F", bound="Frozen")
WARMUP = 9.0


class Frozen(BaseModel):
    """A record of settings that can't change. A mistyped name in it is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_toml(self) -> str:
        """Return the settings that differ from their defaults as TOML."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude_defaults=True))


class Record(BaseModel):
    """A record of results that can't change. It reads files of older and newer versions alike.

    Fields that a file does not have keep their defaults, fields that this version does not know are ignored, and
    `to_json` writes only the fields that were set, so that an old file is written back as it was.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return self.model_dump(mode="json", exclude_unset=True)


def parse(kind: type[F], values: Any, origin: str) -> F:
    """Validate `values` as `kind`; the error names the setting, its value, and `origin`, where it came from."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or kind.__name__
        has_value = first["type"] not in ("missing", "extra_forbidden") and first["loc"]
        value = f" (value: {first['input']!r})" if has_value else ""
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "unknown setting"
            if len(first["loc"]) == 1:
                message += (
                    f"; choose from {', '.join(kind.model_fields)}{did_you_mean(name, kind.model_fields)}"
                )
        raise InputError(f"{origin}: {name}: {message}{value}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    if not path.is_file():
        raise InputError(f"no file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def _none_for_zero(value: Any) -> Any:
    """Return None for 0: TOML has no null, and an average with β = 0 is the last weights."""
    return None if value == 0 and not isinstance(value, bool) else value


class TrainConfig(Frozen):
    """How a model is trained. The defaults are the published protocol: FuxiCTR's, as FCN used it."""

    batch_size: PositiveInt = 4096
    """Rows of one step."""
    learning_rate: PositiveFloat = 1e-3
    """Adam's step size."""
    l2: NonNegativeFloat = 1e-5
    """Strength of the embedding regulariser, l2/2 · ||table||²."""
    net_l2: NonNegativeFloat = 0.0
    """Strength of the same regulariser for all other weights; hardly any published run uses it."""
    clip: PositiveFloat = 10.0
    """Largest global gradient norm."""
    update: Literal["exact", "fast", "convex"] = "exact"
    """`exact`: dense Adam over whole tables. `fast`: only the rows of the batch; see docs/decisions/0003. `convex`, for
    lr alone: L-BFGS to convergence, at the strength that is best on validation; l2, rate and epochs play no part."""
    schedule: Literal["plateau", "cosine", "constant"] = "plateau"
    """How the learning rate changes: `plateau` lowers it after an epoch without a better validation AUC."""
    max_epochs: PositiveInt = 100
    """Passes over the training rows, at most."""
    patience: PositiveInt = 2
    """Stop after this many epochs in a row without a better validation AUC."""
    validations: PositiveInt = 1
    """How often an epoch is validated, at even distances: more than once where an epoch is long."""
    plateau_factor: PositiveFloat = 0.1
    """What the plateau rule multiplies the learning rate by."""
    min_learning_rate: NonNegativeFloat = 1e-6
    """Lowest learning rate of the schedules."""
    ema: Annotated[float | None, BeforeValidator(_none_for_zero)] = Field(None, gt=0, lt=1)
    """β of Eq. 10; the averaged weights are then what is validated, selected and shipped. 0: no average."""
    ema_epochs: tuple[PositiveFloat, ...] = ()
    """Horizons of such averages in epochs, instead of β. All are kept; validation selects the best."""
    ema_warmup: NonNegativeFloat = WARMUP
    """Early in training an average spans at most this fraction, 1 / ema_warmup, of the steps so far. 0: β holds from
    the first step on, as Eq. 10 is written, and the average remembers the random start for long."""
    checkpoints: NonNegativeInt = 0
    """Keep the raw weights of this many last epochs: estimators of the trajectory axis."""
    kd_weight: NonNegativeFloat = 1.0
    """λ_KD of Eq. 13: the weight of the loss against the teachers' mean, where there are teachers."""
    kd_from: Literal["mean", "column"] = "mean"
    """What a student learns from: its teachers' mean logit (Eq. 12), or, for RECAP whose rows have columns of their own
    (sampling `fixed`), column m from teacher m, so that the columns keep what the teachers disagree in."""
    recombined: NonNegativeInt = 0
    """Recombined rows for each training row, from which a student learns by its teachers' logits alone. Both come in
    one random order; an epoch has as many steps as without them, so that a student passes over fewer real rows."""
    window_rows: NonNegativeInt | None = None
    """Rows that are shuffled together in memory, while the next are read. 0: all rows. None: 1,048,576 where training
    rows take more than 16 GiB or half of the machine's memory, otherwise all; see docs/decisions/0031."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: matrix products with 8 bits of mantissa (autocast), for GPUs; weights stay in 32 bits."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seed of everything random: initial weights, order of rows, dropout, routes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "plateau" and self.plateau_factor >= 1:
            raise ValueError("plateau_factor must be below 1")
        if self.ema is not None and self.ema_epochs:
            raise ValueError("set the horizon of the average as ema or as ema_epochs, not as both")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop settings that are newer than the run directories named after these values, if they are at their default.

        A run's directory is named after its settings, so a new setting must not rename the runs of older versions.
        """
        later = {
            "ema_warmup": WARMUP,
            "net_l2": 0.0,
            "validations": 1,
            "kd_from": "mean",
            "recombined": 0,
            "window_rows": None,
            "precision": "float32",
        }
        return {key: value for key, value in dump(self).items() if later.get(key, ...) != value}

    def with_horizons(self, factor: float) -> Self:
        """Return the config with averages that span `factor` times as much of the run, from its first epochs on."""
        longer = {"ema_epochs": tuple(factor * epochs for epochs in self.ema_epochs)}
        return self.model_copy(update={**longer, "ema_warmup": self.ema_warmup / factor})
