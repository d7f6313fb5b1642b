"""The contract of every index, over Redis and Valkey, one server and a Cluster, and the odd settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from router.index.base import Index
from router.replication import write_queue
from router.replication.settings import SharedSettings
from tests.router.replication.backend import SharedIndex, make_settings
from tests.support.examples import examples
from tests.support.index_contract import IndexContract, IndexMachine
from tests.support.redis_servers import Cluster, Server, any_program

Open = Callable[[SharedSettings], SharedIndex]


class TestSharedContract(IndexContract):
    @pytest.fixture
    def make(self, servers: Server | Cluster, open_index: Open) -> Callable[[], Index]:
        return lambda: open_index(make_settings(servers.url))


class TestWideCodesAndPartitions(IndexContract):
    @pytest.fixture
    def make(self, plain_server: Server, open_index: Open) -> Callable[[], Index]:
        return lambda: open_index(make_settings(plain_server.url, code_bytes=2, partitions=4))


class _OnServer(IndexMachine):
    """A machine on a server that lives as long as the module."""

    url = ""
    changes: dict[str, int] = {}  # noqa: RUF012  # hypothesis makes the classes its own way
    constants: dict[str, int] = {}  # noqa: RUF012

    def new_index(self) -> Index:
        self.patched = pytest.MonkeyPatch()
        for name, value in self.constants.items():
            self.patched.setattr(write_queue, name, value)
        self.shared = SharedIndex(make_settings(self.url, **self.changes))
        return self.shared

    def teardown(self) -> None:
        self.shared.close()
        self.patched.undo()


class NarrowMachine(_OnServer):
    """One byte of code, scripts of three blocks."""

    constants = {"SCRIPT_BLOCKS": 3}  # noqa: RUF012


class WideMachine(_OnServer):
    """Two bytes of code, four partitions."""

    changes = {"code_bytes": 2, "partitions": 4}  # noqa: RUF012


class OverflowingMachine(_OnServer):
    """No more than two changed blocks may wait: engines are mirrored anew all the time."""

    constants = {"TOUCHED_MAX": 2}  # noqa: RUF012


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    server = Server(any_program())
    _OnServer.url = server.url
    yield
    server.close()


_QUICK = settings(
    max_examples=examples(12), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNarrowMachine = NarrowMachine.TestCase
TestNarrowMachine.settings = _QUICK
TestWideMachine = WideMachine.TestCase
TestWideMachine.settings = _QUICK
TestOverflowingMachine = OverflowingMachine.TestCase
TestOverflowingMachine.settings = _QUICK
