"""Averages of a run's weights, their norms' statistics, and the run's checkpoints."""

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
from recap_ctr.nn.table import Table
from recap_ctr.nn.weights import load_tensors
from recap_ctr.training import loop as train_module
from recap_ctr.training.loop import Trainer, train
from tests.support.checks import LAYOUT, fresh, rows
from tests.support.training_state import bits

CPU = torch.device("cpu")
FCN = {"dim": 4, "num_exponential_layers": 2, "num_linear_layers": 2, "num_heads": 2}
DROPOUT = {"exponential_dropout": 0.5, "linear_dropout": 0.5}
RECAP = {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 4, "lora_rank": 2}


class Plain(nn.Module):
    """A model with torch's norms, one of them without momentum, and torch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(LAYOUT.num_columns, 6)
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Inputs) -> Tensor:
        h_BD = torch.relu(self.first(self.lift(inputs.ids_BW.float())))
        logit_B: Tensor = self.second(self.dropout(h_BD)).sum(1)
        return logit_B


def fcn() -> nn.Module:
    return fresh("fcn", parse_model("fcn", FCN | DROPOUT))


def recap() -> nn.Module:
    return fresh("recap", parse_model("recap", RECAP | DROPOUT | {"num_adapters": 8}))


def qnn() -> nn.Module:
    """Return a model that runs its network twice in training."""
    return fresh("qnn", parse_model("qnn", {"dim": 4}))


def with_wrong_statistics(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with large weights and wrong statistics."""
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
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), Tensor)
    }


def batches(count: int = 5) -> list[Inputs]:
    return [rows(32 + seed, seed) for seed in range(count)]


def inputs_of_norms(model: nn.Module, work: Callable[[], object]) -> dict[str, list[Tensor]]:
    """Return the inputs of each norm during `work`."""
    inputs_by_norm: dict[str, list[Tensor]] = {name: [] for name in norms_of(model)}
    hooks = [
        norm.register_forward_pre_hook(
            lambda _, inputs, name=name: inputs_by_norm[name].append(inputs[0].detach().clone())
        )
        for name, norm in norms_of(model).items()
    ]
    work()
    for hook in hooks:
        hook.remove()
    return inputs_by_norm


MODELS = [pytest.param(make, id=make.__name__) for make in (fcn, recap, Plain, qnn)]


@pytest.mark.parametrize("make", MODELS)
def test_statistics_are_those_of_the_inputs_of_each_norm(make: Callable[[], nn.Module]) -> None:
    model = with_wrong_statistics(make)

    inputs = inputs_of_norms(model, lambda: restore_statistics(model, batches()))

    assert inputs
    for name, norm in norms_of(model).items():
        assert len(inputs[name]) == (10 if make is qnn else 5)
        by_channel = [value.double().transpose(0, 1).flatten(1) for value in inputs[name]]
        mean = torch.stack([value.mean(1) for value in by_channel]).mean(0)
        var = torch.stack([value.var(1) for value in by_channel]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean.float(), atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(norm.running_var, var.float(), atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("make", MODELS)
def test_nothing_but_the_statistics_changes(make: Callable[[], nn.Module]) -> None:
    model = with_wrong_statistics(make)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    momenta = {name: norm.momentum for name, norm in norms_of(model).items()}

    restore_statistics(model, batches())

    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    assert {name: norm.momentum for name, norm in norms_of(model).items()} == momenta
    assert not any(module.training for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("make", [MODELS[0], MODELS[2]])
def test_no_dropout_acts_while_statistics_are_measured(make: Callable[[], nn.Module]) -> None:
    """Nothing is drawn, so another seed gives the same bits."""
    states = []
    for seed in (1, 2):
        model = with_wrong_statistics(make)
        torch.manual_seed(seed)
        restore_statistics(model, batches())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_routes_are_drawn_as_in_training_and_dropout_is_not() -> None:
    model = with_wrong_statistics(recap)
    undropped = with_wrong_statistics(
        lambda: fresh("recap", parse_model("recap", RECAP | {"num_adapters": 8}))
    )
    assert isinstance(model, Recap) and isinstance(undropped, Recap)
    drawn: dict[int, set[int]] = {0: set(), 1: set()}
    draw = model.draw_adapter

    def recorded(at: int, rows: Tensor) -> int | Tensor:
        adapter = draw(at, rows)
        assert isinstance(adapter, int)
        drawn[at].add(adapter)
        return adapter

    model.draw_adapter = recorded  # type: ignore[method-assign]
    torch.manual_seed(3)
    restore_statistics(model, batches(12))
    assert drawn == {at: set(model.config.choices(at)) for at in range(2)}

    # A model without dropout draws the same routes, so equal statistics mean that no mask was drawn in between.
    for tower in (undropped.exponential, undropped.linear):
        tower.cross.dropout = 0.0
    torch.manual_seed(3)
    restore_statistics(undropped, batches(12))
    for name, norm in norms_of(model).items():
        assert torch.equal(norm.running_var, norms_of(undropped)[name].running_var)  # type: ignore[arg-type]


@pytest.mark.parametrize("lazy", [False, True])
def test_without_warm_up_it_is_equation_10_from_the_first_step_on(lazy: bool) -> None:
    """On a run this short, a warm-up would make all three the same."""
    model = fcn()
    betas = (0.999, 0.9995, 0.9999)
    averages = [MovingAverage(model, beta, lazy=lazy, warmup=0) for beta in betas]
    warmed = [MovingAverage(model, beta, lazy=lazy) for beta in betas]
    expected = [[weight.detach().clone() for weight in model.parameters()] for _ in betas]
    tables = {name: module for name, module in model.named_modules() if isinstance(module, Table)}
    for step in range(1, 21):
        with torch.no_grad():
            for average in (*averages, *warmed):
                for name, table in tables.items():
                    average.before_rows_change(name, torch.arange(len(table.weight)))
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        for average in (*averages, *warmed):
            average.after_step(step)
        for beta, means in zip(betas, expected, strict=True):
            for mean, weight in zip(means, model.parameters(), strict=True):
                mean.mul_(beta).add_(weight.detach(), alpha=1 - beta)
    for average, means in zip(averages, expected, strict=True):
        for weight, mean in zip(average.settle().parameters(), means, strict=True):
            torch.testing.assert_close(weight, mean, atol=1e-5, rtol=1e-5)
    for average in warmed[1:]:
        for weight, other in zip(average.settle().parameters(), warmed[0].settle().parameters(), strict=True):
            torch.testing.assert_close(weight, other, atol=1e-5, rtol=1e-5)


def test_only_parameters_are_averaged() -> None:
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
def test_beta_has_the_horizon_of_its_epochs(epochs: float, steps: int) -> None:
    assert 1 / (1 - beta_of(epochs, steps)) == pytest.approx(epochs * steps)


def test_a_horizon_is_at_least_two_steps() -> None:
    assert beta_of(0.1, 1) == beta_of(1e-9, 5) == 0.5


def test_ema_and_ema_epochs_exclude_each_other() -> None:
    with pytest.raises(InputError, match="not as both"):
        parse(TrainConfig, {"ema": 0.9, "ema_epochs": [1.0]}, "test")
    with pytest.raises(InputError, match="ema_epochs"):
        parse(TrainConfig, {"ema_epochs": [0.0]}, "test")


def tiny(name: str) -> Frozen:
    return parse_model(name, RECAP if name == "recap" else FCN)


def train_config(**settings: object) -> TrainConfig:
    defaults = {"batch_size": 256, "learning_rate": 1e-2, "l2": 1e-4, "max_epochs": 2}
    return parse(TrainConfig, {**defaults, **settings}, "test")


def an_epoch(data: PreparedData, name: str, update: str, horizons: tuple[float, ...]) -> Trainer:
    config = train_config(batch_size=128, update=update, ema_epochs=horizons)
    trainer = Trainer(name, tiny(name), config, data, CPU)
    for _ in range(trainer.steps_per_epoch):
        trainer.step()
    trainer.end_epoch(0.0)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(("name", "update"), [("fcn", "exact"), ("recap", "fast")])
def test_each_of_several_averages_is_what_it_would_be_alone_and_the_best_is_selected(
    name: str, update: str, prepared: PreparedData
) -> None:
    torch.set_num_threads(1)
    horizons = (0.1, 2.0)  # far apart, because early in training both forget alike
    both = an_epoch(prepared, name, update, horizons)
    alone = [an_epoch(prepared, name, update, (horizon,)) for horizon in horizons]

    for average, single in zip(both.averages, alone, strict=True):
        state, expected = average.model.state_dict(), single.averages[0].model.state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in state)
        assert average.beta == single.averages[0].beta == single.progress.history[0].beta
    assert not torch.equal(*(next(average.model.parameters()) for average in both.averages))
    aucs = [single.progress.history[0].valid_auc for single in alone]
    best = int(np.argmax(aucs))
    assert aucs[0] != aucs[1]
    assert both.progress.history[0].valid_auc == max(aucs)
    assert both.progress.history[0].beta == both.averages[best].beta
    assert both.selected is both.averages[best].model


@pytest.mark.parametrize("best", [0, 1])
def test_the_best_average_is_selected(
    best: int, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[nn.Module] = []

    def validate(trainer: Trainer, model: nn.Module) -> tuple[float, float]:
        validated.append(model)
        return (0.9 if model is trainer.averages[best].model else 0.8), 0.5

    monkeypatch.setattr(Trainer, "validate", validate)
    config = train_config(ema_epochs=(0.2, 2.0), max_epochs=1)
    done = train("fcn", tiny("fcn"), config, prepared, tmp_path, device=CPU, quiet=True)

    assert len(validated) == 3  # the averages, and the weights themselves for the report
    assert done.model is validated[best]
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
    """Train until interrupted after step `stop`; save the state after each epoch or, if `often`, each step."""

    def interrupt(step: int) -> None:
        if step == stop:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "SAVE_SECONDS", -1.0 if often else 1e9)
        try:
            train(name, tiny(name), config, data, out, device=CPU, quiet=True, on_step=interrupt)
        except KeyboardInterrupt:
            torch.manual_seed(stop or 0)  # other draws of the process must not matter
        else:
            assert stop is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "update"), [("fcn", "exact"), ("recap", "fast")])
def test_interrupted_with_two_averages_it_ends_with_the_same_bits(
    name: str, update: str, prepared: PreparedData, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config = train_config(update=update, ema_epochs=(0.2, 2.0), checkpoints=1)
    for directory in ("whole", "broken"):
        (tmp_path / directory).mkdir()
    run_until(None, name, config, prepared, tmp_path / "whole")

    for stop in (4, 11, 17, None):
        run_until(stop, name, config, prepared, tmp_path / "broken", often=stop is not None)

    assert bits(tmp_path / "broken") == bits(tmp_path / "whole")
    whole, broken = (tmp_path / name / "checkpoint-20.safetensors" for name in ("whole", "broken"))
    assert whole.read_bytes() == broken.read_bytes()


def checkpoints(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoint*")}


@pytest.mark.slow
def test_the_last_checkpoints_are_kept_with_their_raw_weights(prepared: PreparedData, tmp_path: Path) -> None:
    """An interruption doesn't change that; each checkpoint has the weights of the end of its epoch."""
    torch.set_num_threads(1)
    config = train_config(max_epochs=4, patience=9, checkpoints=2, ema_epochs=(1.0,))
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


def test_no_checkpoints_by_default(prepared: PreparedData, tmp_path: Path) -> None:
    run_until(None, "fcn", train_config(max_epochs=1), prepared, tmp_path)
    assert checkpoints(tmp_path) == set()
