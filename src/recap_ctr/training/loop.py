"""The training loop.

Every random number of step t derives from (seed, t), and the order of epoch e from (seed, e). So a run is a function
of its inputs: killed at any moment and resumed from its last state, it ends with the same bits.

Several workers train as one: each takes its share of every batch, and they do all else together (`nn/group.py`).
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from recap_ctr.axes.predict import predict, to_inputs
from recap_ctr.axes.trajectory import MovingAverage, beta_of, restore_statistics
from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.shards import Rows
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs.machine import compute_reproducibly, keep_freed_memory
from recap_ctr.jobs.progress import announce_epoch, meter, say
from recap_ctr.models.catalogue import build
from recap_ctr.nn.device import is_host, seed
from recap_ctr.nn.group import current_group, refuse_parts_of_torch
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.losses import LOSSES, distillation
from recap_ctr.nn.weights import opened
from recap_ctr.training import checkpoint
from recap_ctr.training.ahead import Batches, Place, batches_of
from recap_ctr.training.feed import Feed, Targets, choose_window, derive_seed, feed_of
from recap_ctr.training.optimizer import Update
from recap_ctr.training.pool import Pool, with_pool
from recap_ctr.training.record import DIVERGED, StepRecord, require_finite
from recap_ctr.training.report import Epoch, PartGain

STATE, BEST = "state.safetensors", "best.safetensors"
SAVE_SECONDS = 60.0
READ_STEPS = 32  # Steps of a GPU after which their losses are read together.
MIN_GAIN = 1e-6
STATISTICS_ROWS = 65_536
_INITIAL, _STATISTICS = 2**40, 2**42  # Streams of random numbers apart from the steps' and the order's.


def checkpoint_file(directory: Path, step: int) -> Path:
    """Return where the raw weights after `step` are kept."""
    return directory / f"checkpoint-{step}.safetensors"


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return the steps and files of the raw weights that a run kept, oldest first."""
    files = directory.glob("checkpoint-*.safetensors")
    return sorted((int(file.stem.removeprefix("checkpoint-")), file) for file in files)


@dataclass
class Progress:
    """How far a run has come. Together with the tensors saved next to it, this is all that resuming needs."""

    step: int = 0
    learning_rate: float = 0.0
    loss_sum: float = 0.0
    best_auc: float = -math.inf
    best_epoch: int = 0
    stalls: int = 0
    finished: bool = False
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the progress as JSON text."""
        history = [epoch.model_dump() for epoch in self.history]
        return json.dumps(vars(self) | {"history": history, "best_auc": self.best_auc if history else None})

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        """Return the progress that `to_json` wrote."""
        values = json.loads(text)
        best_auc = -math.inf if values["best_auc"] is None else values["best_auc"]
        history = [Epoch(**epoch) for epoch in values["history"]]
        return cls(**{**values, "best_auc": best_auc, "history": history})


@dataclass(frozen=True)
class Trained:
    """The selected weights, and how the run went."""

    model: nn.Module
    history: list[Epoch]
    best_epoch: int
    seconds: float
    finished: bool = True
    """Whether the schedule stopped the run; if not, it can go on."""
    parts: PartGain | None = None
    """The proportions of a model that is made of finished ones."""
    strength: float | None = None
    """The strength of a converged regression."""


@runtime_checkable
class ByEpoch(Protocol):
    """A model whose training changes with the epoch, counted from 0."""

    epoch: int

    def begin_epoch(self) -> None:
        """Prepare for the epoch that `epoch` names."""
        ...


@dataclass(frozen=True)
class Start:
    """What a run starts from, unless it starts from random weights."""

    weights: Mapping[str, Tensor]
    """Weights that it lacks start at random."""
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    """Adam's moments of an earlier run, which go on."""
    steps: int = 0
    """How many steps these moments come from."""
    frozen: tuple[str, ...] = ()
    """Parts of the model that are not trained, by name."""


class Trainer:
    """A run in memory: the model, its update, and the state of its schedule."""

    def __init__(
        self,
        name: str,
        model_config: Frozen,
        config: TrainConfig,
        data: Rows,
        device: torch.device,
        targets: Targets | None = None,
        start: Start | None = None,
        length: float | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Build the model and its update; `targets` are the teachers' probabilities, one for each training row.

        The rows of a `pool` are mixed with the training rows; an epoch has as many steps as these alone would fill.
        With a `length`, in epochs, the run ends there with the weights that it then has, and selects none by
        validation.
        """
        keep_freed_memory()
        compute_reproducibly(device.type)
        self.config, self.data, self.device = config, data, device
        self.group = current_group()
        self.taught, self.targets = with_pool(data.train, targets, pool, config.kd_weight)
        """All rows to learn from: the training rows, and those of the pool."""
        self.window_rows = choose_window(self.taught, config, self.group)
        seed(derive_seed(config.seed, _INITIAL), device)
        self.model = build(name, model_config, data.layout)
        self.start = start or Start({})
        self.model.load_state_dict({**self.model.state_dict(), **self.start.weights})
        for part in self.start.frozen:
            self.model.get_submodule(part).requires_grad_(False)
        self.model.to(device)
        self.rows = checkpoint.TableRows(self.model)
        if self.group.size > 1:
            refuse_parts_of_torch(self.model)
        loss_name = str(self.model.config.loss)  # type: ignore[union-attr]
        self.loss, self.distillation = LOSSES[loss_name], distillation(loss_name)
        self.steps_per_epoch = -(-len(data.train) // config.batch_size)
        self.steps_per_pass = -(-len(self.taught) // config.batch_size)
        parts = min(config.validations, self.steps_per_epoch)
        self.validated_at = [self.steps_per_epoch * part // parts for part in range(1, parts + 1)]
        """The steps of an epoch after which the model is validated; the last one ends the epoch."""
        self.last_step = None if length is None else max(round(length * self.steps_per_epoch), 1)
        betas = [beta_of(epochs, self.steps_per_epoch) for epochs in config.ema_epochs]
        if config.ema is not None:
            betas = [config.ema]
        self.averages = [
            MovingAverage(self.model, beta, lazy=config.update == "fast", warmup=config.ema_warmup)
            for beta in betas
        ]
        self.update = Update(self.model, config, self.averages)
        if self.start.steps:
            self.update.start_from(self.start.moments, self.start.steps)
        self.progress, self.record = Progress(learning_rate=config.learning_rate), StepRecord()
        self.selected = self.model
        """The model that is validated and shipped: the best average, or the model itself without averages."""

    @cached_property
    def feed(self) -> Feed:
        """Return the rows in the order of training. Call this only when it is known where the run goes on."""
        return feed_of(self.taught, self.config, self.targets, self.group, self.window_rows)

    @cached_property
    def batches(self) -> Batches:
        """Return the same rows on the device."""
        num_steps = self.last_step or self.config.max_epochs * self.steps_per_epoch
        return batches_of(self.feed, self.device, self._place_of, num_steps)

    def step(self) -> int:
        """Update the weights on the next batch, and return its number of rows."""
        epoch, at = divmod(self.progress.step, self.steps_per_epoch)
        self._enter(epoch, begins=at == 0)
        num_rows = self._rows_of(self.progress.step)
        self.group.enter_batch(num_rows)
        rows = self.batches.take(self.progress.step)
        seed(derive_seed(self.config.seed, self.progress.step), self.device)
        self.model.train()
        with self._autocast():
            output = self.model(rows.inputs)
            loss = self.loss(output, rows.labels_B, rows.weights_B)
            if rows.targets_B is not None:  # Eq. 13
                distilled = self.distillation(output, rows.targets_B, rows.weights_B)
                loss = loss + self.config.kd_weight * distilled
        loss.backward()  # type: ignore[no-untyped-call]
        number = self.progress.step + 1
        if is_host(self.device):  # Before any weight changes.
            require_finite("loss", loss.item(), number)
        self.update.step(self.learning_rate())
        self.record.add(number, loss, self.update.norm)
        self.progress.step = number
        if is_host(self.device) or len(self.record) >= READ_STEPS:
            self.read_record()
        return num_rows

    def _autocast(self) -> AbstractContextManager[object]:
        """Let matrix products have the precision that the settings name."""
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def read_record(self) -> None:
        """Add up the losses of steps whose numbers were not read yet; refuse the first step that is not finite."""
        self.progress.loss_sum += self.record.read()

    @property
    def mean_loss(self) -> float:
        """Return the mean loss since the last validation, of the steps that were read."""
        return self.progress.loss_sum / max(self.steps_since_validation - len(self.record), 1)

    def _place_of(self, step: int) -> Place:
        """Return where the rows of a step are, in which pass over all of them."""
        return Place(*divmod(step, self.steps_per_pass), self.group.share(self._rows_of(step)))

    def _rows_of(self, step: int) -> int:
        """Return how many rows a step has: the last one of a pass may have fewer."""
        size = self.config.batch_size
        return min(size, len(self.taught) - step % self.steps_per_pass * size)

    def _enter(self, epoch: int, *, begins: bool) -> None:
        """Tell models that change with the epoch which one it is."""
        for model in (self.model, *(average.model for average in self.averages)):
            if isinstance(model, ByEpoch):
                model.epoch = epoch
                if begins:
                    model.begin_epoch()

    def steps_to_validation(self) -> int:
        """Return how many steps are left until the model is validated."""
        if self.last_step is not None:
            return self.last_step - self.progress.step
        at = self.progress.step % self.steps_per_epoch
        return next(step for step in self.validated_at if step > at) - at

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        if self.config.schedule != "cosine":
            return self.progress.learning_rate
        share = self.progress.step / (self.steps_per_epoch * self.config.max_epochs)
        low = self.config.min_learning_rate
        return low + (self.config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * share))

    @property
    def steps_since_validation(self) -> int:
        """Return how many steps the weights have had since they were last validated."""
        return self.progress.step - (self.progress.history[-1].step if self.progress.history else 0)

    def end_epoch(self, seconds: float) -> bool:
        """Validate, then let the schedule decide; return whether this is the best epoch so far.

        With several validations an epoch, each counts as an epoch here.
        """
        progress, config = self.progress, self.config
        self.read_record()
        (auc, loss), beta, self.selected = max(
            ((self.validate(model), beta, model) for beta, model in self._candidates()),
            key=lambda candidate: candidate[0][0],
        )
        epoch = len(progress.history) + 1
        progress.history.append(
            Epoch(
                epoch=epoch,
                step=progress.step,
                learning_rate=self.learning_rate(),
                train_loss=self.mean_loss,
                valid_auc=auc,
                valid_logloss=loss,
                beta=beta,
                seconds=seconds,
                raw_auc=self.validate(self.model)[0] if self.averages else None,
            )
        )
        progress.loss_sum = 0.0
        better = auc >= progress.best_auc + MIN_GAIN
        if better:
            progress.best_auc, progress.best_epoch, progress.stalls = auc, epoch, 0
        else:
            progress.stalls += 1
            if config.schedule == "plateau":
                lowered = progress.learning_rate * config.plateau_factor
                progress.learning_rate = max(lowered, config.min_learning_rate)
        progress.finished = self._is_finished()
        return better

    def _is_finished(self) -> bool:
        if self.last_step is not None:
            return self.progress.step >= self.last_step
        return (
            self.progress.stalls >= self.config.patience * len(self.validated_at)
            or self.progress.step >= self.config.max_epochs * self.steps_per_epoch
        )

    def _candidates(self) -> Iterator[tuple[float | None, nn.Module]]:
        """Yield the models that an epoch may select, each ready to predict, with the β of its average."""
        if not self.averages:
            yield None, self.model
        for average in self.averages:
            model = average.settle()
            seed(derive_seed(self.config.seed, _STATISTICS), self.device)
            restore_statistics(model, self._statistics_batches())
            yield average.beta, model

    def _statistics_batches(self) -> Iterator[Inputs]:
        """Yield the same random training rows each time, in batches like those of training."""
        generator = np.random.default_rng(derive_seed(self.config.seed, _STATISTICS))
        total, size = len(self.data.train), self.config.batch_size
        rows = generator.choice(total, min(total, max(STATISTICS_ROWS // size, 1) * size), replace=False)
        for start in range(0, len(rows) - 1, size):  # A last batch of one row has no variance.
            batch = np.sort(rows[start : start + size])
            yield to_inputs(self.data.train.batch(batch[self.group.enter_batch(len(batch))]), self.device)

    def validate(self, model: nn.Module) -> tuple[float, float]:
        """Return AUC and logloss on the validation rows."""
        valid = self.data.valid
        logits = predict(model, valid, self.device)
        if not np.isfinite(logits).all():
            raise InputError(f"logits are no longer finite after step {self.progress.step}", fix=DIVERGED)
        return (
            metrics.auc(valid.labels, logits, valid.weights),
            metrics.logloss(valid.labels, logits, valid.weights),
        )

    def save(self, directory: Path) -> None:
        """Save all that resuming needs, if its numbers are finite."""
        self.read_record()
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"update.{name}": value for name, value in self.update.state().items()}
        for at, average in enumerate(self.averages):
            tensors |= {f"average.{at}.{name}": value for name, value in average.state().items()}
        metadata = {
            "progress": self.progress.to_json(),
            "torch": torch.__version__,
            "window_rows": str(self.window_rows),
        }
        checkpoint.save(directory / STATE, tensors, self.rows, metadata)

    def save_selected(self, directory: Path) -> None:
        """Save the weights that the last validation selected."""
        checkpoint.save(directory / BEST, self.selected.state_dict(), self.rows, {})

    def load_selected(self, directory: Path) -> nn.Module:
        """Return the model with the best weights that `save_selected` wrote."""
        self.selected.load_state_dict(checkpoint.Saved(directory / BEST, self.rows))
        return self.selected.eval()

    def keep_checkpoint(self, directory: Path) -> None:
        """Save the raw weights of the epoch that just ended, and drop those that are too old."""
        epoch, kept = len(self.progress.history), self.config.checkpoints
        if kept:
            checkpoint.save_whole(checkpoint_file(directory, self.progress.step), self.model)
            if epoch > kept and self.group.is_first:
                checkpoint_file(directory, self.progress.history[epoch - kept - 1].step).unlink(
                    missing_ok=True
                )

    def resume(self, directory: Path) -> None:
        """Go on from the state that `save` wrote."""
        saved = checkpoint.Saved(directory / STATE, self.rows)
        if saved.metadata["torch"] != torch.__version__:
            raise InputError(
                f"{directory} was begun with torch {saved.metadata['torch']}, this is {torch.__version__}",
                fix="go on with that version, or start over in another --out",
            )
        # A machine with more memory would choose another order.
        self.window_rows = int(saved.metadata.get("window_rows", "0"))
        self.progress = Progress.from_json(saved.metadata["progress"])
        self.progress.finished = self._is_finished()  # It may go on if it now has more epochs.
        self.model.load_state_dict(saved.under("model."))
        self.update.load(saved.under("update."), self.start.steps + self.progress.step)
        for at, average in enumerate(self.averages):
            average.load(saved.under(f"average.{at}."))


def is_begun(directory: Path) -> bool:
    """Return whether a run has saved a state with a validation behind it, so that there are weights to pack."""
    if not (directory / STATE).is_file() or not (directory / BEST).is_file():
        return False
    return bool(_read_progress(directory).history)


def trained_seconds(directory: Path) -> float:
    """Return how long a run has been trained so far."""
    return _read_progress(directory).seconds if (directory / STATE).is_file() else 0.0


def _read_progress(directory: Path) -> Progress:
    with opened(directory / STATE) as file:
        return Progress.from_json(file.metadata()["progress"])


def train(
    name: str,
    model_config: Frozen,
    config: TrainConfig,
    data: Rows,
    out: Path,
    *,
    device: torch.device,
    targets: Targets | None = None,
    start: Start | None = None,
    length: float | None = None,
    pool: Pool | None = None,
    until: int | None = None,
    deadline: float | None = None,
    quiet: bool = False,
    on_step: Callable[[int], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Trained:
    """Train in the directory `out`, from its saved state if there is one, until the schedule stops the run.

    `until` is an epoch to pause after, and `deadline` a time (of `time.time`) to pause at; a later call goes on from
    there. There is always a validation before a pause, so that there are weights to go on with. `on_step` is called
    with the number of each step, `on_epoch` with each epoch once its state is saved, after resuming also with the
    epochs before. An exception that `on_epoch` raises stops the run, which can be resumed. `length` sets the end of a
    run in advance; for that and the `pool` see `Trainer`.
    """
    trainer = Trainer(name, model_config, config, data, device, targets, start, length, pool)
    group = trainer.group
    quiet = quiet or not group.is_first
    if (out / STATE).is_file():
        trainer.resume(out)
        if not quiet and not trainer.progress.finished:
            say(f"resuming after step {trainer.progress.step:,}")
    progress = trainer.progress
    if trainer.window_rows and not quiet and not progress.finished:
        say(
            f"rows are read in random windows of {trainer.window_rows:,}; --window 0 shuffles all of them at once"
        )

    def tell(epoch: Epoch) -> None:
        if group.is_first:
            announce_epoch(str(out), epoch.model_dump())
        if on_epoch is not None:
            on_epoch(epoch)

    for past in progress.history:
        tell(past)
    pause_after = math.inf if until is None else until * trainer.steps_per_epoch
    lasted = 0.0
    while not progress.finished and progress.step < pause_after:
        begun = time.time()
        if deadline is not None and progress.history and group.decide(begun + lasted > deadline):
            break
        rate = _train_epoch(trainer, out, deadline, quiet=quiet, on_step=on_step)
        lasted = time.time() - begun
        if rate is None:
            break
        epoch = progress.history[-1]
        if not quiet:
            say(
                f"epoch {epoch.epoch}: train loss {epoch.train_loss:.4f}, valid AUC {epoch.valid_auc:.5f},"
                f" valid logloss {epoch.valid_logloss:.5f}, learning rate {epoch.learning_rate:.1e},"
                f" {rate:,.0f} rows/s, {epoch.seconds:.1f} s"
                + (" *" if progress.best_epoch == epoch.epoch else "")
            )
        tell(epoch)
    model = trainer.load_selected(out)
    return Trained(model, progress.history, progress.best_epoch, progress.seconds, progress.finished)


def _train_epoch(
    trainer: Trainer,
    out: Path,
    deadline: float | None,
    *,
    quiet: bool,
    on_step: Callable[[int], None] | None,
) -> float | None:
    """Train until the next validation, validate and save; return the rows per second.

    If the deadline comes first, save and return None; but validate if that was never done.
    """
    progress, steps, group = trainer.progress, trainer.steps_to_validation(), trainer.group
    started = saved = time.monotonic()
    title = f"epoch {progress.step // trainer.steps_per_epoch + 1}"
    with meter(title, steps, "rows", quiet=quiet) as shown:
        for index in range(steps):
            rows = trainer.step()
            auc = f", valid AUC {progress.history[-1].valid_auc:.5f}" if progress.history else ""
            shown.advance(rows, 1, f"loss {trainer.mean_loss:.4f}{auc}")
            if on_step is not None:
                on_step(progress.step)
            if index + 1 == steps:
                break
            if group.decide(time.monotonic() - saved > SAVE_SECONDS):
                progress.seconds += time.monotonic() - saved
                trainer.save(out)
                saved = time.monotonic()
            if deadline is not None and group.decide(time.time() > deadline):
                if not progress.history:
                    break
                progress.seconds += time.monotonic() - saved
                trainer.save(out)
                return None
    if trainer.end_epoch(time.monotonic() - started):
        trainer.save_selected(out)
    trainer.keep_checkpoint(out)
    progress.seconds += time.monotonic() - saved
    trainer.save(out)
    return shown.rate
