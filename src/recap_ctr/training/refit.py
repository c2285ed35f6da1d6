"""Train a run again on all rows, with the settings and the length that the held-out rows have shown to be best.

For each run, the held-out rows have decided one number: the epochs of a network, the trees of a forest, or the strength
of a regression. A student learns from the same recombined rows as before, which are made of the training rows, and from
the same teachers: from what they make of all rows once they have learned from these, too, or, where there was no time
for that, from their logits of before.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.logits import Estimator, Floats, LogitTable, is_table, mean_logit
from recap_ctr.axes.predict import write_logits
from recap_ctr.config import Frozen
from recap_ctr.data.shards import PreparedData, held_out_shards
from recap_ctr.data.whole import WholeLog
from recap_ctr.evaluation import metrics
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.boosted import BoostedConfig
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.rates import RatesConfig
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.nn.weights import load_tensors, save_tensors
from recap_ctr.storage.claims import claim
from recap_ctr.storage.hashes import sha256
from recap_ctr.storage.locks import locked
from recap_ctr.training.boosted import BOOSTED, train_boosted
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.linear import train_linear
from recap_ctr.training.loop import Start, Trained, train
from recap_ctr.training.pool import RECOMBINED, Recombination, read_pool
from recap_ctr.training.rates import RATES, train_rates, with_rates
from recap_ctr.training.report import RunReport

TRAINED = "trained.safetensors"


@dataclass(frozen=True)
class Refit:
    """A run to train again, in a directory of its own."""

    config: RunConfig
    length: float
    out: Path
    rates: Path | None = None
    """The directory in which the network on click rates beside this run was trained again."""
    recombined: int | None = None
    """How many recombined rows for each training row a teacher scores after all rows; None if it teaches nobody."""

    @property
    def logits(self) -> Path:
        """Return the logit table of all rows, if this is a teacher."""
        return self.out / LOGITS / "train"

    def arguments(self, data: PreparedData, measured: PreparedData, deadline: float | None) -> dict[str, Any]:
        """Return the arguments of the job `train_again`."""
        return {
            "data": str(data.path),
            "measured": str(measured.path),
            "config": self.config.to_json(),
            "length": self.length,
            "out": str(self.out),
            "rates": None if self.rates is None else str(self.rates),
            "recombined": self.recombined,
            "deadline": deadline,
        }

    def model(self, data: WholeLog) -> nn.Module:
        """Return the trained model."""
        tensors, metadata = load_tensors(self.out / TRAINED)
        model = build(
            self.config.model, parse_model(self.config.model, json.loads(metadata["model"])), data.layout
        )
        model.load_state_dict(tensors)
        return model.eval()


def length_of(config: RunConfig, report: RunReport, rows: int) -> float:
    """Return how long a run was trained until it was best on validation rows; `rows` are those it was trained on."""
    if report.strength is not None:
        return report.strength
    step = report.history[report.best_epoch - 1].step
    return step if config.model == BOOSTED else step / -(-rows // config.train.batch_size)


def config_of(config: RunConfig, directory: Path, rows: int, whole_rows: int) -> RunConfig:
    """Return the settings of the run in `directory`, as they are for all rows.

    Three things stay: the regulariser's weight against all rows together, the chosen pairs of fields, and the rank of
    adapters, which would otherwise depend on the vocabularies where it is not set.
    """
    training = config.train.model_copy(update={"l2": config.train.l2 * rows / whole_rows})
    settings: Frozen = config.model_config
    if isinstance(settings, RecapConfig | RatesConfig | BoostedConfig):
        packed = load_artifact(directory / ARTIFACT).backbone
        if isinstance(packed, Recap):
            settings = settings.model_copy(update={"lora_rank": packed.exponential.bank.rank})
        else:
            settings = settings.model_copy(update={"crosses": packed.config.crosses})  # type: ignore[union-attr]
    return replace(config, model_config=settings, train=training)


def train_again(
    data: str,
    measured: str,
    config: dict[str, Any],
    length: float,
    out: str,
    rates: str | None,
    recombined: int | None,
    deadline: float | None,
) -> bool:
    """Train a run on all rows, and return whether it got to its end before the deadline.

    A teacher scores all rows after that, and the recombined ones.

    The arguments are plain, so that a job can have them. An interrupted job goes on.
    """
    settings, directory = RunConfig.from_json(config), Path(out)
    whole, before = WholeLog(Path(data), verify=False), PreparedData(Path(measured), verify=False)
    torch.set_num_threads(settings.threads)
    source = None if rates is None else Path(rates)
    inputs = {
        **settings.training_inputs(before),
        "whole": whole.fingerprint,
        "length": length,
        "rates": None if source is None else sha256(source / TRAINED),
    }
    refit = Refit(settings, length, directory, source, recombined)
    if not claim(directory, inputs, finished=TRAINED, force=False):
        with locked(directory):
            trained = _train(refit, whole, before, deadline)
            if not trained.finished:
                return False
            described = trained.model.config.model_dump(mode="json")  # type: ignore[operator, union-attr]
            save_tensors(
                directory / TRAINED, dict(trained.model.state_dict()), {"model": json.dumps(described)}
            )
    if recombined is not None:
        _score(refit, whole, before, recombined)
    return True


def _score(teacher: Refit, whole: WholeLog, measured: PreparedData, recombined: int) -> None:
    """Write a teacher's logits of all rows, and of the recombined rows if there are any, unless they are there."""
    device = torch.device(teacher.config.device)
    estimators = {Estimator(teacher.out.name): teacher.model(whole).to(device)}
    if not is_table(teacher.logits):
        write_logits(teacher.logits, estimators, whole, "train", device)
    if not recombined:
        return
    recombination = Recombination(measured, recombined)
    pool = recombination.table_of(teacher.out)
    if not is_table(pool):
        rows, inputs = recombination.rows(whole), recombination.inputs
        write_logits(pool, estimators, measured, RECOMBINED, device, rows=rows, inputs=inputs)


def _train(refit: Refit, whole: WholeLog, measured: PreparedData, deadline: float | None) -> Trained:
    config, length, out, rates = refit.config, refit.length, refit.out, refit.rates
    device = torch.device(config.device)
    if config.train.update == "convex":
        return train_linear(
            config.model_config, whole, device, config.train.seed, strength=length, deadline=deadline
        )
    if config.model == BOOSTED:
        return train_boosted(
            config.model_config,
            whole,
            device,
            threads=config.threads,
            seed=config.train.seed,
            rounds=int(length),
            deadline=deadline,
        )
    if config.model == RATES:
        return train_rates(
            config.model_config, config.train, whole, out, device=device, length=length, deadline=deadline
        )
    settings, rows, start = config.model_config, whole, None
    if rates is not None and config.on_top is not None:
        again = Refit(replace(config, model=RATES), 0.0, rates).model(whole)
        settings, rows, initial = with_rates(config.model_config, again, whole)  # type: ignore[assignment]
        start = Start(initial)
    return train(
        config.model,
        settings,
        config.train,
        rows,
        out,
        device=device,
        targets=_targets(config, whole, measured),
        start=start,
        length=length,
        pool=read_pool(config.pool, config.train.recombined, measured, whole),
        deadline=deadline,
    )


def _targets(config: RunConfig, whole: WholeLog, measured: PreparedData) -> Floats | None:
    """Return the teachers' probabilities for all rows (Eq. 12)."""
    if not config.teachers:
        return None
    total = np.zeros(len(whole.train))
    for path in config.teachers:
        total += _teacher_logits(path, whole, measured)
    return np.asarray(metrics.sigmoid(total / len(config.teachers)), np.float32)


def _teacher_logits(path: Path, whole: WholeLog, measured: PreparedData) -> Floats:
    """Return a teacher's logits of all rows, from one table or from those of every split of the measured data."""
    table = LogitTable(path)
    if table.data == whole.fingerprint:
        return mean_logit([table])
    tables = [LogitTable(path.parent / split) for split in ("train", *held_out_shards(measured))]
    for table in tables:
        table.check(measured)
    return np.concatenate([mean_logit([table]) for table in tables])
