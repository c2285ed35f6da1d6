"""The scoring thread survives whatever a request does to it, or its process ends."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import polars as pl
import pytest

from recap_ctr.data.encode import Encoded
from recap_ctr.data.few_rows import Columns
from recap_ctr.serve import batcher as batcher_module
from recap_ctr.serve.batcher import Answer, Batcher, clock
from recap_ctr.serve.columns import Table
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.scheduler import Costs
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import version_of

CONFIG = ServeConfig(artifact="")


class PanickingEngine(FakeEngine):
    """An engine that panics, as polars may, on rows of site a."""

    def encode_few(self, columns: Columns, height: int) -> Encoded | None:
        if "a" in columns["site"]:
            raise pl.exceptions.PanicException("out-of-range date")
        return super().encode_few(columns, height)


def make_batcher() -> Batcher:
    return Batcher(
        dial=True,
        batch_rows=512,
        max_requests=10,
        on_queue=lambda *_: None,
        on_batch=lambda _: None,
        log=lambda *_, **__: None,
    )


def void(_: object) -> None:
    """Ignore a result."""


def run(
    engine: FakeEngine, *sites: str, queue_sizes: list[tuple[int, int]] | None = None
) -> list[Answer | BaseException]:
    """Return the results of one request per site, first sent together, then one by one."""

    async def ask() -> list[Answer | BaseException]:
        batcher = Batcher(
            dial=True,
            batch_rows=512,
            max_requests=10,
            on_queue=lambda requests, rows: (
                None if queue_sizes is None else queue_sizes.append((requests, rows))
            ),
            on_batch=lambda _: None,
            log=lambda *_, **__: None,
        )
        version = version_of(engine, CONFIG)

        def score(site: str) -> Coroutine[Any, Any, Answer]:
            return batcher.score(Table(2, {"site": [site] * 2}), version, None, clock() + 20)

        together = await asyncio.gather(*map(score, sites), return_exceptions=True)
        alone = [(await asyncio.gather(score(site), return_exceptions=True))[0] for site in sites]
        batcher.close()
        return [*together, *alone]

    return asyncio.run(ask())


def test_a_panic_harms_only_its_own_request() -> None:
    results = run(PanickingEngine({}), "a", "b")
    assert [type(result) for result in results] == [Problem, Answer] * 2
    assert [result.status for result in results if isinstance(result, Problem)] == [500, 500]


def test_every_change_of_the_queue_is_reported() -> None:
    """The gauges can't be computed when they are read: any worker may answer, and each knows only its own queue."""
    sizes: list[tuple[int, int]] = []
    run(PanickingEngine({}), "a", "b", queue_sizes=sizes)
    assert sizes == [(1, 2), (2, 4), (1, 2), (0, 0), *[(1, 2), (0, 0)] * 2]


def test_after_slow_batches_and_five_idle_seconds_the_best_setting_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock moves by what the engine sleeps, which is ten times its measured cost, and by what the test says."""
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 10 * seconds

    monkeypatch.setattr(batcher_module, "clock", lambda: now)
    engine = FakeEngine({"row_us": 10_000}, sleep)
    costs = Costs((1, 512), tuple((0.01 * share, 5.12 * share) for share in engine.costs))

    async def ask() -> list[list[int]]:
        batcher = make_batcher()
        version = version_of(engine, CONFIG, costs=costs)

        async def settings_of(requests: int) -> list[int]:
            table = Table(1, {"site": ["a"]})
            return [(await batcher.score(table, version, None, now + 0.1)).setting for _ in range(requests)]

        nonlocal now
        burst = await settings_of(30)
        at_once = await settings_of(1)
        now += 5
        after_idle_seconds = await settings_of(1)
        batcher.close()
        return [burst, at_once, after_idle_seconds]

    burst, at_once, after_idle_seconds = asyncio.run(ask())
    assert burst[0] == 0 and burst[-1] > 0 and at_once[0] > 0
    assert after_idle_seconds == [0]


def test_a_dead_scoring_thread_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces the end of the process by an event."""
    events = []

    def panic(*_: object) -> int:
        raise pl.exceptions.PanicException("a fault of ours")

    monkeypatch.setattr(batcher_module, "choose_setting", panic)

    async def start() -> None:
        died = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die() -> None:
            loop.call_soon_threadsafe(died.set)

        batcher = Batcher(
            dial=True,
            batch_rows=512,
            max_requests=10,
            on_queue=lambda *_: None,
            on_batch=lambda _: None,
            log=lambda event, **_: events.append(event),
            on_death=die,
        )
        version = version_of(FakeEngine({}), CONFIG)
        request = asyncio.create_task(batcher.score(Table(1, {}), version, None, clock() + 20))
        await asyncio.wait_for(died.wait(), 20)
        request.cancel()

    asyncio.run(start())
    assert events == ["scoring thread died"]


def test_those_who_wait_are_refused_by_a_timer() -> None:
    """The scoring thread is held up, and comes back only after the second request has its answer."""
    go_on = threading.Event()
    engine = FakeEngine({"row_us": 1}, lambda _: void(go_on.wait(20)))

    async def ask() -> None:
        batcher = make_batcher()
        version = version_of(engine, CONFIG)
        table = Table(1, {"site": ["a"]})
        first = asyncio.create_task(batcher.score(table, version, None, clock() + 20))
        while not batcher.is_scoring:
            await asyncio.sleep(0.001)
        with pytest.raises(Problem) as refused:
            await batcher.score(table, version, None, clock() + 0.05)
        assert refused.value.status == 429 and not first.done()
        go_on.set()
        assert (await first).setting == 0
        batcher.close()

    asyncio.run(ask())


def test_bodies_on_their_way_count_as_waiting() -> None:
    async def ask() -> None:
        batcher = make_batcher()
        costs = Costs((1, 512), tuple((0.01, 0.01) for _ in FakeEngine.settings))
        version = version_of(FakeEngine({}), CONFIG, costs=costs)
        assert not batcher.is_overloaded(10_000, version, 0.05), "an idle server takes any request"
        with batcher.expecting(1_000, version):
            assert not batcher.is_overloaded(1, version, 1.0)
            assert batcher.is_overloaded(1, version, 0.05)
        assert not batcher.is_overloaded(1, version, 0.05)
        batcher.close()

    asyncio.run(ask())
