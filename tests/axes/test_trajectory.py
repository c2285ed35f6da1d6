"""Averages of a run's weights, the statistics that go with them, and the checkpoints it leaves."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recap_ctr.axes.trajectory import MovingAverage, beta_of, restore_statistics
from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.recap import Recap
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.weights import load_tensors
from recap_ctr.training import loop as train_module
from recap_ctr.training.loop import Trainer, train
from tests.support.checks import LAYOUT, fresh, rows
from tests.training.test_run import bits

CPU = torch.device("cpu")
FCN = {"dim": 4, "num_exponential_layers": 2, "num_linear_layers": 2, "num_heads": 2}
DROPOUT = {"exponential_dropout": 0.5, "linear_dropout": 0.5}
RECAP = {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 4, "lora_rank": 2}


class Plain(nn.Module):
    """Torch's own norms, one of them without momentum, one behind another; and torch's own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(LAYOUT.num_columns, 6)
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Inputs) -> Tensor:
        h_BD = torch.relu(self.first(self.lift(inputs.ids_BW.float())))
        found: Tensor = self.second(self.dropout(h_BD)).sum(1)
        return found


def fcn() -> nn.Module:
    return fresh("fcn", parse_model("fcn", FCN | DROPOUT))


def recap() -> nn.Module:
    return fresh("recap", parse_model("recap", RECAP | DROPOUT | {"num_adapters": 8}))


def qnn() -> nn.Module:
    """Which in training runs its network twice."""
    return fresh("qnn", parse_model("qnn", {"dim": 4}))


def lively(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with weights of some size, whose statistics are off."""
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.5)
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                module.running_mean.fill_(7.0)  # type: ignore[operator]
                module.running_var.fill_(9.0)  # type: ignore[operator]
    return model.eval()


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    named = model.named_modules()
    return {name: one for name, one in named if isinstance(getattr(one, "running_mean", None), Tensor)}


def batches(count: int = 5) -> list[Inputs]:
    return [rows(32 + seed, seed) for seed in range(count)]


def seen_while(model: nn.Module, work: Callable[[], object]) -> dict[str, list[Tensor]]:
    """What reaches each norm during `work`."""
    seen: dict[str, list[Tensor]] = {name: [] for name in norms_of(model)}
    hooks = [
        norm.register_forward_pre_hook(
            lambda _, inputs, name=name: seen[name].append(inputs[0].detach().clone())
        )
        for name, norm in norms_of(model).items()
    ]
    work()
    for hook in hooks:
        hook.remove()
    return seen


MODELS = [pytest.param(make, id=make.__name__) for make in (fcn, recap, Plain, qnn)]


@pytest.mark.parametrize("make", MODELS)
def test_statistics_are_those_of_what_reaches_each_norm(make: Callable[[], nn.Module]) -> None:
    model = lively(make)

    seen = seen_while(model, lambda: restore_statistics(model, batches()))

    assert seen
    for name, norm in norms_of(model).items():
        assert len(seen[name]) == (10 if make is qnn else 5)
        of_channels = [value.double().transpose(0, 1).flatten(1) for value in seen[name]]
        mean = torch.stack([value.mean(1) for value in of_channels]).mean(0)
        var = torch.stack([value.var(1) for value in of_channels]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean.float(), atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(norm.running_var, var.float(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("make", MODELS)
def test_nothing_but_the_statistics_changes(make: Callable[[], nn.Module]) -> None:
    model = lively(make)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    momenta = {name: norm.momentum for name, norm in norms_of(model).items()}

    restore_statistics(model, batches())

    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert {name: norm.momentum for name, norm in norms_of(model).items()} == momenta
    assert not any(module.training for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("make", [MODELS[0], MODELS[2]])
def test_no_dropout_is_at_work(make: Callable[[], nn.Module]) -> None:
    """Nothing is drawn: other seeds give the same bits."""
    found = []
    for seed in (1, 2):
        model = lively(make)
        torch.manual_seed(seed)
        restore_statistics(model, batches())
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_routes_are_drawn_as_in_training_and_dropout_is_not() -> None:
    model, still = (
        lively(recap),
        lively(lambda: fresh("recap", parse_model("recap", RECAP | {"num_adapters": 8}))),
    )
    assert isinstance(model, Recap) and isinstance(still, Recap)
    drawn: dict[int, set[int]] = {0: set(), 1: set()}
    draw = model._draw

    def recorded(at: int, h0_BHD: Tensor) -> int | Tensor:
        adapter = draw(at, h0_BHD)
        assert isinstance(adapter, int)
        drawn[at].add(adapter)
        return adapter

    model._draw = recorded  # type: ignore[method-assign]
    torch.manual_seed(3)
    restore_statistics(model, batches(12))
    assert drawn == {at: set(model.config.choices(at)) for at in range(2)}

    # A model that has no dropout draws the same routes: equal statistics mean that no mask was drawn in between.
    for tower in (still.exponential, still.linear):
        tower.cross.dropout = 0.0
    torch.manual_seed(3)
    restore_statistics(still, batches(12))
    for name, norm in norms_of(model).items():
        assert torch.equal(norm.running_var, norms_of(still)[name].running_var)  # type: ignore[arg-type]


def test_an_average_is_of_parameters_only() -> None:
    model = Plain()
    average = MovingAverage(model, 0.5, lazy=False)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(8)
    average.after_step(1_000)

    for name, value in average.settle().named_parameters():
        torch.testing.assert_close(value, start[name] + 4)
    for name, value in average.model.named_buffers():
        assert torch.equal(value, start[name]), name
    assert not any(weight.requires_grad for weight in average.model.parameters())


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 100), (1.0, 2), (4.0, 10_000)])
def test_beta_is_that_of_a_horizon(epochs: float, steps: int) -> None:
    assert 1 / (1 - beta_of(epochs, steps)) == pytest.approx(epochs * steps)


def test_a_horizon_of_hardly_a_step_still_averages_two() -> None:
    assert beta_of(0.1, 1) == beta_of(1e-9, 5) == 0.5


def test_a_horizon_is_given_once() -> None:
    with pytest.raises(InputError, match="not as both"):
        parse(TrainConfig, {"ema": 0.9, "ema_epochs": [1.0]}, "test")
    with pytest.raises(InputError, match="ema_epochs"):
        parse(TrainConfig, {"ema_epochs": [0.0]}, "test")


def tiny(name: str) -> Frozen:
    return parse_model(name, RECAP if name == "recap" else FCN)


def settings(**given: object) -> TrainConfig:
    own = {"batch_size": 256, "learning_rate": 1e-2, "l2": 1e-4, "max_epochs": 2}
    return parse(TrainConfig, {**own, **given}, "test")


def an_epoch(data: PreparedData, name: str, update: str, horizons: tuple[float, ...]) -> Trainer:
    config = settings(batch_size=128, update=update, ema_epochs=horizons)
    trainer = Trainer(name, tiny(name), config, data, CPU)
    for _ in range(trainer.steps_per_epoch):
        trainer.step()
    trainer.end_epoch(0.0)
    return trainer


@pytest.mark.parametrize(("name", "update"), [("fcn", "exact"), ("recap", "fast")])
def test_each_of_several_averages_is_what_it_would_be_alone_and_the_best_is_selected(
    name: str, update: str, prepared: PreparedData
) -> None:
    torch.set_num_threads(1)
    horizons = (0.1, 2.0)  # far apart: while training is young both forget alike
    both = an_epoch(prepared, name, update, horizons)
    alone = [an_epoch(prepared, name, update, (horizon,)) for horizon in horizons]

    for average, single in zip(both.averages, alone, strict=True):
        own, other = average.model.state_dict(), single.averages[0].model.state_dict()
        assert all(torch.equal(own[key], other[key]) for key in own)
        assert average.beta == single.averages[0].beta == single.progress.history[0].beta
    assert not torch.equal(*(next(average.model.parameters()) for average in both.averages))
    aucs = [single.progress.history[0].valid_auc for single in alone]
    best = int(np.argmax(aucs))
    assert aucs[0] != aucs[1]
    assert both.progress.history[0].valid_auc == max(aucs)
    assert both.progress.history[0].beta == both.averages[best].beta
    assert both.selected is both.averages[best].model


@pytest.mark.parametrize("best", [0, 1])
def test_whichever_average_is_best_is_shipped(
    best: int, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[nn.Module] = []

    def judge(trainer: Trainer, model: nn.Module) -> tuple[float, float]:
        asked.append(model)
        return (0.9 if model is trainer.averages[best].model else 0.8), 0.5

    monkeypatch.setattr(Trainer, "_validate", judge)
    config = settings(ema_epochs=(0.2, 2.0), max_epochs=1)
    done = train("fcn", tiny("fcn"), config, prepared, tmp_path, device=CPU, quiet=True)

    assert len(asked) == 3  # the averages, and for the record the weights themselves
    assert done.model is asked[best]
    assert done.history[0].raw_auc == 0.8
    assert done.history[0].beta == pytest.approx(1 - 1 / (10 * config.ema_epochs[best]))
    assert done.history[0].valid_auc == 0.9


def test_without_averages_there_is_no_beta(prepared: PreparedData) -> None:
    trainer = an_epoch(prepared, "fcn", "exact", ())
    assert trainer.progress.history[0].beta is None
    assert trainer.selected is trainer.model


def run_until(
    stop: int | None, name: str, config: TrainConfig, data: PreparedData, out: Path, *, often: bool = False
) -> None:
    """Train, and be interrupted after step `stop`, with the state saved after each epoch, or after each step."""

    def interrupt(step: int) -> None:
        if step == stop:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "SAVE_SECONDS", -1.0 if often else 1e9)
        try:
            train(name, tiny(name), config, data, out, device=CPU, quiet=True, on_step=interrupt)
        except KeyboardInterrupt:
            torch.manual_seed(stop or 0)  # what else the process drew must not matter
        else:
            assert stop is None


@pytest.mark.parametrize(("name", "update"), [("fcn", "exact"), ("recap", "fast")])
def test_interrupted_with_two_averages_it_ends_with_the_same_bits(
    name: str, update: str, prepared: PreparedData, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config = settings(update=update, ema_epochs=(0.2, 2.0), checkpoints=1)
    for where in ("whole", "broken"):
        (tmp_path / where).mkdir()
    run_until(None, name, config, prepared, tmp_path / "whole")

    for stop in (4, 11, 17, None):
        run_until(stop, name, config, prepared, tmp_path / "broken", often=stop is not None)

    assert bits(tmp_path / "broken") == bits(tmp_path / "whole")
    one, other = (tmp_path / where / "checkpoint-20.safetensors" for where in ("whole", "broken"))
    assert one.read_bytes() == other.read_bytes()


def checkpoints(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoint*")}


def test_the_last_checkpoints_are_kept_with_their_raw_weights(prepared: PreparedData, tmp_path: Path) -> None:
    """Over an interruption too, and each as the weights were when its epoch ended."""
    torch.set_num_threads(1)
    config = settings(max_epochs=4, patience=9, checkpoints=2, ema_epochs=(1.0,))
    run_until(25, "fcn", config, prepared, tmp_path)
    assert checkpoints(tmp_path) == {"checkpoint-10.safetensors", "checkpoint-20.safetensors"}
    run_until(None, "fcn", config, prepared, tmp_path)
    assert checkpoints(tmp_path) == {"checkpoint-30.safetensors", "checkpoint-40.safetensors"}

    trainer = Trainer("fcn", tiny("fcn"), config, prepared, CPU)
    for epoch in range(1, 5):
        for _ in range(10):
            trainer.step()
        if epoch > 2:
            kept = load_tensors(tmp_path / f"checkpoint-{10 * epoch}.safetensors")[0]
            raw, averaged = trainer.model.state_dict(), trainer.averages[0].settle().state_dict()
            assert kept.keys() == raw.keys()
            assert all(torch.equal(kept[name], raw[name]) for name in raw)
            assert not torch.equal(kept["linear.head.weight"], averaged["linear.head.weight"])
        trainer.end_epoch(0.0)


def test_no_checkpoints_unless_wanted(prepared: PreparedData, tmp_path: Path) -> None:
    run_until(None, "fcn", settings(max_epochs=1), prepared, tmp_path)
    assert checkpoints(tmp_path) == set()
