from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvatlas.router.replication.settings import SharedSettings
from tests.router.replication.backend import SharedIndex, make_settings
from tests.support.examples import some
from tests.support.redis_servers import Cluster, Server, any_program, program

BOTH = ["redis", "valkey"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Cluster of whatever kind there is."""
    made = Cluster(any_program())
    yield made
    made.close()


@pytest.fixture(
    scope="session", params=some((f"{kind} {shape}" for shape in ("server", "cluster") for kind in BOTH), 3)
)
def servers(request: pytest.FixtureRequest) -> Iterator[Server | Cluster]:
    """Redis and Valkey, alone and as a Cluster."""
    kind, shape = request.param.split()
    made = Server(program(kind)) if shape == "server" else Cluster(program(kind))
    yield made
    made.close()


@pytest.fixture
def open_index() -> Iterator[Callable[[SharedSettings], SharedIndex]]:
    """Makes indexes and closes them at the end."""
    opened: list[SharedIndex] = []

    def make(settings: SharedSettings) -> SharedIndex:
        opened.append(SharedIndex(settings))
        return opened[-1]

    yield make
    for index in opened:
        index.close()


@pytest.fixture
def index(real_server: Server, open_index: Callable[[SharedSettings], SharedIndex]) -> SharedIndex:
    """One writer and one reader on one server."""
    return open_index(make_settings(real_server.url))
