from pathlib import Path

import numpy as np
import pytest
import torch

from recap_ctr.axes.logits import Estimator, LogitWriter
from recap_ctr.axes.teachers import teacher_targets
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.interface import Output
from recap_ctr.nn.losses import bce, distillation
from recap_ctr.training.loop import Trainer

CPU = torch.device("cpu")


def table(path: Path, data: PreparedData, split: str, seed: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(len(getattr(data, split)), 1)).astype(np.float32)
    with LogitWriter(path, data, split, [Estimator(f"seed-{seed}")]) as writer:
        writer.write(logits)
    return logits


def test_columns_learn_from_one_teacher_each(prepared: PreparedData, tmp_path: Path) -> None:
    logits = [table(tmp_path / f"t{seed}", prepared, "train", seed)[:, 0] for seed in (1, 2)]
    columns = np.random.default_rng(3).integers(0, 5, len(prepared.train))
    targets = teacher_targets([tmp_path / "t1", tmp_path / "t2"], prepared, columns.__getitem__)
    expected = np.where(columns % 2 == 0, *logits)
    np.testing.assert_allclose(targets[:], 1 / (1 + np.exp(-expected)), atol=1e-6)


def test_target_is_the_sigmoid_of_the_mean_logit(prepared: PreparedData, tmp_path: Path) -> None:
    drawn = [table(tmp_path / f"t{seed}", prepared, "train", seed) for seed in (1, 2)]

    targets = teacher_targets([tmp_path / "t1", tmp_path / "t2"], prepared)

    expected = 1 / (1 + np.exp(-np.concatenate(drawn, axis=1).mean(axis=1)))
    np.testing.assert_allclose(targets[:], expected, rtol=1e-5)
    np.testing.assert_array_equal(targets[5:17], targets[:][5:17])


def test_teachers_of_other_rows_are_refused(prepared: PreparedData, tmp_path: Path) -> None:
    table(tmp_path / "valid", prepared, "valid", 1)
    with pytest.raises(InputError, match="holds valid rows"):
        teacher_targets([tmp_path / "valid"], prepared)


def test_distillation_loss_is_smallest_at_the_teachers_logit() -> None:
    """BCE against q is smallest where σ(z) = q, so distillation aims at the mean logit itself."""
    teacher = torch.tensor([-1.3, 0.2, 2.0], dtype=torch.float64)
    z = teacher.clone().requires_grad_()
    loss = distillation("tri-bce")(Output(z, {}), torch.sigmoid(teacher), None)
    assert torch.autograd.grad(loss, z)[0].abs().max() < 1e-12


def test_every_trained_depth_is_distilled_with_its_weight() -> None:
    logits_KB = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.rand(5, generator=torch.Generator().manual_seed(1))
    output = Output(logits_KB[-1], {"logits_KB": logits_KB, "alphas_K": torch.tensor([0.1, 0.9])})

    loss = distillation("depth-bce")(output, targets, None)

    torch.testing.assert_close(
        loss, 0.1 * bce(logits_KB[0], targets, None) + 0.9 * bce(logits_KB[1], targets, None)
    )


@pytest.mark.parametrize("model", ["fcn", "recap", "lr"])
def test_the_loss_of_a_step_is_supervised_plus_weighted_distillation(
    prepared: PreparedData, model: str
) -> None:
    targets = np.random.default_rng(0).random(len(prepared.train), np.float32)

    def first_loss(kd_weight: float, targets_N: np.ndarray | None) -> float:
        config = TrainConfig(batch_size=512, kd_weight=kd_weight)
        trainer = Trainer(model, parse_model(model, {}), config, prepared, CPU, targets_N)
        trainer.step()
        return trainer.progress.loss_sum

    plain, once, twice = first_loss(1, None), first_loss(1, targets), first_loss(2, targets)
    assert once > plain
    assert twice - once == pytest.approx(once - plain, rel=1e-4)
    assert first_loss(0, targets) == pytest.approx(plain)
