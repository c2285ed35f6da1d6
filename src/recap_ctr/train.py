"""The training loop.

Every random number of step t derives from (seed, t), and the order of epoch e from (seed, e). So a run is a function
of its inputs: killed at any moment and resumed from its last state, it ends with the same bits.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recap_ctr import metrics
from recap_ctr.axes.trajectory import MovingAverage
from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.environment import keep_freed_memory
from recap_ctr.errors import InputError
from recap_ctr.losses import LOSSES, distillation
from recap_ctr.models import build
from recap_ctr.nn.weights import load_tensors, save_tensors
from recap_ctr.predict import predict, to_inputs
from recap_ctr.progress import meter, say
from recap_ctr.update import DIVERGED, Update

STATE, BEST = "state.safetensors", "best.safetensors"
SAVE_SECONDS = 60.0
MIN_GAIN = 1e-6
_INITIAL, _ORDER = 2**40, 2**41  # streams apart from the steps'


def derive_seed(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Epoch:
    """One line of a run's history."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    valid_auc: float
    valid_logloss: float
    seconds: float


@dataclass
class Progress:
    """Where a run stands; with the tensors beside it, all that resuming needs."""

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
        return json.dumps(asdict(self) | {"best_auc": self.best_auc if self.history else None})

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        values = json.loads(text)
        best = -math.inf if values["best_auc"] is None else values["best_auc"]
        return cls(**{**values, "best_auc": best, "history": [Epoch(**line) for line in values["history"]]})


@dataclass(frozen=True)
class Trained:
    """The selected weights, and how the run went."""

    model: nn.Module
    history: list[Epoch]
    best_epoch: int
    seconds: float


class Trainer:
    """A run in memory: the model, its update, and the state of its schedule."""

    def __init__(
        self,
        name: str,
        model_config: Frozen,
        config: TrainConfig,
        data: PreparedData,
        device: torch.device,
        targets: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """`targets` are the teachers' probabilities, one for each training row, if there are teachers."""
        keep_freed_memory()
        self.config, self.data, self.device, self.targets = config, data, device, targets
        torch.manual_seed(derive_seed(config.seed, _INITIAL))
        self.model = build(name, model_config, data.layout).to(device)
        loss_name = str(self.model.config.loss)  # type: ignore[union-attr]
        self.loss, self.distillation = LOSSES[loss_name], distillation(loss_name)
        fast = config.update == "fast"
        self.average = None if config.ema is None else MovingAverage(self.model, config.ema, lazy=fast)
        self.update = Update(self.model, config, self.average)
        self.progress = Progress(learning_rate=config.learning_rate)
        self.steps_per_epoch = -(-len(data.train) // config.batch_size)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def selected(self) -> nn.Module:
        """The model that is validated and shipped: the average where there is one."""
        return self.model if self.average is None else self.average.settle()

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng(derive_seed(self.config.seed, _ORDER + epoch))
            self._order = epoch, generator.permutation(len(self.data.train))
        return self._order[1]

    def step(self) -> int:
        """One update on the next batch; returns its number of rows."""
        epoch, at = divmod(self.progress.step, self.steps_per_epoch)
        size = self.config.batch_size
        rows = self.order(epoch)[at * size : (at + 1) * size]
        batch = self.data.train.batch(rows)
        torch.manual_seed(derive_seed(self.config.seed, self.progress.step))
        self.model.train()
        labels_B = torch.from_numpy(batch.labels_B).to(self.device)
        weights_B = None if batch.weights_B is None else torch.from_numpy(batch.weights_B).to(self.device)
        output = self.model(to_inputs(batch, self.device))
        loss = self.loss(output, labels_B, weights_B)
        if self.targets is not None:  # Eq. 13
            targets_B = torch.from_numpy(self.targets[rows]).to(self.device)
            loss = loss + self.config.kd_weight * self.distillation(output, targets_B, weights_B)
        loss.backward()  # type: ignore[no-untyped-call]
        value = loss.item()
        if not math.isfinite(value):
            raise InputError(
                f"the loss became {value} at step {self.progress.step + 1}",
                fix=DIVERGED,
            )
        self.update.step(self._learning_rate())
        self.progress.step += 1
        self.progress.loss_sum += value
        return len(batch.labels_B)

    def _learning_rate(self) -> float:
        if self.config.schedule != "cosine":
            return self.progress.learning_rate
        share = self.progress.step / (self.steps_per_epoch * self.config.max_epochs)
        low = self.config.min_learning_rate
        return low + (self.config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * share))

    def end_epoch(self, seconds: float) -> bool:
        """Validate, then let the schedule decide; true if this is the best epoch so far."""
        progress, config, valid = self.progress, self.config, self.data.valid
        logits = predict(self.selected, valid, self.device)
        if not np.isfinite(logits).all():
            raise InputError(f"logits are no longer finite after step {progress.step}", fix=DIVERGED)
        auc = metrics.auc(valid.labels, logits, valid.weights)
        loss = metrics.logloss(valid.labels, logits, valid.weights)
        epoch = len(progress.history) + 1
        rate, train_loss = self._learning_rate(), progress.loss_sum / self.steps_per_epoch
        progress.history.append(Epoch(epoch, progress.step, rate, train_loss, auc, loss, seconds))
        progress.loss_sum = 0.0
        better = auc >= progress.best_auc + MIN_GAIN
        if better:
            progress.best_auc, progress.best_epoch, progress.stalls = auc, epoch, 0
        else:
            progress.stalls += 1
            if config.schedule == "plateau":
                lowered = progress.learning_rate * config.plateau_factor
                progress.learning_rate = max(lowered, config.min_learning_rate)
        progress.finished = progress.stalls >= config.patience or epoch >= config.max_epochs
        return better

    def save(self, directory: Path) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"update.{name}": value for name, value in self.update.state().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.state().items()}
        save_tensors(
            directory / STATE, tensors, {"progress": self.progress.to_json(), "torch": torch.__version__}
        )

    def resume(self, directory: Path) -> None:
        tensors, metadata = load_tensors(directory / STATE)
        if metadata["torch"] != torch.__version__:
            raise InputError(
                f"{directory} was begun with torch {metadata['torch']}, this is {torch.__version__}",
                fix="go on with the version it was begun with, or start over in another --out",
            )

        def part(prefix: str) -> dict[str, Any]:
            return {
                name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
            }

        self.progress = Progress.from_json(metadata["progress"])
        self.model.load_state_dict(part("model."))
        self.update.load(part("update."), self.progress.step)
        if self.average is not None:
            self.average.load(part("average."))


def train(
    name: str,
    model_config: Frozen,
    config: TrainConfig,
    data: PreparedData,
    out: Path,
    *,
    device: torch.device,
    targets: npt.NDArray[np.float32] | None = None,
    quiet: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Trained:
    """Train in the directory `out`, from its saved state if there is one, until the schedule says stop."""
    trainer = Trainer(name, model_config, config, data, device, targets)
    if (out / STATE).is_file():
        trainer.resume(out)
        if not quiet and not trainer.progress.finished:
            say(f"resuming after step {trainer.progress.step:,}")
    progress, steps = trainer.progress, trainer.steps_per_epoch
    while not progress.finished:
        began = saved = time.monotonic()
        epoch = progress.step // steps + 1
        with meter(f"epoch {epoch}", steps, "rows", quiet=quiet) as shown:
            for at in range(progress.step % steps, steps):
                rows = trainer.step()
                auc = f", valid AUC {progress.history[-1].valid_auc:.5f}" if progress.history else ""
                shown.advance(rows, 1, f"loss {progress.loss_sum / (at + 1):.4f}{auc}")
                if on_step is not None:
                    on_step(progress.step)
                if at + 1 < steps and time.monotonic() - saved > SAVE_SECONDS:
                    progress.seconds += time.monotonic() - saved
                    trainer.save(out)
                    saved = time.monotonic()
        if trainer.end_epoch(time.monotonic() - began):
            save_tensors(out / BEST, dict(trainer.selected.state_dict()))
        progress.seconds += time.monotonic() - saved
        trainer.save(out)
        if not quiet:
            line = progress.history[-1]
            say(
                f"epoch {line.epoch}: train loss {line.train_loss:.4f}, valid AUC {line.valid_auc:.5f},"
                f" valid logloss {line.valid_logloss:.5f}, learning rate {line.learning_rate:.1e},"
                f" {shown.rate:,.0f} rows/s, {line.seconds:.1f} s"
                + (" *" if progress.best_epoch == line.epoch else "")
            )
    model = trainer.selected
    model.load_state_dict(load_tensors(out / BEST)[0])
    return Trained(model.eval(), progress.history, progress.best_epoch, progress.seconds)
