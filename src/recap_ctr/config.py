"""Settings as frozen, strict records, read from TOML and written back to it."""

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

from recap_ctr.errors import InputError

F = TypeVar("F", bound="Frozen")
WARMUP = 9.0


class Frozen(BaseModel):
    """A record that can't change and knows every name in it: a mistyped setting is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude_defaults=True))


def parse(kind: type[F], values: Any, origin: str) -> F:
    """Validate `values` as `kind`; the message names the setting, what it was, and where it came from."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or kind.__name__
        given = (
            ""
            if first["type"] in ("missing", "extra_forbidden") or not first["loc"]
            else f" (given: {first['input']!r})"
        )
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = (
                f"unknown setting; known are {', '.join(kind.model_fields)}"
                if len(first["loc"]) == 1
                else "unknown setting"
            )
        raise InputError(f"{origin}: {name}: {message}{given}") from None


def read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"no file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def _none_for_zero(value: Any) -> Any:
    """TOML has no null, and an average with β = 0 is the last weights."""
    return None if value == 0 and not isinstance(value, bool) else value


class TrainConfig(Frozen):
    """How a model is trained; the defaults are the published protocol (FuxiCTR's, as FCN used it)."""

    batch_size: PositiveInt = 4096
    learning_rate: PositiveFloat = 1e-3
    l2: NonNegativeFloat = 1e-5
    """Strength of the embedding regulariser, l2/2 · ||table||²."""
    net_l2: NonNegativeFloat = 0.0
    """The same for all other weights; hardly any published run has it."""
    clip: PositiveFloat = 10.0
    """Largest global gradient norm."""
    update: Literal["exact", "fast"] = "exact"
    """`exact`: dense Adam over whole tables. `fast`: only the rows of the batch; see docs/decisions/0003."""
    schedule: Literal["plateau", "cosine", "constant"] = "plateau"
    max_epochs: PositiveInt = 100
    patience: PositiveInt = 2
    """Stop after this many epochs in a row without a better validation AUC."""
    plateau_factor: PositiveFloat = 0.1
    min_learning_rate: NonNegativeFloat = 1e-6
    ema: Annotated[float | None, BeforeValidator(_none_for_zero)] = Field(None, gt=0, lt=1)
    """β of Eq. 10; the averaged weights are then what is validated, selected and shipped. 0: no average."""
    ema_epochs: tuple[PositiveFloat, ...] = ()
    """Horizons of such averages in epochs, instead of β; each is kept, and the best on validation selected."""
    ema_warmup: PositiveFloat = WARMUP
    """While training is young, an average spans one part in so many of the steps so far, however long its horizon."""
    checkpoints: NonNegativeInt = 0
    """Keep the raw weights of this many last epochs: estimators of the trajectory axis."""
    kd_weight: NonNegativeFloat = 1.0
    """λ_KD of Eq. 13: the weight of the loss against the teachers' mean, where there are teachers."""
    seed: int = Field(1, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "plateau" and self.plateau_factor >= 1:
            raise ValueError("plateau_factor must be below 1")
        if self.ema is not None and self.ema_epochs:
            raise ValueError("give the horizon of the average as ema or as ema_epochs, not as both")
        return self

    @model_serializer(mode="wrap")
    def _plain(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what came later and is as ever: runs are named after their settings, and older ones knew no other."""
        later = {"ema_warmup": WARMUP, "net_l2": 0.0}
        return {key: value for key, value in dump(self).items() if later.get(key, ...) != value}

    def with_horizons(self, factor: float) -> Self:
        """Averages that span so much more of the run, in its first epochs as well."""
        longer = {"ema_epochs": tuple(factor * epochs for epochs in self.ema_epochs)}
        return self.model_copy(update={**longer, "ema_warmup": self.ema_warmup / factor})
