"""Train a shipped model further on new rows and a sample of earlier ones, with itself and its teachers as teachers.

All weights go on from where they are. A row of a table that belongs to an added value starts from its field's OOV
vector, so the grown model scores as the shipped one does. The parts beside RECAP's towers go on in their own ways: a
logistic regression by convex steps with its earlier rows as the prior, and click rates by counting.

Shapes: N rows, V rows of the shipped table, G rows of the grown one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from recap_ctr.axes.predict import predict
from recap_ctr.axes.routes import Routed
from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.grow import row_map
from recap_ctr.data.layout import Layout
from recap_ctr.data.rare import load_rare
from recap_ctr.data.rates import ENTRIES_PER_VALUE, MIN_ENTRIES, Entries, fields_of
from recap_ctr.data.rates import Rates as Counted
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.torch_backend import PackedModel
from recap_ctr.models.blend import BlendConfig, Parts
from recap_ctr.models.boosted import Boosted, BoostedConfig
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.lr import LR, LRConfig
from recap_ctr.models.rates import Rates, RatesConfig
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.nn.mlp import Wide
from recap_ctr.nn.table import Table
from recap_ctr.nn.weights import load_tensors, save_tensors, to_arrays
from recap_ctr.recipe.config import batch_size
from recap_ctr.recipe.state import (
    PENDING_ROWS,
    REPLAY_ROWS,
    KeptRows,
    Teacher,
    TrainingState,
    count_rows,
    counted_crosses,
    empty_bucket_shares,
    last_seen,
    newest,
    optimizer_state,
    sample,
    unknown_shares,
)
from recap_ctr.storage.arrays import Array
from recap_ctr.storage.files import make_directory
from recap_ctr.training.linear import ALONE, BESIDE, go_on
from recap_ctr.training.loop import STATE, Start, train

TRAINED = "trained.safetensors"
SMALL = 1e-4  # Standard deviation of the random numbers that an untrained table starts from.
Floats = npt.NDArray[np.float64]


class UpdateConfig(Frozen):
    """How an update trains; all other settings come from the recipe of the fit."""

    passes: PositiveInt = 4
    """How often each new row is trained on."""
    replay: NonNegativeFloat = 0.25
    """How many earlier rows are trained on for each new one, in each pass."""
    batch_size: PositiveInt | None = None
    """Rows of a step; by default as many as a fit of so few rows takes, but no more than the recipe's."""
    kd_weight: NonNegativeFloat | None = None
    """The weight of the loss against the shipped model and its teachers; by default the recipe's."""
    horizon: PositiveFloat = 0.25
    """What share of the update the average of the weights spans; it goes on from the shipped weights."""
    memory: float = Field(0.5, gt=0, le=1)
    """How much an earlier row counts against a new one where a logistic regression goes on."""
    refresh: bool = True
    """Whether one of the teachers is trained further, each in its turn."""
    new_rows: Literal["oov", "random"] = "oov"
    """What the vector of an added value starts from: the OOV vector of its field, or small random numbers."""
    forget_after: PositiveFloat | None = None
    """Days after which a value that was not seen again loses its vector."""


@dataclass(frozen=True)
class _Rows:
    """What the one epoch of an update reads."""

    layout: Layout
    train: Shard
    valid: Shard


class Retraining:
    """The training of an update in the directory `work`; what an interrupted update has finished there is read back."""

    def __init__(
        self,
        shipped: PackedModel,
        state: TrainingState,
        config: UpdateConfig,
        data: PreparedData,
        work: Path,
        *,
        quiet: bool,
    ) -> None:
        """Set up the training; `data` are the new rows, encoded with the grown vocabularies."""
        self.shipped, self.state, self.config, self.data = shipped, state, config, data
        self.work, self.quiet = work, quiet
        self.device = torch.device("cpu")
        self.rows = row_map(shipped.encoder, data.encoder)
        self.model_config = _with_rank(shipped.config, shipped.weights)

    # Rows.

    @cached_property
    def fresh(self) -> KeptRows:
        """Return the rows that are trained on for the first time: new ones, and those that were held out before."""
        new = self._with_codes(KeptRows(replace(self.data.train, groups=None)))
        if self.state.pending is None:
            return new
        return self._with_codes(self.state.pending.moved(self.rows)).plus(new)

    @cached_property
    def replay(self) -> KeptRows | None:
        """Return the sample of rows that were trained on before."""
        return None if self.state.replay is None else self.state.replay.moved(self.rows)

    @cached_property
    def epoch(self) -> KeptRows:
        """Return all rows of the one epoch: new ones several times, and replayed ones."""
        return self.each.take(self._order)

    @cached_property
    def each(self) -> KeptRows:
        """Return the rows of the epoch, each of them once: new ones, then those that are replayed."""
        wanted = round(self.config.replay * self.config.passes * len(self.fresh))
        if self.replay is None or not wanted:
            return self.fresh
        return self.fresh.plus(self.replay.take(np.sort(sample(len(self.replay), wanted, self._seed))))

    @property
    def _order(self) -> npt.NDArray[np.int64]:
        """Return which of these rows are those of the epoch."""
        new = np.arange(len(self.fresh))
        return np.concatenate([np.tile(new, self.config.passes), np.arange(len(new), len(self.each))])

    @property
    def _seed(self) -> int:
        return self.state.updates + 2

    def _with_codes(self, rows: KeptRows) -> KeptRows:
        """Return rows with what the shipped model's click rates say of them: their own clicks are not part of that."""
        look_up = _look_up_codes(self.shipped.backbone)
        if look_up is None:
            return rows
        ids_NW = self.shipped_ids_G[np.asarray(rows.shard.ids)]
        with torch.inference_mode():
            parts = [look_up(part) for part in torch.split(torch.from_numpy(ids_NW), 8192)]
        return replace(rows, codes=torch.cat(parts).numpy().astype(np.uint8))

    @cached_property
    def shipped_ids_G(self) -> npt.NDArray[np.int32]:
        """Return the shipped table's row for each row of the grown one; OOV's for what it lacks."""
        return self.rows.source_G.astype(np.int32)

    def _as_input(self, config: Frozen, rows: KeptRows) -> Shard:
        """Return rows as a model takes them in training: with codes of click rates where it has any."""
        if not counted_crosses(config) or rows.codes is None:
            return rows.shard
        if isinstance(config, RatesConfig):
            return replace(rows.shard, ids=np.empty((len(rows), 0), np.int32), values=rows.codes)  # type: ignore[arg-type]
        values = np.concatenate([rows.shard.values, rows.codes], axis=1, dtype=np.float32)
        return replace(rows.shard, values=values)

    # Training.

    def run(self) -> nn.Module:
        """Return the trained model, with the trained rows counted in its click rates."""
        model = self._grown(self.shipped.name, self.model_config, self.shipped.weights)
        file = self.work / TRAINED
        if not file.is_file():
            targets = self._targets(model, self._teach())
            self._move_regression(model)
            if _has_steps(self.model_config):
                start = Start(model.state_dict(), self._moments(model), self.state.steps, _frozen(model))
                model = self._train("student", self.shipped.name, self.model_config, start, targets)
            save_tensors(file, dict(model.state_dict()))
        model.load_state_dict(load_tensors(file)[0])
        return self._counted(model).eval()

    @cached_property
    def training(self) -> TrainConfig:
        """Return the recipe's training, for the one epoch of an update."""
        recorded = self.shipped.manifest["training"]
        values = {key: recorded[key] for key in TrainConfig.model_fields if key in recorded}
        recipe = parse(TrainConfig, values, "the artifact's training")
        changes: dict[str, Any] = {
            # Vectors that no batch of the update needs must stay as they are, and most are of that kind.
            "update": "fast",
            "schedule": "constant",
            "max_epochs": 1,
            "patience": 1,
            "validations": 1,
            "checkpoints": 0,
            "kd_from": "mean",
            "recombined": 0,
            "ema": None,
            "ema_epochs": (self.config.horizon,),
            "seed": recipe.seed + self.state.updates + 1,
        }
        if self.config.kd_weight is not None:
            changes["kd_weight"] = self.config.kd_weight
        size = self.config.batch_size or min(recipe.batch_size, batch_size(len(self.fresh)))
        changes["batch_size"] = size
        return recipe.model_copy(update=changes)

    def _grown(self, name: str, config: Frozen, weights: Mapping[str, Array]) -> nn.Module:
        """Return a model over the grown vocabularies that scores as before: added values are still OOV to it."""
        model = build(name, config, self.data.layout)
        grown = {key: torch.from_numpy(np.array(value)) for key, value in weights.items()}
        for key in _tables(model):
            grown[key] = torch.from_numpy(self.rows.grow(weights[key]))
            # What trees look at is counted or ranked, not learnt.
            if self.config.new_rows == "random" and not key.endswith("figures.weight"):
                generator = torch.Generator().manual_seed(self._seed)
                start = torch.empty_like(grown[key]).normal_(0.0, SMALL, generator=generator)
                is_fresh = torch.from_numpy(self.rows.fresh_G)
                grown[key][is_fresh] = start[is_fresh]
        model.load_state_dict(grown)
        return model.eval()

    def _moments(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the moments of the shipped model's run over the grown vocabularies."""
        tables = {key.removesuffix(".weight") for key in _tables(model)}
        moments = {}
        for name, value in self.state.moments.items():
            kind, _, weight = name.partition(".")
            fill = self.state.steps if kind == "touched" else 0
            grown = self.rows.grow_counters(value, fill) if weight in tables else np.array(value)
            moments[name] = torch.from_numpy(grown)
        return moments

    def _train(
        self,
        stage: str,
        name: str,
        config: Frozen,
        start: Start,
        targets: npt.NDArray[np.float32] | None = None,
    ) -> nn.Module:
        """Train a model for one epoch of new and replayed rows."""
        directory = self.work / stage
        make_directory(directory)
        return train(
            name,
            config,
            self.training,
            _Rows(self.data.layout, self._as_input(config, self.epoch), self.data.valid),
            directory,
            device=self.device,
            targets=targets,
            start=start,
            quiet=self.quiet,
        ).model

    def _move_regression(self, model: nn.Module) -> None:
        """Train a logistic regression further, before the towers learn what it does not explain."""
        wide = model.wide if isinstance(model, LR) else getattr(model, "first_order", None)
        if not isinstance(wide, Wide) or wide.bias is None:
            return
        weights_V = wide.embedding.table.weight.detach().numpy()[:, 0].astype(np.float64)
        alone = LR(LRConfig(), self.data.layout)
        alone.wide = wide
        whole_N = predict(self.routed(model), self._as_input(self.model_config, self.fresh), self.device)
        beside_N = whole_N.astype(np.float64) - predict(alone, self.fresh.shard, self.device)
        moved_V, bias = go_on(
            weights_V,
            float(wide.bias.detach()),
            self.config.memory * self._seen_before(),
            self.fresh.shard,
            self.data.layout,
            beside_N=beside_N,
            strength=ALONE if isinstance(model, LR) else BESIDE,
        )
        with torch.no_grad():
            wide.embedding.table.weight.copy_(torch.from_numpy(moved_V).unsqueeze(1))
            wide.bias.fill_(bias)

    def _seen_before(self) -> Floats:
        """Return how many earlier rows each row of the table comes from, as far as that is known."""
        if self.state.seen_V is not None:
            return self.rows.grow_counters(self.state.seen_V)
        seen_V = np.zeros(self.shipped.encoder.layout.num_rows)
        for fitted, place in zip(
            self.shipped.encoder.fields, self.shipped.encoder.layout.fields, strict=True
        ):
            if len(fitted.values):
                ids = fitted.ids(np.arange(len(fitted.values), dtype=np.int32))
                seen_V[place.offset + ids] = fitted.counts
        return self.rows.grow_counters(seen_V)

    # Teachers.

    def _teach(self) -> list[tuple[nn.Module, float]]:
        """Return the teachers and their shares; one is trained further, and all are kept for the next update."""
        teachers = []
        for number, teacher in enumerate(self.state.teachers):
            config = _with_rank(parse_model(teacher.name, teacher.config), teacher.weights)
            model = self._grown(teacher.name, config, teacher.weights)
            file = self._teacher_file(number)
            if file.is_file():
                model.load_state_dict(load_tensors(file)[0])
            else:
                if self.config.refresh and number == self.state.updates % len(self.state.teachers):
                    model = self._train(f"teacher-{number}", teacher.name, config, Start(model.state_dict()))
                save_tensors(file, dict(model.state_dict()))
            teachers.append((model.eval(), teacher.share))
        return teachers

    def _teacher_file(self, number: int) -> Path:
        return self.work / f"teacher-{number}.safetensors"

    def _targets(self, model: nn.Module, teachers: list[tuple[nn.Module, float]]) -> npt.NDArray[np.float32]:
        """Return σ of the mean logit of the shipped model and of its teachers' mean, for each row of the epoch."""
        rows = self._as_input(self.model_config, self.each)
        logits_N = predict(self.routed(model), rows, self.device).astype(np.float64)
        if teachers:
            total = sum(share for _, share in teachers)
            for teacher, share in teachers:
                logits_N += share / total * predict(teacher, self.each.shard, self.device)
            logits_N /= 2
        return sigmoid(logits_N).astype(np.float32)[self._order]

    def routed(self, model: nn.Module) -> nn.Module:
        """Return the model on the routes that the shipped one averages."""
        return (
            Routed(model, self.shipped.routes) if isinstance(model, Recap) and self.shipped.routes else model
        )

    # Click rates.

    @cached_property
    def _entries(self) -> Entries | None:
        """Return the counts behind the table of click rates, with those of the rows that were trained on."""
        crosses, entries = counted_crosses(self.model_config), self.state.entries
        if not crosses or entries is None:
            return None
        is_gone = np.zeros(len(entries.rows), np.bool_)
        for number, places in enumerate(fields_of(crosses, self.data.layout)):
            for place, ids in zip(places, (entries.left, entries.right), strict=True):
                if place is not None:
                    members = np.flatnonzero(entries.cross == number)
                    is_gone[members] |= self.rows.fresh_G[place.offset + ids[members]]
        new = Counted(self.fresh.shard, self.data.layout).entries(crosses)
        rows = self.data.layout.num_rows
        return entries.take(~is_gone).plus(new, int(max(ENTRIES_PER_VALUE * rows, MIN_ENTRIES)) + rows)

    def _counted(self, model: nn.Module) -> nn.Module:
        """Return the model with the clicks of the trained rows in its click rates."""
        if self._entries is None:
            return model
        config, weights = self.model_config, dict(model.state_dict())
        alone = isinstance(config, RatesConfig | BoostedConfig)
        rates = config if isinstance(config, RatesConfig) else getattr(config, "rates", None)
        boosted = config if isinstance(config, BoostedConfig) else getattr(config, "boosted", None)
        if boosted is not None:
            crosses, pairs = counted_crosses(config), boosted.pairs
            figures = weights["figures.weight" if alone else "boosted.figures.weight"].numpy()
            singles = [cross for cross in boosted.crosses if cross not in pairs]
            self._entries.fill(figures[:, :2], singles, crosses, self.data.layout)
            if pairs and rates is None:
                table = torch.from_numpy(self._entries.only(pairs, crosses).table(self._entries.rate))
                boosted = boosted.model_copy(update={"buckets": len(table)})
                config = boosted if alone else config.model_copy(update={"boosted": boosted})
                weights["table.weight" if alone else "boosted.table.weight"] = table
        if rates is not None:
            table = torch.from_numpy(self._entries.table(self._entries.rate))
            rates = rates.model_copy(update={"buckets": len(table)})
            config = rates if alone else config.model_copy(update={"rates": rates})
            weights["table.weight" if alone else "rates.table.weight"] = table
        counted = build(self.shipped.name, config, self.data.layout)
        counted.load_state_dict(weights)
        return counted

    # What the next update goes on from.

    def next_state(self) -> TrainingState:
        """Return the training state of the trained model."""
        layout, valid = self.data.layout, self.data.valid
        moments, steps = optimizer_state(self.work / "student" / STATE)
        seen_V = self._seen_before() + count_rows(self.fresh.shard, layout)
        return TrainingState(
            steps=self.state.steps + steps,
            updates=self.state.updates + 1,
            rows_seen=self.state.rows_seen + len(self.fresh),
            moments=moments,
            replay=self._next_replay(),
            pending=KeptRows(replace(valid.take(newest(valid, PENDING_ROWS)), groups=None)),
            seen_V=seen_V,
            last_V=self._last_seen(),
            unknown={
                **unknown_shares(self.shipped_ids_G[np.asarray(valid.ids)], self.shipped.encoder.layout),
                **empty_bucket_shares(valid.ids, self.data.encoder, seen_V),
            },
            rare=load_rare(self.data.path, self.data.encoder),
            entries=self._entries,
            teachers=tuple(self._next_teacher(number) for number in range(len(self.state.teachers))),
        )

    def _next_replay(self) -> KeptRows:
        """Return a sample of all rows seen so far, earlier and new ones in proportion."""
        if self.replay is None:
            return self.fresh.take(np.sort(sample(len(self.fresh), REPLAY_ROWS, self._seed)))
        if len(self.replay) + len(self.fresh) <= REPLAY_ROWS:
            return self.replay.plus(self.fresh)
        share = len(self.fresh) / (self.state.rows_seen + len(self.fresh))
        new = min(round(REPLAY_ROWS * share), len(self.fresh))
        kept = self.replay.take(np.sort(sample(len(self.replay), REPLAY_ROWS - new, self._seed)))
        return kept.plus(self.fresh.take(np.sort(sample(len(self.fresh), new, self._seed))))

    def _last_seen(self) -> Floats | None:
        """Return when each value was last seen; where that is not known, the latest moment at which it can have been.

        So no value is forgotten because a record is missing.
        """
        last_V = last_seen([self.data.train, self.data.valid], self.data.layout, self.data.time_unit)
        if last_V is None:
            return None
        if self.state.last_V is None:
            return np.where(np.isfinite(last_V), last_V, last_V[np.isfinite(last_V)].min())
        latest = self.state.last_V[np.isfinite(self.state.last_V)].max()
        return np.maximum(last_V, self.rows.grow_counters(self.state.last_V, latest))

    def _next_teacher(self, number: int) -> Teacher:
        teacher = self.state.teachers[number]
        config = _with_rank(parse_model(teacher.name, teacher.config), teacher.weights)
        weights = to_arrays(load_tensors(self._teacher_file(number))[0])
        return replace(teacher, config=config.model_dump(mode="json"), weights=weights)


def _tables(model: nn.Module) -> list[str]:
    """Return the names of the weights that have a row for each value."""
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Table)]


def _has_steps(config: Frozen) -> bool:
    """Return whether a model has weights that are trained by gradient steps, besides parts that count or converge."""
    if isinstance(config, BlendConfig):
        return config.rates is not None or config.network is not None
    return not isinstance(config, LRConfig | BoostedConfig)


def _frozen(model: nn.Module) -> tuple[str, ...]:
    """Return the parts that an update does not train by steps: a regression has converged before, and trees stay."""
    return tuple(name for name in ("first_order", "boosted") if getattr(model, name, None) is not None)


def _look_up_codes(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what gives the codes of click rates for a batch of ids, if the model counts clicks."""
    parts = (model.rates, model.boosted) if isinstance(model, Parts) else (model,)
    return next((part.codes for part in parts if isinstance(part, Rates | Boosted)), None)


def _with_rank(config: Frozen, weights: Mapping[str, Array]) -> Frozen:
    """Return a config that gives adapters the rank they have: the default one depends on the vocabularies."""
    if isinstance(config, RecapConfig):
        return config.model_copy(update={"lora_rank": weights["exponential.bank.a_ACR"].shape[-1]})
    return config
