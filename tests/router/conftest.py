"""Redis servers: virtual ones, and real ones for tests that are marked so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_servers import AnyServer, Server, VirtualServer, any_program
from tests.support.waiting import Chosen


@pytest.fixture(scope="session")
def real_server() -> Iterator[Server]:
    """One server of whatever kind there is, shared by tests: each uses a namespace of its own."""
    server = Server(any_program())
    yield server
    server.close()


@pytest.fixture
def plain_server(request: pytest.FixtureRequest) -> Iterator[AnyServer]:
    """One server: of the virtual network, or where the test is real ``real_server``."""
    if Chosen.real:
        yield request.getfixturevalue("real_server")
        return
    server = VirtualServer()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[AnyServer]:
    """A server to break, for one test."""
    made = Server(any_program()) if Chosen.real else VirtualServer()
    yield made
    made.close()
