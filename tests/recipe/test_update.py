"""Updates: ids stay, scores stay where nothing is new, poisoned days are refused, and a kill changes nothing."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.data.drifting import DriftConfig, DriftingData
from recap_ctr.data.grow import row_map
from recap_ctr.data.moments import DAY
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.inference.delta import apply_delta
from recap_ctr.inference.drift import measure_drift
from recap_ctr.inference.manifest import CARD, TRAINING_STATE, WEIGHTS, read_artifact_manifest
from recap_ctr.inference.scorer import Scorer, evaluate_rows
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe import retrain
from recap_ctr.recipe import update as updates
from recap_ctr.recipe.fit import fit
from recap_ctr.recipe.state import TrainingState, read_state, write_state
from recap_ctr.recipe.update import update
from recap_ctr.storage.arrays import load_arrays
from recap_ctr.storage.files import read_json
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.run import run
from tests.conftest import Recap, contents
from tests.support.daily_log import SCHEMA, daily_log
from tests.support.preparing import prepared as prepare
from tests.support.tiny_recipe import TINY

pytestmark = pytest.mark.slow
DAYS, FITTED, UPDATES = 12, 6, 3
OPEN = {
    "confidence": 0.5,
    "max_churn": 1e3,
    "max_calibration_error": 1e3,
    "max_unknown": 1.0,
    "min_ranking": 0.0,
}
"""Limits that anything which is better at all keeps to."""
ONCE = {"passes": 1, "replay": 0.2}


@dataclass(frozen=True)
class Log:
    """Files of a drifting log, one a day, and a fit of its first half."""

    days: list[Path]
    fit: Path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    base = tmp_path_factory.mktemp("update")
    drawn = DriftingData(
        DriftConfig(SyntheticConfig(rows=7_200, num_fields=3, max_values=60), DAYS, 0.4)
    ).frame()
    frame = drawn.drop("row", "bayes_logit").with_columns(day=(pl.col("ts") - pl.col("ts").min()) // DAY)
    days = []
    for number in range(DAYS):
        days.append(base / f"day-{number}.parquet")
        frame.filter(pl.col("day") == number).drop("day").write_parquet(days[-1])
    settings = {**TINY, "train": {"batch_size": 256, "max_epochs": 5}}
    first = fit(
        days[:FITTED],
        label="click",
        out=base / "fit",
        settings={**settings, "learning_rate": 0.01, "l2": 1e-4},
        device="cpu",
        threads=1,
        executor=InThisProcess(),
        keep_state=True,
    )
    return Log(days, first.out)


def ids(artifact: Path) -> list[dict[str, int]]:
    encoder = read_artifact(artifact).encoder
    return [
        {str(fitted.value_of(number)): number for number in range(1, fitted.size) if number != fitted.oov}
        for fitted in encoder.fields
    ]


def rows_of(path: Path) -> pl.DataFrame:
    return pl.read_parquet(path)


def bits(directory: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in contents(directory).items()}


def test_ids_stay_and_scores_improve_over_updates(log: Log, tmp_path: Path) -> None:
    never, current = Scorer.load(log.fit), log.fit
    first, gains = ids(log.fit), []
    for number in range(FITTED, FITTED + UPDATES):
        result = update(current, log.days[number], out=tmp_path / str(number), gate=OPEN)
        assert result.shipped, result.report.gate.reasons
        before, after = ids(current), ids(result.out)
        assert all(old.items() <= new.items() for old, new in zip(before, after, strict=True))
        assert all(old.items() <= new.items() for old, new in zip(first, after, strict=True))
        current = result.out
        tomorrow = rows_of(log.days[number + 1])
        losses = [
            evaluate_rows(scorer, FrameSource(tomorrow), quiet=True).calibrated.logloss
            for scorer in (never, Scorer.load(current))
        ]
        gains.append(losses[0] - losses[1])
    assert np.mean(gains) > 0.005
    state = read_state(current, read_artifact(current).encoder)
    assert state is not None and state.updates == UPDATES
    assert state.rows_seen + len(state.pending or ()) == sum(
        len(rows_of(day)) for day in log.days[: FITTED + UPDATES]
    )
    assert len(state.teachers) == 1
    stated = read_json(current / TRAINING_STATE / "manifest.json")
    on_disk = sum(
        file.stat().st_size
        for file in (current / TRAINING_STATE).rglob("*.*t*")
        if file.name != "manifest.json"
    )
    assert stated["bytes"] == on_disk


def test_the_grown_model_scores_as_before_until_it_is_trained(log: Log, tmp_path: Path) -> None:
    result = update(log.fit, log.days[FITTED], out=tmp_path / "new", settings=ONCE, gate=OPEN)
    old, new = Scorer.load(log.fit), Scorer.load(result.out)
    rows = row_map(old.engine.encoder, new.engine.encoder)
    assert rows.fresh_G.any()
    frame = rows_of(log.days[FITTED])
    before, after = (scorer.engine.encode(frame).ids_BW for scorer in (old, new))
    assert (rows.source_G[after] == before).all()
    # What is loaded scores as what was saved: the whole table, and each row by itself.
    again = Scorer.load(result.out)
    assert (again.score_frame(frame) == new.score_frame(frame)).all()


def test_deltas_lead_from_update_to_update(log: Log, tmp_path: Path) -> None:
    """A chain of deltas, applied one after the other, is the whole artifact, and scores as it does."""
    current = applied = log.fit
    for number in (FITTED, FITTED + 1):
        out, delta, copy = (tmp_path / f"{name}-{number}" for name in ("whole", "delta", "copy"))
        update(current, log.days[number], out=out, settings=ONCE, gate=OPEN, delta=delta)
        apply_delta(applied, delta, copy)
        scorers = Scorer.load(out), Scorer.load(copy)
        first, second = (scorer.score_frame(rows_of(log.days[number + 1])) for scorer in scorers)
        assert (first == second).all()
        assert bits(copy) == {
            name: content for name, content in bits(out).items() if not name.startswith(TRAINING_STATE)
        }
        current, applied = out, copy


def test_an_updated_model_knows_what_is_usual(log: Log, tmp_path: Path) -> None:
    """The profile goes on with the model, so that later rows can be checked against it."""
    result = update(log.fit, log.days[FITTED], out=tmp_path / "new", settings=ONCE, gate=OPEN)
    old, new = read_artifact(log.fit), read_artifact(result.out)
    rows = rows_of(log.days[FITTED])
    assert old.usual.starts is not None and new.usual.starts is not None
    assert new.usual.starts[0] == old.usual.starts[0] and new.usual.starts[-1] > old.usual.starts[-1]
    assert sum(new.usual.rows) == sum(old.usual.rows) + rows.height
    assert sum(new.usual.clicks) == sum(old.usual.clicks) + int(rows["click"].sum())
    tomorrow = rows_of(log.days[FITTED + 1])
    unseen = [
        sum(field.unseen for field in measure_drift(Scorer.load(path), tomorrow).periods[0].fields)
        for path in (log.fit, result.out)
    ]
    assert unseen[1] < unseen[0]
    totals = new.manifest["data"]
    rate = sum(new.usual.clicks) / sum(new.usual.rows)
    assert totals["clicks"] / totals["rows"] == pytest.approx(rate, abs=0.02)
    assert "1 update trained it further." in (new.path / CARD).read_text()


def without_labels(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("click").shuffle(seed=1))


def without_a_field(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(f3=pl.lit(None, pl.String))


def respelt(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("f3").str.to_uppercase())


@pytest.mark.parametrize(
    ("poison", "words"),
    [
        (without_labels, "labels: the shipped model ranks these rows"),
        (without_a_field, "field 'f3': 100.0 % of the rows have no value"),
        (respelt, "are its values written in another way?"),
    ],
)
def test_a_poisoned_day_is_refused(
    log: Log, tmp_path: Path, recap: Recap, poison: Callable[[pl.DataFrame], pl.DataFrame], words: str
) -> None:
    poison(rows_of(log.days[FITTED])).write_parquet(tmp_path / "day.parquet")
    quickly = ("--set", "passes=1", "--set", "replay=0.2", "--quiet")
    done = recap("update", log.fit, tmp_path / "day.parquet", "--out", tmp_path / "new", *quickly)
    assert done.code == 2
    assert words in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day.parquet"]  # Nothing is written.


def test_a_dropped_column_is_refused(log: Log, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column 'f3'"):
        update(log.fit, rows_of(log.days[FITTED]).drop("f3"), out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_training_state(log: Log, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(log.fit / "artifact", bare)
    shutil.rmtree(bare / TRAINING_STATE)
    result = update(bare, log.days[FITTED : FITTED + 2], out=tmp_path / "new", settings=ONCE, gate=OPEN)
    assert result.shipped and result.report.rows["replayed"] == 0
    with pytest.raises(InputError, match="when each value was last seen"):
        update(bare, log.days[FITTED], out=tmp_path / "other", settings={"forget_after": 2.0})
    with pytest.raises(InputError, match="exists"):
        update(bare, log.days[FITTED], out=tmp_path / "new")
    # Of other values it is not known when they were last seen: three days have not passed since there are records.
    options = {"settings": {**ONCE, "forget_after": 3.0}, "gate": OPEN}
    again = update(result.out, log.days[FITTED + 2], out=tmp_path / "again", **options)  # type: ignore[arg-type]
    assert again.shipped and again.report.forgotten == {}


def test_a_damaged_or_foreign_state_is_refused(log: Log, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(log.fit / "artifact", artifact)
    with (artifact / TRAINING_STATE / "rows.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="damaged"):
        update(artifact, log.days[FITTED], out=tmp_path / "new")


def test_the_state_is_bounded(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrain, "REPLAY_ROWS", 500)
    monkeypatch.setattr(retrain, "PENDING_ROWS", 50)
    current = log.fit
    for number in (FITTED, FITTED + 1):
        current = update(current, log.days[number], out=tmp_path / str(number), settings=ONCE, gate=OPEN).out
        state = read_state(current, read_artifact(current).encoder)
        assert state is not None and state.replay is not None and state.pending is not None
        assert (len(state.replay), len(state.pending)) == (500, 50)
        times = state.replay.shard.times
        assert times is not None and state.rows_seen > 3_000
        # New rows are in the sample in proportion to all.
        is_new = times >= rows_of(log.days[number])["ts"].to_numpy().min()
        share = np.mean(is_new) * state.rows_seen / (0.8 * rows_of(log.days[number]).height)
        assert share == pytest.approx(1.0, abs=0.25)


def test_values_are_forgotten(log: Log, tmp_path: Path) -> None:
    result = update(
        log.fit, log.days[FITTED], out=tmp_path / "new", settings={**ONCE, "forget_after": 2.0}, gate=OPEN
    )
    assert sum(result.report.forgotten.values()) > 0
    kept = ids(result.out)
    for old, new in zip(ids(log.fit), kept, strict=True):
        assert all(new[value] == old[value] for value in old.keys() & new.keys())
    again = update(result.out, log.days[FITTED + 1], out=tmp_path / "again", settings=ONCE, gate=OPEN)
    assert again.shipped


@pytest.mark.parametrize("model", ["lr", "fcn"])
def test_the_edges_of_numbers_stay(tmp_path: Path, model: str) -> None:
    """Later clicks depend more on a number, whose edges are those of before: their vectors learn."""

    def clicked(log: pl.DataFrame, strength: float) -> pl.DataFrame:
        rates = 1 / (1 + np.exp(1 - strength * (log["stay"].to_numpy() / 60 - 1)))
        return log.with_columns(click=(np.random.default_rng(1).random(len(log)) < rates).astype(np.int8))

    training = TrainConfig(batch_size=256, max_epochs=3, update="convex" if model == "lr" else "exact")
    small = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1} if model == "fcn" else {}
    config = RunConfig(model, parse_model(model, small), training, train_baseline=False, report_fields=False)
    data = prepare(clicked(daily_log(14), 1.0), tmp_path / "data", SCHEMA, Split(kind="time"))
    run(config, data, tmp_path / "run", quiet=True)
    later, delta = clicked(daily_log(3, first_day=14), 3.0), tmp_path / "delta"
    result = update(tmp_path / "run", later, out=tmp_path / "new", settings=ONCE, gate=OPEN, delta=delta)
    assert result.shipped, result.report.gate.reasons
    before, after = (read_artifact(path) for path in (tmp_path / "run" / ARTIFACT, result.out))
    assert [fitted.edges for fitted in after.encoder.fields] == [
        fitted.edges for fitted in data.encoder.fields
    ]
    vectors = []
    for artifact in (before, after):
        (table,) = (
            array for name, array in load_arrays(artifact.path / WEIGHTS).items() if "table.weight" in name
        )
        place = next(field for field in artifact.encoder.layout.fields if field.name == "stay")
        assert place.is_linear and place.num_added == 0
        vectors.append(table[place.offset + 1 : place.last + 1])
    assert (vectors[0] != vectors[1]).any(axis=1).all(), "there are rows beside every edge"
    apply_delta(before.path, delta, tmp_path / "applied")
    assert (tmp_path / "applied" / WEIGHTS).read_bytes() == (result.out / WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", ["lr", "rates", "boosted", "blend", "blend with a network", "recap"])
def test_every_kind_that_ships_is_updated(log: Log, tmp_path: Path, kind: str) -> None:
    """The parts of a portfolio: a regression, click rates, trees, their sum, the same with a network, and RECAP with
    all beside its towers."""
    model = kind.partition(" ")[0]
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.training.parallel import run_and_write_logits
    from recap_ctr.training.rates import count_rates

    data = next(path for path in log.fit.iterdir() if (path / "train").is_dir())
    quick = TrainConfig(batch_size=256, max_epochs=2, l2=0.0)

    def run(name: str, settings: dict[str, Any], train: TrainConfig, **changes: Any) -> Path:
        config = RunConfig(name, parse_model(name, settings), train, train_baseline=False, **changes)
        run_and_write_logits(str(data), config.to_json(), str(tmp_path / name))
        return tmp_path / name

    parts: list[Path] = []
    is_sum = model in ("blend", "recap")
    if is_sum or model == "lr":
        parts.append(run("lr", {}, quick.model_copy(update={"update": "convex"})))
    if is_sum or model == "rates":
        parts.append(run("rates", {"units": [8]}, quick))
    if model in ("boosted", "recap"):  # Beside trees, so few rows would leave the other parts of a blend out.
        parts.append(run("boosted", {}, quick))
    if kind == "blend with a network":
        parts = [run("fm", {}, quick.model_copy(update={"max_epochs": 8, "learning_rate": 0.01}))]
    settings = TINY["model_settings"] if model == "recap" else {}
    shipped = run(model, settings, quick, beside=tuple(parts)) if is_sum else parts[-1]
    prepared = PreparedData(data)
    if model == "boosted":  # Of trees alone, an update changes nothing but the rates, which the state keeps.
        manifest = read_artifact_manifest(shipped / ARTIFACT)
        crosses = [tuple(cross) for cross in manifest["model"]["config"]["crosses"]]
        assert len(crosses[-1]) == 2, "pairs have a table of their own"
        state = TrainingState(entries=count_rates(prepared).entries(crosses))
        checksum = manifest["files"][WEIGHTS]["sha256"]
        write_state(shipped / ARTIFACT / TRAINING_STATE, state, checksum)
    before = Scorer.load(shipped)
    result = update(shipped, log.days[FITTED : FITTED + 3], out=tmp_path / "new", gate=OPEN)
    if model == "boosted":  # On so few rows, better rates need not make better trees.
        assert 0.01 < result.report.gate.churn < 1
        return
    assert result.shipped
    tomorrow = rows_of(log.days[FITTED + 3])
    losses = [
        evaluate_rows(scorer, FrameSource(tomorrow), quiet=True).calibrated.logloss
        for scorer in (before, Scorer.load(result.out))
    ]
    assert losses[1] < losses[0]
    assert prepared.layout.num_rows < read_artifact(result.out).encoder.layout.num_rows


DRIVER = """
import json, os, signal, sys
from pathlib import Path

import numpy.random, pydantic, safetensors.torch, torch.optim.adam  # the slow ones, before any fork

artifact, rows, out = sys.argv[1:4]


def work(stage):
    from recap_ctr.recipe import update as stages
    from recap_ctr.training.loop import Trainer

    def kill(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "rows":
        stages.Retraining = kill
    elif stage == "training":
        step = Trainer.step
        Trainer.step = lambda self: kill() if self.progress.step == 2 else step(self)
    elif stage == "state":
        stages.write_state = kill
    elif stage == "delta":
        stages.write_delta = kill
    elif stage == "shipping":
        stages.atomic_directory = kill
    elif stage == "tidying":
        stages.remove_directory = kill
    options = {"settings": {"passes": 1, "replay": 0.2}, "gate": json.loads(sys.argv[4])}
    stages.update(artifact, rows, out=out, delta=out + "-delta", **options)


for stage in ("rows", "training", "state", "delta", "shipping", "tidying", "none"):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(stage)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(stage, os.waitstatus_to_exitcode(status), Path(out).exists())
"""


def test_killed_in_each_stage_it_ends_with_the_same_bits(log: Log, tmp_path: Path) -> None:
    out = tmp_path / "new"
    arguments = [str(log.fit), str(log.days[FITTED]), str(out), json.dumps(OPEN)]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, check=True
    )
    *killed, finished = done.stdout.splitlines()
    stages = ("rows", "training", "state", "delta", "shipping", "tidying")
    assert killed == [f"{stage} -9 {stage == 'tidying'}" for stage in stages]
    assert finished == "none 0 True", done.stderr
    whole = tmp_path / "whole"
    update(log.fit, log.days[FITTED], out=whole, settings=ONCE, gate=OPEN, delta=tmp_path / "whole-delta")
    assert bits(out) == bits(whole)
    assert bits(tmp_path / "new-delta") == bits(tmp_path / "whole-delta")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "new-delta", "whole", "whole-delta"}


@pytest.mark.parametrize(("settings", "size"), [({}, 128), ({"batch_size": 200}, 200)])
def test_few_rows_come_in_small_batches(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], size: int
) -> None:
    """The recipe's 256 rows a step are for six days; a day would be over in a few steps."""
    asked: list[TrainConfig] = []

    def stop(_name: str, _config: object, training: TrainConfig, *_: object, **__: object) -> None:
        asked.append(training)
        pytest.fail("cut")

    monkeypatch.setattr(retrain, "train", stop)
    with pytest.raises(pytest.fail.Exception):
        update(log.fit, log.days[FITTED], out=tmp_path / "new", settings=settings)
    assert [training.batch_size for training in asked] == [size]


def test_an_output_of_something_else_stays(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted update has written may be replaced by the same update, and by no other."""
    out, delta = tmp_path / "new", tmp_path / "delta"
    with monkeypatch.context() as patch:
        patch.setattr(updates, "atomic_directory", lambda _: pytest.fail("cut"))
        with pytest.raises(pytest.fail.Exception):
            update(log.fit, log.days[FITTED], out=out, delta=delta, settings=ONCE, gate=OPEN)
    assert delta.exists() and not out.exists()
    with pytest.raises(InputError, match="delta exists"):
        update(log.fit, log.days[FITTED + 1], out=out, delta=delta, settings=ONCE, gate=OPEN)
    assert update(log.fit, log.days[FITTED], out=out, delta=delta, settings=ONCE, gate=OPEN).shipped
    with pytest.raises(InputError, match="new exists"):
        update(log.fit, log.days[FITTED], out=out, delta=delta, settings=ONCE, gate=OPEN)
