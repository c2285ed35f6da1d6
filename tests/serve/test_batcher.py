"""The scoring thread outlives whatever a request does to it, or takes its process along."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import polars as pl
import pytest

from recap_ctr.data.encode import Encoded
from recap_ctr.serve.batcher import Answer, Batcher, clock
from recap_ctr.serve.codec import Table
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.problem import Problem
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import version_of

CONFIG = ServeConfig(artifact="")


class Panicking(FakeEngine):
    """It panics, as polars may, on rows of one site."""

    def encode(self, frame: pl.DataFrame) -> Encoded:
        if "a" in frame["site"]:
            raise pl.exceptions.PanicException("out-of-range date")
        return super().encode(frame)


def run(
    engine: FakeEngine, *sites: str, waiting: list[tuple[int, int]] | None = None
) -> list[Answer | BaseException]:
    """What becomes of one request for each site, sent together, then each alone."""

    async def ask() -> list[Answer | BaseException]:
        batcher = Batcher(
            dial=True,
            batch_rows=512,
            max_requests=10,
            waiting=lambda requests, rows: None if waiting is None else waiting.append((requests, rows)),
            done=lambda _: None,
            log=lambda *_, **__: None,
        )
        version = version_of(engine, CONFIG)

        def one(site: str) -> Coroutine[Any, Any, Answer]:
            return batcher.score(Table(2, {"site": [site] * 2}), version, None, clock() + 20)

        together = await asyncio.gather(*map(one, sites), return_exceptions=True)
        alone = [(await asyncio.gather(one(site), return_exceptions=True))[0] for site in sites]
        batcher.close()
        return [*together, *alone]

    return asyncio.run(ask())


def test_a_panic_harms_its_own_request_alone() -> None:
    found = run(Panicking({}), "a", "b")
    assert [type(one) for one in found] == [Problem, Answer] * 2
    assert [one.status for one in found if isinstance(one, Problem)] == [500, 500]


def test_who_waits_is_told_whenever_it_changes() -> None:
    """Not when somebody asks: that may be any worker, of which each knows its own line only."""
    told: list[tuple[int, int]] = []
    run(Panicking({}), "a", "b", waiting=told)
    assert told == [(1, 2), (2, 4), (1, 2), (0, 0), *[(1, 2), (0, 0)] * 2]


def test_a_dead_thread_takes_its_process_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it only says so."""
    said = []

    def broken(*_: object) -> None:
        raise pl.exceptions.PanicException("a fault of ours")

    monkeypatch.setattr(Batcher, "_take", broken)

    async def start() -> None:
        died = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die() -> None:
            loop.call_soon_threadsafe(died.set)

        Batcher(
            dial=True,
            batch_rows=512,
            max_requests=10,
            waiting=lambda *_: None,
            done=lambda _: None,
            log=lambda event, **_: said.append(event),
            died=die,
        )
        await asyncio.wait_for(died.wait(), 20)

    asyncio.run(start())
    assert said == ["scoring thread died"]
