"""The training loop: golden losses, the order of rows, the schedule, and what stops a run."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.weights import load_tensors, to_arrays
from recap_ctr.storage.arrays import save_arrays
from recap_ctr.training import loop
from recap_ctr.training.feed import Shuffled
from recap_ctr.training.loop import Trainer, train
from recap_ctr.training.report import Epoch
from tests.support.golden import GOLDEN, SMALL, first_losses, small_data
from tests.support.golden import small_trainer as trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return small_data(tmp_path_factory.mktemp("train") / "data")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "fast"])
def test_first_losses_are_the_golden_ones(data: PreparedData, update: str) -> None:
    """A refactoring leaves the numbers alone; a change that doesn't says so and renews the file (golden/renew.py)."""
    assert first_losses(data, update) == pytest.approx(json.loads(GOLDEN.read_text())[update], rel=1e-5)


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own(data: PreparedData) -> None:
    run = trainer(data)
    orders, others = (Shuffled(data.train, TrainConfig(seed=seed), None) for seed in (1, 2))
    first, second = orders.order(0).copy(), orders.order(1).copy()

    assert sorted(first) == sorted(second) == list(range(len(data.train)))
    assert (first != second).any()
    assert (others.order(0) != first).any()
    assert (orders.order(0) == first).all()
    assert sum(run.step() for _ in range(run.steps_per_epoch)) == len(data.train)


def scripted(run: Trainer, aucs: list[float], monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Let validation report these AUCs; return the learning rate after each epoch, and whether it was best."""
    reported = iter(aucs)
    monkeypatch.setattr(loop, "predict", lambda *_: np.zeros(len(run.data.valid), np.float32))
    monkeypatch.setattr(metrics, "auc", lambda *_: next(reported))
    seen = []
    for _ in aucs:
        better = run.end_epoch(0.0)
        seen.append((run.progress.learning_rate, better))
        if run.progress.finished:
            break
    return seen


def test_plateau_drops_the_rate_at_the_first_stall_and_stops_at_the_second_in_a_row(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(data)

    seen = scripted(run, [0.8, 0.81, 0.8099999, 0.83, 0.83, 0.82, 0.9], monkeypatch)

    assert [better for _, better in seen] == [True, True, False, True, False, False]
    assert [rate for rate, _ in seen] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-6])
    assert run.progress.best_epoch == 4


def test_the_rate_has_a_floor_and_tiny_gains_are_stalls(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(data, patience=9)

    seen = scripted(run, [0.8, 0.8 + 5e-7, 0.8, 0.8, 0.8, 0.8], monkeypatch)

    assert seen[1][1] is False
    assert seen[-1][0] == pytest.approx(1e-6)


def test_constant_keeps_and_cosine_bends_the_rate(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = trainer(data, schedule="constant", patience=3)
    assert {rate for rate, _ in scripted(constant, [0.8, 0.7, 0.7, 0.7], monkeypatch)} == {1e-3}
    cosine = trainer(data, schedule="cosine", max_epochs=10)
    rates = []
    for share in (0.0, 0.5, 1.0):
        cosine.progress.step = round(share * 10 * cosine.steps_per_epoch)
        rates.append(cosine.learning_rate())
    assert rates == pytest.approx([1e-3, (1e-3 + 1e-6) / 2, 1e-6])


@pytest.mark.slow
def test_training_learns_and_ships_the_best_epoch(data: PreparedData, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=256, l2=1e-4, max_epochs=4, learning_rate=5e-3)
    done = train("fcn", parse_model("fcn", SMALL), config, data, tmp_path, device=CPU, quiet=True)

    aucs = [epoch.valid_auc for epoch in done.history]
    assert max(aucs) == aucs[done.best_epoch - 1] > 0.6
    again = metrics.auc(data.valid.labels, predict(done.model, data.valid, CPU))
    assert again == aucs[done.best_epoch - 1]


@pytest.mark.slow
def test_the_average_is_what_is_validated(data: PreparedData, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=256, ema=0.9, max_epochs=1)
    done = train("fcn", parse_model("fcn", SMALL), config, data, tmp_path, device=CPU, quiet=True)
    raw = trainer(data, l2=1e-5)
    for _ in range(raw.steps_per_epoch):
        raw.step()

    assert not torch.equal(
        done.model.state_dict()["linear.head.weight"], raw.model.state_dict()["linear.head.weight"]
    )


@pytest.mark.slow
def test_epochs_are_passed_on_and_may_stop_the_run_where_it_stands(
    data: PreparedData, tmp_path: Path
) -> None:
    config = TrainConfig(batch_size=256, max_epochs=3, patience=3)

    def go(out: Path, stop_after: int | None = None) -> list[int]:
        out.mkdir(exist_ok=True)
        epochs: list[int] = []

        def on_epoch(epoch: Epoch) -> None:
            epochs.append(epoch.epoch)
            if epoch.epoch == stop_after:
                raise InterruptedError

        model = parse_model("fcn", SMALL)
        with nullcontext() if stop_after is None else pytest.raises(InterruptedError):
            train("fcn", model, config, data, out, device=CPU, quiet=True, on_epoch=on_epoch)
        return epochs

    assert go(tmp_path / "whole") == [1, 2, 3]
    assert go(tmp_path / "stopped", 2) == [1, 2]
    assert go(tmp_path / "stopped") == [1, 2, 3], "earlier epochs are passed on again"
    for name in (loop.STATE, loop.BEST):
        assert [tensor.tolist() for tensor in load_tensors(tmp_path / "whole" / name)[0].values()] == [
            tensor.tolist() for tensor in load_tensors(tmp_path / "stopped" / name)[0].values()
        ]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_state(
    data: PreparedData, tmp_path: Path
) -> None:
    config = TrainConfig(batch_size=256, learning_rate=1e30, clip=1e30, max_epochs=3)
    with pytest.raises(InputError, match="the loss became"):
        train("fcn", parse_model("fcn", SMALL), config, data, tmp_path, device=CPU, quiet=True)
    assert not (tmp_path / "best.safetensors").exists()


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="learning_rate"):
        parse(TrainConfig, {"learning_rate": -1}, "test")
    with pytest.raises(InputError, match="unknown setting"):
        parse(TrainConfig, {"learning_rat": 1}, "test")
    with pytest.raises(InputError, match="plateau_factor"):
        parse(TrainConfig, {"plateau_factor": 2}, "test")


@pytest.mark.slow
def test_an_epoch_is_validated_as_often_as_is_asked(data: PreparedData, tmp_path: Path) -> None:
    """The weights are those of a run with one validation an epoch; only the stops are more."""
    once, thrice = ({"batch_size": 256, "max_epochs": 2, "validations": count} for count in (1, 3))
    histories = []
    for name, settings in (("once", once), ("thrice", thrice)):
        (tmp_path / name).mkdir()
        config = parse(TrainConfig, settings, "test")
        trained = train(
            "fcn", parse_model("fcn", SMALL), config, data, tmp_path / name, device=CPU, quiet=True
        )
        histories.append(trained.history)
    assert [epoch.step for epoch in histories[1]][2::3] == [epoch.step for epoch in histories[0]]
    assert [epoch.valid_auc for epoch in histories[1]][2::3] == [epoch.valid_auc for epoch in histories[0]]
    assert len(histories[1]) == 6
    assert (
        np.diff([0, *(epoch.step for epoch in histories[1][:3])]).max() <= -(-histories[0][0].step // 3) + 1
    )


@pytest.mark.slow
def test_at_a_deadline_it_pauses_with_weights_to_go_on_with(data: PreparedData, tmp_path: Path) -> None:
    """Even if the deadline was over before the run began. Paused often, it ends where it would have ended."""
    config = parse(TrainConfig, {"batch_size": 256, "max_epochs": 3, "patience": 3}, "test")
    model = parse_model("fcn", SMALL)
    for name in ("paused", "whole"):
        (tmp_path / name).mkdir()
    first = train("fcn", model, config, data, tmp_path / "paused", device=CPU, deadline=1.0, quiet=True)
    assert not first.finished and len(first.history) == 1 and first.history[0].step == 1

    again = train("fcn", model, config, data, tmp_path / "paused", device=CPU, deadline=1.0, quiet=True)
    assert again.history == first.history

    end = train("fcn", model, config, data, tmp_path / "paused", device=CPU, quiet=True)
    whole = train("fcn", model, config, data, tmp_path / "whole", device=CPU, quiet=True)
    assert end.finished and end.history[-1].valid_auc == whole.history[-1].valid_auc


@pytest.mark.slow
def test_a_damaged_state_or_best_epoch_is_refused(data: PreparedData, tmp_path: Path) -> None:
    """One flipped bit, and a resumed run would be another model."""
    config = TrainConfig(batch_size=256, max_epochs=2, checkpoints=1)
    model = parse_model("fcn", SMALL)
    train("fcn", model, config, data, tmp_path, device=CPU, until=1, quiet=True)
    files = [tmp_path / loop.STATE, tmp_path / loop.BEST, loop.checkpoints(tmp_path)[0][1]]
    for file in files:
        whole = file.read_bytes()
        for at in (5, 300, len(whole) // 2, len(whole) - 3):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(InputError, match="is damaged"):
                load_tensors(file)
        if file.name == loop.STATE:
            with pytest.raises(InputError, match="differs from its checksum"):
                train("fcn", model, config, data, tmp_path, device=CPU, quiet=True)
        file.write_bytes(whole)
    train("fcn", model, config, data, tmp_path, device=CPU, quiet=True)


@pytest.mark.slow
def test_a_state_of_an_earlier_version_is_resumed(data: PreparedData, tmp_path: Path) -> None:
    config, model = TrainConfig(batch_size=256, max_epochs=2), parse_model("fcn", SMALL)
    train("fcn", model, config, data, tmp_path, device=CPU, until=1, quiet=True)
    for name in (loop.STATE, loop.BEST):
        tensors, metadata = load_tensors(tmp_path / name)
        del metadata["checksum"]
        save_arrays(tmp_path / name, to_arrays(tensors), metadata or None)
    assert len(train("fcn", model, config, data, tmp_path, device=CPU, quiet=True).history) == 2
