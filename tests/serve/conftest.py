"""A server with small limits, shared by all tests of a module."""

from collections.abc import Iterator

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.running_server import SMALL_SERVER, Address, serve_in_thread


@pytest.fixture(scope="module")
def fake() -> Iterator[Address]:
    with serve_in_thread(FakeEngine({}), SMALL_SERVER) as address:
        yield address
